"""The run directory: its safety, its names, the arbiter's lock and epoch, and the sweep."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvadmit.errors import ConfigError, UnsupportedError
from kvadmit.lease import LINE_BYTES_MAX
from kvadmit.rundir import (
    NAME_BYTES_MAX,
    SUN_PATH_BYTES_MAX,
    ArbiterLock,
    FileLock,
    RunDir,
    check_socket_path,
    new_incarnation,
)

WAIT_S = 20


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Name a short directory: pytest's own grows with the count of its runs, past what fits."""
    with tempfile.TemporaryDirectory(prefix="kva-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.open(str(tmp_path / "run"))


def names(run: RunDir) -> list[str]:
    return sorted(os.listdir(run.path))


class Holder:
    """A process that runs one line with `run` open, says "ready", and then only lives."""

    def __init__(self, run: RunDir, line: str) -> None:
        code = (
            "import sys, socket, signal\n"
            "from kvadmit.rundir import *\n"
            f"run = RunDir.open({str(run.path)!r})\n"
            f"{line}\n"
            "print('ready', flush=True)\n"
            "signal.pause()\n"
        )
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def hold(run: RunDir) -> Iterator[Callable[[str], Holder]]:
    made: list[Holder] = []

    def start(line: str) -> Holder:
        made.append(Holder(run, line))
        return made[-1]

    yield start
    for holder in made:
        holder.kill()


# --- the directory ---------------------------------------------------------------------------


def test_directory_is_made_private_and_found_again(tmp_path: Path) -> None:
    run = RunDir.open(str(tmp_path / "deep" / "run"))
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert run.note == ""
    assert RunDir.open(str(tmp_path / "deep" / "run")).path == run.path


def test_default_is_per_user_in_the_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr("tempfile.tempdir", short)
        assert RunDir.open().path == Path(short) / f"kvadmit-{os.getuid()}"


def test_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match=r"run_dir.*symlink.*set kvadmit.run_dir"):
        RunDir.open(str(tmp_path / "link"))


def test_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="no directory"):
        RunDir.open(str(tmp_path / "run"))


def test_directory_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can be made here"):
        RunDir.open(str(tmp_path / "file" / "run"))


def test_another_users_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(ConfigError, match=f"belongs to uid {other - 1}"):
        RunDir.open(str(tmp_path / "run"))


@pytest.mark.parametrize("mode", [0o750, 0o707, 0o777])
def test_directory_open_to_others_is_refused_and_left_as_it_is(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 700"):
        RunDir.open(str(path))
    assert path.stat().st_mode & 0o777 == mode


# --- names -----------------------------------------------------------------------------------


def test_long_directory_falls_back_to_a_short_one_and_says_so(tmp_path: Path) -> None:
    long = str(tmp_path / ("t" * 200) / "run")
    run = RunDir.open(long)
    try:
        assert long in run.note
        assert str(run.path) in run.note
        assert run.path.parent == Path("/tmp")
        assert RunDir.open(long).path == run.path, "all who ask for it meet there"
        assert RunDir.open(long + "2").path != run.path
        (run.path.parent / RunDir.open(long + "2").path.name).rmdir()
        bind_all(run)
    finally:
        shutil.rmtree(run.path)


def test_longest_directory_that_fits_can_bind_every_name(tmp_path: Path) -> None:
    room = SUN_PATH_BYTES_MAX - 1 - NAME_BYTES_MAX - len(os.fsencode(tmp_path)) - 1
    assert room > 0, "the test's own directory is too long to test this"
    fits = RunDir.open(str(tmp_path / ("d" * room)))
    assert fits.note == ""
    bind_all(fits)


def bind_all(run: RunDir) -> None:
    incarnation = "i" * 31
    paths = [
        run.agents_endpoint(incarnation).removeprefix("ipc://"),
        run.agents_lease(incarnation),
        run.arbiter_endpoint(9_999_999_999).removeprefix("ipc://"),
        run.arbiter_lease(9_999_999_999),
        run.instance_path(incarnation, "x" * 8),
        run.arbiter_lock_file(),
        run.epoch_file(),
    ]
    assert len(set(paths)) == len(paths)
    for path in paths:
        assert Path(path).parent == run.path
        assert len(Path(path).name) <= NAME_BYTES_MAX
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.bind(path)


def test_length_is_checked_before_bind() -> None:
    assert check_socket_path("/" + "x" * (SUN_PATH_BYTES_MAX - 1))
    with pytest.raises(ConfigError, match="107 bytes"):
        check_socket_path("/" + "x" * SUN_PATH_BYTES_MAX)
    with pytest.raises(ConfigError, match="107 bytes"):
        check_socket_path("/" + "ä" * 60)


def test_names_differ_by_instance_epoch_and_key(run: RunDir) -> None:
    other = RunDir(run.path, key="GPU-1,GPU-2")
    assert run.agents_lease("a") != run.agents_lease("b")
    assert run.arbiter_lease(1) != run.arbiter_lease(2)
    assert run.arbiter_lease(1) != other.arbiter_lease(1)


def test_incarnations_are_never_the_same() -> None:
    made = {new_incarnation("coordinator-of-a-very-long-name") for _ in range(2000)}
    assert len(made) == 2000
    assert max(map(len, made)) < LINE_BYTES_MAX // 2


# --- the arbiter's lock ------------------------------------------------------------------------


def test_two_holders_in_one_process_exclude_each_other(run: RunDir) -> None:
    first, second = ArbiterLock(run), ArbiterLock(run)
    assert first.try_acquire()
    assert not second.try_acquire()
    assert first.held
    assert not second.held
    assert second.holder() == os.getpid()
    first.release()
    first.release()
    assert second.try_acquire()
    second.release()


def test_locks_of_different_keys_are_apart(run: RunDir) -> None:
    locks = [ArbiterLock(RunDir(run.path, key=key)) for key in ("GPU-1", "GPU-2")]
    assert [lock.try_acquire() for lock in locks] == [True, True]
    for lock in locks:
        lock.release()


def test_same_key_excludes_across_directories(run: RunDir, tmp_path: Path) -> None:
    """Two run directories, the same devices: still one arbiter."""
    first = ArbiterLock(RunDir(run.path, key="GPU-7"))
    second = ArbiterLock(RunDir(RunDir.open(str(tmp_path / "run2")).path, key="GPU-7"))
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()


def test_killed_holder_frees_the_lock(run: RunDir, hold: Callable[[str], Holder]) -> None:
    holder = hold("lock = ArbiterLock(run); assert lock.try_acquire()")
    lock = ArbiterLock(run)
    assert not lock.try_acquire()
    assert lock.holder() == holder.process.pid
    holder.kill()
    assert lock.try_acquire()
    lock.release()


def test_a_taken_lock_is_seen_by_others_without_taking_it(
    run: RunDir, hold: Callable[[str], Holder]
) -> None:
    lock = ArbiterLock(run)
    assert not lock.is_taken()
    holder = hold("lock = ArbiterLock(run); assert lock.try_acquire()")
    assert [lock.is_taken() for _ in range(5)] == [True] * 5, "nobody accepts who looks"
    holder.kill()
    assert not lock.is_taken()
    assert lock.try_acquire()
    lock.release()


def test_deleted_directory_makes_no_second_arbiter(
    run: RunDir, hold: Callable[[str], Holder]
) -> None:
    holder = hold("lock = ArbiterLock(run); assert lock.try_acquire()")
    shutil.rmtree(run.path)
    lock = ArbiterLock(run)
    assert not lock.try_acquire()
    run.restore()
    assert not lock.try_acquire()
    holder.kill()
    shutil.rmtree(run.path)
    assert lock.try_acquire(), "and the next arbiter makes the directory again"
    assert run.path.stat().st_mode & 0o777 == 0o700
    lock.release()


def test_flock_alone_excludes(run: RunDir) -> None:
    """Another network namespace sees no abstract socket of ours."""
    elsewhere = FileLock(run.arbiter_lock_file())
    assert elsewhere.try_acquire()
    lock = ArbiterLock(run)
    assert not lock.try_acquire()
    elsewhere.release()
    assert lock.try_acquire(), "the refused attempt kept nothing"
    lock.release()


def test_forked_child_does_not_keep_the_lock(run: RunDir) -> None:
    lock = ArbiterLock(run)
    assert lock.try_acquire()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"held" if lock.held else b"free")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(read, 4) == b"free"
        other = ArbiterLock(run)
        assert not other.try_acquire(), "the parent still has it"
        lock.release()
        assert other.try_acquire(), "though the child lives"
        other.release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


# --- epoch ---------------------------------------------------------------------------------------


def test_epochs_grow_and_survive(run: RunDir) -> None:
    assert run.epoch() == 0
    assert [run.next_epoch() for _ in range(3)] == [1, 2, 3]
    assert RunDir.open(str(run.path)).epoch() == 3
    assert not [name for name in names(run) if name.endswith(".new")]


def test_epoch_passes_the_newest_seen_when_the_directory_was_deleted(run: RunDir) -> None:
    run.next_epoch()
    shutil.rmtree(run.path)
    assert run.epoch() == 0
    assert run.next_epoch(seen=41) == 42
    assert run.next_epoch(seen=3) == 43


@pytest.mark.parametrize("text", ["", "four\n", "\udcff"])
def test_unreadable_epoch_counts_as_none(run: RunDir, text: str) -> None:
    Path(run.epoch_file()).write_bytes(text.encode(errors="surrogateescape"))
    assert run.epoch() == 0
    assert run.next_epoch(seen=4) == 5


def test_failed_store_keeps_the_old_epoch(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.next_epoch()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        run.next_epoch()
    assert run.epoch() == 1


# --- sweep ---------------------------------------------------------------------------------------

CLAIM = """
claim = run.claim("victim")
for suffix in ("agents", "lease"):
    s = socket.socket(socket.AF_UNIX); s.bind(run.instance_path("victim", suffix)); s.listen()
    globals()[suffix] = s
open(run.instance_path("victim", "pool"), "w").close()
"""


def test_those_that_live_are_listed(run: RunDir, hold: Callable[[str], Holder]) -> None:
    holder = hold(CLAIM)
    mine = run.claim("mine.0")
    Path(run.instance_path("dead", "pool")).touch()
    (run.path / "i-notes.own").write_bytes(b"1 \xff")
    assert run.living() == {"mine.0", "victim"}
    holder.kill()
    run.sweep()
    assert run.living() == {"mine.0"}
    mine.release()
    assert run.living() == set()


def test_sweep_removes_a_killed_owners_files_only(
    run: RunDir, hold: Callable[[str], Holder]
) -> None:
    holder = hold(CLAIM)
    mine = run.claim("mine")
    Path(run.instance_path("mine", "pool")).touch()
    (run.path / "notes.txt").touch()
    full = names(run)
    assert len(full) == 7
    assert run.sweep() == []
    holder.kill()
    assert len(run.sweep()) == 4
    kept = [os.path.basename(run.instance_path("mine", s)) for s in ("own", "pool")]
    assert names(run) == sorted([*kept, "notes.txt"])
    assert run.sweep() == []
    mine.release()
    assert names(run) == ["notes.txt"]


def test_stopped_owner_is_alive(run: RunDir, hold: Callable[[str], Holder]) -> None:
    holder = hold(CLAIM)
    holder.process.send_signal(signal.SIGSTOP)
    assert run.sweep() == []
    assert len(names(run)) == 4


def test_listening_socket_without_owner_file_is_alive(
    run: RunDir, hold: Callable[[str], Holder]
) -> None:
    holder = hold(CLAIM)
    os.unlink(run.instance_path("victim", "own"))
    pool = os.path.basename(run.instance_path("victim", "pool"))
    assert run.sweep() == [pool], "nobody vouches for a plain file"
    holder.kill()
    assert len(run.sweep()) == 2
    assert names(run) == []


def test_socket_with_full_backlog_is_alive(run: RunDir) -> None:
    path = run.agents_lease("busy")
    streams = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2)]
    streams[0].bind(path)
    streams[0].listen(0)
    streams[1].connect(path)
    assert run.sweep() == []
    for stream in streams:
        stream.close()
    assert run.sweep() == [os.path.basename(path)]


def test_fifty_killed_owners_leave_nothing(run: RunDir) -> None:
    for number in range(50):
        for suffix in ("own", "lease"):
            Path(run.instance_path(f"dead-{number}", suffix)).touch()
    assert len(run.sweep()) == 100
    assert names(run) == []


def test_sweep_of_arbiters_keeps_the_newest_epoch_and_the_served(run: RunDir) -> None:
    assert [run.next_epoch() for _ in range(3)] == [1, 2, 3]
    other = RunDir(run.path, key="GPU-1")
    for epoch in (1, 3):
        Path(run.arbiter_lease(epoch)).touch()
    Path(other.arbiter_lease(1)).touch()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as served:
        served.bind(run.arbiter_lease(2))
        served.listen()
        assert run.sweep() == [os.path.basename(run.arbiter_lease(1))]
    assert run.sweep() == [os.path.basename(run.arbiter_lease(2))]
    kept = [run.arbiter_lease(3), other.arbiter_lease(1), run.epoch_file()]
    assert names(run) == sorted(map(os.path.basename, kept))


def test_claim_is_exclusive_and_survives_a_sweep_in_between(run: RunDir) -> None:
    claim = run.claim("one")
    with pytest.raises(UnsupportedError, match="already claimed"):
        run.claim("one")
    run.sweep()
    assert names(run) == [os.path.basename(run.instance_path("one", "own"))]
    claim.release()
    claim.release()
    run.claim("one").release()


def test_lock_taken_on_an_unlinked_file_is_taken_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that unlinks between open and flock must not leave a lock on nothing."""
    import fcntl

    path = run.instance_path("racing", "own")
    real = fcntl.flock
    calls: list[int] = []

    def flock(descriptor: int, operation: int) -> None:
        if not calls:
            os.unlink(path)
        calls.append(descriptor)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    claim = run.claim("racing")
    assert len(calls) == 2
    assert os.path.exists(path)
    claim.release()


def test_sweep_of_a_deleted_directory_finds_nothing(run: RunDir) -> None:
    shutil.rmtree(run.path)
    assert run.sweep() == []

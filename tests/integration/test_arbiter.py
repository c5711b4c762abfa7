"""The arbiter as the process that it is: lock, epoch, life span, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from integration.cluster import (
    HOST_POOL,
    WAIT_S,
    Engine,
    arbiter_pid,
    end_arbiter,
    run_directory,
    running,
    wait_ended,
    wait_until,
)
from kvadmit import cli, coordinator
from kvadmit.agent_channel import AgentPoller, BadPeer, BlockingDealer, LeaseLost, Ready, Received
from kvadmit.arbitration import LINGER_S
from kvadmit.errors import PeerLostError, PeerTimeoutError
from kvadmit.lease import LeaseLine
from kvadmit.messages import DeviceReading, Headroom, Hello, Message, Refused, StatusQuery, Welcome
from kvadmit.processes import find_processes, is_stopped
from kvadmit.rendezvous import ArbiterChannel, ask_status, log_path
from kvadmit.rundir import ArbiterLock, RunDir, new_incarnation


@contextmanager
def arbiter(run_dir: Path, *named: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run an arbiter as a child; yields once it is bound or has given way.

    `named`: how its command line names the directory; left out: as instances do.
    """
    read, write = os.pipe()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "kvadmit.arbiter_process",
            *(named or (f"--run-dir={run_dir}",)),
            f"--ready-fd={write}",
            "--foreground",
        ],
        pass_fds=(write,),
        stderr=subprocess.DEVNULL,
    )
    os.close(write)
    try:
        assert select.select([read], [], [], WAIT_S)[0]
        yield process
    finally:
        os.close(read)
        process.kill()
        process.wait()


class Peer:
    """A raw peer of the arbiter."""

    def __init__(self, run: RunDir, *, lease: bool = True) -> None:
        self.name = new_incarnation("peer")
        self.lease = LeaseLine.open(run.arbiter_lease(run.epoch()), self.name)
        name = self.name if lease else new_incarnation("stranger")
        self.dealer = BlockingDealer(run.arbiter_endpoint(run.epoch()), name, self.lease.server)
        self.poller = AgentPoller(self.dealer, self.lease)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.poller.close()
        self.dealer.close()
        self.lease.close()

    def ask(self, message: Message, wait_s: float = WAIT_S) -> list[Ready]:
        self.dealer.send(message)
        return self.poller.wait(wait_s)


def messages(ready: list[Ready]) -> list[Message]:
    return [found.message for found in ready if isinstance(found, Received)]


def hello(name: str, **more: Any) -> Hello:
    figures: dict[str, Any] = {"devices": {"host": HOST_POOL}, "start_bytes": {}}
    return Hello(revision=1, name=name, pid=os.getpid(), **(figures | more))


def test_at_most_one_and_the_second_gives_way_quietly(run_dir: Path) -> None:
    with arbiter(run_dir) as first:
        assert arbiter_pid(run_dir) == first.pid
        with arbiter(run_dir) as second:
            assert second.wait(WAIT_S) == 0
        assert first.poll() is None
        assert RunDir.open(str(run_dir)).epoch() == 1


def test_the_second_gives_way_before_it_has_imported_what_an_arbiter_needs(run_dir: Path) -> None:
    """All survivors start one at once, and imports are what their takeover waits for."""
    run = RunDir.open(str(run_dir))
    lock = ArbiterLock(run)
    assert lock.try_acquire()
    code = (
        "import sys; from kvadmit import arbiter_process; "
        f"assert arbiter_process.main(['--run-dir={run_dir}', '--foreground']) == 0; "
        "sys.exit(bool({'asyncio', 'zmq', 'uvloop', 'msgspec'} & sys.modules.keys()))"
    )
    try:
        assert subprocess.run([sys.executable, "-c", code], timeout=WAIT_S).returncode == 0
    finally:
        lock.release()


@pytest.mark.asyncio
async def test_while_another_has_the_lock_no_process_is_started_and_then_one_is(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.open(str(run_dir))
    lock = ArbiterLock(run)
    assert lock.try_acquire()
    started: list[float] = []
    start_process = ArbiterChannel._start_process

    def count(channel: ArbiterChannel, ready: int) -> subprocess.Popen[bytes]:
        started.append(time.monotonic())
        return start_process(channel, ready)

    monkeypatch.setattr(ArbiterChannel, "_start_process", count)
    found, tried = asyncio.Event(), asyncio.Semaphore(0)
    channel = ArbiterChannel(
        run,
        new_incarnation("peer"),
        reclaim_s=5.0,
        newest_epoch=lambda: 0,
        on_found=found.set,
        on_lost=lambda: None,
        on_message=lambda message: None,
        on_trouble=lambda error: tried.release(),
    )
    try:
        async with asyncio.timeout(WAIT_S):
            for _ in range(3):
                await tried.acquire()
            assert not started
            lock.release()
            await found.wait()
        assert len(started) == 1
    finally:
        lock.release()
        await channel.leave()


def test_it_ends_when_nobody_comes(run_dir: Path) -> None:
    with arbiter(run_dir) as process:
        assert process.wait(LINGER_S + WAIT_S) == 0
    left = {path.name.partition(".")[2] for path in run_dir.iterdir()}
    assert left == {"lock", "epoch"}


def test_the_files_of_the_dead_go_with_it(run_dir: Path) -> None:
    with arbiter(run_dir) as process:
        run = RunDir.open(str(run_dir))
        dead, living = (Path(run.instance_path(name, "own")) for name in ("dead", "living"))
        dead.touch()  # not locked: its owner is gone
        claim = run.claim("living")
        assert process.wait(LINGER_S + WAIT_S) == 0
        assert not dead.exists()
        assert living.exists()
        claim.release()


def test_it_ends_after_the_last_member_and_is_nobodys_child(run_dir: Path) -> None:
    engine = Engine(run_dir, "alpha")
    with running(engine):
        pid = arbiter_pid(run_dir)
        descriptor = os.pidfd_open(pid)
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert str(pid) not in children
    try:
        assert wait_ended(descriptor, LINGER_S + WAIT_S)
    finally:
        os.close(descriptor)
    assert not list(run_dir.glob("*.peers"))
    assert not list(run_dir.glob("*.lease"))


def test_another_one_serves_at_once_after_it_was_ended(run_dir: Path) -> None:
    engine = Engine(run_dir, "alpha")
    with running(engine):
        first = arbiter_pid(run_dir)
        os.kill(first, signal.SIGTERM)
        wait_until(lambda: engine.group["link"]["epoch"] == 2, "a second epoch")
        assert arbiter_pid(run_dir) not in (0, first)
        engine.pool.use(5)
        engine.pool.wait_resident(5)


def test_status_is_for_any_tool_with_a_lease(run_dir: Path) -> None:
    run = RunDir.open(str(run_dir))
    with pytest.raises(PeerLostError, match="none has run"):
        ask_status(run)
    engine = Engine(run_dir, "alpha")
    with running(engine):
        snapshot: Any = ask_status(run)
        assert snapshot["pid"] == arbiter_pid(run_dir)
        assert set(snapshot["instances"]) == {"alpha"}
        assert snapshot["devices"]["host"]["total_bytes"] == HOST_POOL
        pid = arbiter_pid(run_dir)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(PeerTimeoutError, match=rf"\(pid {pid}\): is stopped"):
                ask_status(run, 0.3)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert "alpha" in log_path(run).read_text()


def test_a_peer_without_a_lease_gets_nothing(run_dir: Path) -> None:
    with arbiter(run_dir):
        run = RunDir.open(str(run_dir))
        with Peer(run, lease=False) as stranger, Peer(run) as member:
            assert stranger.ask(hello("stranger"), 0.2) == []
            # The one with a lease is answered, after the other's message was read.
            assert any(isinstance(m, Welcome) for m in messages(member.ask(hello("member"))))
            instances: Any = ask_status(run)["instances"]
            assert set(instances) == {"member"}


READING = DeviceReading(device="host", free_bytes=0, total_bytes=0, sequence=1, at_s=0.0)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (Headroom(rank=0, reading=READING), "Headroom"),
        (hello("liar", start_bytes={"elsewhere": 1}), "liar names unknown devices"),
    ],
    ids=["wrong type", "impossible hello"],
)
def test_who_breaks_the_contract_is_told_and_dropped(
    run_dir: Path, broken: Message, named: str
) -> None:
    with arbiter(run_dir):
        run = RunDir.open(str(run_dir))
        with Peer(run) as peer:
            ready = peer.ask(broken)
            while not any(isinstance(found, LeaseLost) for found in ready):
                more = peer.poller.wait(WAIT_S)
                assert more, "the arbiter closes the lease line"
                ready += more
            (refused,) = messages(ready)
            assert isinstance(refused, Refused)
            assert refused.code == "protocol.remote"
            assert named in refused.reason
            assert not any(isinstance(found, BadPeer) for found in ready)
        with Peer(run) as good:
            assert messages(good.ask(StatusQuery()))


def test_a_deleted_run_directory_disturbs_nobody(run_dir: Path) -> None:
    engine = Engine(run_dir, "alpha")
    with running(engine):
        pid = arbiter_pid(run_dir)
        for path in run_dir.iterdir():
            path.unlink()
        run_dir.rmdir()
        engine.pool.use(9)
        engine.pool.wait_resident(9)
        # The lock is not a file alone: no second arbiter beside the first.
        with arbiter(run_dir) as second:
            assert second.wait(WAIT_S) == 0
        assert RunDir.open(str(run_dir)).epoch() == 0, "it gave way, and served nobody before"
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: engine.group["link"]["phase"] == "joined", "joined anew")
        wait_until(lambda: engine.group["link"]["epoch"] == 2, "above the epoch it knew")
        engine.pool.use(12)
        engine.pool.wait_resident(12)


def test_what_operators_see_after_a_deletion_and_how_they_mend_it(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(name: str) -> tuple[int, str]:
        code = cli.main([name, "--run-dir", str(run_dir)])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    engine = Engine(run_dir, "alpha")
    with running(engine):
        pid = arbiter_pid(run_dir)
        shutil.rmtree(run_dir)
        gone = f"kvadmit: arbiter: its run directory {run_dir} is not here: see kvadmit doctor\n"
        assert command("status") == (2, gone)
        code, text = command("doctor")
        assert code == 1
        assert f"fail  run directory: {run_dir} was deleted under its arbiter" in text
        assert not run_dir.exists(), "looking made it"
        with monkeypatch.context() as patch:
            patch.setattr(coordinator, "FIND_WAIT_S", 0.5)
            with pytest.raises(PeerTimeoutError, match="another process holds its lock"):
                Engine(run_dir, "early").start()
        # That start has made the directory again, and the arbiter is not in it.
        assert command("status") == (2, f"kvadmit: arbiter: none has run in {run_dir}\n")
        code, text = command("doctor")
        assert code == 1
        assert "fail  arbiter: an arbiter whose pid is not known holds the lock" in text
        assert "ps -ef | grep kvadmit.arbiter" in text
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: engine.group["link"]["epoch"] == 2, "joined another one")
        late = Engine(run_dir, "late")
        with running(late):
            code, text = command("status")
            assert code == 0
            assert [name in text for name in ("alpha", "late", "early")] == [True, True, False]
            assert f"ok    arbiter: pid {arbiter_pid(run_dir)}, epoch 2" in command("doctor")[1]


def test_the_operators_commands_find_who_uses_a_long_path(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = str(run_dir / ("t" * 200))
    short = RunDir.locate(long).path
    try:
        with running(Engine(long, "alpha")):
            assert short.exists()
            assert cli.main(["status", "--run-dir", long]) == 0
            assert "alpha" in capsys.readouterr().out
            cli.main(["doctor", "--run-dir", long])
            text = capsys.readouterr().out
            assert f"ok    run directory: {short}, private (run directory {short} is used" in text
            assert f"ok    arbiter: pid {arbiter_pid(short)}, epoch 1, 1 instances" in text
        end_arbiter(short)
    finally:
        shutil.rmtree(short)


def test_the_operators_commands_on_a_running_host(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Engine(run_dir, "alpha")
    with running(engine):
        assert cli.main(["status", "--run-dir", str(run_dir)]) == 0
        assert "alpha" in capsys.readouterr().out
        cli.main(["doctor", "--run-dir", str(run_dir)])
        text = capsys.readouterr().out
        assert f"ok    arbiter: pid {arbiter_pid(run_dir)}, epoch 1, 1 instances" in text
        assert "ok    files: none left" in text
        pid = arbiter_pid(run_dir)
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: is_stopped(pid), "stopped")
            assert cli.main(["doctor", "--run-dir", str(run_dir)]) == 1
            assert f"fail  arbiter: pid {pid} is stopped" in capsys.readouterr().out
        finally:
            os.kill(pid, signal.SIGCONT)
    (run_dir / "i-0123456789abcdef.own").touch()
    cli.main(["doctor", "--run-dir", str(run_dir)])
    assert "left by 1 dead instances" in capsys.readouterr().out


def test_doctor_names_an_arbiter_of_another_run_directory(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(where: Path) -> dict[str, str]:
        cli.main(["doctor", "--json", "--run-dir", str(where)])
        (one,) = (f for f in json.loads(capsys.readouterr().out) if f["check"] == "other arbiters")
        return dict(one)

    with run_directory() as elsewhere, run_directory() as nowhere:
        with running(Engine(run_dir, "alpha"), Engine(elsewhere, "beta")):
            mine = f"pid {arbiter_pid(run_dir)} serves {run_dir}"
            other = f"pid {arbiter_pid(elsewhere)} serves {elsewhere}"
            seen = found(run_dir)
            assert seen["state"] == "warn"
            assert other in seen["text"]
            assert f"beside {run_dir}, " in seen["text"]
            assert "no floor holds between their instances" in seen["text"]
            assert f"pid {arbiter_pid(run_dir)} " not in seen["text"]
            assert "same kvadmit.run_dir" in seen["cure"]
            assert mine in found(elsewhere)["text"]
            seen = found(nowhere)
            assert [mine in seen["text"], other in seen["text"]] == [True, True]
        end_arbiter(elsewhere)
        assert other not in found(run_dir)["text"]


def test_an_arbiter_stopped_before_it_has_bound_anything_is_named(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import os, signal; from kvadmit.rundir import ArbiterLock, RunDir; "
        f"lock = ArbiterLock(RunDir.open({str(run_dir)!r})); assert lock.try_acquire(); "
        "os.kill(os.getpid(), signal.SIGSTOP)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: is_stopped(process.pid), "stopped with the lock")
        assert cli.main(["doctor", "--run-dir", str(run_dir)]) == 1
        assert f"fail  arbiter: pid {process.pid} is stopped" in capsys.readouterr().out
    finally:
        process.kill()
        process.wait()


FLOOD = 60_000


def test_who_floods_the_arbiter_and_reads_nothing_hinders_nobody(run_dir: Path) -> None:
    with arbiter(run_dir) as process, Peer(RunDir.open(str(run_dir))) as other:
        answered: list[Message] = []
        memory = Path(f"/proc/{process.pid}/statm")
        before = int(memory.read_text().split()[1])

        def flood() -> None:
            with Peer(RunDir.open(str(run_dir))) as noisy:
                for _ in range(FLOOD):
                    noisy.dealer.send(StatusQuery())
                    while noisy.dealer.backlog():  # as fast as it is taken
                        noisy.dealer.flush()

        flooder = threading.Thread(target=flood)
        flooder.start()
        while flooder.is_alive():
            answered += messages(other.ask(StatusQuery()))
        flooder.join()
        assert len(answered) > 10, "others are answered meanwhile"
        grown = int(memory.read_text().split()[1]) - before
        assert grown * os.sysconf("SC_PAGE_SIZE") < 32 << 20, "answers nobody reads are dropped"
        assert arbiter_pid(run_dir) == process.pid


def test_doctor_takes_its_own_arbiter_for_no_other_one_however_it_was_started(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with arbiter(run_dir, "--run-dir", str(run_dir)):
        cli.main(["doctor", "--run-dir", str(run_dir)])
        assert "serves" not in capsys.readouterr().out
        with run_directory() as elsewhere:
            cli.main(["doctor", "--run-dir", str(elsewhere)])
            assert f"serves {run_dir}:" in capsys.readouterr().out


def test_doctor_takes_no_process_that_only_names_an_arbiter_for_one() -> None:
    words = ["kvadmit.arbiter_process", "--run-dir=/elsewhere"]
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "input()", *words], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        command = Path(f"/proc/{sleeper.pid}/cmdline")
        wait_until(lambda: words[1].encode() in command.read_bytes(), "its command line is there")
        assert sleeper.pid not in find_processes(words[0])
    finally:
        sleeper.communicate(b"\n")

"""The private run directory: where it is, what is in it, and who may be the arbiter.

Owns: creating and checking the directory, the names of all sockets and files in it, the
arbiter's lock and epoch, and the sweep of what dead owners left. Must not know: what the
sockets carry. Any thread; nothing here waits.

Names are hashes of fixed length, so that no instance or directory name can push a socket
over the kernel's limit (`sun_path`, unix(7)):

    i-<hash of incarnation>.<suffix>    everything of one instance; `.own` is locked while it lives
    a-<hash of key>-<epoch>.<suffix>    the sockets of the arbiter of one epoch
    a-<hash of key>.lock, .epoch        stay for ever: a few bytes
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvadmit.descriptors import close_after_fork, close_quietly
from kvadmit.errors import ConfigError, UnsupportedError

SUN_PATH_BYTES_MAX = 107
"""Longest socket path the kernel binds: `sun_path` is 108 bytes with its NUL, unix(7)."""

NAME_BYTES_MAX = 36
"""Longest file name made here (an arbiter's socket at a ten-digit epoch, and slack)."""

_INSTANCE_FILE = re.compile(r"i-[0-9a-f]{16}\.[a-z]{1,8}")
_ARBITER_FILE = re.compile(r"a-([0-9a-f]{8})-([0-9]{1,10})\.[a-z]{1,8}")


def new_incarnation(role: str) -> str:
    """Return a name for one life of a process or channel; never returned twice.

    `role` is a short word for people (`coordinator`, `agent-3`). 32 letters, digits, dots
    and dashes at most, as lease lines and channel identities demand.
    """
    stamp = time.time_ns() // 1_000_000
    return f"{role[:14]}.{stamp & 0xFFFFFFFF:08x}{os.urandom(4).hex()}"


def _hash(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def check_socket_path(path: str) -> str:
    """Return `path` if a unix socket can be bound there, else raise ConfigError."""
    if len(os.fsencode(path)) > SUN_PATH_BYTES_MAX:
        raise ConfigError(
            "run_dir", path, f"socket paths of at most {SUN_PATH_BYTES_MAX} bytes; set it shorter"
        )
    return path


class RunDir:
    """A run directory of this user: once opened it exists, with mode 0700, and is no symlink.

    `path` is absolute. `note` says, in one sentence, why `path` is not the directory that
    was asked for ("" when it is). `key` tells apart arbiters that share a directory and
    names them where the directory is not: by default the directory itself.
    """

    def __init__(self, path: Path, *, key: str = "", note: str = "") -> None:
        self.path = path
        self.note = note
        self.key = key or os.path.realpath(path)
        self._key_hash = _hash(self.key, 8)

    @classmethod
    def open(cls, configured: str | None = None, *, key: str = "") -> RunDir:
        """Create the run directory that `locate` names, or check the one that exists.

        Raises ConfigError, naming the cure, for a symlink, another user's directory, one that
        others may enter, or one that cannot be made.
        """
        run = cls.locate(configured, key=key)
        run.restore()
        return run

    @classmethod
    def locate(cls, configured: str | None = None, *, key: str = "") -> RunDir:
        """Name the run directory, which need not exist, and touch nothing.

        `configured` is the setting `run_dir`; None means `kvadmit-<uid>` in the temporary
        directory. If socket paths in it would be too long, a directory under /tmp takes its
        place, keyed by uid and the long path, so that everyone who asks for the same long
        path meets there.
        """
        default = os.path.join(tempfile.gettempdir(), f"kvadmit-{os.getuid()}")
        wanted = Path(os.path.abspath(configured or default))
        path, note = wanted, ""
        if len(os.fsencode(wanted)) + 1 + NAME_BYTES_MAX > SUN_PATH_BYTES_MAX:
            short = _hash(os.path.realpath(wanted), 12)
            # Checked by `open`, so that another user's is refused, not used.
            path = Path(f"/tmp/kvadmit-{os.getuid()}-{short}")  # noqa: S108
            note = (
                f"run directory {path} is used: sockets under {wanted} would have too long a path"
            )
        return cls(path, key=key, note=note)

    def instance_path(self, incarnation: str, suffix: str) -> str:
        """Name a file that is swept once the instance is dead. `suffix`: up to 8 letters."""
        name = f"i-{_hash(incarnation, 16)}.{suffix}"
        assert _INSTANCE_FILE.fullmatch(name), name
        return check_socket_path(str(self.path / name))

    def agents_endpoint(self, incarnation: str) -> str:
        """Name the ZeroMQ endpoint at which a coordinator receives its agents."""
        return f"ipc://{self.instance_path(incarnation, 'agents')}"

    def agents_lease(self, incarnation: str) -> str:
        """Name the socket path of a coordinator's lease lines."""
        return self.instance_path(incarnation, "lease")

    def arbiter_endpoint(self, epoch: int) -> str:
        """Name the ZeroMQ endpoint of the arbiter of `epoch`."""
        return f"ipc://{self._arbiter_path(f'-{epoch}.peers')}"

    def arbiter_lease(self, epoch: int) -> str:
        """Name the socket path of that arbiter's lease lines."""
        return self._arbiter_path(f"-{epoch}.lease")

    def arbiter_lock_file(self) -> str:
        """Name the file whose flock is one half of the arbiter's lock."""
        return self._arbiter_path(".lock")

    def epoch_file(self) -> str:
        """Name the file that holds the newest epoch in decimal."""
        return self._arbiter_path(".epoch")

    def _arbiter_path(self, tail: str) -> str:
        return check_socket_path(str(self.path / f"a-{self._key_hash}{tail}"))

    def restore(self) -> None:
        """Make the directory if it is not there, or again. Raises as `open` does."""
        _make_private(self.path)

    # --- epoch -------------------------------------------------------------------------

    def epoch(self) -> int:
        """Return the newest epoch stored here; 0 if none, or if the file is unreadable."""
        try:
            return int(Path(self.epoch_file()).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0

    def next_epoch(self, seen: int = 0) -> int:
        """Store and return an epoch above all earlier ones. Caller holds the arbiter's lock.

        `seen`: the newest epoch the caller knows of otherwise, which counts when the
        directory was deleted. On disk before it returns, so before anyone binds its name.
        """
        epoch = max(self.epoch(), seen) + 1
        self.restore()
        target = self.epoch_file()
        temporary = target + ".new"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, f"{epoch}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, target)
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return epoch

    # --- sweep -------------------------------------------------------------------------

    def sweep(self) -> list[str]:
        """Remove what dead owners left behind; return the names removed.

        An instance is dead when the lock on its `.own` file can be taken, or, if that file
        is gone, when its socket refuses connections. A pid is never asked: pids are reused.
        Sockets of an arbiter older than the stored epoch go when they refuse connections;
        those of the stored epoch stay, since their owner may be between epoch and bind.
        Names that are not ours are left alone.
        """
        removed: list[str] = []
        names = self._names()
        for stem in sorted(
            {name.split(".")[0] for name in names if _INSTANCE_FILE.fullmatch(name)}
        ):
            removed += self._sweep_instance(stem, names)
        newest = self.epoch()
        for name in names:
            match = _ARBITER_FILE.fullmatch(name)
            if match is None or match[1] != self._key_hash or int(match[2]) >= newest:
                continue
            if not _is_served(str(self.path / name)) and self._unlink(name):
                removed.append(name)
        return removed

    def _sweep_instance(self, stem: str, names: list[str]) -> list[str]:
        own = f"{stem}.own"
        mine = [name for name in names if name.startswith(f"{stem}.") and name != own]
        if own not in names:
            return [n for n in mine if not _is_served(str(self.path / n)) and self._unlink(n)]
        lock = FileLock(str(self.path / own))
        if not lock.try_acquire(create=False):
            return []
        try:  # under the lock, `.own` last: an owner starting meanwhile sees it vanish and retries
            return [name for name in (*mine, own) if self._unlink(name)]
        finally:
            lock.release()

    def living(self) -> set[str]:
        """Return the incarnations of instances that live: after a sweep, all that left a file."""
        found = set()
        for name in self._names():
            if name.endswith(".own") and _INSTANCE_FILE.fullmatch(name):
                with contextlib.suppress(OSError):
                    found.update((self.path / name).read_text(errors="replace").split()[1:])
        return found

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []

    def _unlink(self, name: str) -> bool:
        try:
            os.unlink(self.path / name)
        except FileNotFoundError:
            return False
        return True

    def claim(self, incarnation: str) -> InstanceClaim:
        """Take this instance's `.own` file: its names are safe from sweeps while it is held."""
        return InstanceClaim(self, incarnation)

    def files_of(self, incarnation: str) -> Iterator[str]:
        """Yield the names in the directory that belong to `incarnation`."""
        stem = f"i-{_hash(incarnation, 16)}."
        yield from (name for name in self._names() if name.startswith(stem))


class FileLock:
    """A flock on a file that exists under its name; released by close or by death."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = -1
        close_after_fork(self)

    @property
    def held(self) -> bool:
        return self._descriptor >= 0

    def try_acquire(self, *, create: bool = True) -> bool:
        """Take the lock if it is free. False: somebody has it (or no file and not `create`)."""
        assert not self.held, "taken twice by one holder"
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        while True:
            try:
                descriptor = os.open(self.path, flags, 0o600)
            except FileNotFoundError:
                if create:
                    raise
                return False
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            # A sweep may have unlinked the file between open and flock: then this is a lock
            # on nothing. Every retry means that somebody else made progress.
            if _is_at(descriptor, self.path):
                self._descriptor = descriptor
                return True
            os.close(descriptor)

    def write(self, text: str) -> None:
        """Replace the file's text: a note for people about who holds it."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def release(self) -> None:
        """Give the lock up. Harmless when it is not held."""
        self.close_inherited()

    def close_inherited(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        close_quietly(descriptor)


class InstanceClaim:
    """The held `.own` file of one instance. `release` removes the instance's files."""

    def __init__(self, run: RunDir, incarnation: str) -> None:
        self.incarnation = incarnation
        self._run = run
        self._lock = FileLock(run.instance_path(incarnation, "own"))
        if not self._lock.try_acquire():
            raise UnsupportedError(f"incarnation {incarnation} is already claimed in {run.path}")
        self._lock.write(f"{os.getpid()} {incarnation}\n")

    def release(self) -> None:
        """Remove every file of the instance and give the claim up. Idempotent."""
        if not self._lock.held:
            return
        own = os.path.basename(self._lock.path)
        for name in [n for n in self._run.files_of(self.incarnation) if n != own] + [own]:
            self._run._unlink(name)
        self._lock.release()


class ArbiterLock:
    """The right to be the arbiter of a run directory: at most one process has it.

    Two halves, both needed. The abstract listening socket, keyed by uid and `RunDir.key`,
    lives in no directory, so deleting files makes no second arbiter. The flock covers
    processes in another network namespace that share the directory. Both end with the
    process, however it ends; a forked child gives up its copies.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._name = f"\0kvadmit-{os.getuid()}-{_hash(run.key, 24)}"
        self._socket: socket.socket | None = None
        self._file = FileLock(run.arbiter_lock_file())
        close_after_fork(self)

    @property
    def held(self) -> bool:
        return self._socket is not None

    def try_acquire(self) -> bool:
        """Take the lock if it is free; never waits. Makes a deleted run directory again."""
        assert not self.held, "taken twice by one holder"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        taken = False
        try:
            listener.bind(self._name)
            listener.listen(1)
            self._run.restore()
            taken = self._file.try_acquire()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        finally:
            if not taken:
                listener.close()
        if taken:
            self._socket = listener
            self._file.write(f"{os.getpid()}\n")
        return taken

    def is_taken(self) -> bool:
        """Say whether a process of this network namespace is the arbiter. Touches no file."""
        return _is_served(self._name)

    def holder(self) -> int:
        """Return the pid that the holder wrote down, for messages only; 0 if unknown."""
        try:
            return int(Path(self._file.path).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0

    def release(self) -> None:
        """Give the lock up. Harmless when it is not held."""
        self._file.release()
        self.close_inherited()

    def close_inherited(self) -> None:
        listener, self._socket = self._socket, None
        if listener is not None:
            listener.close()


def _is_at(descriptor: int, path: str) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _is_served(path: str) -> bool:
    """Say whether a process listens on the socket at `path`; a plain file is not served."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # its backlog is full: stopped or busy, but alive
        except OSError:
            return False
        return True


def _make_private(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # whoever made it, it is checked below
            path.mkdir(mode=0o700)
        found = os.lstat(path)
    except OSError as error:
        raise ConfigError(
            "run_dir", str(path), f"a directory that can be made here ({error.strerror})"
        ) from error
    cure = "remove it or set kvadmit.run_dir to another"
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symlink" if stat.S_ISLNK(found.st_mode) else "no directory"
        raise ConfigError("run_dir", str(path), f"a real directory; this is {kind}: {cure}")
    if found.st_uid != os.getuid():
        raise ConfigError(
            "run_dir",
            str(path),
            f"a directory of uid {os.getuid()}; this one belongs to uid {found.st_uid}: {cure}",
        )
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(
            "run_dir", str(path), f"mode 0700, this one has {mode:04o}: chmod 700 {path}, or {cure}"
        )

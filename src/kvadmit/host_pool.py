"""The host pool: one memory budget for all processes of a host.

Owns: a file of slots, who books into which, and how the bytes of a dead process come back.
Must not know: what the bytes are used for.

The file is a header and one slot per process that booked. Byte locks on it, of the kind
that belongs to the open file and not to the process (OFD locks, fcntl(2)), do the rest:

- byte 0 is held for the microseconds of a booking, so the sum of all slots never exceeds
  the total;
- byte i is held by the owner of slot i for its whole life. The kernel drops it with the
  process, however that dies, so a slot whose byte is free belongs to nobody and is swept by
  the next booking. No signal handler, no pid check, no clean-up is needed for correctness.

The file is opened once and kept: removing it does not disturb those who have it open. A
newcomer would then start a second pool, which is why nobody removes it while any is alive.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from pathlib import Path

from kvadmit.descriptors import close_after_fork, close_quietly
from kvadmit.errors import CapacityError, ConfigError, DriverError, LocalProtocolError
from kvadmit.units import format_bytes

SLOTS = 255
LOCK_WAIT_S = 5.0
"""The lock is held for microseconds; a holder stopped by SIGSTOP just there is the worst case."""
LOCK_PAUSE_S = 0.0002

_MAGIC = b"kvadmit1"
_HEADER = struct.Struct("=8sQ")
_SLOT = struct.Struct("=QQ")
_FLOCK = struct.Struct("hhqqi0q")
"""`struct flock`: type, whence, start, length, pid (0 for OFD locks)."""


class HostPool:
    """This process's account in the pool; its bytes last as long as the process.

    Thread-safe. A forked child drops its copy and must open its own.
    """

    def __init__(self, path: str | Path, total_bytes: int) -> None:
        """Open the pool at `path`, or make it with `total_bytes` if nobody uses one there.

        Raises ConfigError when others share it with another total, CapacityError when all
        slots are taken, DriverError when the file or its lock cannot be had.
        """
        self.path = Path(path)
        self.total_bytes = total_bytes
        self._booked = 0
        self._slot = 0
        self._thread_lock = threading.Lock()
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _driver_error("open", error) from error
        try:
            with self._thread_lock:
                self._lock()
                try:
                    self._join()
                finally:
                    self._unlock()
        except BaseException:
            self._close_file()
            raise
        close_after_fork(self)

    @property
    def booked_bytes(self) -> int:
        """Bytes this process has booked."""
        return self._booked

    def free_bytes(self) -> int:
        """Return the bytes nobody alive has booked, now."""
        return self.total_bytes - sum(booked for _, booked in self.holders())

    def holders(self) -> list[tuple[int, int]]:
        """Return `(pid, bytes)` of every live process with bytes booked, this one included."""
        with self._thread_lock:
            self._lock()
            try:
                return [(pid, booked) for _, pid, booked in self._live_slots()]
            finally:
                self._unlock()

    def try_book(self, count: int) -> bool:
        """Book `count` more bytes, or book nothing and return False if they are not free."""
        with self._thread_lock:
            self._lock()
            try:
                others = sum(b for slot, _, b in self._live_slots() if slot != self._slot)
                if others + self._booked + count > self.total_bytes:
                    return False
                self._write_own(self._booked + count)
                return True
            finally:
                self._unlock()

    def unbook(self, count: int) -> None:
        """Give `count` booked bytes back. Call after the memory itself is gone."""
        with self._thread_lock:
            if count > self._booked:
                raise LocalProtocolError(f"unbook of {count} bytes, {self._booked} are booked")
            self._lock()
            try:
                self._write_own(self._booked - count)
            finally:
                self._unlock()

    def close(self) -> None:
        """Give everything back and leave the pool. Idempotent."""
        with self._thread_lock:
            if self._file < 0:
                return
            self._booked = 0
            # Closing drops our slot's byte; whoever books next sweeps what the slot says.
            self._close_file()

    def close_inherited(self) -> None:
        """Drop a forked child's copy, so that the slot dies with its owner alone."""
        self._close_file()

    # --- under the lock ------------------------------------------------------------------

    def _join(self) -> None:
        """Take a slot; start the pool anew when nobody is alive in it."""
        taken = [slot for slot in range(1, SLOTS + 1) if self._is_alive(slot)]
        if not taken:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, _HEADER.pack(_MAGIC, self.total_bytes), 0)
            os.ftruncate(self._file, _HEADER.size + SLOTS * _SLOT.size)
        magic, total = _HEADER.unpack(os.pread(self._file, _HEADER.size, 0).ljust(_HEADER.size))
        if magic != _MAGIC:
            raise ConfigError(
                "run_dir", str(self.path), "a directory whose host_pool file is of this release"
            )
        if total != self.total_bytes:
            raise ConfigError(
                "host_pool",
                f"{format_bytes(self.total_bytes)} ({self.total_bytes} bytes)",
                f"{format_bytes(total)} ({total} bytes), which the instances already running "
                f"share through {self.path}",
            )
        for slot in range(1, SLOTS + 1):
            if slot not in taken and self._set_lock(fcntl.F_WRLCK, slot):
                self._slot = slot
                self._write_own(0)
                return
        raise CapacityError(f"all {SLOTS} places of the host pool at {self.path} are taken")

    def _live_slots(self) -> list[tuple[int, int, int]]:
        """Return `(slot, pid, bytes)` of live owners; zero the slots of dead ones."""
        if self._file < 0:
            raise LocalProtocolError("the host pool is closed in this process")
        table = os.pread(self._file, SLOTS * _SLOT.size, _HEADER.size)
        live: list[tuple[int, int, int]] = []
        for index, (booked, pid) in enumerate(_SLOT.iter_unpack(table)):
            slot = index + 1
            if booked == 0:
                continue
            if slot == self._slot or self._is_alive(slot):
                live.append((slot, pid, booked))
            else:
                os.pwrite(self._file, _SLOT.pack(0, 0), _HEADER.size + index * _SLOT.size)
        return live

    def _write_own(self, booked: int) -> None:
        if self._file < 0:
            raise LocalProtocolError("the host pool is closed in this process")
        where = _HEADER.size + (self._slot - 1) * _SLOT.size
        os.pwrite(self._file, _SLOT.pack(booked, os.getpid()), where)
        self._booked = booked

    # --- locks ---------------------------------------------------------------------------

    def _lock(self) -> None:
        """Take byte 0, waiting at most LOCK_WAIT_S; raises DriverError after that.

        Tries again and again because the kernel's waiting form knows no deadline.
        """
        if self._file < 0:
            raise LocalProtocolError("the host pool is closed in this process")
        deadline = time.monotonic() + LOCK_WAIT_S
        while not self._set_lock(fcntl.F_WRLCK, 0):
            if time.monotonic() > deadline:
                raise DriverError(
                    "fcntl",
                    "host",
                    "ETIMEDOUT",
                    f"the host pool at {self.path} stayed locked for {LOCK_WAIT_S:.0f} s; is a "
                    "process that uses it stopped?",
                )
            time.sleep(LOCK_PAUSE_S)

    def _unlock(self) -> None:
        self._set_lock(fcntl.F_UNLCK, 0)

    def _set_lock(self, kind: int, byte: int) -> bool:
        """Return False if another open file holds that byte."""
        request = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise _driver_error("fcntl", error) from error
        return True

    def _is_alive(self, slot: int) -> bool:
        """Return whether another open file holds the slot's byte."""
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0)
        answer: bytes = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, request)
        kind: int = _FLOCK.unpack(answer)[0]
        return kind != fcntl.F_UNLCK

    def _close_file(self) -> None:
        descriptor, self._file = self._file, -1
        close_quietly(descriptor)


def _driver_error(call: str, error: OSError) -> DriverError:
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    return DriverError(call, "host", name, f"host pool: {error.strerror}")

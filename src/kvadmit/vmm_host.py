"""The host backend: real virtual memory of the CPU behind vLLM's KV buffer.

Owns: one rank's reservation, its memory file, and the state of every extent in them. Must
not know: who asked, other ranks, or what the bytes mean.

The reservation is addresses without access or memory (PROT_NONE, MAP_NORESERVE), so a touch
of an extent that is not committed ends the process instead of reading zeros. Handles are
pages of one memfd as large as the buffer, sparse, at the same offsets as in the buffer:
prepare allocates them, commit maps them over the reservation. A hole punched into the file
frees pages, and pages allocated anew come zeroed from the kernel, so nothing is ever fresh.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Literal

from kvadmit.descriptors import close_after_fork, close_quietly
from kvadmit.errors import DeviceOutOfMemoryError, DriverError, LocalProtocolError
from kvadmit.host_pool import HostPool
from kvadmit.units import align_up, format_bytes
from kvadmit.vmm import BatchResult, ExtentLayout
from kvadmit.vmm_states import ExtentStates, State

__all__ = ["GRANULE_BYTES", "HostAddressSpace", "HostPool"]

GRANULE_BYTES = mmap.PAGESIZE

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_FALLOC_FL_KEEP_SIZE = 0x01
_FALLOC_FL_PUNCH_HOLE = 0x02
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
"""Flags from the kernel's uapi headers; Python's mmap module lacks the underscored ones."""

# CDLL releases the GIL around each call, so the engine's thread runs on while we map.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.restype = ctypes.c_int
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class HostAddressSpace:
    """One rank's reservation on the host; see `vmm.AddressSpace` for what each call promises.

    Books every page in `pool`, which the caller owns and closes after this space.
    """

    granule_bytes = GRANULE_BYTES

    def __init__(self, layout: ExtentLayout, *, device: str, pool: HostPool) -> None:
        """Reserve addresses for the whole buffer; nothing is backed yet.

        Raises LocalProtocolError for a layout off the page grid, DriverError when the
        kernel has no addresses or no memory file to give.
        """
        layout.check_granule(GRANULE_BYTES)
        self.layout = layout
        self.device = device
        self._pool = pool
        self._states = ExtentStates(layout.extents)
        self._runs_mapped: dict[int, int] = {}
        """How many runs of a partial or leaving extent are mapped, from the first."""
        self._file = self._make_file()
        try:
            self._reservation: _Reservation | None = _Reservation(layout.buffer_bytes, device)
        except BaseException:
            close_quietly(self._file)
            raise
        self.address = self._reservation.address
        close_after_fork(self)

    def state(self, extent: int) -> State:
        """Return where `extent` stands."""
        return self._states[extent]

    def buffer(self) -> ctypes.Array[ctypes.c_ubyte]:
        """Return the whole buffer as bytes, exactly as long as the layout says.

        Takes the buffer protocol (`torch.frombuffer`, `memoryview`). Holds the address range
        as long as it lives, also after `close`; touching an extent that is not mapped ends
        the process.
        """
        if self._reservation is None:
            raise LocalProtocolError("the address space is closed")
        array = (ctypes.c_ubyte * self.layout.buffer_bytes).from_address(self.address)
        array._reservation = self._reservation  # type: ignore[attr-defined]
        return array

    def prepare(self, extents: Sequence[int]) -> BatchResult:
        """Book the budget and allocate the pages of all `extents`, or of none."""
        self._require(extents, "prepare")
        wanted = len(extents) * self.layout.extent_bytes
        if not self._pool.try_book(wanted):
            free, total = self.read()
            return BatchResult(
                step="create",
                error=DeviceOutOfMemoryError(
                    "prepare",
                    self.device,
                    "ENOMEM",
                    f"{format_bytes(wanted)} asked, {format_bytes(free)} of the host pool's "
                    f"{format_bytes(total)} free",
                ),
            )
        for position, extent in enumerate(extents):
            error = self._each_run(extent, self._allocate)
            if error is not None:
                for made in extents[: position + 1]:
                    self._each_run(made, self._punch)
                self._pool.unbook(wanted)
                return BatchResult(step="create", error=error)
        self._states.set_all(extents, "prepared")
        return BatchResult(done=tuple(extents))

    def commit(self, extents: Sequence[int]) -> BatchResult:
        """Map the pages of `extents` readable and writable; they are zero.

        Mapping and access are one call here, and the kernel has zeroed the pages.
        """
        self._require(extents, "commit")
        for position, extent in enumerate(extents):
            runs = self.layout.runs(extent)
            for index in range(self._runs_mapped.get(extent, 0), len(runs)):
                error = self._map(*runs[index])
                if error is not None:
                    # From the first map call on nothing is undone: it is finished later.
                    self._runs_mapped[extent] = index
                    self._states[extent] = "partial"
                    return BatchResult(
                        done=tuple(extents[:position]), partial=(extent,), step="map", error=error
                    )
            self._runs_mapped.pop(extent, None)
            self._states[extent] = "mapped"
        return BatchResult(done=tuple(extents))

    def abort(self, extents: Sequence[int]) -> BatchResult:
        """Free the pages of prepared extents and give the budget back."""
        self._require(extents, "abort")
        for position, extent in enumerate(extents):
            error = self._release(extent)
            if error is not None:
                return BatchResult(done=tuple(extents[:position]), step="release", error=error)
        return BatchResult(done=tuple(extents))

    def decommit(self, extents: Sequence[int]) -> BatchResult:
        """Close the addresses of `extents`, free their pages and give the budget back.

        An extent on which this fails is left for another decommit, not for a commit: some
        of its pages may hold old bytes.
        """
        self._require(extents, "decommit")
        for position, extent in enumerate(extents):
            step: Literal["unmap", "release"] = "unmap"
            self._states[extent] = "leaving"
            error = self._each_run(extent, self._unmap)
            if error is None:
                step = "release"
                error = self._release(extent)
            if error is not None:
                return BatchResult(
                    done=tuple(extents[:position]), partial=(extent,), step=step, error=error
                )
        return BatchResult(done=tuple(extents))

    has_fresh = False
    """Pages come zeroed from the kernel."""

    def zero_fresh(self, stream: int) -> None:
        """Do nothing: nothing is fresh."""

    def forget_fresh(self, extents: Sequence[int]) -> int:
        """Return 0: nothing is fresh."""
        return 0

    def read(self) -> tuple[int, int]:
        """Return free and total bytes of the host pool."""
        return self._pool.free_bytes(), self._pool.total_bytes

    def close(self) -> None:
        """Close every address, free every page and give the budget back. Idempotent.

        The address range itself goes with the last buffer taken from it, so that nothing
        else can come to lie under a tensor that is still referenced.
        """
        if self._reservation is None:
            return
        self._reservation.close_access()
        self._reservation = None
        close_quietly(self._file)
        self._file = -1
        held = self._states.held
        self._states.forget()
        self._runs_mapped.clear()
        if held:
            self._pool.unbook(held * self.layout.extent_bytes)

    def close_inherited(self) -> None:
        """Drop a forked child's copy of the memory file."""
        close_quietly(self._file)
        self._file = -1

    # --- one extent ----------------------------------------------------------------------

    def _require(self, extents: Sequence[int], call: str) -> None:
        if self._reservation is None:
            raise LocalProtocolError(f"{call}: the address space is closed")
        self._states.require(extents, call)

    def _each_run(
        self, extent: int, act: Callable[[int, int], DriverError | None]
    ) -> DriverError | None:
        for offset, length in self.layout.runs(extent):
            error = act(offset, length)
            if error is not None:
                return error
        return None

    def _release(self, extent: int) -> DriverError | None:
        """Free the pages of an extent no address leads to, then its budget.

        When this fails between two runs the extent is as good as before: its budget stays
        booked, and pages already freed come back, zeroed, with the first touch.
        """
        error = self._each_run(extent, self._punch)
        if error is not None:
            return error
        try:
            self._pool.unbook(self.layout.extent_bytes)
        except DriverError as locked:  # the pool's lock is held by a stopped process
            return locked
        self._states[extent] = "absent"
        self._runs_mapped.pop(extent, None)
        return None

    # --- one run of bytes ----------------------------------------------------------------

    def _make_file(self) -> int:
        try:
            file = os.memfd_create("kvadmit", os.MFD_CLOEXEC)
        except OSError as error:
            raise self._error("memfd_create", error.errno or 0) from error
        try:
            os.ftruncate(file, align_up(self.layout.buffer_bytes, GRANULE_BYTES))
        except OSError as error:
            close_quietly(file)
            raise self._error("ftruncate", error.errno or 0) from error
        return file

    def _allocate(self, offset: int, length: int) -> DriverError | None:
        return self._fallocate(0, offset, length)

    def _punch(self, offset: int, length: int) -> DriverError | None:
        return self._fallocate(_FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, length)

    def _fallocate(self, mode: int, offset: int, length: int) -> DriverError | None:
        while _libc.fallocate(self._file, mode, offset, length) != 0:
            number = ctypes.get_errno()
            if number != errno.EINTR:
                return self._error("fallocate", number)
        return None

    def _map(self, offset: int, length: int) -> DriverError | None:
        return self._remap(
            offset,
            length,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_SHARED | _MAP_FIXED,
            self._file,
        )

    def _unmap(self, offset: int, length: int) -> DriverError | None:
        return self._remap(offset, length, _PROT_NONE, _RESERVED | _MAP_FIXED, -1)

    def _remap(
        self, offset: int, length: int, access: int, flags: int, file: int
    ) -> DriverError | None:
        """Replace what lies at `offset`, in one call, so that no other mapping can slip in."""
        where = self.address + offset
        got = _libc.mmap(where, length, access, flags, file, offset if file >= 0 else 0)
        return None if got == where else self._error("mmap", ctypes.get_errno())

    def _error(self, call: str, number: int) -> DriverError:
        kind = DeviceOutOfMemoryError if number in (errno.ENOMEM, errno.ENOSPC) else DriverError
        name = errno.errorcode.get(number, str(number))
        return kind(call, self.device, name, os.strerror(number))


class _Reservation:
    """An address range; given back when neither its space nor any buffer refers to it."""

    def __init__(self, buffer_bytes: int, device: str) -> None:
        self._length = align_up(buffer_bytes, GRANULE_BYTES)
        got = _libc.mmap(None, self._length, _PROT_NONE, _RESERVED, -1, 0)
        if got is None or got == _MAP_FAILED:
            number = ctypes.get_errno()
            raise DriverError(
                "mmap",
                device,
                errno.errorcode.get(number, str(number)),
                f"no addresses for {format_bytes(self._length)}: {os.strerror(number)}",
            )
        self.address: int = got
        # Not at exit: threads may still be in the buffer then, and the kernel cleans up anyway.
        weakref.finalize(self, _libc.munmap, self.address, self._length).atexit = False

    def close_access(self) -> None:
        """Close every address of the range, whatever is mapped there."""
        flags = _RESERVED | _MAP_FIXED
        _libc.mmap(self.address, self._length, _PROT_NONE, flags, -1, 0)

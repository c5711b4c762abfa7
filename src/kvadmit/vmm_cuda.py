"""The CUDA backend: virtual memory of an NVIDIA GPU behind vLLM's KV buffer.

Owns: one rank's reservation on one device, the state of every extent in it, and what the driver
has to say about a device before anything is made on it. Must not know: who asked, other ranks,
or what the bytes mean. The driver calls themselves are in C (`_vmm_cuda.c`), a batch at a time.

A touch of an extent that is not committed is an illegal address to the GPU: it ends the process
(and, under MPS, may end its neighbours: NVIDIA's contract) instead of reading what is not there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvadmit.errors import (
    DeviceOutOfMemoryError,
    DriverError,
    LocalProtocolError,
    UnsupportedError,
)
from kvadmit.units import align_up, format_bytes
from kvadmit.vmm import BatchResult, ExtentLayout
from kvadmit.vmm_states import ExtentStates, State

if TYPE_CHECKING:
    from kvadmit import _vmm_cuda

LIBRARY = "libcuda.so.1"
"""The driver's library, which comes with the driver and not with any toolkit."""
OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY of the CUDA Driver API."""
INTERCEPTORS = ("libvgpu.so", "libcuda-control.so", "libcuda_hook.so")
"""Libraries that stand between a process and the driver to split a GPU (HAMi, GaiaGPU and kin).
What they say of free memory is not what the device has, and some fail in cuMemCreate."""


class CudaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver says of a device. `mps`: None when this driver cannot tell."""

    uuid: str
    name: str
    total_bytes: int
    granule_bytes: int
    driver_version: str
    mps: bool | None


def probe(
    ordinal: int,
    *,
    library: str = LIBRARY,
    maps: Path = Path("/proc/self/maps"),
    kernel: Path = Path("/proc/version"),
) -> CudaDevice:
    """Return what there is to know about a device, without making a context on it.

    `ordinal` counts as CUDA_VISIBLE_DEVICES says. Raises UnsupportedError, naming what is
    missing, where virtual memory cannot be managed; DriverError when the driver fails.
    """
    if "microsoft" in _text(kernel).lower():
        raise UnsupportedError(
            "CUDA under WSL: Windows moves GPU memory to and from main memory on its own, so "
            "nobody could say what is free; run on Linux"
        )
    calls = _extension()
    try:
        found = calls.describe(library, ordinal)
    except OSError as error:
        raise UnsupportedError(
            f"no NVIDIA driver: {error}. AMD's HIP is not supported; without a GPU use vLLM's "
            "CPU build"
        ) from error
    except calls.Failed as error:
        raise _driver_error(f"GPU {ordinal}", *error.args) from error
    hooked = [name for name in INTERCEPTORS if name in _text(maps)]
    if hooked:
        raise UnsupportedError(
            f"{hooked[0]} stands between this process and the driver: its figures are not the "
            "device's; run without it"
        )
    if not found["vmm"]:
        raise UnsupportedError(
            f"{found['name']}: this device has no virtual memory management (a vGPU profile "
            "without it, or a GPU before Pascal); give the machine the whole GPU"
        )
    version = found["driver_version"]
    return CudaDevice(
        uuid=_uuid_text(found["uuid"]),
        name=found["name"],
        total_bytes=found["total_bytes"],
        granule_bytes=found["granule_bytes"],
        driver_version=f"{version // 1000}.{version % 1000 // 10}",
        mps=None if found["mps"] < 0 else bool(found["mps"]),
    )


class CudaAddressSpace:
    """One rank's reservation on a device; see `vmm.AddressSpace` for what each call promises.

    Holds the device's primary context, the one PyTorch uses, from the start until `close`. Every
    call makes it current on its thread for as long as it lasts.
    """

    def __init__(self, layout: ExtentLayout, *, ordinal: int, library: str = LIBRARY) -> None:
        """Reserve addresses for the whole buffer; nothing is backed yet.

        Raises what `probe` raises, LocalProtocolError for a layout off the device's granules,
        DriverError when the driver has no addresses to give.
        """
        described = probe(ordinal, library=library)
        layout.check_granule(described.granule_bytes)
        self.layout = layout
        self.device = described.uuid
        self.granule_bytes = described.granule_bytes
        self.described = described
        self._calls = _extension()
        self._states = ExtentStates(layout.extents)
        self._fresh: set[int] = set()
        self._zeroing = threading.Lock()
        """Who has it may enqueue zeroes: what was forgotten under it is in no later call."""
        strips = tuple(
            (strip.base, strip.block_stride * layout.extent_blocks) for strip in layout.strips
        )
        try:
            self._space: _vmm_cuda.Space | None = self._calls.open_space(
                library,
                ordinal,
                align_up(layout.buffer_bytes, described.granule_bytes),
                layout.buffer_bytes,
                layout.extents,
                strips,
            )
        except self._calls.Failed as error:
            raise _driver_error(self.device, *error.args) from error
        self.address = self._space.address

    def state(self, extent: int) -> State:
        """Return where `extent` stands."""
        return self._states[extent]

    def dlpack(self) -> Any:
        """Return a DLPack capsule of the whole buffer: int8, exactly as long as the layout says.

        For `torch.utils.dlpack.from_dlpack`. The addresses stay reserved as long as a tensor
        over them lives, also after `close`.
        """
        return self._open("dlpack").dlpack()

    def prepare(self, extents: Sequence[int]) -> BatchResult:
        """Create the handles of all `extents`, or of none."""
        space = self._require(extents, "prepare")
        done, step, *reason = space.create(extents)
        if step or reason[1]:
            error = self._error(reason)
            if isinstance(error, DeviceOutOfMemoryError):
                wanted = len(extents) * self.layout.extent_bytes
                error = DeviceOutOfMemoryError(
                    error.call, self.device, error.name, f"{format_bytes(wanted)} asked"
                )
            return BatchResult(step=step, error=error)
        self._states.set_all(extents, "prepared")
        return BatchResult(done=tuple(extents[:done]))

    def commit(self, extents: Sequence[int]) -> BatchResult:
        """Map and allow access; what is done is fresh then."""
        space = self._require(extents, "commit")
        done, step, *reason = space.commit(extents)
        self._states.set_all(extents[:done], "mapped")
        self._fresh.update(extents[:done])
        if not reason[1]:
            return BatchResult(done=tuple(extents))
        if step in ("", "create"):  # no map call was made in the extent that failed
            return BatchResult(done=tuple(extents[:done]), step=step, error=self._error(reason))
        began = extents[done : done + 1]
        self._states.set_all(began, "partial")
        return BatchResult(
            done=tuple(extents[:done]), partial=tuple(began), step=step, error=self._error(reason)
        )

    def abort(self, extents: Sequence[int]) -> BatchResult:
        """Release the handles of prepared, never mapped extents."""
        space = self._require(extents, "abort")
        done, step, *reason = space.abort(extents)
        self._states.set_all(extents[:done], "absent")
        error = self._error(reason) if reason[1] else None
        return BatchResult(done=tuple(extents[:done]), step=step, error=error)

    def decommit(self, extents: Sequence[int]) -> BatchResult:
        """Unmap and release. An extent on which this fails is left for another decommit.

        Whoever shares the space with a thread that calls `zero_fresh` has forgotten the extents
        before and waited for the device since.
        """
        space = self._require(extents, "decommit")
        self._fresh.difference_update(extents)
        done, step, *reason = space.decommit(extents)
        self._states.set_all(extents[:done], "absent")
        if not reason[1]:
            return BatchResult(done=tuple(extents))
        left = extents[done : done + 1] if step else ()
        self._states.set_all(left, "leaving")
        return BatchResult(
            done=tuple(extents[:done]), partial=tuple(left), step=step, error=self._error(reason)
        )

    @property
    def has_fresh(self) -> bool:
        """Whether something was committed and not zeroed yet."""
        return bool(self._fresh)

    def zero_fresh(self, stream: int) -> None:
        """Enqueue zeroes for every fresh extent on `stream`, a CUstream; 0 is the default one."""
        space = self._open("zero_fresh")
        with self._zeroing:
            taken: list[int] = []
            while self._fresh:  # another thread's commit may add to it: one at a time
                taken.append(self._fresh.pop())
            try:
                space.zero(sorted(taken), stream)
            except self._calls.Failed as error:
                self._fresh.update(taken)
                raise _driver_error(self.device, *error.args) from error

    def forget_fresh(self, extents: Sequence[int]) -> int:
        """Have none of `extents` zeroed from now on; returns how many of them were fresh."""
        with self._zeroing:
            found = self._fresh.intersection(extents)  # a commit may add others meanwhile
            self._fresh -= found
            return len(found)

    def read(self) -> tuple[int, int]:
        """Return free and total bytes of the device as the driver shows them now."""
        try:
            return self._open("read").read()
        except self._calls.Failed as error:
            raise _driver_error(self.device, *error.args) from error

    def wait_device(self) -> None:
        """Wait until the device has finished all that is enqueued in this process.

        On a thread of its own: other calls go on beside it. Raises DriverError when the device
        is lost.
        """
        try:
            self._open("wait_device").wait_device()
        except self._calls.Failed as error:
            raise _driver_error(self.device, *error.args) from error

    def close(self) -> None:
        """Unmap and release everything; the addresses go with the last tensor. Idempotent."""
        if self._space is not None:
            self._space.close()
            self._space = None
            self._states.forget()
            self._fresh.clear()

    def _open(self, call: str) -> _vmm_cuda.Space:
        if self._space is None:
            raise LocalProtocolError(f"{call}: the address space is closed")
        return self._space

    def _require(self, extents: Sequence[int], call: str) -> _vmm_cuda.Space:
        space = self._open(call)
        self._states.require(extents, call)
        return space

    def _error(self, reason: Sequence[Any]) -> DriverError:
        return _driver_error(self.device, *reason)


def _driver_error(device: str, call: str, number: int, name: str, text: str) -> DriverError:
    kind = DeviceOutOfMemoryError if number == OUT_OF_MEMORY else DriverError
    return kind(call, device, name, text)


def _extension() -> Any:
    """Return the C extension; UnsupportedError when this installation has none."""
    try:
        from kvadmit import _vmm_cuda
    except ImportError as error:
        raise UnsupportedError(
            f"kvadmit was installed without its CUDA part ({error}): install gcc and reinstall, "
            "or install a wheel"
        ) from error
    return _vmm_cuda


def _uuid_text(uuid: bytes) -> str:
    """Return a device's UUID as nvidia-smi writes it."""
    digits = uuid.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

"""The memory driver seam: what a rank can do with its address range.

Owns: the `AddressSpace` protocol, the value each batch call returns, and the extent
layout (which bytes of the buffer belong to which extent). Must not know: how a backend
does it, who asked, or why.

Three things, never confused: a *reservation* (addresses), *handles* (physical memory) and
a *mapping* (handles behind addresses). prepare makes handles, commit maps them, abort
releases handles that were never mapped, decommit unmaps and releases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from kvadmit.errors import DriverError, LocalProtocolError


class Strip(msgspec.Struct, frozen=True):
    """An array of blocks inside the buffer: block i lies at `base + i * block_stride` bytes.

    A block-outermost layout has one strip, a layer-outermost one a strip per layer.
    """

    base: int
    block_stride: int


class ExtentLayout(msgspec.Struct, frozen=True):
    """Which bytes of one rank's buffer belong to extent k.

    Extent k is the blocks `[k * extent_blocks, (k + 1) * extent_blocks)`; in every strip
    that is one run of bytes.
    """

    buffer_bytes: int
    extents: int
    extent_blocks: int
    strips: tuple[Strip, ...]

    @property
    def extent_bytes(self) -> int:
        """Physical bytes behind one extent on this rank."""
        return sum(strip.block_stride for strip in self.strips) * self.extent_blocks

    def runs(self, extent: int) -> list[tuple[int, int]]:
        """Return the `(offset, length)` byte runs of `extent`, one per strip."""
        first = extent * self.extent_blocks
        return [
            (strip.base + first * strip.block_stride, strip.block_stride * self.extent_blocks)
            for strip in self.strips
        ]

    def check_granule(self, granule_bytes: int) -> None:
        """Raise LocalProtocolError unless every run starts and ends on a granule."""
        for strip in self.strips:
            run_bytes = strip.block_stride * self.extent_blocks
            if strip.base % granule_bytes or run_bytes % granule_bytes:
                raise LocalProtocolError(
                    f"strip at byte {strip.base} with {run_bytes} bytes per extent does not "
                    f"keep to granules of {granule_bytes} bytes"
                )


Step = Literal["", "create", "map", "access", "unmap", "release"]


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch call reached.

    `done`: extents that reached the end state, in the order given. `partial`: the extent on
    which a map (or unmap) call was already made when `error` struck, if any. Every other
    extent is as it was before the call. `step`: the driver step that failed.
    """

    done: tuple[int, ...] = ()
    partial: tuple[int, ...] = ()
    step: Step = ""
    error: DriverError | None = None


class AddressSpace(Protocol):
    """One rank's reservation and the physical memory behind parts of it.

    Every call takes extent numbers and releases the GIL around driver calls. Calling with an
    extent in the wrong state raises LocalProtocolError and changes nothing. The four batch calls
    and `read` block only for the driver, never for the engine's work on the device, and must be
    made from one thread at a time.

    What was committed since the engine's last step is *fresh*: its bytes are not zero yet. The
    engine's thread zeroes it, on the stream of the next step, before it enqueues that step, the
    first that can use it. `has_fresh` and `zero_fresh` are for that thread, beside the calls of
    the other.
    """

    device: str
    granule_bytes: int
    layout: ExtentLayout
    address: int

    @property
    def has_fresh(self) -> bool:
        """Whether something was committed and not zeroed yet."""
        ...

    def prepare(self, extents: Sequence[int]) -> BatchResult:
        """Create the handles of all `extents` or, on any error, of none."""
        ...

    def commit(self, extents: Sequence[int]) -> BatchResult:
        """Map and allow access, extent by extent; on error stop and undo nothing.

        Accepts prepared extents and ones left partial by an earlier commit, which are
        finished from where they stand.
        """
        ...

    def abort(self, extents: Sequence[int]) -> BatchResult:
        """Release the handles of prepared, never mapped extents."""
        ...

    def decommit(self, extents: Sequence[int]) -> BatchResult:
        """Unmap and release mapped or partial extents.

        The caller has waited for the fence, and has forgotten what may be fresh before that wait.
        """
        ...

    def zero_fresh(self, stream: int) -> None:
        """Enqueue zeroes for every fresh extent on `stream`, a number of the driver's.

        Waits at most for room in the driver's queue, as any launch of this thread does. Raises
        DriverError; all is fresh as before then.
        """
        ...

    def forget_fresh(self, extents: Sequence[int]) -> int:
        """Have none of `extents` zeroed from now on; returns how many of them were fresh.

        For whoever is about to decommit them, who waits for the device after it: zeroes that were
        enqueued before are not undone. Any thread; waits for a `zero_fresh` under way.
        """
        ...

    def read(self) -> tuple[int, int]:
        """Return `(free_bytes, total_bytes)` of the device as the driver shows them now."""
        ...

    def close(self) -> None:
        """Release every handle and the reservation. Idempotent."""
        ...

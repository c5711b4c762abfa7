"""An address space made of arithmetic, which records its calls and fails on request.

Owns: the `AddressSpace` contract without memory: states, budget, what is zero. Must not
know: any backend. It passes the same conformance suite as the real drivers, so a test that
uses it says something about them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from kvadmit.errors import (
    DeviceOutOfMemoryError,
    DriverError,
    InvariantViolation,
    LocalProtocolError,
)
from kvadmit.vmm import BatchResult, ExtentLayout, Step

State = Literal["absent", "prepared", "partial", "mapped", "leaving"]


class MemoryBudget:
    """A device's memory, shared by the spaces of one test."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.booked_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes no space has booked."""
        return self.total_bytes - self.booked_bytes

    def try_book(self, count: int) -> bool:
        """Book `count` bytes if they are free."""
        if count > self.free_bytes:
            return False
        self.booked_bytes += count
        return True

    def unbook(self, count: int) -> None:
        """Give `count` bytes back; more than are booked is a bug of the space."""
        if count > self.booked_bytes:
            raise InvariantViolation("budget", f"{count} of {self.booked_bytes} bytes unbooked")
        self.booked_bytes -= count


class _Fault(msgspec.Struct):
    at: int
    for_good: bool
    error: DriverError


class _Extent(msgspec.Struct):
    state: State = "absent"
    mapped: int = 0
    """Runs mapped, from the first."""
    access: bool = False
    dirty: bool = False
    """Written since it was last zeroed. New memory counts: no driver promises zeros."""


class RecordingSpace:
    """An `AddressSpace` that only keeps account; see `vmm` for what each call promises.

    `calls` lists what was asked, as `(call, extents)`, in order. Steps are counted as a
    driver would see them: create, map and unmap once per run of an extent, access and release
    once per extent.
    """

    def __init__(
        self,
        layout: ExtentLayout,
        *,
        budget: MemoryBudget,
        device: str = "fake:0",
        granule_bytes: int = 4096,
        address: int = 1 << 40,
    ) -> None:
        layout.check_granule(granule_bytes)
        self.layout = layout
        self.device = device
        self.granule_bytes = granule_bytes
        self.address = address
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.steps: Counter[Step] = Counter()
        self.closed = False
        self._budget = budget
        self._extents = [_Extent() for _ in range(layout.extents)]
        self._runs = len(layout.strips)
        self._faults: dict[Step, _Fault] = {}
        self._fresh: set[int] = set()

    # --- for the test ----------------------------------------------------------------------

    def fail(
        self, step: Step, nth: int = 1, *, for_good: bool = False, error: DriverError | None = None
    ) -> None:
        """Fail the `nth` call of `step` from now, once, or that one and all later ones."""
        self._faults[step] = _Fault(
            at=self.steps[step] + nth,
            for_good=for_good,
            error=error or DriverError(step, self.device, "FAKE_ERROR", f"told to fail {step}"),
        )

    def heal(self) -> None:
        """Forget every fault not yet met."""
        self._faults.clear()

    def state(self, extent: int) -> State:
        """Return where `extent` stands."""
        return self._extents[extent].state

    def write(self, extent: int) -> None:
        """Write to `extent` as a kernel would; a stray access raises InvariantViolation."""
        self._touch(extent).dirty = True

    def is_zero(self, extent: int) -> bool:
        """Read `extent`; a stray access raises InvariantViolation."""
        return not self._touch(extent).dirty

    # --- AddressSpace ----------------------------------------------------------------------

    def prepare(self, extents: Sequence[int]) -> BatchResult:
        """Create the handles of all `extents` or, on any error, of none."""
        self._begin("prepare", extents, ("absent",))
        wanted = len(extents) * self.layout.extent_bytes
        if not self._budget.try_book(wanted):
            text = f"{wanted} bytes asked, {self._budget.free_bytes} free"
            out_of_memory = DeviceOutOfMemoryError("prepare", self.device, "FAKE_NO_MEMORY", text)
            return BatchResult(step="create", error=out_of_memory)
        for extent in extents:
            error = self._step("create", self._runs)
            if error is not None:
                for made in extents:
                    self._extents[made] = _Extent()
                self._budget.unbook(wanted)
                return BatchResult(step="create", error=error)
            self._extents[extent] = _Extent(state="prepared", dirty=True)
        return BatchResult(done=tuple(extents))

    def commit(self, extents: Sequence[int]) -> BatchResult:
        """Map and allow access, extent by extent; on error stop and undo nothing."""
        self._begin("commit", extents, ("prepared", "partial"))
        for position, extent in enumerate(extents):
            step, error = self._commit_one(self._extents[extent])
            if error is not None:
                return BatchResult(
                    done=tuple(extents[:position]), partial=(extent,), step=step, error=error
                )
            self._fresh.add(extent)
        return BatchResult(done=tuple(extents))

    def abort(self, extents: Sequence[int]) -> BatchResult:
        """Release the handles of prepared, never mapped extents."""
        self._begin("abort", extents, ("prepared",))
        for position, extent in enumerate(extents):
            error = self._release(extent)
            if error is not None:
                return BatchResult(done=tuple(extents[:position]), step="release", error=error)
        return BatchResult(done=tuple(extents))

    def decommit(self, extents: Sequence[int]) -> BatchResult:
        """Unmap and release mapped or partial extents."""
        self._begin("decommit", extents, ("mapped", "partial", "leaving"))
        self.forget_fresh(extents)
        for position, extent in enumerate(extents):
            step: Step = "unmap"
            error = self._unmap(self._extents[extent])
            if error is None:
                step = "release"
                error = self._release(extent)
            if error is not None:
                return BatchResult(
                    done=tuple(extents[:position]), partial=(extent,), step=step, error=error
                )
        return BatchResult(done=tuple(extents))

    @property
    def has_fresh(self) -> bool:
        """Whether something was committed and not zeroed yet."""
        return bool(self._fresh)

    def zero_fresh(self, stream: int) -> None:
        """Zero every fresh extent."""
        while self._fresh:
            self._touch(self._fresh.pop()).dirty = False

    def forget_fresh(self, extents: Sequence[int]) -> int:
        """Have none of `extents` zeroed from now on; returns how many of them were fresh."""
        found = self._fresh.intersection(extents)
        self._fresh -= found
        return len(found)

    def read(self) -> tuple[int, int]:
        """Return free and total bytes of the budget."""
        return self._budget.free_bytes, self._budget.total_bytes

    def close(self) -> None:
        """Release everything. Idempotent."""
        if self.closed:
            return
        self.calls.append(("close", ()))
        self.closed = True
        held = sum(extent.state != "absent" for extent in self._extents)
        self._budget.unbook(held * self.layout.extent_bytes)
        self._extents = [_Extent() for _ in range(self.layout.extents)]
        self._fresh.clear()

    # --- inside ----------------------------------------------------------------------------

    def _begin(self, call: str, extents: Sequence[int], allowed: tuple[State, ...]) -> None:
        """Record the call; raise LocalProtocolError unless every extent may take it."""
        self.calls.append((call, tuple(extents)))
        if self.closed:
            raise LocalProtocolError(f"{call}: the address space is closed")
        if len(set(extents)) != len(extents):
            raise LocalProtocolError(f"{call}: an extent is named twice in {list(extents)}")
        for extent in extents:
            if not 0 <= extent < self.layout.extents:
                raise LocalProtocolError(f"{call}: no extent {extent} of {self.layout.extents}")
            if self._extents[extent].state not in allowed:
                raise LocalProtocolError(f"{call}: extent {extent} is {self.state(extent)}")

    def _step(self, step: Step, times: int = 1) -> DriverError | None:
        """Count `times` driver calls; stop at the first that is to fail."""
        for _ in range(times):
            self.steps[step] += 1
            fault = self._faults.get(step)
            if fault is None or self.steps[step] < fault.at:
                continue
            if not fault.for_good:
                del self._faults[step]
            return fault.error
        return None

    def _commit_one(self, extent: _Extent) -> tuple[Step, DriverError | None]:
        while extent.mapped < self._runs:
            error = self._step("map")
            if error is not None:
                extent.state = "partial"
                return "map", error
            extent.mapped += 1
        if not extent.access:
            error = self._step("access")
            if error is not None:
                extent.state = "partial"
                return "access", error
            extent.access = True
        extent.state = "mapped"
        return "", None

    def _unmap(self, extent: _Extent) -> DriverError | None:
        extent.state = "leaving"
        extent.access = False
        while extent.mapped:
            error = self._step("unmap")
            if error is not None:
                return error
            extent.mapped -= 1
        return None

    def _release(self, number: int) -> DriverError | None:
        error = self._step("release")
        if error is not None:
            return error
        self._extents[number] = _Extent()
        self._budget.unbook(self.layout.extent_bytes)
        return None

    def _touch(self, number: int) -> _Extent:
        extent = self._extents[number]
        if extent.state != "mapped":
            raise InvariantViolation("stray access", f"extent {number} is {extent.state}")
        return extent

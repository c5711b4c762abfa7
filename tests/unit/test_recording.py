"""The arithmetic driver: the conformance suite, and failing when told to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvadmit.errors import DriverError, InvariantViolation
from kvadmit.testing.recording import MemoryBudget, RecordingSpace
from kvadmit.vmm import AddressSpace, Step
from unit.vmm_conformance import (
    BUDGET_EXTENTS,
    AddressSpaceConformance,
    Rig,
    done,
    two_strip_layout,
)

GRANULE = 4096


class RecordingRig(Rig):
    def __init__(self) -> None:
        self.layout = two_strip_layout(GRANULE)
        self.budget = MemoryBudget(BUDGET_EXTENTS * self.layout.extent_bytes)

    def make(self) -> RecordingSpace:
        return RecordingSpace(self.layout, budget=self.budget, granule_bytes=GRANULE)

    def write(self, space: AddressSpace, extent: int) -> None:
        assert isinstance(space, RecordingSpace)
        space.write(extent)

    def is_zero(self, space: AddressSpace, extent: int) -> bool:
        assert isinstance(space, RecordingSpace)
        return space.is_zero(extent)

    def close(self) -> None:
        assert self.budget.booked_bytes == 0


class TestConformance(AddressSpaceConformance):
    def new_rig(self, directory: Path) -> Rig:
        return RecordingRig()


@pytest.fixture
def space() -> Iterator[RecordingSpace]:
    rig = RecordingRig()
    space = rig.make()
    yield space
    space.close()
    rig.close()


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_prepare_undoes_all_when_any_create_fails(space: RecordingSpace, nth: int) -> None:
    space.fail("create", nth)
    result = space.prepare([0, 1])
    assert (result.done, result.partial, result.step) == ((), (), "create")
    assert isinstance(result.error, DriverError)
    assert space.read()[0] == space.read()[1]
    assert space.prepare([0, 1]) == done(0, 1)


@pytest.mark.parametrize(
    ("step", "nth", "finished"),
    [
        ("map", 1, ()),
        ("map", 2, ()),
        ("map", 3, (0,)),
        ("map", 4, (0,)),
        ("access", 1, ()),
        ("access", 2, (0,)),
    ],
)
def test_a_failed_commit_undoes_nothing_and_is_finished_later(
    space: RecordingSpace, step: Step, nth: int, finished: tuple[int, ...]
) -> None:
    space.prepare([0, 1, 2])
    space.fail(step, nth)
    result = space.commit([0, 1, 2])
    stopped = len(finished)
    assert (result.done, result.partial, result.step) == (finished, (stopped,), step)
    states = [space.state(extent) for extent in (0, 1, 2)]
    assert states == ["mapped"] * stopped + ["partial"] + ["prepared"] * (2 - stopped)
    rest = tuple(range(stopped, 3))
    assert space.commit(rest) == done(*rest)
    assert space.steps["map"] == 6 + (step == "map")
    space.zero_fresh(0)
    assert all(space.is_zero(extent) for extent in (0, 1, 2))


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("step", ["map", "access"])
def test_a_partial_extent_can_be_given_up(space: RecordingSpace, step: Step, nth: int) -> None:
    space.prepare([0, 1])
    space.fail(step, nth)
    stopped = space.commit([0, 1]).partial
    assert space.decommit(stopped) == done(*stopped)
    assert space.state(stopped[0]) == "absent"


@pytest.mark.parametrize("step", ["unmap", "release"])
def test_a_failed_decommit_is_repeated(space: RecordingSpace, step: Step) -> None:
    space.prepare([0, 1])
    space.commit([0, 1])
    space.fail(step)
    result = space.decommit([0, 1])
    assert (result.done, result.partial, result.step) == ((), (0,), step)
    assert space.state(1) == "mapped"
    assert space.decommit([0, 1]) == done(0, 1)


def test_a_failed_abort_leaves_the_extent_prepared(space: RecordingSpace) -> None:
    space.prepare([0, 1])
    space.fail("release", 2)
    result = space.abort([0, 1])
    assert (result.done, result.partial, result.step) == ((0,), (), "release")
    assert space.commit([1]) == done(1)


def test_failing_for_good_ends_when_healed(space: RecordingSpace) -> None:
    space.prepare([0])
    space.fail("map", for_good=True)
    for _ in range(3):
        assert space.commit([0]).partial == (0,)
    space.heal()
    assert space.commit([0]) == done(0)


def test_the_error_given_is_the_error_returned(space: RecordingSpace) -> None:
    error = DriverError("cuMemMap", "fake:0", "CUDA_ERROR_INVALID_VALUE")
    space.prepare([0])
    space.fail("map", error=error)
    assert space.commit([0]).error is error


def test_calls_are_recorded_in_order(space: RecordingSpace) -> None:
    space.prepare([2, 5])
    space.commit([5])
    space.abort([2])
    assert space.calls == [("prepare", (2, 5)), ("commit", (5,)), ("abort", (2,))]


@pytest.mark.parametrize("prepared", [False, True])
def test_a_stray_access_is_a_violation(space: RecordingSpace, prepared: bool) -> None:
    if prepared:
        space.prepare([0])
    with pytest.raises(InvariantViolation, match="stray"):
        space.write(0)
    with pytest.raises(InvariantViolation, match="stray"):
        space.is_zero(0)

"""One suite for every memory driver: what `vmm.AddressSpace` promises, as tests.

A driver's test file subclasses `AddressSpaceConformance` and gives a `Rig`: how to make a
space on a budget shared with others, and how to touch an extent's bytes.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvadmit.errors import DeviceOutOfMemoryError, LocalProtocolError
from kvadmit.geometry import RankBuffer
from kvadmit.vmm import AddressSpace, BatchResult, ExtentLayout

EXTENTS = 8
BUDGET_EXTENTS = 5


def two_strip_layout(granule_bytes: int) -> ExtentLayout:
    """Return 8 extents of 2 blocks, 1 and 2 granules per block: runs of unequal length."""
    buffer = RankBuffer(
        device="any", granule_bytes=granule_bytes, strides=(granule_bytes, 2 * granule_bytes)
    )
    return buffer.layout(EXTENTS, 2)


class Rig(ABC):
    """A driver under test: a budget of BUDGET_EXTENTS extents and spaces that share it."""

    @abstractmethod
    def make(self) -> AddressSpace:
        """Return a new space on the shared budget."""

    @abstractmethod
    def write(self, space: AddressSpace, extent: int) -> None:
        """Fill the extent's blocks with something other than zero."""

    @abstractmethod
    def is_zero(self, space: AddressSpace, extent: int) -> bool:
        """Return whether every byte of the extent's blocks is zero."""

    @abstractmethod
    def close(self) -> None:
        """Close what the rig itself holds."""

    def begin_step(self, space: AddressSpace) -> None:
        """Do what the engine does before a step, and wait for it."""
        if space.has_fresh:
            space.zero_fresh(0)
        assert not space.has_fresh


def done(*extents: int) -> BatchResult:
    return BatchResult(done=extents)


class MappedRig(Rig):
    """A rig whose extents are memory of this process."""

    def write(self, space: AddressSpace, extent: int) -> None:
        for offset, length in space.layout.runs(extent):
            ctypes.memset(space.address + offset, 0x5A, length)

    def is_zero(self, space: AddressSpace, extent: int) -> bool:
        return not any(
            any(ctypes.string_at(space.address + offset, length))
            for offset, length in space.layout.runs(extent)
        )


class AddressSpaceConformance(ABC):
    """Subclass as `Test...` in the driver's test file and say how a rig is made."""

    @abstractmethod
    def new_rig(self, directory: Path) -> Rig:
        """Return a fresh rig; `directory` is empty and this test's own."""

    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[Rig]:
        rig = self.new_rig(tmp_path)
        yield rig
        rig.close()

    @pytest.fixture
    def space(self, rig: Rig) -> Iterator[AddressSpace]:
        space = rig.make()
        yield space
        space.close()

    def free_extents(self, space: AddressSpace) -> float:
        return space.read()[0] / space.layout.extent_bytes

    def test_a_new_space_holds_nothing(self, space: AddressSpace) -> None:
        free, total = space.read()
        assert free == total == BUDGET_EXTENTS * space.layout.extent_bytes

    def test_the_life_of_an_extent(self, rig: Rig, space: AddressSpace) -> None:
        assert space.prepare([3, 1]) == done(3, 1)
        assert self.free_extents(space) == 3
        assert space.commit([1, 3]) == done(1, 3)
        assert self.free_extents(space) == 3
        rig.begin_step(space)
        rig.write(space, 1)
        assert not rig.is_zero(space, 1)
        assert rig.is_zero(space, 3)
        assert space.decommit([1, 3]) == done(1, 3)
        assert self.free_extents(space) == 5

    def test_an_empty_batch_does_nothing(self, space: AddressSpace) -> None:
        for call in (space.prepare, space.commit, space.abort, space.decommit):
            assert call([]) == done()

    def test_abort_releases_what_was_never_mapped(self, space: AddressSpace) -> None:
        space.prepare([0, 7])
        assert space.abort([7]) == done(7)
        assert self.free_extents(space) == 4
        assert space.prepare([7]) == done(7)

    def test_bytes_are_zero_in_the_first_step_after_every_commit(
        self, rig: Rig, space: AddressSpace
    ) -> None:
        for _ in range(3):
            space.prepare([2])
            space.commit([2])
            rig.begin_step(space)
            assert rig.is_zero(space, 2)
            rig.write(space, 2)
            rig.begin_step(space)
            assert not rig.is_zero(space, 2), "only what is fresh is zeroed"
            space.decommit([2])

    def test_what_is_about_to_leave_is_not_zeroed_any_more(
        self, rig: Rig, space: AddressSpace
    ) -> None:
        space.prepare([2, 3, 5])
        space.commit([2, 3, 5])
        fresh = space.has_fresh
        assert space.forget_fresh([3]) == space.forget_fresh([5]) == int(fresh)
        assert space.forget_fresh([3, 7]) == 0, "once"
        rig.begin_step(space)
        assert rig.is_zero(space, 2)
        assert space.decommit([3, 5]) == done(3, 5)
        space.prepare([3])
        space.commit([3])
        assert space.has_fresh == fresh
        assert space.decommit([2, 3]) == done(2, 3)
        assert not space.has_fresh, "what was unmapped is not zeroed either"
        rig.begin_step(space)

    def test_neighbours_keep_their_bytes(self, rig: Rig, space: AddressSpace) -> None:
        space.prepare([3, 4, 5])
        space.commit([3, 4, 5])
        rig.begin_step(space)
        for extent in (3, 4, 5):
            rig.write(space, extent)
        space.decommit([4])
        assert not rig.is_zero(space, 3)
        assert not rig.is_zero(space, 5)
        space.prepare([4])
        space.commit([4])
        rig.begin_step(space)
        assert rig.is_zero(space, 4)
        assert not rig.is_zero(space, 3)
        assert not rig.is_zero(space, 5)

    def test_prepare_over_the_budget_prepares_nothing(self, space: AddressSpace) -> None:
        space.prepare([0, 1])
        result = space.prepare([2, 3, 4, 5])
        assert result.done == result.partial == ()
        assert result.step == "create"
        assert isinstance(result.error, DeviceOutOfMemoryError)
        assert result.error.device == space.device
        assert self.free_extents(space) == 3
        assert space.prepare([2, 3, 4]) == done(2, 3, 4)

    def test_the_budget_is_one_for_all_spaces(self, rig: Rig, space: AddressSpace) -> None:
        other = rig.make()
        space.prepare([0, 1, 2])
        assert isinstance(other.prepare([0, 1, 2]).error, DeviceOutOfMemoryError)
        assert other.prepare([0, 1]) == done(0, 1)
        other.commit([1])
        assert self.free_extents(space) == 0
        other.close()
        assert self.free_extents(space) == 2

    @pytest.mark.parametrize(
        ("state", "refused"),
        [
            ("absent", ("commit", "abort", "decommit")),
            ("prepared", ("prepare", "decommit")),
            ("mapped", ("prepare", "commit", "abort")),
        ],
    )
    def test_a_call_in_the_wrong_state_changes_nothing(
        self, space: AddressSpace, state: str, refused: tuple[str, ...]
    ) -> None:
        space.prepare([6])
        if state != "absent":
            space.prepare([0])
        if state == "mapped":
            space.commit([0])
        before = space.read()
        for call in refused:
            # Extent 0 is the wrong one; 6 must not be touched although it may be right.
            with pytest.raises(LocalProtocolError, match="extent 0"):
                getattr(space, call)([6, 0] if call in ("commit", "abort") else [0])
            assert space.read() == before
        assert space.commit([6]) == done(6)
        match state:
            case "absent":
                assert space.prepare([0]) == done(0)
            case "prepared":
                assert space.commit([0]) == done(0)
            case "mapped":
                assert space.decommit([0]) == done(0)

    @pytest.mark.parametrize("extents", [[EXTENTS], [-1], [0, 1, 0]])
    def test_extents_that_cannot_be_meant(self, space: AddressSpace, extents: list[int]) -> None:
        before = space.read()
        with pytest.raises(LocalProtocolError):
            space.prepare(extents)
        assert space.read() == before
        assert space.prepare([0, 1]) == done(0, 1)

    def test_close_gives_everything_back(self, rig: Rig, space: AddressSpace) -> None:
        space.prepare([0, 1, 2])
        space.commit([0])
        space.close()
        space.close()
        with pytest.raises(LocalProtocolError, match="closed"):
            space.prepare([4])
        again = rig.make()
        assert self.free_extents(again) == BUDGET_EXTENTS
        again.close()

    def test_a_layout_off_the_granules_is_refused(self, space: AddressSpace) -> None:
        odd = RankBuffer(device="any", granule_bytes=1, strides=(space.granule_bytes // 2 + 1,))
        with pytest.raises(LocalProtocolError, match="granules"):
            odd.layout(4, 1).check_granule(space.granule_bytes)

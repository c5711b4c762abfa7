"""The host driver: the conformance suite, real bytes, and what only it can promise."""

from __future__ import annotations

import ctypes
import errno
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvadmit import vmm_host
from kvadmit.errors import DeviceOutOfMemoryError, DriverError, LocalProtocolError
from kvadmit.geometry import RankBuffer
from kvadmit.units import GIB
from kvadmit.vmm_host import GRANULE_BYTES, HostAddressSpace, HostPool
from unit.vmm_conformance import (
    BUDGET_EXTENTS,
    AddressSpaceConformance,
    MappedRig,
    Rig,
    done,
    two_strip_layout,
)


class HostRig(MappedRig):
    def __init__(self, directory: Path) -> None:
        self.layout = two_strip_layout(GRANULE_BYTES)
        self.pool = HostPool(directory / "host_pool", BUDGET_EXTENTS * self.layout.extent_bytes)

    def make(self) -> HostAddressSpace:
        return HostAddressSpace(self.layout, device="host", pool=self.pool)

    def close(self) -> None:
        assert self.pool.booked_bytes == 0
        self.pool.close()


class TestConformance(AddressSpaceConformance):
    def new_rig(self, directory: Path) -> Rig:
        return HostRig(directory)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[HostRig]:
    rig = HostRig(tmp_path)
    yield rig
    rig.close()


@pytest.fixture
def space(rig: HostRig) -> Iterator[HostAddressSpace]:
    space = rig.make()
    yield space
    space.close()


def backed_bytes(space: HostAddressSpace) -> int:
    """Return what the kernel has allocated for the space's memory file."""
    return Path(f"/proc/self/fd/{space._file}").stat().st_blocks * 512


def test_pages_come_with_prepare_and_go_with_decommit(space: HostAddressSpace) -> None:
    each = space.layout.extent_bytes
    assert backed_bytes(space) == 0
    space.prepare([1, 2])
    assert backed_bytes(space) == 2 * each
    space.commit([1])
    assert backed_bytes(space) == 2 * each
    space.abort([2])
    assert backed_bytes(space) == each
    space.decommit([1])
    assert backed_bytes(space) == 0


def test_the_buffer_is_exactly_the_layout(space: HostAddressSpace) -> None:
    space.prepare([7])
    space.commit([7])
    view = memoryview(space.buffer())
    assert view.nbytes == space.layout.buffer_bytes
    assert not view.readonly
    offset, length = space.layout.runs(7)[-1]
    assert offset + length == view.nbytes
    view.cast("B")[-1] = 3
    assert ctypes.string_at(space.address + view.nbytes - 1, 1) == b"\x03"


def test_a_buffer_keeps_its_addresses_after_close(rig: HostRig) -> None:
    space = rig.make()
    view = memoryview(space.buffer())
    gone = weakref.ref(space._reservation)
    space.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        space.buffer()
    gc.collect()
    assert gone() is not None
    assert view.nbytes == space.layout.buffer_bytes
    del view
    gc.collect()
    assert gone() is None


TOUCH = """
import ctypes, resource, sys
from pathlib import Path
from kvadmit.geometry import RankBuffer
from kvadmit.vmm_host import GRANULE_BYTES, HostAddressSpace, HostPool

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
when, directory = sys.argv[1:]
pool = HostPool(Path(directory) / "host_pool", 1 << 24)
layout = RankBuffer(device="h", granule_bytes=GRANULE_BYTES, strides=(GRANULE_BYTES,)).layout(4, 1)
space = HostAddressSpace(layout, device="h", pool=pool)
space.prepare([0, 1])
space.commit([1])
assert ctypes.string_at(space.address + GRANULE_BYTES, GRANULE_BYTES) == bytes(GRANULE_BYTES)
buffer = space.buffer()
touched = {"absent": 2, "prepared": 0, "decommitted": 1, "closed": 1}[when]
if when == "decommitted":
    space.decommit([1])
if when == "closed":
    space.close()
print("ready", flush=True)
print(buffer[touched * GRANULE_BYTES])
"""


@pytest.mark.parametrize("when", ["absent", "prepared", "decommitted", "closed"])
def test_touching_an_extent_that_is_not_mapped_crashes(when: str, tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-X", "faulthandler=0", "-c", TOUCH, when, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.stdout == "ready\n"
    assert child.returncode in (-11, -7), child.stderr


def test_addresses_cost_nothing(tmp_path: Path) -> None:
    """Reserve 200 GiB, back its two ends."""
    buffer = RankBuffer(device="host", granule_bytes=GRANULE_BYTES, strides=(512 * 1024,))
    layout = buffer.layout(200 * GIB // (512 * 1024), 1)
    pool = HostPool(tmp_path / "host_pool", 2 * layout.extent_bytes)
    space = HostAddressSpace(layout, device="host", pool=pool)
    last = layout.extents - 1
    assert space.prepare([0, last]) == done(0, last)
    assert space.commit([0, last]) == done(0, last)
    assert space.buffer()[layout.buffer_bytes - 1] == 0
    space.close()
    pool.close()


class FailNth:
    """Stands in for one libc call and fails the n-th with an errno."""

    def __init__(self, real: Callable[..., int], nth: int, number: int, failed: int) -> None:
        self.real, self.nth, self.number, self.failed = real, nth, number, failed

    def __call__(self, *arguments: int) -> int:
        self.nth -= 1
        if self.nth == 0:
            ctypes.set_errno(self.number)
            return self.failed
        return self.real(*arguments)


def fail_call(
    monkeypatch: pytest.MonkeyPatch, name: str, nth: int, number: int = errno.ENOSPC
) -> None:
    failed = -1 if name == "fallocate" else 2**64 - 1
    real = getattr(vmm_host._libc, name)
    monkeypatch.setattr(vmm_host._libc, name, FailNth(real, nth, number, failed))


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_prepare_undoes_all_when_pages_run_out(
    space: HostAddressSpace, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    fail_call(monkeypatch, "fallocate", nth)
    result = space.prepare([4, 5])
    assert (result.done, result.partial, result.step) == ((), (), "create")
    assert isinstance(result.error, DeviceOutOfMemoryError)
    assert result.error.name == "ENOSPC"
    assert backed_bytes(space) == 0
    assert space.read()[0] == space.read()[1]
    assert space.prepare([4, 5]) == done(4, 5)


def test_another_errno_is_not_called_out_of_memory(
    space: HostAddressSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_call(monkeypatch, "fallocate", 1, errno.EPERM)
    error = space.prepare([0]).error
    assert type(error) is DriverError
    assert str(error) == "fallocate on host failed with EPERM: Operation not permitted"


def test_an_interrupted_allocation_goes_on(
    space: HostAddressSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_call(monkeypatch, "fallocate", 1, errno.EINTR)
    assert space.prepare([0]) == done(0)


@pytest.mark.parametrize(("nth", "finished"), [(1, ()), (2, ()), (3, (2,)), (4, (2,))])
def test_a_failed_commit_undoes_nothing_and_is_finished_later(
    rig: HostRig,
    space: HostAddressSpace,
    monkeypatch: pytest.MonkeyPatch,
    nth: int,
    finished: tuple[int, ...],
) -> None:
    space.prepare([2, 3])
    fail_call(monkeypatch, "mmap", nth, errno.ENOMEM)
    result = space.commit([2, 3])
    stopped = 2 + len(finished)
    assert (result.done, result.partial, result.step) == (finished, (stopped,), "map")
    assert space.state(stopped) == "partial"
    assert backed_bytes(space) == 2 * space.layout.extent_bytes
    rest = tuple(range(stopped, 4))
    assert space.commit(rest) == done(*rest)
    assert rig.is_zero(space, 2)
    assert rig.is_zero(space, 3)


def test_a_partial_extent_can_be_given_up(
    space: HostAddressSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.prepare([2])
    fail_call(monkeypatch, "mmap", 2, errno.ENOMEM)
    space.commit([2])
    assert space.decommit([2]) == done(2)
    assert backed_bytes(space) == 0


@pytest.mark.parametrize(("call", "step"), [("mmap", "unmap"), ("fallocate", "release")])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_failed_decommit_is_only_ever_decommitted(
    rig: HostRig,
    space: HostAddressSpace,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    step: str,
    nth: int,
) -> None:
    space.prepare([2, 3])
    space.commit([2, 3])
    rig.write(space, 2)
    fail_call(monkeypatch, call, nth, errno.ENOMEM)
    result = space.decommit([2, 3])
    assert (result.done, result.partial, result.step) == ((), (2,), step)
    with pytest.raises(LocalProtocolError, match="leaving"):
        space.commit([2])
    assert space.decommit([2, 3]) == done(2, 3)
    space.prepare([2])
    space.commit([2])
    assert rig.is_zero(space, 2)


def test_a_failed_abort_leaves_the_extent_prepared(
    rig: HostRig, space: HostAddressSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.prepare([2, 3])
    fail_call(monkeypatch, "fallocate", 4, errno.EPERM)
    result = space.abort([2, 3])
    assert (result.done, result.partial, result.step) == ((2,), (), "release")
    assert space.commit([3]) == done(3)
    assert rig.is_zero(space, 3)


def test_no_addresses_is_a_named_error(rig: HostRig, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_call(monkeypatch, "mmap", 1, errno.ENOMEM)
    with pytest.raises(DriverError, match="no addresses for"):
        rig.make()


def test_a_release_the_pool_cannot_note_is_repeated_by_the_next_one(
    rig: HostRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = rig.make()
    assert space.prepare([1]) == done(1)
    assert space.commit([1]) == done(1)
    locked = DriverError("fcntl", "host", "ETIMEDOUT", "held by a stopped process")

    def refuse(count: int) -> None:
        raise locked

    with monkeypatch.context() as patch:
        patch.setattr(rig.pool, "unbook", refuse)
        result = space.decommit([1])
        assert (result.done, result.partial, result.error) == ((), (1,), locked)
    assert rig.pool.booked_bytes == rig.layout.extent_bytes, "nothing is lost from the books"
    assert space.decommit([1]) == done(1)
    assert space.state(1) == "absent"
    assert rig.pool.booked_bytes == 0
    space.close()

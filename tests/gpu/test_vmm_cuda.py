"""The CUDA driver on a real NVIDIA GPU: bytes as PyTorch's kernels see them.

    python -m pytest tests/gpu

Skipped where there is no GPU. What fails at which call is tested over the fake driver; a touch
of what is not committed is not tried here, because the GPU may be somebody else's too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvadmit.errors import DeviceOutOfMemoryError, KvAdmitError
from kvadmit.geometry import RankBuffer
from kvadmit.units import GIB, MIB
from kvadmit.vmm import ExtentLayout
from kvadmit.vmm_cuda import CudaAddressSpace, probe

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

try:
    DEVICE = probe(0)
except KvAdmitError as error:
    pytest.skip(str(error), allow_module_level=True)

EXTENTS = 32


def layout(strips: int = 2) -> ExtentLayout:
    """Return 32 extents of 8 blocks of 4 MiB over `strips` strips."""
    stride = 4 * MIB // strips
    buffer = RankBuffer(
        device=DEVICE.uuid, granule_bytes=DEVICE.granule_bytes, strides=(stride,) * strips
    )
    return buffer.layout(EXTENTS, 8)


@pytest.fixture
def space() -> Iterator[CudaAddressSpace]:
    torch.cuda.init()
    space = CudaAddressSpace(layout(), ordinal=0)
    yield space
    space.close()


def tensor_of(space: CudaAddressSpace) -> Any:
    return torch.utils.dlpack.from_dlpack(space.dlpack())


def views(space: CudaAddressSpace, tensor: Any, extent: int) -> list[Any]:
    return [tensor[offset : offset + length] for offset, length in space.layout.runs(extent)]


def begin_step(space: CudaAddressSpace) -> None:
    """Do what a worker does before a step: on the stream whose kernels come next."""
    space.zero_fresh(torch.cuda.current_stream().cuda_stream)


def fill(space: CudaAddressSpace, tensor: Any, extent: int, value: int) -> None:
    for view in views(space, tensor, extent):
        view.fill_(value)


def all_are(space: CudaAddressSpace, tensor: Any, extent: int, value: int) -> bool:
    return all(bool((view == value).all()) for view in views(space, tensor, extent))


def test_the_probe_knows_the_device() -> None:
    assert DEVICE.total_bytes > GIB
    assert DEVICE.granule_bytes == 2 * MIB
    assert DEVICE.uuid == f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def test_extents_come_zeroed_and_neighbours_keep_their_bytes(space: CudaAddressSpace) -> None:
    tensor = tensor_of(space)
    assert (tensor.dtype, tensor.numel()) == (torch.int8, space.layout.buffer_bytes)
    assert tensor.data_ptr() == space.address
    space.prepare([3, 4, 5])
    assert space.commit([3, 4, 5]).done == (3, 4, 5)
    begin_step(space)
    for extent in (3, 4, 5):
        assert all_are(space, tensor, extent, 0)
        fill(space, tensor, extent, extent)
    space.wait_device()
    space.decommit([4])
    for _ in range(20):
        space.prepare([4])
        space.commit([4])
        begin_step(space)
        assert all_are(space, tensor, 4, 0)
        fill(space, tensor, 4, 77)
        space.wait_device()
        space.decommit([4])
    assert all_are(space, tensor, 3, 3)
    assert all_are(space, tensor, 5, 5)


def test_every_byte_comes_back(space: CudaAddressSpace) -> None:
    tensor = tensor_of(space)
    everything = list(range(EXTENTS))
    space.prepare(everything)
    space.commit(everything)
    fill(space, tensor, 0, 1)
    space.wait_device()
    space.decommit(everything)
    before = space.read()[0]
    for _ in range(50):
        space.prepare(everything)
        held = before - space.read()[0]
        assert held >= EXTENTS * space.layout.extent_bytes
        space.commit(everything)
        begin_step(space)
        space.wait_device()
        space.decommit(everything)
    assert abs(before - space.read()[0]) < 64 * MIB


def test_a_prepare_beyond_the_device_is_refused_and_leaves_nothing() -> None:
    free = probe_free()
    block = 256 * MIB
    buffer = RankBuffer(device=DEVICE.uuid, granule_bytes=DEVICE.granule_bytes, strides=(block,))
    extents = free // block + 8
    big = CudaAddressSpace(buffer.layout(extents, 1), ordinal=0)
    try:
        result = big.prepare(list(range(extents)))
        assert isinstance(result.error, DeviceOutOfMemoryError)
        assert (result.done, result.partial, result.step) == ((), (), "create")
        assert big.read()[0] > free - GIB
    finally:
        big.close()


def probe_free() -> int:
    small = CudaAddressSpace(layout(), ordinal=0)
    free = small.read()[0]
    small.close()
    return free


def test_growth_and_shrink_beside_running_kernels(space: CudaAddressSpace) -> None:
    """Kernels run on even extents without a pause while the odd ones come and go."""
    tensor = tensor_of(space)
    even, odd = list(range(0, EXTENTS, 2)), list(range(1, EXTENTS, 2))
    space.prepare(even)
    space.commit(even)
    stop, rounds, wrong = threading.Event(), [0], list[int]()

    def kernels() -> None:
        value = 0
        while not stop.is_set():
            value = (value + 1) % 100
            for extent in even:
                fill(space, tensor, extent, value)
            wrong.extend(extent for extent in even if not all_are(space, tensor, extent, value))
            rounds[0] += 1

    thread = threading.Thread(target=kernels)
    thread.start()
    try:
        for _ in range(100):
            assert space.prepare(odd).error is None
            assert space.commit(odd).error is None
            assert space.decommit(odd).error is None
    finally:
        stop.set()
        thread.join()
    assert rounds[0] > 1
    assert wrong == []


def test_a_tensor_outlives_its_space() -> None:
    space = CudaAddressSpace(layout(), ordinal=0)
    tensor = tensor_of(space)
    space.prepare([0])
    space.commit([0])
    fill(space, tensor, 0, 9)
    space.wait_device()
    space.close()
    again = CudaAddressSpace(layout(), ordinal=0)
    assert again.address != tensor.data_ptr(), "the addresses are still taken"
    again.close()
    del tensor

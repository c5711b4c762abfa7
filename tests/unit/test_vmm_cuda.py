"""The CUDA driver over a fake library: the conformance suite, and what fails at every call."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_cuda import GRANULE_BYTES, KINDS, FakeCuda, build
from kvadmit import vmm_cuda
from kvadmit.errors import (
    DeviceOutOfMemoryError,
    DriverError,
    LocalProtocolError,
    UnsupportedError,
)
from kvadmit.vmm import AddressSpace, BatchResult
from kvadmit.vmm_cuda import CudaAddressSpace, probe
from unit.vmm_conformance import (
    BUDGET_EXTENTS,
    AddressSpaceConformance,
    MappedRig,
    Rig,
    done,
    two_strip_layout,
)

ANY_FAILURE = 801
"""CUDA_ERROR_NOT_SUPPORTED: one that is not about memory."""
STRIPS = 2


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("fake-cuda"))


class CudaRig(MappedRig):
    def __init__(self, library: Path, directory: Path) -> None:
        self.layout = two_strip_layout(GRANULE_BYTES)
        self.fake = FakeCuda(library)
        self.fake.use_budget(directory / "budget", BUDGET_EXTENTS * self.layout.extent_bytes)

    def make(self) -> CudaAddressSpace:
        return CudaAddressSpace(self.layout, ordinal=0, library=self.fake.path)

    def begin_step(self, space: AddressSpace) -> None:
        super().begin_step(space)
        assert isinstance(space, CudaAddressSpace)
        space.wait_device()

    def close(self) -> None:
        gc.collect()
        self.fake.drop_budget()
        assert {kind: self.fake.live(kind) for kind in KINDS} == dict.fromkeys(KINDS, 0)


class TestConformance(AddressSpaceConformance):
    @pytest.fixture(autouse=True)
    def _library(self, fake_library: Path) -> None:
        self.library = fake_library

    def new_rig(self, directory: Path) -> Rig:
        return CudaRig(self.library, directory)


@pytest.fixture
def rig(fake_library: Path, tmp_path: Path) -> Iterator[CudaRig]:
    rig = CudaRig(fake_library, tmp_path)
    yield rig
    rig.close()


@pytest.fixture
def space(rig: CudaRig) -> Iterator[CudaAddressSpace]:
    space = rig.make()
    yield space
    space.close()


def states(space: CudaAddressSpace, *extents: int) -> list[str]:
    return [space.state(extent) for extent in extents]


# --- every call fails once ------------------------------------------------------------------

TRIED = [0, 1, 2]


@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("nth", range(1, len(TRIED) * STRIPS + 1))
def test_a_handle_that_cannot_be_made_leaves_none(
    rig: CudaRig, space: CudaAddressSpace, nth: int, for_good: bool
) -> None:
    space.prepare([6])
    rig.fake.fail("cuMemCreate", nth, ANY_FAILURE, for_good=for_good)
    result = space.prepare(TRIED)
    assert (result.done, result.partial, result.step) == ((), (), "create")
    assert isinstance(result.error, DriverError)
    assert not isinstance(result.error, DeviceOutOfMemoryError), "the driver did not say that"
    assert result.error.name == "CUDA_ERROR_NOT_SUPPORTED"
    assert rig.fake.live("handles") == STRIPS
    assert states(space, *TRIED, 6) == ["absent"] * 3 + ["prepared"]
    assert rig.fake.made("cuMemMap") == 0 or rig.fake.live("mappings") == 0
    rig.fake.fail("cuMemCreate", 0)
    assert space.prepare(TRIED) == done(*TRIED)


@pytest.mark.parametrize("nth", range(1, len(TRIED) * STRIPS))
def test_an_undo_that_fails_too_loses_no_handle(
    rig: CudaRig, space: CudaAddressSpace, nth: int
) -> None:
    rig.fake.fail("cuMemCreate", nth + 1, ANY_FAILURE)
    rig.fake.fail("cuMemRelease", 1, ANY_FAILURE)
    assert space.prepare(TRIED).step == "create"
    assert rig.fake.live("handles") == 1
    rig.fake.fail("cuMemRelease", 0)
    assert space.prepare(TRIED) == done(*TRIED)
    assert rig.fake.live("handles") == len(TRIED) * STRIPS


FAILING_COMMIT = [
    (call, step, nth)
    for call, step in (("cuMemMap", "map"), ("cuMemSetAccess", "access"))
    for nth in range(1, len(TRIED) * STRIPS + 1)
]


@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize(("call", "step", "nth"), FAILING_COMMIT)
def test_from_the_first_map_call_on_nothing_is_undone(
    rig: CudaRig, space: CudaAddressSpace, call: str, step: str, nth: int, for_good: bool
) -> None:
    space.prepare(TRIED)
    undone = rig.fake.made("cuMemUnmap"), rig.fake.made("cuMemRelease")
    rig.fake.fail(call, nth, ANY_FAILURE, for_good=for_good)
    result = space.commit(TRIED)
    failed = (nth - 1) // STRIPS
    assert result.step == step
    assert result.done == tuple(TRIED[:failed])
    assert result.partial == (TRIED[failed],)
    assert result.error is not None
    assert (rig.fake.made("cuMemUnmap"), rig.fake.made("cuMemRelease")) == undone
    assert rig.fake.live("handles") == len(TRIED) * STRIPS
    expected = ["mapped"] * failed + ["partial"] + ["prepared"] * (2 - failed)
    assert states(space, *TRIED) == expected
    rig.begin_step(space)
    assert all(rig.is_zero(space, extent) for extent in result.done)
    rig.fake.fail(call, 0)
    left = TRIED[failed:]
    mapped = rig.fake.live("mappings")
    assert space.commit(left) == done(*left), "it is finished from where it stands"
    assert rig.fake.live("mappings") == len(TRIED) * STRIPS >= mapped
    rig.begin_step(space)
    assert all(rig.is_zero(space, extent) for extent in TRIED)


@pytest.mark.parametrize("nth", [1, 2])
def test_zeroes_that_cannot_be_enqueued_are_an_error_and_all_stays_fresh(
    rig: CudaRig, space: CudaAddressSpace, nth: int
) -> None:
    space.prepare(TRIED)
    space.commit(TRIED)
    rig.fake.fail("cuMemsetD8Async", nth, ANY_FAILURE)
    with pytest.raises(DriverError, match="cuMemsetD8Async"):
        space.zero_fresh(0)
    assert space.has_fresh
    rig.begin_step(space)
    assert all(rig.is_zero(space, extent) for extent in TRIED)


def test_neighbours_are_zeroed_by_one_call_per_strip(rig: CudaRig, space: CudaAddressSpace) -> None:
    for extent in (6, 1, 2, 4, 3):
        space.prepare([extent])
        space.commit([extent])
    before = rig.fake.made("cuMemsetD8Async")
    rig.begin_step(space)
    assert rig.fake.made("cuMemsetD8Async") - before == 2 * STRIPS, "1 to 4, and 6"
    assert all(rig.is_zero(space, extent) for extent in (1, 2, 3, 4, 6))


def test_whoever_forgets_waits_for_zeroes_that_are_being_enqueued(
    rig: CudaRig, space: CudaAddressSpace
) -> None:
    """Else the device wait after it would miss them."""
    space.prepare([1])
    space.commit([1])
    before = rig.fake.made("cuMemsetD8Async")
    rig.fake.delay("cuMemsetD8Async", 100_000)
    engine = threading.Thread(target=space.zero_fresh, args=(0,))
    engine.start()
    try:
        while rig.fake.made("cuMemsetD8Async") == before:
            pass
        assert space.forget_fresh([1]) == 0
        assert rig.fake.made("cuMemsetD8Async") == before + STRIPS
    finally:
        engine.join()
        rig.fake.delay("cuMemsetD8Async", 0)
    space.wait_device()
    space.decommit([1])


def test_a_commit_enqueues_nothing_and_zeroes_of_what_left_reach_no_memory(
    rig: CudaRig, space: CudaAddressSpace
) -> None:
    """Whatever the engine's thread does meanwhile: it may begin a step at any moment."""
    before = rig.fake.made("cuMemsetD8Async")
    stop = threading.Event()

    def steps() -> None:
        while not stop.is_set():
            if space.has_fresh:
                space.zero_fresh(0)

    engine = threading.Thread(target=steps)
    engine.start()
    try:
        for number in range(200):
            space.prepare(TRIED)
            space.commit(TRIED)
            time.sleep(number % 3 * 1e-4)  # lets the other thread in at one point or another
            space.forget_fresh(TRIED)
            space.wait_device()  # raises once a zero met an address that is not open
            space.decommit(TRIED)
    finally:
        stop.set()
        engine.join()
    assert rig.fake.made("cuMemsetD8Async") > before
    space.prepare(TRIED)
    made = rig.fake.made("cuMemsetD8Async")
    space.commit(TRIED)
    assert rig.fake.made("cuMemsetD8Async") == made
    space.decommit(TRIED)
    space.wait_device()


@pytest.mark.parametrize("nth", range(1, len(TRIED) * STRIPS + 1))
def test_an_abort_that_fails_goes_on_later_and_its_extents_can_still_be_committed(
    rig: CudaRig, space: CudaAddressSpace, nth: int
) -> None:
    space.prepare(TRIED)
    rig.fake.fail("cuMemRelease", nth, ANY_FAILURE)
    result = space.abort(TRIED)
    failed = (nth - 1) // STRIPS
    assert (result.done, result.partial, result.step) == (tuple(TRIED[:failed]), (), "release")
    left = TRIED[failed:]
    assert states(space, *left) == ["prepared"] * len(left)
    assert space.commit(left[:1]) == done(left[0])
    rig.begin_step(space)
    assert rig.is_zero(space, left[0])
    assert space.abort(left[1:]) == done(*left[1:])


@pytest.mark.parametrize(("call", "step"), [("cuMemUnmap", "unmap"), ("cuMemRelease", "release")])
@pytest.mark.parametrize("nth", range(1, len(TRIED) * STRIPS + 1))
def test_a_decommit_that_fails_is_left_for_another_decommit(
    rig: CudaRig, space: CudaAddressSpace, call: str, step: str, nth: int
) -> None:
    space.prepare(TRIED)
    space.commit(TRIED)
    rig.fake.fail(call, nth, ANY_FAILURE)
    result = space.decommit(TRIED)
    failed = (nth - 1) // STRIPS
    assert (result.done, result.step) == (tuple(TRIED[:failed]), step)
    assert result.partial == (TRIED[failed],)
    assert states(space, TRIED[failed]) == ["leaving"]
    with pytest.raises(LocalProtocolError, match="leaving"):
        space.commit([TRIED[failed]])
    left = TRIED[failed:]
    assert space.decommit(left) == done(*left)
    assert rig.fake.live("handles") == rig.fake.live("mappings") == 0


@pytest.mark.parametrize("call", ["prepare", "commit", "abort", "decommit"])
def test_without_the_context_nothing_is_tried(
    rig: CudaRig, space: CudaAddressSpace, call: str
) -> None:
    space.prepare([0, 1])
    space.commit([1])
    extents = {"prepare": [5], "commit": [0], "abort": [0], "decommit": [1]}[call]
    before = states(space, *extents)
    rig.fake.fail("cuCtxPushCurrent", 1, 201)
    result: BatchResult = getattr(space, call)(extents)
    assert (result.done, result.partial, result.step) == ((), (), "")
    assert isinstance(result.error, DriverError)
    assert result.error.call == "cuCtxPushCurrent"
    assert states(space, *extents) == before
    assert getattr(space, call)(extents) == done(*extents)


@pytest.mark.parametrize(
    "call",
    ["cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuMemAddressReserve"],
)
def test_a_space_that_cannot_be_made_leaves_nothing(rig: CudaRig, call: str) -> None:
    rig.fake.fail(call, 1, ANY_FAILURE)
    with pytest.raises(DriverError, match=call):
        rig.make()
    # The rig's own check at the end counts what is left.


def test_out_of_memory_is_said_only_when_the_driver_said_it(
    rig: CudaRig, space: CudaAddressSpace
) -> None:
    rig.fake.fail("cuMemCreate", 1)
    error = space.prepare([0]).error
    assert isinstance(error, DeviceOutOfMemoryError)
    assert "asked" in str(error)
    rig.fake.fail("cuMemMap", 1, 2)
    space.prepare([0])
    assert isinstance(space.commit([0]).error, DeviceOutOfMemoryError)


def test_a_device_that_will_not_answer_is_an_error_of_the_driver(
    rig: CudaRig, space: CudaAddressSpace
) -> None:
    rig.fake.fail("cuMemGetInfo", 1, ANY_FAILURE)
    with pytest.raises(DriverError, match="cuMemGetInfo on GPU-10101010-"):
        space.read()
    rig.fake.fail("cuCtxSynchronize", 1, 700)
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        space.wait_device()
    space.wait_device()


# --- beside Python --------------------------------------------------------------------------


def test_the_gil_is_free_during_driver_calls_and_one_thread_is_in_at_a_time(
    rig: CudaRig, space: CudaAddressSpace
) -> None:
    rig.fake.delay("cuMemCreate", 200_000)
    beginning = rig.fake.made("cuMemCreate")
    other = threading.Thread(target=space.prepare, args=([0],))
    other.start()
    try:
        while rig.fake.made("cuMemCreate") == beginning:
            pass  # this thread runs while the other is in the driver: the GIL is free
        with pytest.raises(RuntimeError, match="another thread"):
            space.read()
        space.wait_device()  # which is meant for beside
    finally:
        other.join()
        rig.fake.delay("cuMemCreate", 0)
    assert space.state(0) == "prepared"


def test_other_processes_share_the_budget_and_a_dead_one_holds_nothing(
    rig: CudaRig, space: CudaAddressSpace, tmp_path: Path
) -> None:
    code = (
        "import sys, os, pathlib\n"
        "from fake_cuda import FakeCuda\n"
        "from kvadmit.vmm_cuda import CudaAddressSpace\n"
        "from unit.vmm_conformance import two_strip_layout\n"
        "fake = FakeCuda(pathlib.Path(sys.argv[1]))\n"
        "fake.use_budget(pathlib.Path(sys.argv[2]), 0)\n"
        "space = CudaAddressSpace(two_strip_layout(65536), ordinal=1, library=fake.path)\n"
        "space.prepare([0, 1, 2]); space.commit([0])\n"
        "print('held', flush=True); sys.stdin.read(); os._exit(9)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, rig.fake.path, str(tmp_path / "budget")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        each = space.layout.extent_bytes
        assert space.read()[0] == 2 * each
        assert isinstance(space.prepare([0, 1, 2]).error, DeviceOutOfMemoryError)
        child.communicate()
    assert space.read()[0] == BUDGET_EXTENTS * each


class Tensor(ctypes.Structure):
    """DLPack's DLTensor and the manager that follows it (dmlc/dlpack 0.8)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_kind", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


def take(capsule: Any) -> Tensor:
    """Do what a consumer does: take the tensor out and rename the capsule."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(capsule, b"dltensor")
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    rename(capsule, b"used_dltensor")
    return Tensor.from_address(address)


def test_a_tensor_holds_the_addresses_after_the_space_is_closed(rig: CudaRig) -> None:
    space = rig.make()
    address = space.address
    capsule = space.dlpack()
    tensor = take(capsule)
    assert (tensor.data, tensor.device_kind, tensor.device) == (address, 2, 0)
    assert (tensor.dimensions, tensor.code, tensor.bits, tensor.lanes) == (1, 0, 8, 1)
    assert tensor.shape[0] == space.layout.buffer_bytes
    space.prepare([0])
    space.commit([0])
    space.close()
    assert rig.fake.live("handles") == 0
    assert rig.fake.live("reservations") == 1, "nothing else can come to lie there"
    del capsule
    gc.collect()
    assert rig.fake.live("reservations") == 1
    tensor.deleter(ctypes.addressof(tensor))
    assert rig.fake.live("reservations") == 0


def test_a_capsule_that_nobody_took_holds_nothing(rig: CudaRig) -> None:
    space = rig.make()
    capsule = space.dlpack()
    space.close()
    assert rig.fake.live("reservations") == 1
    del capsule
    assert rig.fake.live("reservations") == 0
    with pytest.raises(LocalProtocolError, match="closed"):
        space.dlpack()


def test_a_space_that_was_forgotten_gives_everything_back(rig: CudaRig) -> None:
    space = rig.make()
    space.prepare([0, 1])
    space.commit([0])
    del space
    gc.collect()
    assert rig.fake.live("handles") == rig.fake.live("contexts") == 0


def test_a_touch_of_what_is_not_committed_ends_the_process(rig: CudaRig, tmp_path: Path) -> None:
    code = (
        "import sys, ctypes, pathlib\n"
        "from fake_cuda import FakeCuda\n"
        "from kvadmit.vmm_cuda import CudaAddressSpace\n"
        "from unit.vmm_conformance import two_strip_layout\n"
        "fake = FakeCuda(pathlib.Path(sys.argv[1]))\n"
        "fake.use_budget(pathlib.Path(sys.argv[2]), 1 << 24)\n"
        "space = CudaAddressSpace(two_strip_layout(65536), ordinal=0, library=fake.path)\n"
        "space.prepare([0, 1]); space.commit([0])\n"
        "ctypes.string_at(space.address, 1); print('read', flush=True)\n"
        "ctypes.string_at(space.address + space.layout.runs(1)[0][0], 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, rig.fake.path, str(tmp_path / "own")],
        capture_output=True,
        cwd=Path(__file__).parents[1],
        check=False,
    )
    assert (done.stdout, done.returncode) == (b"read\n", -11)


# --- before anything is made ----------------------------------------------------------------


def test_a_probe_makes_nothing_and_says_what_the_driver_says(rig: CudaRig) -> None:
    found = probe(1, library=rig.fake.path)
    assert found.uuid == "GPU-11111111-1111-1111-1111-111111111111"
    assert (found.name, found.driver_version, found.mps) == ("Fake GPU 1", "13.0", False)
    assert found.granule_bytes == GRANULE_BYTES
    assert found.total_bytes == BUDGET_EXTENTS * rig.layout.extent_bytes


@pytest.mark.parametrize(("value", "said"), [(-1, None), (0, False), (1, True)])
def test_whether_mps_serves_a_device_is_known_or_not(
    rig: CudaRig, value: int, said: bool | None
) -> None:
    rig.fake.have(mps=value)
    try:
        assert probe(0, library=rig.fake.path).mps is said
    finally:
        rig.fake.have()


def test_a_device_without_virtual_memory_is_refused(rig: CudaRig) -> None:
    rig.fake.have(vmm=False)
    try:
        with pytest.raises(UnsupportedError, match="Fake GPU 0: this device has no virtual"):
            rig.make()
    finally:
        rig.fake.have()


def test_a_missing_driver_and_a_broken_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"no NVIDIA driver: .*libcuda-none"):
        probe(0, library="libcuda-none.so.1")
    source = tmp_path / "old.c"
    source.write_text(
        '__attribute__((visibility("default"))) int cuInit(unsigned flags) { return 0; }\n'
    )
    library = build(tmp_path, source)
    with pytest.raises(UnsupportedError, match="has no cuDriverGetVersion"):
        probe(0, library=str(library))


def test_a_device_that_is_not_there_is_named(rig: CudaRig) -> None:
    with pytest.raises(DriverError, match="cuDeviceGet on GPU 7 failed with CUDA_ERROR_INVALID"):
        probe(7, library=rig.fake.path)


def test_a_library_that_splits_the_gpu_is_refused(rig: CudaRig, tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 0 0 0 /usr/local/vgpu/libvgpu.so\n")
    with pytest.raises(UnsupportedError, match=r"libvgpu\.so stands between"):
        probe(0, library=rig.fake.path, maps=maps)


def test_wsl_is_refused(rig: CudaRig, tmp_path: Path) -> None:
    kernel = tmp_path / "version"
    kernel.write_text("Linux version 6.6.36-microsoft-standard-WSL2")
    with pytest.raises(UnsupportedError, match="WSL"):
        probe(0, library=rig.fake.path, kernel=kernel)


def test_an_installation_without_the_extension_says_so(
    rig: CudaRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvadmit._vmm_cuda", None)
    monkeypatch.delattr("kvadmit._vmm_cuda", raising=False)
    with pytest.raises(UnsupportedError, match="without its CUDA part"):
        vmm_cuda.probe(0, library=rig.fake.path)

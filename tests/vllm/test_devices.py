"""Which devices ranks are on, and what a configuration becomes on GPUs. No GPU needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvadmit.config import Settings
from kvadmit.errors import DriverError, UnsupportedError
from kvadmit.messages import Mps
from kvadmit.units import GIB, MIB
from kvadmit.vllm import devices as module
from kvadmit.vllm import engine_config, gates

pytestmark = pytest.mark.vllm

TOTAL = 140 * GIB


class NvmlError(Exception):
    pass


class Nvml:
    """As much of pynvml as is used; counts what is open."""

    NVMLError = NvmlError

    def __init__(self) -> None:
        self.open = 0
        self.fails = False
        self.processes: list[Any] = []

    def nvmlInit(self) -> None:  # NVML's name
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        if self.fails:
            raise NvmlError("lost")
        return SimpleNamespace(total=TOTAL, free=100 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return self.processes


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """Pretend to be on a machine with GPUs GPU-0, GPU-1, ..."""
    from vllm.utils import import_utils

    made = Nvml()
    platform = SimpleNamespace(
        device_type="cuda",
        get_device_uuid=lambda index: f"GPU-{index % 4}",
        is_xpu=lambda: False,
        is_rocm=lambda: False,
    )
    monkeypatch.setattr(import_utils, "import_pynvml", lambda: made)
    monkeypatch.setattr(module, "current_platform", platform)
    monkeypatch.setattr(engine_config, "current_platform", platform)
    return made


def config(ranks: int = 2, model: str = "nowhere/model", **parallel: Any) -> Any:
    made = {"world_size": ranks, "data_parallel_rank_local": None, "data_parallel_index": 0}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(made | parallel)),
        model_config=SimpleNamespace(model=model),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
        scheduler_config=SimpleNamespace(),
    )


def test_on_the_cpu_all_ranks_share_the_host_pool() -> None:
    found = module.devices_of(config(), Settings(host_pool=64 * MIB, margin=MIB))
    assert (found.backend, found.by_rank) == ("host", ("host", "host"))
    assert found.total_bytes == {"host": 64 * MIB}
    assert (found.margin_bytes, found.start_bytes) == (MIB, {"host": 0})


def test_each_rank_has_the_gpu_that_its_worker_will_choose(nvml: Nvml) -> None:
    found = module.devices_of(config(), Settings())
    assert found.by_rank == ("GPU-0", "GPU-1")
    assert found.total_bytes == {"GPU-0": TOTAL, "GPU-1": TOTAL}
    assert found.margin_bytes == TOTAL // 50
    assert found.start_bytes == dict.fromkeys(("GPU-0", "GPU-1"), 3 * GIB)
    assert found.granule_bytes == 2 * MIB
    second = module.devices_of(config(data_parallel_rank_local=1), Settings())
    assert second.by_rank == ("GPU-2", "GPU-3")
    assert nvml.open == 0


def test_two_ranks_on_one_gpu_are_refused(nvml: Nvml) -> None:
    with pytest.raises(UnsupportedError, match="8 ranks on 4 GPUs"):
        module.devices_of(config(8), Settings())


def test_a_local_checkpoint_counts_for_the_start(nvml: Nvml, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 4096)
    found = module.devices_of(config(model=str(tmp_path)), Settings())
    assert found.start_bytes["GPU-0"] == 3 * GIB + 2048
    assert module.devices_of(config(), Settings(start=7)).start_bytes["GPU-1"] == 7


def test_what_a_process_holds_is_known_where_nvml_sees_it(nvml: Nvml) -> None:
    nvml.processes = [SimpleNamespace(pid=7, usedGpuMemory=5 * GIB)]
    assert module.process_bytes("GPU-0", 7) == 5 * GIB
    assert module.process_bytes("GPU-0", 8) is None, "in a container its id is another one"
    nvml.processes = [SimpleNamespace(pid=7, usedGpuMemory=None)]
    assert module.process_bytes("GPU-0", 7) is None
    assert nvml.open == 0


def test_amd_gpus_are_not_taken_for_nvidias(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.device_type() == "cuda"
    monkeypatch.setattr("kvadmit.vllm.devices.current_platform.is_rocm", lambda: True)
    with pytest.raises(UnsupportedError, match="device type 'rocm'"):
        gates.check_supported(config(), module.device_type())


def test_several_ranks_on_gpus_need_mps_beside_a_neighbour(
    nvml: Nvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert module.devices_of(config(1), Settings()).mps == Mps()
    assert module.devices_of(config(2), Settings()).mps == Mps(needed=True)
    assert module.devices_of(config(2), Settings(mps="ignore")).mps == Mps()
    pid_file = tmp_path / "nvidia-cuda-mps-control.pid"
    pid_file.write_text(f"{os.getpid()}\n")
    assert module.devices_of(config(2), Settings()).mps == Mps(str(tmp_path), needed=True)
    assert module.devices_of(config(1), Settings()).mps == Mps(str(tmp_path))
    pid_file.write_text("no number")
    assert module.mps_daemon() == ""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    pid_file.write_text(str(ended.pid))
    assert module.mps_daemon() == "", "a daemon that has ended serves nobody"


def test_a_reading_needs_no_context_and_a_lost_gpu_is_named(nvml: Nvml) -> None:
    assert module.read_gpu("GPU-1") == (100 * GIB, TOTAL)
    nvml.fails = True
    with pytest.raises(DriverError, match="nvmlDeviceGetMemoryInfo on GPU-1 failed with lost"):
        module.read_gpu("GPU-1")
    assert nvml.open == 0


def test_a_gpu_is_addressed_as_far_as_it_can_be_lent_or_the_cap_allows(nvml: Nvml) -> None:
    assert engine_config.virtual_bytes(config(), Settings(margin=GIB)) == TOTAL - GIB
    assert engine_config.virtual_bytes(config(), Settings(cap=2 * GIB)) == 2 * GIB
    given = config()
    given.cache_config.kv_cache_memory_bytes = 5
    assert engine_config.virtual_bytes(given, Settings()) == 5


@pytest.mark.parametrize(
    ("layout", "chosen"), [("auto", "BLNHC"), ("stock", None), ("LBHNC", "LBHNC")]
)
def test_on_gpus_blocks_are_outermost_and_the_worker_is_a_process(
    nvml: Nvml, layout: str, chosen: str | None
) -> None:
    given = config(distributed_executor_backend="uni")
    given.cache_config.kv_cache_layout = None
    arguments = _EngineArgs()
    engine_config._apply(given, Settings(layout=layout), arguments)
    assert given.cache_config.kv_cache_layout == chosen
    assert given.parallel_config.distributed_executor_backend == "mp"


def _EngineArgs() -> Any:  # stands for the class
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model="nowhere/model")

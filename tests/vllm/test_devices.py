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


def _EngineArgs(**more: Any) -> Any:  # stands for the class
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model="nowhere/model", **more)


def test_a_set_utilization_gets_a_warning_that_says_what_it_means_now(
    nvml: Nvml, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_config.logger, "propagate", True)

    def warned(**more: Any) -> list[str]:
        caplog.clear()
        given = config(distributed_executor_backend="mp")
        engine_config._apply(given, Settings(), _EngineArgs(**more))
        assert given.cache_config.kv_cache_memory_bytes == TOTAL - TOTAL // 50
        return [record.getMessage() for record in caplog.records]

    assert warned() == []
    (text,) = warned(gpu_memory_utilization=0.37)
    assert text.startswith("gpu_memory_utilization=0.37 does not size the KV cache beside kvadmit")
    assert text.endswith("Use kvadmit.cap and kvadmit.floor to bound it")


# --- what vLLM's worker measures while others use the device ----------------------------------


class Gpu:
    """A device whose free memory others change, behind what PyTorch answers of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
        import torch
        from vllm.utils import mem_utils

        self.free_bytes = free_bytes
        answers = {
            "get_memory_info": lambda _: (self.free_bytes, TOTAL),
            "memory_stats": lambda _: {},
            "memory_reserved": lambda _: 0,
            "reset_peak_memory_stats": lambda _: None,
            "empty_cache": lambda: None,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.accelerator, name, answer)
        platform = SimpleNamespace(is_integrated_gpu=lambda _: False)
        monkeypatch.setattr(mem_utils, "current_platform", platform)

    def measured_by_a_worker(self, cache: Any, *, freed_meanwhile: int) -> int:
        """Have vLLM's GPU worker say how large its KV cache is; raises what it raises."""
        import torch
        from vllm.config import VllmConfig
        from vllm.utils.mem_utils import MemorySnapshot
        from vllm.v1.worker.gpu_worker import Worker
        from vllm.v1.worker.utils import request_memory

        def profile_run(randomize_inputs: bool) -> None:
            self.free_bytes += freed_meanwhile

        worker: Any = Worker.__new__(Worker)
        worker.vllm_config = VllmConfig()
        worker.parallel_config = worker.vllm_config.parallel_config
        worker.model_config = SimpleNamespace(multimodal_config=None)
        worker.model_runner = SimpleNamespace(profile_run=profile_run, model_memory_usage=GIB)
        worker.cache_config = cache
        worker.init_snapshot = MemorySnapshot(device=torch.device("cuda:0"))
        worker.requested_memory = request_memory(worker.init_snapshot, cache)
        return int(worker.determine_available_memory())


def test_a_neighbour_that_frees_memory_during_profiling_does_not_stop_a_start(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that holds nearly all there is; the size is as on a device of one's own."""
    stock = SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.5)
    with pytest.raises(AssertionError, match=r"other processes .* release GPU memory"):
        Gpu(monkeypatch, 100 * GIB).measured_by_a_worker(stock, freed_meanwhile=8 * GIB)
    ours = config(distributed_executor_backend="mp")
    engine_config._apply(ours, Settings(), _EngineArgs())
    for free_bytes, freed_meanwhile in ((TOTAL, 0), (100 * GIB, 8 * GIB), (2 * GIB, -GIB)):
        gpu = Gpu(monkeypatch, free_bytes)
        found = gpu.measured_by_a_worker(ours.cache_config, freed_meanwhile=freed_meanwhile)
        assert found == TOTAL - TOTAL // 50

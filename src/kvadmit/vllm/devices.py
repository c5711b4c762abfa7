"""Which devices an engine's ranks are on, as far as EngineCore may know: without CUDA.

Owns: keys, sizes and readings of devices. On NVIDIA GPUs all of it comes from NVML, which makes
no context; what only the driver knows, the workers find out (`vmm_cuda`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
from vllm.platforms import current_platform

from kvadmit.config import Settings
from kvadmit.errors import DriverError, UnsupportedError
from kvadmit.messages import Mps
from kvadmit.units import GIB, MIB
from kvadmit.vmm_host import GRANULE_BYTES

HOST = "host"
CUDA_GRANULE_BYTES = 2 * MIB
"""The driver's on every GPU so far; a worker whose driver says otherwise refuses its layout."""
MARGIN_SHARE = 50
START_BYTES = 3 * GIB
"""Beside weights: a context, graphs, collectives and the activations of warm-up."""


MPS_VARIABLE, MPS_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"  # noqa: S108
MPS_PID_FILE = "nvidia-cuda-mps-control.pid"


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks of one engine are. `by_rank`: the device of each."""

    backend: str
    by_rank: tuple[str, ...]
    total_bytes: dict[str, int]
    granule_bytes: int
    margin_bytes: int
    start_bytes: dict[str, int]
    mps: Mps = Mps()


def device_type() -> str:
    """Return what vLLM runs on here. It calls AMD's GPUs cuda too; we do not."""
    return "rocm" if current_platform.is_rocm() else str(current_platform.device_type)


def devices_of(vllm_config: Any, settings: Settings) -> Devices:
    """Return the devices of an engine's ranks. Raises UnsupportedError, DriverError."""
    ranks: int = vllm_config.parallel_config.world_size
    if current_platform.device_type == "cpu":
        return Devices(
            backend="host",
            by_rank=(HOST,) * ranks,
            total_bytes={HOST: settings.host_pool},
            granule_bytes=GRANULE_BYTES,
            margin_bytes=settings.margin or 0,
            # Weights and activations are not in the host pool: nothing is needed beside KV.
            start_bytes={HOST: settings.start or 0},
        )
    by_rank = tuple(_cuda_uuid(index) for index in _cuda_indices(vllm_config.parallel_config))
    if len(set(by_rank)) < ranks:
        raise UnsupportedError(f"{ranks} ranks on {len(set(by_rank))} GPUs: give each its own")
    total_bytes = {uuid: _memory(uuid).total for uuid in by_rank}
    margin, start = settings.margin, settings.start
    if margin is None:
        margin = max(total_bytes.values()) // MARGIN_SHARE
    if start is None:
        start = START_BYTES + weights_bytes(vllm_config.model_config.model) // ranks
    return Devices(
        backend="cuda",
        by_rank=by_rank,
        total_bytes=total_bytes,
        granule_bytes=CUDA_GRANULE_BYTES,
        margin_bytes=margin,
        start_bytes=dict.fromkeys(by_rank, start),
        mps=Mps(mps_daemon(), needed=ranks > 1 and settings.mps == "require"),
    )


def mps_daemon() -> str:
    """Return the pipe directory of the MPS daemon that this process's workers will use, or "".

    What the CUDA driver does: a client looks for the control pipe in CUDA_MPS_PIPE_DIRECTORY.
    Only a daemon that runs counts. Its pid file lies beside the pipe.
    """
    directory = Path(os.environ.get(MPS_VARIABLE) or MPS_DIRECTORY)
    try:
        pid = int((directory / MPS_PID_FILE).read_text())
    except (OSError, ValueError):
        return ""
    return str(directory.resolve()) if Path(f"/proc/{pid}").exists() else ""


def read_gpu(uuid: str) -> tuple[int, int]:
    """Return a GPU's free and total bytes, without a context on it. Raises DriverError."""
    memory = _memory(uuid)
    return memory.free, memory.total


def process_bytes(uuid: str, pid: int) -> int | None:
    """Return the bytes that process `pid` holds on a GPU; None where NVML does not see it.

    So it is in a container with process ids of its own. Raises DriverError.
    """
    for process in _ask_nvml(uuid, "nvmlDeviceGetComputeRunningProcesses"):
        if process.pid == pid:
            return None if process.usedGpuMemory is None else int(process.usedGpuMemory)
    return None


def weights_bytes(model: str) -> int:
    """Return the bytes of a local checkpoint's weights; 0 for a model that is not on disk."""
    directory = Path(model)
    if not directory.is_dir():
        return 0
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def _cuda_indices(parallel: Any) -> range:
    """Return the visible index of each rank's GPU, as vLLM's workers choose it."""
    replica = getattr(parallel, "data_parallel_rank_local", None)
    if replica is None:
        replica = getattr(parallel, "data_parallel_index", 0) or 0
    first = replica * parallel.world_size
    return range(first, first + parallel.world_size)


def _cuda_uuid(index: int) -> str:
    return str(current_platform.get_device_uuid(index))


def _memory(uuid: str) -> Any:
    return _ask_nvml(uuid, "nvmlDeviceGetMemoryInfo")


def _ask_nvml(uuid: str, call: str) -> Any:
    from vllm.utils.import_utils import import_pynvml

    nvml = import_pynvml()
    try:
        nvml.nvmlInit()
        try:
            return getattr(nvml, call)(nvml.nvmlDeviceGetHandleByUUID(uuid))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise DriverError(call, uuid, str(error)) from error

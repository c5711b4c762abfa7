"""How an instance is started under each policy: the one place where policies differ.

Owns: the policies' names, engine arguments and environments. Must not know: what they
decide at run time.

On CPUs all of them wait for messages alike (`short_waits`); on GPUs as vLLM does.

- `static`: stock vLLM, the pool split evenly.
- `kvcached`: kvcached, EngineCore-owned; GPUs only.
- `sync`: growth as a synchronous call on the scheduler's path (see `sync_policy/`).
- `event`: kvadmit.
- `event-layers`: kvadmit with layers outermost, one driver mapping per layer; GPUs only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from bench.colocated import delay
from bench.colocated.channel import Spec
from bench.colocated.setup import Setup
from kvadmit.units import GIB

Policy = Literal["static", "kvcached", "sync", "event", "event-layers"]
POLICIES: tuple[str, ...] = get_args(Policy)
ON_GPUS = ("kvcached", "event-layers")
"""Those that there is nothing to run of on a CPU."""

ROOT = Path(__file__).resolve().parents[2]
PLUGIN_PATHS = (str(ROOT), str(ROOT / "bench" / "colocated" / "plugins"))
"""What a process of vLLM's needs on its path to find the bench's plugins."""
PLUGINS = {
    "static": (),
    "kvcached": (),
    "sync": ("kvadmit_bench_sync",),
    "event": ("kvadmit", "kvadmit_bench_event"),
    "event-layers": ("kvadmit", "kvadmit_bench_event"),
}
SHORT_WAITS = "kvadmit_bench_short_waits"
MARGIN_BYTES = 1 * GIB
"""What no policy lends of a GPU: PyTorch's allocator may grow a little at any time."""
LAYER_OUTERMOST = "LBNHC"
UTILIZATION = 0.01
"""For whoever is told the size of its KV cache: vLLM's gate at the start asks for no more."""
BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
GRAPH_BATCHES = [1, 2, 4, 8, *range(16, 257, 16)]


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One instance to start: its first line and its environment."""

    spec: Spec
    environment: dict[str, str]


def launches(
    setup: Setup, policy: str, run_dir: str, site: Mapping[str, str] | None = None
) -> list[Launch]:
    """Return what to start for `policy`; `run_dir` is the instances' common directory.

    `site`: variables that every instance gets on this machine, like an MPS daemon's.
    """
    made = []
    for number in range(setup.shape.instances):
        name = f"{policy}-{chr(ord('a') + number)}"
        spec = Spec(
            name=name,
            policy=policy,
            engine=setup.engine,
            sample_s=setup.sample_s,
            vocabulary=VOCABULARY,
            engine_args=_arguments(setup, policy, name, run_dir),
        )
        environment = _environment(setup, policy, name) | dict(site or {})
        made.append(Launch(spec=spec, environment=environment))
    return made


VOCABULARY = 256
"""Token ids of prompts stay below this: plain bytes in the tiny model's vocabulary."""


def share_bytes(setup: Setup) -> int:
    """Return the bytes of one rank when the pool is split evenly."""
    return setup.pool_bytes // (setup.shape.instances * setup.tp)


def _arguments(setup: Setup, policy: str, name: str, run_dir: str) -> dict[str, Any]:
    memory = _memory(setup, policy, name, run_dir)
    if setup.engine == "sim":  # see sim_engine
        return {
            "tp": setup.tp,
            "block_tokens": setup.block_tokens,
            "max_model_len": setup.max_model_len,
            "max_num_seqs": setup.max_num_seqs,
            "pool_bytes": setup.pool_bytes,
            "run_dir": run_dir,
            **memory,
        }
    return {
        "model": setup.model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "seed": setup.seed,
        "tensor_parallel_size": setup.tp,
        "max_model_len": setup.max_model_len,
        "block_size": setup.block_tokens,
        "max_num_seqs": setup.max_num_seqs,
        "max_num_batched_tokens": BATCH_TOKENS[setup.device],
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        **_device_arguments(setup),
        **memory,
    }


def _device_arguments(setup: Setup) -> dict[str, Any]:
    if setup.device == "cpu":
        return {"enforce_eager": True}
    attention = {"attention_backend": setup.attention} if setup.attention else {}
    return {
        **attention,
        "dtype": "bfloat16",
        # Also with one rank, so that what EngineCore holds is its own.
        "distributed_executor_backend": "mp",
        "compilation_config": {"cudagraph_capture_sizes": GRAPH_BATCHES},
    }


def _memory(setup: Setup, policy: str, name: str, run_dir: str) -> dict[str, Any]:
    on_gpus = setup.device == "cuda"
    if policy == "static":
        fixed = {"gpu_memory_utilization": UTILIZATION} if on_gpus else {}
        return {"kv_cache_memory_bytes": share_bytes(setup), **fixed}
    if policy == "kvcached":
        # What an instance may have by itself: all the KV memory, and what it holds beside it.
        most = setup.pool_bytes // setup.tp + setup.base_bytes
        return {"gpu_memory_utilization": most / setup.gpus[0].total_bytes}
    section: dict[str, Any] = {"enable": True, "name": name, "run_dir": run_dir}
    if on_gpus:
        section |= {
            "layout": LAYER_OUTERMOST if policy == "event-layers" else "auto",
            "margin": MARGIN_BYTES,
            "start": setup.base_bytes,
            "cap": setup.pool_bytes // setup.tp,
        }
    else:
        section["host_pool"] = setup.pool_bytes
    return {"additional_config": {"kvadmit": section}}


def _environment(setup: Setup, policy: str, name: str) -> dict[str, str]:
    plugins = (SHORT_WAITS, *PLUGINS[policy]) if setup.device == "cpu" else PLUGINS[policy]
    environment = dict(os.environ)
    environment.update(
        # An allow-list; an unset one would load every plugin there is.
        VLLM_PLUGINS=",".join(plugins),
        VLLM_LOGGING_LEVEL="WARNING" if setup.device == "cpu" else "INFO",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
        PYTHONPATH=os.pathsep.join([*PLUGIN_PATHS, *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    if setup.device == "cpu":
        # One compute thread per rank, wherever the system likes: with more, instances on few
        # cores measure each other's barriers. The same for every policy.
        environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if policy == "kvcached":
        environment |= {
            "ENABLE_KVCACHED": "true",
            "KVCACHED_AUTOPATCH": "1",
            "KVCACHED_IPC_NAME": f"{name}-{os.getpid()}",
            "KVCACHED_GPU_UTILIZATION": str(1 - MARGIN_BYTES / setup.gpus[0].total_bytes),
        }
    environment[delay.VARIABLE] = str(setup.worker_delay_ms)
    return environment

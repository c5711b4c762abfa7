"""How an instance is started under each policy: the one place where policies differ.

Owns: the policies' names, engine arguments and environments. Must not know: what they
decide at run time.

All of them wait for messages alike (`short_waits`).

- `static`: stock vLLM, the pool split evenly.
- `sync`: growth as a synchronous call on the scheduler's path (see `sync_policy/`).
- `event`: kvadmit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from bench.colocated import delay
from bench.colocated.channel import Spec
from bench.colocated.setup import Setup

Policy = Literal["static", "sync", "event"]
POLICIES: tuple[str, ...] = get_args(Policy)

ROOT = Path(__file__).resolve().parents[2]
PLUGIN_PATHS = (str(ROOT), str(ROOT / "bench" / "colocated" / "plugins"))
"""What a process of vLLM's needs on its path to find the bench's plugins."""
PLUGINS = {
    "static": "kvadmit_bench_short_waits",
    "sync": "kvadmit_bench_short_waits,kvadmit_bench_sync",
    "event": "kvadmit_bench_short_waits,kvadmit,kvadmit_bench_event",
}
"""vLLM's allow-list of plugins; an unset one would load every plugin there is."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One instance to start: its first line and its environment."""

    spec: Spec
    environment: dict[str, str]


def launches(setup: Setup, policy: str, run_dir: str) -> list[Launch]:
    """Return what to start for `policy`; `run_dir` is the instances' common directory."""
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
        made.append(Launch(spec=spec, environment=_environment(setup, policy)))
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
        "enforce_eager": True,
        "seed": setup.seed,
        "tensor_parallel_size": setup.tp,
        "max_model_len": setup.max_model_len,
        "block_size": setup.block_tokens,
        "max_num_seqs": setup.max_num_seqs,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        **memory,
    }


def _memory(setup: Setup, policy: str, name: str, run_dir: str) -> dict[str, Any]:
    if policy == "static":
        return {"kv_cache_memory_bytes": share_bytes(setup)}
    section = {"enable": True, "name": name, "run_dir": run_dir, "host_pool": setup.pool_bytes}
    return {"additional_config": {"kvadmit": section}}


def _environment(setup: Setup, policy: str) -> dict[str, str]:
    environment = dict(os.environ)
    environment.update(
        VLLM_PLUGINS=PLUGINS[policy],
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
        # One compute thread per rank, wherever the system likes: with more, instances on few
        # cores measure each other's barriers. The same for every policy.
        OMP_NUM_THREADS="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        PYTHONPATH=os.pathsep.join([*PLUGIN_PATHS, *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    environment[delay.VARIABLE] = str(setup.worker_delay_ms)
    return environment

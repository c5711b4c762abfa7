"""What cannot work together with kvadmit yet, refused at start with the reason.

Owns: the list. Must not know: what happens after a refusal (start fails, or stock vLLM
runs). Every gate reads a `VllmConfig` only and tolerates versions that lack the field.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from kvadmit.errors import UnsupportedError

Gate = Callable[[Any], str]


def check_supported(vllm_config: Any, device_type: str) -> None:
    """Raise UnsupportedError naming the first thing in `vllm_config` that cannot work."""
    if device_type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"device type {device_type!r}: kvadmit shares the memory of NVIDIA GPUs and of vLLM's "
            "CPU build"
        )
    for gate in GATES:
        reason = gate(vllm_config)
        if reason:
            raise UnsupportedError(reason)


def _get(owner: Any, *path: str) -> Any:
    """Return the attribute at `path`, or None where a version does not have it."""
    for name in path:
        owner = getattr(owner, name, None)
    return owner


def _several_hosts(config: Any) -> str:
    nodes = _get(config, "parallel_config", "nnodes") or 1
    if nodes > 1:
        return f"{nodes} nodes: all ranks of an instance must be on one host; start it with one"
    return ""


def _executor(config: Any) -> str:
    backend = _get(config, "parallel_config", "distributed_executor_backend")
    if backend in ("mp", "uni"):
        return ""
    name = getattr(backend, "__name__", backend)
    why = {
        "external_launcher": "several schedulers would have to take the same decisions",
        "ray": "ranks may lie on other hosts",
    }.get(str(name), "its workers are unknown to kvadmit")
    return f"executor {name!r}: {why}; use --distributed-executor-backend mp"


def _attention_free(config: Any) -> str:
    if _get(config, "cache_config", "is_attention_free"):
        return "the model keeps no KV cache: there is nothing to share"
    return ""


def _auto_length(config: Any) -> str:
    if _get(config, "model_config", "original_max_model_len") == -1:
        return (
            "max_model_len=-1 would be fitted to the virtual size, not to memory that can be "
            "had; set a number"
        )
    return ""


def _sleep_mode(config: Any) -> str:
    if _get(config, "model_config", "enable_sleep_mode"):
        return "sleep mode releases the KV cache behind kvadmit's back; drop --enable-sleep-mode"
    return ""


def _elastic_ep(config: Any) -> str:
    if _get(config, "parallel_config", "enable_elastic_ep"):
        return "elastic expert parallelism: new engines take the size of the KV cache from peers"
    return ""


def _connector(config: Any) -> str:
    name = _get(config, "kv_transfer_config", "kv_connector")
    if name is None:
        return ""
    return (
        f"KV connector {name}: connectors read blocks after they were freed or register the whole "
        "KV buffer, parts of which have no memory behind them; drop --kv-transfer-config"
    )


def _pipeline(config: Any) -> str:
    stages = _get(config, "parallel_config", "pipeline_parallel_size") or 1
    if stages > 1:
        return f"pipeline_parallel_size={stages}: it was never run with kvadmit; use 1"
    return ""


def _hisparse(config: Any) -> str:
    if _get(config, "attention_config", "hisparse_config") is not None:
        return "HiSparse reads pages after they were freed; it cannot run on shared memory"
    return ""


def _flex_attention(config: Any) -> str:
    backend = _get(config, "attention_config", "backend")
    if "FLEX" in str(getattr(backend, "name", backend)).upper():
        return "FlexAttention's tables grow with the virtual block count; use another backend"
    return ""


def _extensible(config: Any) -> str:
    """Upstream's own extensible KV cache, under whatever name it lands."""
    cache = _get(config, "cache_config")
    flags = [name for name in vars(cache) if "extensible" in name and getattr(cache, name)]
    flags += [
        name
        for name, value in os.environ.items()
        if name.startswith("VLLM_") and "EXTENSIBLE" in name and value not in ("", "0")
    ]
    if flags:
        return f"vLLM's own extensible KV cache ({', '.join(flags)}) is on; choose one of the two"
    return ""


def _snapshot(config: Any) -> str:
    sources = (_get(config, "load_config"), _get(config, "model_config"), config)
    flags = [
        name
        for source in sources
        if source is not None
        for name in vars(source)
        if "snapshot" in name and getattr(source, name)
    ]
    if flags:
        return f"snapshots of a running engine ({', '.join(flags)}) would miss its KV memory"
    return ""


GATES: tuple[Gate, ...] = (
    _several_hosts,
    _executor,
    _attention_free,
    _auto_length,
    _sleep_mode,
    _elastic_ep,
    _connector,
    _pipeline,
    _hisparse,
    _flex_attention,
    _extensible,
    _snapshot,
)

"""The one hook that is always there: a user's flag becomes an engine configuration.

Owns: reading `additional_config["kvadmit"]`, the refusals, and what is set in the
`VllmConfig`. Must not know: what EngineCore and workers do with it.

What is decided here travels as plain attributes on the configuration: those survive the
pickle to EngineCore and workers and stay out of vLLM's compile-cache key, which hashes
`additional_config`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

import vllm
from kvadmit.config import Settings
from kvadmit.errors import ConfigError, UnsupportedError
from kvadmit.vllm import gates, shapes
from kvadmit.vllm.devices import device_type, devices_of
from kvadmit.vllm.names import ENABLED, FITS_LENGTH

logger = logging.getLogger("vllm.kvadmit")

BLOCK_OUTERMOST = "BLNHC"
"""vLLM's layout in which a block's layers lie side by side: one mapping backs an extent."""
UTILIZATION = 0.01
"""What vLLM's start-up gate asks of the device; KV memory does not come out of it."""


def wrap_create_engine_config(original: Any, activate: Callable[[], None]) -> Callable[..., Any]:
    """Make the replacement of `EngineArgs.create_engine_config`.

    `activate` installs the other hooks, here and in processes that start from here on.
    """

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = original(self, *args, **kwargs)
        settings = read_settings(vllm_config)
        if settings is not None and _may_run(vllm_config, settings):
            _apply(vllm_config, settings, self)
            activate()
            _show_metrics(settings)
            logger.info("kvadmit is active in this process: its engines start with it")
        return vllm_config

    return create_engine_config


def _show_metrics(settings: Settings) -> None:
    from kvadmit.vllm.metrics import COLLECTOR  # not needed, and not loaded, when off

    COLLECTOR.watch(settings.run_dir)


def read_settings(vllm_config: Any) -> Settings | None:
    """Return the settings of a configuration that asks for kvadmit, else None.

    Raises ConfigError for a bad key or value, whether enabled or not.
    """
    additional = getattr(vllm_config, "additional_config", None)
    if not isinstance(additional, Mapping) or "kvadmit" not in additional:
        return None
    given = additional["kvadmit"]
    if not isinstance(given, Mapping):
        raise ConfigError("enable", given, 'a mapping, like {"kvadmit": {"enable": true}}')
    settings = Settings.parse(given)
    return settings if settings.enable else None


def is_enabled(vllm_config: Any) -> bool:
    """Whether the engine of this configuration runs with kvadmit."""
    return bool(getattr(vllm_config, ENABLED, False))


def _may_run(vllm_config: Any, settings: Settings) -> bool:
    try:
        shapes.check_installed(vllm.__version__, str(Path(vllm.__file__).parent))
        gates.check_supported(vllm_config, device_type())
        if current_platform.device_type != "cpu":
            logger.warning("kvadmit is new on GPUs and not for production there yet")
    except UnsupportedError as error:
        if settings.require:
            raise
        logger.warning("kvadmit cannot run here, serving with stock vLLM: %s", error)
        return False
    return True


def _apply(vllm_config: Any, settings: Settings, engine_args: Any) -> None:
    """Have vLLM plan a virtual KV cache and measure nothing for it."""
    cache = vllm_config.cache_config
    _warn_of_utilization(engine_args)
    setattr(vllm_config, FITS_LENGTH, cache.kv_cache_memory_bytes is None)
    cache.kv_cache_memory_bytes = virtual_bytes(vllm_config, settings)
    cache.gpu_memory_utilization = UTILIZATION
    layout = settings.layout
    if layout == "auto":
        layout = "stock" if current_platform.device_type == "cpu" else BLOCK_OUTERMOST
    if layout != "stock":
        cache.kv_cache_layout = layout
    parallel = vllm_config.parallel_config
    if current_platform.device_type != "cpu" and parallel.distributed_executor_backend == "uni":
        # The worker would run inside EngineCore, which must have no CUDA context.
        parallel.distributed_executor_backend = "mp"
    setattr(vllm_config, ENABLED, True)


def virtual_bytes(vllm_config: Any, settings: Settings) -> int:
    """Return the size of one rank's address range: most that the rank could ever hold.

    A size the user gave vLLM is an exact ceiling of every rank. Otherwise the ranks share
    what their device can lend.
    """
    explicit = vllm_config.cache_config.kv_cache_memory_bytes
    if explicit is not None:
        return int(explicit)
    devices = devices_of(vllm_config, settings)
    ranks = Counter(devices.by_rank)
    share = min(
        (devices.total_bytes[device] - devices.margin_bytes) // count
        for device, count in ranks.items()
    )
    if devices.backend == "cuda" and settings.cap is not None:
        share = min(share, settings.cap)  # vLLM makes a Python object for each block
    return share


def _warn_of_utilization(engine_args: Any) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(type(engine_args))}
    given = engine_args.gpu_memory_utilization
    if given != defaults.get("gpu_memory_utilization", given):
        logger.warning(
            "gpu_memory_utilization=%s does not size the KV cache beside kvadmit: memory comes "
            "from what all instances share. Use kvadmit.cap and kvadmit.floor to bound it",
            given,
        )

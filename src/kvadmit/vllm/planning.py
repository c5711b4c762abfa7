"""From vLLM's KV cache plan to extents.

Owns: reading vLLM's placements, having it plan again for a whole number of extents, and
fitting max_model_len under the ceiling. Must not know: how extents are chosen (`geometry`)
or backed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvadmit.config import Settings
from kvadmit.errors import CapacityError, LocalProtocolError
from kvadmit.geometry import ExtentPlan, Placement, RankBuffer, describe_buffer, plan_extents
from kvadmit.units import ceil_div
from kvadmit.vllm.devices import Devices
from kvadmit.vllm.engine_core import Engine, engine_of
from kvadmit.vllm.names import FITS_LENGTH, PLAN

logger = logging.getLogger("vllm.kvadmit")

PREFIX_BLOCKS = 1
"""Block ids that anything touches before serving: the null block alone, since warm-up is
capped to the prefix."""


def wrap_get_kv_cache_configs(original: Any) -> Callable[..., Any]:
    """Make the replacement of `get_kv_cache_configs` in EngineCore's namespace."""

    def get_kv_cache_configs(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        engine = engine_of(vllm_config)
        if engine is None:
            return original(vllm_config, *args, **kwargs)

        def plan() -> list[Any]:
            configs: list[Any] = original(vllm_config, *args, **kwargs)
            return configs

        try:
            _fit_length_to_pool(vllm_config, plan)
            return _plan_in_extents(engine, vllm_config, plan)
        except BaseException:
            engine.abandon()
            raise

    return get_kv_cache_configs


def _fit_length_to_pool(vllm_config: Any, plan: Callable[[], list[Any]]) -> None:
    """Lower max_model_len if the whole pool holds no such request, by vLLM's own fitting.

    Nothing is lowered to a size the user set: vLLM's error about it is the right one.
    """
    model = vllm_config.model_config
    if not getattr(vllm_config, FITS_LENGTH):
        return
    before, asked = model.max_model_len, model.original_max_model_len
    model.original_max_model_len = -1
    try:
        plan()
    finally:
        model.original_max_model_len = asked
    if model.max_model_len != before:
        logger.warning(
            "max_model_len is %d instead of %d: the memory that all instances share holds no "
            "longer request",
            model.max_model_len,
            before,
        )


def _plan_in_extents(engine: Engine, vllm_config: Any, plan: Callable[[], list[Any]]) -> list[Any]:
    configs = plan()
    if not any(config.kv_cache_tensors for config in configs):
        raise CapacityError("the model keeps no KV cache: there is nothing to share")
    devices = engine.devices
    ranks = [_rank_buffer(config, devices, rank) for rank, config in enumerate(configs)]
    extents = _choose(ranks, engine.settings, vllm_config, configs)
    if extents.blocks != configs[0].num_blocks:
        configs = _with_blocks(vllm_config, extents.blocks, plan)
    for number, (config, rank) in enumerate(zip(configs, ranks, strict=True)):
        again = _rank_buffer(config, devices, number)
        if config.num_blocks != extents.blocks or again != rank:
            raise LocalProtocolError(
                f"vLLM planned {config.num_blocks} blocks where {extents.blocks} were asked for, "
                "or laid them out differently"
            )
        setattr(config, PLAN, extents)
    engine.set_plan(extents)
    return configs


def _with_blocks(vllm_config: Any, blocks: int, plan: Callable[[], list[Any]]) -> list[Any]:
    """Have vLLM plan for exactly `blocks` blocks; its own override comes back afterwards."""
    cache = vllm_config.cache_config
    before = cache.num_gpu_blocks_override
    cache.num_gpu_blocks_override = blocks
    try:
        return plan()
    finally:
        cache.num_gpu_blocks_override = before


def _rank_buffer(config: Any, devices: Devices, rank: int) -> RankBuffer:
    """Return how the buffer of `rank` is laid out. A rank without layers has none."""
    tensors = [t for t in config.kv_cache_tensors if not getattr(t, "host_resident", False)]
    if not tensors:
        raise CapacityError("a rank without a KV cache: spread the layers over fewer stages")
    return describe_buffer(
        [
            Placement(tensor.offset, len(tensor.layers), tensor.layer_stride, tensor.block_stride)
            for tensor in tensors
        ],
        device=devices.by_rank[rank],
        granule_bytes=devices.granule_bytes,
        buffer_bytes=tensors[0].size,
        blocks=config.num_blocks,
    )


def _choose(
    ranks: list[RankBuffer], settings: Settings, vllm_config: Any, configs: list[Any]
) -> ExtentPlan:
    """Choose extents; lower max_model_len first if one such request exceeds the cap."""
    blocks_max = configs[0].num_blocks

    def choose() -> ExtentPlan:
        return plan_extents(
            ranks,
            settings,
            blocks_max=blocks_max,
            request_blocks=request_blocks(vllm_config, configs),
            prefix_blocks=PREFIX_BLOCKS,
        )

    extents = choose()
    ceiling = extents.cap * extents.extent_blocks - 1
    if request_blocks(vllm_config, configs) <= ceiling:
        return extents
    _fit_length(vllm_config, configs, ceiling)
    return choose()


def request_blocks(vllm_config: Any, configs: list[Any]) -> int:
    """Return the blocks that one request of max_model_len takes over all cache groups."""
    return max(
        sum(
            ceil_div(
                group.kv_cache_spec.max_memory_usage_bytes(vllm_config),
                group.kv_cache_spec.page_size_bytes,
            )
            for group in config.kv_cache_groups
            if not getattr(group, "host_resident", False)
        )
        for config in configs
    )


def _fit_length(vllm_config: Any, configs: list[Any], ceiling: int) -> None:
    """Set max_model_len to the longest that `ceiling` blocks hold.

    EngineCore passes a changed value on to workers and front ends, as it does when vLLM fits
    the length itself: requests above it get HTTP 400 there.
    """
    model = vllm_config.model_config
    before = high = model.max_model_len
    low = 0
    while low < high:
        model.max_model_len = (low + high + 1) // 2
        if request_blocks(vllm_config, configs) <= ceiling:
            low = model.max_model_len
        else:
            high = model.max_model_len - 1
    model.max_model_len = low or before
    if low == 0:
        raise CapacityError(
            f"kvadmit.cap leaves {ceiling} blocks, too few for a request of one token; raise it"
        )
    logger.warning(
        "max_model_len is %d instead of %d: kvadmit.cap leaves %d KV cache blocks to one request",
        low,
        before,
        ceiling,
    )

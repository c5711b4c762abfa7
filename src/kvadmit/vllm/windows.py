"""Blocks that left a live request's attention window but may still be read.

Owns: which extents such blocks pin. Must not know: why extents are withdrawn.

vLLM frees blocks behind a sliding window (or local chunk) while the request lives on; up to
0.32, and in the V1 runner of any version, the worker's table still names them, and a kernel
that masks only the upper bound reads them. Such an extent is not withdrawn before
the request ends. Needs nothing where the worker replaces the stale ids itself.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

import vllm
from kvadmit.pool import ElasticPool
from kvadmit.vllm.shapes import minor


def windowed_managers(vllm_config: Any, coordinator: Any) -> list[Any]:
    """Return the managers of windowed groups whose freed blocks may still be read."""
    nulled_by_worker = minor(vllm.__version__) >= "0.33" and vllm_config.use_v2_model_runner
    if nulled_by_worker:
        return []
    return [
        manager
        for manager in coordinator.single_type_managers
        if not isinstance(manager.kv_cache_spec, FullAttentionSpec)
    ]


class WindowPins:
    """Pins, by request, the extents of blocks freed behind its window."""

    def __init__(self, pool: ElasticPool[Any], coordinator: Any, block_pool: Any) -> None:
        """Watch every manager of `coordinator`; full attention frees nothing early."""
        self._pool = pool
        self._block_pool = block_pool
        self._pinned: dict[str, set[int]] = {}
        for manager in coordinator.single_type_managers:
            if not isinstance(manager.kv_cache_spec, FullAttentionSpec):
                self._watch(manager)

    def _watch(self, manager: Any) -> None:
        remove_skipped_blocks = manager.remove_skipped_blocks
        pop_blocks_for_free = manager.pop_blocks_for_free
        block_pool, free_blocks = self._block_pool, self._block_pool.free_blocks
        request_id = ""

        def free_and_pin(blocks: Any) -> Any:
            freed = list(blocks)
            self._pin(request_id, freed)
            return free_blocks(freed)

        def watched_remove(removed_from: str, *args: Any, **kwargs: Any) -> Any:
            nonlocal request_id
            request_id = removed_from
            block_pool.free_blocks = free_and_pin
            try:
                return remove_skipped_blocks(removed_from, *args, **kwargs)
            finally:
                del block_pool.free_blocks

        def watched_pop(ended: str) -> Any:
            self._unpin(ended)
            return pop_blocks_for_free(ended)

        manager.remove_skipped_blocks = watched_remove
        manager.pop_blocks_for_free = watched_pop

    def _pin(self, request_id: str, blocks: list[Any]) -> None:
        pinned = self._pinned.setdefault(request_id, set())
        for block in blocks:
            extent = block.block_id // self._pool.extent_blocks
            if extent not in pinned:
                pinned.add(extent)
                self._pool.pin(extent)

    def _unpin(self, request_id: str) -> None:
        for extent in self._pinned.pop(request_id, ()):
            self._pool.unpin(extent)

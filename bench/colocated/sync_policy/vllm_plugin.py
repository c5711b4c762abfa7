"""The sync policy inside vLLM: kvadmit's hooks with three parts put in their places.

Owns: the exchange, and the scheduler mixin. The exchange is made in every process of an
instance that the bench starts with this plugin; the package itself knows nothing of it.
"""

from __future__ import annotations

import sys
from typing import Any

from bench.colocated import status
from bench.colocated.sync_policy.agent import SyncAgent
from bench.colocated.sync_policy.caller import Caller
from bench.colocated.sync_policy.growth import SyncGrowth
from kvadmit.pool import ElasticPool


def register() -> None:
    """Entry point of `vllm.general_plugins`."""
    import kvadmit.vllm

    kvadmit.vllm.register()
    # By name, for what is replaced here is a type to the checker.
    places: list[tuple[Any, str, object]] = []
    if "vllm.v1.engine.core" in sys.modules:
        from vllm.v1.engine.core import EngineCore

        from kvadmit.vllm import engine_core, scheduler

        places += [
            (engine_core, "Coordinator", Caller),
            (scheduler, "ElasticScheduler", SyncScheduler),
            (EngineCore, status.RESTART, _restart),
            (EngineCore, status.LEVEL, _level),
        ]
    if "vllm.v1.worker.worker_base" in sys.modules:
        from kvadmit.vllm import worker

        places.append((worker, "Agent", SyncAgent))
    for owner, name, ours in places:
        setattr(owner, name, ours)


def _restart(self: Any) -> None:
    self.scheduler.kvadmit_sync.restart()


def _level(self: Any) -> list[int]:
    from kvadmit.vllm.engine_core import engine_of

    engine = engine_of(self.vllm_config)
    assert engine is not None
    assert engine.plan is not None
    extent_bytes = sum(engine.plan.extent_bytes.values())
    held: int = self.scheduler.kvadmit_sync.pool.resident * extent_bytes
    return [held, *self.scheduler.get_request_counts()]


class SyncScheduler:
    """Goes before any scheduler class of vLLM's in the method resolution order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build vLLM's scheduler over the virtual pool, then hide what is not backed."""
        super().__init__(*args, **kwargs)
        self._kvadmit_setup()

    def _kvadmit_setup(self: Any) -> None:
        from kvadmit.vllm.engine_core import engine_of

        engine = engine_of(self.vllm_config)
        assert engine is not None
        plan = engine.plan
        assert plan is not None
        caller: Any = engine.coordinator
        caller.wait_ready()
        block_pool = self.kv_cache_manager.block_pool
        pool: ElasticPool[Any] = ElasticPool(
            block_pool.blocks, plan.extent_blocks, block_pool._maybe_evict_cached_block, plan.prefix
        )

        def moved() -> None:
            block_pool.num_gpu_blocks = pool.blocks

        block_pool.free_block_queue = pool.queue
        moved()
        self.kvadmit_step = 0
        self.kvadmit_asked = 0
        self.kvadmit_sync = SyncGrowth(caller, pool, prefix=plan.prefix, moved=moved)
        self.kvadmit_share = self.kv_cache_manager.watermark_blocks / plan.blocks
        self._kvadmit_hook_manager()
        engine.scheduler = self

    def _kvadmit_hook_manager(self: Any) -> None:
        """Put growth behind every miss: allocate, and if that fails grow and allocate again."""
        manager = self.kv_cache_manager
        allocate_slots = manager.allocate_slots
        count_blocks = manager.coordinator.get_num_blocks_to_allocate

        def counted(*args: Any, **kwargs: Any) -> int:
            self.kvadmit_asked = count_blocks(*args, **kwargs)
            return int(self.kvadmit_asked)

        def growing(*args: Any, **kwargs: Any) -> Any:
            blocks = allocate_slots(*args, **kwargs)
            if blocks is not None:
                return blocks
            growth = self.kvadmit_sync
            lack = self.kvadmit_asked + manager.watermark_blocks
            if not growth.grow(lack - growth.pool.queue.num_free_blocks):
                return None
            return allocate_slots(*args, **kwargs)

        manager.coordinator.get_num_blocks_to_allocate = counted
        manager.allocate_slots = growing

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Schedule, growing on the way, and number the step."""
        blocks = self.kvadmit_sync.pool.blocks
        self.kv_cache_manager.watermark_blocks = int(self.kvadmit_share * blocks)
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if output.total_num_scheduled_tokens:
            self.kvadmit_step += 1
        output.kvadmit_step = self.kvadmit_step
        return output

    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the step's results in, then give back what came free; also the last step's."""
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        self.kvadmit_sync.give_back(self.kvadmit_step)
        self.kvadmit_sync.end_step()
        return outputs

    def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Reset the prefix cache, and count its blocks as uncached from now on."""
        done = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        self.kvadmit_sync.pool.queue.forget_hashes()
        return done

    # What kvadmit's hooks on the engine's loop ask of a scheduler.

    def kvadmit_wake(self) -> None:
        """Nobody gives orders here."""

    def kvadmit_park_s(self) -> float:
        """Never park: the next step tries again."""
        return 0.0

    def kvadmit_pool_status(self: Any) -> dict[str, Any]:
        """Return the scheduler's part of the status."""
        status = self.kvadmit_sync.pool_status()
        return {**status, "running": len(self.running), "waiting": len(self.waiting)}


__all__ = ["register"]

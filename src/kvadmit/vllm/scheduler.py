"""The mixin on vLLM's scheduler: an elastic pool under it, levels out of it.

Owns: what is vLLM-specific on the scheduler thread. Must not know: the coordinator beyond
its port. Decisions about levels, holding and waiting times are in `admission`.

One step: `schedule` drains the port, sets the watermark, lets vLLM schedule (its own "no
slots" is the only form of a miss), and publishes what it saw. Misses are watched for only
in steps in which there can be any, so that a content engine pays nothing per request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from vllm.v1.request import RequestStatus

from kvadmit.admission import Admission, Demand
from kvadmit.pool import ElasticPool
from kvadmit.units import ceil_div
from kvadmit.vllm.engine_core import RUNTIME, Engine, engine_of
from kvadmit.vllm.failures import Failures, never_fits, waited_too_long
from kvadmit.vllm.windows import WindowPins, windowed_managers

logger = logging.getLogger("vllm.kvadmit")

STEP = "kvadmit_step"
WAITERS_SEEN = 32
"""How many waiters count for what the pool would like to have."""
PARK_S_MAX = 1.0
"""Bounds the wait should a wake-up ever be lost."""
IN_PROCESS_WAIT_S = 0.05
HORIZON_STEPS = (2, 64)
"""Fewest and most steps ahead for which running requests' blocks are kept free."""

_elastic_classes: dict[type, type] = {}


def wrap_get_scheduler_cls(original: Any) -> Callable[..., Any]:
    """Make the replacement of `SchedulerConfig.get_scheduler_cls`: the mixin over its result."""

    def get_scheduler_cls(self: Any) -> Any:
        base = original(self)
        if engine_of(self) is None:
            return base
        if base not in _elastic_classes:
            _elastic_classes[base] = type(f"Elastic{base.__name__}", (ElasticScheduler, base), {})
        return _elastic_classes[base]

    return get_scheduler_cls


class ElasticScheduler:
    """Goes before any scheduler class of vLLM's in the method resolution order.

    All attributes of its own start with `kvadmit`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build vLLM's scheduler over the virtual pool, then hide what is not backed."""
        super().__init__(*args, **kwargs)
        engine = engine_of(self.vllm_config)
        assert engine is not None, "the class is only handed out for engines with kvadmit"
        assert engine.plan is not None, "vLLM plans its KV cache before it makes a scheduler"
        try:
            engine.coordinator.wait_ready()
        except BaseException:
            engine.abandon()
            raise
        self._kvadmit_setup(engine)

    def _kvadmit_setup(self: Any, engine: Engine) -> None:
        plan = engine.plan
        assert plan is not None
        self.kvadmit_engine = engine
        block_pool = self.kv_cache_manager.block_pool
        pool: ElasticPool[Any] = ElasticPool(
            block_pool.blocks, plan.extent_blocks, block_pool._maybe_evict_cached_block, plan.prefix
        )
        block_pool.free_block_queue = pool.queue
        block_pool.num_gpu_blocks = pool.blocks
        self.kvadmit: Admission[Any] = Admission(pool, engine.coordinator.port, ceiling=plan.cap)
        coordinator = self.kv_cache_manager.coordinator
        self.kvadmit_groups = [
            (manager.block_size, _most_blocks(manager, self.vllm_config))
            for manager in coordinator.single_type_managers
        ]
        self.kvadmit_block_size = min(size for size, _ in self.kvadmit_groups)
        self.kvadmit_watermark = self.kv_cache_manager.watermark_blocks / plan.blocks
        self.kvadmit_failures = Failures()
        self.kvadmit_windows = None
        if windowed_managers(self.vllm_config, coordinator):
            self.kvadmit_windows = WindowPins(pool, coordinator, block_pool)
        # What the present step showed.
        self.kvadmit_watching = False
        self.kvadmit_missed_running = False
        self.kvadmit_ask_hold = False
        self.kvadmit_may_hold: bool | None = None
        self.kvadmit_waiter: tuple[Any, int] | None = None
        self.kvadmit_own_ns = 0
        # What lasts over steps.
        self.kvadmit_horizon = 0
        self.kvadmit_horizon_age = 0
        self.kvadmit_step_s = 0.0
        self.kvadmit_last_s = 0.0
        self.kvadmit_queued_key: Any = None
        self.kvadmit_queued = 0
        self.kvadmit_blocked_since: dict[str, float] = {}
        engine.scheduler = self
        self._kvadmit_hook_managers()

    # --- one step -----------------------------------------------------------------------------

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Schedule one step, and do the pool's part before and after."""
        began = time.perf_counter_ns()
        now_s = time.monotonic()
        self.kvadmit_own_ns = 0
        moved = self._kvadmit_before(now_s)
        vllm_began = time.perf_counter_ns()
        output = super().schedule(*args, **kwargs)
        vllm_ended = time.perf_counter_ns()
        inside = self.kvadmit_own_ns
        self._kvadmit_after(output, now_s)
        took = vllm_began - began + inside + time.perf_counter_ns() - vllm_ended
        (self.kvadmit.wait_moving if moved else self.kvadmit.wait).add(took)
        if output.total_num_scheduled_tokens == 0 and self.kvadmit_engine.core is None:
            self._kvadmit_wait_in_process()
        return output

    def _kvadmit_before(self: Any, now_s: float) -> int:
        engine, admission = self.kvadmit_engine, self.kvadmit
        if engine.lost:
            raise RuntimeError(f"kvadmit: {engine.lost}")
        ceiling = admission.ceiling
        moved: int = admission.drain(now_s)
        if moved:
            self.kv_cache_manager.block_pool.num_gpu_blocks = admission.pool.blocks
        if admission.ceiling < ceiling:
            self._kvadmit_fail_too_large(self.waiting)
        self.kvadmit_missed_running = False
        self.kvadmit_ask_hold = False
        self.kvadmit_may_hold = None
        self.kvadmit_waiter = None
        running = len(self.running)
        self.kv_cache_manager.watermark_blocks = max(
            int(self.kvadmit_watermark * admission.pool.blocks), self.kvadmit_horizon
        )
        free = admission.pool.queue.num_free_blocks
        most = self.max_num_scheduled_tokens // self.kvadmit_block_size + 2 * running
        self._kvadmit_watch(bool(self.waiting) or free < most * len(self.kvadmit_groups))
        if self.kvadmit_failures.due:
            self._kvadmit_finish_failed()
        return moved

    def _kvadmit_after(self: Any, output: Any, now_s: float) -> None:
        admission = self.kvadmit
        if output.total_num_scheduled_tokens:
            admission.step += 1
            self._kvadmit_time_step(now_s)
        setattr(output, STEP, admission.step)
        held = self.kvadmit_may_hold is True
        missing = 0
        if self.kvadmit_missed_running:
            missing = self._kvadmit_running_lack(output)
        if self.kvadmit_waiter is not None:
            missing = max(missing, self._kvadmit_waiter_lack(now_s))
        elif self.kvadmit_blocked_since:
            self.kvadmit_blocked_since.clear()
        running, waiting = len(self.running), len(self.waiting)
        demand = Demand(
            running=running,
            waiting=waiting,
            missing=missing,
            horizon=self._kvadmit_look_ahead(running) if running else 0,
            queued=self._kvadmit_prompts() if waiting else 0,
        )
        admission.count_step(missed=missing > 0, held=held)
        admission.publish(demand, now_s)

    def _kvadmit_time_step(self: Any, now_s: float) -> None:
        passed_s = now_s - self.kvadmit_last_s
        self.kvadmit_last_s = now_s
        if passed_s < 1.0:
            self.kvadmit_step_s += 0.1 * (passed_s - self.kvadmit_step_s)

    # --- misses -------------------------------------------------------------------------------

    def _kvadmit_hook_managers(self: Any) -> None:
        """Prepare the watched allocation; `_kvadmit_watch` puts it in and takes it out."""
        manager = self.kv_cache_manager
        coordinator = manager.coordinator
        allocate_slots = manager.allocate_slots
        count_blocks = coordinator.get_num_blocks_to_allocate
        running = RequestStatus.RUNNING
        asked = 0

        def counted(*args: Any, **kwargs: Any) -> int:
            nonlocal asked
            asked = count_blocks(*args, **kwargs)
            return asked

        def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal asked
            if request.status is running:
                blocks = allocate_slots(request, *args, **kwargs)
                if blocks is None:
                    self.kvadmit_missed_running = self.kvadmit_ask_hold = True
                return blocks
            asked = 0
            coordinator.get_num_blocks_to_allocate = counted
            try:
                blocks = allocate_slots(request, *args, **kwargs)
            finally:
                del coordinator.get_num_blocks_to_allocate
            if blocks is None and self.kvadmit_waiter is None:
                self.kvadmit_waiter = (request, asked)
            return blocks

        self.kvadmit_watched = watched

    def _kvadmit_watch(self: Any, wanted: bool) -> None:
        if wanted is self.kvadmit_watching:
            return
        self.kvadmit_watching = wanted
        if wanted:
            self.kv_cache_manager.allocate_slots = self.kvadmit_watched
        else:
            del self.kv_cache_manager.allocate_slots

    def _request_blocks_can_be_freed(self: Any, request: Any) -> bool:
        """Say no once, right after a running request missed its slots, to hold it.

        vLLM (0.30 and later) asks this of the victim it would preempt, and breaks out of its
        running loop at a no. It asks the same when a request ends, which must not be touched:
        hence only the first question after a miss is ours.
        """
        if self.kvadmit_ask_hold:
            self.kvadmit_ask_hold = False
            if self._kvadmit_decide_hold():
                return False
        can: bool = super()._request_blocks_can_be_freed(request)  # type: ignore[misc]
        return can

    def _kvadmit_decide_hold(self: Any) -> bool:
        """Decide once a step: after the first preemption holding helps nobody."""
        if self.kvadmit_may_hold is None:
            began = time.perf_counter_ns()
            self.kvadmit_may_hold = self.kvadmit.may_hold(time.monotonic())
            if self.kvadmit_may_hold:
                # The waiting loop of this step must not take what the held request needs.
                self.kv_cache_manager.watermark_blocks = self.kvadmit.pool.blocks
            self.kvadmit_own_ns += time.perf_counter_ns() - began
            return bool(self.kvadmit_may_hold)
        return False

    def _kvadmit_running_lack(self: Any, output: Any) -> int:
        """Return how many blocks more the running requests need for their next step."""
        scheduled = output.num_scheduled_tokens
        managers = self.kv_cache_manager.coordinator.single_type_managers
        lack = 0
        for request in self.running:
            if request.request_id in scheduled:
                continue
            tokens = max(request.num_computed_tokens + 1, request.num_tokens)
            for manager in managers:
                held = len(manager.req_to_blocks.get(request.request_id, ()))
                lack += max(0, ceil_div(tokens, manager.block_size) - held)
        if not lack:
            # A preempted request took nothing with it: it comes back as the oldest waiter.
            head = next(iter(self.waiting), None)
            lack = 1 if head is None else self._kvadmit_blocks(head)
        return max(0, lack - self.kvadmit.pool.queue.num_free_blocks)

    def _kvadmit_waiter_lack(self: Any, now_s: float) -> int:
        """Return how many blocks the oldest waiter lacks; fail it when it waits in vain."""
        request, asked = self.kvadmit_waiter
        if asked > len(self.kv_cache_manager.block_pool.blocks):
            return 0  # vLLM's word for "not now", without a number (map 5.1)
        blocks = self._kvadmit_blocks(request)
        if self.kvadmit.fits_never(blocks):
            self._kvadmit_fail_too_large([request])
            return 0
        self._kvadmit_watch_patience(request, blocks, now_s)
        watermark = self.kv_cache_manager.watermark_blocks if self.running else 0
        lack: int = asked + watermark - self.kvadmit.pool.queue.num_free_blocks
        return max(0, lack)

    def _kvadmit_watch_patience(self: Any, request: Any, blocks: int, now_s: float) -> None:
        """Fail a waiter that other instances' memory has kept waiting for `wait_s`.

        Waiting for requests of its own engine is vLLM's business, however long it takes.
        """
        since = self.kvadmit_blocked_since
        if self.kvadmit.fits_alone(blocks):
            since.pop(request.request_id, None)
            return
        began_s = since.setdefault(request.request_id, now_s)
        wait_s = self.kvadmit_engine.settings.wait_s
        if now_s - began_s >= wait_s:
            self.kvadmit_failures.add(
                request, waited_too_long(blocks, self.kvadmit, self.kvadmit_extent_bytes, wait_s)
            )

    # --- requests that cannot be served ---------------------------------------------------------

    def add_request(self: Any, request: Any) -> None:
        """Queue a request; one that exceeds the ceiling fails in the next step."""
        super().add_request(request)  # type: ignore[misc]
        self._kvadmit_fail_too_large([request])

    def _kvadmit_fail_too_large(self: Any, requests: Any) -> None:
        for request in requests:
            blocks = self._kvadmit_blocks(request)
            if self.kvadmit.fits_never(blocks):
                text = never_fits(
                    request.num_tokens, blocks, self.kvadmit, self.kvadmit_extent_bytes
                )
                self.kvadmit_failures.add(request, text)

    def _kvadmit_finish_failed(self: Any) -> None:
        """End the requests that were found hopeless; their outputs leave with this step's."""
        for request in self.kvadmit_failures.take_due():
            self.kvadmit_blocked_since.pop(request.request_id, None)
            if not request.is_finished():
                self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)

    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Add the outputs of failed requests to vLLM's."""
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        if self.kvadmit_failures.ended:
            self.kvadmit_failures.emit(outputs)
        return outputs

    # --- what running and waiting requests will want ----------------------------------------------

    def _kvadmit_blocks(self: Any, request: Any) -> int:
        """Return the blocks that all of a request's tokens, and one more, take at once."""
        tokens = request.num_tokens + 1
        return sum(min(ceil_div(tokens, size), most) for size, most in self.kvadmit_groups)

    def _kvadmit_prompts(self: Any) -> int:
        """Return the blocks of the next waiters' prompts, counted anew when the queue moved."""
        waiting = self.waiting
        key = (len(waiting), waiting.peek_request().request_id)
        if key != self.kvadmit_queued_key:
            self.kvadmit_queued_key = key
            self.kvadmit_queued = sum(map(self._kvadmit_blocks, islice(waiting, WAITERS_SEEN)))
        return int(self.kvadmit_queued)

    def _kvadmit_look_ahead(self: Any, running: int) -> int:
        """Return the blocks that running requests take until a growth asked for now is there.

        Counted request by request every other step of that time, and only while the free
        blocks would not cover every one of them crossing a block boundary.
        """
        step_s = self.kvadmit_step_s or 1e-3
        steps = round(self.kvadmit.growth_latency_s / step_s)
        steps = min(max(steps, HORIZON_STEPS[0]), HORIZON_STEPS[1])
        tokens = steps * (1 + getattr(self, "num_spec_tokens", 0))
        size, groups = self.kvadmit_block_size, len(self.kvadmit_groups)
        prefill = sum(
            max(0, request.num_prompt_tokens - request.num_computed_tokens)
            for request in self._inflight_prefills
        )
        most = running * ceil_div(tokens, size) + ceil_div(prefill, size)
        queue = self.kvadmit.pool.queue
        if queue.num_free_blocks - queue.num_cached_blocks >= 2 * most * groups:
            self.kvadmit_horizon = ceil_div(running * tokens + prefill, size) * groups
            self.kvadmit_horizon_age = 0
            return int(self.kvadmit_horizon)
        self.kvadmit_horizon_age -= 1
        if self.kvadmit_horizon_age <= 0:
            self.kvadmit_horizon_age = max(1, steps // 2)
            last = size - tokens
            crossing = (
                sum(request.num_computed_tokens % size >= last for request in self.running)
                if last > 0
                else most
            )
            self.kvadmit_horizon = (crossing + ceil_div(prefill, size)) * groups
        return int(self.kvadmit_horizon)

    # --- while no step runs -------------------------------------------------------------------------

    def kvadmit_wake(self: Any) -> None:
        """Apply the coordinator's orders between steps, also of an idle or parked engine."""
        admission = self.kvadmit
        if self.has_requests():
            return  # the next step drains
        if admission.drain_idle(time.monotonic()):
            self.kv_cache_manager.block_pool.num_gpu_blocks = admission.pool.blocks

    def kvadmit_park_s(self: Any) -> float:
        """Return how long the engine may sleep unless something arrives; 0: not at all.

        Only when memory is all that the requests wait for: a request that waits for a grammar
        or a remote cache is polled by vLLM.
        """
        if not self.kvadmit_missed_running and self.kvadmit_waiter is None:
            return 0.0
        if self.kvadmit_failures.due or self.kvadmit_failures.ended:
            return 0.0
        plain = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        if any(request.status not in plain for request in self.waiting):
            return 0.0
        now_s = time.monotonic()
        self.kvadmit.flush(now_s)
        if self.kvadmit.has_orders:
            return 0.0
        pause_s = PARK_S_MAX
        if self.kvadmit_may_hold:
            pause_s = min(pause_s, self.kvadmit.hold_left_s(now_s))
        wait_s = self.kvadmit_engine.settings.wait_s
        for began_s in self.kvadmit_blocked_since.values():
            pause_s = min(pause_s, max(0.0, began_s + wait_s - now_s))
        return pause_s

    def _kvadmit_wait_in_process(self: Any) -> None:
        """Give growth a moment in an engine whose caller spins on `step`."""
        engine = self.kvadmit_engine
        if self.kvadmit_park_s() > 0:
            engine.woken.wait(IN_PROCESS_WAIT_S)
        engine.woken.clear()

    # --- the rest -----------------------------------------------------------------------------------

    def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Reset the prefix cache, and count its blocks as uncached from now on."""
        done = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        self.kvadmit.pool.queue.forget_hashes()
        return done

    @property
    def kvadmit_extent_bytes(self: Any) -> int:
        """Bytes behind one extent over all ranks."""
        return sum(self.kvadmit_engine.plan.extent_bytes.values())

    def kvadmit_pool_status(self: Any) -> dict[str, Any]:
        """Return the pool's counters as JSON-able data."""
        status: dict[str, Any] = self.kvadmit.status()
        status["running"] = len(self.running)
        status["waiting"] = len(self.waiting)
        return status


def _most_blocks(manager: Any, vllm_config: Any) -> int:
    """Return the most blocks one request can hold of a manager's cache group."""
    spec = manager.kv_cache_spec
    return ceil_div(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes) + 1


__all__ = ["RUNTIME", "ElasticScheduler", "wrap_get_scheduler_cls"]

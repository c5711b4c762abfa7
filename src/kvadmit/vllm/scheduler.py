"""The mixin on vLLM's scheduler: an elastic pool under it, levels out of it.

Owns: what is vLLM-specific on the scheduler thread. Must not know: the coordinator beyond
its port. Decisions about levels and holding are in `admission`.

One step: `schedule` drains the port and lets vLLM schedule (its own "no slots" is the only form
of a miss); what that showed is looked at right after, or, where workers are processes of their
own, once they have the step (`get_grammar_bitmask`). Nothing of ours is called per running request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil
from typing import Any

from vllm.v1.request import RequestStatus

from kvadmit.admission import Admission
from kvadmit.pool import ElasticPool
from kvadmit.units import ceil_div
from kvadmit.vllm import stalls
from kvadmit.vllm.engine_core import Engine, engine_of
from kvadmit.vllm.failures import Failures, never_fits, waited_too_long
from kvadmit.vllm.step_notes import StepNotes
from kvadmit.vllm.windows import WindowPins, windowed_managers

WAITERS_SEEN = 32
"""How many waiters count for what the pool would like to have."""
LOOK_S = 1.0
"""Levels that ask for what was asked for already are counted anew within this time."""
PARK_S_MAX = 1.0
"""Bounds the wait should a wake-up ever be lost."""
IN_PROCESS_WAIT_S = 0.05
AHEAD_STEPS = 16
"""Running requests should find the blocks of this many steps free."""
GROWTH_STEPS = (2, 32)
"""Fewest and most steps that a growth is taken to last."""

RUNNING = RequestStatus.RUNNING

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

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        """Build vLLM's scheduler over the virtual pool, then hide what is not backed."""
        super().__init__(*args, **kwargs)
        engine = engine_of(self.vllm_config)
        assert engine is not None, "the class is only handed out for engines with kvadmit"
        assert engine.plan is not None, "vLLM plans its KV cache before it makes a scheduler"
        engine.wait_ready()
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
        self.kvadmit_horizon = 0
        """Blocks that running requests take until a growth allowed now is there."""
        self.kvadmit_tokens_per_step = 1 + getattr(self, "num_spec_tokens", 0)
        ahead = AHEAD_STEPS * self.kvadmit_tokens_per_step
        self.kvadmit_step = StepNotes(
            self.kvadmit,
            coordinator,
            self.kvadmit_failures,
            ahead=sum(ceil_div(ahead, size) for size, _ in self.kvadmit_groups),
            seats=self.vllm_config.scheduler_config.max_num_seqs,
            overlaps=self.vllm_config.parallel_config.distributed_executor_backend == "mp",
        )
        self.kvadmit_last_s = 0.0
        self.kvadmit_last_step = 0
        self.kvadmit_mean_blocks = 1.0
        self.kvadmit_head: Any = None
        self.kvadmit_blocks_of_head = 0
        self.kvadmit_blocked_since: dict[str, float] = {}
        engine.scheduler = self
        self.kvadmit_step.lost = engine.lost
        self._kvadmit_set_watermark()
        self._kvadmit_hook_managers()

    # --- one step -------------------------------------------------------------------------------

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Schedule one step, and do the pool's part before and after.

        The fence of what is withdrawn before a step is the last step that could name it. What
        the step showed can wait until the workers have it, where they are other processes.
        """
        began_ns = time.monotonic_ns()
        step: StepNotes = self.kvadmit_step
        admission = step.admission
        moved = 0
        if step.untold is not None:
            self._kvadmit_look(step.untold, began_ns)  # nobody asked for a bitmask
            step.untold = None
        # 1. The coordinator writes the word, 2. it wakes the engine. A step that reads the word
        # before 1 is followed by another, or by a drain while idle, because of 2.
        if step.port.limit != admission.limit:
            admission.heed_limit()
        if step.orders or step.queue.frees > admission.give_after or step.failing or step.lost:
            moved = self._kvadmit_before(began_ns / 1e9)
        if step.showed:
            step.forget()
        step.inside = True
        vllm_began_ns = time.monotonic_ns()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        vllm_ended_ns = time.monotonic_ns()
        step.inside = False
        ran = output.total_num_scheduled_tokens > 0
        admission.step += ran
        output.kvadmit_step = admission.step
        if ran and step.overlaps:
            step.untold = output
        else:
            self._kvadmit_look(output, vllm_ended_ns)
        took_ns = vllm_began_ns - began_ns + time.monotonic_ns() - vllm_ended_ns
        wait = admission.wait_moving if moved else admission.wait
        (wait if ran else admission.overlapped).add(took_ns + step.inside_ns)
        if not ran:
            stalls.note_empty_step(self, vllm_ended_ns)
            if self.kvadmit_engine.core is None:
                self._kvadmit_wait_in_process()
        elif step.stalled_ns:
            stalls.end(step, vllm_ended_ns)
        return output

    def get_grammar_bitmask(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Look at what the step showed: vLLM asks for this once the workers have the step."""
        step: StepNotes = self.kvadmit_step
        if step.untold is not None:
            began_ns = time.monotonic_ns()
            output, step.untold = step.untold, None
            self._kvadmit_look(output, began_ns)
            if step.showed:
                step.forget()
            step.admission.overlapped.add(time.monotonic_ns() - began_ns)
        return super().get_grammar_bitmask(*args, **kwargs)  # type: ignore[misc]

    def _kvadmit_look(self: Any, output: Any, now_ns: int) -> None:
        """Look at what the last step showed, and tell what is news."""
        step: StepNotes = self.kvadmit_step
        if step.tried is not None:
            del step.coordinator.get_num_blocks_to_allocate
            step.refused = step.asked > 0 and step.tried.status is not RUNNING
        ran = output.total_num_scheduled_tokens > 0
        if not ran or not self._kvadmit_nothing_new(step, now_ns):
            self._kvadmit_after(output, now_ns / 1e9)

    def _kvadmit_before(self: Any, now_s: float) -> int:
        """Apply orders and end hopeless requests; returns how many blocks moved."""
        if self.kvadmit_step.lost:
            raise RuntimeError(f"kvadmit: {self.kvadmit_step.lost}")
        admission = self.kvadmit
        ceiling = admission.ceiling
        moved: int = admission.drain(now_s)
        if moved:
            self.kv_cache_manager.block_pool.num_gpu_blocks = admission.pool.blocks
            self._kvadmit_set_watermark()
        if admission.ceiling < ceiling:
            self._kvadmit_fail_too_large(self.waiting)
        if self.kvadmit_failures.due:
            self._kvadmit_finish_failed()
        return moved

    def _kvadmit_nothing_new(self: Any, step: StepNotes, now_ns: int) -> bool:
        """Whether all that this step shows is known, or asked for already.

        Whoever misses blocks while more is asked for already waits as that need does.
        """
        if now_ns >= step.look_ns or step.held_before or step.may_hold:
            return False
        admission = step.admission
        if step.refused and step.tried.request_id != step.told:
            return False  # the need may be another's by now
        if step.missed or step.refused:
            admission.no_slot_steps += admission.needs_more
            return admission.needs_more
        admission.missing = 0
        if admission.needs_posted and now_ns >= admission.look_s * 1e9:
            return False
        running = len(self.running)
        if self._inflight_prefills or (running < step.seats and self.waiting):
            return False
        queue = step.queue
        free = queue.num_free_blocks - len(queue.cached)
        if free < running * step.ahead and not admission.wants_more:
            return False
        return not admission.could_give(now_ns / 1e9)

    def _kvadmit_after(self: Any, output: Any, now_s: float) -> None:
        """Publish what the step showed."""
        admission, step = self.kvadmit, self.kvadmit_step
        held = step.may_hold is True
        if held:
            # First of all: with the hold's watermark a waiter would seem to lack the whole pool.
            self._kvadmit_set_watermark()
        running, waiting = len(self.running), len(self.waiting)
        missing = 0
        if step.missed or (running and not output.num_scheduled_tokens):
            missing = self._kvadmit_running_lack(output)
        if step.refused:
            missing = max(missing, self._kvadmit_waiter_lack(step.tried, now_s))
        elif self.kvadmit_blocked_since:
            self.kvadmit_blocked_since.clear()
        self._kvadmit_look_ahead(running, now_s)
        low = max(running * step.ahead, admission.pool.extent_blocks) if running else 0
        if waiting and running < step.seats:
            low += self._kvadmit_prompts(min(waiting, step.seats - running))
        if admission.publish(now_s, running=running, waiting=waiting, missing=missing, low=low):
            step.told = step.tried.request_id if step.refused else ""
        if missing or held or step.held_before:
            step.held_before = held
            admission.count_step(missed=missing > 0, held=held)

    def _kvadmit_set_watermark(self: Any) -> None:
        """Keep new admissions from the blocks that running requests take next."""
        self.kv_cache_manager.watermark_blocks = max(
            int(self.kvadmit_watermark * self.kvadmit.pool.blocks), self.kvadmit_horizon
        )

    # --- misses ---------------------------------------------------------------------------------

    def _kvadmit_hook_managers(self: Any) -> None:
        """Learn which waiter vLLM tried to admit last, and how many blocks that asked for.

        vLLM looks for cached blocks of a waiter right before it allocates for it, after all
        running requests: one call for each that is tried, none for those that run.
        """
        scheduler: Any = self  # the checker knows the type of self even where it is Any
        step: StepNotes = scheduler.kvadmit_step
        manager = scheduler.kv_cache_manager
        coordinator = manager.coordinator
        get_computed_blocks = manager.get_computed_blocks
        count_blocks = coordinator.get_num_blocks_to_allocate

        def tried(request: Any) -> Any:
            if step.inside:
                if step.tried is None:
                    coordinator.get_num_blocks_to_allocate = counted
                    step.showed = True
                step.tried = request
                step.asked = 0
            return get_computed_blocks(request)

        def counted(*args: Any, **kwargs: Any) -> int:
            asked: int = count_blocks(*args, **kwargs)
            step.asked = asked
            return asked

        manager.get_computed_blocks = tried

    def _request_blocks_can_be_freed(self: Any, request: Any) -> bool:
        """Say no to a preemption in order to hold a request whose memory is on its way.

        vLLM (0.30 and later) asks this of the victim it would preempt, still among the
        running, and breaks out of its running loop at a no. It asks the same of requests
        whose blocks it frees, which it has taken out of the running before: not ours.
        """
        step = self.kvadmit_step
        if step.inside and request in self.running:
            step.missed = step.showed = True
            if self._kvadmit_decide_hold():
                return False
        can: bool = super()._request_blocks_can_be_freed(request)  # type: ignore[misc]
        return can

    def _kvadmit_decide_hold(self: Any) -> bool:
        """Decide once a step: after the first preemption holding helps nobody."""
        step = self.kvadmit_step
        if step.may_hold is not None or not self.kvadmit.bytes_coming:
            return False
        began_ns = time.monotonic_ns()
        hold: bool = self.kvadmit.may_hold(began_ns / 1e9)
        step.may_hold = hold
        if hold:
            # The waiting loop of this step must not take what the held request needs.
            self.kv_cache_manager.watermark_blocks = self.kvadmit.pool.blocks
        step.inside_ns += time.monotonic_ns() - began_ns
        return hold

    def _kvadmit_running_lack(self: Any, output: Any) -> int:
        """Return how many blocks more the running requests need for their next step."""
        scheduled = output.num_scheduled_tokens
        managers = self.kv_cache_manager.coordinator.single_type_managers
        needed = 0
        for request in self.running:
            if request.request_id in scheduled:
                continue
            tokens = max(request.num_computed_tokens + 1, request.num_tokens)
            for manager in managers:
                held = len(manager.req_to_blocks.get(request.request_id, ()))
                needed += max(0, ceil_div(tokens, manager.block_size) - held)
        head = next(iter(self.waiting), None)
        if not needed and head is not None and head.status is RequestStatus.PREEMPTED:
            # Everyone left was served at a victim's cost: it comes back as the oldest waiter.
            needed = self._kvadmit_blocks(head)
        needed -= self.kvadmit.pool.queue.num_free_blocks
        return int(max(0, needed))

    def _kvadmit_waiter_lack(self: Any, request: Any, now_s: float) -> int:
        """Return how many blocks the oldest waiter lacks; fail it when it waits in vain."""
        asked = self.kvadmit_step.asked
        if asked > len(self.kv_cache_manager.block_pool.blocks):
            return 0  # vLLM's word for "not now", without a number
        admission = self.kvadmit
        blocks = self._kvadmit_head_blocks(request)
        if admission.fits_never(blocks):
            self._kvadmit_fail_too_large([request])
            return 0
        if not admission.fits_alone(blocks) or self.kvadmit_blocked_since:
            self._kvadmit_watch_patience(request, blocks, now_s)
        watermark = self.kv_cache_manager.watermark_blocks if self.running else 0
        lack: int = asked + watermark - admission.pool.queue.num_free_blocks
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
        if not self.running and not self.waiting:
            stalls.end(self.kvadmit_step, time.monotonic_ns())  # who waited left without a step
        super().add_request(request)  # type: ignore[misc]
        blocks = self._kvadmit_blocks(request)
        self.kvadmit_mean_blocks += 0.05 * (blocks - self.kvadmit_mean_blocks)
        if self.kvadmit.fits_never(blocks):
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

    # --- what running and waiting requests will want --------------------------------------------

    def _kvadmit_blocks(self: Any, request: Any) -> int:
        """Return the blocks that all of a request's tokens, and one more, take at once."""
        tokens = request.num_tokens + 1
        return sum(min(ceil_div(tokens, size), most) for size, most in self.kvadmit_groups)

    def _kvadmit_prompts(self: Any, waiting: int) -> int:
        """Return about how many blocks the prompts of the next `waiting` waiters take.

        The oldest exactly, the others by the mean of recent requests: the queue is long just
        when there is no time to walk it.
        """
        head = self._kvadmit_head_blocks(self.waiting.peek_request())
        return int(head + (min(waiting, WAITERS_SEEN) - 1) * self.kvadmit_mean_blocks)

    def _kvadmit_head_blocks(self: Any, request: Any) -> int:
        """Return `_kvadmit_blocks` of the oldest waiter, who is asked about again and again."""
        head = (request, request.num_tokens)
        if head != self.kvadmit_head:
            self.kvadmit_head = head
            self.kvadmit_blocks_of_head = self._kvadmit_blocks(request)
        return int(self.kvadmit_blocks_of_head)

    def _kvadmit_look_ahead(self: Any, running: int, now_s: float) -> None:
        """Set the blocks that are kept from new admissions.

        Those that running requests take on average while a growth lasts, and those that
        prompts under way still need.
        """
        # An idle engine's next step is news whatever it shows.
        self.kvadmit_step.look_ns = int((now_s + LOOK_S) * 1e9) if running else 0
        passed = self.kvadmit.step - self.kvadmit_last_step
        step_s = (now_s - self.kvadmit_last_s) / passed if passed else 1.0
        self.kvadmit_last_s, self.kvadmit_last_step = now_s, self.kvadmit.step
        steps = ceil(self.kvadmit.growth_latency_s / max(step_s, 1e-4))
        steps = min(max(steps, GROWTH_STEPS[0]), GROWTH_STEPS[1])
        size = self.kvadmit_block_size
        horizon = ceil_div(running * steps * self.kvadmit_tokens_per_step, size)
        for request in self._inflight_prefills:
            left = request.num_prompt_tokens - request.num_computed_tokens
            horizon += ceil_div(max(0, left), size)
        horizon *= len(self.kvadmit_groups)
        if horizon != self.kvadmit_horizon:
            self.kvadmit_horizon = horizon
            self._kvadmit_set_watermark()

    # --- while no step runs ---------------------------------------------------------------------

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
        step = self.kvadmit_step
        if not step.found_no_room and not step.may_hold:
            return 0.0
        if self.kvadmit_failures.due or self.kvadmit_failures.ended:
            return 0.0
        plain = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        if any(request.status not in plain for request in self.waiting):
            return 0.0
        now_s = time.monotonic()
        self.kvadmit.flush(now_s)
        if self.kvadmit.orders:
            return 0.0
        pause_s = PARK_S_MAX
        if step.may_hold:
            pause_s = min(pause_s, self.kvadmit.hold_left_s(now_s))
        wait_s = self.kvadmit_engine.settings.wait_s
        if step.tried is not None:
            began_s = self.kvadmit_blocked_since.get(step.tried.request_id, now_s)
            pause_s = min(pause_s, max(0.0, began_s + wait_s - now_s))
        return pause_s

    def _kvadmit_wait_in_process(self: Any) -> None:
        """Give growth a moment in an engine whose caller spins on `step`."""
        engine = self.kvadmit_engine
        if self.kvadmit_park_s() > 0:
            engine.woken.wait(IN_PROCESS_WAIT_S)
        engine.woken.clear()

    # --- the rest -------------------------------------------------------------------------------

    def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Reset the prefix cache, and count its blocks as uncached from now on."""
        done = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        self.kvadmit.pool.queue.forget_hashes()
        self.kvadmit.flush(time.monotonic())  # an idle engine makes no step that would tell
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

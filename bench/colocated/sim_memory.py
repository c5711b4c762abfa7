"""Where a simulated engine's blocks come from, one class per policy.

Owns: what each policy does before, during and after a step, with kvadmit's or sync's own code.
Must not know: requests beyond how many there are, or how a step is timed.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from bench.colocated.event_plugin import held_extents, restart
from bench.colocated.sim_requests import SimBlock, SimScheduler, Step
from bench.colocated.sync_policy.caller import Caller
from bench.colocated.sync_policy.growth import SyncGrowth
from kvadmit.admission import Admission
from kvadmit.coordinator import Coordinator
from kvadmit.geometry import ExtentPlan
from kvadmit.pool import ElasticPool

QUEUED_REQUESTS = 32
"""How many waiters count for what the pool would like to have; as in kvadmit's mixin."""
HORIZON_STEPS = (2, 64)
RETRY_S = 0.001
"""What vLLM sleeps when nothing could be scheduled."""
PARK_S = 1.0


def make_pool(plan: ExtentPlan, resident: int) -> ElasticPool[SimBlock]:
    """Return a pool over the plan's blocks of which the first `resident` extents are there."""
    blocks = [SimBlock(block_id) for block_id in range(plan.blocks)]
    return ElasticPool(blocks, plan.extent_blocks, evict=lambda block: None, prefix=resident)


class FixedMemory:
    """`static`: everything is there from the start."""

    def __init__(self, plan: ExtentPlan) -> None:
        self.pool = make_pool(plan, plan.extents)
        self.step = 0

    def before(self) -> int:
        """Return the blocks that admissions leave alone."""
        return 0

    def grow_now(self, lack: int) -> bool:
        """Say no."""
        return False

    def may_hold(self) -> bool:
        """Say no."""
        return False

    def after(self, requests: SimScheduler, step: Step) -> None:
        """Count the step."""
        self.step += bool(step.ran)

    def settle(self, requests: SimScheduler) -> None:
        """Have nothing to give back."""

    def wait(self, wake: threading.Event) -> None:
        """Wait until there is something to do."""
        wake.wait(PARK_S)

    @property
    def held_extents(self) -> int:
        """Extents with memory behind them. Any thread."""
        return self.pool.resident

    def restart(self) -> None:
        """Have nothing counted."""

    def status(self) -> dict[str, Any] | None:
        """Have no status."""
        return None


class SyncMemory(FixedMemory):
    """`sync`: growth and return are calls to all ranks, made here."""

    def __init__(self, plan: ExtentPlan, caller: Caller) -> None:
        super().__init__(plan)
        caller.wait_ready()
        self._caller = caller
        self.pool = make_pool(plan, plan.prefix)
        self._growth = SyncGrowth(caller, self.pool, prefix=plan.prefix)
        self._busy = False

    def grow_now(self, lack: int) -> bool:
        """Call all ranks and wait for them."""
        return self._growth.grow(lack)

    def after(self, requests: SimScheduler, step: Step) -> None:
        """Count the step."""
        super().after(requests, step)
        self._busy = bool(requests.waiting)

    def settle(self, requests: SimScheduler) -> None:
        """Give back what the step's results freed."""
        self._growth.give_back(self.step)
        self._growth.end_step()

    def wait(self, wake: threading.Event) -> None:
        """Try again soon while somebody waits for memory."""
        wake.wait(RETRY_S if self._busy else PARK_S)

    def restart(self) -> None:
        """Count anew."""
        self._growth.restart()

    def status(self) -> dict[str, Any] | None:
        """Return what was counted."""
        return {"coordinator": self._caller.status(), "pool": self._growth.pool_status()}


class EventMemory(FixedMemory):
    """`event`: kvadmit's coordinator in a thread beside, its admission on this one."""

    def __init__(self, plan: ExtentPlan, coordinator: Coordinator) -> None:
        super().__init__(plan)
        coordinator.wait_ready()
        self._coordinator = coordinator
        self.pool = make_pool(plan, plan.prefix)
        self._admission = Admission(self.pool, coordinator.port, ceiling=plan.cap)
        self._own_ns = 0
        self._moved = 0
        self._step_s = 0.005
        self._last_s = 0.0
        self._horizon = 0

    def before(self) -> int:
        """Apply the coordinator's orders; returns what running requests take next."""
        began = time.perf_counter_ns()
        self._moved = self._admission.drain(time.monotonic())
        self._own_ns = time.perf_counter_ns() - began
        return self._horizon

    def may_hold(self) -> bool:
        """Ask kvadmit."""
        return self._admission.may_hold(time.monotonic())

    def after(self, requests: SimScheduler, step: Step) -> None:
        """Tell kvadmit what the step showed."""
        now_s = time.monotonic()
        admission = self._admission
        if step.ran:
            admission.step += 1
            self._step_s += 0.1 * (min(now_s - self._last_s, 1.0) - self._step_s)
        self._last_s = now_s
        steps = round(admission.growth_latency_s / self._step_s)
        steps = min(max(steps, HORIZON_STEPS[0]), HORIZON_STEPS[1])
        self._horizon = requests.blocks_due(steps)
        low = requests.blocks_queued(QUEUED_REQUESTS)
        if requests.running:
            low += max(self._horizon, self.pool.extent_blocks)
        began = time.perf_counter_ns()
        admission.publish(
            now_s,
            running=len(requests.running),
            waiting=len(requests.waiting),
            missing=step.missing,
            low=low,
        )
        admission.count_step(missed=step.missing > 0, held=step.held)
        self._own_ns += time.perf_counter_ns() - began
        (admission.wait_moving if self._moved else admission.wait).add(self._own_ns)
        self.step = admission.step

    def settle(self, requests: SimScheduler) -> None:
        """Say that nothing is asked for once the last request has ended."""
        if not requests.running and not requests.waiting:
            self._admission.publish(time.monotonic(), running=0, waiting=0, missing=0, low=0)

    def wait(self, wake: threading.Event) -> None:
        """Sleep until a request or an order comes; orders are applied while idle."""
        self._admission.flush(time.monotonic())
        admission = self._admission
        if not admission.orders and admission.port.limit == admission.limit:
            wake.wait(PARK_S)
        self._admission.drain_idle(time.monotonic())

    @property
    def held_extents(self) -> int:
        """Extents with memory behind them, also those on their way in or out. Any thread."""
        return held_extents(self._coordinator)

    def restart(self) -> None:
        """Count anew."""
        restart(self._coordinator, self._admission)

    def status(self) -> dict[str, Any] | None:
        """Return what was counted."""
        return {"coordinator": self._coordinator.status(), "pool": self._admission.status()}


SimMemory = FixedMemory | SyncMemory | EventMemory

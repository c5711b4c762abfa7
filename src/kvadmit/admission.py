"""The pool's side of the bargain: orders in, levels out, and when to hold a request.

Owns: what the scheduler thread does for memory in one step, whoever the scheduler is (vLLM's
with our mixin, or the bench's simulated engine). Must not know: vLLM, clocks, the coordinator.
Runs on the scheduler thread only; nothing here waits.

One step: `drain` applies the coordinator's orders -> the scheduler schedules -> `publish`
turns what it saw into levels and posts them when the coordinator could decide differently.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Generic, TypeVar

import msgspec

from kvadmit.extents import from_runs, to_runs
from kvadmit.pool import Block, ElasticPool
from kvadmit.port import Ceiling, Limit, PoolLevels, PoolPort, PoolReturned, Resident
from kvadmit.units import ceil_div

HELD_STEPS_MAX = 2
"""Most steps in a row in which a running request is held instead of preempted."""
POST_INTERVAL_S = 0.020
"""Levels that ask for nothing new are posted at most this often."""
LATENCY_S = 0.020
"""Growth latency assumed before the first growth was seen."""
LATENCY_DECAY = 0.9
"""Share of the slowest growth seen that is still believed after one faster growth."""

B = TypeVar("B", bound=Block)


class Demand(msgspec.Struct, frozen=True):
    """What one step showed, in blocks (requests for the first two).

    `missing`: blocks beyond the free ones that running requests need for their next step, or
    the oldest waiter to be admitted; 0 when nobody missed any. `horizon`: what running
    requests will take until a growth asked for now has arrived. `queued`: prompts of the
    next waiters.
    """

    running: int = 0
    waiting: int = 0
    missing: int = 0
    horizon: int = 0
    queued: int = 0


class WaitHistogram:
    """Durations in nanoseconds, kept in buckets an eighth of an octave wide.

    Adding costs one binary search; a quantile is right to within 9 %.
    """

    def __init__(self) -> None:
        self._bounds = [round(100 * 2 ** (step / 8)) for step in range(8 * 24)]
        self._counts = [0] * (len(self._bounds) + 1)
        self.count = 0
        self.max_ns = 0

    def add(self, duration_ns: int) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds, duration_ns)] += 1
        self.count += 1
        self.max_ns = max(self.max_ns, duration_ns)

    def quantile_us(self, share: float) -> float | None:
        """Return the duration in microseconds that `share` of all do not exceed."""
        rank = share * self.count
        seen = 0
        for index, count in enumerate(self._counts):
            seen += count
            if count and seen >= rank:
                bound = self._bounds[index] if index < len(self._bounds) else self.max_ns
                return min(bound, self.max_ns) / 1000
        return None

    def summary_us(self) -> dict[str, float | int | None]:
        """Return p50, p99 and max in microseconds, and how many there were."""
        return {
            "p50": self.quantile_us(0.5),
            "p99": self.quantile_us(0.99),
            "max": self.max_ns / 1000 if self.count else None,
            "count": self.count,
        }


class Admission(Generic[B]):
    """One instance's pool and its port, driven step by step."""

    def __init__(self, pool: ElasticPool[B], port: PoolPort, *, ceiling: int) -> None:
        """`ceiling`: most extents this instance can get, until the coordinator says otherwise."""
        self.pool = pool
        self.ceiling = ceiling
        self.step = 0
        """The last scheduled step that could name a block: the fence of whatever is withdrawn."""
        self.held_steps = 0
        self.no_slot_steps = 0
        self.wait = WaitHistogram()
        """Our time on the scheduler thread, of steps that moved no blocks."""
        self.wait_moving = WaitHistogram()
        """The same of steps that moved some."""
        self._port = port
        self._limit = pool.extents
        self._demand = Demand()
        self._posted: PoolLevels | None = None
        self._posted_s = 0.0
        self._asked_s: float | None = None
        self._latency_s = LATENCY_S
        self._held_in_a_row = 0

    # --- before a step ---

    def drain(self, now_s: float) -> int:
        """Apply the coordinator's orders; returns how many blocks moved, in either direction.

        Costs one attribute test when there is nothing to do.
        """
        moved = 0
        if self._port.pending:
            for order in self._port.take():
                match order:
                    case Resident():
                        moved += self.pool.grow(from_runs(order.extents))
                        self._grown(now_s)
                    case Limit():
                        self._limit = order.extents
                    case Ceiling():
                        self.ceiling = order.extents
        if self.pool.resident > self._limit:
            moved += self._withdraw(now_s)
        return moved

    def drain_idle(self, now_s: float) -> int:
        """Apply orders while nothing runs, to the end: no step comes that would go on."""
        total = moved = self.drain(now_s)
        while moved and self.pool.resident > self._limit:
            moved = self.drain(now_s)
            total += moved
        if total:
            self.publish(self._demand, now_s)
            self.flush(now_s)
        return total

    def _withdraw(self, now_s: float) -> int:
        taken = self.pool.withdraw(self._limit)
        if not taken:
            return 0
        # The lower level first, so that what is returned does not look like a lack.
        self.publish(self._demand, now_s)
        self.flush(now_s)
        self._port.post(PoolReturned(to_runs(taken), self.step))
        return len(taken) * self.pool.extent_blocks

    def _grown(self, now_s: float) -> None:
        if self._asked_s is None:
            return
        seen_s = now_s - self._asked_s
        self._asked_s = None
        self._latency_s = max(
            seen_s, LATENCY_DECAY * self._latency_s + (1 - LATENCY_DECAY) * seen_s
        )

    # --- during a step ---

    @property
    def growth_latency_s(self) -> float:
        """The slowest recent growth, from asking to handing out."""
        return self._latency_s

    def may_hold(self, now_s: float) -> bool:
        """Whether a running request without slots is better held than preempted.

        Only while bytes are on their way, and at most HELD_STEPS_MAX steps in a row. Counts
        the step as held when it says yes: ask once per step.
        """
        if self._port.hold_until_s <= now_s or self._held_in_a_row >= HELD_STEPS_MAX:
            return False
        self._held_in_a_row += 1
        self.held_steps += 1
        return True

    @property
    def has_orders(self) -> bool:
        """Whether the coordinator gave an order that `drain` has not applied."""
        return self._port.pending

    def hold_left_s(self, now_s: float) -> float:
        """Return how long bytes on their way are still worth waiting for."""
        return max(0.0, self._port.hold_until_s - now_s)

    # --- after a step ---

    def publish(self, demand: Demand, now_s: float) -> None:
        """Post levels if they ask for something else, or now and then if they only changed."""
        self._demand = demand
        levels = self._levels(demand)
        posted = self._posted
        if (
            posted is None
            or self._urgent(posted, levels)
            or (levels != posted and now_s - self._posted_s >= POST_INTERVAL_S)
        ):
            self._post(levels, now_s)

    def count_step(self, *, missed: bool, held: bool) -> None:
        """Count a scheduled step: `missed` some slots, `held` a running request."""
        if not held:
            self._held_in_a_row = 0
        if missed and self._port.hold_until_s == 0:
            self.no_slot_steps += 1

    def flush(self, now_s: float) -> None:
        """Post the newest levels if the coordinator has not seen them: no step comes soon."""
        levels = self._levels(self._demand)
        if levels != self._posted:
            self._post(levels, now_s)

    def fits_never(self, blocks: int) -> bool:
        """Whether a request of `blocks` blocks exceeds what this instance can ever get."""
        return blocks > self.ceiling * self.pool.extent_blocks - 1

    def fits_alone(self, blocks: int) -> bool:
        """Whether it would fit in what is resident now if nothing else were running."""
        return blocks <= self.pool.blocks - 1

    def _levels(self, demand: Demand) -> PoolLevels:
        pool = self.pool
        whole, free = pool.extent_blocks, pool.queue.num_free_blocks
        holdings = pool.levels()
        need = want = 0
        if demand.missing > 0:
            need = min(holdings.resident + ceil_div(demand.missing, whole), self.ceiling)
        if demand.running or demand.waiting:
            # Cached blocks count as used here: the cache grows before it is evicted.
            uncached = free - pool.queue.num_cached_blocks
            low = demand.queued + (max(demand.horizon, whole) if demand.running else 0)
            if low > uncached:
                want = min(holdings.resident + ceil_div(low - uncached, whole), self.ceiling)
            else:
                want = holdings.resident - min(holdings.free, (uncached - low) // whole)
        return PoolLevels(
            resident=holdings.resident,
            need_total=need,
            want_total=max(need, want),
            free=holdings.free,
            cached=holdings.cached,
            running=demand.running,
            waiting=demand.waiting,
        )

    def _urgent(self, posted: PoolLevels, levels: PoolLevels) -> bool:
        """Whether the coordinator could decide differently on `levels`."""
        return (
            levels.need_total != posted.need_total
            or (levels.want_total > levels.resident and levels.want_total != posted.want_total)
            or (levels.running == 0) != (posted.running == 0)
            or (levels.waiting == 0) != (posted.waiting == 0)
        )

    def _post(self, levels: PoolLevels, now_s: float) -> None:
        if levels.want_total > levels.resident:
            if self._asked_s is None:
                self._asked_s = now_s
        else:
            self._asked_s = None
        self._posted = levels
        self._posted_s = now_s
        self._port.post(levels)

    # --- looking at it ---

    def status(self) -> dict[str, object]:
        """Return counters and histograms as plain data. Any thread: each value is one read."""
        return {
            "held_steps": self.held_steps,
            "no_slot_steps": self.no_slot_steps,
            "scheduler_wait_us": self.wait.summary_us(),
            "scheduler_wait_moving_us": self.wait_moving.summary_us(),
            "growth_latency_s": self._latency_s,
            "resident_extents": self.pool.resident,
            "limit_extents": self._limit,
            "ceiling_extents": self.ceiling,
            "step": self.step,
        }

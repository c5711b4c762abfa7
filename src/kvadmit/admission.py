"""The pool's side of the bargain: orders in, levels out, and when to hold a request.

Owns: what the scheduler thread does for memory in one step, whoever the scheduler is (vLLM's
with our mixin, or the bench's simulated engine). Must not know: vLLM, clocks, the coordinator.
Runs on the scheduler thread only; nothing here waits.

One step: `drain` applies the coordinator's orders -> the scheduler schedules -> `publish`
turns what it saw into levels. Levels are posted at once when they ask for something new, and
otherwise compared now and then, because a post wakes another thread. A step that shows
nothing new need not publish: `needs_more` and its like are plain attributes that tell, and
`heed_limit` tells what a new limit asks of the next step.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from kvadmit.extents import from_runs, to_runs
from kvadmit.pool import Block, ElasticPool
from kvadmit.port import NO_LIMIT, Ceiling, PoolLevels, PoolPort, PoolReturned, Resident
from kvadmit.units import ceil_div

HELD_STEPS_MAX = 2
"""Most steps in a row in which a running request is held instead of preempted."""
REFRESH_S = 0.050
"""Levels that ask for nothing new are compared no more often than this."""
REFRESH_SLOW_S = 2.0
"""Levels that nobody could use, and needs a little above the posted, are posted within this."""
LATENCY_S = 0.020
"""Growth latency assumed before the first growth was seen."""
LATENCY_DECAY = 0.9
"""Share of the slowest growth seen that is still believed after one faster growth."""
AHEAD_SHARE = 8
"""A growth brings an eighth of what is resident beside what it was asked for, so that there
are few of them; a want changed by less than that is not worth a message."""
_NEVER = 1 << 62

B = TypeVar("B", bound=Block)


class WaitHistogram:
    """Durations in nanoseconds, in buckets a thirty-second of an octave wide.

    Adding is a few shifts, no search; a quantile is right to within 3 %, and never too low.
    """

    __slots__ = ("_counts", "max_ns")

    def __init__(self) -> None:
        self._counts = [0] * (32 * 64)
        self.max_ns = 0

    def add(self, duration_ns: int) -> None:
        """Count one duration."""
        bits = duration_ns.bit_length()
        # The five bits after the leading one tell the parts of an octave apart.
        part = (duration_ns >> (bits - 6)) & 31 if bits > 5 else 0
        self._counts[bits * 32 + part] += 1
        if duration_ns > self.max_ns:
            self.max_ns = duration_ns

    @property
    def count(self) -> int:
        """How many durations there are."""
        return sum(self._counts)

    def quantile_us(self, share: float) -> float | None:
        """Return the duration in microseconds that `share` of all do not exceed."""
        rank = share * self.count
        seen = 0
        for index, count in enumerate(self._counts):
            seen += count
            if count and seen >= rank:
                bits, part = divmod(index, 32)
                bound = ((33 + part) << (bits - 6)) - 1 if bits > 5 else 31
                return min(bound, self.max_ns) / 1000
        return None

    def summary_us(self) -> dict[str, float | int | None]:
        """Return p50, p99 and max in microseconds, and how many there were."""
        return {
            "p50": self.quantile_us(0.5),
            "p99": self.quantile_us(0.99),
            "max": self.max_ns / 1000 if self.max_ns else None,
            "count": self.count,
        }


class Admission(Generic[B]):
    """One instance's pool and its port, driven step by step.

    Has slots, as all that a step reads: after a model step nothing is in the CPU's caches, and
    each attribute of a plain object is several misses.
    """

    __slots__ = (
        "_held_in_a_row",
        "_lack_seen",
        "_latency_s",
        "_low",
        "_posted",
        "_posted_s",
        "_running",
        "_waiting",
        "_whole",
        "ceiling",
        "give_after",
        "given",
        "held_steps",
        "limit",
        "look_s",
        "missing",
        "needs_more",
        "needs_posted",
        "no_slot_steps",
        "orders",
        "overlapped",
        "pool",
        "port",
        "posts",
        "step",
        "wait",
        "wait_moving",
        "wants_more",
    )

    def __init__(self, pool: ElasticPool[B], port: PoolPort, *, ceiling: int) -> None:
        """`ceiling`: most extents this instance can get, until the coordinator says otherwise."""
        self.pool = pool
        self.ceiling = ceiling
        self.step = 0
        """The last scheduled step that could name a block: the fence of whatever is withdrawn."""
        self.held_steps = 0
        self.no_slot_steps = 0
        self.posts = 0
        """Levels posted: each wakes the coordinator's thread."""
        self.wait = WaitHistogram()
        """How long a step waited for us, of steps that moved no blocks."""
        self.wait_moving = WaitHistogram()
        """The same of steps that moved some."""
        self.overlapped = WaitHistogram()
        """Our time on the scheduler thread that no step waited for: the workers ran one then, or
        there was none to run."""
        self.port = port
        self.orders = port.orders
        """The coordinator's orders that `drain` has not applied: to look whether there is any."""
        self._whole = pool.extent_blocks
        self.limit = NO_LIMIT
        """The most extents to keep, as of the last time anybody looked at the port's."""
        self._running = 0
        self._waiting = 0
        self.missing = 0
        """Blocks that running requests or the oldest waiter missed in the last step."""
        self._low = 0
        self._lack_seen = 0
        """Most uncached blocks short of the low watermark since the last look."""
        self._posted = PoolLevels(resident=0)
        self._posted_s = 0.0
        self.look_s = 0.0
        """When levels that ask for nothing new are next looked at."""
        self._latency_s = LATENCY_S
        self._held_in_a_row = 0
        self.give_after = _NEVER
        """While more extents are resident than allowed: at more `frees` of the queue than this a
        step can give some up."""
        self.needs_posted = False
        """A need was posted: to be taken back once nobody has it any more."""
        self.given = 0
        """Wholly free extents as posted last."""
        self.needs_more = self.wants_more = False
        self._compare()

    # --- before a step ---

    def drain(self, now_s: float) -> int:
        """Apply the coordinator's orders; returns how many blocks moved, in either direction."""
        moved = 0
        if self.orders:
            for order in self.port.take():
                match order:
                    case Resident():
                        moved += self.pool.grow(from_runs(order.extents))
                        self._learn_latency(order.took_s)
                    case Ceiling():
                        self.ceiling = order.extents
        self.limit = self.port.limit
        self.give_after = _NEVER
        if self.pool.resident > self.limit:
            given = self._withdraw(now_s)
            moved += given
            if self.pool.resident > self.limit:
                # What one step may move is bounded: after some there may be more at once.
                self.give_after = self.pool.queue.frees - (given > 0)
        self._compare()
        return moved

    def heed_limit(self) -> None:
        """Take note of a new limit, and whether the next drain could come nearer to it."""
        self.limit = self.port.limit
        queue = self.pool.queue
        above = self.pool.resident > self.limit
        self.give_after = queue.frees - (not queue.none_whole) if above else _NEVER

    def drain_idle(self, now_s: float) -> int:
        """Apply orders while nothing runs, to the end: no step comes that would go on."""
        total = moved = self.drain(now_s)
        while moved and self.pool.resident > self.limit:
            moved = self.drain(now_s)
            total += moved
        if total:
            self.flush(now_s)
        return total

    def _withdraw(self, now_s: float) -> int:
        taken = self.pool.withdraw(self.limit)
        if not taken:
            return 0
        moved = len(taken) * self.pool.extent_blocks
        # The lower level first, so that what is returned does not look like a lack of it.
        self.flush(now_s)
        self.port.post(PoolReturned(to_runs(taken), self.step))
        return moved

    def _learn_latency(self, took_s: float) -> None:
        if took_s:
            believed_s = LATENCY_DECAY * self._latency_s + (1 - LATENCY_DECAY) * took_s
            self._latency_s = max(took_s, believed_s)

    # --- during a step ---

    @property
    def growth_latency_s(self) -> float:
        """How long the slowest recent growth took, once it was allowed.

        Waiting for others' memory is not part of it: nothing that is asked for earlier makes
        that shorter.
        """
        return self._latency_s

    def could_give(self, now_s: float) -> bool:
        """Whether more could be given up, while somebody waits, than was posted."""
        return (
            self.port.pressure and now_s >= self.look_s and self.pool.queue.about_whole > self.given
        )

    @property
    def bytes_coming(self) -> bool:
        """Whether a growth is under way that somebody who missed blocks needs."""
        return self.port.hold_until_s > 0

    def may_hold(self, now_s: float) -> bool:
        """Whether a running request without slots is better held than preempted.

        Only while bytes are on their way, and at most HELD_STEPS_MAX steps in a row. Counts
        the step as held when it says yes: ask once per step.
        """
        if self.port.hold_until_s <= now_s or self._held_in_a_row >= HELD_STEPS_MAX:
            return False
        self._held_in_a_row += 1
        self.held_steps += 1
        return True

    def hold_left_s(self, now_s: float) -> float:
        """Return how long bytes on their way are still worth waiting for."""
        return max(0.0, self.port.hold_until_s - now_s)

    def fits_never(self, blocks: int) -> bool:
        """Whether a request of `blocks` blocks exceeds what this instance can ever get."""
        return blocks > self.ceiling * self.pool.extent_blocks - 1

    def fits_alone(self, blocks: int) -> bool:
        """Whether it would fit in what is resident now if nothing else were running."""
        return blocks <= self.pool.blocks - 1

    # --- after a step ---

    def publish(self, now_s: float, *, running: int, waiting: int, missing: int, low: int) -> bool:
        """Take note of what the step showed, in blocks, and post levels if that matters.

        Returns whether they were compared with the posted ones: False less than REFRESH_S after
        the last time, unless the step asks for something new.

        `missing`: blocks beyond the free ones that running requests need for their next step
        or the oldest waiter to be admitted; 0 when nobody missed any. `low`: uncached free
        blocks that there should be, so that running requests and the next waiters find
        theirs. Cached blocks count as used here: the cache grows before it is evicted.
        """
        posted = self._posted
        self._low, self.missing = low, missing
        lack = self._lack()
        self._running, self._waiting = running, waiting
        if (
            (missing > 0 and posted.need_total <= self.pool.resident < self.ceiling)
            or (lack > 0 and posted.want_total <= self.pool.resident < self.ceiling)
            or (running + waiting == 0) != (posted.running + posted.waiting == 0)
        ):
            self._post(self._levels(), now_s)
            return True
        if lack > self._lack_seen:
            self._lack_seen = lack
        if now_s < self.look_s:
            return False
        self._look(now_s)
        return True

    def _lack(self) -> int:
        """Return the uncached blocks short of the low watermark; negative: above it."""
        queue = self.pool.queue
        return self._low - queue.num_free_blocks + len(queue.cached)

    def count_step(self, *, missed: bool, held: bool) -> None:
        """Count a scheduled step: `missed` some slots, `held` a running request."""
        if not held:
            self._held_in_a_row = 0
        if missed and not self.port.hold_until_s:
            self.no_slot_steps += 1

    def flush(self, now_s: float) -> None:
        """Post the newest levels if the coordinator has not seen them: no step comes soon."""
        levels = self._levels()
        if levels != self._posted:
            self._post(levels, now_s)

    def _look(self, now_s: float) -> None:
        """Post the newest need and the highest want since the last look, if worth it."""
        self.look_s = now_s + REFRESH_S
        levels = self._levels()
        if self._worth_posting(levels, now_s):
            self._post(levels, now_s)
        self._lack_seen = 0

    def _levels(self) -> PoolLevels:
        holdings = self.pool.levels()
        resident, whole, ceiling = holdings.resident, self._whole, self.ceiling
        need = want = 0
        if self._running or self._waiting:
            missing = self.missing
            lack = max(self._lack(), self._lack_seen)
            if missing > 0:
                need = min(resident + ceil_div(missing, whole), ceiling)
            if lack > 0:
                ahead = max(whole, resident * whole // AHEAD_SHARE)
                want = min(resident + ceil_div(lack + ahead, whole), ceiling)
            else:
                want = resident - min(holdings.free, -lack // whole)
        return PoolLevels(
            resident=resident,
            need_total=need,
            want_total=max(need, want),
            free=holdings.free,
            cached=holdings.cached,
            running=self._running,
            waiting=self._waiting,
        )

    def _worth_posting(self, levels: PoolLevels, now_s: float) -> bool:
        """Whether the coordinator could decide differently on `levels` than on the last ones.

        What could be given up is news only while others wait, and then none of an instance
        that waits itself: nothing is taken from it.
        """
        posted = self._posted
        if self._needs_otherwise(levels):
            return True
        if (self.port.pressure and not levels.need_total) or now_s - self._posted_s > (
            REFRESH_SLOW_S
        ):
            return levels != posted
        # A want below what is resident asks for nothing, whatever it is.
        want = max(levels.want_total, levels.resident) - max(posted.want_total, posted.resident)
        return abs(want) * AHEAD_SHARE > levels.resident

    def _needs_otherwise(self, levels: PoolLevels) -> bool:
        """Whether the need is smaller, and less would do, or new, or twice what was posted.

        One a little greater can wait: what was posted is given as a whole, and then the rest
        is asked for at once.
        """
        need, posted = levels.need_total, self._posted.need_total
        if need <= posted:
            return need < posted
        return not posted or need - levels.resident >= 2 * (posted - levels.resident)

    def _post(self, levels: PoolLevels, now_s: float) -> None:
        self._posted = levels
        self._posted_s = now_s
        self.look_s = now_s + REFRESH_S
        self.posts += 1
        self.given = levels.free + levels.cached
        self.needs_posted = levels.need_total > 0
        self._compare()
        self.port.post(levels)

    def _compare(self) -> None:
        """Tell whether what was posted asks for more than is resident, or no more can be.

        `needs_more` and `wants_more` say so to a step that misses blocks: it is no news.
        """
        resident = self.pool.resident
        full = resident >= self.ceiling
        self.needs_more = full or self._posted.need_total > resident
        self.wants_more = full or self._posted.want_total > resident

    # --- looking at it ---

    def status(self) -> dict[str, object]:
        """Return counters and histograms as plain data. Any thread: each value is one read."""
        return {
            "held_steps": self.held_steps,
            "no_slot_steps": self.no_slot_steps,
            "scheduler_wait_us": self.wait.summary_us(),
            "scheduler_wait_moving_us": self.wait_moving.summary_us(),
            "scheduler_overlapped_us": self.overlapped.summary_us(),
            "levels_posted": self.posts,
            "growth_latency_s": self._latency_s,
            "resident_extents": self.pool.resident,
            "limit_extents": min(self.limit, self.pool.extents),
            "ceiling_extents": self.ceiling,
            "step": self.step,
        }

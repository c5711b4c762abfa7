"""The hand-over between the scheduler thread (pool) and the coordinator thread.

Owns: two queues and the few words that cross them. Must not know: what either side does
with them. Neither side ever waits for the other: every call is a deque operation or the
assignment of a word, atomic under the GIL, plus one wake-up of the receiver.

Levels are absolute, so crossing messages cannot be misread: the pool says how many extents
it must have *in all*, not how many more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from kvadmit.messages import Runs

NO_LIMIT = 1 << 62
"""Extents that no pool has."""


class Resident(msgspec.Struct, frozen=True):
    """Coordinator to pool: every rank has committed these extents; hand their blocks out.

    `took_s`: from the first PREPARE to the last COMMIT answer; 0 if nothing had to be mapped.
    """

    extents: Runs
    took_s: float = 0.0


class Limit(msgspec.Struct, frozen=True):
    """Coordinator to pool: keep at most this many extents (level; the newest wins).

    Read from `PoolPort.limit`, not from `take`.
    """

    extents: int


class Ceiling(msgspec.Struct, frozen=True):
    """Coordinator to pool: the most extents this instance can ever get, min(cap, virtual)."""

    extents: int


class PoolLevels(msgspec.Struct, frozen=True, kw_only=True):
    """Pool to coordinator: its state as absolute levels, in extents (requests for the last two).

    `need_total`: the fewest extents with which running requests make their next step or the
    oldest waiter is admitted (0: content). `want_total >= need_total`: what the low
    watermark would like. `free`: wholly free and uncached; `cached`: wholly free but for
    reusable prefixes.
    """

    resident: int
    need_total: int = 0
    want_total: int = 0
    free: int = 0
    cached: int = 0
    running: int = 0
    waiting: int = 0


class PoolReturned(msgspec.Struct, frozen=True):
    """Pool to coordinator: extents withdrawn for good; `fence` = last scheduled step."""

    extents: Runs
    fence: int


QueuedOrder = Resident | Ceiling
PoolOrder = QueuedOrder | Limit
PoolEvent = PoolLevels | PoolReturned


class PoolPort:
    """One instance's port. `take` and `post` belong to the scheduler thread, the rest to
    the coordinator thread.

    `orders`: what `take` would return; to be looked at, not changed. Words that the coordinator
    writes and the scheduler reads: `limit`, the newest `Limit`, which is a level and needs no
    queue; `hold_until_s` (monotonic seconds): until then granted bytes are on their way and a
    running request is better held than preempted, 0 when nothing is; `pressure`: another
    instance waits for memory, so what the pool could give up is worth a message.
    """

    __slots__ = (
        "_events",
        "_wake_coordinator",
        "_wake_pool",
        "hold_until_s",
        "limit",
        "orders",
        "pressure",
    )

    def __init__(
        self, *, wake_pool: Callable[[], None], wake_coordinator: Callable[[], None]
    ) -> None:
        self.orders: deque[QueuedOrder] = deque()
        self._events: deque[PoolEvent] = deque()
        self._wake_pool = wake_pool
        self._wake_coordinator = wake_coordinator
        self.limit = NO_LIMIT
        self.hold_until_s = 0.0
        self.pressure = False

    # scheduler thread

    def take(self) -> list[QueuedOrder]:
        """Return the coordinator's orders since the last call, oldest first."""
        taken: list[QueuedOrder] = []
        while self.orders:
            taken.append(self.orders.popleft())
        return taken

    def post(self, event: PoolEvent) -> None:
        """Hand an event to the coordinator; never blocks."""
        self._events.append(event)
        self._wake_coordinator()

    # coordinator thread

    def give(self, order: PoolOrder) -> None:
        """Hand an order to the pool and wake an idle or parked engine; never blocks."""
        if isinstance(order, Limit):
            self.limit = order.extents
        else:
            self.orders.append(order)
        self._wake_pool()

    def collect(self) -> list[PoolEvent]:
        """Return the pool's events since the last call, oldest first."""
        collected: list[PoolEvent] = []
        while self._events:
            collected.append(self._events.popleft())
        return collected

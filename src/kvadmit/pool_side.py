"""The pool as the group machine sees it: its levels, and what it was told last.

Owns: the limit, the ceiling and the hold time given to the pool, and when an idle pool's free
extents become spare. Must not know: orders, ranks, the arbiter's messages, threads.
"""

from __future__ import annotations

from kvadmit.group_events import Effect, GivePool, Hold, StartTimer, StopTimer
from kvadmit.messages import Geometry
from kvadmit.port import Ceiling, Limit, PoolLevels
from kvadmit.states import RESIDENT, ExtentStates

HOLD_S = 0.020
"""Longest time a running request is held for bytes on their way: more would be a stall."""
IDLE_S = 1.0
"""After this long without requests the pool's free extents become spare."""


class PoolSide:
    """Levels of one pool and the orders it already has; only what changed is sent."""

    def __init__(self) -> None:
        self.levels = PoolLevels(resident=0)
        self._limit: int | None = None
        self._ceiling = 0
        self._idle_limit: int | None = None
        self._idle_timer = False
        self._held_until_s = 0.0

    def take(self, levels: PoolLevels, now_s: float, effects: list[Effect]) -> None:
        """Take the newest levels; start or stop counting idle time."""
        self.levels = levels
        if self._idle and not self._idle_timer:
            self._idle_timer = True
            effects.append(StartTimer("idle", now_s + IDLE_S))
        elif not self._idle and self._idle_timer:
            self._idle_timer = False
            effects.append(StopTimer("idle"))

    def idle_over(self) -> None:
        """Note that the idle time has passed: free extents may go."""
        self._idle_timer = False
        if self._idle:
            self._idle_limit = self.levels.resident - self.levels.free

    @property
    def _idle(self) -> bool:
        levels = self.levels
        return levels.running == levels.waiting == 0 and levels.free > 0

    def bound(
        self, states: ExtentStates, geometry: Geometry, excess: int, effects: list[Effect]
    ) -> None:
        """Tell the pool how many extents it may keep, when that changed.

        `excess`: extents that the pool has to give back for the allowance's sake.
        """
        limit = geometry.extents
        if excess > 0:
            limit = max(geometry.prefix, states.count[RESIDENT] - excess)
        if not self._idle:
            self._idle_limit = None
        elif self._idle_limit is not None:
            limit = max(geometry.prefix, min(limit, self._idle_limit))
        known = self._limit if self._limit is not None else geometry.extents
        if limit != known:
            self._limit = limit
            effects.append(GivePool(Limit(limit)))

    def raise_ceiling(self, ceiling: int, effects: list[Effect]) -> None:
        """Tell the pool the most it can ever get, when that is known and changed."""
        if ceiling and ceiling != self._ceiling:
            self._ceiling = ceiling
            effects.append(GivePool(Ceiling(ceiling)))

    def hold(self, states: ExtentStates, began_s: float, effects: list[Effect]) -> None:
        """Hold running requests while bytes they miss are granted and on their way.

        `began_s`: when the growth under way began.
        """
        missed = states.missing(self.levels.need_total) + states.coming > 0
        until_s = began_s + HOLD_S if states.coming and missed else 0.0
        if until_s != self._held_until_s:
            self._held_until_s = until_s
            effects.append(Hold(until_s))

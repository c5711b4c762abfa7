"""What sync does in a step: give back what is free, grow when blocks lack, wait for both.

Owns: when an instance under sync grows and shrinks, and the counters of it. Must not know:
vLLM; the simulated engine's scheduler uses it the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.colocated.sync_policy.caller import Caller
from kvadmit.admission import WaitHistogram
from kvadmit.pool import ElasticPool
from kvadmit.units import ceil_div

AHEAD_EXTENTS = 2
"""Extents asked for beyond the lack, so that not every block boundary is a call. After a
refusal only the lack is asked for, until a growth succeeds."""
KEEP_EXTENTS = (2, 4)
"""With more than the second number of wholly free extents, they go back down to the first:
memory an instance sits on cannot be had by others, as nobody would ask for it."""


class SyncGrowth:
    """One instance's growth. `moved()` is called after the pool grew or shrank."""

    def __init__(
        self,
        caller: Caller,
        pool: ElasticPool[Any],
        *,
        prefix: int,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self.pool = pool
        self._caller = caller
        self._moved = moved
        self._absent = set(range(prefix, pool.extents))
        self._ahead = AHEAD_EXTENTS
        self._spent_ns = 0
        self.restart()
        caller.describe = self.status

    def restart(self) -> None:
        """Count from zero."""
        self._growths = self._misses = self._rejections = 0
        self._latencies_s: list[float] = []
        self._wait = WaitHistogram()

    # --- scheduler thread ---

    def give_back(self, step: int) -> None:
        """Return wholly free extents beyond the reserve; `step`: the last one scheduled.

        Free extents include those that are free but for cached prefixes.
        """
        began = time.perf_counter_ns()
        low, high = KEEP_EXTENTS
        holdings = self.pool.levels()
        free = holdings.free + holdings.cached
        if free > high:
            gone = self.pool.withdraw(holdings.resident - (free - low))
            self._absent.update(gone)
            self._moved()
            for reply in self._caller.call("shrink", gone, fence=step):
                if not reply.done:
                    raise RuntimeError(f"rank {reply.rank} cannot shrink: {reply.reason}")
        self._spent_ns += time.perf_counter_ns() - began

    def grow(self, lack_blocks: int) -> bool:
        """Get at least `lack_blocks` more blocks from all ranks, or nothing; waits for it."""
        began = time.perf_counter_ns()
        lack = ceil_div(max(1, lack_blocks), self.pool.extent_blocks)
        wanted = sorted(self._absent)[: lack + self._ahead]
        grown = len(wanted) >= lack and self._grow(wanted)
        self._ahead = AHEAD_EXTENTS if grown else 0
        self._spent_ns += time.perf_counter_ns() - began
        return grown

    def end_step(self) -> None:
        """Note how long this step's calls and looks kept the scheduler."""
        self._wait.add(self._spent_ns)
        self._spent_ns = 0

    def _grow(self, extents: Sequence[int]) -> bool:
        began_s = time.monotonic()
        replies = self._caller.call("grow", extents)
        refused = [reply for reply in replies if not reply.done]
        if refused:
            self._misses += 1
            self._rejections += len(refused)
            mapped = [reply.rank for reply in replies if reply.done]
            self._caller.call_some(mapped, "undo", extents)
            return False
        self._growths += 1
        self._latencies_s.append(time.monotonic() - began_s)
        self._absent.difference_update(extents)
        self.pool.grow(extents)
        self._moved()
        return True

    # --- looking at it ---

    def status(self) -> dict[str, Any]:
        """Return everything counted, in the form of kvadmit's own status."""
        ordered = sorted(self._latencies_s)
        last = len(ordered) - 1
        spread: dict[str, float | None] = {"count": len(ordered), "p50": None, "p99": None}
        if ordered:
            spread |= {"p50": ordered[round(0.5 * last)], "p99": ordered[round(0.99 * last)]}
        return {
            "counters": {
                "growths": self._growths,
                "allocation_misses": self._misses,
                "headroom_rejections": self._rejections,
            },
            "histograms": {"grow_latency_s": spread},
        }

    def pool_status(self) -> dict[str, Any]:
        """Return the scheduler's own part of the status."""
        return {"scheduler_wait_us": self._wait.summary_us()}

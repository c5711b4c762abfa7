"""Counters and memory of an instance under kvadmit or sync, read from its status.

Owns: how a status (both policies answer in the form of `kvadmit_status`) becomes the bench's
records. Must not know: how it is fetched.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bench.colocated.outcome import COUNTS, SPREADS, Counted

UTILITY = "kvadmit_status"
RESTART = "kvadmit_bench_restart"
"""Counts and percentiles begin with this call, so that a run has its own."""
LEVEL = "kvadmit_bench_level"
"""Answers with bytes held, running and waiting requests, and waits for nobody."""
POLICIES = ("sync", "event", "event-layers")
"""Those whose EngineCore has these methods. Stock vLLM has none."""


class Status(msgspec.Struct, frozen=True):
    """What one status call said; counts since the engine started, spreads since the restart."""

    counts: dict[str, int | None]
    spreads: dict[str, dict[str, float | None] | None]


def parse(answer: dict[str, Any]) -> Status:
    """Return the parts of a status that the bench uses; what it does not have is None."""
    coordinator, pool = answer["coordinator"], answer["pool"]
    counters = {**coordinator["counters"], **pool}
    spreads = {
        **coordinator["histograms"],
        "scheduler_wait_us": _scheduler_wait(pool),
        "scheduler_overlapped_us": pool.get("scheduler_overlapped_us"),
    }
    return Status(
        counts={name: counters.get(name) for name in COUNTS},
        spreads={name: spreads.get(name) for name in SPREADS},
    )


def _scheduler_wait(pool: dict[str, Any]) -> dict[str, float | None]:
    """Return percentiles of the steps that moved no blocks, and the longest of all steps.

    kvadmit tells steps that moved blocks apart, which cost more in proportion to the blocks;
    sync counts all steps alike.
    """
    plain, moving = pool["scheduler_wait_us"], pool.get("scheduler_wait_moving_us")
    longest = [spread["max"] for spread in (plain, moving) if spread and spread["max"] is not None]
    return {"p50": plain["p50"], "p99": plain["p99"], "max": max(longest, default=None)}


def counted(now: Status, before: Status, preemptions: int, peak_held_bytes: int) -> Counted:
    """Return what one run counted; `before` was taken at its start."""
    counts: dict[str, int | None] = {}
    for name in COUNTS:
        newer, older = now.counts[name], before.counts[name]
        counts[name] = None if newer is None or older is None else newer - older
    return Counted(
        preemptions=preemptions,
        counts=counts,
        spreads=now.spreads,
        peak_held_bytes=peak_held_bytes,
    )

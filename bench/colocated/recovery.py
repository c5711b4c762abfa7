"""How long it takes until what a killed process was or had is there again.

Owns: the looks after a kill, and what they are looking for. Must not know: who is struck when.
Looks are status calls at a modest pace, so that they disturb nobody, and only after a kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from bench.colocated import blows
from bench.colocated.statistics import median
from kvadmit.errors import KvAdmitError
from kvadmit.rundir import RunDir

PACE_S = 0.05
BACK_WAIT_S = 60.0
"""Longer than an instance's start: at the latest that one asks for the memory."""

Snapshot = dict[str, Any]


async def until(holds: Callable[[Snapshot], bool], run: RunDir, *, what: str) -> None:
    """Look until an arbiter's snapshot `holds`.

    Raises TimeoutError, which names `what` is awaited, when none does within BACK_WAIT_S.
    """
    deadline_s = time.monotonic() + BACK_WAIT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(KvAdmitError):
            if holds(await asyncio.to_thread(blows.status, run)):
                return
        await asyncio.sleep(PACE_S)
    raise TimeoutError(f"{what} is not back within {BACK_WAIT_S:.0f} s")


def all_reported(snapshot: Snapshot, names: Collection[str]) -> bool:
    """Whether every instance of `names` is a member and has said what it holds."""
    instances = snapshot["instances"]
    return all(n in instances and instances[n]["report"]["revision"] for n in names)


def memory_is_back(snapshot: Snapshot, pids: Collection[int], killed_s: float) -> bool:
    """Whether the books count nothing for the dead `pids`, by a reading later than `killed_s`.

    Without such a reading an arbiter that is new does not know of the bytes of the dead.
    """
    instances = snapshot["instances"].values()
    return (
        not any(instance["pid"] in pids for instance in instances)
        and not any(device["foreign_bytes"] for device in snapshot["devices"].values())
        and any(r["at_s"] > killed_s for i in instances for r in i["report"]["devices"])
    )


def figures(times_s: Sequence[float]) -> dict[str, Any] | None:
    """Return median and worst of `times_s`, and all of them; None of nothing."""
    if not times_s:
        return None
    return {"median": median(times_s), "worst": max(times_s), "all": list(times_s)}

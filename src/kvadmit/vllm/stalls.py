"""Requests, and no token for want of memory: since when, and what is said of it.

Owns: the words, and when they are logged: once when a stall has lasted, once when it is over. Must
not know: who asks (`Engine.trouble`), or how the memory comes (the need is told already).

While requests run there is no stall, however long a step takes: for want of memory vLLM preempts.
"""

from __future__ import annotations

import logging
from typing import Any

from kvadmit.units import ceil_div, format_bytes
from kvadmit.vllm.step_notes import StepNotes

logger = logging.getLogger("vllm.kvadmit")

STALL_S = 10.0
"""So long without a token, for want of memory, and the instance is not ready."""


def note_empty_step(scheduler: Any, now_ns: int) -> None:
    """Take down that a step scheduled nothing; says so once that has lasted."""
    step: StepNotes = scheduler.kvadmit_step
    if not _waits_for_memory(scheduler):
        end(step, now_ns)
    elif not step.stalled_ns:
        step.stalled_ns = now_ns
    elif not step.stall_told and (text := stall(scheduler, now_ns / 1e9)):
        step.stall_told = True
        logger.warning("%s", text)


def end(step: StepNotes, now_ns: int) -> None:
    """Take down that a step runs, or that nobody waits for memory any more."""
    if step.stall_told:
        logger.warning("no stall any more, after %.0f s", (now_ns - step.stalled_ns) / 1e9)
    step.stalled_ns, step.stall_told = 0, False


def stall(scheduler: Any, now_s: float) -> str:
    """Return how long no token came for want of memory, and for whom; "" if not so, or not long."""
    step: StepNotes = scheduler.kvadmit_step
    stalled_s = now_s - step.stalled_ns / 1e9
    if not step.stalled_ns or stalled_s < STALL_S or not _waits_for_memory(scheduler):
        return ""
    pool, extent_bytes = scheduler.kvadmit.pool, scheduler.kvadmit_extent_bytes
    needed = ceil_div(scheduler._kvadmit_head_blocks(step.tried) + 1, pool.extent_blocks)
    return (
        f"no token for {stalled_s:.0f} s: request {step.tried.request_id}, the oldest of "
        f"{len(scheduler.waiting)} that wait, needs {format_bytes(needed * extent_bytes)} of KV "
        f"cache memory; this instance holds {format_bytes(pool.resident * extent_bytes)}"
    )


def _waits_for_memory(scheduler: Any) -> bool:
    """Whether somebody waits, nobody runs, and memory was what the last step lacked."""
    step: StepNotes = scheduler.kvadmit_step
    return bool(scheduler.waiting) and not scheduler.running and step.found_no_room

"""Named timers, without waiting for any."""

from __future__ import annotations

import asyncio

import pytest

from kvadmit.timers import LoopTimers, PolledTimers


def test_polled_timers_are_due_in_order_and_once() -> None:
    timers = PolledTimers()
    assert timers.wait_s(0.0) is None
    timers.start("late", 3.0)
    timers.start("early", 1.0)
    timers.start("moved", 1.5)
    timers.start("moved", 9.0)
    assert timers.wait_s(0.5) == 0.5
    assert timers.due(0.5) == []
    assert timers.due(3.0) == ["early", "late"]
    assert timers.due(3.0) == []
    assert timers.wait_s(8.0) == 1.0
    assert timers.wait_s(10.0) == 0.0


@pytest.mark.asyncio
async def test_loop_timers_fire_once_unless_stopped() -> None:
    fired: list[str] = []
    done = asyncio.Event()

    def on_fire(name: str) -> None:
        fired.append(name)
        if name == "last":
            done.set()

    timers = LoopTimers(on_fire)
    timers.start("stopped", 0.0)
    timers.start("replaced", 0.0)
    timers.start("replaced", 1e12)
    timers.start("now", 0.0)
    timers.stop("stopped")
    timers.stop("never started")
    timers.start("last", 0.0)
    async with asyncio.timeout(10):
        await done.wait()
    timers.close()
    timers.close()
    assert fired == ["now", "last"]


@pytest.mark.asyncio
async def test_a_timer_may_start_itself_again_when_it_fires() -> None:
    count = 0
    done = asyncio.Event()

    def on_fire(name: str) -> None:
        nonlocal count
        count += 1
        if count == 3:
            done.set()
        else:
            timers.start(name, 0.0)

    timers = LoopTimers(on_fire)
    timers.start("again", 0.0)
    async with asyncio.timeout(10):
        await done.wait()
    timers.close()
    assert count == 3

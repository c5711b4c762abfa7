"""The agent over real sockets and real host memory, driven by a real coordinator."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from integration.cluster import (
    POOL_EXTENTS,
    WAIT_S,
    Engine,
    Rank,
    make_plan,
    running,
    wait_until,
)
from kvadmit import agent, member, orders
from kvadmit.agent import Agent
from kvadmit.errors import DriverError, PeerLostError
from kvadmit.processes import SWITCH_INTERVAL_S
from kvadmit.rendezvous import ask_status
from kvadmit.rundir import RunDir
from kvadmit.vmm import BatchResult
from kvadmit.vmm_host import GRANULE_BYTES, HostAddressSpace


class Wrapped:
    """A space that behaves until a test says otherwise."""

    def __init__(self, space: HostAddressSpace) -> None:
        self.space = space
        self.device = space.device
        self.granule_bytes = space.granule_bytes
        self.layout = space.layout
        self.address = space.address
        self.prepare_raises: Exception | None = None
        self.commit_error: DriverError | None = None
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.log: list[tuple[str, tuple[int, ...]]] = []

    def prepare(self, extents: Sequence[int]) -> BatchResult:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        if self.prepare_raises is not None:
            error, self.prepare_raises = self.prepare_raises, None
            raise error
        return self.space.prepare(extents)

    def commit(self, extents: Sequence[int]) -> BatchResult:
        if self.commit_error is not None:
            error, self.commit_error = self.commit_error, None
            return BatchResult(step="map", error=error)
        return self.space.commit(extents)

    def abort(self, extents: Sequence[int]) -> BatchResult:
        return self.space.abort(extents)

    def forget_fresh(self, extents: Sequence[int]) -> int:
        self.log.append(("forget", tuple(extents)))
        return 0

    def decommit(self, extents: Sequence[int]) -> BatchResult:
        self.log.append(("decommit", tuple(extents)))
        return self.space.decommit(extents)

    def read(self) -> tuple[int, int]:
        return self.space.read()

    def close(self) -> None:
        self.space.close()


def wrapped(engine: Engine) -> Wrapped:
    space: Any = engine.ranks[0].agent._space
    assert isinstance(space, Wrapped)
    return space


def test_memory_is_there_when_resident_and_zero_after_each_growth(run_dir: Path) -> None:
    engine = Engine(run_dir, "alpha", idle_decay_s=0)
    with running(engine):
        buffer = memoryview(engine.ranks[0].space.buffer()).cast("B")
        for fill in (0xA5, 0x5A):
            engine.pool.use(8)
            engine.pool.wait_resident(8)
            end = 8 * GRANULE_BYTES
            assert bytes(buffer[GRANULE_BYTES:end]) == bytes(7 * GRANULE_BYTES)
            buffer[GRANULE_BYTES:end] = bytes([fill]) * (7 * GRANULE_BYTES)
            engine.pool.rest()
            engine.wait_held(1)
        assert engine.ranks[0].pool.booked_bytes == GRANULE_BYTES
        buffer.release()


def test_what_a_rank_measured_is_what_the_arbiter_books(run_dir: Path) -> None:
    engine = Engine(run_dir, "alpha")
    with running(engine):
        engine.ranks[0].agent.publish_base(3 * GRANULE_BYTES)

        def booked() -> bool:
            instances: Any = ask_status(RunDir.open(str(run_dir)))["instances"]
            (record,) = instances.values()
            return bool(record["base_bytes"] == {"host": 3 * GRANULE_BYTES})

        wait_until(booked, "the measured base is booked")


def test_a_driver_that_raises_still_answers(run_dir: Path) -> None:
    engine = Engine(run_dir, "alpha", agent={"wrap": Wrapped})
    with running(engine):
        wrapped(engine).prepare_raises = RuntimeError("the driver fell over")
        engine.pool.use(4)
        wait_until(lambda: engine.counters["allocation_misses"] == 1, "a miss is counted")
        assert engine.counters["headroom_rejections"] == 0
        # Without a new allowance nothing is tried again; a larger need brings one.
        engine.pool.use(6)
        engine.pool.wait_resident(6)


def test_a_commit_that_fails_is_finished_later(run_dir: Path) -> None:
    engine = Engine(run_dir, "alpha", agent={"wrap": Wrapped})
    with running(engine):
        wrapped(engine).commit_error = DriverError("map", "host", "EINVAL", "for the test")
        engine.pool.use(4)
        wait_until(lambda: engine.counters["allocation_misses"] == 1, "a miss is counted")
        engine.pool.use(6)
        engine.pool.wait_resident(6)
        engine.wait_held(6)


def test_growth_overtakes_a_device_wait(run_dir: Path) -> None:
    entered, gate = threading.Event(), threading.Event()

    def device_wait() -> None:
        entered.set()
        assert gate.wait(WAIT_S)

    engine = Engine(run_dir, "alpha", idle_decay_s=0, agent={"device_wait": device_wait})
    with running(engine):
        engine.pool.use(8)
        engine.pool.wait_resident(8)
        engine.pool.limit = 4
        engine.pool.use(4)
        assert entered.wait(WAIT_S), "four extents wait for the device"
        engine.pool.limit = POOL_EXTENTS
        engine.pool.use(20)
        # Four are behind the fence; the others come all the same.
        engine.pool.wait_resident(16)
        assert engine.group["extents"]["draining"] == 4
        gate.set()
        engine.pool.wait_resident(20)


def test_nothing_is_enqueued_for_what_leaves_from_before_the_device_wait_on(run_dir: Path) -> None:
    """Zeroes for a committed extent may wait in the device's queue when it is given back."""

    def device_wait() -> None:
        wrapped(engine).log.append(("wait", ()))

    agent = {"device_wait": device_wait, "wrap": Wrapped}
    engine = Engine(run_dir, "alpha", idle_decay_s=0, agent=agent)
    with running(engine):
        for _ in range(3):
            engine.pool.use(8)
            engine.pool.wait_resident(8)
            engine.pool.rest()
            engine.wait_held(1)
        log = wrapped(engine).log
    left = [at for at, (call, _) in enumerate(log) if call == "decommit"]
    assert left
    for at in left:
        forgotten = max(n for n, entry in enumerate(log[:at]) if entry == ("forget", log[at][1]))
        assert ("wait", ()) in log[forgotten:at]


def test_no_driver_call_while_graphs_are_captured(run_dir: Path) -> None:
    engine = Engine(run_dir, "alpha", agent={"wrap": Wrapped})
    with running(engine):
        space, rank = wrapped(engine), engine.ranks[0]
        rank.agent.set_capturing(True)
        engine.pool.use(4)
        wait_until(lambda: engine.group["extents"]["preparing"] == 3, "an order is out")
        assert not space.entered.wait(0.2)
        rank.agent.set_capturing(False)
        engine.pool.wait_resident(4)


def test_a_capture_begins_after_the_call_under_way(run_dir: Path) -> None:
    engine = Engine(run_dir, "alpha", agent={"wrap": Wrapped})
    with running(engine):
        space, rank = wrapped(engine), engine.ranks[0]
        space.gate.clear()
        engine.pool.use(4)
        assert space.entered.wait(WAIT_S)
        quiet = threading.Event()

        def capture() -> None:
            rank.agent.set_capturing(True)
            quiet.set()

        thread = threading.Thread(target=capture)
        thread.start()
        assert not quiet.wait(0.2), "a driver call is still running"
        space.gate.set()
        assert quiet.wait(WAIT_S)
        thread.join()
        rank.agent.set_capturing(False)
        engine.pool.wait_resident(4)


def test_no_published_step_is_missed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishing races with orders that arrive; no order may stay parked."""
    # A repeated order would wake the agent and hide a missed wake-up.
    monkeypatch.setattr(orders, "ORDER_WAIT_S", 10 * WAIT_S)
    engine = Engine(run_dir, "alpha", idle_decay_s=0)
    delays = random.Random(7)
    with running(engine):
        publish = engine.pool.on_step

        def publish_late(step: int) -> None:
            time.sleep(delays.uniform(0.0, 0.002))  # about when the order arrives
            publish(step)

        engine.pool.on_step = publish_late
        for _ in range(100):
            engine.pool.use(3)
            engine.pool.wait_resident(3)
            engine.pool.limit = 1
            engine.pool.rest()
            engine.pool.wait_for(lambda: len(engine.pool.resident) == 1, "withdrawn")
            engine.pool.limit = POOL_EXTENTS
            wait_until(lambda: not engine.group["extents"]["draining"], "past the fence")


def test_a_worker_ends_when_its_coordinator_is_gone(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "EXIT_GRACE_S", 0.05)
    ended = threading.Event()
    codes: list[int] = []

    def exit_process(code: int) -> None:
        codes.append(code)
        ended.set()

    engine = Engine(run_dir, "alpha", agent={"exit_process": exit_process})
    with running(engine):
        engine.pool.stop()
        engine.coordinator.stop()
        assert ended.wait(WAIT_S)
        assert codes == [agent.EXIT_CODE]


def test_a_start_without_a_coordinator_says_so(run_dir: Path) -> None:
    engine = Engine(run_dir, "alpha")
    try:
        engine.greet()
        runtime = engine.coordinator.runtime
    finally:
        engine.stop()
    plan = make_plan()
    with pytest.raises(PeerLostError, match="lease line"):
        Rank(runtime, 0, plan)


def test_busy_processes_hand_their_interpreter_to_kvadmits_threads_soon(run_dir: Path) -> None:
    engine = Engine(run_dir, "alpha")
    usual_s = sys.getswitchinterval()
    try:
        sys.setswitchinterval(10 * SWITCH_INTERVAL_S)
        engine.greet()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
        sys.setswitchinterval(10 * SWITCH_INTERVAL_S)
        engine.add_rank(0)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
        engine.coordinator.wait_ready()
    finally:
        engine.stop()
        sys.setswitchinterval(usual_s)


def test_stop_is_idempotent_and_needs_no_start(run_dir: Path) -> None:
    engine = Engine(run_dir, "alpha")
    with running(engine):
        rank = engine.ranks[0]
        rank.agent.stop()
        rank.agent.stop()
        assert engine.lost.wait(WAIT_S)
        assert engine.lost_reason == "rank 0 closed its lease line"
        unstarted = Agent(engine.coordinator.runtime, rank=0, space=rank.space, prefix=1)
        unstarted.stop()

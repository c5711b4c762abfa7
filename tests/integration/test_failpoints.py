"""SIGKILL, SIGSTOP and failures at every phase of growth and shrink, in real processes.

Each case is a row of the failure matrix at one point in time. In all of them the neighbour grows
on meanwhile, and in the end the books equal the reports.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from integration.cluster import (
    POOL_EXTENTS,
    WAIT_S,
    Engine,
    EngineProcess,
    FrontEnd,
    WorkerProcess,
    arbiter_pid,
    engine_order,
    running,
    wait_until,
)
from integration.failpoints import FAILING_RANK, Failpoint, arm_coordinator
from integration.test_two_instances import wait_books_equal
from kvadmit.processes import is_stopped

GROWN = 8
HALF = POOL_EXTENTS // 2
GROWTH = ("prepare begun", "prepare done", "commit begun", "commit done")
SHRINK = ("decommit begun", "decommit done")
ENGINE_POINTS = (
    "need reported",
    "allowance heard",
    "prepare sent",
    "commit sent",
    "resident given",
    "fence sent",
    "decommit sent",
)


def two_ranks(run_dir: Path, failpoint: Failpoint) -> Engine:
    return Engine(run_dir, "alpha", ranks=2, processes=True, agent={"failpoint": failpoint})


def provoke(engine: Engine, at: str) -> None:
    """Have the engine come to the point `at`, not waiting for more than that takes."""
    engine.pool.use(GROWN)
    if at.startswith(("fence", "decommit")):
        engine.pool.wait_resident(GROWN)
        engine.pool.rest()


def bring_to(victim: EngineProcess, at: str) -> None:
    """Have another process come to the point `at`, not waiting for its answer."""
    wanted = HALF
    if at in ("fence sent", "decommit sent"):
        victim.use(HALF)
        victim.wait_resident(HALF)
        wanted = 1
    victim.tell({"use": wanted, "cached": 0})


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Wait until a process has stopped; let it go on afterwards."""
    wait_until(lambda: is_stopped(pid), f"process {pid} is stopped")
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def grow_to(engine: Engine, extents: int) -> None:
    engine.pool.use(extents)
    engine.pool.wait_resident(extents)


@pytest.mark.parametrize("at", [*GROWTH, *SHRINK])
def test_a_worker_killed_there_ends_its_engine_and_leaves_all_memory(
    run_dir: Path, at: str
) -> None:
    alpha, beta = two_ranks(run_dir, Failpoint(at, "kill")), Engine(run_dir, "beta")
    with running(alpha, beta):
        provoke(alpha, at)
        assert alpha.lost.wait(WAIT_S)
        assert alpha.lost_reason == f"rank {FAILING_RANK} closed its lease line"
        grow_to(beta, HALF)
        alpha.stop()  # as an engine does that has lost a rank
        grow_to(beta, POOL_EXTENTS)
        assert not beta.lost.is_set()
        wait_books_equal(run_dir, beta)


@pytest.mark.parametrize("at", [*GROWTH, *SHRINK])
def test_a_worker_stopped_there_finishes_once_it_goes_on(run_dir: Path, at: str) -> None:
    alpha, beta = two_ranks(run_dir, Failpoint(at, "stop")), Engine(run_dir, "beta")
    with running(alpha, beta):
        provoke(alpha, at)
        worker: WorkerProcess = alpha.ranks[FAILING_RANK]
        with stopped(worker.pid):
            grow_to(beta, HALF)
        if at in GROWTH:
            alpha.pool.wait_resident(GROWN)
            alpha.pool.rest()
        alpha.wait_held(1)
        assert alpha.counters["allocation_misses"] == alpha.counters["orphans"] == 0
        wait_books_equal(run_dir, alpha, beta)


@pytest.mark.parametrize(
    ("at", "act", "rejections"),
    [("prepare begun", "refuse", 1), ("prepare begun", "fail", 0), ("commit begun", "fail", 0)],
)
def test_a_call_that_fails_there_is_a_miss_and_made_good(
    run_dir: Path, at: str, act: str, rejections: int
) -> None:
    failpoint = Failpoint(at, act)  # type: ignore[arg-type]
    alpha, beta = two_ranks(run_dir, failpoint), Engine(run_dir, "beta")
    with running(alpha, beta):
        provoke(alpha, at)
        grow_to(beta, HALF)
        alpha.pool.wait_resident(GROWN)
        assert alpha.counters["allocation_misses"] == 1
        assert alpha.counters["headroom_rejections"] == rejections
        assert beta.counters["allocation_misses"] == 0
        alpha.pool.rest()
        alpha.wait_held(1)
        wait_books_equal(run_dir, alpha, beta)


@pytest.mark.parametrize("kind", ["prepare", "commit"])
def test_an_answer_lost_there_is_asked_for_again(run_dir: Path, kind: str) -> None:
    at = f"{kind} answered"
    alpha, beta = two_ranks(run_dir, Failpoint(at, "lose")), Engine(run_dir, "beta")
    with running(alpha, beta):
        provoke(alpha, at)
        grow_to(beta, HALF)
        alpha.pool.wait_resident(GROWN)
        alpha.pool.rest()
        alpha.wait_held(1)
        assert alpha.counters["resends"] >= 1
        assert alpha.counters["allocation_misses"] == alpha.counters["orphans"] == 0
        wait_books_equal(run_dir, alpha, beta)


@pytest.mark.parametrize("at", ENGINE_POINTS)
def test_an_engine_stopped_there_finishes_once_it_goes_on(run_dir: Path, at: str) -> None:
    beta = Engine(run_dir, "beta")
    with running(beta):
        victim = EngineProcess(run_dir, "victim", failpoint=Failpoint(at, "stop"), idle_decay_s=0)
        try:
            bring_to(victim, at)
            with stopped(victim.pid):
                grow_to(beta, HALF)
            victim.hear("the stopped one does not go on")
            victim.use(HALF)
            victim.wait_resident(HALF)
            assert victim.status["counters"]["allocation_misses"] == 0
            victim.use(1)
            beta.pool.rest()
            beta.wait_held(1)
            wait_until(lambda: victim.status["group"]["held"] == 1, "the victim has given back")
        finally:
            victim.close()


@pytest.mark.parametrize("at", ENGINE_POINTS)
def test_an_engine_killed_there_leaves_all_memory_to_the_other(run_dir: Path, at: str) -> None:
    beta = Engine(run_dir, "beta")
    with running(beta):
        victim = EngineProcess(run_dir, "victim", failpoint=Failpoint(at, "kill"))
        try:
            bring_to(victim, at)
            assert victim.process.wait(WAIT_S) == -signal.SIGKILL
            grow_to(beta, POOL_EXTENTS)
            wait_books_equal(run_dir, beta)
        finally:
            victim.close()
        beta.pool.rest()
        gamma = Engine(run_dir, "gamma")
        with running(gamma):
            grow_to(gamma, HALF)
            wait_books_equal(run_dir, beta, gamma)
            own = len(list(run_dir.glob("i-*.own")))
            assert own == 2, "the victim's files went with the start after it"


@pytest.mark.parametrize("at", ENGINE_POINTS)
def test_an_engine_whose_front_end_is_killed_there_ends_and_leaves_all_memory(
    run_dir: Path, at: str
) -> None:
    beta = Engine(run_dir, "beta")
    with running(beta):
        failpoint = msgspec.to_builtins(Failpoint(at, "kill parent"))
        orders: list[dict[str, int]] = [{"use": HALF, "cached": 0}]
        if at in ("fence sent", "decommit sent"):
            orders += [{"wait_resident": HALF}, {"use": 1, "cached": 0}]
        first = engine_order(run_dir, "victim") | {"failpoint": failpoint}
        with FrontEnd(first, *orders) as front_end:
            assert front_end.process.wait(WAIT_S) == -signal.SIGKILL
            grow_to(beta, HALF)
            assert front_end.engine_ends(WAIT_S)
        grow_to(beta, POOL_EXTENTS)
        wait_books_equal(run_dir, beta)


@pytest.mark.parametrize("act", ["kill arbiter", "stop arbiter"])
@pytest.mark.parametrize(
    "at", ["need reported", "allowance heard", "commit sent", "resident given", "decommit sent"]
)
def test_an_arbiter_struck_there_fails_nobody_and_its_books_are_exact_afterwards(
    run_dir: Path, at: str, act: str
) -> None:
    alpha, beta = Engine(run_dir, "alpha"), Engine(run_dir, "beta")
    with running(alpha, beta):
        struck = arbiter_pid(run_dir)
        arm_coordinator(alpha.coordinator, Failpoint(at, act))  # type: ignore[arg-type]
        provoke(alpha, at)
        if act == "stop arbiter":
            with stopped(struck):
                assert not alpha.lost.is_set()
        else:
            wait_until(lambda: arbiter_pid(run_dir) not in (0, struck), "another arbiter")
        for engine in (alpha, beta):
            grow_to(engine, HALF)
        wait_books_equal(run_dir, alpha, beta)
        assert (arbiter_pid(run_dir) == struck) is (act == "stop arbiter")
        for engine in (alpha, beta):
            engine.pool.rest()
            engine.wait_held(1)
            assert engine.counters["allocation_misses"] == 0
        wait_books_equal(run_dir, alpha, beta)

"""What survivors see when a process is killed or frozen in the middle of things."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    make_plan,
    running,
    wait_until,
)
from integration.test_two_instances import books, wait_books_equal
from kvadmit import cli
from kvadmit.agent import EXIT_CODE
from kvadmit.errors import KvAdmitError
from kvadmit.processes import is_stopped
from kvadmit.rendezvous import ask_status, log_path
from kvadmit.rundir import RunDir


@contextmanager
def closing(process: EngineProcess) -> Iterator[EngineProcess]:
    try:
        yield process
    finally:
        process.close()


def test_what_a_start_is_about_to_take_survives_the_arbiter(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next arbiter hears first of a neighbour that wants all there is."""
    alpha, beta = Engine(run_dir, "alpha"), Engine(run_dir, "beta")
    with running(alpha):
        try:
            beta.greet()  # its prefix is granted, and not yet taken
            found_again = asyncio.Event()
            channel = beta.coordinator._arbiter
            assert channel is not None
            connect, loop = channel._connect, beta.coordinator._loop
            assert loop is not None

            async def wait_and_connect() -> None:
                await found_again.wait()
                await connect()

            monkeypatch.setattr(channel, "_connect", wait_and_connect)
            alpha.pool.use(POOL_EXTENTS)
            before = arbiter_pid(run_dir)
            os.kill(before, signal.SIGKILL)

            def alpha_has_reported() -> bool:
                with contextlib.suppress(KvAdmitError):
                    record = books(run_dir)
                    wanting = record["instances"].get("alpha", {"report": {"need": 0}})
                    return bool(record["pid"] != before and wanting["report"]["need"] > 0)
                return False

            wait_until(alpha_has_reported, "alpha wants all of the next arbiter")
            loop.call_soon_threadsafe(found_again.set)
            beta.add_rank(0)
            beta.coordinator.wait_ready()
            assert beta.held == 1
            alpha.pool.use(POOL_EXTENTS - 1)
            alpha.pool.wait_resident(POOL_EXTENTS - 1)
        finally:
            beta.stop()


def test_a_killed_instance_leaves_its_memory_to_the_other(run_dir: Path) -> None:
    alpha = Engine(run_dir, "alpha")
    with running(alpha), closing(EngineProcess(run_dir, "beta")) as beta:
        beta.use(POOL_EXTENTS - 8)
        beta.wait_resident(POOL_EXTENTS - 8)
        alpha.pool.use(POOL_EXTENTS - 2)  # waits: beta is busy
        wait_until(lambda: books(run_dir)["waiting"] != [], "alpha waits at the arbiter")
        assert alpha.held < 16
        beta.kill()
        alpha.pool.wait_resident(POOL_EXTENTS - 2)
        left = list(run_dir.glob("i-*.own"))
        assert len(left) == 2
        alpha.pool.rest()
        # A newcomer finds memory, and its start sweeps what the dead one left.
        gamma = Engine(run_dir, "gamma")
        with running(gamma):
            gamma.pool.use(POOL_EXTENTS // 2)
            gamma.pool.wait_resident(POOL_EXTENTS // 2)
            assert len(list(run_dir.glob("i-*.own"))) == 2
            wait_books_equal(run_dir, alpha, gamma)
    assert not list(run_dir.glob("i-*"))


def test_a_killed_arbiter_is_replaced_and_the_books_are_exact(run_dir: Path) -> None:
    alpha, beta = Engine(run_dir, "alpha"), Engine(run_dir, "beta")
    with running(alpha, beta):
        for round_, (busy, idle) in enumerate(((alpha, beta), (beta, alpha), (alpha, beta))):
            busy.pool.use(POOL_EXTENTS - 8)
            os.kill(arbiter_pid(run_dir), signal.SIGKILL)  # while the growth is under way
            killed_s = time.monotonic()
            busy.pool.wait_resident(POOL_EXTENTS - 8)
            for engine in (alpha, beta):
                wait_until(
                    lambda e=engine, n=round_: e.group["link"]["epoch"] == n + 2,  # type: ignore[misc]
                    f"{engine.name} has joined epoch {round_ + 2}",
                )
            assert time.monotonic() - killed_s < WAIT_S
            wait_books_equal(run_dir, alpha, beta)
            assert idle.held <= 8
            busy.pool.rest()
        for engine in (alpha, beta):
            assert not engine.lost.is_set()
            engine.wait_held(1)


def test_a_frozen_worker_pauses_its_own_group_only(run_dir: Path) -> None:
    alpha = Engine(run_dir, "alpha", ranks=2, processes=True)
    beta = Engine(run_dir, "beta")
    with running(alpha, beta):
        alpha.pool.use(4)
        alpha.pool.wait_resident(4)
        frozen: WorkerProcess = alpha.ranks[1]
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: is_stopped(frozen.pid), "frozen")
            alpha.pool.use(8)
            wait_until(lambda: _waiting_ranks(alpha) == [1], "rank 1 is waited for, and named")
            beta.pool.use(POOL_EXTENTS // 2)
            beta.pool.wait_resident(POOL_EXTENTS // 2)
            assert not alpha.lost.is_set()
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
        alpha.pool.wait_resident(8)
        assert alpha.counters["allocation_misses"] == 0


def test_status_names_a_stopped_rank_from_when_it_was_asked_again_until_it_goes_on(
    run_dir: Path,
) -> None:
    alpha = Engine(run_dir, "alpha", ranks=2, processes=True)
    with running(alpha):
        stopped: WorkerProcess = alpha.ranks[1]
        assert "no answer" not in shown_status(run_dir)
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: is_stopped(stopped.pid), "stopped")
            alpha.pool.use(8)
            wait_until(
                lambda: "no answer from rank 1" in shown_status(run_dir), "status names rank 1"
            )
            assert alpha.counters["resends"] >= 1
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        alpha.pool.wait_resident(8)
        wait_until(lambda: "no answer" not in shown_status(run_dir), "status names nobody")


def test_who_does_not_give_back_is_passed_over(run_dir: Path) -> None:
    """A frozen worker cannot unmap: after `reclaim_s` the next victim is asked."""
    frozen = Engine(run_dir, "frozen", processes=True, idle_decay_s=60)
    willing = Engine(run_dir, "willing", idle_decay_s=60)
    claimant = Engine(run_dir, "claimant")
    with running(frozen, willing, claimant):
        for engine, extents in ((frozen, 30), (willing, 24)):
            engine.pool.use(extents)
            engine.pool.wait_resident(extents)
            engine.pool.rest()
        worker: WorkerProcess = frozen.ranks[0]
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: is_stopped(worker.pid), "frozen")
            claimant.pool.use(28)
            claimant.pool.wait_resident(28)
            assert "frozen gives nothing back; asking others" in arbiter_log(run_dir)
            assert not frozen.lost.is_set()
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        wait_books_equal(run_dir, frozen, willing, claimant)


def shown_status(run_dir: Path) -> str:
    return cli.render_status(ask_status(RunDir.open(str(run_dir))))


def arbiter_log(run_dir: Path) -> str:
    return log_path(RunDir.open(str(run_dir))).read_text()


def _waiting_ranks(engine: Engine) -> list[int]:
    orders: Any = engine.group["orders"]
    return [rank for order in orders for rank in order["waiting_ranks"]]


def test_workers_end_when_the_engine_core_is_killed(run_dir: Path) -> None:
    with closing(EngineProcess(run_dir, "alpha", without_ranks=True)) as engine:
        runtime = engine.first["runtime"]
        worker = WorkerProcess(runtime, 0, make_plan())
        try:
            engine.kill()
            assert worker.process.wait(WAIT_S) == EXIT_CODE
        finally:
            worker.close()


def test_the_engine_ends_when_a_worker_is_killed(run_dir: Path) -> None:
    alpha = Engine(run_dir, "alpha", ranks=2, processes=True)
    with running(alpha):
        alpha.ranks[0].kill()
        assert alpha.lost.wait(WAIT_S)
        assert alpha.lost_reason == "rank 0 closed its lease line"


@pytest.mark.parametrize("deaf", [False, True])
def test_the_engine_ends_when_its_front_end_is_killed(run_dir: Path, deaf: bool) -> None:
    """Also one that does not hear SIGTERM: it is ended after a grace."""
    first = engine_order(run_dir, "alpha") | {"deaf": deaf}
    with FrontEnd(first) as front_end:
        assert not front_end.engine_ends(0.1)
        front_end.process.kill()
        assert front_end.engine_ends(15.0), "memory is back within 15 s"
    # Nothing holds memory any more, and the next one starts.
    with running(Engine(run_dir, "beta")):
        assert set(books(run_dir)["instances"]) == {"beta"}

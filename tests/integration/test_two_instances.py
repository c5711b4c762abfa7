"""Several instances in one process share a host's memory through a real arbiter."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from integration.cluster import (
    HOST_POOL,
    POOL_EXTENTS,
    Engine,
    make_plan,
    running,
    wait_until,
)
from kvadmit.coordinator import Coordinator
from kvadmit.errors import CapacityError
from kvadmit.rendezvous import ask_status
from kvadmit.rundir import RunDir
from kvadmit.vmm_host import GRANULE_BYTES


def books(run_dir: Path) -> dict[str, Any]:
    """Return the arbiter's snapshot."""
    return dict(ask_status(RunDir.open(str(run_dir))))


def wait_books_equal(run_dir: Path, *engines: Engine) -> None:
    """Wait until the arbiter counts every instance for what it holds, and nothing else."""

    def equal() -> bool:
        snapshot = books(run_dir)
        held = {name: i["held_extents"] for name, i in snapshot["instances"].items()}
        device = snapshot["devices"]["host"]
        return held == {e.name: e.held for e in engines} and device["foreign_bytes"] == 0

    wait_until(equal, "the books equal the reports")


def test_memory_goes_to_the_busy_one_and_back(run_dir: Path) -> None:
    alpha, beta = Engine(run_dir, "alpha"), Engine(run_dir, "beta")
    with running(alpha, beta):
        for busy, idle in ((alpha, beta), (beta, alpha), (alpha, beta)):
            busy.pool.use(POOL_EXTENTS - 4)
            busy.pool.wait_resident(POOL_EXTENTS - 4)
            assert idle.held <= 4
            busy.pool.rest()
        for engine in (alpha, beta):
            engine.wait_held(1)
            assert engine.counters["allocation_misses"] == 0
            assert engine.counters["headroom_rejections"] == 0
        wait_books_equal(run_dir, alpha, beta)


def test_what_another_thread_reads_during_a_resize_is_one_state(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is negative, above the total, or counted twice: the owner's thread describes it."""
    describing: set[str] = set()
    describe = Coordinator._describe

    def noted(self: Coordinator) -> dict[str, object]:
        describing.add(threading.current_thread().name)
        return describe(self)

    monkeypatch.setattr(Coordinator, "_describe", noted)
    alpha, beta = Engine(run_dir, "alpha"), Engine(run_dir, "beta")
    ended = threading.Event()
    states: list[dict[str, int]] = []
    devices: list[dict[str, int]] = []

    def read_group() -> None:
        while not ended.is_set():
            group: Any = alpha.coordinator.status()["group"]
            states.append({**group["extents"], "held": group["held"]})

    def read_books() -> None:
        while not ended.is_set():
            devices.append(books(run_dir)["devices"]["host"])

    readers = [threading.Thread(target=read) for read in (read_group, read_books)]
    with running(alpha, beta):
        for reader in readers:
            reader.start()
        try:
            for busy in (alpha, beta) * 10:
                busy.pool.use(POOL_EXTENTS - 4)
                busy.pool.wait_resident(POOL_EXTENTS - 4)
                busy.pool.rest()
        finally:
            ended.set()
            for reader in readers:
                reader.join()
    assert not describing & {reader.name for reader in readers}
    held = [state.pop("held") for state in states]
    assert [sum(state.values()) for state in states] == [POOL_EXTENTS] * len(states)
    assert held == [POOL_EXTENTS - state["absent"] for state in states]
    assert min(min(state.values()) for state in states) == 0
    assert len(set(held)) > 2, "it was read while it changed"
    for device in devices:
        assert 0 <= device["held_bytes"] <= device["booked_bytes"] <= HOST_POOL
        assert (device["capacity_bytes"], device["total_bytes"]) == (HOST_POOL, HOST_POOL)


def test_an_idle_cache_is_worth_less_than_a_request(run_dir: Path) -> None:
    alpha, beta = Engine(run_dir, "alpha", idle_decay_s=60), Engine(run_dir, "beta")
    with running(alpha, beta):
        alpha.pool.use(POOL_EXTENTS - 4)
        alpha.pool.wait_resident(POOL_EXTENTS - 4)
        alpha.pool.rest(cached=POOL_EXTENTS)
        beta.pool.use(POOL_EXTENTS // 2)
        beta.pool.wait_resident(POOL_EXTENTS // 2)
        # No more was taken than somebody needed.
        assert alpha.held >= POOL_EXTENTS // 4


def test_a_newcomer_starts_beside_a_full_cache(run_dir: Path) -> None:
    alpha = Engine(run_dir, "alpha", idle_decay_s=60)
    beta = Engine(run_dir, "beta", plan=make_plan(prefix=8, floor=8))
    with running(alpha):
        alpha.pool.use(POOL_EXTENTS)
        alpha.pool.wait_resident(POOL_EXTENTS)
        alpha.pool.rest(cached=POOL_EXTENTS)
        with running(beta):
            assert beta.held == 8
            assert alpha.held <= POOL_EXTENTS - 8
        alpha.pool.use(POOL_EXTENTS)
        alpha.pool.wait_resident(POOL_EXTENTS)


def test_a_floor_that_does_not_fit_is_refused_with_names(run_dir: Path) -> None:
    alpha = Engine(run_dir, "alpha", plan=make_plan(floor=40))
    beta = Engine(run_dir, "beta", plan=make_plan(floor=30))
    with running(alpha):
        with pytest.raises(CapacityError) as refusal:
            beta.start()
        text = str(refusal.value)
        assert "the floor of beta (120KiB) does not fit" in text
        assert "alpha 160KiB" in text
        alpha.pool.use(POOL_EXTENTS)
        alpha.pool.wait_resident(POOL_EXTENTS)


def test_a_start_that_finds_no_memory_says_who_holds_it(run_dir: Path) -> None:
    alpha = Engine(run_dir, "alpha")
    with running(alpha):
        alpha.pool.use(POOL_EXTENTS)
        alpha.pool.wait_resident(POOL_EXTENTS)
        beta = Engine(run_dir, "beta", plan=make_plan(prefix=8, floor=8), start_wait_s=1.0)
        with pytest.raises(CapacityError, match=r"held by: alpha 256KiB\)"):
            beta.start()
        gamma = Engine(run_dir, "gamma", start_wait_s=1.0)
        with pytest.raises(CapacityError, match=r"held by: alpha 256KiB\)"):
            gamma.start({"host": 40 * GRANULE_BYTES})
        assert alpha.held == POOL_EXTENTS


def test_three_with_extents_of_different_size(run_dir: Path) -> None:
    engines = [
        Engine(run_dir, f"pages{pages}", plan=make_plan(extents=POOL_EXTENTS // pages, pages=pages))
        for pages in (1, 2, 4)
    ]
    with running(*engines):
        for busy in engines:
            others = sum(e.plan.extent_bytes["host"] for e in engines if e is not busy)
            most = (HOST_POOL - others) // busy.plan.extent_bytes["host"]
            busy.pool.use(most)
            busy.pool.wait_resident(most)
            busy.pool.rest()
        for engine in engines:
            engine.wait_held(1)
        wait_books_equal(run_dir, *engines)
        used = books(run_dir)["devices"]["host"]["held_bytes"]
        assert used == (1 + 2 + 4) * GRANULE_BYTES


def test_groups_of_two_ranks_never_hold_half_of_each_other(run_dir: Path) -> None:
    alpha = Engine(run_dir, "alpha", ranks=2)
    beta = Engine(run_dir, "beta", ranks=2)
    half = POOL_EXTENTS // 2
    with running(alpha, beta):
        # Both at once want nearly all there is: one has it first, then the other.
        alpha.pool.use(half - 2)
        beta.pool.use(half - 2)

        def someone_has_it() -> bool:
            return any(len(e.pool.resident) == half - 2 for e in (alpha, beta))

        wait_until(someone_has_it, "one of them is served whole")
        first = max((alpha, beta), key=lambda e: len(e.pool.resident))
        second = beta if first is alpha else alpha
        first.pool.rest()
        second.pool.wait_resident(half - 2)


def test_two_busy_ones_share_what_there_is(run_dir: Path) -> None:
    alpha, beta = Engine(run_dir, "alpha"), Engine(run_dir, "beta")
    with running(alpha, beta):
        for extents in range(4, POOL_EXTENTS // 2 + 1, 4):
            for engine in (alpha, beta):
                engine.pool.use(extents)
            for engine in (alpha, beta):
                engine.pool.wait_resident(extents)
        for engine in (alpha, beta):
            assert engine.counters["allocation_misses"] == 0
            assert engine.counters["timer_probes"] == 0
        wait_books_equal(run_dir, alpha, beta)

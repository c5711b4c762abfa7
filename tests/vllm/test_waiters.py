"""What a refused waiter holds, and who gets what others leave, step by step in a real engine.

The engine is in its child's own process, so no step runs but those that a test asks for: what
happens is the doing of events, not of a timer in the scheduler's loop.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from integration.cluster import WAIT_S, make_plan, run_directory, wait_until
from integration.cluster import Engine as Neighbour
from kvadmit.rendezvous import ask_status
from kvadmit.rundir import RunDir
from kvadmit.units import MIB
from kvadmit.vmm_host import GRANULE_BYTES
from vllm_engines import (
    BLOCK_TOKENS,
    DENSE,
    EngineProcess,
    engine,
    engine_arguments,
    kvadmit,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

POOL = 32 * MIB
EXTENTS = POOL // MIB
EXTENT_TOKENS = MIB // DENSE.kv_token_bytes()
EXTENT_BLOCKS = EXTENT_TOKENS // BLOCK_TOKENS
SEATS = 3
PREFIX = [7] * 96
"""Three blocks that every large prompt begins with."""


class Host(NamedTuple):
    run_dir: Path
    child: EngineProcess


@pytest.fixture(scope="module", params=[True, False], ids=["reserved", "chunk_by_chunk"])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    """Start an engine that reserves the whole prompt of who is admitted, as vLLM does, or not."""
    with run_directory() as run_dir:
        config = kvadmit(run_dir, host_pool=POOL, extent=MIB, floor=2 * MIB, idle_decay_s=600)
        arguments = engine_arguments(
            DENSE,
            max_model_len=2048,
            max_num_seqs=SEATS,
            max_num_batched_tokens=256,
            scheduler_reserve_full_isl=request.param,
            additional_config=config,
        )
        with engine(arguments, VLLM_ENABLE_V1_MULTIPROCESSING="0") as child:
            yield Host(run_dir, child)


@contextlib.contextmanager
def neighbour_of(host: Host) -> Iterator[Neighbour]:
    plan = make_plan(extents=EXTENTS, pages=MIB // GRANULE_BYTES)
    neighbour = Neighbour(host.run_dir, "neighbour", plan=plan, host_pool=POOL)
    try:
        yield neighbour.start()
    finally:
        neighbour.stop()


def large(number: int) -> list[int]:
    """Return a prompt that takes more than two extents."""
    return [*PREFIX, *([number] * (2 * EXTENT_TOKENS))]


def steps(child: EngineProcess, count: int) -> list[dict[str, Any]]:
    """Make steps; returns who held what after each, every block counted once."""
    made: list[dict[str, Any]] = child.ask("steps", count=count)["steps"]
    for step in made:
        assert step["held"] + step["free"] + 1 == step["resident"], step
    return made


def until_ended(child: EngineProcess, *names: str) -> dict[str, Any]:
    """Make steps until the requests have ended; returns how."""
    ended: dict[str, Any] = {}
    deadline_s = time.monotonic() + 120
    while not set(names) <= set(ended):
        for step in steps(child, 10):
            ended |= step["ended"]
        assert time.monotonic() < deadline_s, f"{step}\n{child.status()}"
    return ended


def test_refused_waiters_hold_no_seat_and_no_block_and_are_served_in_the_end(host: Host) -> None:
    child = host.child
    waiters = {f"large{number}": large(number) for number in range(SEATS + 1)}
    with neighbour_of(host) as neighbour:
        neighbour.pool.use(EXTENTS - 2)
        while len(neighbour.pool.resident) < EXTENTS - 2:
            child.generate([PREFIX], 2)
        child.ask("add", requests={"a": [1] * 100, "b": [2] * 100}, tokens=60)
        child.ask("add", requests=waiters | {"c": [3] * 100}, tokens=16)
        *_, step = steps(child, 20)
        assert step["running"] == ["a", "b"]
        assert step["waiting"] == [*waiters, "c"]
        until_ended(child, "a", "b")
        *_, step = steps(child, 10)
        assert set(step["blocks"].values()) == {0}, step
        assert step["free"] == 2 * EXTENT_BLOCKS - 1
        child.ask("abort", ids=list(waiters))
        # Who waited behind more of them than there are seats is served at once.
        until_ended(child, "c")
        child.ask("add", requests=waiters, tokens=16)
        steps(child, 5)
    ended = until_ended(child, *waiters)
    assert {one["finish"] for one in ended.values()} == {"length"}
    assert min(one["cached"] for one in ended.values()) >= len(PREFIX), "it was still there"
    served = [ended[name]["ids"] for name in waiters]
    assert served == child.generate(list(waiters.values()), 16)
    assert child.status()["coordinator"]["counters"]["timer_probes"] == 0


@pytest.mark.parametrize("way", ["abort", "preempt"])
def test_what_an_abort_or_a_preemption_frees_goes_to_the_neighbour_that_waits(
    host: Host, way: str
) -> None:
    child = host.child
    busy = {"one": large(1), "two": large(2)}
    needed = EXTENTS - 4
    child.ask("add", requests={"keep": [5] * 100, **busy}, tokens=500)
    try:
        wait_until(lambda: len(steps(child, 1)[0]["running"]) == SEATS, "all three run")
        with neighbour_of(host) as neighbour:
            neighbour.pool.use(needed)
            wait_until(lambda: needs(host.run_dir, "neighbour"), "the neighbour waits")
            steps(child, 10)
            assert len(neighbour.pool.resident) < needed, "nobody has left anything"
            if way == "abort":
                child.ask("abort", ids=list(busy))
            else:
                assert child.ask("preempt")["reset"]
                # An engine that makes no step tells all the same.
                wait_until(lambda: allowance(child) <= EXTENTS - needed, "its allowance is lower")
            for _ in range(60):
                (step,) = steps(child, 1)
                with contextlib.suppress(AssertionError):
                    neighbour.pool.wait_resident(needed, WAIT_S / 60)
                    break
            assert len(neighbour.pool.resident) >= needed, child.status()
            assert "keep" in step["running"]
            assert len(step["running"]) < SEATS
            assert neighbour.counters["timer_probes"] == 0
        assert child.status()["coordinator"]["counters"]["timer_probes"] == 0
    finally:
        child.ask("abort", ids=["keep", *busy])
        steps(child, 1)


def needs(run_dir: Path, name: str) -> bool:
    """Whether the arbiter knows of a need of `name` that is not met."""
    status: dict[str, Any] = dict(ask_status(RunDir.open(str(run_dir))))
    return status["instances"][name]["needs_since_s"] is not None


def allowance(child: EngineProcess) -> int:
    found: int = child.status()["coordinator"]["group"]["link"]["allowance"]
    return found

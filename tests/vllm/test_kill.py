"""kill -9 in mid-run: of an EngineCore, of an API server, of the arbiter."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.cluster import arbiter_pid, run_directory, wait_until
from kvadmit.rundir import RunDir
from kvadmit.units import KIB, MIB
from vllm_engines import (
    DENSE,
    SHORT_WAITS,
    EngineProcess,
    engine_arguments,
    kvadmit,
    model_directory,
)
from vllm_servers import Load, ProcessTree, Server, current_books, held, serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

POOL = 24 * MIB
EXTENT = 512 * KIB
NEIGHBOUR_FLOOR = 2 * MIB
"""Less than the default floor, one request of 1024 tokens, that any living one keeps."""
GONE_WAIT_S = 15.0
"""Within this time nothing of an instance is left, whichever of its processes was killed."""
PROMPT_TOKENS = 64
TOKENS = 320
REQUESTS = 48
"""Of them 32 alone need the whole pool, so an instance that may grow does."""


def config(run_dir: Path, name: str) -> dict[str, Any]:
    """Return settings under which only need and want move memory, not the passing of time."""
    more = {"host_pool": POOL, "extent": EXTENT, "idle_decay_s": 600}
    return kvadmit(run_dir, name=name, **more)


def workload(family: int) -> list[list[int]]:
    """Return prompts that share no prefix, with those of other families neither."""
    return [[family, number] * (PROMPT_TOKENS // 2) for number in range(REQUESTS)]


@contextlib.contextmanager
def engines(run_dir: Path, *names: str) -> Iterator[list[EngineProcess]]:
    """Run engines, started side by side; whatever happens, none of their processes is left."""
    with contextlib.ExitStack() as stack:
        made = []
        for name in names:
            arguments = engine_arguments(DENSE, additional_config=config(run_dir, name))
            core = "0" if name == "survivor" else "1"
            made.append(EngineProcess(arguments, VLLM_CPU_OMP_THREADS_BIND=core, **SHORT_WAITS))
            stack.callback(made[-1].close)
        for one in made:
            one.start()
            stack.callback(ProcessTree(one.process.pid).close)
        yield made


@pytest.fixture(scope="module")
def run_dir() -> Iterator[Path]:
    with run_directory() as path:
        yield path


@pytest.fixture(scope="module")
def first_engine(run_dir: Path) -> Iterator[EngineProcess]:
    with engines(run_dir, "survivor") as (engine,):
        yield engine


@pytest.fixture
def survivor(first_engine: EngineProcess) -> EngineProcess:
    """Return the engine that outlives all others, with no answer of an earlier test due."""
    first_engine.tell("status")
    while "coordinator" not in first_engine.answer():
        pass
    return first_engine


def begin(engine: EngineProcess, family: int) -> None:
    engine.tell("generate", prompts=workload(family), tokens=TOKENS)


def finish(engine: EngineProcess) -> None:
    """Wait for what `begin` began; fails if a single request did."""
    answer = engine.answer()
    assert answer["finish"] == ["length"] * REQUESTS, answer["stop"]
    assert {len(ids) for ids in answer["ids"]} == {TOKENS}


def wait_grown(run_dir: Path, name: str) -> None:
    """Wait until an instance has a good part of the pool, which the survivor then misses."""
    wait_until(lambda: held(run_dir, name) >= POOL // 4, f"{name} has a quarter of the pool")


def wait_inherited(run_dir: Path) -> None:
    """Wait until the survivor holds more than a living neighbour's floor would leave to it."""
    wait_until(lambda: held(run_dir, "survivor") > POOL - NEIGHBOUR_FLOOR, "the dead one's is had")


def instance_files(run_dir: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in run_dir.glob("i-*")}


def expected_files(run_dir: Path) -> set[str]:
    """Return the beginnings of the names of all instances that the arbiter knows."""
    run = RunDir.open(str(run_dir))
    known = [
        one["incarnation"].rpartition(".")[0]
        for one in current_books(run_dir)["instances"].values()
    ]
    return {Path(run.instance_path(name, "own")).name.partition(".")[0] for name in known}


def test_a_killed_engine_core_leaves_its_memory_and_nothing_else(
    run_dir: Path, survivor: EngineProcess
) -> None:
    with engines(run_dir, "victim") as (victim,):
        begin(victim, 1)
        begin(survivor, 2)
        wait_grown(run_dir, "victim")
        tree = ProcessTree(victim.process.pid)
        try:
            tree.kill(tree.pid_of("EngineCore"))
            # Its API process is vLLM's own affair: offline, it waits for ever.
            tree.wait_ended(GONE_WAIT_S, "VLLM::")
        finally:
            tree.close()
        finish(survivor)
        begin(survivor, 10)  # what was under way may have ended before the memory came
        wait_inherited(run_dir)
        finish(survivor)
    with engines(run_dir, "newcomer") as (newcomer,):
        begin(newcomer, 3)
        begin(survivor, 4)
        finish(newcomer)
        finish(survivor)
        assert set(current_books(run_dir)["instances"]) == {"survivor", "newcomer"}
        assert instance_files(run_dir) == expected_files(run_dir)
        assert len(expected_files(run_dir)) == 2
        assert survivor.status()["coordinator"]["group"]["counters"]["timer_probes"] == 0


def test_a_killed_api_server_takes_its_engine_and_workers_along(
    run_dir: Path, survivor: EngineProcess
) -> None:
    flags = ["--max-model-len=1024", "--max-num-seqs=64", "--additional-config"]
    server = Server(model_directory(DENSE), [*flags, json.dumps(config(run_dir, "served"))], core=1)
    with serving(server):
        load = Load(server, workload(5), TOKENS)
        begin(survivor, 6)
        wait_grown(run_dir, "served")
        tree = server.tree()
        try:
            assert tree.pid_of("EngineCore") != tree.pid_of("Worker")
            tree.kill(server.process.pid)
            tree.wait_ended(GONE_WAIT_S)
        finally:
            tree.close()
        finish(survivor)
        begin(survivor, 9)
        wait_inherited(run_dir)
        finish(survivor)
        assert any(load.errors()), "the server was killed after it was done"
    assert set(current_books(run_dir)["instances"]) == {"survivor"}


def test_a_killed_arbiter_fails_nobody_and_the_books_equal_the_reports(
    run_dir: Path, survivor: EngineProcess
) -> None:
    with engines(run_dir, "other") as (other,):
        first = current_books(run_dir)
        assert instance_files(run_dir) == expected_files(run_dir)
        begin(other, 7)
        begin(survivor, 8)
        wait_until(lambda: held(run_dir, "other") >= 2 * MIB, "growth is under way")
        os.kill(first["pid"], signal.SIGKILL)
        wait_until(lambda: arbiter_pid(run_dir) not in (0, first["pid"]), "another arbiter")
        finish(other)
        finish(survivor)

        def equal() -> bool:
            snapshot = current_books(run_dir)
            reports = {"other": other.status(), "survivor": survivor.status()}
            groups = {name: one["coordinator"]["group"] for name, one in reports.items()}
            booked = snapshot["instances"]
            return (
                {name: one["held_extents"] for name, one in booked.items()}
                == {name: group["held"] for name, group in groups.items()}
                == {name: one["pool"]["resident_extents"] for name, one in reports.items()}
                and {name: one["allowance_extents"] for name, one in booked.items()}
                == {name: group["link"]["allowance"] for name, group in groups.items()}
                and snapshot["devices"]["host"]["foreign_bytes"] == 0
                and all(group["link"]["epoch"] == snapshot["epoch"] for group in groups.values())
            )

        wait_until(equal, "the books equal the reports")
        assert current_books(run_dir)["epoch"] > first["epoch"]
        begin(other, 11)
        finish(other)
        assert held(run_dir, "other") > POOL // 2, "the new arbiter moves memory as well"
        wait_until(equal, "the books equal the reports once more")

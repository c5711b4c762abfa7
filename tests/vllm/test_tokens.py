"""Greedy tokens with kvadmit equal stock vLLM's, through growth, shrink and regrowth."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.cluster import Engine as Neighbour
from integration.cluster import make_plan, run_directory
from kvadmit.testing.tiny_model import TinyModel
from kvadmit.units import MIB
from kvadmit.vmm_host import GRANULE_BYTES
from vllm_engines import (
    DENSE,
    SHORT_WAITS,
    WINDOWED,
    engine,
    engine_arguments,
    kvadmit,
    prompts,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

POOL = 48 * MIB
EXTENT = MIB
TOKENS = 120
ROUNDS = 3
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} | SHORT_WAITS
"""A round lasts about a second: three processes that spin on two cores can keep the coordinator
and the arbiter from running for as long, and then nothing grows."""

Ids = list[list[int]]


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with run_directory() as path:
        yield path


def stock_ids(model: TinyModel, pool: int, ranks: int = 1) -> Ids:
    """Return what stock vLLM generates, checked to be the same in every round."""
    arguments = engine_arguments(
        model, kv_cache_memory_bytes=pool // ranks, tensor_parallel_size=ranks
    )
    with engine(arguments, **(TWO_RANKS if ranks == 2 else {})) as child:
        rounds = [child.generate(prompts(), TOKENS) for _ in range(2)]
    assert rounds[0] == rounds[1]
    return rounds[0]


@contextlib.contextmanager
def neighbour_at(run_dir: Path) -> Iterator[Neighbour]:
    """Run a scripted instance beside the engine that claims what it is told to."""
    plan = make_plan(extents=POOL // EXTENT, pages=EXTENT // GRANULE_BYTES)
    instance = Neighbour(run_dir, "neighbour", plan=plan, host_pool=POOL)
    try:
        yield instance.start()
    finally:
        instance.stop()


@pytest.mark.parametrize("model", [DENSE, WINDOWED], ids=["dense", "window"])
@pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])
def test_tokens_equal_stock_through_growth_shrink_and_regrowth(
    run_dir: Path, model: TinyModel, ranks: int
) -> None:
    expected = stock_ids(model, POOL, ranks)
    arguments = engine_arguments(
        model,
        tensor_parallel_size=ranks,
        additional_config=kvadmit(run_dir, host_pool=POOL, extent=EXTENT // ranks),
    )
    with engine(arguments, **(TWO_RANKS if ranks == 2 else {})) as child:
        began = child.status()
        floor = began["plan"]["floor"]
        assert began["pool"]["resident_extents"] == began["plan"]["prefix"] == 1
        with neighbour_at(run_dir) as neighbour:
            for number in range(ROUNDS):
                assert child.generate(prompts(), TOKENS) == expected, f"round {number}"
                grown = child.status()["pool"]["resident_extents"]
                assert grown > floor, "nothing grew"
                neighbour.pool.use(POOL // EXTENT - floor)
                neighbour.pool.wait_resident(POOL // EXTENT - floor)
                shrunk = child.status()["pool"]["resident_extents"]
                assert shrunk <= floor, f"{grown} extents before, {shrunk} after"
                neighbour.pool.rest()
        counters = child.status()["coordinator"]["counters"]
        assert counters["growths"] >= ROUNDS
        assert counters["timer_probes"] == 0


def test_control_stock_against_stock_at_another_pool_size() -> None:
    assert stock_ids(DENSE, POOL) == stock_ids(DENSE, 12 * MIB)

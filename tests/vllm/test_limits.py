"""What a client is told when memory for its request cannot be had, and that others go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.cluster import Engine as Neighbour
from integration.cluster import make_plan, run_directory
from kvadmit.units import MIB
from kvadmit.vmm_host import GRANULE_BYTES
from vllm_engines import DENSE, engine, engine_arguments, kvadmit, prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

POOL = 32 * MIB
EXTENTS = POOL // MIB
EXTENT_BLOCKS = MIB // (DENSE.kv_token_bytes() * 32)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with run_directory() as path:
        yield path


def test_max_model_len_is_fitted_under_the_cap(run_dir: Path) -> None:
    config = kvadmit(run_dir, host_pool=POOL, cap="1MiB", extent="512KiB")
    arguments = engine_arguments(DENSE, additional_config=config)
    with engine(arguments) as child:
        blocks = child.status()["plan"]["cap"] * child.status()["plan"]["extent_blocks"] - 1
        fitted = child.ask("length")["max_model_len"]
        assert fitted == 32 * blocks < 1024
        assert f"max_model_len is {fitted} instead of 1024" in child.log()
        # The longest request there is fits and ends; a longer one never reaches the engine.
        assert len(child.generate([[7] * (fitted - 8)], 8)[0]) == 8


def test_a_request_that_waits_too_long_fails_with_the_reason_and_others_go_on(
    run_dir: Path,
) -> None:
    """The neighbour needs all it can get, and this instance's floor is less than one request."""
    config = kvadmit(run_dir, host_pool=POOL, extent=MIB, floor=2 * MIB, wait_s=1.5)
    arguments = engine_arguments(DENSE, max_model_len=2048, additional_config=config)
    plan = make_plan(extents=EXTENTS, pages=MIB // GRANULE_BYTES)
    neighbour = Neighbour(run_dir, "neighbour", plan=plan, host_pool=POOL)
    short = prompts(4)
    long = [[5] * (2 * EXTENT_BLOCKS * 32 + 100)]
    with engine(arguments) as child:
        expected = child.generate(short, 16)
        try:
            neighbour.start()
            neighbour.pool.use(EXTENTS - 2)
            neighbour.pool.wait_resident(EXTENTS - 2)
            began = time.monotonic()
            answer = child.ask("generate", prompts=[*long, *short], tokens=16)
            took = time.monotonic() - began
        finally:
            neighbour.stop()
        assert answer["finish"] == ["error", *["length"] * 4], answer
        reason = answer["stop"][0]
        assert reason.startswith("kvadmit: This request needs 3MiB of KV cache memory"), reason
        assert "got no more from its neighbours within 1.5 s" in reason
        assert 1.4 < took < 15
        assert answer["ids"][1:] == expected
        # With the neighbour gone the same request is served.
        assert len(child.generate(long, 16)[0]) == 16
        status = child.status()
        assert status["coordinator"]["counters"]["timer_probes"] == 0
        # It waited 1.5 s parked: vLLM's own loop would have spun a thousand times.
        assert status["pool"]["no_slot_steps"] < 50

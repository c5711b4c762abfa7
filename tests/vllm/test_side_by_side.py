"""Two engines of one name, one forked and one spawned, and a third of another release."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.cluster import run_directory, wait_until
from integration.test_crash import arbiter_log
from kvadmit.messages import PROTOCOL_VERSION
from kvadmit.units import KIB, MIB
from vllm_engines import (
    CHILDREN,
    DENSE,
    SHORT_WAITS,
    EngineProcess,
    engine_arguments,
    kvadmit,
    prompts,
)
from vllm_servers import current_books

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

POOL = 16 * MIB
STARTS = {"ForkProcess": "forking.py", "SpawnProcess": "engine_child.py"}
"""What Python calls processes that were started so, and the script whose vLLM does."""
NAME = "twin"
ENVIRONMENT = {
    "VLLM_PLUGINS": f"{SHORT_WAITS['VLLM_PLUGINS']},kvadmit_tests",
    "PYTHONPATH": os.pathsep.join([str(CHILDREN / "plugins"), SHORT_WAITS["PYTHONPATH"]]),
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the question to the workers is a function
}


def make_engine(run_dir: Path, child: str, *, core: int) -> EngineProcess:
    config = kvadmit(run_dir, name=NAME, host_pool=POOL, extent=512 * KIB)
    return EngineProcess(
        engine_arguments(DENSE, additional_config=config),
        child=child,
        **ENVIRONMENT,
        VLLM_CPU_OMP_THREADS_BIND=str(core),
    )


@pytest.fixture(scope="module")
def run_dir() -> Iterator[Path]:
    with run_directory() as path:
        yield path


@pytest.fixture(scope="module")
def twins(run_dir: Path) -> Iterator[list[EngineProcess]]:
    """One engine for each of STARTS, started at the same time."""
    made = [make_engine(run_dir, child, core=core) for core, child in enumerate(STARTS.values())]
    try:
        yield [one.start() for one in made]
    finally:
        for one in made:
            one.close()


def serve(twins: list[EngineProcess], wanted: list[list[int]]) -> list[list[list[int]]]:
    """Have both answer the same prompts at the same time."""
    for one in twins:
        one.tell("generate", prompts=wanted, tokens=100)
    answers = [one.answer() for one in twins]
    assert [set(answer["finish"]) for answer in answers] == [{"length"}] * len(twins), answers
    return [answer["ids"] for answer in answers]


def test_forked_and_spawned_engines_of_one_name_serve_side_by_side(
    run_dir: Path, twins: list[EngineProcess]
) -> None:
    first, second = serve(twins, prompts(48))
    assert first == second
    instances = current_books(run_dir)["instances"]
    assert set(instances) == {NAME, f"{NAME}#2"}

    def counted_apart() -> bool:
        booked = current_books(run_dir)["instances"].values()
        found = [one.status() for one in twins]
        return {one["pid"]: one["held_extents"] for one in booked} == {
            one["coordinator"]["pid"]: one["pool"]["resident_extents"] for one in found
        }

    wait_until(counted_apart, "each is counted for what it holds itself")


def test_the_hooks_are_in_every_process_forked_or_spawned(twins: list[EngineProcess]) -> None:
    for started, one in zip(STARTS, twins, strict=True):
        assert one.ask("started") == {"engine_core": started, "workers": [started]}
        found = one.ask("differing")
        assert "EngineCoreProc._process_engine_step" in found["engine_core"]
        (worker,) = found["workers"]
        assert "Worker.initialize_from_config" in worker
        assert one.status()["pool"]["resident_extents"] >= 1


def test_another_release_is_refused_in_one_line_that_names_both_and_the_others_serve_on(
    run_dir: Path, twins: list[EngineProcess]
) -> None:
    other = PROTOCOL_VERSION + 6
    newcomer = make_engine(run_dir, "other_release.py", core=0)
    try:
        newcomer.refusal()
        log = newcomer.log()
    finally:
        newcomer.close()
    says = f"speaks protocol {PROTOCOL_VERSION}, this process speaks {other}"
    line = rf"UnsupportedError: another release is running: peer arbiter\.\S+ {says}"
    assert re.search(f"{line}$", log, re.MULTILINE), log
    says = f"speaks protocol {other}, this process speaks {PROTOCOL_VERSION}"
    assert says in arbiter_log(run_dir)
    first, second = serve(twins, prompts(16))
    assert first == second
    assert set(current_books(run_dir)["instances"]) == {NAME, f"{NAME}#2"}
    assert len(list(run_dir.glob("i-*.own"))) == len(twins), "the newcomer left files behind"

"""Real vLLM on NVIDIA GPUs: tokens, memory that moves, and an EngineCore without CUDA.

    python -m pytest tests/gpu

CUDA graphs, torch.compile and async scheduling are on, as in production. Two ranks need two
GPUs; engines that share those need an MPS daemon that the user has started.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvadmit.errors import KvAdmitError
from kvadmit.testing.tiny_model import TinyModel
from kvadmit.units import GIB, MIB
from kvadmit.vllm.devices import read_gpu
from kvadmit.vmm_cuda import probe
from vllm_engines import EngineProcess, engine_arguments, kvadmit, prompts
from vllm_servers import ProcessTree

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.timeout(900)]

try:
    DEVICE = probe(0)
except KvAdmitError as error:
    pytest.skip(str(error), allow_module_level=True)

report = logging.getLogger("kvadmit.gpu")
"""Shown by `-o log_cli=true --log-cli-level=INFO`."""
GPUS = torch.cuda.device_count()
MODEL = TinyModel(layers=4, hidden=512, heads=8, kv_heads=4, head_dim=64, intermediate=1024)
POOL = 256 * MIB
TOKENS = 120
ROUNDS = 3
QUIET = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
TIE = 0.05
"""Ids whose log-probabilities are this close are one to bfloat16: which is greedier depends on
what else is in the batch. Stock's own differences may be larger, and then count instead."""
TOPS = 5

Ids = list[list[int]]
KERNELS = {"flash": ("FLASH_ATTN", "bfloat16"), "triton": ("TRITON_ATTN", "float32")}


@pytest.fixture
def run_dir() -> Iterator[Path]:
    path = tempfile.mkdtemp(prefix="kva-")
    yield Path(path) / "run"
    shutil.rmtree(path, ignore_errors=True)


def arguments(ranks: int, kernels: str = "flash", **more: Any) -> dict[str, Any]:
    backend, dtype = KERNELS[kernels]
    base = {
        "enforce_eager": False,
        "dtype": dtype,
        "attention_config": {"backend": backend},
        "tensor_parallel_size": ranks,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
    }
    return engine_arguments(MODEL, **(base | more))


def elastic(
    run_dir: Path, ranks: int, name: str = "one", kernels: str = "flash", **settings: Any
) -> dict[str, Any]:
    config = kvadmit(run_dir, name=name, cap=POOL, **settings)
    return arguments(ranks, kernels, additional_config=config)


@contextlib.contextmanager
def engines(*several: dict[str, Any]) -> Iterator[list[EngineProcess]]:
    """Run engines, one started after the other; none of their processes is left."""
    with contextlib.ExitStack() as stack:
        made = []
        for one in several:
            made.append(EngineProcess(one, **QUIET))
            stack.callback(made[-1].close)
            made[-1].start()
            stack.callback(ProcessTree(made[-1].process.pid).close)
        yield made


class Stock:
    """What stock vLLM generates, and how sure it was of each token."""

    def __init__(self, ranks: int, kernels: str) -> None:
        with engines(arguments(ranks, kernels, kv_cache_memory_bytes=POOL)) as (child,):
            answer = child.ask("generate", prompts=prompts(), tokens=TOKENS, tops=TOPS)
        self.ids: Ids = answer["ids"]
        self._tops = [[dict(map(tuple, at)) for at in one] for one in answer["tops"]]
        small = arguments(ranks, kernels, kv_cache_memory_bytes=12 * MIB)
        with engines(small) as (child,):
            gaps = self.gaps(child.generate(prompts(), TOKENS))
        self.tie = max([TIE, *gaps.values()])
        """The largest gap at which stock differs from itself, with a smaller pool."""

    def gaps(self, found: Ids) -> dict[int, float]:
        """Return by prompt how far behind the first id is that `found` has and stock has not.

        In log-probability; infinite for an id that is not among stock's TOPS.
        """
        behind = {}
        for number, (mine, stock) in enumerate(zip(found, self.ids, strict=True)):
            at = next((p for p, (a, b) in enumerate(zip(mine, stock, strict=True)) if a != b), None)
            if at is not None:
                tops = self._tops[number][at]
                behind[number] = max(tops.values()) - tops.get(mine[at], -math.inf)
        return behind


def resident(child: EngineProcess) -> int:
    return int(child.status()["pool"]["resident_extents"])


RANKS = [
    pytest.param(1, id="tp1"),
    pytest.param(2, id="tp2", marks=pytest.mark.skipif(GPUS < 2, reason="one GPU only")),
]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("ranks", RANKS)
def test_tokens_equal_stock_through_growth_shrink_and_regrowth(
    run_dir: Path, ranks: int, kernels: str
) -> None:
    stock = Stock(ranks, kernels)
    with engines(elastic(run_dir, ranks, kernels=kernels)) as (child,):
        prefix = child.status()["plan"]["prefix"]
        assert resident(child) == prefix
        same = []
        for number in range(ROUNDS):
            found = child.generate(prompts(), TOKENS)
            gaps = stock.gaps(found)
            assert max([0.0, *gaps.values()]) <= stock.tie, f"round {number}: {gaps}"
            same.append(len(found) - len(gaps))
            assert resident(child) > prefix, "nothing grew"
            assert child.ask("reset")["reset"]
            child.wait_status("idle memory goes back", resident=prefix)
        status = child.status()["coordinator"]
        assert status["counters"]["growths"] >= ROUNDS
        assert status["counters"]["timer_probes"] == 0
        report.info("tp%d %s: %s equal, tie %f; %s", ranks, kernels, same, stock.tie, status)


def compute_pids() -> set[int]:
    """Return the processes that NVML counts as users of a GPU."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {int(line) for line in printed.split()}


def test_engine_core_has_no_context_and_its_worker_has(run_dir: Path) -> None:
    with engines(elastic(run_dir, 1)) as (child,):
        child.generate(prompts(8), 16)
        tree = ProcessTree(child.process.pid)
        try:
            core, worker = tree.pid_of("EngineCore"), tree.pid_of("Worker")
            assert core not in compute_pids()
            assert worker in compute_pids()
        finally:
            tree.close()


@pytest.mark.parametrize("ranks", RANKS)
def test_two_engines_share_their_gpus_and_everyone_finishes(run_dir: Path, ranks: int) -> None:
    """What both may hold is less than both want; with two ranks under the user's MPS daemon."""
    if ranks > 1 and not DEVICE.mps:
        pytest.skip("no MPS daemon: spinning collectives would starve each other")
    free = read_gpu(DEVICE.uuid)[0]
    shared = 100 * MIB
    # Starts are booked as 6 GiB each and take less: the rest of the device is margin.
    settings: dict[str, Any] = {
        "margin": free - 12 * GIB - shared,
        "start": 6 * GIB,
        "extent": 2 * MIB,
    }
    several = [elastic(run_dir, ranks, name, **settings) for name in ("a", "b")]
    with engines(*several) as both:
        for _ in range(2):
            for child in both:
                child.tell("generate", prompts=prompts(), tokens=TOKENS)
            for child in both:
                answer = child.answer()
                assert set(answer["finish"]) == {"length"}, answer["stop"]
        peaks = []
        for child in both:
            child.generate(prompts(), TOKENS)
            peaks.append(resident(child))
        assert min(peaks) * 2 * MIB * ranks > shared * ranks // 2, "each had more than half"
        books = [child.status()["coordinator"] for child in both]
        report.info("two engines of %d: peaks %s; %s", ranks, peaks, books)
        assert all(one["counters"]["timer_probes"] == 0 for one in books)

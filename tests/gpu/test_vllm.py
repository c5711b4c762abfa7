"""Real vLLM on NVIDIA GPUs: tokens, memory that moves, and an EngineCore without CUDA.

    python -m pytest tests/gpu

CUDA graphs, torch.compile and async scheduling are on, as in production. Two ranks need two
GPUs; engines that share those need an MPS daemon that the user has started.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvadmit.errors import KvAdmitError
from kvadmit.rendezvous import ask_status
from kvadmit.rundir import RunDir
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
EXACT = QUIET | {"VLLM_BATCH_INVARIANT": "1"}
"""Every token's arithmetic is the same in whatever batch it is computed: without this mode of
vLLM's, stock differs from itself as soon as a pool of another size makes other batches. So it
does even in this mode with FLASH_ATTN (0.32.0 on an H200), which is why tokens are compared with
TRITON_ATTN."""
SERVED, COMPARED = "FLASH_ATTN", "TRITON_ATTN"

Ids = list[list[int]]


@pytest.fixture
def run_dir() -> Iterator[Path]:
    path = tempfile.mkdtemp(prefix="kva-")
    yield Path(path) / "run"
    shutil.rmtree(path, ignore_errors=True)


def arguments(ranks: int, backend: str = SERVED, **more: Any) -> dict[str, Any]:
    base = {
        "enforce_eager": False,
        "dtype": "bfloat16",
        "attention_config": {"backend": backend},
        "tensor_parallel_size": ranks,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
    }
    return engine_arguments(MODEL, **(base | more))


def elastic(
    run_dir: Path, ranks: int, name: str = "one", backend: str = SERVED, **settings: Any
) -> dict[str, Any]:
    config = kvadmit(run_dir, name=name, cap=POOL, **settings)
    return arguments(ranks, backend, additional_config=config)


@contextlib.contextmanager
def engines(
    *several: dict[str, Any], environment: dict[str, str] = QUIET
) -> Iterator[list[EngineProcess]]:
    """Run engines, one started after the other; none of their processes is left."""
    with contextlib.ExitStack() as stack:
        made = []
        for one in several:
            made.append(EngineProcess(one, **environment))
            stack.callback(made[-1].close)
            made[-1].start()
            stack.callback(ProcessTree(made[-1].process.pid).close)
        yield made


def stock_ids(ranks: int, pool: int = POOL) -> Ids:
    """Return what stock vLLM generates with a pool of so many bytes for each rank."""
    wanted = arguments(ranks, COMPARED, kv_cache_memory_bytes=pool)
    with engines(wanted, environment=EXACT) as (child,):
        return child.generate(prompts(), TOKENS)


def resident(child: EngineProcess) -> int:
    return int(child.status()["pool"]["resident_extents"])


RANKS = [
    pytest.param(1, id="tp1"),
    pytest.param(2, id="tp2", marks=pytest.mark.skipif(GPUS < 2, reason="one GPU only")),
]


@pytest.mark.parametrize("ranks", RANKS)
def test_tokens_equal_stock_through_growth_shrink_and_regrowth(run_dir: Path, ranks: int) -> None:
    expected = stock_ids(ranks)
    wanted = elastic(run_dir, ranks, backend=COMPARED)
    with engines(wanted, environment=EXACT) as (child,):
        prefix = child.status()["plan"]["prefix"]
        assert resident(child) == prefix
        for number in range(ROUNDS):
            found = child.generate(prompts(), TOKENS)
            differing = [n for n, ids in enumerate(found) if ids != expected[n]]
            assert not differing, f"round {number}"
            assert resident(child) > prefix, "nothing grew"
            assert child.ask("reset")["reset"]
            child.wait_status("idle memory goes back", resident=prefix)
        status = child.status()["coordinator"]
        assert status["counters"]["growths"] >= ROUNDS
        assert status["counters"]["timer_probes"] == 0
        report.info("tp%d: %s", ranks, status)


@pytest.mark.parametrize("ranks", RANKS)
def test_control_stock_against_stock_at_another_pool_size(ranks: int) -> None:
    assert stock_ids(ranks) == stock_ids(ranks, 12 * MIB)


def compute_pids() -> set[int]:
    """Return the processes that NVML counts as users of a GPU."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {int(line) for line in printed.split()}


def test_engine_core_has_no_context_and_its_worker_has(run_dir: Path) -> None:
    """Nor does structured output make one, by a back end that pins its bitmask."""
    guided = {"structured_outputs_config": {"backend": "guidance"}}
    with engines(elastic(run_dir, 1) | guided) as (child,):
        child.generate(prompts(8), 16)
        texts = child.ask("structured", choices=["north", "south"], count=4)["texts"]
        assert set(texts) <= {"north", "south"}
        tree = ProcessTree(child.process.pid)
        try:
            core, worker = tree.pid_of("EngineCore"), tree.pid_of("Worker")
            assert core not in compute_pids()
            assert worker in compute_pids()
        finally:
            tree.close()


def base_bytes(run_dir: Path, ranks: int) -> int:
    """Return what an engine measures beside KV memory on a GPU: less than a start books."""
    with engines(elastic(run_dir, ranks, start=6 * GIB)) as (child,):
        child.generate(prompts(8), 16)
        (one,) = ask_status(RunDir.open(str(run_dir)))["instances"].values()  # type: ignore[attr-defined]
        base = max(one["base_bytes"].values())
    assert GIB // 4 < base < 6 * GIB, "a context, weights and graphs"
    report.info("tp%d holds %s beside KV memory", ranks, base)
    return int(base)


@pytest.mark.parametrize("ranks", RANKS)
def test_two_engines_share_their_gpus_and_everyone_finishes(run_dir: Path, ranks: int) -> None:
    """What both may hold is less than both want; with two ranks under the user's MPS daemon."""
    if ranks > 1 and not DEVICE.mps:
        pytest.skip("no MPS daemon: spinning collectives would starve each other")
    shared = 100 * MIB
    free = read_gpu(DEVICE.uuid)[0]
    base = base_bytes(run_dir, ranks)
    # The rest of the device is margin.
    settings: dict[str, Any] = {
        "margin": free - 2 * base - shared,
        "start": base,
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

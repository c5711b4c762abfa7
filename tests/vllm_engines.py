"""What the tests on real vLLM share: the child process, models, prompts.

Beside tests/vllm and not in it: a package of that name must not stand before vLLM's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.colocated.policies import PLUGIN_PATHS

from kvadmit.testing.tiny_model import TinyModel, make_model

START_WAIT_S = 180.0
ANSWER_WAIT_S = 120.0
STOP_WAIT_S = 60.0
BLOCK_TOKENS = 32
SHORT_WAITS = {
    "VLLM_PLUGINS": "kvadmit,kvadmit_bench_short_waits",
    "PYTHONPATH": os.pathsep.join([*PLUGIN_PATHS, *filter(None, [os.environ.get("PYTHONPATH")])]),
}
"""Environment in which an engine's processes wait for each other as in the bench: with more
spinning processes than cores some kernels let everybody else wait for seconds."""
CHILDREN = Path(__file__).parent / "vllm"

DENSE = TinyModel()
WINDOWED = TinyModel(sliding_window=96)


def model_directory(model: TinyModel) -> Path:
    """Return the directory of `model`, made once per user and shape."""
    kind = "windowed" if model.sliding_window else "dense"
    name = f"{kind}-{model.layers}x{model.hidden}-{model.kv_heads}-{model.seed}"
    return make_model(Path(tempfile.gettempdir()) / f"kvadmit-models-{os.getuid()}" / name, model)


def engine_arguments(model: TinyModel, **more: Any) -> dict[str, Any]:
    """Return arguments of `vllm.LLM` for a fast start and exact arithmetic."""
    return {
        "model": str(model_directory(model)),
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "block_size": BLOCK_TOKENS,
        "dtype": "float32",
        "seed": 0,
        "disable_log_stats": True,
    } | more


def prompts(count: int = 64) -> list[list[int]]:
    """Return prompts of 100 to 227 tokens, in families of eight with a common beginning."""
    made = []
    for number in range(count):
        family = number // 8
        common = [(family * 31 + position * 7) % 250 for position in range(96)]
        own = [(number * 13 + position * position) % 250 for position in range(4 + 2 * number)]
        made.append(common + own[:131])
    return made


class EngineProcess:
    """One engine in a child process, which runs `child`; `start` waits until it is up."""

    def __init__(
        self, arguments: dict[str, Any], *, child: str = "engine_child.py", **environment: str
    ) -> None:
        read, write = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `close`
        env = os.environ | {"VLLM_LOGGING_LEVEL": "INFO", "KVADMIT_CHECK": "1"} | environment
        self.process = subprocess.Popen(
            [sys.executable, str(CHILDREN / child), str(write), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(write,),
            env=env,
        )
        os.close(write)
        self._answers = os.fdopen(read, "rb")
        self.first: dict[str, Any] = {}

    def start(self) -> EngineProcess:
        """Wait until the engine is up; fails with its log when it is not."""
        self.first = self._read(START_WAIT_S)
        assert "error" not in self.first, f"{self.first['error']}\n{self.log()}"
        return self

    def refusal(self) -> str:
        """Wait until the engine has failed to start; returns the error's type and text."""
        self.first = self._read(START_WAIT_S)
        assert "error" in self.first, f"it started\n{self.log()}"
        assert self.process.wait(STOP_WAIT_S) != 0
        return str(self.first["error"])

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        self.tell(op, **request)
        return self.answer()

    def tell(self, op: str, **request: Any) -> None:
        """Send a request; `answer` reads what comes back."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **request}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to the oldest request that has none."""
        return self._read(ANSWER_WAIT_S)

    def generate(self, wanted: list[list[int]], tokens: int) -> list[list[int]]:
        """Return greedy token ids; fails if a request did."""
        answer = self.ask("generate", prompts=wanted, tokens=tokens)
        assert set(answer["finish"]) == {"length"}, answer
        ids: list[list[int]] = answer["ids"]
        return ids

    def status(self) -> dict[str, Any]:
        """Return the engine's kvadmit status."""
        return self.ask("status")

    def wait_status(self, what: str, wait_s: float = 30.0, **least: int) -> dict[str, Any]:
        """Wait, bounded, until `resident_extents` is at most `resident`; returns the status."""
        deadline = time.monotonic() + wait_s
        while True:
            status = self.status()
            if status["pool"]["resident_extents"] <= least["resident"]:
                return status
            assert time.monotonic() < deadline, f"{what}: {json.dumps(status, indent=1)}"
            time.sleep(0.05)

    def log(self) -> str:
        """Return what the engine's processes have written."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _read(self, wait_s: float) -> dict[str, Any]:
        ready = select.select([self._answers], [], [], wait_s)[0]
        assert ready, f"no answer within {wait_s} s\n{self.log()}"
        line = self._answers.readline()
        assert line, f"the engine ended\n{self.log()}"
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Let the engine end by itself; kill it when it does not. Idempotent."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOP_WAIT_S)
        self._answers.close()
        self._log.close()


@contextlib.contextmanager
def engine(arguments: dict[str, Any], **environment: str) -> Iterator[EngineProcess]:
    """Run an engine for a block of code."""
    child = EngineProcess(arguments, **environment)
    try:
        yield child.start()
    finally:
        child.close()


def kvadmit(run_dir: Path, **settings: Any) -> dict[str, Any]:
    """Return the `additional_config` that shares memory with whoever uses `run_dir`."""
    base = {"enable": True, "run_dir": str(run_dir), "idle_decay_s": 0.2, "reclaim_s": 2.0}
    return {"kvadmit": base | settings}

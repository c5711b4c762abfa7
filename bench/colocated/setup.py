"""What is measured on what: everything a bench fixes before its first run.

Owns: the `Setup` and its JSON form. Must not know: how instances are started or pressed.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from bench.colocated.gpus import Gpu
from bench.colocated.workload import Shape

EngineKind = Literal["vllm", "sim"]


BLOCK_TOKENS = 32
"""The smallest block that vLLM's attention on the CPU takes."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One bench. `pool_bytes`: KV memory of all instances together.

    `model`: directory of the model vLLM loads. `warm_up`: requests per instance that are sent
    after a start and not counted. `worker_delay_ms` is added to every answer of
    a worker to a growth order. `probes`: per instance, clients whose one-block requests need
    no growth. `timeout_s` bounds one run. On GPUs (`device` "cuda"): rank r is on the r-th of
    `gpus`, `leave_bytes` are what the ballast leaves of each for everybody, `base_bytes` what
    an instance is taken to hold on each beside KV memory, and instances of up to `fleets` policies
    stand there at once. `attention`: vLLM's backend, "" for its own choice.
    """

    shape: Shape
    engine: EngineKind
    tp: int
    pool_bytes: int
    model: str
    seed: int
    warm_up: int = 32
    worker_delay_ms: float = 0.0
    probes: int = 0
    block_tokens: int = BLOCK_TOKENS
    max_model_len: int = 512
    max_num_seqs: int = 128
    sample_s: float = 0.1
    timeout_s: float = 600.0
    device: Literal["cpu", "cuda"] = "cpu"
    gpus: tuple[Gpu, ...] = ()
    leave_bytes: int | None = None
    base_bytes: int = 0
    fleets: int = 1
    attention: str = ""

    def workload(self) -> dict[str, Any]:
        """Return the part of the JSON by which two results are known to be comparable.

        Scenario and engine are named by every run instead, so one file may hold several.
        """
        shape = msgspec.to_builtins(self.shape)
        del shape["scenario"]
        on_gpus = {
            "leave_bytes": self.leave_bytes,
            "base_bytes": self.base_bytes,
            "fleets": self.fleets,
            "attention": self.attention,
        }
        return {
            **shape,
            **(on_gpus if self.device == "cuda" else {}),
            "tp": self.tp,
            "pool_bytes": self.pool_bytes,
            "model": self.model.rsplit("/", 1)[-1],
            "warm_up": self.warm_up,
            "worker_delay_ms": self.worker_delay_ms,
            "probes": self.probes,
            "block_tokens": self.block_tokens,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
        }

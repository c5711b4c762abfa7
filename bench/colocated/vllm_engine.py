"""A real vLLM engine inside an instance: AsyncLLM with token-id prompts.

Owns: how the engine is made, how its levels and counters are read. Must not know: which
policy is better. Stock vLLM's figures come from its own per-step statistics; kvadmit's and
the sync policy's from a status call that runs between steps.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import psutil
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from bench.colocated import gpus, status
from bench.colocated.channel import Ready
from bench.colocated.kvcached_levels import KvcachedLevels
from bench.colocated.outcome import Counted, Level
from vllm import SamplingParams

STOP_S = 20.0


class _Steps(StatLoggerBase):  # type: ignore[misc]  # vLLM is Any to the checker
    """The newest of vLLM's own statistics, and preemptions in all."""

    newest: _Steps | None = None

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.running = self.waiting = self.preemptions = 0
        _Steps.newest = self

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
        **more: Any,
    ) -> None:
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.waiting = scheduler_stats.num_waiting_reqs
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Say nothing."""


class VllmEngine:
    """See `engine.Engine`."""

    def __init__(self, llm: AsyncLLM, policy: str) -> None:
        self._llm = llm
        self._has_status = policy in status.POLICIES
        assert _Steps.newest is not None, "AsyncLLM makes its loggers when it is made"
        self._steps = _Steps.newest
        self._preemptions_before = 0
        self._before: status.Status | None = None
        self._peak_bytes = 0
        cache = llm.vllm_config.cache_config
        ranks = llm.vllm_config.parallel_config.world_size
        self._kvcached = KvcachedLevels(ranks) if policy == "kvcached" else None
        known = cache.kv_cache_memory_bytes or 0
        self._capacity = known * ranks
        self.ready = Ready(
            capacity_bytes=self._capacity,
            facts={"block_tokens": cache.block_size, "blocks": cache.num_gpu_blocks},
        )

    async def generate(
        self, request_id: str, prompt: list[int], tokens: int
    ) -> AsyncIterator[Sequence[int]]:
        sampling = SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            temperature=0.0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        async for output in self._llm.generate({"prompt_token_ids": prompt}, sampling, request_id):
            yield output.outputs[0].token_ids

    async def begin_run(self) -> None:
        await self._llm.reset_prefix_cache()
        self._preemptions_before = self._steps.preemptions
        self._peak_bytes = 0
        if self._has_status:
            await self._llm.engine_core.call_utility_async(status.RESTART)
            self._before = await self._status()

    async def level(self) -> Level:
        if self._has_status:
            held, running, waiting = await self._llm.engine_core.call_utility_async(status.LEVEL)
        else:
            busy = self._llm.output_processor.has_unfinished_requests()
            held = self._kvcached.held_bytes() if self._kvcached else self._capacity
            running = self._steps.running if busy else 0
            waiting = self._steps.waiting if busy else 0
        self._peak_bytes = max(self._peak_bytes, held)
        return Level(at_s=time.monotonic(), held_bytes=held, running=running, waiting=waiting)

    async def counted(self) -> Counted:
        preemptions = self._steps.preemptions - self._preemptions_before
        if self._before is None:
            counted = Counted(preemptions=preemptions, peak_held_bytes=self._peak_bytes)
        else:
            newest = await self._status()
            counted = status.counted(newest, self._before, preemptions, self._peak_bytes)
        core_bytes = await asyncio.to_thread(_core_bytes, self._core_pid())
        return msgspec.structs.replace(counted, engine_core_device_bytes=core_bytes)

    def _core_pid(self) -> int:
        processes = self._llm.engine_core.resources.engine_manager.processes
        return int(processes[0].pid)

    async def _status(self) -> status.Status:
        return status.parse(await self._llm.engine_core.call_utility_async(status.UTILITY))

    async def stop(self) -> None:
        self._llm.shutdown(timeout=STOP_S)


def _core_bytes(pid: int) -> int | None:
    """Return what EngineCore holds on the GPUs; None on a machine without, or that cannot say.

    One that has no context is not in the driver's list. That says so only if another process of
    this instance, a worker, is there: in a container the driver may know them by other numbers.
    """
    held = gpus.bytes_by_process()
    mine = {child.pid for child in psutil.Process().children(recursive=True)}
    return held.get(pid, 0) if mine & held.keys() else None


async def start(name: str, policy: str, arguments: dict[str, Any]) -> VllmEngine:
    """Start vLLM; returns when it can serve."""
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[_Steps])
    # As `vllm serve` does: full collections over everything ever imported stall the clients.
    gc.collect()
    gc.freeze()
    return VllmEngine(llm, policy)

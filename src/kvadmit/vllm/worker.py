"""The worker's side: vLLM's KV buffer over our address space, and the step's progress.

Owns: the hooks on vLLM's worker classes. Must not know: how memory is backed, or orders.

The buffer: the worker allocates its KV cache inside the context that
`_maybe_get_memory_pool_context("kv_cache")` returns, with one `torch.zeros`. Our context
answers exactly that call with a tensor over the reservation, whatever runner made it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvadmit.agent import Agent
from kvadmit.errors import LocalProtocolError
from kvadmit.geometry import ExtentPlan
from kvadmit.units import format_bytes
from kvadmit.vllm.backends import Backing, make_backing
from kvadmit.vllm.engine_config import is_enabled
from kvadmit.vllm.names import PLAN, RUNTIME, SIDE, STEP
from kvadmit.vllm.replacing import replace

logger = logging.getLogger("vllm.kvadmit")


class WorkerSide:
    """One worker's backing, agent and the step it is at."""

    def __init__(self, runtime: dict[str, Any], plan: ExtentPlan, rank: int, ordinal: int) -> None:
        """Reserve the buffer and back the prefix; nothing is left behind on failure.

        `ordinal`: what PyTorch calls the worker's GPU.
        """
        self.plan = plan
        self.step = 0
        self.backing: Backing = make_backing(
            runtime,
            plan.layouts[rank],
            device=runtime["devices"][rank],
            ordinal=ordinal,
            ranks=len(plan.layouts),
        )
        try:
            self._back_prefix()
        except BaseException:
            self.backing.close()
            raise
        self.agent = Agent(
            runtime,
            rank=rank,
            space=self.backing.space,
            prefix=plan.prefix,
            device_wait=self.backing.device_wait,
        )

    def _back_prefix(self) -> None:
        space, extents = self.backing.space, range(self.plan.prefix)
        for call in (space.prepare, space.commit):
            result = call(extents)
            if result.error is not None:
                raise result.error
        self.begin_step()
        if self.backing.device_wait is not None:
            self.backing.device_wait()

    def begin_step(self) -> None:
        """Enqueue zeroes for what was committed since the last step, before this one's kernels.

        On this thread and its stream: whatever another thread enqueues waits while a launch of
        this one waits for room in the driver's queue, up to a whole step.
        """
        space = self.backing.space
        if space.has_fresh:
            space.zero_fresh(self.backing.stream())

    def publish(self) -> None:
        """Say that the current step is fully enqueued."""
        self.agent.publish_enqueued(self.step)

    def publish_base(self) -> None:
        """Measure what this worker holds beside KV memory and say so. It is warmed up."""
        layout = self.backing.space.layout
        kv_bytes = self.plan.prefix * layout.extent_bytes
        base_bytes = self.backing.base_bytes(kv_bytes)
        if base_bytes is not None:
            self.agent.publish_base(base_bytes)
        logger.info(
            "kvadmit in the worker of rank %d, warmed up: %s of %s backed, %s beside KV memory",
            self.agent.rank,
            format_bytes(kv_bytes),
            format_bytes(layout.buffer_bytes),
            "not measured" if base_bytes is None else format_bytes(base_bytes),
        )

    def close(self) -> None:
        """End the agent and free the memory. Idempotent."""
        self.agent.stop()
        self.backing.close()


class KvBufferContext(TorchFunctionMode):
    """While entered, one `torch.zeros` of exactly the buffer's size returns the buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        """`buffer`: the int8 tensor over the reservation."""
        super().__init__()
        self._buffer = buffer
        self.taken = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer the one allocation, pass everything else on."""
        kwargs = kwargs or {}
        wanted = func is torch.zeros and args == (self._buffer.numel(),)
        if wanted and kwargs.get("dtype") is torch.int8:
            self.taken += 1
            return self._buffer
        return func(*args, **kwargs)

    def __exit__(self, *exception: Any) -> None:
        """Leave the context; raises LocalProtocolError unless the buffer was taken once."""
        super().__exit__(*exception)
        if exception[0] is None and self.taken != 1:
            raise LocalProtocolError(
                f"vLLM allocated its KV cache of {self._buffer.numel()} bytes {self.taken} times "
                "inside the hook, expected once"
            )


def wrap_resolve_obj_by_qualname(original: Any) -> Callable[..., Any]:
    """Make the replacement of the look-up with which vLLM finds its worker class."""

    def resolve_obj_by_qualname(qualname: str) -> Any:
        found = original(qualname)
        if isinstance(found, type):
            install_worker(found)
        return found

    return resolve_obj_by_qualname


def install_worker(worker_class: type) -> None:
    """Install the hooks of `worker_class` if it is one of vLLM's workers (or a subclass of one)."""
    from vllm.v1.worker.gpu_worker import Worker

    if not issubclass(worker_class, Worker):
        return
    replace(Worker, "initialize_from_config", _wrap_initialize)
    replace(Worker, "_maybe_get_memory_pool_context", _wrap_memory_pool_context)
    replace(Worker, "execute_model", wrap_execute_model)
    replace(Worker, "sample_tokens", _wrap_sample_tokens)
    replace(Worker, "shutdown", _wrap_shutdown)
    for owner in worker_class.__mro__:
        if "compile_or_warm_up_model" in vars(owner) and issubclass(owner, Worker):
            replace(owner, "compile_or_warm_up_model", _wrap_warm_up)
        if "determine_available_memory" in vars(owner) and owner.__name__ == "CPUWorker":
            replace(owner, "determine_available_memory", _wrap_available_memory)


def _side_of(worker: Any) -> WorkerSide | None:
    side: WorkerSide | None = worker.__dict__.get(SIDE)
    return side


def _wrap_initialize(original: Any) -> Callable[..., Any]:
    def initialize_from_config(self: Any, kv_cache_config: Any) -> Any:
        if not is_enabled(self.vllm_config):
            return original(self, kv_cache_config)
        runtime = getattr(self.vllm_config, RUNTIME)
        ordinal = self.device.index or 0
        side = WorkerSide(runtime, getattr(kv_cache_config, PLAN), self.rank, ordinal)
        setattr(self, SIDE, side)
        try:
            result = original(self, kv_cache_config)
            side.agent.start()
            layout = side.plan.layouts[self.rank]
            logger.info(
                "kvadmit is active in the worker of rank %d: %s reserved, %s backed, %d blocks in "
                "extents of %d (%s)",
                self.rank,
                format_bytes(layout.buffer_bytes),
                format_bytes(side.plan.prefix * layout.extent_bytes),
                side.plan.blocks,
                side.plan.extent_blocks,
                format_bytes(layout.extent_bytes),
            )
        except BaseException:
            side.close()
            raise
        return result

    return initialize_from_config


def _wrap_memory_pool_context(original: Any) -> Callable[..., Any]:
    def _maybe_get_memory_pool_context(self: Any, tag: str) -> Any:
        side = _side_of(self)
        if side is None or tag != "kv_cache":
            return original(self, tag)
        assert side.backing.tensor is not None
        return KvBufferContext(side.backing.tensor)

    return _maybe_get_memory_pool_context


def _wrap_warm_up(original: Any) -> Callable[..., Any]:
    def compile_or_warm_up_model(self: Any) -> Any:
        side = _side_of(self)
        if side is None:
            return original(self)
        # Everything that picks block ids in warm-up and capture reads this field.
        config = self.model_runner.kv_cache_config
        blocks = config.num_blocks
        config.num_blocks = min(blocks, side.plan.prefix * side.plan.extent_blocks)
        side.agent.set_capturing(True)
        try:
            result = original(self)
        finally:
            side.agent.set_capturing(False)
            config.num_blocks = blocks
        side.publish_base()
        return result

    return compile_or_warm_up_model


def _wrap_available_memory(original: Any) -> Callable[..., Any]:
    def determine_available_memory(self: Any) -> int:
        if not is_enabled(self.vllm_config):
            available: int = original(self)
            return available
        # Stock refuses a size beyond the memory that is free now; ours is virtual.
        if self._should_warm_up_model():
            self.model_runner.warming_up_model()
        return int(self.cache_config.kv_cache_memory_bytes)

    return determine_available_memory


def wrap_execute_model(original: Any) -> Callable[..., Any]:
    """Make the replacement of a worker's step: zeroes before it, its number after it."""

    def execute_model(self: Any, scheduler_output: Any) -> Any:
        side = self.__dict__.get(SIDE)
        if side is not None:
            side.begin_step()
        output = original(self, scheduler_output)
        if side is not None:
            step = getattr(scheduler_output, STEP, None)
            if step is None:
                return output  # vLLM's own warm-up: no step of the scheduler's
            side.step = step
            if output is not None:
                side.publish()
        return output

    return execute_model


def _wrap_sample_tokens(original: Any) -> Callable[..., Any]:
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = original(self, grammar_output)
        side = self.__dict__.get(SIDE)
        if side is not None:
            side.publish()
        return output

    return sample_tokens


def _wrap_shutdown(original: Any) -> Callable[..., Any]:
    def shutdown(self: Any) -> Any:
        try:
            return original(self)
        finally:
            side = self.__dict__.pop(SIDE, None)
            if side is not None:
                side.close()

    return shutdown


__all__ = ["KvBufferContext", "WorkerSide", "install_worker", "wrap_execute_model"]

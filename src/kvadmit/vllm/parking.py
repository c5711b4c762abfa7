"""When an engine has requests but memory for none of them, it sleeps on its input queue.

Owns: the hooks on EngineCoreProc's loop. Must not know: why nothing could be scheduled (the
scheduler mixin says so and for how long it may last).

vLLM's loop would schedule nothing, broadcast it to all workers and sleep 1 ms, over and over.
Everything that can change the situation arrives on the input queue: requests,
aborts, and the coordinator's wake-ups, so waiting there loses nothing.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from typing import Any

import vllm.v1.engine.core as core_module

from kvadmit.vllm.engine_core import Engine, engine_of

SPIN_S = 0.001
"""What vLLM sleeps when it waits for something else than memory."""


def wrap_process_input_queue(original: Any) -> Callable[..., Any]:
    """Make the replacement of `EngineCoreProc._process_input_queue`: learn who to wake."""

    def _process_input_queue(self: Any) -> Any:
        engine = engine_of(self.vllm_config)
        if engine is not None and engine.core is None:
            engine.core = self
            # Orders given before this line woke nobody.
            engine.scheduler.kvadmit_wake()
        return original(self)

    return _process_input_queue


def wrap_handle_client_request(original: Any) -> Callable[..., Any]:
    """Make the replacement of `EngineCoreProc._handle_client_request`: orders while idle."""

    def _handle_client_request(self: Any, request_type: Any, request: Any) -> Any:
        if request_type == core_module.EngineCoreRequestType.WAKEUP:
            engine = engine_of(self.vllm_config)
            if engine is not None:
                engine.scheduler.kvadmit_wake()
        return original(self, request_type, request)

    return _handle_client_request


def wrap_process_engine_step(original: Any) -> Callable[..., Any]:
    """Make the replacement of `EngineCoreProc._process_engine_step`."""

    def _process_engine_step(self: Any) -> bool:
        engine = engine_of(self.vllm_config)
        if engine is None:
            executed: bool = original(self)
            return executed
        return _engine_step(self, engine)

    return _process_engine_step


def _engine_step(core: Any, engine: Engine) -> bool:
    """Do what vLLM's method does, but for the last line: where it spins, park.

    Its text is a recorded shape (`shapes.PLACES`), so a change of it is noticed at start.
    """
    watch_dog = getattr(core_module, "get_watch_dog", None)
    if watch_dog is not None:
        watch_dog().feed()
    outputs, executed = core.step_fn()
    for output in outputs.items() if outputs else ():
        core.output_queue.put_nowait(output)
    core.post_step(executed)
    if not executed and core.scheduler.has_requests():
        pause_s = 0.0 if _must_keep_step(core) else engine.scheduler.kvadmit_park_s()
        if pause_s > 0:
            _park(core, pause_s, watch_dog)
        else:
            time.sleep(SPIN_S)
    return bool(executed)


def _must_keep_step(core: Any) -> bool:
    """Whether results are under way, or ranks of data parallelism run in lockstep."""
    return bool(core.batch_queue) or isinstance(core, core_module.DPEngineCoreProc)


def _park(core: Any, pause_s: float, watch_dog: Any) -> None:
    """Wait for the next event of any kind, `pause_s` at most, and handle it."""
    quiet = contextlib.nullcontext() if watch_dog is None else watch_dog().disable()
    try:
        with quiet:
            request = core.input_queue.get(timeout=pause_s)
    except queue.Empty:
        return
    core._handle_client_request(*request)

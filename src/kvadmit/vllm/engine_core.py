"""EngineCore's side: one coordinator for each engine, from its executor to its shutdown.

Owns: the engines of this process and the hooks that start and end them. Must not know: how
blocks are handed out (`scheduler`) or when the engine sleeps (`parking`).

The order of a start: executor hook (coordinator up, the start's turn awaited, runtime
attached for the workers) -> planning hook (geometry, allowance for the prefix) -> workers
back the prefix, agents say hello -> scheduler (`wait_ready`).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvadmit.config import Settings
from kvadmit.coordinator import Coordinator
from kvadmit.errors import PeerTimeoutError
from kvadmit.geometry import ExtentPlan
from kvadmit.units import format_bytes
from kvadmit.vllm.devices import devices_of, read_gpu
from kvadmit.vllm.engine_config import is_enabled, read_settings
from kvadmit.vllm.names import RUNTIME
from kvadmit.vllm.stalls import stall

logger = logging.getLogger("vllm.kvadmit")

ARBITER_WAIT_S = 10.0
"""A new arbiter is there within seconds; without one for so long the instance is not ready."""


class Engine:
    """One engine of this process that runs with kvadmit."""

    def __init__(self, vllm_config: Any, settings: Settings) -> None:
        """Start nothing yet."""
        from vllm.v1.engine import EngineCoreRequestType

        parallel = vllm_config.parallel_config
        self.settings = settings
        self.ranks: int = parallel.world_size
        self.woken = threading.Event()
        """Set when the coordinator gave the pool an order; for an engine without a queue."""
        self.core: Any = None
        """The EngineCoreProc once it runs; None in an in-process engine."""
        self.scheduler: Any = None
        self.executor: Any = None
        self.plan: ExtentPlan | None = None
        self.lost = ""
        """Why the engine cannot go on; "" while it can."""
        self._request_types = EngineCoreRequestType
        self._vllm_config = vllm_config
        self.devices = devices_of(vllm_config, settings)
        self.coordinator = Coordinator(
            settings,
            ranks=self.ranks,
            devices=self.devices.by_rank,
            device_total_bytes=self.devices.total_bytes,
            backend=self.devices.backend,
            margin_bytes=self.devices.margin_bytes,
            mps=self.devices.mps,
            read_device=read_gpu if self.devices.backend == "cuda" else None,
            name=_instance_name(vllm_config, settings),
            wake=self.wake,
            on_engine_lost=self._lost,
            details=_details(vllm_config) | {"backend": self.devices.backend},
        )

    def start(self) -> None:
        """Join the arbiter and wait for this start's turn. Nothing is left behind on failure."""
        try:
            self.coordinator.start()
            parent = multiprocessing.parent_process()
            if parent is not None and parent.pid is not None:
                self.coordinator.watch_parent(parent.pid)
            self.coordinator.request_start(self.devices.start_bytes)
        except BaseException:
            self.coordinator.stop()
            raise
        setattr(self._vllm_config, RUNTIME, self.coordinator.runtime)
        # Seen by get_scheduler_cls, which gets no other configuration.
        setattr(self._vllm_config.scheduler_config, RUNTIME, self.coordinator.runtime)
        _engines[self.incarnation] = self
        logger.info(
            "kvadmit is active in EngineCore: instance %s with %d rank(s) shares %s",
            self.coordinator.name,
            self.ranks,
            ", ".join(
                f"{format_bytes(size)} of {device}"
                for device, size in self.devices.total_bytes.items()
            ),
        )

    @property
    def incarnation(self) -> str:
        """The name of this life of the engine."""
        return str(self.coordinator.runtime["incarnation"])

    def wake(self) -> None:
        """Coordinator thread: have the engine look at its port, idle, parked or running."""
        self.woken.set()
        core = self.core
        if core is not None:
            core.input_queue.put_nowait((self._request_types.WAKEUP, None))

    def _lost(self, reason: str) -> None:
        """Coordinator thread: a rank or the coordinator is gone for good."""
        self.lost = reason
        if self.scheduler is not None:
            self.scheduler.kvadmit_step.lost = reason
        self.woken.set()
        core = self.core
        if core is not None:
            # What vLLM's executor puts there when a worker dies: the engine ends.
            core.input_queue.put_nowait((self._request_types.EXECUTOR_FAILED, b""))

    def set_plan(self, plan: ExtentPlan) -> None:
        """Tell the coordinator the geometry; returns once the prefix may be backed."""
        self.plan = plan
        self.coordinator.set_geometry(plan)

    def wait_ready(self) -> None:
        """Return once every worker has joined; ends everything of the engine when one does not."""
        try:
            self.coordinator.wait_ready()
        except BaseException as error:
            if isinstance(error, PeerTimeoutError):
                logger.error(
                    "a worker without kvadmit's plugin never joins: if one has not logged that "
                    "kvadmit is active, does VLLM_PLUGINS name kvadmit, and is it installed there?"
                )
            self.abandon()
            raise

    def stop(self) -> None:
        """End the coordinator. Idempotent."""
        _engines.pop(self.incarnation, None)
        self.coordinator.stop()

    def abandon(self) -> None:
        """End everything of an engine whose construction failed.

        vLLM leaves workers behind when an exception strikes between the executor's start
        and the end of EngineCore's constructor.
        """
        self.coordinator.expect_end()
        executor, self.executor = self.executor, None
        if executor is not None:
            try:
                executor.shutdown()
            except Exception:
                logger.exception("shutting the executor down after a failed start")
        self.stop()

    def status(self) -> dict[str, Any]:
        """Return everything known here as JSON-able data. Main thread."""
        pool = {} if self.scheduler is None else self.scheduler.kvadmit_pool_status()
        plan = None if self.plan is None else msgspec.to_builtins(self.plan.wire())
        return {"coordinator": self.coordinator.status(), "pool": pool, "plan": plan}

    def trouble(self) -> str:
        """Return why the instance cannot serve as it should, "" if it can. Main thread."""
        now_s = time.monotonic()
        if self.lost:
            return f"the engine ends: {self.lost}"
        gone_s = self.coordinator.arbiter_gone_s(now_s)
        if gone_s >= ARBITER_WAIT_S:
            return (
                f"there has been no arbiter for {gone_s:.0f} s: serving on with the memory held, "
                "growth waits"
            )
        return "" if self.scheduler is None else stall(self.scheduler, now_s)


_engines: dict[str, Engine] = {}


def engine_of(owner: Any) -> Engine | None:
    """Return the engine whose runtime `owner` carries (a VllmConfig or SchedulerConfig)."""
    runtime = getattr(owner, RUNTIME, None)
    return None if runtime is None else _engines.get(str(runtime["incarnation"]))


def _instance_name(vllm_config: Any, settings: Settings) -> str:
    name = settings.name or f"{Path(vllm_config.model_config.model).name}-{os.getpid()}"
    parallel = vllm_config.parallel_config
    index = getattr(parallel, "data_parallel_index", 0) or 0
    several = index or parallel.data_parallel_size > 1
    return f"{name}-dp{index}" if several else name


def _details(vllm_config: Any) -> dict[str, str]:
    """Return what people want to see of an instance in status."""
    parallel = vllm_config.parallel_config
    return {
        "model": str(vllm_config.model_config.model),
        "tp": str(parallel.tensor_parallel_size),
        "pp": str(parallel.pipeline_parallel_size),
    }


def wrap_executor_init(original: Any) -> Callable[..., Any]:
    """Make the replacement of `Executor.__init__`: workers start after the coordinator."""

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if not is_enabled(vllm_config):
            original(self, vllm_config, *args, **kwargs)
            return
        settings = read_settings(vllm_config)
        assert settings is not None
        engine = Engine(vllm_config, settings)
        engine.start()
        engine.executor = self
        try:
            original(self, vllm_config, *args, **kwargs)
        except BaseException:
            engine.stop()  # the executor ends its own workers when their start fails
            raise

    return __init__


def wrap_engine_init(original: Any) -> Callable[..., Any]:
    """Make the replacement of `EngineCore.__init__`: a failed start leaves nothing behind.

    Reached only where the class was replaced before it was instantiated, that is in process
    or after a fork; a spawned EngineCore that fails ends as a process.
    """

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, vllm_config, *args, **kwargs)
        except BaseException:
            engine = engine_of(vllm_config)
            if engine is not None:
                engine.abandon()
            raise

    return __init__


def wrap_engine_shutdown(original: Any) -> Callable[..., Any]:
    """Make the replacement of `EngineCore.shutdown`: the coordinator ends after the workers."""

    def shutdown(self: Any) -> None:
        engine = engine_of(self.vllm_config)
        if engine is not None:
            engine.coordinator.expect_end()
        try:
            original(self)
        finally:
            if engine is not None:
                engine.stop()

    return shutdown


def kvadmit_status(self: Any) -> dict[str, Any]:
    """Answer the utility call `kvadmit_status` (a method of EngineCore); {} when stock."""
    engine = engine_of(self.vllm_config)
    return {} if engine is None else engine.status()


def kvadmit_trouble(self: Any) -> str:
    """Answer the utility call `kvadmit_trouble` (a method of EngineCore); "" when stock."""
    engine = engine_of(self.vllm_config)
    return "" if engine is None else engine.trouble()

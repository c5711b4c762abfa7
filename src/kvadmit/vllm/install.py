"""Which attribute of vLLM is replaced, by what, and in which process.

Owns: the list, by process. Must not know: what a hook does. Everything here is idempotent, starts
nothing, and is inherited by a forked child as it is.

Not enabled, exactly one attribute differs from stock: `EngineArgs.create_engine_config`.
Processes that vLLM starts later (EngineCore, workers, more API servers) run `register` too;
what tells them to install the other hooks is an environment variable, set by the first
configuration that enables kvadmit. Each hook still looks at its own `vllm_config` first, so
an engine without kvadmit in such a process stays stock.
"""

from __future__ import annotations

import functools
import os
import sys

from kvadmit.vllm.replacing import replace

ENVIRONMENT_MARK = "KVADMIT_ACTIVE"
"""Set to 1 for the children of a process that enabled kvadmit for any of its engines."""


def register() -> None:
    """Install what this process needs, given what its ancestors enabled."""
    from vllm.engine.arg_utils import EngineArgs

    from kvadmit.vllm import engine_config

    wrap = functools.partial(engine_config.wrap_create_engine_config, activate=activate)
    replace(EngineArgs, "create_engine_config", wrap)
    if os.environ.get(ENVIRONMENT_MARK) == "1":
        _install_loaded()


def activate() -> None:
    """Install every hook here and have child processes install theirs.

    Called in the process that enables kvadmit, before it starts an engine.
    """
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.engine.output_processor
    import vllm.v1.worker.worker_base  # noqa: F401  # loaded so that its hook can be installed

    os.environ[ENVIRONMENT_MARK] = "1"
    _install_loaded()


def _install_loaded() -> None:
    """Install the hooks of the modules this process has imported already.

    vLLM loads plugins after it has imported whatever role the process plays, so importing
    more would only cost time: the short-lived process that inspects models runs this too.
    """
    if "vllm.v1.engine.core" in sys.modules:
        _install_engine_core()
    if "vllm.v1.worker.worker_base" in sys.modules:
        _install_worker_lookup()
    if "vllm.v1.engine.output_processor" in sys.modules:
        _install_frontend()
    if "vllm.v1.engine.async_llm" in sys.modules:
        _install_readiness()
    if "vllm.entrypoints.launchers.api_server.entry" in sys.modules:
        _install_exit_status()


def _install_engine_core() -> None:
    import vllm.v1.engine.core as core
    from vllm.config.scheduler import SchedulerConfig
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.structured_output import StructuredOutputManager

    from kvadmit.vllm import engine_core, pageable, parking, planning, scheduler

    replace(Executor, "__init__", engine_core.wrap_executor_init)
    replace(core, "get_kv_cache_configs", planning.wrap_get_kv_cache_configs)
    replace(SchedulerConfig, "get_scheduler_cls", scheduler.wrap_get_scheduler_cls)
    replace(core.EngineCore, "__init__", engine_core.wrap_engine_init)
    replace(core.EngineCore, "shutdown", engine_core.wrap_engine_shutdown)
    replace(core.EngineCoreProc, "_process_input_queue", parking.wrap_process_input_queue)
    replace(core.EngineCoreProc, "_process_engine_step", parking.wrap_process_engine_step)
    replace(core.EngineCoreProc, "_handle_client_request", parking.wrap_handle_client_request)
    replace(StructuredOutputManager, "grammar_bitmask", pageable.wrap_grammar_bitmask)
    for utility in (engine_core.kvadmit_status, engine_core.kvadmit_trouble):
        if not hasattr(core.EngineCore, utility.__name__):
            setattr(core.EngineCore, utility.__name__, utility)


def _install_worker_lookup() -> None:
    """Replace the look-up of the worker class: the class's module is not imported yet."""
    import vllm.v1.worker.worker_base as worker_base

    from kvadmit.vllm import worker

    replace(worker_base, "resolve_obj_by_qualname", worker.wrap_resolve_obj_by_qualname)


def _install_frontend() -> None:
    from vllm.v1.engine.output_processor import OutputProcessor

    from kvadmit.vllm import frontend

    replace(OutputProcessor, "process_outputs", frontend.wrap_process_outputs)


def _install_readiness() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    from kvadmit.vllm import readiness

    replace(AsyncLLM, "check_health", readiness.wrap_check_health)


def _install_exit_status() -> None:
    import vllm.entrypoints.launchers.api_server.entry as entry

    from kvadmit.vllm import exit_status

    replace(entry, "build_and_serve", exit_status.wrap_build_and_serve)

"""Says which attributes of vLLM are replaced in the process that asks, and how it was started.

Also a plugin of the tests' own, so that EngineCore can be asked.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import kvadmit

KEEP_OUT = "KVADMIT_TESTS_KEEP_OUT"
"""Set: the workers load no plugin, whatever their EngineCore has loaded."""
PACKAGE = str(Path(kvadmit.__file__).parent)


def register() -> None:
    """Entry point of `vllm.general_plugins`: give EngineCore methods that answer."""
    if os.environ.get(KEEP_OUT) and multiprocessing.parent_process() is not None:
        os.environ["VLLM_PLUGINS"] = "none"
    if "vllm.v1.engine.core" in sys.modules:
        from vllm.v1.engine.core import EngineCore

        EngineCore.tests_differing = tests_differing
        EngineCore.tests_started = tests_started


def tests_differing(self: Any) -> list[str]:
    """Answer for EngineCore's process."""
    return differing()


def tests_started(self: Any) -> str:
    """Answer for EngineCore's process."""
    return started()


def started() -> str:
    """Return the class of this process, which says how it was started."""
    return type(multiprocessing.current_process()).__name__


def differing() -> list[str]:
    """Return every attribute of vLLM's loaded classes and modules that is a hook of ours."""
    found: set[str] = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("vllm") or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if _is_ours(value):
                found.add(f"{name}.{attribute}")
            # type(), not isinstance(): vLLM's placeholders import what they stand for.
            if issubclass(type(value), type) and value.__module__ == name:
                found.update(
                    f"{value.__name__}.{key}" for key, one in vars(value).items() if _is_ours(one)
                )
    return sorted(found)


def _is_ours(value: object) -> bool:
    return type(value) is FunctionType and value.__code__.co_filename.startswith(PACKAGE)

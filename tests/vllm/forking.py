"""`engine_child.py` whose vLLM forks its processes, which on CPUs it never does by itself."""

from __future__ import annotations

import importlib
import os
from typing import Any

from vllm.platforms.cpu import CpuPlatform

if __name__ == "__main__":
    original = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        """Do as vLLM does, and take back the one thing."""
        original(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
    importlib.import_module("engine_child").main()

"""What the bench adds to an instance under kvadmit: a fresh start of the histograms, late workers.

Owns: both, as a vLLM plugin of the bench's own. Changes no decision.
"""

from __future__ import annotations

import sys
from typing import Any

from bench.colocated import delay

RESTART = "kvadmit_bench_restart"
"""Method of EngineCore: percentiles are counted from this call on, so that a run has its own."""


def register() -> None:
    """Entry point of `vllm.general_plugins`."""
    if "vllm.v1.engine.core" in sys.modules:
        from vllm.v1.engine.core import EngineCore

        setattr(EngineCore, RESTART, _restart)
    if "vllm.v1.worker.worker_base" in sys.modules:
        delay.install()


def _restart(self: Any) -> None:
    from kvadmit.vllm.engine_core import engine_of

    engine = engine_of(self.vllm_config)
    assert engine is not None
    restart(engine.coordinator, engine.scheduler.kvadmit)


def restart(coordinator: Any, admission: Any) -> None:
    """Forget the samples seen so far. The scheduler's thread."""
    from kvadmit.admission import WaitHistogram
    from kvadmit.observe import Histogram

    admission.wait, admission.wait_moving = WaitHistogram(), WaitHistogram()
    coordinator._histograms = {name: Histogram() for name in coordinator._histograms}

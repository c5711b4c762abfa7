"""What the bench adds to an instance under kvadmit: levels, a fresh count, late workers.

Owns: all three, as a vLLM plugin of the bench's own. Changes no decision. Levels are read in
place, ten times a second, where the status of the package would have the scheduler thread
wait for the coordinator's.
"""

from __future__ import annotations

import sys
from typing import Any

from bench.colocated import delay, status
from kvadmit.admission import Admission, WaitHistogram
from kvadmit.coordinator import Coordinator
from kvadmit.observe import Histogram


def register() -> None:
    """Entry point of `vllm.general_plugins`."""
    if "vllm.v1.engine.core" in sys.modules:
        from vllm.v1.engine.core import EngineCore

        setattr(EngineCore, status.RESTART, _restart)
        setattr(EngineCore, status.LEVEL, _level)
    if "vllm.v1.worker.worker_base" in sys.modules:
        delay.install()


def _restart(self: Any) -> None:
    from kvadmit.vllm.engine_core import engine_of

    engine = engine_of(self.vllm_config)
    assert engine is not None
    restart(engine.coordinator, engine.scheduler.kvadmit)


def _level(self: Any) -> list[int]:
    from kvadmit.vllm.engine_core import engine_of

    engine = engine_of(self.vllm_config)
    assert engine is not None
    assert engine.plan is not None
    requests = self.scheduler.get_request_counts()
    extent_bytes = sum(engine.plan.extent_bytes.values())
    return [held_extents(engine.coordinator) * extent_bytes, *requests]


def held_extents(coordinator: Coordinator) -> int:
    """Return the extents with memory behind them, also those on their way. Any thread."""
    return coordinator._group.states.held


def restart(coordinator: Coordinator, admission: Admission[Any]) -> None:
    """Forget the samples seen so far. The scheduler's thread."""
    admission.wait, admission.wait_moving = WaitHistogram(), WaitHistogram()
    admission.overlapped = WaitHistogram()
    coordinator._histograms = {name: Histogram() for name in coordinator._histograms}

"""Slow workers on purpose: every answer to a growth order comes later.

Owns: the delay. It is in the bench, not in production code: the driver's calls are wrapped in
the worker's process, so that whatever waits for them waits longer, and nothing else does.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

VARIABLE = "KVADMIT_BENCH_WORKER_DELAY_MS"


def delay_s() -> float:
    """Return what the bench asked for, in seconds."""
    return float(os.environ.get(VARIABLE, "0")) / 1000


def install() -> None:
    """Delay the drivers' prepare and commit, that is each answer to such an order."""
    from kvadmit.vmm_cuda import CudaAddressSpace
    from kvadmit.vmm_host import HostAddressSpace

    seconds = delay_s()
    if seconds <= 0:
        return
    for driver in (HostAddressSpace, CudaAddressSpace):
        for name in ("prepare", "commit"):
            setattr(driver, name, _late(getattr(driver, name), seconds))


def _late(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    @functools.wraps(call)
    def late(space: Any, extents: Any) -> Any:
        result = call(space, extents)
        # The prefix is backed before there is anybody to answer.
        if 0 not in extents:
            time.sleep(seconds)
        return result

    return late

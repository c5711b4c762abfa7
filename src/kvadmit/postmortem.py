"""The trace of a process that failed, kept for whoever looks into it.

Owns: where such a trace is written. Must not know: what is in it.
"""

from __future__ import annotations

import logging
from pathlib import Path

from kvadmit.observe import Trace

logger = logging.getLogger(__name__)


def write_trace(trace: Trace, run_dir: str | Path, role: str) -> None:
    """Write `trace` into the run directory, in place of that role's last one, and say where.

    Never raises for a file that cannot be written: there is a worse error to report.
    """
    path = Path(run_dir) / f"failed-{role}.trace"
    try:
        count = trace.dump(path)
    except OSError as error:
        logger.error("the trace could not be written to %s: %s", path, error.strerror)
        return
    logger.error("the last %d events of this %s are in %s", count, role, path)

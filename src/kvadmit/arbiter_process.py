"""The arbiter's process: `python -m kvadmit.arbiter_process --run-dir DIR`.

Owns: its command line and the lock. Must not know: what an arbiter does (`arbiter`). Started by an
instance (`rendezvous`), it detaches itself. When another process holds the lock it ends at once,
quietly, with exit code 0.

All survivors of an arbiter start one at the same moment, and of the time that takes most is
Python's imports. So the lock comes before them: who comes second ends early.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from kvadmit.rundir import ArbiterLock, RunDir


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvadmit.arbiter_process",
        description="Arbitrate memory between the instances of a host. Started by them.",
    )
    parser.add_argument("--run-dir", required=True, help="the instances' run directory")
    parser.add_argument("--reclaim-s", type=float, default=5.0, help="time a victim may take")
    parser.add_argument("--epoch-seen", type=int, default=0, help="newest epoch known elsewhere")
    parser.add_argument("--ready-fd", type=int, help="gets one byte once the sockets are bound")
    parser.add_argument("--foreground", action="store_true", help="stay a child of the caller")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the arbiter unless somebody else is it; return the exit code."""
    options = _parse(arguments)
    if not options.foreground and os.fork():
        os._exit(0)  # our child lives on without the instance that started it as its parent
    os.chdir("/")
    run = RunDir.open(options.run_dir)
    lock = ArbiterLock(run)
    if not lock.try_acquire():
        return 0
    try:
        from kvadmit.arbiter import run_arbiter

        return run_arbiter(
            run,
            reclaim_s=options.reclaim_s,
            epoch_seen=options.epoch_seen,
            ready_fd=options.ready_fd,
        )
    finally:
        lock.release()


if __name__ == "__main__":
    sys.exit(main())

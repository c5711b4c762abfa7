"""What the kernel says about other processes: whether one is stopped, and when one ends.

Owns: pidfds and the reading of `/proc`. Must not know: what those processes are for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from kvadmit.descriptors import close_after_fork, close_quietly


def is_stopped(pid: int) -> bool:
    """Say whether `pid` is stopped (SIGSTOP, or a debugger); False for one that is not there."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # proc(5): pid (command) state ...; the command may itself contain parentheses.
    return text.rpartition(")")[2].split()[0] in ("T", "t")


class ProcessWatch:
    """Call `on_end()` on the running asyncio loop, once, when process `pid` has ended.

    Raises ProcessLookupError when it has ended already.
    """

    def __init__(self, pid: int, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._descriptor = os.pidfd_open(pid)
        close_after_fork(self)
        self._loop.add_reader(self._descriptor, self._ended)

    def close(self) -> None:
        """Watch no longer. Idempotent."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            self.close_inherited()

    def close_inherited(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        close_quietly(descriptor)

    def _ended(self) -> None:
        self.close()
        self._on_end()

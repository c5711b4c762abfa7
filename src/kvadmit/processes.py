"""Processes: whether one is stopped, when one ends, and how this one is made to end.

Owns: pidfds, the reading of `/proc`, the way out. Must not know: what processes are for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from kvadmit.descriptors import close_after_fork, close_quietly

logger = logging.getLogger(__name__)

DEATH_GRACE_S = 5.0
"""After its front end died an engine has this long to end by itself."""
DEATH_EXIT_CODE = 71
SWITCH_INTERVAL_S = 0.0005


def is_stopped(pid: int) -> bool:
    """Say whether `pid` is stopped (SIGSTOP, or a debugger); False for one that is not there."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # proc(5): pid (command) state ...; the command may itself contain parentheses.
    return text.rpartition(")")[2].split()[0] in ("T", "t")


def find_processes(module: str) -> dict[int, list[str]]:
    """Return pid -> arguments of every process that runs `python -m module`.

    Of other users too, where the kernel shows them; of other containers only from outside.
    """
    found: dict[int, list[str]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = os.fsdecode((entry / "cmdline").read_bytes()).split("\0")
        except OSError:
            continue  # it has ended meanwhile, or is hidden
        for at, pair in enumerate(pairwise(words)):
            if pair == ("-m", module):
                found[int(entry.name)] = words[at + 2 :]
                break
    return found


def never_preempt_others() -> None:
    """Have the calling thread wait for a free core or its turn whenever something wakes it.

    Waking a thread is cheap for the waker, unless the kernel runs the woken one at once in the
    waker's place. A thread under SCHED_BATCH gets the same share of time and never does that
    (sched(7)). Where the kernel refuses, nothing changes.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def share_interpreter() -> None:
    """Have a thread that runs Python hand the interpreter over soon when another one asks for it.

    CPython's default is 5 ms, and one growth asks several times in every process it passes
    through: beside a busy scheduler or model runner those waits were most of it. For the whole
    process; an interval that is shorter already stays.
    """
    if sys.getswitchinterval() > SWITCH_INTERVAL_S:
        sys.setswitchinterval(SWITCH_INTERVAL_S)


def preempt_as_usual() -> None:
    """Undo `never_preempt_others`, which a process inherits from the thread that starts it."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


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


def end_this_process() -> None:
    """Ask this process to end (SIGTERM); DEATH_GRACE_S later end it."""
    logger.error("the front end is gone; this engine ends")
    killer = threading.Timer(DEATH_GRACE_S, os._exit, (DEATH_EXIT_CODE,))
    killer.daemon = True
    killer.start()
    os.kill(os.getpid(), signal.SIGTERM)

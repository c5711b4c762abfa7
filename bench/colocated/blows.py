"""What the soak does to processes: SIGKILL and SIGSTOP, and whom they can hit.

Owns: finding the processes of an instance and of the arbiter. Must not know: load or figures.
Processes are known by psutil, which tells a pid that is used again from the one that was.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Literal

import msgspec
import psutil

from kvadmit.errors import KvAdmitError
from kvadmit.rendezvous import ask_status
from kvadmit.rundir import RunDir

Role = Literal["front end", "engine core", "worker", "arbiter"]
HELPERS = ("resource_tracker", "forkserver")
"""Processes of Python's own beside workers."""
FREEZE_S = 3.0
STATUS_WAIT_S = 20.0
GONE_WAIT_S = 15.0
"""Within this time nothing of a struck instance is left, whichever of its processes it was."""


class Blow(msgspec.Struct, frozen=True, kw_only=True):
    """One blow: who was hit, of which instance ("" for the arbiter), killed or stopped."""

    at_s: float
    role: Role
    name: str
    killed: bool


def draw_fatal(dice: random.Random) -> Role:
    """Return which process of an instance to kill, which ends the instance."""
    return dice.choice(("front end", "engine core", "worker"))


def draw_other(dice: random.Random) -> tuple[Role, bool]:
    """Return whom else to hit, and whether to kill; all but arbiters are only stopped."""
    role: Role = dice.choice(("arbiter", "arbiter", "worker", "engine core"))
    return role, role == "arbiter" and dice.random() < 0.7


def status(run: RunDir) -> dict[str, object]:
    """Return the arbiter's snapshot, also if it is stopped for a while. Raises KvAdmitError."""
    return ask_status(run, STATUS_WAIT_S)


def of_instance(
    snapshot: dict[str, object], name: str, front: int
) -> dict[Role, list[psutil.Process]]:
    """Return the processes of an instance by role.

    A simulated instance has its engine core in its front end's process.
    """
    instances = snapshot["instances"]
    assert isinstance(instances, dict)
    core = psutil.Process(int(instances[name]["pid"]))
    workers = [child for child in core.children(recursive=True) if not helps(child)]
    return {"front end": [psutil.Process(front)], "engine core": [core], "worker": workers}


def helps(process: psutil.Process) -> bool:
    """Whether it is one of Python's own helpers, which end after those they help."""
    with contextlib.suppress(psutil.Error):
        return any(helper in part for part in process.cmdline() for helper in HELPERS)
    return True  # it has ended


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and all below it, as they are now."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


async def until_gone(processes: list[psutil.Process], wait_s: float = GONE_WAIT_S) -> int:
    """Wait, bounded, for the end of all; returns how many are still there."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, wait_s)
    return sum(map(_runs, alive))


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


async def freeze(process: psutil.Process, for_s: float = FREEZE_S) -> None:
    """Stop a process for a while; it is let go on whatever happens meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.suspend()
        try:
            await asyncio.sleep(for_s)
        finally:
            process.resume()


async def until_joined(run: RunDir, names: set[str], wait_s: float) -> dict[str, object]:
    """Wait, bounded, until an arbiter counts exactly the instances `names`.

    Returns its snapshot. Raises TimeoutError when it does not.
    """
    deadline = asyncio.get_running_loop().time() + wait_s
    while asyncio.get_running_loop().time() < deadline:
        with contextlib.suppress(KvAdmitError):
            snapshot = await asyncio.to_thread(status, run)
            instances = snapshot["instances"]
            assert isinstance(instances, dict)
            if set(instances) == names:
                return snapshot
        await asyncio.sleep(0.2)
    raise TimeoutError(f"no arbiter counts {sorted(names)} within {wait_s:.0f} s")

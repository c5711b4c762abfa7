"""What is left behind: files, descriptors, bytes, processes.

Owns: counting them, before and after. Must not know: what was done in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import psutil

from kvadmit.host_pool import HostPool
from kvadmit.rendezvous import log_path
from kvadmit.rundir import RunDir

SHARED = Path("/dev/shm")  # noqa: S108  # looked at, nothing is made there


def own_files(run: RunDir, pool: str) -> set[str]:
    """Return the files of `run` that belong to somebody: all but the host's few own ones."""
    lasting = {
        Path(run.arbiter_lock_file()).name,
        Path(run.epoch_file()).name,
        log_path(run).name,
        pool,
    }
    return {path.name for path in run.path.iterdir()} - lasting


def shared_files() -> set[str]:
    """Return the names in the system's shared memory."""
    return {path.name for path in SHARED.iterdir()} if SHARED.is_dir() else set()


def pool_bytes(path: Path, total_bytes: int) -> int:
    """Return the bytes of the host pool that processes still hold; 0 without a pool.

    Opening it sweeps what the dead had, as any instance's start does.
    """
    if not path.exists():
        return 0
    pool = HostPool(path, total_bytes)
    try:
        return total_bytes - pool.free_bytes()
    finally:
        pool.close()


def descriptors(processes: Mapping[str, psutil.Process]) -> dict[str, int]:
    """Return how many files each of the named processes has open."""
    found = {}
    for name, process in processes.items():
        with contextlib.suppress(psutil.Error):
            found[name] = process.num_fds()
    return found


def grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Return by how much each count has grown, where it has."""
    more = {name: now[name] - count for name, count in before.items() if name in now}
    return {name: count for name, count in more.items() if count > 0}

"""Descriptors or disk space run out under a live host: who has a channel serves on, newcomers wait,
and once there is room again all is as before.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from integration.cluster import (
    POOL_EXTENTS,
    WAIT_S,
    Engine,
    EngineProcess,
    arbiter_pid,
    running,
    wait_until,
)
from integration.test_two_instances import books, wait_books_equal
from kvadmit.rundir import RunDir

HALF = POOL_EXTENTS // 2


@contextmanager
def limited(pid: int, which: int, most: int) -> Iterator[None]:
    """Bound a resource of another process for the length of the block."""
    soft, hard = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (most, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, which, (soft, hard))


def connections(path: str) -> int:
    """Return how many streams the kernel knows at a socket's path, accepted or not."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum(line.endswith(f" {path}") for line in lines) - 1  # less the one that listens


def test_an_arbiter_out_of_descriptors_serves_whom_it_has_and_newcomers_later(
    run_dir: Path,
) -> None:
    alpha, beta = Engine(run_dir, "alpha"), Engine(run_dir, "beta")
    with running(alpha, beta), ThreadPoolExecutor(1) as beside:
        pid = arbiter_pid(run_dir)
        used = {int(number) for number in os.listdir(f"/proc/{pid}/fd")}
        lowest_free = min(set(range(len(used) + 1)) - used)
        with limited(pid, resource.RLIMIT_NOFILE, lowest_free):
            newcomer = beside.submit(EngineProcess, run_dir, "gamma")
            lease = RunDir.open(str(run_dir)).arbiter_lease(1)
            wait_until(lambda: connections(lease) > 2 or newcomer.done(), "gamma has called")
            for busy in (alpha, beta, alpha):
                busy.pool.use(HALF + 8)
                busy.pool.wait_resident(HALF + 8)
                busy.pool.rest()
            assert not newcomer.done(), "nobody can accept its lease line"
        gamma = newcomer.result(WAIT_S)
        try:
            gamma.use(HALF)
            gamma.wait_resident(HALF)
            assert set(books(run_dir)["instances"]) == {"alpha", "beta", "gamma"}
            assert arbiter_pid(run_dir) == pid
        finally:
            gamma.close()
        wait_books_equal(run_dir, alpha, beta)


def test_without_disk_space_no_arbiter_can_follow_and_serving_goes_on(run_dir: Path) -> None:
    """An arbiter's first act is to write its epoch; until it can, growth waits."""
    alpha = EngineProcess(run_dir, "alpha", idle_decay_s=600)
    try:
        alpha.use(8)
        alpha.wait_resident(8)
        with limited(alpha.pid, resource.RLIMIT_FSIZE, 0):
            os.kill(arbiter_pid(run_dir), signal.SIGKILL)
            wait_until(
                lambda: "arbiter" in alpha.status["arbiter"]["trouble"], "the trouble is named"
            )
            assert alpha.status["engine_lost"] == ""
            assert alpha.status["group"]["held"] == 8
        alpha.use(HALF)
        alpha.wait_resident(HALF)
        assert alpha.status["counters"]["allocation_misses"] == 0
        held = books(run_dir)["instances"]["alpha"]["held_extents"]
        assert held == alpha.status["group"]["held"]
    finally:
        alpha.close()

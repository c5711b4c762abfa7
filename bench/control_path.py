#!/usr/bin/env python3
"""Measure one growth and one shrink over all ranks of an instance, without a model.

    python bench/control_path.py [--device host|cuda] [--tp 1 2 4] [--busy] [--json FILE]

Real coordinator, arbiter, agents and memory; idle workers, a process for each rank (on GPUs one
GPU each). *growth* is PREPARE sent to the last rank's COMMIT answer, without the zeroes, which a
worker enqueues with its next step;
*told to there* is levels posted to blocks handed out, with the arbiter and both threads' wake-ups
in it; *shrink* is blocks returned to bytes free on every rank, with the fence and the decay of
spare extents, here at once. With `--busy` another thread of every process runs Python nearly all
the time, as a scheduler and a model runner do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.colocated.arguments import size
from bench.colocated.event_plugin import held_extents
from bench.colocated.kvcached_path import KvcachedRanks
from bench.colocated.result import commit as commit_of_the_tree
from bench.colocated.result import hardware, versions
from bench.colocated.statistics import percentile
from kvadmit.agent import Agent
from kvadmit.config import Settings
from kvadmit.coordinator import Coordinator
from kvadmit.extents import from_runs, to_runs
from kvadmit.geometry import ExtentPlan, RankBuffer
from kvadmit.port import PoolLevels, PoolReturned, Resident
from kvadmit.units import MIB
from kvadmit.vmm import AddressSpace, ExtentLayout
from kvadmit.vmm_cuda import CudaAddressSpace, probe
from kvadmit.vmm_host import GRANULE_BYTES, HostAddressSpace, HostPool

LAYERS = 16
BLOCKS = 16
EXTENTS = 64
BATCHES = (1, 8)
ROUNDS = 100
LAYOUTS = {"block-outermost": 1, "layer-outermost": LAYERS}
CUDA_GRANULE_BYTES = 2 * MIB
EXTENT_BYTES = {"cuda": 64 * MIB, "host": MIB}
WAIT_S = 30.0
BUSY_S, REST_S = 0.010, 0.002
LOOK_S = 0.0001
"""How often a shrink is looked at: the resolution of its time."""


def main() -> int:
    """Measure, print a table, write the JSON."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--device", choices=("host", "cuda"), default="host")
    made.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    made.add_argument(
        "--extent",
        type=size,
        default=None,
        help="bytes on each rank; left out: 64MiB on GPUs, 1MiB on the host",
    )
    made.add_argument(
        "--kvcached",
        action="store_true",
        help="also kvcached's own path, where that is installed (GPUs only)",
    )
    made.add_argument("--busy", action="store_true", help="beside threads that run Python")
    made.add_argument("--rounds", type=int, default=ROUNDS)
    made.add_argument("--commit", default=None, help="the tree's commit, where git is not at hand")
    made.add_argument("--json", type=Path, default=None, metavar="FILE")
    options = made.parse_args()
    extent_bytes = options.extent or EXTENT_BYTES[options.device]
    named = hardware()
    if options.device == "cuda":
        found = probe(0)
        named |= {"device": found.name, "driver": found.driver_version, "mps": found.mps}
    if options.busy:
        keep_busy()
    rows = []
    print(f"{'layout':18}{'tp':>3}{'batch':>6}" + "".join(f"{name:>24}" for name in FIGURES))
    for layout in LAYOUTS:
        for ranks in options.tp:
            with Instance(
                options.device, ranks, layout, extent_bytes, busy=options.busy
            ) as instance:
                for batch in BATCHES:
                    row = {"layout": layout, "tp": ranks, "batch": batch}
                    rows.append(row | instance.measure(batch, options.rounds))
                    print(shown(rows[-1]), flush=True)
    for ranks in options.tp if options.kvcached else ():
        with KvcachedRanks(ranks, LAYERS, EXTENTS) as peer:
            for batch in BATCHES:
                row = {"layout": "kvcached", "tp": ranks, "batch": batch}
                rows.append(row | kvcached_figures(peer, batch, options.rounds))
                print(shown(rows[-1]), flush=True)
    result = {
        "schema": "kvadmit.control-path/1",
        "commit": options.commit or commit_of_the_tree(),
        "hardware": named,
        "versions": versions(),
        "extent_bytes": extent_bytes,
        "rounds": options.rounds,
        "busy": options.busy,
        "rows": rows,
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


FIGURES = ("growth p50/p99 us", "told to there p50/p99", "shrink p50/p99 us")
_KEYS = ("growth_us", "told_to_there_us", "shrink_us")


def shown(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    pairs = [f"{row[key]['p50']:,.0f} / {row[key]['p99']:,.0f}" for key in _KEYS]
    return f"{row['layout']:18}{row['tp']:>3}{row['batch']:>6}" + "".join(f"{p:>24}" for p in pairs)


def kvcached_figures(peer: KvcachedRanks, batch: int, rounds: int) -> dict[str, Any]:
    """Return the figures of kvcached's path; it hands out in the call that maps."""
    peer.cycle(batch)  # first calls of everything
    mapped, unmapped = zip(*(peer.cycle(batch) for _ in range(rounds)), strict=True)
    keys = dict(zip(_KEYS, (mapped, mapped, unmapped), strict=True))
    made = {k: {"p50": percentile(v, 50), "p99": percentile(v, 99)} for k, v in keys.items()}
    return made | {"page_bytes": peer.page_bytes}


class Instance:
    """One instance with idle ranks, and a pool that grows and shrinks on demand."""

    def __init__(
        self, device: str, ranks: int, layout: str, extent_bytes: int, *, busy: bool
    ) -> None:
        """Start nothing yet."""
        strips = LAYOUTS[layout]
        stride = extent_bytes // BLOCKS // strips
        devices = ["host"] * ranks
        if device == "cuda":
            devices = [probe(rank).uuid for rank in range(ranks)]
        granule = GRANULE_BYTES if device == "host" else CUDA_GRANULE_BYTES
        buffer = RankBuffer(device=device, granule_bytes=granule, strides=(stride,) * strips)
        self.plan = ExtentPlan(
            extent_blocks=BLOCKS,
            extents=EXTENTS,
            blocks=EXTENTS * BLOCKS,
            prefix=1,
            floor=1,
            cap=EXTENTS,
            layouts=(buffer.layout(EXTENTS, BLOCKS),) * ranks,
            extent_bytes={d: devices.count(d) * extent_bytes for d in devices},
        )
        self._woken = threading.Event()
        self._undo = contextlib.ExitStack()
        self._devices = devices
        self._ranks = ranks
        self._device = device
        self._busy = busy
        self._resident = {0}

    def __enter__(self) -> Instance:
        with contextlib.ExitStack() as undo:
            directory = undo.enter_context(tempfile.TemporaryDirectory(prefix="kvc-"))
            total = {d: 2 * EXTENTS * size for d, size in self.plan.extent_bytes.items()}
            settings = Settings.parse(
                {"run_dir": directory, "host_pool": max(total.values()), "idle_decay_s": 0.0}
            )
            cuda = self._device == "cuda"
            self.coordinator = Coordinator(
                settings,
                ranks=self._ranks,
                devices=self._devices,
                device_total_bytes=total,
                name="control-path",
                wake=self._woken.set,
                backend=self._device,
                read_device=(lambda device: (total[device], total[device])) if cuda else None,
            )
            self.coordinator.start()
            undo.callback(self.coordinator.stop)
            self.coordinator.request_start({})
            self.coordinator.set_geometry(self.plan)
            for rank in range(self._ranks):
                layout = self.plan.layouts[rank]
                undo.enter_context(worker(self.coordinator.runtime, rank, layout, self._busy))
            self.coordinator.wait_ready()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.coordinator.expect_end()
        self._undo.close()

    def measure(self, batch: int, rounds: int) -> dict[str, Any]:
        """Return p50 and p99 in microseconds over `rounds` growths and shrinks of `batch`."""
        self._cycle(batch)  # first calls of everything
        told, given, taken = [], [], []
        for _ in range(rounds):
            grown_us, told_us, shrunk_us = self._cycle(batch)
            given.append(grown_us)
            told.append(told_us)
            taken.append(shrunk_us)
        return {
            key: {"p50": percentile(values, 50), "p99": percentile(values, 99)}
            for key, values in zip(_KEYS, (given, told, taken), strict=True)
        }

    def _cycle(self, batch: int) -> tuple[float, float, float]:
        port = self.coordinator.port
        wanted = len(self._resident) + batch
        began_s = time.perf_counter()
        port.post(PoolLevels(resident=1, need_total=wanted, want_total=wanted, running=1))
        grown: set[int] = set()
        took_s = 0.0
        while len(grown) < batch:
            for order in self._orders():
                grown |= set(from_runs(order.extents))
                took_s += order.took_s
        told_s = time.perf_counter() - began_s
        held = held_extents(self.coordinator)
        began_s = time.perf_counter()
        port.post(PoolLevels(resident=1, running=1))
        port.post(PoolReturned(to_runs(sorted(grown)), fence=0))
        wait_until(lambda: held_extents(self.coordinator) <= held - batch)
        return took_s * 1e6, told_s * 1e6, (time.perf_counter() - began_s) * 1e6

    def _orders(self) -> Iterator[Resident]:
        if not self._woken.wait(WAIT_S):
            raise SystemExit(f"no growth within {WAIT_S:.0f} s: {self.coordinator.status()}")
        self._woken.clear()
        for order in self.coordinator.port.take():
            if isinstance(order, Resident):
                yield order


def wait_until(done: Callable[[], bool]) -> None:
    """Look again and again, bounded."""
    deadline_s = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"no shrink within {WAIT_S:.0f} s")
        time.sleep(LOOK_S)


def keep_busy() -> None:
    """Start a thread that runs Python for 10 ms at a time, with short rests, until the end."""

    def work() -> None:
        while True:
            rest_s = time.perf_counter() + BUSY_S
            while time.perf_counter() < rest_s:
                pass
            time.sleep(REST_S)

    threading.Thread(target=work, daemon=True).start()


# --- a rank ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def worker(
    runtime: dict[str, object], rank: int, layout: ExtentLayout, busy: bool
) -> Iterator[None]:
    """Run one rank as a process until the block ends."""
    order = {
        "runtime": runtime,
        "rank": rank,
        "layout": msgspec.to_builtins(layout),
        "busy": busy,
    }
    command = [sys.executable, __file__, "--rank", json.dumps(order)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode:
            print(f"rank {rank} ended with {process.returncode}", file=sys.stderr)


def serve_rank(text: str) -> int:
    """Own one rank's memory until stdin ends."""
    order = json.loads(text)
    runtime, rank = order["runtime"], order["rank"]
    layout = msgspec.convert(order["layout"], ExtentLayout)
    if order["busy"]:
        keep_busy()
    with contextlib.ExitStack() as undo:
        space: AddressSpace
        wait = None
        if runtime["backend"] == "cuda":
            space = cuda = CudaAddressSpace(layout, ordinal=rank)
            wait = cuda.wait_device
        else:
            pool = HostPool(runtime["host_pool_path"], runtime["host_pool"])
            undo.callback(pool.close)
            space = HostAddressSpace(layout, device="host", pool=pool)
        undo.callback(space.close)
        for result in (space.prepare([0]), space.commit([0])):
            if result.error is not None:
                raise result.error
        agent = Agent(runtime, rank=rank, space=space, prefix=1, device_wait=wait)
        agent.start()
        undo.callback(agent.stop)
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(serve_rank(sys.argv[2]) if sys.argv[1:2] == ["--rank"] else main())

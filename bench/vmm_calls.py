#!/usr/bin/env python3
"""Measure what growth and shrink cost one rank, without any message: the driver calls alone.

    python bench/vmm_calls.py [--device cuda|host] [--json FILE]

For each layout (block-outermost: one run of bytes per extent; layer-outermost: one per layer) and
batch size: prepare, commit, zero (idle only; with the wait for it) and decommit, per extent: idle,
beside running kernels, and beside a thread whose launches wait for room in the driver's queue all
the time. With kernels, how much slower those become is measured as well. Before that, what a start
pays for: making a reservation with nothing behind it, and vLLM's object for each of its blocks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.colocated.arguments import size
from bench.colocated.result import commit as commit_of_the_tree
from bench.colocated.result import hardware, versions
from bench.colocated.statistics import percentile
from kvadmit.geometry import RankBuffer
from kvadmit.units import MIB, format_bytes
from kvadmit.vmm_cuda import CudaAddressSpace
from kvadmit.vmm_host import GRANULE_BYTES, HostAddressSpace, HostPool

LAYERS = 32
BLOCKS = 16
EXTENTS = 64
RESERVED = 2048
"""Extents of the reservation that a start is timed with: 128 GiB by default."""
BATCHES = (1, 8, 32)
ROUNDS = 60
LAYOUTS = {"block-outermost": 1, "layer-outermost": LAYERS}
LOAD_S = 2.0
CALLS = ("prepare", "commit", "zero", "decommit")
CUDA_GRANULE_BYTES = 2 * MIB


def main() -> int:
    """Measure, print a table, write the JSON."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--device", choices=("cuda", "host"), default="cuda")
    made.add_argument("--extent", type=size, default=64 * MIB, help="bytes of an extent")
    made.add_argument("--commit", default=None, help="the tree's commit, where git is not at hand")
    made.add_argument("--json", type=Path, default=None, metavar="FILE")
    options = made.parse_args()
    rows: list[dict[str, Any]] = []
    named = hardware()
    start = {"reservation": reservation(options.device, options.extent), **block_objects()}
    for name, strips in LAYOUTS.items():
        with open_space(options.device, options.extent, strips) as (space, described):
            named |= described
            rows += rows_of(space, name, beside_kernels=options.device == "cuda")
    result = {
        "schema": "kvadmit.vmm-calls/1",
        "commit": options.commit or commit_of_the_tree(),
        "hardware": named,
        "versions": versions(),
        "extent_bytes": options.extent,
        "rounds": ROUNDS,
        "start": start,
        "rows": rows,
    }
    show(result)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def reservation(device: str, extent_bytes: int) -> dict[str, Any]:
    """Return what it takes to make and to give back a space of RESERVED extents, in ms."""
    took: list[float] = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        with open_space(device, extent_bytes, 1, RESERVED):
            took.append((time.perf_counter() - began) * 1e3)
    spread = {"p50": percentile(took, 50), "p99": percentile(took, 99)}
    return {"bytes": RESERVED * extent_bytes, "made_ms": spread}


def block_objects() -> dict[str, Any]:
    """Return how long vLLM takes to make its block objects, in ms; nothing without vLLM."""
    try:
        from vllm.v1.core.block_pool import BlockPool
    except ImportError:
        return {}
    began = time.perf_counter()
    BlockPool(RESERVED * BLOCKS, enable_caching=True, hash_block_size=BLOCKS)
    took_ms = (time.perf_counter() - began) * 1e3
    return {"block_objects": {"count": RESERVED * BLOCKS, "made_ms": took_ms}}


@contextmanager
def open_space(
    device: str, extent_bytes: int, strips: int, extents: int = EXTENTS
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Make a space; yields it and what it is on."""
    stride = extent_bytes // BLOCKS // strips
    granule = GRANULE_BYTES if device == "host" else CUDA_GRANULE_BYTES
    buffer = RankBuffer(device=device, granule_bytes=granule, strides=(stride,) * strips)
    layout = buffer.layout(extents, BLOCKS)
    if device == "host":
        with tempfile.TemporaryDirectory() as directory:
            pool = HostPool(Path(directory) / "pool", 2 * EXTENTS * extent_bytes)
            with closing(pool), closing(HostAddressSpace(layout, device="host", pool=pool)) as host:
                yield host, {}
        return
    import torch

    torch.cuda.init()
    with closing(CudaAddressSpace(layout, ordinal=0)) as space:
        found = space.described
        yield space, {"device": found.name, "driver": found.driver_version, "mps": found.mps}


def rows_of(space: Any, layout: str, *, beside_kernels: bool) -> list[dict[str, Any]]:
    """Return the figures of every batch size, beside nothing and, if so, beside kernels."""
    rows = [
        {"layout": layout, "beside": "nothing", **figures(space, batch, zero=True)}
        for batch in BATCHES
    ]
    if not beside_kernels:
        return rows
    for beside in ("kernels", "full queue"):
        with running_kernels(space, waiting=beside == "kernels") as loops:
            alone = rate(loops)
            for batch in BATCHES:
                began = loops(), time.perf_counter()
                row = {"layout": layout, "beside": beside, **figures(space, batch, zero=False)}
                left = (loops() - began[0]) / (time.perf_counter() - began[1])
                rows.append(row | {"kernel_rate_left": left / alone})
    return rows


def figures(space: Any, batch: int, *, zero: bool) -> dict[str, Any]:
    """Return microseconds per extent of each call, p50 and p99 over ROUNDS batches."""
    extents = list(range(1, 2 * batch, 2))
    zero &= hasattr(space, "wait_device")  # pages of the host come zeroed from the kernel
    calls = ("prepare", "commit", *(["zero"] if zero else []), "decommit")
    taken: dict[str, list[float]] = {call: [] for call in calls}
    for _ in range(ROUNDS):
        for call, seen in taken.items():
            began = time.perf_counter()
            if call == "zero":
                space.zero_fresh(0)
                space.wait_device()
            else:
                result = getattr(space, call)(extents)
                if result.error is not None:
                    raise result.error
            seen.append((time.perf_counter() - began) * 1e6 / batch)
    found: dict[str, Any] = {"batch": batch}
    for call, seen in taken.items():
        found[f"{call}_us"] = {"p50": percentile(seen, 50), "p99": percentile(seen, 99)}
    return found


@contextmanager
def running_kernels(space: Any, *, waiting: bool) -> Iterator[Callable[[], int]]:
    """Keep kernels running on every other extent; yields how many loops they made so far.

    Those of a loop are waited for if `waiting`; else they are enqueued as fast as the driver takes
    them, which is as fast as the GPU runs them once its queue is full.
    """
    import torch

    even = list(range(0, EXTENTS, 2))
    space.prepare(even)
    space.commit(even)
    space.zero_fresh(0)
    space.wait_device()
    tensor = torch.utils.dlpack.from_dlpack(space.dlpack())
    parts = [
        tensor[offset : offset + length].view(torch.int32)
        for extent in even
        for offset, length in space.layout.runs(extent)
    ]
    stop, made = threading.Event(), [0]

    def loop() -> None:
        while not stop.is_set():
            torch._foreach_add_(parts, 1)  # one call, so that this thread seldom has the GIL
            if waiting:
                torch.cuda.current_stream().synchronize()
            made[0] += 1

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield lambda: made[0]
    finally:
        stop.set()
        thread.join()
        torch.cuda.synchronize()
        wrong = sum(int((part != made[0]).sum()) for part in parts)
        if wrong:
            raise RuntimeError(f"{wrong} words differ from what the kernels wrote")
        space.wait_device()
        space.decommit(even)


def rate(loops: Callable[[], int]) -> float:
    """Return loops per second of kernels that nothing runs beside."""
    began, at = loops(), time.perf_counter()
    time.sleep(LOAD_S)
    return (loops() - began) / (time.perf_counter() - at)


def show(result: dict[str, Any]) -> None:
    """Print a table."""
    named = result["hardware"]
    start = result["start"]
    made = start["reservation"]
    print(
        f"{named['device']}, reservation of {format_bytes(made['bytes'])}: "
        f"{made['made_ms']['p50']:.1f} / {made['made_ms']['p99']:.1f} ms"
    )
    if "block_objects" in start:
        objects = start["block_objects"]
        print(f"vLLM's {objects['count']:,} block objects: {objects['made_ms']:.0f} ms")
    print(f"extents of {result['extent_bytes'] // MIB} MiB, us per extent")
    print(f"{'layout':<17}{'beside':<12}{'batch':>5}", end="")
    print("".join(f"{call + ' p50/p99':>20}" for call in CALLS), end="")
    print("   kernels' rate")
    for row in result["rows"]:
        print(f"{row['layout']:<17}{row['beside']:<12}{row['batch']:>5}", end="")
        for call in CALLS:
            spread = row.get(f"{call}_us")
            print(f"{spread['p50']:>12.1f} /{spread['p99']:>6.1f}" if spread else " " * 20, end="")
        left = row.get("kernel_rate_left")
        print("" if left is None else f"{left:>12.2f} x")


if __name__ == "__main__":
    sys.exit(main())

"""Measure what the pool costs the scheduler thread: per block moved, and per step.

    python tools/measure_pool.py [--json]

Best of many repeats in a loop, so caches are warm: a floor, not what a busy engine sees. An
engine's own figure is `scheduler_wait_us` in `EngineCore.kvadmit_status`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable

from kvadmit.admission import Admission
from kvadmit.pool import ElasticPool
from kvadmit.port import PoolPort

EXTENT_BLOCKS = 64
EXTENTS = 2048
BATCH = 256
REPEATS = 200


class Block:
    """What the pool reads of vLLM's block."""

    __slots__ = ("block_hash", "block_id")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.block_hash: object = None


def best_ns(act: Callable[[], object], repeats: int = REPEATS) -> int:
    """Return the shortest time of `act` in nanoseconds."""
    best = 1 << 62
    for _ in range(repeats):
        began = time.perf_counter_ns()
        act()
        best = min(best, time.perf_counter_ns() - began)
    return best


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    blocks = [Block(number) for number in range(EXTENTS * EXTENT_BLOCKS)]
    pool: ElasticPool[Block] = ElasticPool(blocks, EXTENT_BLOCKS, lambda _: None, EXTENTS)
    queue = pool.queue
    figures: dict[str, float] = {}

    def per_block(name: str, act: Callable[[], object], moves: int = BATCH) -> None:
        figures[f"{name}_ns_per_block"] = round(best_ns(act) / moves, 1)

    per_block("take_and_free_a_run", lambda: queue.prepend_n(queue.popleft_n(BATCH)), 2 * BATCH)
    per_block("take_and_cache_a_run", lambda: queue.append_n(queue.popleft_n(BATCH)), 2 * BATCH)
    scattered = queue.popleft_n(queue.num_free_blocks // 2)
    random.Random(0).shuffle(scattered)

    def free_scattered() -> None:
        queue.prepend_n([scattered.pop() for _ in range(BATCH)])
        scattered.extend(queue.popleft_n(BATCH))

    per_block("take_and_free_scattered", free_scattered, 2 * BATCH)
    queue.prepend_n(scattered)

    def withdraw_and_grow() -> None:
        pool.grow(pool.withdraw(pool.resident - BATCH // EXTENT_BLOCKS))

    per_block("withdraw_and_grow", withdraw_and_grow, 2 * BATCH)
    port = PoolPort(wake_pool=lambda: None, wake_coordinator=lambda: None)
    admission = Admission(pool, port, ceiling=EXTENTS)

    def step() -> None:
        if port.limit != admission.limit:
            admission.heed_limit()
        if admission.orders or pool.queue.frees > admission.give_after:
            admission.drain(1.0)
        admission.publish(1.0, running=64, waiting=0, missing=0, low=EXTENT_BLOCKS)

    def hundred_steps() -> None:
        for _ in range(100):
            step()

    figures["step_without_change_ns"] = best_ns(hundred_steps) / 100
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        for name, figure in figures.items():
            print(f"{name.removesuffix('_ns_per_block'):<28}{figure:>8.0f} ns")


if __name__ == "__main__":
    main()

"""Zeroes for new memory, over the real CUDA path: coordinator, arbiter, agent, C extension.

The driver is the fake one. It runs what was enqueued when it is waited for, and remembers for good
when that met an address that was not open then, as a GPU does.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

from fake_cuda import GRANULE_BYTES, FakeCuda, build
from integration.cluster import POOL_EXTENTS, Engine, make_plan, running
from kvadmit.vmm_cuda import CudaAddressSpace
from kvadmit.vmm_host import GRANULE_BYTES as HOST_GRANULE_BYTES

ROUNDS = 100


def test_zeroes_never_meet_memory_that_left_whenever_steps_begin(
    run_dir: Path, tmp_path: Path
) -> None:
    fake = FakeCuda(build(tmp_path))
    total_bytes = POOL_EXTENTS * GRANULE_BYTES
    fake.use_budget(tmp_path / "budget", total_bytes)
    made: list[CudaAddressSpace] = []

    def on_cuda(host: Any) -> CudaAddressSpace:
        space = CudaAddressSpace(host.layout, ordinal=0, library=fake.path)
        space.device = host.device
        space.prepare([0])
        space.commit([0])
        made.append(space)
        return space

    stop, draw = threading.Event(), random.Random(3)

    def steps() -> None:
        """Begin steps as an engine's thread does, at any moment."""
        while not stop.is_set():
            if made and made[0].has_fresh:
                made[0].zero_fresh(0)
            time.sleep(draw.random() * 2e-3)

    engine = Engine(
        run_dir,
        "alpha",
        plan=make_plan(pages=GRANULE_BYTES // HOST_GRANULE_BYTES),
        agent={"wrap": on_cuda, "device_wait": lambda: made[0].wait_device()},
        idle_decay_s=0,
        host_pool=total_bytes,
    )
    thread = threading.Thread(target=steps)
    thread.start()
    try:
        with running(engine):
            for _ in range(ROUNDS):
                wanted = draw.randint(2, POOL_EXTENTS)
                engine.pool.limit = POOL_EXTENTS
                engine.pool.use(wanted)
                engine.pool.wait_resident(wanted)
                engine.pool.limit = 1  # at once, where an idle one waits a second
                engine.pool.rest()
                engine.wait_held(1)
            assert fake.made("cuMemsetD8Async") > ROUNDS / 2
            assert fake.live("mappings") == 1
    finally:
        stop.set()
        thread.join()
        for space in made:
            space.wait_device()  # raises when a zero met an address that was not open
            space.close()
        fake.drop_budget()

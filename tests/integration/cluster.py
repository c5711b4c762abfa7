"""What the integration tests stand on: instances with scripted pools on the host backend.

An `Engine` is one instance: a coordinator, its ranks' agents on real host memory, and a
pool that does as a script says. In this process all its ranks are threads; as a process of
its own it is `python -m integration.cluster` (see `engine_process`).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvadmit.agent import Agent
from kvadmit.config import Settings
from kvadmit.coordinator import Coordinator
from kvadmit.extents import from_runs, to_runs
from kvadmit.geometry import ExtentPlan
from kvadmit.port import Ceiling, Limit, PoolLevels, PoolReturned, Resident
from kvadmit.vmm import ExtentLayout, Strip
from kvadmit.vmm_host import GRANULE_BYTES, HostAddressSpace, HostPool

WAIT_S = 20.0
DEVICE = "host"
HOST_POOL = 64 * GRANULE_BYTES


class ScriptedPool:
    """The pool's side of the port, on a thread of its own: need goes up and down on demand.

    Extents it was given are used from the lowest number; those above `used` are free.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.resident: set[int] = set()
        self.limit = 1 << 30
        self.ceiling = 0
        self.used = 0
        self.wanted = 0
        self.cached = 0
        self.step = 1
        self.on_step: Callable[[int], None] = lambda step: None
        self._woken = threading.Event()
        self._stopping = False
        self._coordinator: Coordinator | None = None
        self._thread = threading.Thread(target=self._run, name="scripted-pool", daemon=True)

    def wake(self) -> None:
        self._woken.set()

    def start(self, coordinator: Coordinator, prefix: int) -> None:
        self._coordinator = coordinator
        self.resident = set(range(prefix))
        self.used = prefix
        self._thread.start()

    def stop(self) -> None:
        if self._thread.ident is not None:
            self._stopping = True
            self._woken.set()
            self._thread.join(WAIT_S)

    def use(self, extents: int, *, cached: int = 0) -> None:
        """Need `extents` in all for running requests; of the rest keep `cached` as prefixes."""
        self.used, self.wanted, self.cached = extents, extents, cached
        self._woken.set()

    def rest(self, *, cached: int = 0) -> None:
        """Have no requests: all but extent 0 is free, `cached` of it holds prefixes."""
        self.use(1, cached=cached)

    def wait_resident(self, extents: int, wait_s: float = WAIT_S) -> None:
        """Wait until at least `extents` are resident."""
        self.wait_for(lambda: len(self.resident) >= extents, f"{extents} resident", wait_s)

    def wait_for(self, condition: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
        with self.changed:
            if not self.changed.wait_for(condition, wait_s):
                status = "" if self._coordinator is None else json.dumps(
                    self._coordinator.status(), indent=1
                )
                raise AssertionError(
                    f"not within {wait_s} s: {what}; resident {len(self.resident)}, "
                    f"used {self.used}, limit {self.limit}\n{status}"
                )

    def _run(self) -> None:
        assert self._coordinator is not None
        port = self._coordinator.port
        while not self._stopping:
            self._woken.clear()
            for order in port.take():
                match order:
                    case Resident():
                        self.resident.update(from_runs(order.extents))
                    case Limit():
                        self.limit = order.extents
                    case Ceiling():
                        self.ceiling = order.extents
            over = len(self.resident) - max(self.limit, self.used, 1)
            if over > 0:
                gone = sorted(self.resident)[-over:]
                self.resident.difference_update(gone)
                self.step += 1
                port.post(PoolReturned(to_runs(gone), fence=self.step))
                self.on_step(self.step)
            idle = max(0, len(self.resident) - self.used)
            cached = min(self.cached, idle)
            busy = self.used > 1
            port.post(
                PoolLevels(
                    resident=len(self.resident),
                    need_total=self.wanted if busy else 0,
                    want_total=self.wanted if busy else 0,
                    free=idle - cached,
                    cached=cached,
                    running=int(busy),
                )
            )
            with self.changed:
                self.changed.notify_all()
            self._woken.wait()


def make_plan(
    *, ranks: int = 1, extents: int = 64, prefix: int = 1, floor: int = 1, pages: int = 1
) -> ExtentPlan:
    """Return a plan in which an extent is one block of `pages` granules on every rank."""
    stride = pages * GRANULE_BYTES
    layout = ExtentLayout(extents * stride, extents, 1, (Strip(0, stride),))
    return ExtentPlan(
        extent_blocks=1,
        extents=extents,
        blocks=extents,
        prefix=prefix,
        floor=floor,
        cap=extents,
        layouts=(layout,) * ranks,
        extent_bytes={DEVICE: ranks * stride},
    )


def make_settings(run_dir: Path | str, **more: Any) -> Settings:
    values = {
        "run_dir": str(run_dir),
        "host_pool": HOST_POOL,
        "idle_decay_s": 0.2,
        "start_wait_s": 20.0,
        "reclaim_s": 2.0,
    }
    return Settings.parse(values | more)


class Rank:
    """One rank in this process: its memory and its agent."""

    def __init__(
        self, runtime: dict[str, object], rank: int, plan: ExtentPlan, **agent: Any
    ) -> None:
        self.pool = HostPool(str(runtime["host_pool_path"]), int(str(runtime["host_pool"])))
        self.space = HostAddressSpace(plan.layouts[rank], device=DEVICE, pool=self.pool)
        prefix = range(plan.prefix)
        for result in (self.space.prepare(prefix), self.space.commit(prefix)):
            if result.error is not None:
                raise result.error
        self.agent = Agent(runtime, rank=rank, space=self.space, prefix=plan.prefix, **agent)

    def close(self) -> None:
        self.agent.stop()
        self.space.close()
        self.pool.close()


class Engine:
    """One instance with all its ranks as threads of this process."""

    def __init__(
        self,
        run_dir: Path | str,
        name: str,
        *,
        ranks: int = 1,
        plan: ExtentPlan | None = None,
        agent: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.name = name
        self.plan = plan or make_plan(ranks=ranks)
        self.pool = ScriptedPool()
        self.lost = threading.Event()
        self.lost_reason = ""
        self.ranks: list[Rank] = []
        self._agent = agent or {}
        self.coordinator = Coordinator(
            make_settings(run_dir, **settings),
            ranks=ranks,
            devices=[DEVICE] * ranks,
            device_total_bytes={DEVICE: HOST_POOL},
            name=name,
            wake=self.pool.wake,
            on_engine_lost=self._on_lost,
        )

    def _on_lost(self, reason: str) -> None:
        self.lost_reason = reason
        self.lost.set()

    def start(self, start_bytes: dict[str, int] | None = None) -> Engine:
        try:
            self.coordinator.start()
            self.coordinator.request_start(start_bytes or {})
            self.coordinator.set_geometry(self.plan)
            for rank in range(len(self.plan.layouts)):
                self.ranks.append(Rank(self.coordinator.runtime, rank, self.plan, **self._agent))
                self.ranks[-1].agent.start()
            self.pool.on_step = self._publish
            self.coordinator.wait_ready()
            self.pool.start(self.coordinator, self.plan.prefix)
        except BaseException:
            self.stop()
            raise
        return self

    def _publish(self, step: int) -> None:
        for rank in self.ranks:
            rank.agent.publish_enqueued(step)

    def stop(self) -> None:
        self.pool.stop()
        # In this order in an engine too: a rank that ends first would be taken for lost.
        self.coordinator.stop()
        for rank in self.ranks:
            rank.close()
        self.ranks.clear()

    @property
    def group(self) -> dict[str, Any]:
        group: Any = self.coordinator.status()["group"]
        return dict(group)

    @property
    def held(self) -> int:
        return int(self.group["held"])

    def wait_status(
        self, condition: Callable[[dict[str, Any]], bool], what: str, wait_s: float = WAIT_S
    ) -> None:
        """Wait until the coordinator's status fits; it signals nothing, so it is asked."""
        wait_until(lambda: condition(dict(self.coordinator.status())), what, wait_s)


def wait_until(condition: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
    """Wait, bounded, for a state of another process that no event of ours announces."""
    deadline = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {wait_s} s: {what}")
        time.sleep(0.01)


@contextlib.contextmanager
def running(*engines: Engine) -> Iterator[None]:
    """Start engines one after the other; stop them all, the newest first."""
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        yield

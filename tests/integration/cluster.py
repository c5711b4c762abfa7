"""What the integration tests stand on: instances with scripted pools on the host backend.

An `Engine` is one instance: a coordinator, its ranks' agents on real host memory, and a
pool that does as a script says. Its ranks are threads of this process or, where the test
kills or stops them, processes (`WorkerProcess`); `EngineProcess` is a whole instance as a
process. Both run `python -m integration.cluster`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from integration.failpoints import FAILING_RANK, Failpoint, arm_agent, arm_coordinator
from kvadmit.agent import Agent
from kvadmit.config import Settings
from kvadmit.coordinator import Coordinator
from kvadmit.extents import from_runs, to_runs
from kvadmit.geometry import ExtentPlan
from kvadmit.port import NO_LIMIT, Ceiling, PoolLevels, PoolReturned, Resident
from kvadmit.rundir import ArbiterLock, RunDir
from kvadmit.vmm import ExtentLayout, Strip
from kvadmit.vmm_host import GRANULE_BYTES, HostAddressSpace, HostPool

WAIT_S = 30.0
"""Bound of every wait; far above what a loaded machine needs."""
DEVICE = "host"
POOL_EXTENTS = 64
HOST_POOL = POOL_EXTENTS * GRANULE_BYTES
TESTS = Path(__file__).parents[1]
os.environ["KVADMIT_CHECK"] = "1"


class ScriptedPool:
    """The pool's side of the port, on a thread of its own: need goes up and down on demand.

    Extents it was given are used from the lowest number; those above `used` are free.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.resident: set[int] = set()
        self.limit = NO_LIMIT
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
                status = (
                    ""
                    if self._coordinator is None
                    else json.dumps(self._coordinator.status(), indent=1)
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
                    case Ceiling():
                        self.ceiling = order.extents
            over = len(self.resident) - max(min(self.limit, port.limit), self.used, 1)
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
        wrap = agent.pop("wrap", lambda space: space)
        with contextlib.ExitStack() as undo:
            self.pool = HostPool(str(runtime["host_pool_path"]), int(str(runtime["host_pool"])))
            undo.callback(self.pool.close)
            self.space = HostAddressSpace(plan.layouts[rank], device=DEVICE, pool=self.pool)
            undo.callback(self.space.close)
            prefix = range(plan.prefix)
            for result in (self.space.prepare(prefix), self.space.commit(prefix)):
                if result.error is not None:
                    raise result.error
            space = wrap(self.space)
            self.agent = Agent(runtime, rank=rank, space=space, prefix=plan.prefix, **agent)
            self.agent.start()
            undo.pop_all()

    def publish(self, step: int) -> None:
        self.agent.publish_enqueued(step)

    def close(self) -> None:
        self.agent.stop()
        self.space.close()
        self.pool.close()


class Engine:
    """One instance. `agent`: more arguments for every agent; `processes`: ranks are such."""

    def __init__(
        self,
        run_dir: Path | str,
        name: str,
        *,
        ranks: int = 1,
        plan: ExtentPlan | None = None,
        agent: dict[str, Any] | None = None,
        processes: bool = False,
        **settings: Any,
    ) -> None:
        self.name = name
        self.plan = plan or make_plan(ranks=ranks)
        self.pool = ScriptedPool()
        self.lost = threading.Event()
        self.lost_reason = ""
        self.ranks: list[Any] = []
        self._agent = agent or {}
        self._processes = processes
        ranks = len(self.plan.layouts)
        checked = make_settings(run_dir, **settings)
        self.coordinator = Coordinator(
            checked,
            ranks=ranks,
            devices=[DEVICE] * ranks,
            device_total_bytes={DEVICE: checked.host_pool},
            name=name,
            wake=self.pool.wake,
            on_engine_lost=self._on_lost,
        )

    def _on_lost(self, reason: str) -> None:
        self.lost_reason = reason
        self.lost.set()

    def greet(self, start_bytes: dict[str, int] | None = None) -> None:
        """Take the first steps of a start: everything before the ranks."""
        self.coordinator.start()
        self.coordinator.request_start(start_bytes or {})
        self.coordinator.set_geometry(self.plan)

    def start(self, start_bytes: dict[str, int] | None = None) -> Engine:
        try:
            self.greet(start_bytes)
            for rank in range(len(self.plan.layouts)):
                self.add_rank(rank)
            self.coordinator.wait_ready()
            self.pool.start(self.coordinator, self.plan.prefix)
        except BaseException:
            self.stop()
            raise
        return self

    def add_rank(self, rank: int) -> None:
        make = WorkerProcess if self._processes else Rank
        self.ranks.append(make(self.coordinator.runtime, rank, self.plan, **self._agent))
        self.pool.on_step = self._publish

    def _publish(self, step: int) -> None:
        for rank in self.ranks:
            rank.publish(step)

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

    @property
    def counters(self) -> dict[str, int]:
        return dict(self.group["counters"])

    def wait_held(self, extents: int, wait_s: float = WAIT_S) -> None:
        """Wait until exactly `extents` are held."""
        wait_until(lambda: self.held == extents, f"{self.name} holds {extents}", wait_s)


def wait_until(condition: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
    """Wait, bounded, for a state of another thread or process that no event announces."""
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


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """Make a run directory with a short path; end its arbiter and remove it afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="kva-"))
    path = directory / "run"
    try:
        yield path
        if path.exists():
            end_arbiter(path)
    finally:
        shutil.rmtree(directory)


def arbiter_pid(run_dir: Path) -> int:
    """Return the arbiter's pid; 0 if none holds the lock."""
    lock = ArbiterLock(RunDir.open(str(run_dir)))
    if lock.try_acquire():
        lock.release()
        return 0
    return lock.holder()


def end_arbiter(run_dir: Path) -> None:
    """End the arbiter, if any, and wait until it is gone."""
    pid = arbiter_pid(run_dir)
    if not pid:
        return
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            assert wait_ended(descriptor), f"arbiter {pid} does not end"
        finally:
            os.close(descriptor)


def wait_ended(descriptor: int, wait_s: float = WAIT_S) -> bool:
    """Wait for the end of the process behind a pidfd, child or not."""
    return bool(select.select([descriptor], [], [], wait_s)[0])


# --- instances and ranks as processes ----------------------------------------------------------


class _Process:
    """A child that takes lines of JSON and answers each with one."""

    def __init__(self, role: str, first: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "integration.cluster", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        self.first = self.ask(first)

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self.tell(message)
        return self.hear(f"no answer to {message}")

    def hear(self, otherwise: str) -> dict[str, Any]:
        """Return the next answer; fails with `otherwise` if none comes."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], WAIT_S)[0], otherwise
        line = self.process.stdout.readline()
        assert line, f"{self.process.args!r} ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return dict(answer)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def close(self) -> None:
        """Let the child end by itself; idempotent."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            self.process.wait(WAIT_S)


class WorkerProcess(_Process):
    """One rank as a process."""

    def __init__(
        self,
        runtime: dict[str, object],
        rank: int,
        plan: ExtentPlan,
        *,
        failpoint: Failpoint | None = None,
    ) -> None:
        first = {"runtime": runtime, "rank": rank, "plan": msgspec.to_builtins(plan)}
        if rank == FAILING_RANK:
            first["failpoint"] = msgspec.to_builtins(failpoint)
        super().__init__("worker", first)

    def publish(self, step: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed; the test knows
            self.tell({"step": step})


class EngineProcess(_Process):
    """A whole instance as a process; `without_ranks`: it only waits for them."""

    def __init__(
        self,
        run_dir: Path | str,
        name: str,
        *,
        without_ranks: bool = False,
        failpoint: Failpoint | None = None,
        **settings: Any,
    ) -> None:
        order = engine_order(run_dir, name, settings, without_ranks)
        super().__init__("engine", order | {"failpoint": msgspec.to_builtins(failpoint)})

    def use(self, extents: int, *, cached: int = 0) -> None:
        self.ask({"use": extents, "cached": cached})

    def wait_resident(self, extents: int) -> None:
        self.ask({"wait_resident": extents})

    @property
    def status(self) -> dict[str, Any]:
        return self.ask({"status": True})


FRONT_END = """
import json, subprocess, sys
command = json.loads(sys.argv[1])
child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for line in sys.argv[2:]:
    child.stdin.write(line.encode() + b"\\n")
child.stdin.flush()
assert json.loads(child.stdout.readline())["runtime"]
print(child.pid, flush=True)
sys.stdin.read()
"""


class FrontEnd:
    """A process with an engine as its child, which ends when this one is killed.

    `first` and `orders`: the lines that the engine reads; nobody waits for their answers.
    """

    def __init__(self, first: dict[str, Any], *orders: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "integration.cluster", "engine"]
        lines = [command, first | {"watch_parent": True}, *orders]
        self.process = subprocess.Popen(
            [sys.executable, "-c", FRONT_END, *map(json.dumps, lines)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        try:
            assert self.process.stdout is not None
            self._descriptor = os.pidfd_open(int(self.process.stdout.readline()))
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def engine_ends(self, wait_s: float) -> bool:
        """Whether the engine's process ends within `wait_s`."""
        return wait_ended(self._descriptor, wait_s)

    def __enter__(self) -> FrontEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        os.close(self._descriptor)


def engine_order(
    run_dir: Path | str,
    name: str,
    settings: dict[str, Any] | None = None,
    without_ranks: bool = False,
) -> dict[str, Any]:
    """Return the first line that `python -m integration.cluster engine` reads."""
    return {
        "run_dir": str(run_dir),
        "name": name,
        "plan": msgspec.to_builtins(make_plan()),
        "settings": settings or {},
        "without_ranks": without_ranks,
    }


def child_environment() -> dict[str, str]:
    """Return the environment in which `python -m integration.cluster` finds everything."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _answer(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201


def _serve_worker() -> None:
    first = json.loads(sys.stdin.readline())
    plan = msgspec.convert(first["plan"], ExtentPlan)
    rank = Rank(first["runtime"], first["rank"], plan)
    if first.get("failpoint"):
        arm_agent(rank.agent, msgspec.convert(first["failpoint"], Failpoint))
    _answer({"pid": os.getpid()})
    for line in sys.stdin:
        rank.publish(json.loads(line)["step"])
    rank.close()


def _serve_engine() -> None:
    first = json.loads(sys.stdin.readline())
    plan = msgspec.convert(first["plan"], ExtentPlan)
    engine = Engine(first["run_dir"], first["name"], plan=plan, **first["settings"])
    if first.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if first.get("without_ranks"):
        engine.greet()
    else:
        engine.start()
    if first.get("failpoint"):
        arm_coordinator(engine.coordinator, msgspec.convert(first["failpoint"], Failpoint))
    if first.get("watch_parent"):
        engine.coordinator.watch_parent(os.getppid())
    _answer({"runtime": engine.coordinator.runtime})
    if first.get("deaf"):
        signal.pause()  # also to the end of its input
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if "use" in order:
                engine.pool.use(order["use"], cached=order["cached"])
            if "wait_resident" in order:
                engine.pool.wait_resident(order["wait_resident"])
            _answer(engine.coordinator.status() if "status" in order else {})
        except AssertionError as error:
            _answer({"error": str(error)})
    engine.stop()


if __name__ == "__main__":
    {"worker": _serve_worker, "engine": _serve_engine}[sys.argv[1]]()

"""A simulated engine: everything of an instance but the model.

Owns: the engine's scheduler thread, its worker processes and the timing of a step. Must not
know: what the policies do (`sim_memory`). Coordinator, agents, arbiter, sockets and memory
are real; a step takes as long as `step_s` says instead of computing anything. Wherever its
figures appear they are marked as simulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from bench.colocated import sim_worker, status
from bench.colocated.channel import Ready
from bench.colocated.outcome import Counted, Level
from bench.colocated.sim_memory import EventMemory, FixedMemory, SimMemory, SyncMemory
from bench.colocated.sim_requests import SimRequest, SimScheduler, Step
from bench.colocated.sync_policy.caller import Caller
from kvadmit.config import Settings
from kvadmit.coordinator import Coordinator
from kvadmit.geometry import ExtentPlan, RankBuffer, plan_extents
from kvadmit.units import KIB, ceil_div
from kvadmit.vmm_host import GRANULE_BYTES

DEVICE = "host"
BLOCK_BYTES = 128 * KIB
"""Of all ranks together: what a block of 32 tokens takes in the bench's tiny model."""
STEP_S = 0.006
REQUEST_S = 0.00005
PROMPT_TOKEN_S = 0.000005
"""A step's base and what each running request and prompt token adds: the shape of a decode
step that is bound by weights, so that twice the batch is nearly twice the rate."""
WORKER_S = 30.0
STOP_S = 10.0


def step_s(step: Step) -> float:
    """Return how long the model would take over `step`, in seconds."""
    return STEP_S + REQUEST_S * len(step.ran) + PROMPT_TOKEN_S * step.prefill_tokens


class Ranks:
    """The worker processes of one engine."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[socket.socket] = []

    def start(self, policy: str, runtime: dict[str, Any], plan: ExtentPlan, prefix: int) -> None:
        """Start one process per rank and wait until all are ready."""
        for rank, layout in enumerate(plan.layouts):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.settimeout(WORKER_S)
            command = [sys.executable, "-m", "bench.colocated.sim_worker", str(theirs.fileno())]
            with theirs:
                self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
            self._links.append(ours)
            start = sim_worker.Start(
                policy=policy, rank=rank, runtime=runtime, layout=layout, prefix=prefix
            )
            ours.send(sim_worker.encoder.encode(start))

    def wait_ready(self) -> None:
        """Wait until every rank has backed its prefix and connected."""
        self._gather()

    def run(self, number: int, step: Step) -> None:
        """Have all ranks run `step`; returns when the model would be done and all answered."""
        ends_s = time.monotonic() + step_s(step)
        order = sim_worker.encoder.encode(
            sim_worker.Run(step=number, fresh=step.fresh, finishing=step.finishing)
        )
        for link in self._links:
            link.send(order)
        wrong = self._gather()
        if wrong:
            raise RuntimeError(f"blocks written by two owners: {wrong}")
        time.sleep(max(0.0, ends_s - time.monotonic()))

    def _gather(self) -> list[int]:
        wrong: list[int] = []
        for rank, link in enumerate(self._links):
            message = link.recv(sim_worker.MESSAGE_BYTES_MAX)
            if not message:
                code = self._processes[rank].wait(STOP_S)
                raise RuntimeError(f"rank {rank} ended with status {code}")
            wrong += sim_worker.from_worker.decode(message).wrong
        return wrong

    def stop(self) -> None:
        """End every process. Idempotent."""
        for link in self._links:
            link.close()
        for process in self._processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._links, self._processes = [], []


class SimEngine:
    """See `engine.Engine`. Requests and counters cross threads by calls that are one operation."""

    def __init__(
        self, memory: SimMemory, ranks: Ranks, plan: ExtentPlan, arguments: dict[str, Any]
    ) -> None:
        self._memory = memory
        self._ranks = ranks
        self._plan = plan
        self._requests = SimScheduler(
            memory,
            block_tokens=arguments["block_tokens"],
            requests_max=arguments["max_num_seqs"],
        )
        self._loop = asyncio.get_running_loop()
        self._arrivals: deque[SimRequest | Callable[[], object]] = deque()
        self._clients: dict[str, asyncio.Queue[int | Exception]] = {}
        self.wake = threading.Event()
        self._stopping = False
        self._preemptions_before = 0
        self._before: status.Status | None = None
        self._peak_bytes = 0
        self.closers: list[Callable[[], object]] = []
        self.ready = Ready(
            capacity_bytes=plan.extents * sum(plan.extent_bytes.values()),
            facts={"simulated": True, "extent_blocks": plan.extent_blocks, "blocks": plan.blocks},
        )
        self._thread = threading.Thread(target=self._run, name="sim-scheduler", daemon=True)

    def start(self) -> None:
        """Start the scheduler thread."""
        self._thread.start()

    # --- clients' loop ---

    async def generate(
        self, request_id: str, prompt: list[int], tokens: int
    ) -> AsyncIterator[Sequence[int]]:
        answers: asyncio.Queue[int | Exception] = asyncio.Queue()
        self._clients[request_id] = answers
        self._post(SimRequest(request_id, len(prompt), tokens))
        try:
            for position in range(tokens):
                answer = await answers.get()
                if isinstance(answer, Exception):
                    raise answer
                # In place of a model: the prompt again and again.
                yield (prompt[position % len(prompt)],)
        finally:
            del self._clients[request_id]

    async def begin_run(self) -> None:
        await self._between_steps(self._memory.restart)
        self._preemptions_before = self._requests.preemptions
        self._peak_bytes = 0
        self._before = await self._status()

    async def level(self) -> Level:
        held = self._memory.held_extents * sum(self._plan.extent_bytes.values())
        self._peak_bytes = max(self._peak_bytes, held)
        return Level(
            at_s=time.monotonic(),
            held_bytes=held,
            running=len(self._requests.running),
            waiting=len(self._requests.waiting),
        )

    async def counted(self) -> Counted:
        preemptions = self._requests.preemptions - self._preemptions_before
        found = await self._status()
        if found is None or self._before is None:
            return Counted(preemptions=preemptions, peak_held_bytes=self.ready.capacity_bytes)
        return status.counted(found, self._before, preemptions, self._peak_bytes)

    async def stop(self) -> None:
        self._stopping = True
        self.wake.set()
        await asyncio.to_thread(self._thread.join, STOP_S)
        for close in self.closers:
            await asyncio.to_thread(close)

    async def _status(self) -> status.Status | None:
        found = await self._between_steps(self._memory.status)
        return None if found is None else status.parse(found)

    async def _between_steps(self, act: Callable[[], Any]) -> Any:
        """Run `act` on the scheduler thread, as vLLM does with a utility call."""
        answer: asyncio.Future[Any] = self._loop.create_future()

        def run() -> None:
            self._tell(answer.set_result, act())

        self._post(run)
        return await answer

    def _post(self, arrival: SimRequest | Callable[[], object]) -> None:
        self._arrivals.append(arrival)
        self.wake.set()

    # --- scheduler thread ---

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_arrivals()
                if not self._step():
                    self._memory.wait(self.wake)
                    self.wake.clear()
        except Exception as error:  # every client learns of it, and every rank ends
            self._tell(self._fail, error)
            self._ranks.stop()

    def _take_arrivals(self) -> None:
        while self._arrivals:
            arrival = self._arrivals.popleft()
            if isinstance(arrival, SimRequest):
                self._requests.add(arrival)
            else:
                arrival()

    def _step(self) -> bool:
        """Run one step if anybody can; returns whether one ran."""
        requests, memory = self._requests, self._memory
        if not requests.running and not requests.waiting:
            return False
        step = requests.schedule(memory.before())
        memory.after(requests, step)
        if step.ran:
            self._ranks.run(memory.step, step)
            self._tell(self._deliver, requests.update(step))
        memory.settle(requests)
        return bool(step.ran)

    def _tell(self, act: Callable[..., object], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(act, *arguments)

    def _deliver(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            client = self._clients.get(request_id)
            if client is not None:
                client.put_nowait(1)

    def _fail(self, error: Exception) -> None:
        for client in self._clients.values():
            client.put_nowait(error)


def make_plan(arguments: dict[str, Any], settings: Settings, pool_bytes: int) -> ExtentPlan:
    """Return the geometry of an engine that can have up to `pool_bytes` over its ranks."""
    tp = arguments["tp"]
    rank = RankBuffer(device=DEVICE, granule_bytes=GRANULE_BYTES, strides=(BLOCK_BYTES // tp,))
    return plan_extents(
        [rank] * tp,
        settings,
        blocks_max=pool_bytes // BLOCK_BYTES,
        request_blocks=ceil_div(arguments["max_model_len"], arguments["block_tokens"]),
        prefix_blocks=1,
    )


class _Made:
    """The parts of an engine before its clients' side: made off the loop, as vLLM's core is."""

    def __init__(self, name: str, policy: str, arguments: dict[str, Any]) -> None:
        self.ranks = Ranks()
        self.closers: list[Callable[[], object]] = [self.ranks.stop]
        self.wake: Callable[[], None] = lambda: None
        """Wakes the scheduler's thread once there is one."""
        tp, run_dir = arguments["tp"], arguments["run_dir"]
        if policy == "static":
            share = arguments["kv_cache_memory_bytes"] * tp
            self.plan = make_plan(arguments, Settings(), share)
            runtime = {
                "host_pool_path": str(Path(run_dir) / "host.pool"),
                "host_pool": arguments["pool_bytes"],
            }
            self.ranks.start(policy, runtime, self.plan, prefix=self.plan.extents)
            self.ranks.wait_ready()
            self.memory: SimMemory = FixedMemory(self.plan)
            return
        settings = Settings.parse(arguments["additional_config"]["kvadmit"])
        self.plan = make_plan(arguments, settings, settings.host_pool)
        kind = Coordinator if policy == "event" else Caller
        coordinator: Any = kind(
            settings,
            ranks=tp,
            devices=[DEVICE] * tp,
            device_total_bytes={DEVICE: settings.host_pool},
            name=name,
            wake=lambda: self.wake(),
        )
        coordinator.start()
        self.closers.append(coordinator.stop)
        coordinator.request_start({DEVICE: 0})
        coordinator.set_geometry(self.plan)
        self.ranks.start(policy, coordinator.runtime, self.plan, self.plan.prefix)
        make_memory = EventMemory if policy == "event" else SyncMemory
        self.memory = make_memory(self.plan, coordinator)
        self.ranks.wait_ready()


async def start(name: str, policy: str, arguments: dict[str, Any]) -> SimEngine:
    """Start a simulated engine; returns when it can serve."""
    made = await asyncio.to_thread(_Made, name, policy, arguments)
    engine = SimEngine(made.memory, made.ranks, made.plan, arguments)
    made.wake = engine.wake.set
    engine.closers = made.closers
    engine.start()
    return engine

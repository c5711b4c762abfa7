"""One instance of the soak: kept under load, killed now and then, started again.

Owns: the load of one instance and what became of every request of it. Must not know: who is
killed when, or what is left behind. A request that was under way when its own instance was
struck is lost with it; any other that does not come back whole is a failure.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from bench.colocated import blows
from bench.colocated.channel import (
    FinishRun,
    Outcome,
    RunFinished,
    RunStarted,
    StartRun,
    Submit,
)
from bench.colocated.fleet import Instance, InstanceError
from bench.colocated.outcome import Answered
from bench.colocated.policies import Launch
from bench.colocated.workload import Request, draw_length

COUNT_WAIT_S = 60.0
"""Within this an idle instance forgets its prefixes, or says what it holds."""
BURST = (8, 64)
"""Requests that come at once."""
END_WAIT_S = 30.0
HUNG_S = 60.0
"""A burst and its neighbour's take a third of this: who waits longer has been forgotten."""
FIXTURE_PART = 0.25
"""Of a burst: requests whose tokens are known."""
PAUSE_S = 2.0
"""Longest time between two bursts."""


class Fixtures(msgspec.Struct, frozen=True):
    """Requests whose tokens are known, with the digest of each."""

    requests: tuple[Request, ...]
    digests: tuple[str, ...]


class Tally(msgspec.Struct):
    """What became of all requests so far."""

    completed: int = 0
    lost_with_victims: int = 0
    failed: int = 0
    fixtures: int = 0
    differing: int = 0
    silences: set[tuple[str, float, float]] = set()
    """Of whom, from when to when: no token while an answer was under way. Monotonic clock."""
    reasons: list[str] = []
    """Why requests failed, the first few."""


class Tenant:
    """An instance under `name`, and its load. Used from one asyncio loop."""

    def __init__(
        self,
        launch: Launch,
        log: Path,
        *,
        lengths: Mapping[str, tuple[int, int]],
        fixtures: Fixtures,
        tally: Tally,
        dice: random.Random,
    ) -> None:
        """`lengths`: of "prompt" and "output", in tokens."""
        self.name = launch.spec.name
        self.up = False
        """Whether it serves: started and not struck since."""
        self._launch = launch
        self._log = log
        self._lengths = lengths
        self._fixtures = fixtures
        self._tally = tally
        self._dice = dice
        self._instance: Instance | None = None
        self._lives = 0
        self._index = 0
        self._open: dict[int, tuple[int | None, float]] = {}
        """Requests without an answer: which fixture each is, and since when it waits."""
        self._answered = asyncio.Event()
        self._flowing = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None
        self._pressing: asyncio.Task[None] | None = None
        self._finished: asyncio.Future[RunFinished] | None = None
        self._started: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int:
        """The process of its front end; 0 before the first start."""
        return 0 if self._instance is None else self._instance.pid

    async def start(self) -> None:
        """Start it and wait until it serves. Raises InstanceError when it does not."""
        self._lives += 1
        log = self._log.with_stem(f"{self._log.stem}-{self._lives}")
        self._instance = Instance(self._launch, log)
        await self._instance.start()
        self.up = True
        self._open.clear()
        self._listening = asyncio.create_task(self._listen())
        self._pressing = asyncio.create_task(self._press())
        await self._begin_count()

    def press(self, flowing: bool) -> None:
        """Send bursts from now on, or none."""
        if flowing:
            self._flowing.set()
        else:
            self._flowing.clear()

    def send_fixtures(self) -> None:
        """Send every fixture once, beside whatever else is under way."""
        self._submit([(request, n) for n, request in enumerate(self._fixtures.requests)])

    async def drain(self, wait_s: float) -> None:
        """Wait, bounded, until every request has its answer; those without one have failed."""
        try:
            await asyncio.wait_for(self._until_open(0), wait_s)
        except TimeoutError:
            self._fail(len(self._open), f"{self.name}: no answer within {wait_s:.0f} s")
            self._open.clear()

    async def held_bytes(self) -> int:
        """Return the bytes that it says it holds. It is idle; cached prefixes are forgotten."""
        finished = await self._count()
        await self._begin_count()
        return finished.levels[-1].held_bytes

    def strike(self) -> None:
        """Take note that it is being ended: what is under way is lost with it."""
        self.up = False
        if self._pressing is not None:
            self._pressing.cancel()
        now_s = time.monotonic()
        hung = [index for index, (_, since_s) in self._open.items() if now_s - since_s > HUNG_S]
        for index in hung:
            del self._open[index]
        if hung:
            self._fail(len(hung), f"{self.name}: no answer for {HUNG_S:.0f} s before it was struck")

    async def bury(self) -> int:
        """Stop load and process, after a strike or at the end; returns how many are still there."""
        self.up = False
        tasks = [task for task in (self._listening, self._pressing) if task is not None]
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                self._fail(1, f"{self.name}: {type(result).__name__}: {result}")
        self._listening = self._pressing = None
        self._tally.lost_with_victims += len(self._open)
        self._open.clear()
        if self._instance is not None:
            ending = blows.tree(self._instance.pid)
            self._instance.ask_to_stop()
            lingering = await blows.until_gone(ending, END_WAIT_S)
            await self._instance.stop()
            return lingering
        return 0

    # --- load ---

    async def _press(self) -> None:
        while True:
            await self._flowing.wait()
            count = self._dice.randint(*BURST)
            self._submit([self._draw() for _ in range(count)])
            await self._until_open(self._dice.randint(0, count))
            await asyncio.sleep(self._dice.uniform(0, PAUSE_S))

    def _draw(self) -> tuple[Request, int | None]:
        dice = self._dice
        if self._fixtures.requests and dice.random() < FIXTURE_PART:
            number = dice.randrange(len(self._fixtures.requests))
            return self._fixtures.requests[number], number
        prompt, output = (draw_length(dice, *self._lengths[k]) for k in ("prompt", "output"))
        return Request(0, 0.0, prompt, output, dice.getrandbits(32)), None

    def _submit(self, drawn: Sequence[tuple[Request, int | None]]) -> None:
        assert self._instance is not None, "started"
        requests = []
        for request, fixture in drawn:
            self._index += 1
            self._open[self._index] = (fixture, time.monotonic())
            requests.append(msgspec.structs.replace(request, index=self._index))
        self._instance.tell(Submit(requests=tuple(requests)))

    async def _until_open(self, most: int) -> None:
        while len(self._open) > most:
            self._answered.clear()
            await self._answered.wait()

    # --- answers ---

    async def _listen(self) -> None:
        assert self._instance is not None, "started"
        try:
            while True:
                report = await self._instance.hear(None)
                match report:
                    case Outcome():
                        self._take(report.answered)
                    case RunStarted() if self._started is not None:
                        self._started.set_result(None)
                    case RunFinished() if self._finished is not None:
                        self._finished.set_result(report)
        except InstanceError as error:
            if self.up:
                self._fail(max(1, len(self._open)), str(error))
                self._open.clear()
                self._answered.set()
                self.strike()
            for awaited in (self._started, self._finished):
                if awaited is not None and not awaited.done():
                    awaited.set_exception(error)

    def _take(self, answered: Answered) -> None:
        if answered.index not in self._open:
            return  # given up already
        fixture, _ = self._open.pop(answered.index)
        self._answered.set()
        if answered.error:
            if self.up:
                self._fail(1, f"{self.name}: {answered.error}")
            else:
                self._tally.lost_with_victims += 1
            return
        self._tally.completed += 1
        self._tally.silences |= {(self.name, *silence) for silence in answered.silences}
        if fixture is not None:
            self._tally.fixtures += 1
            self._tally.differing += answered.digest != self._fixtures.digests[fixture]

    def _fail(self, count: int, reason: str) -> None:
        self._tally.failed += count
        if len(self._tally.reasons) < 20:
            self._tally.reasons.append(reason)

    # --- what it counts ---

    async def _begin_count(self) -> None:
        assert self._instance is not None, "started"
        self._started = asyncio.get_running_loop().create_future()
        self._instance.tell(StartRun())
        await asyncio.wait_for(self._started, COUNT_WAIT_S)

    async def _count(self) -> RunFinished:
        assert self._instance is not None, "started"
        self._finished = asyncio.get_running_loop().create_future()
        self._instance.tell(FinishRun())
        return await asyncio.wait_for(self._finished, COUNT_WAIT_S)

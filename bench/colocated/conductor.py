"""Plays one run: gives each instance its bursts at the right time and collects the outcomes.

Owns: turns and the end of a run. Must not know: policies, engines, or what figures are made
of the outcomes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from bench.colocated import workload
from bench.colocated.channel import FinishRun, Outcome, RunFinished, RunStarted, StartRun, Submit
from bench.colocated.fleet import Fleet, Instance
from bench.colocated.gpus import Watch
from bench.colocated.outcome import Answered, InstanceOutcome, RunOutcome
from bench.colocated.setup import Setup

ORDER_S = 60.0
"""Within this an idle instance forgets its prefixes, or hands over its levels."""


class _Turn:
    """How far one burst has been answered."""

    def __init__(self, burst: workload.Burst, handover: float) -> None:
        self.burst = burst
        self._left = {request.index for request in burst.requests}
        self._left_at_handover = int(len(self._left) * (1 - handover))
        self.handed_over = asyncio.Event()

    def note(self, index: int) -> None:
        self._left.discard(index)
        if len(self._left) <= self._left_at_handover:
            self.handed_over.set()


class Conductor:
    """Plays the run `repeat` of `setup` on `fleet`. `progress` is called once per answer."""

    def __init__(
        self, setup: Setup, fleet: Fleet, repeat: int, progress: Callable[[], None]
    ) -> None:
        self._setup = setup
        self._fleet = fleet
        self._repeat = repeat
        self._progress = progress
        bursts = workload.plan(setup.shape, setup.seed, repeat)
        self._turns = [_Turn(burst, setup.shape.handover) for burst in bursts]
        self._answered: dict[str, list[Answered]] = {i.name: [] for i in fleet.instances}

    async def play(self) -> RunOutcome:
        """Return what happened. Raises InstanceError if an instance breaks or goes silent."""
        instances = self._fleet.instances
        for instance in instances:
            instance.tell(StartRun(probes=self._setup.probes))
        for instance in instances:
            report = await instance.hear(ORDER_S)
            if not isinstance(report, RunStarted):
                raise instance.error(f"said {report} at the start of a run")
        started_s = time.monotonic()
        async with Watch(self._setup.gpus) as watch:
            await self._until_answered()
        finished = []
        for instance in instances:
            instance.tell(FinishRun())
        for instance in instances:
            report = await instance.hear(ORDER_S)
            if not isinstance(report, RunFinished):
                raise instance.error(f"said {report} at the end of a run")
            finished.append(
                InstanceOutcome(
                    name=instance.name,
                    answered=self._answered[instance.name] + report.probes,
                    levels=report.levels,
                    counted=report.counted,
                )
            )
        return RunOutcome(
            policy=self._fleet.policy,
            repeat=self._repeat,
            scenario=self._setup.shape.scenario,
            engine=self._setup.engine,
            started_s=started_s,
            instances=finished,
            devices=watch.seen,
        )

    async def _until_answered(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for number, instance in enumerate(self._fleet.instances):
                    group.create_task(self._listen(instance, number))
                group.create_task(self._start_bursts())
        except ExceptionGroup as errors:
            # The first instance to break is the news; the others were only cut short by it.
            raise errors.exceptions[0] from None

    async def _start_bursts(self) -> None:
        started_s = time.monotonic()
        before: _Turn | None = None
        for turn in self._turns:
            if turn.burst.start_s is not None:
                await asyncio.sleep(started_s + turn.burst.start_s - time.monotonic())
            elif before is not None:
                await before.handed_over.wait()
            self._fleet.instances[turn.burst.instance].tell(Submit(requests=turn.burst.requests))
            before = turn

    async def _listen(self, instance: Instance, number: int) -> None:
        """Collect the instance's outcomes until its last burst is answered."""
        mine = [turn for turn in self._turns if turn.burst.instance == number]
        turn_of = {r.index: turn for turn in mine for r in turn.burst.requests}
        deadline_s = time.monotonic() + self._setup.timeout_s
        for _ in range(len(turn_of)):
            report = await instance.hear(max(0.0, deadline_s - time.monotonic()))
            if not isinstance(report, Outcome):
                raise instance.error(f"said {report} in mid-run")
            self._answered[instance.name].append(report.answered)
            turn_of[report.answered.index].note(report.answered.index)
            self._progress()

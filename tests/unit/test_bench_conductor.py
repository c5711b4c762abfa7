"""The conductor's turns, the instance's clients, and the talk between them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import msgspec
import pytest
from bench.colocated.channel import (
    Broken,
    FinishRun,
    FromInstance,
    Outcome,
    Ready,
    RunFinished,
    RunStarted,
    Spec,
    StartRun,
    Stop,
    Submit,
    ToInstance,
    read_report,
    write,
)
from bench.colocated.conductor import Conductor
from bench.colocated.fleet import Fleet, InstanceError
from bench.colocated.instance import Instance, _Stream
from bench.colocated.outcome import Answered, Counted, Level
from bench.colocated.setup import Setup
from bench.colocated.workload import Request, Shape, plan

T = TypeVar("T")
SHAPE = Shape(scenario="alternating", instances=2, requests=4, bursts=2)
SETUP = Setup(
    shape=SHAPE, engine="sim", tp=1, pool_bytes=1, model="m", seed=0, timeout_s=5.0, probes=1
)


def answered(index: int, *, probe: bool = False) -> Answered:
    return Answered(
        index=index, submitted_s=0.0, first_s=1.0, last_s=2.0, tokens=3, error="", probe=probe
    )


class FakeInstance:
    """Answers everything at once, or what it is told to keep back when `release` is called."""

    def __init__(self, name: str, journal: list[tuple[str, Any]], keep_back: int = 0) -> None:
        self.name = name
        self._journal = journal
        self._reports: asyncio.Queue[FromInstance] = asyncio.Queue()
        self._keep_back = keep_back
        self.kept: list[int] = []

    def tell(self, order: ToInstance) -> None:
        if isinstance(order, Submit):
            indexes = [request.index for request in order.requests]
            self._journal.append((self.name, indexes))
            cut = len(indexes) - self._keep_back
            self.kept += indexes[cut:]
            for index in indexes[:cut]:
                self._reports.put_nowait(Outcome(answered=answered(index)))
        elif isinstance(order, StartRun):
            assert order.probes == 1
            self._reports.put_nowait(RunStarted())
        elif isinstance(order, FinishRun):
            probes = [answered(9, probe=True)]
            self._reports.put_nowait(RunFinished(levels=[], counted=Counted(), probes=probes))

    def release(self) -> None:
        for index in self.kept:
            self._reports.put_nowait(Outcome(answered=answered(index)))
        self.kept.clear()

    def break_down(self) -> None:
        self._reports.put_nowait(Broken(why="it fell"))

    async def hear(self, wait_s: float) -> FromInstance:
        report = await asyncio.wait_for(self._reports.get(), wait_s)
        if isinstance(report, Broken):
            raise InstanceError(f"{self.name}: {report.why}")
        return report

    def error(self, what: str) -> InstanceError:
        return InstanceError(f"{self.name} {what}")


class FakeFleet:
    def __init__(self, instances: list[FakeInstance]) -> None:
        self.policy = "event"
        self.instances = instances


def conductor(
    instances: list[FakeInstance], progress: Callable[[], None] = lambda: None, **shape: Any
) -> Conductor:
    setup = msgspec.structs.replace(SETUP, shape=msgspec.structs.replace(SHAPE, **shape))
    return Conductor(setup, cast(Fleet, FakeFleet(instances)), 0, progress)


def pair(journal: list[tuple[str, Any]], keep_back: int = 0) -> list[FakeInstance]:
    return [FakeInstance(name, journal, keep_back) for name in ("a", "b")]


def run(work: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work(), 20)

    return asyncio.run(bounded())


def test_bursts_take_turns_and_everything_is_collected() -> None:
    journal: list[tuple[str, Any]] = []
    steps: list[int] = []

    async def play() -> Any:
        return await conductor(pair(journal), lambda: steps.append(1)).play()

    outcome = run(play)
    assert journal == [("a", [0, 1]), ("b", [0, 1]), ("a", [2, 3]), ("b", [2, 3])]
    assert len(steps) == 8
    assert (outcome.policy, outcome.scenario, outcome.engine) == ("event", "alternating", "sim")
    for instance in outcome.instances:
        assert [r.index for r in instance.answered if not r.probe] == [0, 1, 2, 3]
        assert [r.index for r in instance.answered if r.probe] == [9]


def test_the_turn_passes_when_enough_is_answered() -> None:
    journal: list[tuple[str, Any]] = []

    async def play() -> Any:
        instances = pair(journal, keep_back=1)
        playing = asyncio.create_task(conductor(instances, handover=0.5).play())
        while len(journal) < 4:  # every turn came although half of each burst is unanswered
            await asyncio.sleep(0)
        assert not playing.done()
        for instance in instances:
            instance.release()
        return await playing

    assert len(run(play).instances[0].answered) == 5


def test_the_turn_does_not_pass_before() -> None:
    journal: list[tuple[str, Any]] = []

    async def play() -> None:
        instances = pair(journal, keep_back=1)
        playing = asyncio.create_task(conductor(instances, handover=1.0).play())
        while not instances[0].kept:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(journal) == 1
        for turn in range(4):
            while not instances[turn % 2].kept:
                await asyncio.sleep(0)
            instances[turn % 2].release()
        await playing

    run(play)
    assert len(journal) == 4


def test_an_instance_that_breaks_ends_the_run_with_its_reason() -> None:
    async def play() -> None:
        instances = pair([], keep_back=2)
        instances[1].break_down()
        with pytest.raises(InstanceError, match="it fell"):
            await conductor(instances, scenario="symmetric").play()

    run(play)


# --- the instance's side --------------------------------------------------------------------------


class FakeEngine:
    """Gives `tokens` tokens, the prompt's first id each; 13 fail, of 14 one is not given."""

    def __init__(self) -> None:
        self.ready = Ready(capacity_bytes=5)
        self.prompts: dict[str, list[int]] = {}
        self.begun = 0

    async def generate(
        self, request_id: str, prompt: list[int], tokens: int
    ) -> AsyncIterator[Sequence[int]]:
        self.prompts[request_id] = prompt
        if tokens == 13:
            raise ValueError("unlucky")
        for _ in range(tokens - (tokens == 14)):
            await asyncio.sleep(0)
            yield (prompt[0],)

    async def begin_run(self) -> None:
        self.begun += 1

    async def level(self) -> Level:
        return Level(at_s=time.monotonic(), held_bytes=3, running=1, waiting=0)

    async def counted(self) -> Counted:
        return Counted(preemptions=7)

    async def stop(self) -> None: ...


SPEC = Spec(name="x", policy="event", engine="sim", sample_s=0.01, vocabulary=256, engine_args={})


class Talk:
    """The bench's end of an instance that serves a FakeEngine."""

    def __init__(self) -> None:
        self.engine = FakeEngine()

    async def __aenter__(self) -> Talk:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=theirs)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._writers = [writer, self._writer]
        self._serving = asyncio.create_task(Instance(self.engine, SPEC, writer).serve(reader))
        assert await self.hear() == self.engine.ready
        return self

    async def __aexit__(self, *error: object) -> None:
        self.tell(Stop())
        await self._serving
        for writer in self._writers:
            writer.close()
            await writer.wait_closed()

    def tell(self, order: ToInstance) -> None:
        write(self._writer, order)

    async def hear(self) -> FromInstance | None:
        return await read_report(self._reader)


def test_requests_are_timed_counted_and_their_failures_reported() -> None:
    async def talk() -> None:
        async with Talk() as bench:
            bench.tell(StartRun())
            assert isinstance(await bench.hear(), RunStarted)
            requests = tuple(Request(n, 0.0, 4, tokens, n) for n, tokens in enumerate((5, 13, 14)))
            bench.tell(Submit(requests=requests))
            outcomes: dict[int, Answered] = {}
            while len(outcomes) < 3:
                report = await bench.hear()
                assert isinstance(report, Outcome)
                outcomes[report.answered.index] = report.answered
            assert (outcomes[0].tokens, outcomes[0].error) == (5, "")
            assert outcomes[0].ttft_s is not None
            assert outcomes[0].tpot_s is not None
            assert (outcomes[1].error, outcomes[1].ttft_s) == ("ValueError: unlucky", None)
            assert outcomes[2].error == "13 of 14 tokens"
            assert {len(prompt) for prompt in bench.engine.prompts.values()} == {4}
            bench.tell(FinishRun())
            finished = await bench.hear()
            assert isinstance(finished, RunFinished)
            assert finished.counted.preemptions == 7
            assert finished.levels[0].held_bytes == 3
            assert finished.probes == []

    run(talk)


def test_equal_tokens_have_equal_digests() -> None:
    async def talk() -> None:
        async with Talk() as bench:
            # The last differs in its prompt, of which the engine's answers are made.
            requests = tuple(Request(n, 0.0, 4, 6, seed) for n, seed in enumerate((1, 1, 2)))
            bench.tell(Submit(requests=requests))
            digests: dict[int, str] = {}
            while len(digests) < 3:
                report = await bench.hear()
                assert isinstance(report, Outcome)
                digests[report.answered.index] = report.answered.digest
            assert digests[0] == digests[1] != digests[2]

    run(talk)


def test_a_silence_counts_while_an_answer_is_under_way() -> None:
    stream = _Stream()
    stream.note_tokens(10.0, first=True)
    stream.note_tokens(10.5, first=False)
    stream.note_end()
    stream.note_tokens(20.0, first=True)  # nobody was answered before it
    stream.note_tokens(20.1, first=True)  # too short
    stream.note_end()
    stream.note_tokens(22.1, first=False)
    assert stream.silences_since(10.0) == [(10.0, 10.5), (20.1, 22.1)]
    assert stream.silences_since(20.0) == [(20.1, 22.1)]


def test_probes_run_one_after_another_until_the_run_is_finished() -> None:
    async def talk() -> None:
        async with Talk() as bench:
            bench.tell(StartRun(probes=2))
            assert isinstance(await bench.hear(), RunStarted)
            while len(bench.engine.prompts) < 10:
                await asyncio.sleep(0)
            bench.tell(FinishRun())
            finished = await bench.hear()
            assert isinstance(finished, RunFinished)
            assert len(finished.probes) >= 8
            assert all(probe.probe and not probe.error for probe in finished.probes)
            assert {len(prompt) for prompt in bench.engine.prompts.values()} == {8}

    run(talk)


def test_levels_are_taken_at_whole_multiples_of_the_interval() -> None:
    async def talk() -> None:
        async with Talk() as bench:
            bench.tell(StartRun())
            assert isinstance(await bench.hear(), RunStarted)
            await asyncio.sleep(0.1)
            bench.tell(FinishRun())
            finished = await bench.hear()
            assert isinstance(finished, RunFinished)
            assert len(finished.levels) >= 5
            assert bench.engine.begun == 1

    run(talk)


def test_every_message_survives_the_wire() -> None:
    shape = Shape(scenario="symmetric", instances=1, requests=2)
    for message in (
        SPEC,
        StartRun(probes=3),
        Submit(requests=plan(shape, 0, 0)[0].requests),
        FinishRun(),
        Stop(),
    ):
        assert msgspec.json.decode(msgspec.json.encode(message), type=ToInstance) == message
    level = Level(at_s=1.0, held_bytes=2, running=3, waiting=4)
    for report in (
        Ready(capacity_bytes=1, facts={"a": 1}),
        RunStarted(),
        Outcome(answered=answered(1)),
        RunFinished(levels=[level], counted=Counted(spreads={"x": {"p50": None}})),
        Broken(why="?"),
    ):
        assert msgspec.json.decode(msgspec.json.encode(report), type=FromInstance) == report

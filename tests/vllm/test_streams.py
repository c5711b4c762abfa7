"""A server streams on while the neighbour whose memory it needs is killed or stopped.

Each test writes down, in one order, what happens to the neighbour and every token of one
streaming request, and asks for tokens in between. How long it took is printed only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.cluster import arbiter_pid, run_directory, wait_until
from integration.test_crash import arbiter_log
from kvadmit.processes import is_stopped
from kvadmit.units import KIB, MIB
from kvadmit.vllm.exit_status import EXIT_CODE
from vllm_engines import DENSE, kvadmit, model_directory
from vllm_servers import Server, current_books, held, serving
from vllm_streams import EVENT_WAIT_S, Chain, Pressure, Stream, Streams

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

POOL = 24 * MIB
EXTENT = 512 * KIB
FLOOR = MIB
PROMPT_TOKENS = 64
TOKENS = 320
REQUESTS = 32
"""Of the neighbour; together they need the whole pool."""
LONG_TOKENS = 1900
LONG_REQUESTS = 6
"""Of the victim. They need the whole pool too, and most of it for a third of their time."""
STREAM_TOKENS = 240
"""One extent holds them: the stream itself presses nobody."""


def workload(family: int, requests: int) -> list[list[int]]:
    """Return prompts that share no prefix, with those of other families neither."""
    return [[family, number] * (PROMPT_TOKENS // 2) for number in range(requests)]


class Pair:
    """A neighbour that outlives all tests, and a victim that is replaced once it is dead."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.neighbour = self._server("neighbour", core=0)
        self._victims = 0
        self._stack = contextlib.ExitStack()
        self.victim = self._next_victim()

    def _server(self, name: str, *, core: int) -> Server:
        more = {"host_pool": POOL, "extent": EXTENT, "floor": FLOOR, "idle_decay_s": 600}
        config = json.dumps(kvadmit(self.run_dir, name=name, **more))
        flags = ["--max-model-len=8192", "--max-num-seqs=64", "--additional-config", config]
        return Server(model_directory(DENSE), flags, core=core)

    def _next_victim(self) -> Server:
        self._victims += 1
        return self._server(self.victim_name, core=1)

    @property
    def victim_name(self) -> str:
        """What kvadmit calls the victim of now."""
        return f"victim-{self._victims}"

    def revive(self) -> None:
        """Have a victim that lives."""
        if self.victim.process.poll() is not None:
            self.victim.close()
            self.victim = self._next_victim()
            self.victim.wait_ready()

    def held(self, name: str) -> int:
        """Return the bytes that the arbiter counts an instance for."""
        return held(self.run_dir, name)


@pytest.fixture(scope="module")
def two() -> Iterator[Pair]:
    with run_directory() as run_dir:
        pair = Pair(run_dir)
        try:
            with serving(pair.neighbour):
                pair.victim.wait_ready()
                yield pair
        finally:
            pair.victim.close()


@pytest.fixture(scope="module")
def undisturbed(two: Pair) -> list[list[int]]:
    """Return the tokens of the victim's requests when nothing happens to whom they are sent."""
    return Streams(two.neighbour, workload(1, LONG_REQUESTS), LONG_TOKENS).finish()


class Scene:
    """Victim with most of the pool in use; neighbour that streams and waits for memory."""

    def __init__(self, pair: Pair) -> None:
        pair.revive()
        self.chain = Chain()
        self.tree = pair.victim.tree()
        self.requests = Streams(pair.victim, workload(1, LONG_REQUESTS), LONG_TOKENS)
        self.stream = Stream(pair.neighbour, [2] * 8, STREAM_TOKENS, self.chain.add_token)
        self.pressure: Pressure | None = None
        self._pair = pair

    def begin(self) -> Pressure:
        """Wait until the neighbour goes short for what the victim has."""
        pair = self._pair
        wait_until(lambda: pair.held(pair.victim_name) >= POOL * 2 // 3, "the victim has most")
        self.pressure = Pressure(pair.neighbour, workload(3, REQUESTS), TOKENS)
        wait_until(lambda: "neighbour" in current_books(pair.run_dir)["waiting"], "it waits")
        assert self.requests.done == 0, "the victim's requests end too soon"
        self.chain.wait_tokens()
        return self.pressure

    def finish(self) -> None:
        """Let the neighbour's requests end; fails if a single one did not end well."""
        assert self.pressure is not None
        self.chain.wait_tokens()
        self.pressure.finish()
        self.stream.check()
        self.chain.add("neighbour finished")

    def close(self) -> None:
        """End clients and watches; the victim's processes stay."""
        self.chain.close()
        for clients in (self.stream, self.requests, self.pressure):
            if clients is not None:
                clients.close()
        self.tree.send_all(signal.SIGCONT)


@pytest.fixture
def scene(two: Pair, undisturbed: list[list[int]]) -> Iterator[Scene]:
    made = Scene(two)
    try:
        yield made
    finally:
        made.close()
        print(made.chain)  # noqa: T201


def test_all_finish_after_a_stopped_worker_goes_on_and_a_stream_meanwhile(
    two: Pair, scene: Scene, undisturbed: list[list[int]]
) -> None:
    chain, pressure = scene.chain, scene.begin()
    worker = scene.tree.pid_of("Worker")
    answered = pressure.answered
    chain.add("stopped")
    scene.tree.send(worker, signal.SIGSTOP)
    late = f"{two.victim_name} gives nothing back"
    chain.watch("late", lambda: late in arbiter_log(two.run_dir))
    chain.watch("answered", lambda: pressure.answered >= answered + REQUESTS)
    for milestone in ("late", "answered"):
        chain.wait(milestone)
    chain.wait_tokens()
    assert is_stopped(worker)
    assert scene.requests.done == 0, "their worker was stopped"
    assert two.neighbour.get("/health") == ""
    chain.add("continued")
    scene.tree.send(worker, signal.SIGCONT)
    assert scene.requests.finish() == undisturbed
    chain.add("victim finished")
    scene.finish()
    chain.check_tokens("stopped", "late", "continued", "victim finished", "neighbour finished")
    chain.check_tokens("stopped", "answered", "continued")


def test_a_stream_goes_on_while_the_arbiter_is_replaced(
    two: Pair, scene: Scene, undisturbed: list[list[int]]
) -> None:
    chain = scene.chain
    scene.begin()
    first = arbiter_pid(two.run_dir)
    chain.add("killed")
    os.kill(first, signal.SIGKILL)
    chain.watch("another", lambda: current_books(two.run_dir)["pid"] != first)
    chain.watch("granted", lambda: two.held("neighbour") > POOL * 3 // 4)
    assert scene.requests.finish() == undisturbed
    chain.add("victim finished")
    for milestone in ("another", "granted"):
        chain.wait(milestone)
    scene.finish()
    chain.check_tokens("killed", "another", "granted", "neighbour finished")
    chain.check_tokens("killed", "victim finished")


@pytest.mark.parametrize(
    ("killed", "status", "apart"),
    [
        ("Worker", EXIT_CODE, ("killed", "left")),
        ("EngineCore", EXIT_CODE, ("left", "gone")),  # its lease line closes with it
        ("API server", -signal.SIGKILL, ("killed", "left")),
    ],
)
def test_a_stream_goes_on_while_a_neighbour_ends_and_gets_all_it_had(
    two: Pair, scene: Scene, killed: str, status: int, apart: tuple[str, str]
) -> None:
    chain, tree, victim = scene.chain, scene.tree, two.victim
    scene.begin()
    title = f"{two.victim_name} (pid {tree.pid_of('EngineCore')}) left"
    chain.add("killed")
    tree.kill(victim.process.pid if killed == "API server" else tree.pid_of(killed))
    chain.watch("left", lambda: title in arbiter_log(two.run_dir))
    chain.watch("gone", tree.have_ended)
    chain.watch("granted", lambda: two.held("neighbour") > POOL - FLOOR)
    for milestone in ("left", "gone", "granted"):
        chain.wait(milestone)
    assert victim.process.wait(EVENT_WAIT_S) == status, victim.log()
    assert scene.requests.cut_short() == LONG_REQUESTS, "nobody waits for whom is dead"
    scene.finish()
    assert set(current_books(two.run_dir)["instances"]) == {"neighbour"}
    chain.check_tokens(*apart)
    chain.check_tokens("killed", "gone", "neighbour finished")
    chain.check_order("left", "granted", "neighbour finished")

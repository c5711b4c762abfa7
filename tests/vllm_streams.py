"""Clients that stream, clients that never rest, and a record of what happened in which order."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vllm_servers import REQUEST_WAIT_S, Server

TOKEN = "token"
EVENT_WAIT_S = 120.0
LOOK_PAUSE_S = 0.01
UNDER_WAY = 4
"""So many tokens may still come from an engine that stands still: what it had computed."""


class Chain:
    """What happened, in order, told by any thread: milestones and the tokens of one stream."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: list[tuple[str, float]] = []
        self._watches: list[threading.Thread] = []
        self._over = False

    def add(self, event: str) -> None:
        """Write an event down."""
        with self._changed:
            self._events.append((event, time.monotonic()))
            self._changed.notify_all()

    def add_token(self) -> None:
        """Write a token of the stream down."""
        self.add(TOKEN)

    def watch(self, event: str, happened: Callable[[], object]) -> None:
        """Write `event` down once `happened()` is true, which another thread asks."""

        def look() -> None:
            while not self._over and not happened():
                time.sleep(LOOK_PAUSE_S)
            self.add(f"end of the watch for {event}" if self._over else event)

        self._watches.append(threading.Thread(target=look, name=f"watch-{event}", daemon=True))
        self._watches[-1].start()

    def wait(self, event: str) -> None:
        """Wait, bounded, for a milestone."""
        with self._changed:
            came = self._changed.wait_for(lambda: event in self._names(), EVENT_WAIT_S)
            assert came, f"no '{event}' within {EVENT_WAIT_S} s\n{self}"

    def wait_tokens(self) -> None:
        """Wait, bounded, until more tokens have come since this call than were under way."""
        with self._changed:
            before = self._names().count(TOKEN)
            came = self._changed.wait_for(
                lambda: self._names().count(TOKEN) > before + UNDER_WAY, EVENT_WAIT_S
            )
            assert came, f"stood still for {EVENT_WAIT_S} s\n{self}"

    def tokens(self, first: str, last: str) -> int:
        """Return how many tokens came between two milestones; fails if they came otherwise."""
        with self._changed:
            names = self._names()
        begin, end = names.index(first), names.index(last)
        assert begin < end, f"'{last}' came before '{first}'\n{self}"
        return names[begin:end].count(TOKEN)

    def check_tokens(self, *milestones: str) -> None:
        """Fail unless the milestones came in this order, and new tokens between any two."""
        for first, last in itertools.pairwise(milestones):
            assert self.tokens(first, last) > UNDER_WAY, (
                f"stood still from '{first}' to '{last}'\n{self}"
            )

    def check_order(self, *milestones: str) -> None:
        """Fail unless the milestones came in this order, whatever came between."""
        for first, last in itertools.pairwise(milestones):
            self.tokens(first, last)

    def close(self) -> None:
        """Watch for nothing any more."""
        self._over = True
        for watch in self._watches:
            watch.join()

    def __str__(self) -> str:
        """Return a line for each milestone: when, and which tokens came since the last one."""
        with self._changed:
            events = list(self._events)
        lines, tokens, silence_s = [], 0, 0.0
        began_s = last_s = events[0][1] if events else 0.0
        for event, at_s in events:
            silence_s = max(silence_s, at_s - last_s)
            if event == TOKEN:
                tokens, last_s = tokens + 1, at_s
                continue
            since = f"{tokens} tokens, longest silence {silence_s:.3f} s"
            lines.append(f"{at_s - began_s:8.3f} s  {since}, then: {event}")
            tokens, silence_s = 0, 0.0
        return "\n".join([*lines, f"{tokens} tokens since"])

    def _names(self) -> list[str]:
        return [event for event, _ in self._events]


class Stream:
    """One streaming request after another. `on_token`: called for every piece."""

    def __init__(
        self, server: Server, prompt: list[int], tokens: int, on_token: Callable[[], None]
    ) -> None:
        self._server, self._prompt, self._tokens = server, prompt, tokens
        self._on_token = on_token
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(self._go_on)

    def _go_on(self) -> None:
        while not self._closing.is_set():
            came = 0
            with self._server.stream(self._prompt, self._tokens) as pieces:
                for piece in pieces:
                    came += len(piece.choices[0].token_ids)
                    self._on_token()
                    if self._closing.is_set():
                        return
            assert came == self._tokens, f"cut short after {came} tokens"

    def check(self) -> None:
        """Fail, with the reason, if it has ended."""
        if self._future.done():
            self._future.result()
            raise AssertionError("nobody closed it")

    def close(self) -> None:
        """Leave it: the server aborts what is under way. Its error is lost."""
        self._closing.set()
        self._pool.shutdown()


class Streams:
    """Streaming requests to one server, all at once."""

    def __init__(self, server: Server, wanted: list[list[int]], tokens: int) -> None:
        self._server = server
        self._tokens = tokens
        self._closed = False
        self._pool = ThreadPoolExecutor(len(wanted))
        self._futures = [self._pool.submit(self._stream, prompt) for prompt in wanted]

    def _stream(self, prompt: list[int]) -> list[int]:
        ids: list[int] = []
        with self._server.stream(prompt, self._tokens) as pieces:
            for piece in pieces:
                ids += piece.choices[0].token_ids
                if self._closed:
                    break
        return ids

    @property
    def done(self) -> int:
        """How many have ended, well or not."""
        return sum(future.done() for future in self._futures)

    def finish(self) -> list[list[int]]:
        """Wait for all and return their tokens; fails if one failed or was cut short."""
        ids = [future.result(REQUEST_WAIT_S) for future in self._futures]
        assert [len(one) for one in ids] == [self._tokens] * len(ids)
        return ids

    def cut_short(self) -> int:
        """Wait for all and return how many failed or ended early: vLLM's server does either."""
        failed = [future.exception(REQUEST_WAIT_S) is not None for future in self._futures]
        ended = [f for f, bad in zip(self._futures, failed, strict=True) if not bad]
        return sum(failed) + sum(len(future.result()) < self._tokens for future in ended)

    def close(self) -> None:
        """Leave those that go on: the server aborts them. Their errors are lost."""
        self._closed = True
        self._pool.shutdown()


class Pressure:
    """Clients of one server of which each asks again as soon as it was answered."""

    def __init__(self, server: Server, wanted: list[list[int]], tokens: int) -> None:
        self.answered = 0
        self._server = server
        self._tokens = tokens
        self._stopping = False
        self._counting = threading.Lock()
        self._pool = ThreadPoolExecutor(len(wanted))
        self._futures: list[Future[None]] = [
            self._pool.submit(self._ask, prompt) for prompt in wanted
        ]

    def _ask(self, prompt: list[int]) -> None:
        while not self._stopping:
            answer: Any = self._server.complete(prompt, self._tokens)
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage.completion_tokens == self._tokens
            with self._counting:
                self.answered += 1

    def finish(self) -> None:
        """Ask no more and wait for what is due; fails if a single request did."""
        self._stopping = True
        for future in self._futures:
            future.result(REQUEST_WAIT_S)

    def close(self) -> None:
        """Ask no more. Idempotent."""
        self._stopping = True
        self._pool.shutdown()

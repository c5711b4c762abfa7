"""One instance: a process with an engine and the clients that press it.

Owns: the clients (one task per request), the sampling of levels, and the talk with the bench.
Must not know: policies, other instances. Started as `python -m bench.colocated.instance FD`,
where FD is its end of a socket pair; the end of that socket is the end of this process.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import hashlib
import importlib
import socket
import sys
import time
import traceback
from collections import deque

from bench.colocated.channel import (
    LINE_BYTES_MAX,
    Broken,
    FinishRun,
    FromInstance,
    Outcome,
    RunFinished,
    RunStarted,
    Spec,
    StartRun,
    Stop,
    Submit,
    read_order,
    write,
)
from bench.colocated.engine import Engine, EngineStart
from bench.colocated.outcome import Answered, Level
from bench.colocated.workload import Request, prompt_ids

ENGINES = {
    "vllm": "bench.colocated.vllm_engine",
    "sim": "bench.colocated.sim_engine",
}
"""Modules with a `start` (EngineStart); imported only by the instance that runs them."""

SILENCE_S = 0.25
"""A time without tokens is worth a note from here on."""
SILENCES_KEPT = 64
PROBE_PROMPT_TOKENS = 8
PROBE_OUTPUT_TOKENS = 20
"""Together less than a block of 32: once admitted, a probe needs no growth."""


class _Stream:
    """The tokens of all requests as one stream, and its silences.

    A silence is a time without any token while some request was in the middle of its answer.
    """

    def __init__(self) -> None:
        self._silences: deque[tuple[float, float]] = deque(maxlen=SILENCES_KEPT)
        self._newest_s = 0.0
        self._open = 0
        """Requests in the middle of their answer."""

    def note_tokens(self, now_s: float, *, first: bool) -> None:
        if self._open and now_s - self._newest_s >= SILENCE_S:
            self._silences.append((self._newest_s, now_s))
        self._newest_s = now_s
        self._open += first

    def note_end(self) -> None:
        self._open -= 1

    def silences_since(self, begin_s: float) -> list[tuple[float, float]]:
        return [silence for silence in self._silences if silence[1] > begin_s]


class Instance:
    """The clients of one engine."""

    def __init__(self, engine: Engine, spec: Spec, writer: asyncio.StreamWriter) -> None:
        self._engine = engine
        self._spec = spec
        self._writer = writer
        self._run = 0
        self._clients: set[asyncio.Task[None]] = set()
        self._probes: list[asyncio.Task[None]] = []
        self._probed: list[Answered] = []
        self._sampler: asyncio.Task[None] | None = None
        self._levels: list[Level] = []
        self._stream = _Stream()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Follow orders until told to stop or the bench is gone."""
        self._say(self._engine.ready)
        while True:
            order = await read_order(reader)
            if isinstance(order, StartRun):
                await self._start_run(order)
            elif isinstance(order, Submit):
                for request in order.requests:
                    task = asyncio.create_task(self._client(request))
                    self._clients.add(task)
                    task.add_done_callback(self._clients.discard)
            elif isinstance(order, FinishRun):
                await self._finish_run()
            elif order is None or isinstance(order, Stop):
                return

    def _say(self, message: FromInstance) -> None:
        write(self._writer, message)

    async def _start_run(self, order: StartRun) -> None:
        self._run += 1
        self._levels, self._probed = [], []
        await self._engine.begin_run()
        self._sampler = asyncio.create_task(self._sample())
        self._probes = [asyncio.create_task(self._probe(k)) for k in range(order.probes)]
        self._say(RunStarted())

    async def _finish_run(self) -> None:
        for task in (*self._probes, self._sampler):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._levels.append(await self._engine.level())
        counted = await self._engine.counted()
        self._say(RunFinished(levels=self._levels, counted=counted, probes=self._probed))

    async def _sample(self) -> None:
        """Take levels at whole multiples of the interval: all instances at the same moments."""
        interval_s = self._spec.sample_s
        while True:
            self._levels.append(await self._engine.level())
            await asyncio.sleep(interval_s - time.monotonic() % interval_s)

    async def _client(self, request: Request) -> None:
        await asyncio.sleep(request.at_s)
        prompt = prompt_ids(request, self._spec.vocabulary)
        answered = await self._ask(
            request.index, f"{self._run}-{request.index}", prompt, request.output_tokens
        )
        self._say(Outcome(answered=answered))

    async def _probe(self, number: int) -> None:
        """Send one-block requests one after another, each with a prompt of its own."""
        count = 0
        while True:
            index = number * 1_000_000 + count
            count += 1
            request = Request(index, 0.0, PROBE_PROMPT_TOKENS, PROBE_OUTPUT_TOKENS, index)
            self._probed.append(
                await self._ask(
                    index,
                    f"{self._run}-probe-{index}",
                    prompt_ids(request, self._spec.vocabulary),
                    PROBE_OUTPUT_TOKENS,
                    probe=True,
                )
            )

    async def _ask(
        self, index: int, request_id: str, prompt: list[int], tokens: int, *, probe: bool = False
    ) -> Answered:
        submitted_s = time.monotonic()
        first_s: float | None = None
        got, error, stream = 0, "", self._stream
        digest = hashlib.blake2b(digest_size=8)
        try:
            async for new in self._engine.generate(request_id, prompt, tokens):
                if not new:
                    continue
                now_s = time.monotonic()
                stream.note_tokens(now_s, first=first_s is None)
                first_s = now_s if first_s is None else first_s
                got += len(new)
                digest.update(array.array("I", new).tobytes())
            if got != tokens:
                error = f"{got} of {tokens} tokens"
        except Exception as failure:  # any failure of a request is a result, not ours to judge
            error = f"{type(failure).__name__}: {failure}"
        finally:
            if first_s is not None:
                stream.note_end()
        return Answered(
            index=index,
            submitted_s=submitted_s,
            first_s=first_s,
            last_s=time.monotonic(),
            tokens=got,
            error=error,
            probe=probe,
            digest=digest.hexdigest(),
            silences=[] if first_s is None else stream.silences_since(first_s),
        )


async def run(descriptor: int) -> int:
    """Serve the bench at `descriptor`; returns the exit status."""
    link = socket.socket(fileno=descriptor)
    reader, writer = await asyncio.open_unix_connection(sock=link, limit=LINE_BYTES_MAX)
    spec = await read_order(reader)
    if not isinstance(spec, Spec):
        return 1
    engine: Engine | None = None
    try:
        start: EngineStart = importlib.import_module(ENGINES[spec.engine]).start
        engine = await start(spec.name, spec.policy, spec.engine_args)
        await Instance(engine, spec, writer).serve(reader)
        return 0
    except Exception as error:  # the bench shows the reason; the log has the rest
        traceback.print_exc()
        write(writer, Broken(why=f"{type(error).__name__}: {error}"))
        return 1
    finally:
        if engine is not None:
            await engine.stop()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


if __name__ == "__main__":
    sys.exit(asyncio.run(run(int(sys.argv[1]))))

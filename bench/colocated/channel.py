"""JSON lines between the bench and its instances, over one socket pair per instance.

Owns: the messages and their encoding. Must not know: what either side does with them. When
the bench dies its end closes, and an instance takes that as the order to stop.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from bench.colocated.outcome import Answered, Counted, Level
from bench.colocated.workload import Request

LINE_BYTES_MAX = 1 << 22


class Spec(msgspec.Struct, frozen=True, kw_only=True, tag="spec"):
    """First line to an instance: what it is. `engine_args` are the engine's own."""

    name: str
    policy: str
    engine: str
    sample_s: float
    vocabulary: int
    engine_args: dict[str, Any]


class StartRun(msgspec.Struct, frozen=True, kw_only=True, tag="start_run"):
    """Forget prefixes and counters; sample levels until FinishRun. Answered by RunStarted.

    `probes`: clients that send one-block requests one after another through the run.
    """

    probes: int = 0


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """Send these requests, each `at_s` seconds after now. Answered by an Outcome for each."""

    requests: tuple[Request, ...]


class FinishRun(msgspec.Struct, frozen=True, kw_only=True, tag="finish_run"):
    """Stop probes and sampling. Answered by RunFinished."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Shut the engine down and exit."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine is up. `capacity_bytes`: KV memory it can have by itself, all ranks."""

    capacity_bytes: int
    facts: dict[str, Any] = {}


class RunStarted(msgspec.Struct, frozen=True, kw_only=True, tag="run_started"):
    """Prefixes and counters are forgotten."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """One request was answered or failed."""

    answered: Answered


class RunFinished(msgspec.Struct, frozen=True, kw_only=True, tag="run_finished"):
    """Levels and counters of the run, and the probes' outcomes."""

    levels: list[Level]
    counted: Counted
    probes: list[Answered] = []


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag="broken"):
    """The engine cannot go on; the instance exits after this."""

    why: str


ToInstance = Spec | StartRun | Submit | FinishRun | Stop
FromInstance = Ready | RunStarted | Outcome | RunFinished | Broken

_encoder = msgspec.json.Encoder()
_to_instance: msgspec.json.Decoder[ToInstance] = msgspec.json.Decoder(ToInstance)
_from_instance: msgspec.json.Decoder[FromInstance] = msgspec.json.Decoder(FromInstance)


def write(writer: asyncio.StreamWriter, message: ToInstance | FromInstance) -> None:
    """Queue one message; the other end takes it as soon as it can."""
    writer.write(_encoder.encode(message) + b"\n")


async def read_order(reader: asyncio.StreamReader) -> ToInstance | None:
    """Return the next order, None when the bench is gone."""
    line = await _line(reader)
    return _to_instance.decode(line) if line else None


async def read_report(reader: asyncio.StreamReader) -> FromInstance | None:
    """Return the next report, None when the instance is gone."""
    line = await _line(reader)
    return _from_instance.decode(line) if line else None


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readline()
    except ConnectionError:
        return b""
    return line if line.endswith(b"\n") else b""  # half a line: the other end died writing it

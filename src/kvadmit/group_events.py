"""What the group machine is told (events) and what it asks for (effects).

Owns: the two vocabularies between `group.Group` and its shell. Must not know: how either is
carried out. An effect says all its shell needs; what must come first stands on its type.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvadmit.link import Call
from kvadmit.messages import (
    AgentHello,
    Answer,
    BaseMeasured,
    Bye,
    DeviceReading,
    Geometry,
    Headroom,
    Hello,
    MapGrant,
    ReadDevice,
    Report,
    ToInstance,
)
from kvadmit.port import PoolEvent, PoolOrder

# --- events --------------------------------------------------------------------------------


class StartRequested(msgspec.Struct, frozen=True):
    """The engine is about to take `start_bytes` per device beside elastic KV."""

    now_s: float
    start_bytes: dict[str, int]


class GeometryKnown(msgspec.Struct, frozen=True):
    """The KV cache is planned; the first allowance must cover its prefix."""

    now_s: float
    geometry: Geometry


class AgentJoined(msgspec.Struct, frozen=True):
    """A rank said hello on its own lease line."""

    now_s: float
    hello: AgentHello


class AgentLost(msgspec.Struct, frozen=True):
    """A rank's lease line closed."""

    now_s: float
    rank: int


class AgentSent(msgspec.Struct, frozen=True):
    """A rank answered an order, published a reading or measured its base."""

    now_s: float
    rank: int
    message: Answer | Headroom | BaseMeasured


class ArbiterFound(msgspec.Struct, frozen=True):
    """A channel to the arbiter is open."""

    now_s: float


class ArbiterLost(msgspec.Struct, frozen=True):
    """The arbiter's lease line closed, and its channel with it."""

    now_s: float


class ArbiterSent(msgspec.Struct, frozen=True):
    """The arbiter sent a message."""

    now_s: float
    message: ToInstance


class ReadingTaken(msgspec.Struct, frozen=True):
    """The reading asked for by ReadHere; its sequence is not looked at."""

    now_s: float
    reading: DeviceReading


class PoolSent(msgspec.Struct, frozen=True):
    """The pool posted its levels or returned extents."""

    now_s: float
    event: PoolEvent


class StopRequested(msgspec.Struct, frozen=True):
    """The engine shuts down cleanly."""

    now_s: float


class TimerFired(msgspec.Struct, frozen=True):
    """The timer started by StartTimer is due."""

    now_s: float
    timer: str


Event = (
    StartRequested
    | GeometryKnown
    | AgentJoined
    | AgentLost
    | AgentSent
    | ArbiterFound
    | ArbiterLost
    | ArbiterSent
    | ReadingTaken
    | PoolSent
    | StopRequested
    | TimerFired
)

# --- effects -------------------------------------------------------------------------------


class SendAgent(msgspec.Struct, frozen=True):
    """Send to one rank."""

    rank: int
    message: MapGrant | ReadDevice


class SendArbiter(msgspec.Struct, frozen=True):
    """Send to the arbiter; of unsent reports only the newest matters."""

    message: Hello | Report | Bye


class ReadHere(msgspec.Struct, frozen=True):
    """Read `device` without an agent (none has joined yet) and without a CUDA context."""

    device: str


class GivePool(msgspec.Struct, frozen=True):
    """Put an order into the pool's port; a parked or idle engine wakes."""

    order: PoolOrder


class Hold(msgspec.Struct, frozen=True):
    """Set the port's hold time: until then running requests are held, 0 ends it."""

    until_s: float


class StartTimer(msgspec.Struct, frozen=True):
    """Report TimerFired at `at_s`; replaces a running timer of that name."""

    timer: str
    at_s: float


class StopTimer(msgspec.Struct, frozen=True):
    """Forget the timer."""

    timer: str


class Settle(msgspec.Struct, frozen=True):
    """Answer the engine's blocking call: '' is success, else the reason."""

    call: Call
    error: str = ""


Histograms = Literal[
    "grow_latency_s", "grant_wait_s", "prepare_call_s", "commit_call_s", "decommit_call_s"
]
"""What is timed: whole growths, waits for an allowance, and the slowest rank's driver calls."""


class Observe(msgspec.Struct, frozen=True):
    """Add one sample to a histogram, in seconds."""

    name: Histograms
    value_s: float


class Note(msgspec.Struct, frozen=True):
    """One line for the log: a state changed that an operator may care about."""

    level: Literal["info", "warning", "error"]
    text: str


class EngineLost(msgspec.Struct, frozen=True):
    """A rank is gone for good; the engine cannot serve on."""

    reason: str


Effect = (
    SendAgent
    | SendArbiter
    | ReadHere
    | GivePool
    | Hold
    | StartTimer
    | StopTimer
    | Settle
    | Observe
    | Note
    | EngineLost
)

"""Events and effects of the arbitration machine (`arbitration`).

Owns: the shapes that cross the machine's border. Must not know: state. Times are seconds on the
host's monotonic clock; a peer is named by its routing id, INCARNATION.NUMBER.
"""

from __future__ import annotations

import msgspec

from kvadmit.messages import ToArbiter, ToInstance

# --- events --------------------------------------------------------------------------------


class PeerSent(msgspec.Struct, frozen=True):
    """A member, or an operator's tool, sent a message."""

    now_s: float
    peer: str
    message: ToArbiter


class PeerLost(msgspec.Struct, frozen=True):
    """A peer's lease line closed."""

    now_s: float
    peer: str


class TimerFired(msgspec.Struct, frozen=True):
    """The timer started by StartTimer is due."""

    now_s: float
    timer: str


Event = PeerSent | PeerLost | TimerFired

# --- effects -------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Send to a peer; of unsent allowances only the newest matters."""

    peer: str
    message: ToInstance


class Drop(msgspec.Struct, frozen=True):
    """Close the peer's channel once what was sent before has left."""

    peer: str


class StartTimer(msgspec.Struct, frozen=True):
    """Report TimerFired at `at_s`; replaces a running timer of that name."""

    timer: str
    at_s: float


class StopTimer(msgspec.Struct, frozen=True):
    """Forget the timer."""

    timer: str


class Note(msgspec.Struct, frozen=True):
    """One line for the log."""

    text: str


class Exit(msgspec.Struct, frozen=True):
    """Nobody is left: end the arbiter's process."""


Effect = Send | Drop | StartTimer | StopTimer | Note | Exit

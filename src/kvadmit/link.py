"""The coordinator's side of the arbiter channel: membership, epoch and the newest allowance.

Owns: who we said we are, whether the arbiter knows us, what it last allowed, and the
blocking calls of the engine's start that wait for its answers. Must not know: extents'
states, sockets, clocks. `group.Group` drives it and sees only levels.

On loss the allowance falls to what is held and nothing new starts; resident memory serves
on. A new arbiter counts a new epoch; a message of an older one changes nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvadmit.messages import (
    Allowance,
    Elect,
    Geometry,
    Hello,
    Refused,
    Resync,
    Seen,
    StartTurn,
    ToInstance,
    Welcome,
)

Phase = Literal["lost", "greeting", "joined"]
Call = Literal["start", "geometry", "ready"]

ANSWER_WAIT_S = 2.0
"""A hello or a report the arbiter has not confirmed is sent again after this long."""


class ArbiterLink:
    """What this instance knows of its arbiter.

    `allowance`: extents we may have backed or preparing. `blocked_revision`: the allowance
    under which a rank refused; nothing new is tried before a newer one arrives. It is 0 before the
    first allowance of an epoch: whoever keeps books does not know then what we were allowed.
    """

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.phase: Phase = "lost"
        self.epoch = 0
        self.revision = 0
        self.allowance = 0
        self.ceiling = 0
        self.pressure = False
        self.reason = ""
        self.refusal = ""
        self.blocked_revision = 0
        self.start_revision = 1
        """The hello revision that announced `start_bytes`."""
        self.start_granted = False
        self.welcomed = 0
        """Newest hello revision the arbiter has confirmed."""
        self.report_seen = 0
        self.stale_messages = 0

    def found(self) -> Hello:
        """Return the greeting for an arbiter whose channel just opened."""
        self.phase, self.welcomed = "greeting", 0
        return self.hello

    @property
    def unanswered(self) -> bool:
        """Whether the arbiter has not confirmed the newest hello."""
        return self.phase != "lost" and self.welcomed < self.hello.revision

    def lost(self, held: int) -> None:
        """Note the loss: what is held stays allowed, nothing more."""
        self.phase = "lost"
        self.allowance = held
        self.revision = 0
        self.blocked_revision = 0
        self.pressure = False

    def introduce(
        self,
        *,
        start_bytes: dict[str, int] | None = None,
        geometry: Geometry | None = None,
        base_bytes: dict[str, int] | None = None,
    ) -> Hello:
        """Return the hello with what has become known since; the arbiter takes the newest."""
        changes: dict[str, object] = {"revision": self.hello.revision + 1}
        if start_bytes is not None:
            changes["start_bytes"] = start_bytes
        if geometry is not None:
            changes["geometry"] = geometry
        if base_bytes is not None:
            changes["base_bytes"] = base_bytes
        self.hello = msgspec.structs.replace(self.hello, **changes)
        if start_bytes is not None:
            self.start_revision, self.start_granted = self.hello.revision, False
        return self.hello

    def receive(self, message: ToInstance, held: int) -> Literal["", "hello", "report", "elect"]:
        """Apply a message; return what the instance now owes the arbiter."""
        if self.phase == "lost":
            self.stale_messages += 1
            return ""
        match message:
            case Welcome():
                if message.epoch < self.epoch:
                    self.stale_messages += 1
                    return ""
                if message.epoch > self.epoch:
                    self.epoch, self.revision = message.epoch, 0
                    self.allowance, self.blocked_revision = held, 0
                self.welcomed = max(self.welcomed, message.revision)
                rejoined = self.phase != "joined"
                self.phase = "joined"
                return "report" if rejoined else ""
            case Seen():
                if self._current(message.epoch):
                    self.report_seen = max(self.report_seen, message.revision)
                return ""
            case Resync():
                if message.epoch < self.epoch:
                    self.stale_messages += 1
                    return ""
                # The arbiter does not know us any more: its revisions may begin anew.
                self.phase, self.revision = "greeting", 0
                self.allowance, self.blocked_revision = held, 0
                return "hello"
            case Refused():
                self.refusal = message.reason
                return ""
            case StartTurn():
                if self._current(message.epoch) and message.revision >= self.start_revision:
                    self.start_granted = True
                return ""
            case Allowance():
                if not self._current(message.epoch) or message.revision <= self.revision:
                    return ""
                self.revision, self.allowance = message.revision, message.extents
                self.ceiling, self.reason = message.ceiling, message.reason
                self.pressure = message.pressure
                return "report"
            case Elect():
                return "elect" if self._current(message.epoch) else ""
        return ""

    @property
    def may_grow(self) -> bool:
        """Whether the newest allowance is one under which nothing was refused yet."""
        return self.phase == "joined" and self.revision > self.blocked_revision

    def block(self) -> None:
        """Start nothing more under this allowance: a rank refused."""
        self.blocked_revision = self.revision

    def _current(self, epoch: int) -> bool:
        if epoch == self.epoch and self.phase == "joined":
            return True
        self.stale_messages += 1
        return False

    def snapshot(self) -> dict[str, object]:
        """Return the link's state as plain data."""
        return {
            "phase": self.phase,
            "epoch": self.epoch,
            "allowance": self.allowance,
            "allowance_revision": self.revision,
            "ceiling": self.ceiling,
            "pressure": self.pressure,
            "reason": self.reason,
            "refusal": self.refusal,
            "stale_messages": self.stale_messages,
        }

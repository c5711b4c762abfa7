"""Every error kvadmit raises, in one tree.

Owns: the classes, their stable wire codes, and what each carries. Must not know: who
raises or catches them. A refusal (an expected "no") is a value, never one of these.
"""

from __future__ import annotations

from typing import Any, ClassVar


class KvAdmitError(Exception):
    """Base of every error a caller of kvadmit may meet.

    `code` is stable across releases and travels on the wire and in `--json` output.
    Pickles by its constructor arguments, so it survives vLLM's worker RPC.
    """

    code: ClassVar[str] = "kvadmit"


class ConfigError(KvAdmitError):
    """A setting cannot be used: names the key, what was given and what is allowed."""

    code = "config"

    def __init__(self, key: str, given: object, allowed: str) -> None:
        super().__init__(key, given, allowed)
        self.key = key
        self.given = given
        self.allowed = allowed

    def __str__(self) -> str:
        return f"kvadmit.{self.key}: got {self.given!r}; allowed: {self.allowed}"


class UnsupportedError(KvAdmitError):
    """This vLLM, feature or machine cannot run kvadmit: names what, why and the cure."""

    code = "unsupported"


class ProtocolError(KvAdmitError):
    """A message broke the wire contract; the state it addressed is unchanged."""

    code = "protocol"


class RemoteProtocolError(ProtocolError):
    """The peer sent something malformed, oversized or out of turn."""

    code = "protocol.remote"


class LocalProtocolError(ProtocolError):
    """We were about to send or process something illegal: a bug on our side."""

    code = "protocol.local"


class VersionError(ProtocolError):
    """The peer speaks another protocol version; both are named."""

    code = "protocol.version"


class StaleEpochError(ProtocolError):
    """A message of an older membership; it changed nothing."""

    code = "protocol.stale_epoch"


class PeerError(KvAdmitError):
    """A peer did not do its part: names the peer, the operation and the seconds waited."""

    code = "peer"

    def __init__(self, peer: str, operation: str, seconds: float | None = None) -> None:
        super().__init__(peer, operation, seconds)
        self.peer = peer
        self.operation = operation
        self.seconds = seconds

    def __str__(self) -> str:
        waited = "" if self.seconds is None else f" (waited {self.seconds:.1f} s)"
        return f"{self.peer}: {self.operation}{waited}"


class PeerLostError(PeerError):
    """The peer's lease line closed."""

    code = "peer.lost"


class PeerTimeoutError(PeerError):
    """The peer is alive but gave no answer within its deadline."""

    code = "peer.timeout"


class CapacityError(KvAdmitError):
    """Memory that was asked for can never, or not in time, be had: says who holds what."""

    code = "capacity"


class DriverError(KvAdmitError):
    """A memory driver call failed: names the call, the device and the driver's own words."""

    code = "driver"

    def __init__(self, call: str, device: str, name: str, text: str = "") -> None:
        super().__init__(call, device, name, text)
        self.call = call
        self.device = device
        self.name = name
        self.text = text

    def __str__(self) -> str:
        tail = f": {self.text}" if self.text else ""
        return f"{self.call} on {self.device} failed with {self.name}{tail}"


class DeviceOutOfMemoryError(DriverError):
    """The driver said, in exactly these words, that the device has no memory left."""

    code = "driver.out_of_memory"


class GroupDivergedError(KvAdmitError):
    """Ranks of one group reported states that no order of ours can have produced."""

    code = "group_diverged"


class InvariantViolation(AssertionError):
    """A rule that must always hold does not. Never caught; carries the story that led here."""

    def __init__(self, rule: str, detail: str, story: Any = None) -> None:
        super().__init__(rule, detail, story)
        self.rule = rule
        self.detail = detail
        self.story = story

    def __str__(self) -> str:
        story = "" if self.story is None else f"\nstory: {self.story}"
        return f"{self.rule}: {self.detail}{story}"

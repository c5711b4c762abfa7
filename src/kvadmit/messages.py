"""The wire: every message between coordinator, agents and arbiter.

Owns: the structs, the protocol version, encoding, and the size limit checked before any
parsing. Must not know: sockets, or what a receiver does with a message.

One message is two frames: a `Header` (version, incarnation, sequence), read first so that
another protocol version is named and not guessed at, and a body, a tagged struct. Extents
travel as runs `(first, count)`. Levels are absolute and carry a revision: the newest wins,
repeats change nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvadmit.errors import RemoteProtocolError, VersionError

PROTOCOL_VERSION = 3
FRAME_BYTES_MAX = 1 << 20
"""Largest body accepted, checked before parsing. A grant of 4,096 scattered extents is 40 KiB."""

Runs = tuple[tuple[int, int], ...]
"""Extents as `(first, count)`, ascending, not touching each other."""

OrderKind = Literal["prepare", "commit", "abort", "fence", "decommit"]
Outcome = Literal["done", "refused", "failed"]


class Header(msgspec.Struct, array_like=True, frozen=True):
    """First frame of every message.

    `incarnation` names one life of the sending process (never reused); `sequence` counts
    its messages on this channel from 1, so a receiver can see a gap or a repeat.
    """

    version: int
    incarnation: str
    sequence: int


class DeviceReading(msgspec.Struct, frozen=True, kw_only=True):
    """A headroom event: what the driver shows of one device, in bytes.

    `sequence` orders readings of one rank. `operations` is how many prepare, commit, abort
    or decommit calls of that rank were running when it was read; 0 makes it a quiet reading.
    `at_s`: when it was read, on the host's monotonic clock, which orders readings of everybody.
    """

    device: str
    free_bytes: int
    total_bytes: int
    sequence: int
    operations: int = 0
    at_s: float


# --- agent -> coordinator ------------------------------------------------------------------


class AgentHello(msgspec.Struct, frozen=True, kw_only=True, tag="agent_hello"):
    """First message of an agent: which rank it is and what it already holds mapped."""

    rank: int
    pid: int
    device: str
    granule_bytes: int
    extent_bytes: int
    """Physical bytes behind one extent on this rank."""
    extents: int
    mapped: Runs
    reading: DeviceReading


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """The one reply to an order.

    `done`: extents that reached the order's end state on this rank. `partial`: extents of
    a commit on which a map call was made but which are not usable (orphans here). An extent
    in neither is as it was before the order. `outcome` is `done` iff every extent is done;
    `refused` means the device had no room (prepare only, nothing changed); `failed` is
    anything else, with the driver's words in `reason`. `took_s`: for how long the driver was at
    it, all calls of the order together.
    """

    order: int
    rank: int
    kind: OrderKind
    outcome: Outcome
    done: Runs
    partial: Runs = ()
    reason: str = ""
    took_s: float = 0.0
    reading: DeviceReading | None = None


class Headroom(msgspec.Struct, frozen=True, kw_only=True, tag="headroom"):
    """A reading published unasked, or in answer to ReadDevice."""

    rank: int
    reading: DeviceReading


class BaseMeasured(msgspec.Struct, frozen=True, kw_only=True, tag="base_measured"):
    """What the rank's process holds on its device beside elastic KV, in bytes, once warmed up."""

    rank: int
    base_bytes: int


# --- coordinator -> agent ------------------------------------------------------------------


class MapGrant(msgspec.Struct, frozen=True, kw_only=True, tag="map_grant"):
    """One batched order to a rank.

    Order numbers grow by one within a coordinator's life; a rank ignores an order older than
    the newest it has seen for any of the extents, and answers a repeat as it did before.
    `fence` (fence, decommit): the last scheduled step that could name one of these extents.
    """

    order: int
    kind: OrderKind
    extents: Runs
    fence: int = 0


class ReadDevice(msgspec.Struct, frozen=True, kw_only=True, tag="read_device"):
    """Ask an agent for a fresh reading of its device (arbiter's election)."""


# --- coordinator -> arbiter ----------------------------------------------------------------


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """What one extent of an instance costs, known once the KV cache has been planned.

    All figures in extents unless named bytes. `extent_bytes`: device -> bytes behind one
    extent, summed over the instance's ranks on that device.
    """

    extents: int
    extent_blocks: int
    prefix: int
    floor: int
    cap: int
    extent_bytes: dict[str, int]


class Mps(msgspec.Struct, frozen=True):
    """How an instance's ranks share GPUs with other processes.

    `daemon`: the MPS daemon they are clients of, "" for none. `needed`: its ranks wait for each
    other in spinning kernels, so a neighbour on its GPUs must be a client of the same daemon.
    """

    daemon: str = ""
    needed: bool = False


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """An instance introduces itself; repeated, with `geometry`, once that is known.

    `devices`: device -> total bytes the instance believes it has (the host pool's size on
    the host backend; all instances must agree). `start_bytes`: device -> bytes it needs
    beside elastic KV. `base_bytes`: the measured figure that replaces it after warm-up.
    """

    revision: int
    name: str
    pid: int
    devices: dict[str, int]
    start_bytes: dict[str, int]
    base_bytes: dict[str, int] | None = None
    margin_bytes: int = 0
    weight: float = 1.0
    geometry: Geometry | None = None
    mps: Mps = Mps()
    settings: dict[str, str] = {}
    """For people only (status): model, backend, tp."""


class Report(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """The instance's level, in extents, absolute; the newest revision wins.

    `backed` counts resident, draining, fenced and spare extents; `leaving`, `spare`, `free`
    and `cached` are parts of it: leaving is being decommitted, spare is past its fence and
    given up at once, free is wholly free in the pool, cached is wholly free but for reusable
    prefixes. `running`: requests running. `need`: fewest more
    extents with which the instance makes its next step or admits its oldest waiter; `want
    >= need`: what its low watermark would like. `refused`: devices on which a prepare was
    refused or failed since the last report; their bytes are not granted again before a
    newer reading. `silent`: ranks that had to be asked again and have not answered, for
    people.
    """

    epoch: int
    revision: int
    allowance_seen: int
    backed: int
    preparing: int = 0
    orphan: int = 0
    leaving: int = 0
    spare: int = 0
    free: int = 0
    cached: int = 0
    need: int = 0
    want: int = 0
    running: int = 0
    refused: tuple[str, ...] = ()
    silent: tuple[int, ...] = ()
    devices: tuple[DeviceReading, ...] = ()
    counters: dict[str, int] = {}
    """For status only: growths, misses, rejections and the like, and waiting requests."""


class Bye(msgspec.Struct, frozen=True, kw_only=True, tag="bye"):
    """A clean exit: everything this instance held is released or about to be."""


class StatusQuery(msgspec.Struct, frozen=True, kw_only=True, tag="status_query"):
    """An operator's tool asks for the arbiter's snapshot."""


# --- arbiter -> coordinator ----------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The arbiter knows the instance as hello `revision` told it; its epoch from now on."""

    epoch: int
    revision: int


class Seen(msgspec.Struct, frozen=True, kw_only=True, tag="seen"):
    """The arbiter has taken report `revision` into its books; the next one may come."""

    epoch: int
    revision: int


class StartTurn(msgspec.Struct, frozen=True, kw_only=True, tag="start_turn"):
    """`start_bytes` of hello `revision` are booked: contexts and weights may be made now."""

    epoch: int
    revision: int


class Allowance(msgspec.Struct, frozen=True, kw_only=True, tag="allowance"):
    """The most extents the instance may have backed or preparing.

    Raising it is a grant, lowering it a reclaim. `ceiling`: the most extents this instance
    could ever be allowed, min(cap, virtual size, capacity). `pressure`: someone waits for
    memory, so a change of `free` or `cached` is worth a report at once. `deadline_s`:
    seconds within which a reclaim is expected to be met, 0 for none.
    """

    epoch: int
    revision: int
    extents: int
    ceiling: int
    pressure: bool = False
    reason: str = ""
    deadline_s: float = 0.0


class Elect(msgspec.Struct, frozen=True, kw_only=True, tag="elect"):
    """Have one agent read `device` and report it: a need waits while foreign bytes are used."""

    epoch: int
    device: str


class Resync(msgspec.Struct, frozen=True, kw_only=True, tag="resync"):
    """The message was of another epoch and changed nothing: say Hello and Report again."""

    epoch: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The instance may not join; `reason` names who holds what and the cure."""

    reason: str
    code: str = "capacity"


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """Answer to StatusQuery: the arbitration machine's snapshot, as plain JSON-able data."""

    snapshot: dict[str, object]


ToCoordinator = AgentHello | Answer | Headroom | BaseMeasured
ToAgent = MapGrant | ReadDevice
ToArbiter = Hello | Report | Bye | StatusQuery
ToInstance = Welcome | Seen | StartTurn | Allowance | Elect | Resync | Refused | Status
Message = ToCoordinator | ToAgent | ToArbiter | ToInstance

_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_body_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(header: Header, message: Message) -> list[bytes]:
    """Return the two frames of `message`."""
    return [_encoder.encode(header), _encoder.encode(message)]


def decode(frames: list[bytes]) -> tuple[Header, Message]:
    """Parse the two frames of one message.

    Raises VersionError when the header is of another protocol version (the body is not
    looked at) and RemoteProtocolError for anything else that does not fit.
    """
    if len(frames) != 2:
        raise RemoteProtocolError(f"a message has 2 frames, got {len(frames)}")
    if len(frames[0]) > 256 or len(frames[1]) > FRAME_BYTES_MAX:
        raise RemoteProtocolError(
            f"frames of {len(frames[0])} and {len(frames[1])} bytes; "
            f"at most 256 and {FRAME_BYTES_MAX} are read"
        )
    try:
        header = _header_decoder.decode(frames[0])
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"unreadable header: {error}") from error
    if header.version != PROTOCOL_VERSION:
        raise VersionError(
            f"peer {header.incarnation} speaks protocol {header.version}, "
            f"this process speaks {PROTOCOL_VERSION}"
        )
    try:
        return header, _body_decoder.decode(frames[1])
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"unreadable message: {error}") from error

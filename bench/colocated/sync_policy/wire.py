"""Calls from the scheduler to a rank: one order, one reply, over a unix stream.

Owns: the messages and their frames (four bytes of length, then msgpack). Must not know: what
an order does.
"""

from __future__ import annotations

import socket
import struct
from typing import Literal

import msgspec

from kvadmit.messages import Runs

_LENGTH = struct.Struct("=I")

Kind = Literal["grow", "undo", "shrink"]


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """First frame of a rank."""

    rank: int


class Order(msgspec.Struct, frozen=True, kw_only=True, tag="order"):
    """`grow`: check headroom, map. `undo`: unmap what a grow of this number mapped.

    `shrink`: unmap once the rank has enqueued step `fence`.
    """

    number: int
    kind: Kind
    extents: Runs
    fence: int = 0


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """The rank's one answer; when not `done`, nothing changed there and `reason` says why."""

    number: int
    rank: int
    done: bool
    reason: str = ""


Frame = Joined | Order | Reply

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def send(link: socket.socket, frame: Frame) -> None:
    """Send one frame; the link's timeout bounds the wait."""
    body = _encoder.encode(frame)
    link.sendall(_LENGTH.pack(len(body)) + body)


def receive(link: socket.socket) -> Frame | None:
    """Return the next frame, None when the other end is gone; raises TimeoutError."""
    head = _exactly(link, _LENGTH.size)
    if head is None:
        return None
    body = _exactly(link, _LENGTH.unpack(head)[0])
    return None if body is None else _decoder.decode(body)


def _exactly(link: socket.socket, count: int) -> bytes | None:
    parts = b""
    while len(parts) < count:
        try:
            part = link.recv(count - len(parts))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return parts

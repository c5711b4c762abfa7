from __future__ import annotations

import msgspec
import pytest

from kvadmit.errors import RemoteProtocolError, VersionError
from kvadmit.messages import (
    FRAME_BYTES_MAX,
    PROTOCOL_VERSION,
    Bye,
    Elect,
    Header,
    MapGrant,
    Message,
    decode,
    encode,
)

HEADER = Header(PROTOCOL_VERSION, "0123456789abcdef", 1)


def test_two_frames_and_back() -> None:
    grant = MapGrant(order=3, kind="prepare", extents=((1, 2), (9, 1)))
    frames = encode(HEADER, grant)
    assert len(frames) == 2
    assert decode(frames) == (HEADER, grant)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_frames(count: int) -> None:
    frames = (encode(HEADER, Bye()) * 2)[:count]
    with pytest.raises(RemoteProtocolError, match=f"got {count}"):
        decode(frames)


def test_another_version_is_named_before_the_body_is_read() -> None:
    frames = encode(Header(PROTOCOL_VERSION + 1, "feed", 1), Bye())
    with pytest.raises(VersionError) as refusal:
        decode([frames[0], b"\xff of a shape we cannot know"])
    assert "feed" in str(refusal.value)
    assert str(PROTOCOL_VERSION + 1) in str(refusal.value)
    assert str(PROTOCOL_VERSION) in str(refusal.value)


def test_oversized_frames_are_not_parsed() -> None:
    header, body = encode(HEADER, Bye())
    with pytest.raises(RemoteProtocolError, match="at most"):
        decode([header, body + bytes(FRAME_BYTES_MAX)])
    with pytest.raises(RemoteProtocolError, match="at most"):
        decode([header + bytes(256), body])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "no_such_message"}),
        msgspec.msgpack.encode({"type": "elect", "epoch": 1}),
        msgspec.msgpack.encode({"type": "elect", "epoch": "1", "device": "host"}),
        msgspec.msgpack.encode({"type": "map_grant", "order": 1, "kind": "undo", "extents": []}),
        msgspec.msgpack.encode({"type": "map_grant", "order": 1, "kind": "abort", "extents": [1]}),
        msgspec.msgpack.encode(["elect", 1, "host"]),
        encode(HEADER, Bye())[1] + b"\x00",
    ],
)
def test_a_body_that_does_not_fit(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="unreadable message"):
        decode([encode(HEADER, Bye())[0], body])


@pytest.mark.parametrize("header", [b"", b"\xc0", msgspec.msgpack.encode([1, "a"])])
def test_a_header_that_does_not_fit(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="unreadable header"):
        decode([header, encode(HEADER, Bye())[1]])


def test_a_field_from_a_later_release_is_passed_over() -> None:
    body = {"type": "elect", "epoch": 1, "device": "host", "flavour": "new"}
    frames = [encode(HEADER, Bye())[0], msgspec.msgpack.encode(body)]
    assert decode(frames)[1] == Elect(epoch=1, device="host")


def test_the_largest_grant_fits_its_frame() -> None:
    runs = tuple((2 * position, 1) for position in range(4096))
    frames = encode(HEADER, MapGrant(order=1, kind="commit", extents=runs))
    assert len(frames[1]) < FRAME_BYTES_MAX // 8
    assert decode(frames)[1] == MapGrant(order=1, kind="commit", extents=runs)


def test_every_message_has_its_own_tag() -> None:
    kinds = Message.__args__
    tags = {kind.__struct_config__.tag for kind in kinds}
    assert len(tags) == len(kinds)

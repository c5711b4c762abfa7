"""Every message survives the wire; no bytes do harm."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvadmit.errors import ProtocolError, RemoteProtocolError
from kvadmit.extents import check_runs, from_runs, to_runs
from kvadmit.messages import (
    PROTOCOL_VERSION,
    DeviceReading,
    Geometry,
    Header,
    Message,
    Runs,
    Status,
    decode,
    encode,
)

text = st.text(max_size=20)
counts = st.integers(0, 2**53)
extent_sets = st.sets(st.integers(0, 200), max_size=40)
st.register_type_strategy(int, counts)
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(str, text)

# Named by the type of a field: from_type would make tuples that are no runs.
runs = extent_sets.map(to_runs)
readings = st.builds(DeviceReading)
geometries = st.builds(Geometry, extent_bytes=st.dictionaries(text, counts, max_size=3))
plain = st.recursive(
    st.none() | st.booleans() | counts | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
headers = st.builds(Header, version=st.just(PROTOCOL_VERSION), incarnation=text, sequence=counts)


def strategy_for(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Build any instance of a message, its optional fields present or absent."""
    special = {
        Runs: runs,
        DeviceReading: readings,
        DeviceReading | None: st.none() | readings,
        tuple[DeviceReading, ...]: st.lists(readings, max_size=3).map(tuple),
        Geometry | None: st.none() | geometries,
    }
    if kind is Status:
        return st.builds(Status, snapshot=st.dictionaries(text, plain, max_size=4))
    hints = get_type_hints(kind)
    return st.builds(
        kind,
        **{
            field: special.get(hints[field], st.from_type(hints[field]))
            for field in kind.__struct_fields__
        },
    )


messages = st.one_of([strategy_for(kind) for kind in get_args(Message)])


@given(headers, messages)
def test_a_message_survives_the_wire(header: Header, message: Message) -> None:
    assert decode(encode(header, message)) == (header, message)


@given(st.lists(st.binary(max_size=300), max_size=4))
@example([b"\x93", b""])
def test_random_bytes_are_refused_or_read(frames: list[bytes]) -> None:
    """Anything but a ProtocolError would take down the peer that reads it."""
    with contextlib.suppress(ProtocolError):
        decode(frames)


@given(headers, messages, st.data())
def test_a_damaged_message_is_refused_or_read(
    header: Header, message: Message, data: st.DataObject
) -> None:
    frames = encode(header, message)
    which = data.draw(st.integers(0, 1))
    where = data.draw(st.integers(0, len(frames[which]) - 1))
    damaged = bytearray(frames[which])
    damaged[where] = data.draw(st.integers(0, 255))
    frames[which] = bytes(damaged)
    with contextlib.suppress(ProtocolError):
        decode(frames)


@given(headers, messages, st.data())
def test_a_cut_message_is_refused(header: Header, message: Message, data: st.DataObject) -> None:
    frames = encode(header, message)
    kept = data.draw(st.integers(0, len(frames[1]) - 1))
    with pytest.raises(RemoteProtocolError):
        decode([frames[0], frames[1][:kept]])


@given(extent_sets)
def test_runs_are_the_set_they_came_from(extents: set[int]) -> None:
    found = to_runs(extents)
    assert from_runs(found) == sorted(extents)
    check_runs(found, 201)
    assert all(first + count < after for (first, count), (after, _) in pairwise(found))


@given(st.lists(st.tuples(st.integers(-3, 30), st.integers(-3, 30)), max_size=6).map(tuple))
def test_runs_of_a_peer_are_accepted_only_in_the_form_we_send(given_runs: Runs) -> None:
    try:
        check_runs(given_runs, 30)
    except RemoteProtocolError:
        if all(first >= 0 and count > 0 and first + count <= 30 for first, count in given_runs):
            assert to_runs(set(from_runs(given_runs))) != given_runs
    else:
        assert to_runs(from_runs(given_runs)) == given_runs

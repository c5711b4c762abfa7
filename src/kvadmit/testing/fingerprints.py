"""When two simulated hosts are one: a fingerprint of all that could ever tell them apart.

Owns: which numbers only say what is newer, and what is there for people. Must not know: what a
host does.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

EVERYBODYS = "time"
"""The one kind whose numbers are compared between instances too."""
_NUMBERS = {
    ("Report", "revision"): "report",
    ("Seen", "revision"): "report",
    ("ArbiterLink", "report_seen"): "report",
    ("Reports", "_revision"): "report",
    ("Report", "allowance_seen"): "allowance",
    ("Allowance", "revision"): "allowance",
    ("ArbiterLink", "revision"): "allowance",
    ("ArbiterLink", "blocked_revision"): "allowance",
    ("Account", "revision"): "allowance",
    ("Account", "_sent"): "allowance",
    ("Reports", "_readings_taken"): "reading",
    ("DeviceReading", "sequence"): "reading",
    ("DeviceReading", "at_s"): EVERYBODYS,
    ("DeviceBook", "_read_at_s"): EVERYBODYS,
    ("Reports", "_newest_of_rank"): "reading",
    ("Member", "_readings"): "reading",
    ("Instance", "order"): "age",
    ("Arbitration", "_orders"): "age",
}
"""Numbers that are only ever compared, by kind: which is newer counts, not by how much."""
_IGNORED = {"counters", "needs_since_s", "stale_messages", "stale_orders"}
"""What is there for people."""


def fingerprint(host: Any) -> bytes:
    """Return 16 bytes that two hosts share if nothing they do could ever tell them apart.

    The order in which a dictionary or set was filled does not count, nor do empty links. Numbers
    that only grow are replaced by their rank among all of their kind and instance.
    """
    numbers: Numbers = {}
    state = {**vars(host), "links": {k: q for k, q in host.links.items() if q}}
    plain = _plain(state, "", numbers)
    ranks = {
        kind: {number: rank for rank, number in enumerate(sorted(seen))}
        for kind, seen in numbers.items()
    }
    return hashlib.blake2b(repr(_ranked(plain, ranks)).encode(), digest_size=16).digest()


class _Number:
    """A number of some kind of some instance, to be replaced by its rank."""

    __slots__ = ("kind", "value")

    def __init__(self, kind: tuple[str, str], value: float) -> None:
        self.kind, self.value = kind, value


Numbers = dict[tuple[str, str], set[float]]


def _plain(value: Any, who: str, numbers: Numbers) -> Any:
    """Return `value` as lists and plain values; `who`: the instance it belongs to."""
    if value is None or isinstance(value, (int, float, str, bytes)):
        return value
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, dict):
        found = [(str(k), _plain(v, _whose(k) or who, numbers)) for k, v in value.items()]
        return sorted(found, key=lambda pair: pair[0])
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple, deque)):
        return [_plain(each, who, numbers) for each in value]
    name = type(value).__name__
    if name == "Instance" and hasattr(value, "number"):
        who = f"i{value.number}"
    plain: list[Any] = [name]
    for field, each in _fields(value):
        kind = _NUMBERS.get((name, field))
        if field in _IGNORED:
            continue
        plain.append(
            _plain(each, who, numbers) if kind is None else _note(each, kind, who, numbers)
        )
    return plain


def _whose(key: object) -> str:
    """Return the instance that a key of a dictionary names: a link, or a member's peer."""
    if isinstance(key, str):
        for word in key.split():
            if word[0] == "i" and word[1:].isdecimal():
                return word
    return ""


def _note(value: Any, kind: str, who: str, numbers: Numbers) -> Any:
    """Return `value`, a number or a dictionary that has numbers as keys or values, as numbers."""
    who = "" if kind == EVERYBODYS else who
    if isinstance(value, dict) and kind == "allowance":
        return [(_note(k, kind, who, numbers), v) for k, v in sorted(value.items())]
    if isinstance(value, dict):
        return [(k, _note(v, kind, who, numbers)) for k, v in sorted(value.items())]
    numbers.setdefault((kind, who), set()).add(value)
    return _Number((kind, who), value)


def _ranked(plain: Any, ranks: dict[tuple[str, str], dict[float, int]]) -> Any:
    if isinstance(plain, _Number):
        return ranks[plain.kind][plain.value]
    if isinstance(plain, (list, tuple)):
        return [_ranked(each, ranks) for each in plain]
    return plain


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            yield field, getattr(value, field)
        return
    yield from sorted(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        for slot in getattr(kind, "__slots__", ()):
            if hasattr(value, slot):
                yield slot, getattr(value, slot)

"""When two simulated hosts are one: pieces of a host, each kept once, and what tells hosts apart.

Owns: which numbers only say what is newer, what is there for people, and what a piece became under
which event. Must not know: what a host does.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import msgspec

_NUMBERS = {
    ("Report", "revision"): "report",
    ("Seen", "revision"): "report",
    ("ArbiterLink", "report_seen"): "report",
    ("Report", "allowance_seen"): "allowance",
    ("Allowance", "revision"): "allowance",
    ("ArbiterLink", "revision"): "allowance",
    ("ArbiterLink", "blocked_revision"): "allowance",
    ("Account", "revision"): "allowance",
    ("Account", "_sent"): "allowance",
    ("DeviceReading", "sequence"): "reading",
    ("Reports", "_newest_of_rank"): "reading",
    ("DeviceReading", "at_s"): "time",
    ("DeviceBook", "_read_at_s"): "time",
    ("Instance", "order"): "age",
}
"""Numbers that are only ever compared, by kind: which is newer counts, not by how much.

They are compared with those of the same instance, and of the same device if what has them is about
one. A new one is never older than those there are.
"""
_EVERYBODYS = {"time", "age"}
"""The kinds whose numbers are compared between instances too."""
_NEXT = {
    ("Reports", "_revision"),
    ("Reports", "_readings_taken"),
    ("Member", "_readings"),
    ("Arbitration", "_orders"),
}
"""What the next number is made from. It tells no hosts apart, since the next is newer than all that
are there; but it tells parts apart, or one would give a number that is there already.
"""
_FOR_PEOPLE = {"counters", "needs_since_s", "stale_messages", "stale_orders"}
_ELSEWHERE = {("Elections", "_devices"), ("Elections", "_instances")}
"""What a piece only looks at: its owner has it."""
_NUMBERED_BY_INSTANCE = {"Report", "Reports"}
"""Where readings have numbers of the instance; elsewhere they have those of a rank."""

Kind = tuple[str, str]
"""What a number counts, and whose it is ('' for everybody's)."""
Numbers = dict[Kind, list[float]]
_FOLLOWING: Kind = ("next", "")


class Piece:
    """A part or a message, never changed: `form` without its numbers, and these by kind."""

    __slots__ = ("form", "numbers", "value")

    def __init__(self, value: Any, form: int, numbers: Numbers) -> None:
        self.value, self.form = value, form
        self.numbers = tuple((kind, tuple(found)) for kind, found in numbers.items())


class Catalogue:
    """The pieces of one search: equal ones are one, and what a part did once is known."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[Hashable, ...], Piece] = {}
        self._forms: dict[Hashable, int] = {}
        self._became: dict[tuple[Hashable, ...], tuple[Piece, tuple[tuple[str, Piece], ...]]] = {}

    def piece(self, value: Any, whose: str) -> Piece:
        """Return the piece that `value` is; `whose`: its link, or the name of the part."""
        numbers: Numbers = {}
        plain = _plain(value, _whose(whose), numbers)
        form = self._forms.setdefault(plain, len(self._forms))
        following = tuple(numbers.pop(_FOLLOWING, ()))
        piece = Piece(value, form, numbers)
        return self._pieces.setdefault((form, piece.numbers, following), piece)

    def after(
        self, part: Piece, name: str, does: str, *given: Hashable
    ) -> tuple[Piece, tuple[tuple[str, Piece], ...]]:
        """Return what the part called `name` is after the method `does`, and what it sends.

        Pieces among `given` stand for their messages. A part does the same each time, so it does
        it once; what the method raises is raised each time.
        """
        key = (part, does, *given)
        became = self._became.get(key)
        if became is None:
            value = copy.deepcopy(part.value)
            arguments = [each.value if isinstance(each, Piece) else each for each in given]
            sent = getattr(value, does)(*arguments)
            letters = tuple((link, self.piece(message, link)) for link, message in sent)
            became = self._became[key] = (self.piece(value, name), letters)
        return became


def fingerprint(pieces: Iterable[Piece], plain: object) -> bytes:
    """Return 16 bytes that two hosts share if nothing they do could ever tell them apart.

    `pieces`: all of the host, in an order that does not depend on how it came about. `plain`: what
    is there beside them. Numbers that are only compared are replaced by their rank among those
    they are compared with.
    """
    forms: list[int] = []
    numbers: Numbers = {}
    for piece in pieces:
        forms.append(piece.form)
        for kind, found in piece.numbers:
            numbers.setdefault(kind, []).extend(found)
    ranks = [_ranks(tuple(found)) for found in numbers.values()]
    return hashlib.blake2b(repr((forms, ranks, plain)).encode(), digest_size=16).digest()


@functools.lru_cache(maxsize=1 << 16)
def _ranks(numbers: tuple[float, ...]) -> tuple[int, ...]:
    """Return the rank of each number among all of them."""
    rank = {number: rank for rank, number in enumerate(sorted(set(numbers)))}
    return tuple(rank[number] for number in numbers)


def _plain(value: Any, who: str, numbers: Numbers) -> Hashable:
    """Return `value` as tuples and plain values without its numbers, which go into `numbers`.

    `who`: the instance it belongs to. The order in which a dictionary or set was filled does not
    count.
    """
    if value is None or isinstance(value, (int, float, str, bytes)):
        return value
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, dict):
        items = sorted((str(key), each) for key, each in value.items())
        return tuple((key, _plain(each, _whose(key) or who, numbers)) for key, each in items)
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(str, value)))
    if isinstance(value, (list, tuple, deque)):
        return tuple(_plain(each, who, numbers) for each in value)
    name = type(value).__name__
    if name in _NUMBERED_BY_INSTANCE:
        who = f"{who.split()[0]} itself"
    plain: list[Hashable] = [name]
    for field, each in _fields(value):
        if field in _FOR_PEOPLE or (name, field) in _ELSEWHERE:
            continue
        if (name, field) in _NEXT:
            numbers.setdefault(_FOLLOWING, []).append(each)
            continue
        kind = _NUMBERS.get((name, field))
        if kind is None:
            plain.append(_plain(each, who, numbers))
        else:
            whose = "" if kind in _EVERYBODYS else who if kind == "reading" else who.split()[0]
            plain.append(_note(each, kind, f"{whose} {getattr(value, 'device', '')}", numbers))
    return tuple(plain)


def _whose(key: str) -> str:
    """Return the instance that a key of a dictionary names: a link, or a member's peer."""
    for word in key.split():
        if word[0] == "i" and word[1:].isdecimal():
            return word
    return ""


def _note(value: Any, kind: str, whose: str, numbers: Numbers) -> Hashable:
    """Put `value`, a number or a dictionary of numbers, into `numbers`; return what is left."""
    if kind == "age" and not value:
        return 0  # none
    if kind == "reading" and isinstance(value, dict):
        return tuple(
            (rank, _note(newest, kind, f"{whose.split()[0]} g{rank}", numbers))
            for rank, newest in sorted(value.items())
        )
    if isinstance(value, dict):
        return tuple(
            (_note(key, kind, whose, numbers), each) for key, each in sorted(value.items())
        )
    numbers.setdefault((kind, whose), []).append(value)
    return kind, whose


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

"""Every interleaving of a small host: the production machines, searched breadth first.

Owns: a host small enough to be searched to the end (its parts, and links as queues), its moves,
and the rules that every state must keep. Must not know: seeds or chance.

One move is one of: the oldest message of a link arrives; a message is lost, or arrives and stays
to arrive again; a worker enqueues the step it is behind with; an engine dies, and after it each of
its workers ends; the load changes as the script says. Driver calls end within the move that asks
for them. Time passes only when nothing else can happen: then the earliest timer fires. A state in
which nobody waits and nothing is on its way is an end; one in which somebody waits, and timers do
not help, is a deadlock.

Why it is exact and fast: a move changes one part (the arbiter, an engine or a worker), the links it
reads and writes, and nothing else, and what it does follows from the part, the message and the few
things it may know of others. So it is done once and then looked up (`fingerprints.Catalogue`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import msgspec

from kvadmit.errors import InvariantViolation
from kvadmit.testing.fingerprints import Catalogue, Piece, fingerprint
from kvadmit.testing.host_parts import Arbiter, AroundEngine, AroundRank, Engine, Rank, Remains

TIMERS_MAX = 40
"""Timers that may fire while somebody waits for what is free, before that counts as for ever.

A lost message is sent again after 2 s, in which a device may be read 20 times.
"""
PROGRESS_S = 10.0
"""How often a search says how far it is."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What may go wrong in one run, in any order and at any moment."""

    losses: int = 0
    repeats: int = 0
    crashes: int = 0


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What is searched. `script`: `(instance, demand)` in order, each at any moment.

    Every instance has a rank on each device; sizes in extents, all of one byte.
    """

    instances: int = 2
    devices: int = 2
    extents: int = 3
    capacity: int = 4
    floor: int = 1
    script: tuple[tuple[int, int], ...] = ((0, 2), (1, 2), (0, 0))
    budget: Budget = Budget()


class Found(msgspec.Struct, kw_only=True):
    """What a search found. `broken`: rule and the moves that lead to it."""

    states: int = 0
    moves: int = 0
    ends: int = 0
    deadlocks: int = 0
    broken: list[tuple[str, list[str]]] = []
    complete: bool = False


class Deadlock(InvariantViolation):
    """Somebody waits, what it waits for is free, and neither messages nor timers help."""


class Host:
    """One state: parts and links made of pieces, which hosts share; `move` changes the host only.

    A part is called as the link that leads to it. The dead have no part. No link is empty.
    """

    def __init__(self, model: Model) -> None:
        """Start everybody and let all messages arrive: the state a search begins with."""
        self.model = model
        self.catalogue = Catalogue()
        self.now_s = 0.0
        self.script = 0
        self.losses, self.repeats = model.budget.losses, model.budget.repeats
        self.crashes = model.budget.crashes
        self.fired = 0
        self.links: dict[str, tuple[Piece, ...]] = {}
        self.parts: dict[str, Piece] = {}
        self._put("arbiter", Arbiter())
        for number in range(model.instances):
            self._start(f"i{number}")
        while self.links:
            for name in sorted(self.links):
                while name in self.links:
                    self._arrive(name, self._taken(name))

    def _start(self, name: str) -> None:
        model = self.model
        ranks, extents = model.devices, model.extents
        engine = Engine(name, ranks=ranks, extents=extents, capacity=model.capacity)
        self._put(name, engine)
        self._let(name, "begin", model.floor)

    def copy(self) -> Host:
        """Return another host in the same state."""
        other = object.__new__(Host)
        other.__dict__.update(self.__dict__)
        other.parts, other.links = self.parts.copy(), self.links.copy()
        return other

    def fingerprint(self) -> bytes:
        """Return 16 bytes that this host shares with those it could never be told apart from."""
        links = sorted(self.links.items())
        pieces = [*self.parts.values(), *(letter for _, queue in links for letter in queue)]
        places = [*self.parts, *((name, len(queue)) for name, queue in links)]
        left = (self.script, self.losses, self.repeats, self.crashes)
        return fingerprint(pieces, (places, left, self.now_s, self.fired))

    # --- moves ---

    def moves(self) -> Iterator[str]:
        """Yield the names of everything that can happen now."""
        busy = bool(self.links)
        for name in sorted(self.links):
            yield f"arrive {name}"
            if self.losses and not name.endswith("lease"):
                yield f"lose {name}"
            if self.repeats and not name.endswith("lease"):
                yield f"repeat {name}"
        living = self._living()
        for name, part in self.parts.items():
            match part.value:
                case Rank(enqueued=enqueued, engine=engine) if enqueued < living[engine].step:
                    busy = True
                    yield f"enqueue {name}"
                case Remains():
                    busy = True
                    yield f"end {name}"
                case Engine() if self.crashes and len(living) > 1:
                    yield f"crash {name}"
        if self.script < len(self.model.script):
            yield "load"
        elif not busy and self.stuck:
            yield "time"

    def move(self, name: str) -> None:
        """Make one move. Raises InvariantViolation, or what a machine raises."""
        kind, _, rest = name.partition(" ")
        match kind:
            case "arrive":
                self._arrive(rest, self._taken(rest))
            case "lose":
                self.losses -= 1
                self._taken(rest)
            case "repeat":
                self.repeats -= 1
                self._arrive(rest, self.links[rest][0])
            case "enqueue":
                self._let(rest, "enqueue", self.parts[rest.split()[0]].value.step)
            case "crash":
                self._crash(rest)
            case "end":
                del self.parts[rest]
            case "load":
                number, demand = self.model.script[self.script]
                self.script += 1
                if f"i{number}" in self.parts:
                    self._let(f"i{number}", "load", demand)
            case "time":
                self._pass_time()
        if self.fired and not self.stuck:
            self.fired = 0
        self._check()

    @property
    def stuck(self) -> bool:
        """Whether somebody waits for what is free while all others keep what they use."""
        living = self._living()
        used = {name: max(len(one.used), self.model.floor) for name, one in living.items()}
        return any(
            one.waits and one.demand + 1 <= self.model.capacity - sum(used.values()) + used[name]
            for name, one in living.items()
        )

    def _pass_time(self) -> None:
        self.fired += 1
        due = [
            (at_s, name != "arbiter", name, timer)
            for name in ("arbiter", *self._living())
            for timer, at_s in self.parts[name].value.timers.items()
        ]
        if not due or self.fired > TIMERS_MAX:
            waiting = [name for name, one in self._living().items() if one.waits]
            raise Deadlock("I8 every need is met, refused or told", f"{waiting} wait for ever")
        at_s, _, name, timer = min(due)
        self.now_s = max(self.now_s, at_s)
        self._let(name, "fire", timer)

    def _crash(self, name: str) -> None:
        """End an engine; its workers end later. What it sent to the arbiter may still arrive."""
        self.crashes -= 1
        del self.parts[name]
        for link in [link for link in self.links if name in link and link != f"{name} arbiter"]:
            del self.links[link]
        for rank in [part for part in self.parts if part.startswith(f"{name} ")]:
            self._put(rank, Remains(self.parts[rank].value))
        self._send(f"{name} lease", self.catalogue.piece("lost", name))

    # --- messages ---

    def _taken(self, link: str) -> Piece:
        """Take the oldest message from a link."""
        first, *others = self.links.pop(link)
        if others:
            self.links[link] = tuple(others)
        return first

    def _send(self, link: str, letter: Piece) -> None:
        self.links[link] = (*self.links.get(link, ()), letter)

    def _arrive(self, link: str, letter: Piece) -> None:
        source, target = link.split(" ")
        if target == "lease":
            # Whose lease line has ended is not heard any more.
            self.links.pop(f"{source} arbiter", None)
            self._let("arbiter", "lose", source)
        elif target == "arbiter":
            self._let("arbiter", "hear", source, letter)
        elif source == "arbiter" or source.startswith("r"):
            self._let(target, "hear", source, letter)
        else:
            self._let(link, "obey", letter)

    # --- parts ---

    def _put(self, name: str, part: Any) -> None:
        self.parts[name] = self.catalogue.piece(part, name)

    def _let(self, name: str, does: str, *given: Hashable) -> None:
        """Let a part do something; what it sends to the dead is gone."""
        around = self._around(self.parts[name].value)
        self.parts[name], sent = self.catalogue.after(self.parts[name], name, does, around, *given)
        for link, letter in sent:
            source, target = link.split(" ")
            if source != "arbiter" or target in self.parts:
                self._send(link, letter)
        part = self.parts[name].value
        if isinstance(part, Engine) and part.has_ranks and f"{name} r0{name}" not in self.parts:
            for rank in range(self.model.devices):
                self._put(f"{name} r{rank}{name}", Rank(rank, part))

    def _around(self, part: Any) -> Hashable:
        """Return what `part` may know of the others now."""
        match part:
            case Engine(name=name, has_ranks=True):
                mapped = [
                    o.mapped for o in self._holders() if isinstance(o, Rank) and o.engine == name
                ]
                return AroundEngine(
                    self.now_s, tuple(self._free()), frozenset(set.intersection(*mapped))
                )
            case Engine():
                return AroundEngine(self.now_s, tuple(self._free()), frozenset())
            case Rank(device=device, engine=engine):
                room = self._free()[device] + len(part.physical)
                return AroundRank(self.now_s, room, frozenset(self._living()[engine].resident))
        return self.now_s

    def _living(self) -> dict[str, Engine]:
        return {
            name: part.value for name, part in self.parts.items() if isinstance(part.value, Engine)
        }

    def _holders(self) -> list[Rank | Remains]:
        return [p.value for p in self.parts.values() if isinstance(p.value, (Rank, Remains))]

    def _free(self) -> list[int]:
        """Return the bytes that each device shows free."""
        free = [self.model.capacity] * self.model.devices
        for one in self._holders():
            free[one.device] -= len(one.physical)
        return free

    # --- what every state must keep ---

    def _check(self) -> None:
        if min(self._free()) < 0:
            raise InvariantViolation("the device is never overdrawn", str(self._free()))
        arbiter: Arbiter = self.parts["arbiter"].value
        for name, engine in self._living().items():
            record = arbiter.machine.instances.get(name)
            if record is not None and record.reported:
                held = engine.group.states.held
                if held > record.account.booked:
                    raise InvariantViolation(
                        "I1 nobody holds more than it is booked for",
                        f"{name} holds {held}, booked {record.account.booked}",
                    )


def search(
    model: Model,
    states_max: int,
    progress: Callable[[Found, int], None] | None = None,
) -> Found:
    """Search breadth first until everything was seen or `states_max` states were.

    `progress(found, frontier)` is called every PROGRESS_S.
    """
    found = Found()
    begin = Host(model)
    key = begin.fingerprint()
    paths: dict[bytes, tuple[bytes, str]] = {key: (b"", "")}
    """Every state seen, and the move it was first reached by."""
    frontier: deque[tuple[Host, bytes]] = deque([(begin, key)])
    told_s = time.monotonic()
    while frontier:
        found.states = len(paths)
        if found.states >= states_max:
            return found
        if progress is not None and time.monotonic() - told_s >= PROGRESS_S:
            told_s = time.monotonic()
            progress(found, len(frontier))
        state, key = frontier.popleft()
        names = list(state.moves())
        found.ends += not names
        for name in names:
            host = state.copy()
            found.moves += 1
            try:
                host.move(name)
            except Exception as error:  # whatever a machine raises is a finding
                found.deadlocks += isinstance(error, Deadlock)
                found.broken.append((f"{type(error).__name__}: {error}", [*_way(paths, key), name]))
                continue
            reached = host.fingerprint()
            if reached not in paths:
                paths[reached] = (key, name)
                frontier.append((host, reached))
    found.states, found.complete = len(paths), True
    return found


def _way(paths: dict[bytes, tuple[bytes, str]], key: bytes) -> list[str]:
    """Return the moves that lead to a state, from the first."""
    way: list[str] = []
    while paths[key][1]:
        key, name = paths[key]
        way.append(name)
    return way[::-1]


__all__ = ["Budget", "Deadlock", "Found", "Host", "Model", "search"]

"""Every interleaving of a small host: the production machines, searched breadth first.

Owns: a host small enough to be searched to the end (links as queues, pools and devices as sets),
its moves, and the rules that every state must keep. Must not know: seeds or chance.

One move is one of: the oldest message of a link arrives; a message is lost, or arrives and stays
to arrive again; a worker enqueues the step it is behind with; an instance dies; the load changes
as the script says. Driver calls end within the move that asks for them. Time passes only when
nothing else can happen: then the earliest timer fires. A state in which nobody waits and nothing is
on its way is an end; one in which somebody waits, and timers do not help, is a deadlock.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from kvadmit import arbitration, group, group_events, member
from kvadmit.errors import InvariantViolation
from kvadmit.extents import from_runs, to_runs
from kvadmit.messages import (
    AgentHello,
    Bye,
    DeviceReading,
    Geometry,
    Hello,
    MapGrant,
)
from kvadmit.port import Ceiling, Limit, PoolLevels, PoolReturned, Resident
from kvadmit.testing.fingerprints import fingerprint

TIMERS_MAX = 24
"""Timers that may fire one after another before somebody who waits counts as stuck."""


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


class Rank:
    """One worker: the member machine and what its device really has."""

    def __init__(self, number: int, model: Model) -> None:
        self.number = number
        self.member = member.Member(
            rank=number, device=f"g{number}", extents=model.extents, prefix=1
        )
        self.physical, self.mapped = {0}, {0}
        self.enqueued = 0


class Instance:
    """One engine: the group machine, its ranks, and a pool in whole extents."""

    def __init__(self, number: int, model: Model) -> None:
        devices = [f"g{d}" for d in range(model.devices)]
        self.number = number
        self.alive = True
        hello = Hello(
            revision=1,
            name=f"i{number}",
            pid=1,
            devices=dict.fromkeys(devices, model.capacity),
            start_bytes={},
        )
        self.group = group.Group(
            ranks=model.devices, hello=hello, start_wait_s=1e6, idle_decay_s=5.0
        )
        self.ranks: list[Rank] = []
        self.timers: dict[str, float] = {}
        self.resident, self.used = {0}, {0}
        self.demand = self.step = 0
        self.limit = model.extents
        self.posted: PoolLevels | None = None

    @property
    def waits(self) -> bool:
        """Whether its demand is not met."""
        return self.alive and len(self.used) < self.demand + 1


class Host:
    """One state. `move` changes it; copies are deep ones."""

    def __init__(self, model: Model) -> None:
        """Start everybody and let all messages arrive: the state a search begins with."""
        self.model = model
        self.now_s = 0.0
        self.script = 0
        self.losses, self.repeats = model.budget.losses, model.budget.repeats
        self.crashes = model.budget.crashes
        self.fired = 0
        self.links: dict[str, deque[Any]] = {}
        self.arbiter = arbitration.Arbitration(epoch=1, reclaim_s=0.5)
        self.arbiter_timers: dict[str, float] = {}
        self.instances = [Instance(number, model) for number in range(model.instances)]
        for one in self.instances:
            self._feed(one, group_events.ArbiterFound(self.now_s))
            geometry = Geometry(
                extents=model.extents,
                extent_blocks=1,
                prefix=1,
                floor=model.floor,
                cap=model.extents,
                extent_bytes={f"g{d}": 1 for d in range(model.devices)},
            )
            self._feed(one, group_events.GeometryKnown(self.now_s, geometry))
        while any(self.links.values()):
            for name in sorted(self.links):
                while self.links[name]:
                    self._arrive(name, self.links[name].popleft())

    # --- moves ---

    def moves(self) -> Iterator[str]:
        """Yield the names of everything that can happen now."""
        busy = False
        for name in sorted(self.links):
            if self.links[name]:
                busy = True
                yield f"arrive {name}"
                if self.losses:
                    yield f"lose {name}"
                if self.repeats:
                    yield f"repeat {name}"
        for one in self.instances:
            if not one.alive:
                continue
            for rank in one.ranks:
                if rank.enqueued < one.step:
                    busy = True
                    yield f"enqueue {one.number} {rank.number}"
            if self.crashes and sum(i.alive for i in self.instances) > 1:
                yield f"crash {one.number}"
        if self.script < len(self.model.script):
            yield "load"
        elif not busy and self.stuck:
            yield "time"

    def move(self, name: str) -> None:
        """Make one move. Raises InvariantViolation, or what a machine raises."""
        kind, _, rest = name.partition(" ")
        if kind != "time":
            self.fired = 0
        match kind:
            case "arrive":
                self._arrive(rest, self.links[rest].popleft())
            case "lose":
                self.losses -= 1
                self.links[rest].popleft()
            case "repeat":
                self.repeats -= 1
                self._arrive(rest, self.links[rest][0])
            case "enqueue":
                instance, rank = map(int, rest.split())
                self._enqueue(self.instances[instance], rank)
            case "crash":
                self._crash(self.instances[int(rest)])
            case "load":
                number, demand = self.model.script[self.script]
                self.script += 1
                if self.instances[number].alive:
                    self.instances[number].demand = demand
                    self._run_step(self.instances[number])
            case "time":
                self._pass_time()
        self._check()

    @property
    def stuck(self) -> bool:
        """Whether somebody waits for what there is."""
        return any(one.waits for one in self.instances if self._attainable(one))

    def _attainable(self, one: Instance) -> bool:
        """Whether what `one` wants is free while all others keep what they use."""
        others = sum(
            max(len(i.used), self.model.floor) for i in self.instances if i is not one and i.alive
        )
        return one.demand + 1 <= self.model.capacity - others

    def _pass_time(self) -> None:
        self.fired += 1
        due = [(at_s, "", name) for name, at_s in self.arbiter_timers.items()]
        for one in self.instances:
            if one.alive:
                due += [(at_s, str(one.number), name) for name, at_s in one.timers.items()]
        if not due or self.fired > TIMERS_MAX:
            waiting = [one.number for one in self.instances if one.waits]
            raise Deadlock("I8 every need is met, refused or told", f"{waiting} wait for ever")
        at_s, who, name = min(due)
        self.now_s = max(self.now_s, at_s)
        if who:
            one = self.instances[int(who)]
            del one.timers[name]
            self._feed(one, group_events.TimerFired(self.now_s, name))
        else:
            del self.arbiter_timers[name]
            self._feed_arbiter(arbitration.TimerFired(self.now_s, name))

    def _crash(self, one: Instance) -> None:
        self.crashes -= 1
        one.alive = False
        for name, queue in self.links.items():
            if f"i{one.number}" in name:
                queue.clear()
        self.links.setdefault(f"i{one.number} lease", deque()).append("lost")

    # --- messages ---

    def _send(self, name: str, message: Any) -> None:
        self.links.setdefault(name, deque()).append(message)

    def _arrive(self, name: str, message: Any) -> None:
        source, target = name.split(" ")
        if target == "lease":
            self._feed_arbiter(arbitration.PeerLost(self.now_s, source))
        elif target == "arbiter":
            self._feed_arbiter(arbitration.PeerSent(self.now_s, source, message))
        elif source == "arbiter":
            one = self.instances[int(target[1:])]
            self._feed(one, group_events.ArbiterSent(self.now_s, message))
        elif source.startswith("r"):
            one = self.instances[int(target[1:])]
            self._feed(
                one, group_events.AgentSent(self.now_s, int(source[1 : source.index("i")]), message)
            )
        else:
            one = self.instances[int(source[1:])]
            rank = one.ranks[int(target[1 : target.index("i")])]
            if isinstance(message, MapGrant):
                self._feed_rank(one, rank, member.OrderArrived(self.now_s, message))
            else:
                self._feed_rank(one, rank, member.ReadAsked(self.now_s))

    def _feed_arbiter(self, event: arbitration.Event) -> None:
        for effect in self.arbiter.step(event):
            match effect:
                case arbitration.Send(peer, message):
                    if self.instances[int(peer[1:])].alive:
                        self._send(f"arbiter {peer}", message)
                case arbitration.StartTimer(timer, at_s):
                    self.arbiter_timers[timer] = at_s
                case arbitration.StopTimer(timer):
                    self.arbiter_timers.pop(timer, None)
                case _:
                    pass
        self.arbiter.check()

    def _feed(self, one: Instance, event: group_events.Event) -> None:
        if not one.alive:
            return
        orders: list[Any] = []
        for effect in one.group.step(event):
            match effect:
                case group_events.SendAgent(rank, message):
                    self._send(f"i{one.number} r{rank}i{one.number}", message)
                case group_events.SendArbiter(message):
                    if not isinstance(message, Bye):
                        self._send(f"i{one.number} arbiter", message)
                case group_events.ReadHere(device):
                    self._read_here(one, device)
                case group_events.GivePool(order):
                    orders.append(order)
                case group_events.StartTimer(timer, at_s):
                    one.timers[timer] = at_s
                case group_events.StopTimer(timer):
                    one.timers.pop(timer, None)
                case group_events.Settle("geometry", ""):
                    self._start_ranks(one)
                case _:
                    pass
        one.group.check()
        if orders:
            self._apply(one, orders)

    def _read_here(self, one: Instance, device: str) -> None:
        reading = DeviceReading(
            device=device,
            free_bytes=self._free(device),
            total_bytes=self.model.capacity,
            sequence=0,
            at_s=self.now_s,
        )
        self._feed(one, group_events.ReadingTaken(self.now_s, reading))

    def _start_ranks(self, one: Instance) -> None:
        one.ranks = [Rank(number, self.model) for number in range(self.model.devices)]
        for rank in one.ranks:
            device = f"g{rank.number}"
            hello = AgentHello(
                rank=rank.number,
                pid=1,
                device=device,
                granule_bytes=1,
                extent_bytes=1,
                extents=self.model.extents,
                mapped=((0, 1),),
                reading=DeviceReading(
                    device=device,
                    free_bytes=self._free(device),
                    total_bytes=self.model.capacity,
                    sequence=0,
                    at_s=self.now_s,
                ),
            )
            self._feed(one, group_events.AgentJoined(self.now_s, hello))

    def _feed_rank(self, one: Instance, rank: Rank, event: member.Event) -> None:
        events: deque[member.Event] = deque([event])
        while events:
            for effect in rank.member.step(events.popleft()):
                match effect:
                    case member.CallDriver():
                        events.append(self._call(one, rank, effect))
                    case member.AwaitDevice():
                        events.append(member.DeviceIdle(self.now_s, effect.order))
                    case member.ReadNow():
                        free = self._free(f"g{rank.number}")
                        events.append(member.ReadDone(self.now_s, free, self.model.capacity))
                    case member.Send():
                        self._send(f"r{rank.number}i{one.number} i{one.number}", effect.message)
                    case _:
                        pass
        rank.member.check()

    def _call(self, one: Instance, rank: Rank, call: member.CallDriver) -> member.DriverDone:
        device, extents, error = f"g{rank.number}", set(call.extents), ""
        match call.kind:
            case "prepare":
                if len(extents) > self._free(device):
                    error = "out of memory"
                else:
                    rank.physical |= extents
            case "commit":
                rank.mapped |= extents
            case "abort":
                rank.physical -= extents
            case "decommit":
                if extents & one.resident:
                    raise InvariantViolation("I4 nothing in use is unmapped", str(call))
                rank.mapped -= extents
                rank.physical -= extents
        return member.DriverDone(
            now_s=self.now_s,
            order=call.order,
            done=() if error else call.extents,
            partial=(),
            error=error,
            out_of_memory=bool(error),
            free_bytes=self._free(device),
            total_bytes=self.model.capacity,
        )

    def _free(self, device: str) -> int:
        held = sum(
            len(rank.physical)
            for one in self.instances
            if one.alive
            for rank in one.ranks
            if f"g{rank.number}" == device
        )
        return self.model.capacity - held

    # --- the pool ---

    def _apply(self, one: Instance, orders: list[Any]) -> None:
        for order in orders:
            match order:
                case Resident(extents):
                    for extent in from_runs(extents):
                        if any(extent not in rank.mapped for rank in one.ranks):
                            raise InvariantViolation("I3 all ranks have it mapped", str(order))
                        one.resident.add(extent)
                case Limit(extents):
                    one.limit = extents
                case Ceiling():
                    pass
        self._run_step(one)

    def _run_step(self, one: Instance) -> None:
        """Serve the demand from what is there, give back what is above the limit, say so."""
        wanted = one.demand + 1
        if not one.group.serving:
            return
        for extent in sorted(one.used - {0}, reverse=True)[: max(0, len(one.used) - wanted)]:
            one.used.discard(extent)
        free = sorted(one.resident - one.used)
        taken = free[: max(0, wanted - len(one.used))]
        if taken:
            one.used |= set(taken)
            one.step += 1
        gone = sorted(one.resident - one.used)[: max(0, len(one.resident) - one.limit)]
        if gone:
            one.resident -= set(gone)
            returned = PoolReturned(to_runs(gone), one.step)
            self._feed(one, group_events.PoolSent(self.now_s, returned))
        short = wanted > len(one.used)
        levels = PoolLevels(
            resident=len(one.resident),
            need_total=len(one.resident) + 1 if short else 0,
            want_total=wanted if short else 0,
            free=len(one.resident - one.used),
            running=len(one.used) - 1,
            waiting=int(short),
        )
        if levels != one.posted:
            one.posted = levels
            self._feed(one, group_events.PoolSent(self.now_s, levels))

    def _enqueue(self, one: Instance, number: int) -> None:
        rank = one.ranks[number]
        rank.enqueued = one.step
        self._feed_rank(one, rank, member.StepEnqueued(self.now_s, one.step))

    # --- what every state must keep ---

    def _check(self) -> None:
        for number in range(self.model.devices):
            if self._free(f"g{number}") < 0:
                raise InvariantViolation("the device is never overdrawn", f"g{number}")
        for one in self.instances:
            record = self.arbiter.instances.get(f"i{one.number}")
            if one.alive and record is not None and record.reported:
                held = one.group.states.held
                if held > record.account.booked:
                    raise InvariantViolation(
                        "I1 nobody holds more than it is booked for",
                        f"i{one.number} holds {held}, booked {record.account.booked}",
                    )


class Deadlock(InvariantViolation):
    """Somebody waits, what it waits for is free, and neither messages nor timers help."""


def search(model: Model, states_max: int) -> Found:
    """Search breadth first until everything was seen or `states_max` states were."""
    found = Found()
    begin = Host(model)
    seen = {fingerprint(begin)}
    paths: dict[bytes, tuple[bytes, str]] = {}
    frontier: deque[tuple[Host, bytes]] = deque([(begin, next(iter(seen)))])
    while frontier:
        if len(seen) >= states_max:
            found.states = len(seen)
            return found
        state, key = frontier.popleft()
        names = list(state.moves())
        found.ends += not names
        for name in names:
            host = copy.deepcopy(state)
            found.moves += 1
            try:
                host.move(name)
            except Exception as error:  # whatever a machine raises is a finding
                found.deadlocks += isinstance(error, Deadlock)
                way = [*_way(paths, key), name]
                found.broken.append((f"{type(error).__name__}: {error}", way))
                continue
            reached = fingerprint(host)
            if reached not in seen:
                seen.add(reached)
                paths[reached] = (key, name)
                frontier.append((host, reached))
    found.states, found.complete = len(seen), True
    return found


def _way(paths: dict[bytes, tuple[bytes, str]], key: bytes) -> list[str]:
    """Return the moves that lead to a state, from the first."""
    way: list[str] = []
    while key in paths:
        key, name = paths[key]
        way.append(name)
    return way[::-1]


__all__ = ["Budget", "Deadlock", "Found", "Host", "Model", "search"]

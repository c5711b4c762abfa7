"""The parts of a small simulated host: an arbiter, engines and workers, each with its machine.

Owns: what a part is beside its machine (timers, a pool in whole extents, what a device really has)
and what becomes of the machine's effects. Must not know: links, other parts, what may go wrong.

A part does one thing at a time: each method takes all it may know of the others as arguments,
changes the part and returns what it sends. So equal parts do equal things under equal arguments.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from kvadmit import arbitration, arbitration_events, group, group_events, member
from kvadmit.errors import InvariantViolation
from kvadmit.extents import from_runs, to_runs
from kvadmit.messages import AgentHello, Bye, DeviceReading, Geometry, Hello, MapGrant
from kvadmit.port import Limit, PoolLevels, PoolReturned, Resident

Sent = list[tuple[str, Any]]
"""What a part sends, in order: the link and the message."""


class Arbiter:
    """The arbitration machine and its timers."""

    def __init__(self) -> None:
        self.machine = arbitration.Arbitration(epoch=1, reclaim_s=0.5)
        self.timers: dict[str, float] = {}

    def hear(self, now_s: float, peer: str, message: Any) -> Sent:
        """Take a message of an instance."""
        return self._feed(arbitration_events.PeerSent(now_s, peer, message))

    def lose(self, now_s: float, peer: str) -> Sent:
        """See the end of an instance's lease line."""
        return self._feed(arbitration_events.PeerLost(now_s, peer))

    def fire(self, now_s: float, timer: str) -> Sent:
        """Let `timer` be due."""
        del self.timers[timer]
        return self._feed(arbitration_events.TimerFired(now_s, timer))

    def _feed(self, event: arbitration_events.Event) -> Sent:
        sent: Sent = []
        for effect in self.machine.step(event):
            match effect:
                case arbitration_events.Send(peer, message):
                    sent.append((f"arbiter {peer}", message))
                case arbitration_events.StartTimer(timer, at_s):
                    self.timers[timer] = at_s
                case arbitration_events.StopTimer(timer):
                    self.timers.pop(timer, None)
                case _:
                    pass
        self.machine.check()
        return sent


class AroundEngine(NamedTuple):
    """What an engine meets: bytes each device shows free, and what all its ranks have mapped."""

    now_s: float
    free: tuple[int, ...]
    mapped: frozenset[int]


class Engine:
    """One engine: the group machine, its timers, and a pool in whole extents."""

    def __init__(self, name: str, *, ranks: int, extents: int, capacity: int) -> None:
        self.name = name
        self.extents, self.capacity = extents, capacity
        hello = Hello(
            revision=1,
            name=name,
            pid=1,
            devices={f"g{rank}": capacity for rank in range(ranks)},
            start_bytes={},
        )
        self.group = group.Group(ranks=ranks, hello=hello, start_wait_s=1e6, idle_decay_s=5.0)
        self.timers: dict[str, float] = {}
        self.has_ranks = False
        self.resident, self.used = {0}, {0}
        self.demand = self.step = 0
        self.limit = extents
        self.posted: PoolLevels | None = None

    @property
    def waits(self) -> bool:
        """Whether its demand is not met."""
        return len(self.used) < self.demand + 1

    def begin(self, around: AroundEngine, floor: int) -> Sent:
        """Look for the arbiter and say what an extent is."""
        geometry = Geometry(
            extents=self.extents,
            extent_blocks=1,
            prefix=1,
            floor=floor,
            cap=self.extents,
            extent_bytes=dict.fromkeys(self.group.link.hello.devices, 1),
        )
        sent: Sent = []
        self._feed(group_events.ArbiterFound(around.now_s), around, sent)
        self._feed(group_events.GeometryKnown(around.now_s, geometry), around, sent)
        return sent

    def hear(self, around: AroundEngine, source: str, message: Any) -> Sent:
        """Take a message of the arbiter or of one of its ranks."""
        sent: Sent = []
        event: group_events.Event = group_events.ArbiterSent(around.now_s, message)
        if source != "arbiter":
            rank = int(source[1 : source.index("i")])
            event = group_events.AgentSent(around.now_s, rank, message)
        self._feed(event, around, sent)
        return sent

    def fire(self, around: AroundEngine, timer: str) -> Sent:
        """Let `timer` be due."""
        sent: Sent = []
        del self.timers[timer]
        self._feed(group_events.TimerFired(around.now_s, timer), around, sent)
        return sent

    def load(self, around: AroundEngine, demand: int) -> Sent:
        """Have `demand` extents in use from now on, beside extent 0."""
        sent: Sent = []
        self.demand = demand
        self._run_step(around, sent)
        return sent

    def _feed(self, event: group_events.Event, around: AroundEngine, sent: Sent) -> None:
        orders: list[Any] = []
        for effect in self.group.step(event):
            match effect:
                case group_events.SendAgent(rank, message):
                    sent.append((f"{self.name} r{rank}{self.name}", message))
                case group_events.SendArbiter(message):
                    if not isinstance(message, Bye):
                        sent.append((f"{self.name} arbiter", message))
                case group_events.ReadHere(device):
                    taken = self._reading(device, around)
                    self._feed(group_events.ReadingTaken(around.now_s, taken), around, sent)
                case group_events.GivePool(order):
                    orders.append(order)
                case group_events.StartTimer(timer, at_s):
                    self.timers[timer] = at_s
                case group_events.StopTimer(timer):
                    self.timers.pop(timer, None)
                case group_events.Settle("geometry", ""):
                    self._start_ranks(around, sent)
                case _:
                    pass
        self.group.check()
        if orders:
            self._apply(orders, around, sent)

    def _reading(self, device: str, around: AroundEngine, taken: int = 0) -> DeviceReading:
        return DeviceReading(
            device=device,
            free_bytes=around.free[int(device[1:])] - taken,
            total_bytes=self.capacity,
            sequence=0,
            at_s=around.now_s,
        )

    def _start_ranks(self, around: AroundEngine, sent: Sent) -> None:
        """Have all ranks join; each has mapped extent 0 just now."""
        self.has_ranks = True
        for rank in range(self.group.ranks):
            hello = AgentHello(
                rank=rank,
                pid=1,
                device=f"g{rank}",
                granule_bytes=1,
                extent_bytes=1,
                extents=self.extents,
                mapped=((0, 1),),
                reading=self._reading(f"g{rank}", around, taken=1),
            )
            self._feed(group_events.AgentJoined(around.now_s, hello), around, sent)

    # --- the pool ---

    def _apply(self, orders: list[Any], around: AroundEngine, sent: Sent) -> None:
        for order in orders:
            match order:
                case Resident(extents):
                    given = set(from_runs(extents))
                    if not given <= around.mapped:
                        raise InvariantViolation("I3 all ranks have it mapped", str(order))
                    self.resident |= given
                case Limit(extents):
                    self.limit = extents
                case _:
                    pass
        self._run_step(around, sent)

    def _run_step(self, around: AroundEngine, sent: Sent) -> None:
        """Serve the demand from what is there, give back what is above the limit, say so."""
        wanted = self.demand + 1
        if not self.group.serving:
            return
        for extent in sorted(self.used - {0}, reverse=True)[: max(0, len(self.used) - wanted)]:
            self.used.discard(extent)
        free = sorted(self.resident - self.used)
        taken = free[: max(0, wanted - len(self.used))]
        if taken:
            self.used |= set(taken)
            self.step += 1
        gone = sorted(self.resident - self.used)[: max(0, len(self.resident) - self.limit)]
        if gone:
            self.resident -= set(gone)
            returned = PoolReturned(to_runs(gone), self.step)
            self._feed(group_events.PoolSent(around.now_s, returned), around, sent)
        short = wanted > len(self.used)
        levels = PoolLevels(
            resident=len(self.resident),
            need_total=len(self.resident) + 1 if short else 0,
            want_total=wanted if short else 0,
            free=len(self.resident - self.used),
            running=len(self.used) - 1,
            waiting=int(short),
        )
        if levels != self.posted:
            self.posted = levels
            self._feed(group_events.PoolSent(around.now_s, levels), around, sent)


class AroundRank(NamedTuple):
    """What a worker meets: bytes its device has for it in all, and what its engine may hand out."""

    now_s: float
    room: int
    resident: frozenset[int]


class Rank:
    """One worker: the member machine and what its device really has. Driver calls end at once.

    Rank n of an engine is on device n.
    """

    def __init__(self, device: int, engine: Engine) -> None:
        self.device, self.engine, self.capacity = device, engine.name, engine.capacity
        self.member = member.Member(
            rank=device, device=f"g{device}", extents=engine.extents, prefix=1
        )
        self.physical, self.mapped = {0}, {0}
        self.enqueued = 0

    def obey(self, around: AroundRank, message: Any) -> Sent:
        """Take a message of the engine."""
        if isinstance(message, MapGrant):
            return self._feed(member.OrderArrived(around.now_s, message), around)
        return self._feed(member.ReadAsked(around.now_s), around)

    def enqueue(self, around: AroundRank, step: int) -> Sent:
        """Enqueue everything up to `step`."""
        self.enqueued = step
        return self._feed(member.StepEnqueued(around.now_s, step), around)

    def _feed(self, event: member.Event, around: AroundRank) -> Sent:
        sent: Sent = []
        events: deque[member.Event] = deque([event])
        while events:
            for effect in self.member.step(events.popleft()):
                match effect:
                    case member.CallDriver():
                        events.append(self._call(effect, around))
                    case member.AwaitDevice():
                        events.append(member.DeviceIdle(around.now_s, effect.order))
                    case member.ReadNow():
                        free = around.room - len(self.physical)
                        events.append(member.ReadDone(around.now_s, free, self.capacity))
                    case member.Send():
                        sent.append((f"r{self.device}{self.engine} {self.engine}", effect.message))
                    case _:
                        pass
        self.member.check()
        return sent

    def _call(self, call: member.CallDriver, around: AroundRank) -> member.DriverDone:
        extents, error = set(call.extents), ""
        match call.kind:
            case "prepare":
                if len(extents) > around.room - len(self.physical):
                    error = "out of memory"
                else:
                    self.physical |= extents
            case "commit":
                self.mapped |= extents
            case "abort":
                self.physical -= extents
            case "decommit":
                if extents & around.resident:
                    raise InvariantViolation("I4 nothing in use is unmapped", str(call))
                self.mapped -= extents
                self.physical -= extents
        return member.DriverDone(
            now_s=around.now_s,
            order=call.order,
            done=() if error else call.extents,
            partial=(),
            error=error,
            out_of_memory=bool(error),
            free_bytes=around.room - len(self.physical),
            total_bytes=self.capacity,
        )


class Remains:
    """What is left of a worker whose engine died, until its process ends: its memory."""

    def __init__(self, rank: Rank) -> None:
        self.device, self.physical = rank.device, rank.physical


__all__ = ["Arbiter", "AroundEngine", "AroundRank", "Engine", "Rank", "Remains", "Sent"]

"""A whole host in one thread: the production machines over a simulated world.

Owns: the virtual clock, links that drop, delay, duplicate and reorder, devices made of
integers, pools with random load, crashes and restarts, and the global checks no machine can
make alone. Everything follows from one seed, so a failing seed replays.

The world knows the truth (which rank has which extent mapped, which extents a pool hands
out), so it can hold the machines to the invariants I1-I9 after every event.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import msgspec

from kvadmit import arbitration, arbitration_events, group, group_events, member
from kvadmit.errors import InvariantViolation
from kvadmit.extents import from_runs, to_runs
from kvadmit.messages import (
    AgentHello,
    Allowance,
    Answer,
    DeviceReading,
    Geometry,
    Headroom,
    Hello,
    MapGrant,
    ReadDevice,
    ToArbiter,
    ToInstance,
)
from kvadmit.port import Ceiling, Limit, PoolLevels, PoolReturned, Resident
from kvadmit.states import PREPARING

MIB = 1 << 20
ENDING = 0.3
"""How likely a request ends in a step of a busy pool, so that memory drains under load."""

E = TypeVar("E", bound=msgspec.Struct)


class Process:
    """Something that can be stopped for a while. `held`: what it would have done meanwhile."""

    def __init__(self) -> None:
        self.frozen_until_s = 0.0
        self.held: deque[Callable[[], None]] = deque()


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """How unkind the world is: probabilities per message or per driver call, and events."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay_s: float = 0.002
    """Largest delay of a message; each draws its own, so messages overtake each other."""
    call_s: float = 0.002
    """Longest driver call."""
    prepare_refused: float = 0.0
    prepare_failed: float = 0.0
    """A prepare fails, and not for want of room."""
    commit_failed: float = 0.0
    release_failed: float = 0.0
    """An abort or decommit fails and changes nothing."""
    crashes: int = 0
    arbiter_crashes: int = 0
    foreign: int = 0
    """How often a process outside the group takes or frees memory."""
    freezes: int = 0
    """How often a worker, an EngineCore or the arbiter is stopped (SIGSTOP) for a while."""
    partitions: int = 0
    """How often an instance and the arbiter lose every message for a while."""
    pause_s: float = 2.0
    """Longest freeze and partition."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What runs on the host: per instance the device of each rank, and bytes per extent."""

    devices: dict[str, int]
    instances: tuple[tuple[tuple[str, ...], int], ...]
    prefix: int = 1
    floor: int = 2


class Device:
    """Physical memory as an integer; `holders` is who has how much."""

    def __init__(self, name: str, total_bytes: int) -> None:
        self.name = name
        self.total_bytes = total_bytes
        self.foreign_bytes = 0
        self.holders: dict[object, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes the driver would show as free."""
        return self.total_bytes - self.foreign_bytes - sum(self.holders.values())


class SimRank(Process):
    """One worker: the member machine over a device, with a step queue of its own."""

    def __init__(self, instance: SimInstance, rank: int, device: Device) -> None:
        super().__init__()
        self.instance = instance
        self.rank = rank
        self.device = device
        geometry = instance.geometry
        self.member = member.Member(
            rank=rank, device=device.name, extents=geometry.extents, prefix=geometry.prefix
        )
        self.physical = set(range(geometry.prefix))
        """Extents with physical memory, mapped or not: the truth."""
        self.mapped = set(self.physical)
        self._book()

    def hello(self) -> AgentHello:
        """Return the rank's first message."""
        return AgentHello(
            rank=self.rank,
            pid=1,
            device=self.device.name,
            granule_bytes=1,
            extent_bytes=self.instance.extent_bytes,
            extents=self.instance.geometry.extents,
            mapped=((0, self.instance.geometry.prefix),),
            reading=DeviceReading(
                device=self.device.name,
                free_bytes=self.device.free_bytes,
                total_bytes=self.device.total_bytes,
                sequence=0,
                at_s=self.instance.world.now_s,
            ),
        )

    def feed(self, event: member.Event) -> None:
        """Step the machine and carry out its effects."""
        world = self.instance.world
        if world.frozen(self, event, self._alive_feed):
            return
        for effect in self.member.step(event):
            match effect:
                case member.CallDriver():
                    self._call(effect)
                case member.AwaitDevice():
                    world.after(0.001, self._alive(partial(self._idle, effect.order)))
                case member.Send():
                    world.deliver(self._alive(partial(self._answer, effect.message)))
                case member.ReadNow():
                    read = member.ReadDone(
                        world.now_s, self.device.free_bytes, self.device.total_bytes
                    )
                    world.after(0.0, self._alive(partial(self.feed, read)))
                case _:
                    raise AssertionError(f"a live coordinator never causes {effect}")
        self.member.check()

    def _alive_feed(self, event: member.Event) -> None:
        if self.instance.alive:
            self.feed(event)

    def _alive(self, action: Callable[[], None]) -> Callable[[], None]:
        return lambda: action() if self.instance.alive else None

    def _idle(self, order: int) -> None:
        self.feed(member.DeviceIdle(self.instance.world.now_s, order))

    def _answer(self, message: Answer | Headroom) -> None:
        self.instance.feed(group_events.AgentSent(self.instance.world.now_s, self.rank, message))

    def _call(self, call: member.CallDriver) -> None:
        world = self.instance.world
        done, partial, error, out_of_memory = self._drive(call)
        self._book()
        world.after(
            world.random.uniform(0.0001, world.faults.call_s),
            self._alive(
                lambda: self.feed(
                    member.DriverDone(
                        now_s=world.now_s,
                        order=call.order,
                        done=done,
                        partial=partial,
                        error=error,
                        out_of_memory=out_of_memory,
                        free_bytes=self.device.free_bytes,
                        total_bytes=self.device.total_bytes,
                    )
                )
            ),
        )

    def _drive(self, call: member.CallDriver) -> tuple[tuple[int, ...], tuple[int, ...], str, bool]:
        world, extents = self.instance.world, call.extents
        if call.kind == "prepare" and world.chance(world.faults.prepare_failed):
            return (), (), "no such handle type", False
        if call.kind in ("abort", "decommit") and world.chance(world.faults.release_failed):
            return (), (), "the driver holds on", False
        match call.kind:
            case "prepare":
                wanted = len(extents) * self.instance.extent_bytes
                unlucky = world.chance(world.faults.prepare_refused)
                if unlucky or wanted > self.device.free_bytes:
                    return (), (), "out of memory", True
                self.physical |= set(extents)
            case "commit":
                if world.chance(world.faults.commit_failed):
                    reached = world.random.randrange(len(extents))
                    self.mapped |= set(extents[: reached + 1])
                    return extents[:reached], (extents[reached],), "set access failed", False
                self.mapped |= set(extents)
            case "abort":
                self.physical -= set(extents)
            case "decommit":
                self.instance.require_unused(self.rank, extents)
                self.mapped -= set(extents)
                self.physical -= set(extents)
        return extents, (), "", False

    def _book(self) -> None:
        self.device.holders[self] = len(self.physical) * self.instance.extent_bytes
        if self.device.free_bytes < 0 and not self.device.foreign_bytes:
            raise InvariantViolation("the device is never overdrawn", self.device.name)


class SimPool:
    """A pool under random load, in whole extents: `used` are in requests, `cached` reusable."""

    def __init__(self, instance: SimInstance, prefix: int) -> None:
        self.instance = instance
        self.resident = set(range(prefix))
        self.used: set[int] = {0}
        self.cached: set[int] = set()
        self.demand = 0
        self.limit = 1 << 30
        self.ceiling = 0
        self.orders: deque[object] = deque()
        self.step_number = 0
        self.posted: PoolLevels | None = None

    def run_step(self) -> None:
        """Apply orders, serve the demand from free then cached extents, post the levels."""
        self._apply_orders()
        world = self.instance.world
        if len(self.used) > 1 and world.chance(ENDING):
            self._end(world.random.choice(sorted(self.used - {0})))
        self._withdraw()
        wanted = self.demand + 1
        for extent in sorted(self.used - {0})[: max(0, len(self.used) - wanted)]:
            self._end(extent)
        spendable = sorted(self.resident - self.used, key=lambda e: (e in self.cached, e))
        for extent in spendable[: max(0, wanted - len(self.used))]:
            self.used.add(extent)
            self.cached.discard(extent)
        if len(self.used) > 1:
            self.step_number += 1
            self.instance.enqueue(self.step_number)
        self._post(wanted)

    def _ahead(self) -> int:
        return len(self.used) + 1 if self.demand else 0

    def _end(self, extent: int) -> None:
        """End a request; of half of them the prefix stays in the cache."""
        self.used.discard(extent)
        if self.instance.world.chance(0.5):
            self.cached.add(extent)

    @property
    def busy(self) -> bool:
        """Whether there are requests or blocks still in their hands."""
        return bool(self.demand or len(self.used) > 1)

    def wake(self) -> None:
        """Apply orders at once, as an idle or parked engine does."""
        if self.demand == 0:
            self._apply_orders()
            self._withdraw()
            self._post(1)

    def _apply_orders(self) -> None:
        while self.orders:
            match self.orders.popleft():
                case Resident(extents):
                    for extent in from_runs(extents):
                        self.instance.require_mapped(extent)
                        self.resident.add(extent)
                case Limit(extents):
                    self.limit = extents
                case Ceiling(extents):
                    self.ceiling = extents

    def _withdraw(self) -> None:
        free = sorted(self.resident - self.used, key=lambda e: (e in self.cached, -e))
        gone = free[: max(0, len(self.resident) - self.limit)]
        if not gone:
            return
        self.resident -= set(gone)
        self.cached -= set(gone)
        returned = PoolReturned(to_runs(gone), self.step_number)
        self.instance.post(group_events.PoolSent(self.instance.world.now_s, returned))

    def _post(self, wanted: int) -> None:
        short = wanted > len(self.used)
        free = self.resident - self.used
        levels = PoolLevels(
            resident=len(self.resident),
            need_total=len(self.resident) + 1 if short else 0,
            # A little ahead of the load, also while nobody waits.
            want_total=max(wanted + 1, len(self.resident) + 1) if short else self._ahead(),
            free=len(free - self.cached),
            cached=len(free & self.cached),
            running=len(self.used) - 1,
            waiting=int(short),
        )
        if levels != self.posted:
            self.posted = levels
            self.instance.post(group_events.PoolSent(self.instance.world.now_s, levels))


class SimInstance(Process):
    """One engine: the group machine, its ranks and its pool."""

    def __init__(self, world: World, number: int, life: int) -> None:
        super().__init__()
        self.world = world
        self.number = number
        self.peer = f"i{number}.{life}"
        self.alive = True
        self.cut_until_s = 0.0
        self.link = 0
        devices, self.extent_bytes = world.shape.instances[number]
        self.devices = [world.devices[name] for name in devices]
        cost = {name: self.extent_bytes * devices.count(name) for name in sorted(set(devices))}
        fits = min(world.devices[name].total_bytes // size for name, size in cost.items())
        self.geometry = Geometry(
            extents=fits,
            extent_blocks=4,
            prefix=world.shape.prefix,
            floor=world.shape.floor,
            cap=fits,
            extent_bytes=cost,
        )
        self.ranks: list[SimRank] = []
        self.pool = SimPool(self, world.shape.prefix)
        hello = Hello(
            revision=1,
            name=self.peer,
            pid=1,
            devices={d.name: d.total_bytes for d in self.devices},
            start_bytes={},
        )
        self.group = group.Group(
            ranks=len(devices), hello=hello, start_wait_s=1e6, idle_decay_s=5.0
        )
        self.failure = ""
        self.timers: dict[str, int] = {}
        world.connect(self)
        self.feed(group_events.GeometryKnown(world.now_s, self.geometry))
        self._tick()

    # --- the shell's part ---

    def feed(self, event: group_events.Event) -> None:
        """Step the machine and carry out its effects."""
        if not self.alive or self.world.frozen(self, event, self.feed):
            return
        for effect in self.group.step(event):
            self._do(effect)
        self.group.check()

    def _do(self, effect: group_events.Effect) -> None:
        world = self.world
        match effect:
            case group_events.SendAgent(rank, message):
                world.deliver(partial(self._to_rank, rank, message))
            case group_events.SendArbiter(message):
                world.deliver(partial(world.to_arbiter, self, self.link, message))
            case group_events.ReadHere(device):
                world.after(0.0, partial(self._read, world.devices[device]))
            case group_events.GivePool(order):
                self.pool.orders.append(order)
                world.after(0.0, lambda: self.pool.wake() if self.alive else None)
            case group_events.StartTimer(timer, at_s):
                self._start_timer(timer, at_s)
            case group_events.StopTimer(timer):
                self.timers.pop(timer, None)
            case group_events.Settle("geometry", ""):
                self._start_ranks()
            case group_events.Settle(_, error) if error:
                self.failure = error
            case group_events.EngineLost(reason):
                raise InvariantViolation("no rank was lost", reason)
            case _:
                pass

    def _start_timer(self, timer: str, at_s: float) -> None:
        self.timers[timer] = ticket = self.world.next_ticket()

        def fire() -> None:
            if self.timers.get(timer) == ticket:
                del self.timers[timer]
                self.feed(group_events.TimerFired(self.world.now_s, timer))

        self.world.at(at_s, fire)

    def _to_rank(self, rank: int, message: MapGrant | ReadDevice) -> None:
        if not self.alive:
            return
        now_s = self.world.now_s
        if isinstance(message, MapGrant):
            self.ranks[rank].feed(member.OrderArrived(now_s, message))
        else:
            self.ranks[rank].feed(member.ReadAsked(now_s))

    def _read(self, device: Device) -> None:
        reading = DeviceReading(
            device=device.name,
            free_bytes=device.free_bytes,
            total_bytes=device.total_bytes,
            sequence=0,
            at_s=self.world.now_s,
        )
        self.feed(group_events.ReadingTaken(self.world.now_s, reading))

    def _start_ranks(self) -> None:
        for device in self.devices:
            wanted = self.geometry.prefix * self.geometry.extent_bytes[device.name]
            if device.free_bytes < wanted:
                # The driver refuses the prefix: a start that fails, as in real life, when a
                # process outside the group was faster. Never among ourselves.
                self.world.require_foreign(device)
                self.world.fail_start(self)
                return
        self.ranks = [SimRank(self, r, device) for r, device in enumerate(self.devices)]
        for rank in self.ranks:
            self.feed(group_events.AgentJoined(self.world.now_s, rank.hello()))

    # --- the engine's part ---

    def _tick(self) -> None:
        if not self.alive:
            return
        if self.world.now_s < self.frozen_until_s:
            self.world.at(self.frozen_until_s, self._tick)
            return
        if self.group.serving:
            self.pool.run_step()
        # An idle engine does not step; it only looks whether there is work again.
        pause_s = self.world.random.uniform(0.005, 0.02) if self.pool.busy else 0.05
        self.world.after(pause_s, self._tick)

    def post(self, event: group_events.PoolSent) -> None:
        """Carry a pool event to the coordinator, as the port does: in order, soon."""
        self.world.after(0.0, lambda: self.feed(event))

    def enqueue(self, step: int) -> None:
        """Every worker enqueues the step a little later, each in its own time."""
        for rank in self.ranks:
            self.world.after(
                self.world.random.uniform(0.0, 0.01), partial(self._enqueued, rank, step)
            )

    def _enqueued(self, rank: SimRank, step: int) -> None:
        if self.alive:
            rank.feed(member.StepEnqueued(self.world.now_s, step))

    # --- the truth ---

    def require_mapped(self, extent: int) -> None:
        """I3: a pool gets an extent only if every rank has it mapped."""
        for rank in self.ranks:
            if rank.member.state[extent] != member.MAPPED or extent not in rank.mapped:
                raise InvariantViolation("I3", f"{self.peer} extent {extent} rank {rank.rank}")

    def require_unused(self, rank: int, extents: Iterable[int]) -> None:
        """I4: nothing is unmapped that the pool may hand out or an enqueued step may name."""
        for extent in extents:
            if extent in self.pool.resident:
                raise InvariantViolation("I4", f"{self.peer} unmaps extent {extent} in use")

    def held_bytes(self, device: Device) -> int:
        """Physical bytes this instance really has on `device`."""
        return sum(device.holders.get(rank, 0) for rank in self.ranks)

    def crash(self) -> None:
        """SIGKILL: gone at once; the driver shows the bytes back a little later."""
        self.alive = False
        for rank in self.ranks:
            self.world.after(
                self.world.random.uniform(0.0, 0.2), partial(rank.device.holders.pop, rank, None)
            )


class World:
    """The simulated host. `run` plays events; `settle` ends the faults and checks liveness."""

    def __init__(self, seed: int, shape: Shape, faults: Faults) -> None:
        self.seed = seed
        self.shape = shape
        self.faults = faults
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._tickets = 0
        self.devices = {name: Device(name, size) for name, size in shape.devices.items()}
        self.epoch = 0
        self.arbiter: arbitration.Arbitration | None = None
        self.arbiter_timers: dict[str, int] = {}
        self.arbiter_process = Process()
        self.peers: dict[str, tuple[SimInstance, int]] = {}
        self.instances: list[SimInstance] = []
        self.start_arbiter()
        for number in range(len(shape.instances)):
            self.instances.append(SimInstance(self, number, 0))

    # --- time and links ---

    def at(self, at_s: float, action: Callable[[], object]) -> None:
        """Run `action` at a virtual time."""
        heapq.heappush(self._heap, (max(at_s, self.now_s), self.next_ticket(), action))

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        """Run `action` after a virtual delay."""
        self.at(self.now_s + delay_s, action)

    def next_ticket(self) -> int:
        """Return a number never given before (order of simultaneous events, timer identity)."""
        self._tickets += 1
        return self._tickets

    def chance(self, probability: float) -> bool:
        """Draw once."""
        return probability > 0 and self.random.random() < probability

    def deliver(self, action: Callable[[], None]) -> None:
        """Send over a link: it may be lost, doubled, late, or overtaken."""
        if self.chance(self.faults.drop):
            return
        copies = 2 if self.chance(self.faults.duplicate) else 1
        for _ in range(copies):
            self.after(self.random.uniform(0.0, self.faults.delay_s), action)

    def frozen(self, who: Process, event: E, feed: Callable[[E], None]) -> bool:
        """Whether `who` is stopped; `event` is then fed to it, in order, when it goes on."""
        if self.now_s >= who.frozen_until_s:
            return False
        if not who.held:
            self.at(who.frozen_until_s, lambda: self._thaw(who))
        # A shell looks at the clock when it handles an event, not when the event was sent.
        who.held.append(lambda: feed(msgspec.structs.replace(event, now_s=self.now_s)))
        return True

    def _thaw(self, who: Process) -> None:
        if self.now_s < who.frozen_until_s:  # stopped again meanwhile
            self.at(who.frozen_until_s, lambda: self._thaw(who))
            return
        while who.held:
            who.held.popleft()()

    # --- the arbiter ---

    def start_arbiter(self) -> None:
        """Start an arbiter with the next epoch and connect every live instance to it."""
        self.epoch += 1
        self.arbiter_process = Process()
        living = [one.peer.partition(".")[0] for one in self.instances if one.alive]
        self.arbiter = arbitration.Arbitration(epoch=self.epoch, reclaim_s=0.5, awaited=living)
        self.arbiter_timers = {}
        for instance in self.instances:
            if instance.alive:
                self.connect(instance)

    def connect(self, instance: SimInstance) -> None:
        """Give an instance a channel to the arbiter; earlier channels are dead."""
        instance.link += 1
        if self.arbiter is not None:
            self.after(0.0, lambda: self._found(instance, instance.link))

    def _found(self, instance: SimInstance, link: int) -> None:
        if instance.alive and instance.link == link:
            self._lose_arbiter(instance)
            instance.feed(group_events.ArbiterFound(self.now_s))

    def _lose_arbiter(self, instance: SimInstance) -> None:
        """Report the loss of a channel as a shell does: once, and before the next one is found."""
        if instance.alive and instance.group.link.phase != "lost":
            instance.feed(group_events.ArbiterLost(self.now_s))

    def _channel_closed(self, instance: SimInstance, link: int) -> None:
        if instance.link == link:
            self._lose_arbiter(instance)

    def to_arbiter(self, instance: SimInstance, link: int, message: ToArbiter) -> None:
        """Hand over a message, unless its channel is closed by now."""
        open_link = instance.link == link and self.now_s >= instance.cut_until_s
        if instance.alive and open_link and self.arbiter is not None:
            self.peers[instance.peer] = (instance, link)
            self._feed_arbiter(arbitration_events.PeerSent(self.now_s, instance.peer, message))

    def _feed_arbiter(self, event: arbitration_events.Event) -> None:
        assert self.arbiter is not None
        process = self.arbiter_process

        def feed(held: arbitration_events.Event) -> None:
            if process is self.arbiter_process and self.arbiter is not None:
                self._feed_arbiter(held)

        if self.frozen(process, event, feed):
            return
        for effect in self.arbiter.step(event):
            match effect:
                case arbitration_events.Send(peer, message):
                    instance, link = self.peers[peer]
                    self.deliver(partial(self._to_instance, instance, link, message))
                case arbitration_events.StartTimer(timer, at_s):
                    self._start_arbiter_timer(timer, at_s)
                case arbitration_events.StopTimer(timer):
                    self.arbiter_timers.pop(timer, None)
                case arbitration_events.Exit():
                    self.arbiter = None
                    return
                case _:
                    pass
        self.arbiter.check()
        self._check_books()

    def _start_arbiter_timer(self, timer: str, at_s: float) -> None:
        self.arbiter_timers[timer] = ticket = self.next_ticket()
        epoch = self.epoch

        def fire() -> None:
            live = self.arbiter is not None and self.epoch == epoch
            if live and self.arbiter_timers.get(timer) == ticket:
                del self.arbiter_timers[timer]
                self._feed_arbiter(arbitration_events.TimerFired(self.now_s, timer))

        self.at(at_s, fire)

    def _to_instance(self, instance: SimInstance, link: int, message: ToInstance) -> None:
        if instance.alive and instance.link == link and self.now_s >= instance.cut_until_s:
            instance.feed(group_events.ArbiterSent(self.now_s, message))
            if isinstance(message, Allowance):
                self._check_allowance(instance)

    # --- trouble ---

    def crash_instance(self) -> None:
        """Kill one instance and start its successor a little later."""
        alive = [i for i in self.instances if i.alive]
        if not alive:
            return
        self._kill(self.random.choice(alive))

    def fail_start(self, instance: SimInstance) -> None:
        """End an engine whose prefix was refused; it is started again."""
        self._kill(instance)

    def require_foreign(self, device: Device) -> None:
        """Excuse a refused prefix only by memory the books cannot know of."""
        if not device.foreign_bytes and not any(
            not rank.instance.alive for rank in device.holders if isinstance(rank, SimRank)
        ):
            raise InvariantViolation("a granted prefix is there", device.name)

    def _kill(self, victim: SimInstance) -> None:
        victim.crash()
        if self.arbiter is not None:
            self.after(
                0.001,
                lambda: (
                    self._feed_arbiter(arbitration_events.PeerLost(self.now_s, victim.peer))
                    if self.arbiter is not None
                    else None
                ),
            )
        self.after(self.random.uniform(0.05, 1.0), lambda: self._restart(victim))

    def _restart(self, dead: SimInstance) -> None:
        self.instances.remove(dead)
        if self.arbiter is None:
            self.start_arbiter()
        life = int(dead.peer.split(".")[1]) + 1
        self.instances.append(SimInstance(self, dead.number, life))

    def crash_arbiter(self) -> None:
        """Kill the arbiter; every lease line shows EOF, one of the peers starts the next."""
        if self.arbiter is None:
            return
        self.arbiter = None
        for instance in self.instances:
            instance.link += 1
            self.after(
                self.random.uniform(0.0, 0.01),
                partial(self._channel_closed, instance, instance.link),
            )
        self.after(self.random.uniform(0.02, 0.3), self._revive_arbiter)

    def _revive_arbiter(self) -> None:
        if self.arbiter is None:
            self.start_arbiter()

    def move_foreign(self) -> None:
        """Let a process outside the group take free memory or give its own back."""
        device = self.random.choice(list(self.devices.values()))
        if device.foreign_bytes:
            device.foreign_bytes = 0
        elif device.free_bytes > 0:
            device.foreign_bytes = self.random.randrange(device.free_bytes + 1)

    def freeze_somebody(self) -> None:
        """Stop a process for a while: it keeps what it has and answers nobody."""
        stoppable: list[Process] = [self.arbiter_process]
        for instance in self.instances:
            if instance.alive:
                stoppable += [instance, *instance.ranks]
        who = self.random.choice(stoppable)
        until_s = self.now_s + self.random.uniform(0.0, self.faults.pause_s)
        who.frozen_until_s = max(who.frozen_until_s, until_s)

    def cut_somebody(self) -> None:
        """Lose every message between one instance and the arbiter for a while."""
        alive = [i for i in self.instances if i.alive]
        if alive:
            pause_s = self.random.uniform(0.0, self.faults.pause_s)
            self.random.choice(alive).cut_until_s = self.now_s + pause_s

    def change_load(self) -> None:
        """Give one instance another demand; often none, so that memory is lent."""
        alive = [i for i in self.instances if i.alive]
        if alive:
            instance = self.random.choice(alive)
            most = instance.geometry.extents
            instance.pool.demand = 0 if self.chance(0.3) else self.random.randrange(most)

    # --- running ---

    def run(self, actions: int) -> None:
        """Play `actions` changes of load with the faults spread among them."""
        times = {
            "crash_instance": self.faults.crashes,
            "crash_arbiter": self.faults.arbiter_crashes,
            "move_foreign": self.faults.foreign,
            "freeze_somebody": self.faults.freezes,
            "cut_somebody": self.faults.partitions,
            "change_load": actions,
        }
        script = [name for name, count in times.items() for _ in range(count)]
        self.random.shuffle(script)
        for name in script:
            getattr(self, name)()
            self.play(self.random.uniform(0.0, 0.2))

    def settle(self, wait_s: float = 60.0) -> None:
        """End all faults, keep the last load, and require that everyone is served.

        Raises InvariantViolation (I8, I9, I10) when a need that fits is still waiting, an
        order is still open, or books and devices differ after `wait_s` of virtual time.
        """
        self.faults = Faults()
        for device in self.devices.values():
            device.foreign_bytes = 0
        self._revive_arbiter()
        for instance in self.instances:
            instance.pool.demand = min(instance.pool.demand, instance.geometry.floor - 1)
        self._wait_settled(wait_s)
        # Then one is busy and all others are idle: what they do not use must all be lent.
        for lucky in self.instances:
            for instance in self.instances:
                instance.pool.demand = 0
            lucky.pool.demand = self._attainable(lucky) - 1
            self._wait_settled(wait_s)

    def _attainable(self, instance: SimInstance) -> int:
        """Extents `instance` can have while every other keeps no more than its floor."""
        fits = []
        for name, cost in instance.geometry.extent_bytes.items():
            floors = sum(
                i.geometry.floor * i.geometry.extent_bytes.get(name, 0)
                for i in self.instances
                if i is not instance
            )
            fits.append((self.devices[name].total_bytes - floors) // cost)
        return min(instance.geometry.cap, *fits)

    def _wait_settled(self, wait_s: float) -> None:
        deadline_s = self.now_s + wait_s
        while True:
            self.play(1.0)
            try:
                self._require_settled()
            except InvariantViolation:
                if self.now_s >= deadline_s:
                    raise
            else:
                return

    def _require_settled(self) -> None:
        for instance in self.instances:
            self._require_served(instance)
        assert self.arbiter is not None
        for name, device in self.devices.items():
            held = sum(i.held_bytes(device) for i in self.instances)
            booked = sum(
                i.account.held * i.cost.get(name, 0) for i in self.arbiter.instances.values()
            )
            if held != booked:
                raise InvariantViolation("I9 books equal devices", f"{name}: {booked} {held}")

    def _require_served(self, instance: SimInstance) -> None:
        pool = instance.pool
        if not instance.alive or not instance.group.serving:
            raise InvariantViolation("I8 every start ends", f"{instance.peer} never served")
        if len(pool.used) < pool.demand + 1:
            raise InvariantViolation(
                "I8 every need is met, refused or told", f"{instance.peer}: {pool.posted}"
            )
        if instance.group.book.open_operations:
            raise InvariantViolation("every order ends", str(instance.group.book.snapshot()))

    def play(self, for_s: float) -> None:
        """Let `for_s` seconds of virtual time pass."""
        until_s = self.now_s + for_s
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._heap)
            self.events += 1
            action()
        self.now_s = until_s

    # --- what no machine can check alone ---

    def _check_books(self) -> None:
        """Require that the arbiter counts nobody for less than it really holds."""
        assert self.arbiter is not None
        for peer, record in self.arbiter.instances.items():
            known = self.peers.get(peer)
            if known is None or not known[0].alive or not record.reported:
                continue
            instance = known[0]
            if instance.group.states.held > record.account.booked:
                raise InvariantViolation(
                    "I1 nobody holds more than it is booked for",
                    f"{peer} holds {instance.group.states.held}, booked {record.account.booked}",
                )

    def _check_allowance(self, instance: SimInstance) -> None:
        """No PREPARE starts above the newest allowance seen."""
        states, link = instance.group.states, instance.group.link
        growing = states.count[PREPARING] and link.phase == "joined"
        if growing and states.held > instance.geometry.cap:
            raise InvariantViolation("no growth above the cap", instance.peer)

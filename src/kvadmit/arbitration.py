"""The arbitration machine: how much each instance of a host may hold on each device.

Owns: who is a member, the books, the age of needs and starts, reclaim deadlines, and when a
device must be read. Must not know: sockets, clocks, CUDA, or the policy's rules (`policy`).

Every event ends in one call of `policy.plan`; the difference between its allowances and the
ones last sent is what goes out. Members hear levels only, so a lost or repeated message is
healed by the next one.
"""

from __future__ import annotations

import msgspec

from kvadmit import policy
from kvadmit.errors import InvariantViolation
from kvadmit.ledger import Account, DeviceBook
from kvadmit.messages import (
    Allowance,
    Bye,
    Elect,
    Hello,
    Refused,
    Report,
    Resync,
    Seen,
    StartTurn,
    Status,
    StatusQuery,
    ToArbiter,
    ToInstance,
    Welcome,
)
from kvadmit.units import format_bytes

READ_WAIT_S = 0.250
"""While a need waits and bytes are foreign, a device is read this often, backing off to
READ_WAIT_S_MAX: a process outside the group sends no event when it frees memory."""
READ_WAIT_S_MAX = 2.0
ANSWER_WAIT_S = 2.0
"""An allowance nobody confirmed is sent again after this long."""
LINGER_S = 3.0
"""The arbiter ends this long after its last member."""

# --- events --------------------------------------------------------------------------------


class PeerSent(msgspec.Struct, frozen=True):
    """A member, or an operator's tool, sent a message."""

    now_s: float
    peer: str
    message: ToArbiter


class PeerLost(msgspec.Struct, frozen=True):
    """A peer's lease line closed."""

    now_s: float
    peer: str


class TimerFired(msgspec.Struct, frozen=True):
    """The timer started by StartTimer is due."""

    now_s: float
    timer: str


Event = PeerSent | PeerLost | TimerFired

# --- effects -------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Send to a peer; of unsent allowances only the newest matters."""

    peer: str
    message: ToInstance


class Drop(msgspec.Struct, frozen=True):
    """Close the peer's channel once what was sent before has left."""

    peer: str


class StartTimer(msgspec.Struct, frozen=True):
    """Report TimerFired at `at_s`; replaces a running timer of that name."""

    timer: str
    at_s: float


class StopTimer(msgspec.Struct, frozen=True):
    """Forget the timer."""

    timer: str


class Note(msgspec.Struct, frozen=True):
    """One line for the log."""

    text: str


class Exit(msgspec.Struct, frozen=True):
    """Nobody is left: end the arbiter's process."""


Effect = Send | Drop | StartTimer | StopTimer | Note | Exit


class _Instance:
    """One member: what it said, its account, and what it waits for."""

    __slots__ = (
        "account",
        "allowance",
        "hello",
        "late",
        "order",
        "reclaim_timer",
        "refused",
        "reported",
        "sent",
        "started",
    )

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.account = Account()
        self.order = 0
        self.allowance: Allowance | None = None
        """The newest one sent, kept for a repeat."""
        self.started = False
        self.reported = False
        self.late = False
        self.refused = False
        """A rank refused under the newest allowance: it is taken back before a new grant."""
        self.reclaim_timer = False
        self.sent: tuple[int, int, bool] | None = None
        """(extents, ceiling, pressure) last sent."""

    @property
    def base_bytes(self) -> dict[str, int]:
        """Bytes booked beside elastic KV: measured, else announced once the start was granted."""
        if self.hello.base_bytes is not None:
            return self.hello.base_bytes
        return self.hello.start_bytes if self.started else {}

    @property
    def cost(self) -> dict[str, int]:
        """Device -> bytes of one extent; empty before the geometry is known."""
        geometry = self.hello.geometry
        return geometry.extent_bytes if geometry is not None else {}


class Arbitration:
    """The machine of one arbiter, one epoch. `reclaim_s`: how long a victim may take."""

    def __init__(self, *, epoch: int, reclaim_s: float) -> None:
        self.epoch = epoch
        self.reclaim_s = reclaim_s
        self.devices: dict[str, DeviceBook] = {}
        self.instances: dict[str, _Instance] = {}
        self.counters = {
            "grants": 0,
            "reclaims": 0,
            "refusals": 0,
            "device_reads": 0,
            "resends": 0,
            "stale": 0,
        }
        self._orders = 0
        self._read_wait_s = 0.0
        self._elected: set[str] = set()
        self._plan = policy.Plan({}, {}, [], [], set())

    # --- events ---

    def step(self, event: Event) -> list[Effect]:
        """Apply one event and return the effects in the order they must be carried out."""
        effects: list[Effect] = []
        match event:
            case PeerSent():
                self._peer_sent(event, effects)
            case PeerLost():
                self._leave(event.peer, event.now_s, effects)
            case TimerFired():
                self._timer_fired(event, effects)
        self._decide(event.now_s, effects)
        return effects

    def _peer_sent(self, event: PeerSent, effects: list[Effect]) -> None:
        peer, message = event.peer, event.message
        match message:
            case Hello():
                self._hello(peer, message, effects)
            case Report():
                instance = self.instances.get(peer)
                if instance is None or message.epoch != self.epoch:
                    self.counters["stale"] += 1
                    effects.append(Send(peer, Resync(epoch=self.epoch)))
                else:
                    effects.append(Send(peer, Seen(epoch=self.epoch, revision=message.revision)))
                    self._report(instance, message)
                    if message.allowance_seen == instance.account.revision:
                        effects.append(StopTimer(f"allow:{peer}"))
            case Bye():
                self._leave(peer, event.now_s, effects)
                effects.append(Drop(peer))
            case StatusQuery():
                effects.append(Send(peer, Status(snapshot=self.snapshot())))

    def _hello(self, peer: str, hello: Hello, effects: list[Effect]) -> None:
        known = self.instances.get(peer)
        reason = self._unfit(peer, hello)
        if reason:
            self.counters["refusals"] += 1
            effects.extend((Send(peer, Refused(reason=reason)), Note(f"refused: {reason}")))
            return
        for device, total_bytes in hello.devices.items():
            if device not in self.devices:
                self.devices[device] = DeviceBook(device, total_bytes)
        if known is None:
            if not self.instances:
                effects.append(StopTimer("linger"))
            self.instances[peer] = known = _Instance(hello)
            effects.append(Note(f"{hello.name} (pid {hello.pid}) joined"))
        elif hello.revision > known.hello.revision:
            known.hello = hello
        if not known.order and _wants_start(known):
            known.order = self._next_order()
        effects.append(Send(peer, Welcome(epoch=self.epoch, revision=hello.revision)))
        self._elect({d for d in hello.devices if not self.devices[d].known}, effects)
        if not _wants_start(known):
            effects.append(Send(peer, StartTurn(epoch=self.epoch, revision=hello.revision)))

    def _unfit(self, peer: str, hello: Hello) -> str:
        """Return why `hello` cannot be a member, naming who holds what, or ''."""
        for device, total_bytes in hello.devices.items():
            book = self.devices.get(device)
            if book is not None and book.total_bytes != total_bytes:
                return (
                    f"{hello.name} says {device} has {format_bytes(total_bytes)}, the instances "
                    f"here share {format_bytes(book.total_bytes)}: give all the same host_pool"
                )
        if hello.geometry is None:
            return ""
        for device, cost in hello.geometry.extent_bytes.items():
            others = {
                i.hello.name: i.hello.geometry.floor * i.cost[device]
                for p, i in self.instances.items()
                if p != peer and i.hello.geometry is not None and device in i.cost
            }
            floor = hello.geometry.floor * cost
            room = hello.devices.get(device, 0) - hello.margin_bytes
            room -= sum(i.base_bytes.get(device, 0) for i in self.instances.values())
            if floor + sum(others.values()) > room:
                held = ", ".join(f"{name} {format_bytes(size)}" for name, size in others.items())
                return (
                    f"the floor of {hello.name} ({format_bytes(floor)}) does not fit on {device}: "
                    f"{format_bytes(room)} are shared and guaranteed to {held or 'nobody'}; "
                    f"lower a floor or max_model_len, or enlarge the pool"
                )
        return ""

    def _report(self, instance: _Instance, report: Report) -> None:
        account = instance.account
        before, previous = account.held, account.report
        if not account.receive(report):
            return
        instance.late = False
        if not instance.reported:
            instance.reported = True
            for device, cost in instance.cost.items():
                self.devices[device].claim(account.held * cost)
        instance.refused = bool(report.refused) or (instance.refused and self._capped(instance))
        for device in report.refused:
            if device in self.devices:
                self.devices[device].capped = True
        for device in instance.cost:
            if account.held < before and not report.refused:
                self.devices[device].capped = False
        for reading in report.devices:
            book = self.devices.get(reading.device)
            newer = all(
                reading.sequence > old.sequence
                for old in previous.devices
                if old.device == reading.device
            )
            if book is None or not newer:
                continue
            least, most = self._bounds(reading.device)
            book.read(reading, least_bytes=least, most_bytes=most)
            if reading.device in self._elected and not report.refused:
                self._elected.discard(reading.device)
                book.capped = False
        if not report.need:
            instance.order = 0
        elif not instance.order:
            instance.order = self._next_order()

    def _bounds(self, device: str) -> tuple[int, int]:
        """Least and most bytes that members can hold on `device` at this moment."""
        least = most = 0
        for instance in self.instances.values():
            cost = instance.cost.get(device, 0)
            account, base = instance.account, instance.base_bytes.get(device, 0)
            measured = instance.hello.base_bytes is not None
            most += base + account.booked * cost
            if account.settled:
                least += account.held * cost
            else:
                least += max(0, account.surely_held) * cost
            least += base if measured else 0
        return least, most

    def _leave(self, peer: str, now_s: float, effects: list[Effect]) -> None:
        instance = self.instances.pop(peer, None)
        if instance is None:
            return
        effects.append(Note(f"{instance.hello.name} (pid {instance.hello.pid}) left"))
        effects.extend((StopTimer(f"reclaim:{peer}"), StopTimer(f"allow:{peer}")))
        for device in self.devices:
            gone = instance.account.held * instance.cost.get(device, 0)
            self.devices[device].leave(gone + instance.base_bytes.get(device, 0))
            self.devices[device].capped = False
        self._read_wait_s = 0.0
        if not self.instances:
            effects.append(StartTimer("linger", now_s + LINGER_S))

    def _timer_fired(self, event: TimerFired, effects: list[Effect]) -> None:
        name, _, peer = event.timer.partition(":")
        if name == "linger" and not self.instances:
            effects.append(Exit())
        elif name == "read":
            self._read_wait_s = min(2 * (self._read_wait_s or READ_WAIT_S), READ_WAIT_S_MAX)
            self._elect(self._unsure_devices(), effects)
            if self._unsure_devices():
                effects.append(StartTimer("read", event.now_s + self._read_wait_s))
            else:
                self._read_wait_s = 0.0
        elif name == "allow" and peer in self.instances:
            self._allow_again(peer, event.now_s, effects)
        elif name == "reclaim" and peer in self.instances:
            instance = self.instances[peer]
            instance.reclaim_timer = False
            if self._owes(instance):
                instance.late = True
                effects.append(Note(f"{instance.hello.name} gives nothing back; asking others"))

    def _allow_again(self, peer: str, now_s: float, effects: list[Effect]) -> None:
        """Repeat the newest allowance while its receiver has not confirmed it."""
        instance = self.instances[peer]
        if instance.account.report.allowance_seen < instance.account.revision:
            assert instance.allowance is not None
            self.counters["resends"] += 1
            effects.append(Send(peer, instance.allowance))
            effects.append(StartTimer(f"allow:{peer}", now_s + ANSWER_WAIT_S))

    # --- deciding ---

    def _decide(self, now_s: float, effects: list[Effect]) -> None:
        views = {
            device: policy.DeviceView(
                capacity_bytes=self.capacity(device), capped=book.capped or not book.known
            )
            for device, book in self.devices.items()
        }
        self._plan = policy.plan(views, [self._claimant(p, i) for p, i in self.instances.items()])
        for peer in self._plan.started:
            instance = self.instances[peer]
            instance.started, instance.order = True, 0
            turn = StartTurn(epoch=self.epoch, revision=instance.hello.revision)
            effects.append(Send(peer, turn))
        before = {device: self._sum(device, "booked") for device in self.devices}
        for peer, instance in self.instances.items():
            if instance.hello.geometry is not None and instance.reported:
                self._allow(peer, instance, now_s, effects)
        self._check_conservation(before)
        self._watch_devices(now_s, effects)

    def _check_conservation(self, before: dict[str, int]) -> None:
        """I1: no decision books more than capacity (which may fall below what is booked)."""
        for device, booked_before in before.items():
            booked, capacity = self._sum(device, "booked"), self.capacity(device)
            if booked > max(booked_before, capacity):
                raise InvariantViolation(
                    "I1 held + unspent allowances <= capacity",
                    f"{device}: booked {booked} of {capacity} bytes, {booked_before} before",
                )

    def _claimant(self, peer: str, instance: _Instance) -> policy.Claimant:
        geometry, account = instance.hello.geometry, instance.account
        report = account.report
        starting = instance.hello.start_bytes if _wants_start(instance) else {}
        if starting and self._start_under_way(set(starting)):
            starting = {}
        if geometry is None:
            return policy.Claimant(
                id=peer, cost={}, start_bytes=starting, order=instance.order, running=1
            )
        return policy.Claimant(
            id=peer,
            cost=geometry.extent_bytes,
            floor=geometry.floor,
            cap=min(geometry.cap, geometry.extents),
            held=account.held,
            booked=account.booked,
            leaving=report.leaving,
            spare=report.spare,
            free=report.free,
            cached=report.cached,
            orphan=report.orphan,
            need=report.need,
            want=report.want,
            running=report.running,
            order=instance.order,
            late=instance.late,
            refused=instance.refused and self._capped(instance),
            start_bytes=starting,
        )

    def _capped(self, instance: _Instance) -> bool:
        return any(self.devices[device].capped for device in instance.cost)

    def _start_under_way(self, devices: set[str]) -> bool:
        """Whether another instance is loading on one of `devices`: one start at a time."""
        return any(
            i.started
            and i.hello.base_bytes is None
            and any(i.hello.start_bytes.get(d) for d in devices)
            for i in self.instances.values()
        )

    def _allow(self, peer: str, instance: _Instance, now_s: float, effects: list[Effect]) -> None:
        extents = self._plan.allowance[peer]
        pressure = bool(self._plan.pressed & set(instance.cost))
        level = (extents, self.ceiling(instance), pressure)
        account = instance.account
        if instance.sent != level:
            before = account.allowance
            instance.sent = level
            if extents > before:
                self.counters["grants"] += 1
            elif extents < before:
                self.counters["reclaims"] += 1
            reclaim = extents < account.held - account.report.leaving
            allowance = Allowance(
                epoch=self.epoch,
                revision=account.allow(extents),
                extents=extents,
                ceiling=level[1],
                pressure=pressure,
                reason=self._plan.reason.get(peer, ""),
                deadline_s=self.reclaim_s if reclaim else 0.0,
            )
            instance.allowance = allowance
            effects.append(Send(peer, allowance))
            effects.append(StartTimer(f"allow:{peer}", now_s + ANSWER_WAIT_S))
        owes = self._owes(instance)
        if owes and not instance.reclaim_timer and not instance.late:
            instance.reclaim_timer = True
            effects.append(StartTimer(f"reclaim:{peer}", now_s + self.reclaim_s))
        elif not owes and instance.reclaim_timer:
            instance.reclaim_timer = False
            effects.append(StopTimer(f"reclaim:{peer}"))

    def _owes(self, instance: _Instance) -> bool:
        account = instance.account
        return account.held > account.allowance

    def _watch_devices(self, now_s: float, effects: list[Effect]) -> None:
        """While somebody waits and a device's figures may be stale, have it read."""
        unsure = self._unsure_devices()
        if unsure and not self._read_wait_s:
            self._read_wait_s = READ_WAIT_S
            # The wait has just begun: what the books call foreign may be free by now.
            self._elect({d for d in unsure if not self.devices[d].capped}, effects)
            effects.append(StartTimer("read", now_s + self._read_wait_s))
        elif not unsure and self._read_wait_s:
            self._read_wait_s = 0.0
            effects.append(StopTimer("read"))

    def _unsure_devices(self) -> set[str]:
        return {
            device
            for device in self._plan.pressed
            if self.devices[device].foreign_bytes
            or self.devices[device].capped
            or not self.devices[device].known
        }

    def _elect(self, devices: set[str], effects: list[Effect]) -> None:
        for device in sorted(devices):
            able = [p for p, i in self.instances.items() if device in i.hello.devices]
            # One with agents on the device, if any, reads it in passing.
            able.sort(key=lambda p: (device not in self.instances[p].cost, p))
            if able:
                self._elected.add(device)
                self.counters["device_reads"] += 1
                effects.append(Send(able[0], Elect(epoch=self.epoch, device=device)))

    # --- figures ---

    def capacity(self, device: str) -> int:
        """Bytes that members together may hold as elastic KV on `device`."""
        book = self.devices[device]
        margin = max((i.hello.margin_bytes for i in self.instances.values()), default=0)
        base = sum(i.base_bytes.get(device, 0) for i in self.instances.values())
        return book.total_bytes - margin - book.foreign_bytes - base

    def ceiling(self, instance: _Instance) -> int:
        """Most extents `instance` could ever be allowed, alone on its devices."""
        geometry = instance.hello.geometry
        assert geometry is not None
        fits = [
            (self.capacity(d) + self.devices[d].foreign_bytes) // cost
            for d, cost in geometry.extent_bytes.items()
        ]
        return max(geometry.prefix, min(geometry.cap, geometry.extents, *fits))

    def _next_order(self) -> int:
        self._orders += 1
        return self._orders

    # --- looking at it ---

    def snapshot(self) -> dict[str, object]:
        """Return books and members as plain data, bytes per device and extents per instance."""
        return {
            "epoch": self.epoch,
            "devices": {
                device: {
                    "total_bytes": book.total_bytes,
                    "capacity_bytes": self.capacity(device),
                    "foreign_bytes": book.foreign_bytes,
                    "capped": book.capped,
                    "held_bytes": self._sum(device, "held"),
                    "booked_bytes": self._sum(device, "booked"),
                }
                for device, book in self.devices.items()
            },
            "instances": {
                instance.hello.name: self._describe(peer, instance)
                for peer, instance in self.instances.items()
            },
            "waiting": [self.instances[p].hello.name for p in self._plan.waiting],
            "counters": dict(self.counters),
        }

    def _sum(self, device: str, figure: str) -> int:
        return sum(
            getattr(i.account, figure) * i.cost.get(device, 0) for i in self.instances.values()
        )

    def _describe(self, peer: str, instance: _Instance) -> dict[str, object]:
        account, geometry = instance.account, instance.hello.geometry
        return {
            "incarnation": peer,
            "pid": instance.hello.pid,
            "held_extents": account.held,
            "allowance_extents": account.allowance,
            "held_bytes": {d: account.held * cost for d, cost in instance.cost.items()},
            "base_bytes": instance.base_bytes,
            "geometry": msgspec.to_builtins(geometry) if geometry is not None else None,
            "report": msgspec.to_builtins(account.report),
            "reason": self._plan.reason.get(peer, ""),
            "late": instance.late,
            "settings": instance.hello.settings,
        }

    def check(self) -> None:
        """Raise InvariantViolation unless the books obey the conservation rules."""
        for instance in self.instances.values():
            account, geometry = instance.account, instance.hello.geometry
            if account.held < 0 or account.booked < account.held:
                raise InvariantViolation(
                    "an instance is counted for at least what it holds",
                    f"{instance.hello.name}: booked {account.booked}, held {account.held}",
                )
            if geometry is not None and account.allowance > max(account.held, geometry.cap):
                raise InvariantViolation(
                    "no grant above the cap", f"{instance.hello.name}: {account.allowance}"
                )
        for device, book in self.devices.items():
            if book.foreign_bytes < 0:
                raise InvariantViolation("foreign is never negative", device)


def _wants_start(instance: _Instance) -> bool:
    return not instance.started and any(instance.hello.start_bytes.values())

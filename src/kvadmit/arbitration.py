"""The arbitration machine: how much each instance of a host may hold on each device.

Owns: who is a member, the books, the age of needs and starts, reclaim deadlines, and when a
device must be read. Must not know: sockets, clocks, CUDA, or the policy's rules (`policy`).

Every event ends in one call of `policy.plan`; the difference between its allowances and the
ones last sent is what goes out. Members hear levels only, so a lost or repeated message is
healed by the next one.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvadmit import membership, policy
from kvadmit.errors import InvariantViolation, LocalProtocolError
from kvadmit.ledger import DeviceBook
from kvadmit.membership import Instance
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

READ_WAIT_S = 0.250
"""While a need waits and bytes are foreign, a device is read this often, backing off to
READ_WAIT_S_MAX: a process outside the group sends no event when it frees memory."""
READ_WAIT_S_MAX = 2.0
BACK_WAIT_S = 0.100
"""While a need waits and bytes of a member that left are not back, a device is read this often."""
BACK_READS = 60
"""So many times after each loss: workers end within 5 s of their engine core."""
ANSWER_WAIT_S = 2.0
"""An allowance nobody confirmed is sent again after this long."""
GATHER_S = 2.0
"""For so long nothing is given away before all that live have reported: what one was granted in an
earlier epoch, and has not taken yet, no device shows. Survivors look for the next arbiter every
second at least."""
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


class Arbitration:
    """The machine of one arbiter, one epoch. `reclaim_s`: how long a victim may take.

    `awaited`: the incarnations that live as it begins; a peer is called INCARNATION.NUMBER.
    """

    def __init__(self, *, epoch: int, reclaim_s: float, awaited: Iterable[str] = ()) -> None:
        self._awaited = set(awaited)
        self._gathering = False
        self.epoch = epoch
        self.reclaim_s = reclaim_s
        self.devices: dict[str, DeviceBook] = {}
        self.instances: dict[str, Instance] = {}
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
        self._read_round = 0
        self._back_timer = False
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
        if self._gather(event.now_s, effects):
            self._decide(event.now_s, effects)
        return effects

    def _gather(self, now_s: float, effects: list[Effect]) -> bool:
        """Return whether all that live have reported, or have had the time to."""
        if self._awaited and not self._gathering:
            effects.append(StartTimer("gather", now_s + GATHER_S))
        elif self._gathering and not self._awaited:
            effects.append(StopTimer("gather"))
        self._gathering = bool(self._awaited)
        return not self._awaited

    def _await_no_longer(self, peer: str) -> None:
        self._awaited.discard(peer.rpartition(".")[0])

    def _peer_sent(self, event: PeerSent, effects: list[Effect]) -> None:
        peer, message = event.peer, event.message
        match message:
            case Hello():
                self._hello(peer, message, effects)
            case Report():
                instance = self.instances.get(peer)
                if instance is None or not self._current(instance, message):
                    self.counters["stale"] += 1
                    effects.append(Send(peer, Resync(epoch=self.epoch)))
                else:
                    membership.check_report(message)
                    effects.append(Send(peer, Seen(epoch=self.epoch, revision=message.revision)))
                    self._report(peer, instance, message, event.now_s, effects)
                    if message.allowance_seen == instance.account.revision:
                        effects.append(StopTimer(f"allow:{peer}"))
            case Bye():
                self._leave(peer, event.now_s, effects)
                effects.append(Drop(peer))
            case StatusQuery():
                effects.append(Send(peer, Status(snapshot=self.snapshot())))

    def _current(self, instance: Instance, report: Report) -> bool:
        seen = report.allowance_seen
        return report.epoch == self.epoch and seen <= instance.account.revision

    def _hello(self, peer: str, hello: Hello, effects: list[Effect]) -> None:
        membership.check_hello(hello)
        known = self.instances.get(peer)
        reason = membership.why_unfit(peer, hello, self.instances, self.devices)
        if reason:
            self._await_no_longer(peer)
            self.counters["refusals"] += 1
            effects.extend((Send(peer, Refused(reason=reason)), Note(f"refused: {reason}")))
            return
        for device, total_bytes in hello.devices.items():
            if device not in self.devices:
                self.devices[device] = DeviceBook(device, total_bytes)
        if known is None:
            if not self.instances:
                effects.append(StopTimer("linger"))
            self.instances[peer] = known = Instance(hello)
            effects.append(Note(f"{hello.name} (pid {hello.pid}) joined"))
        else:
            if hello.revision > known.hello.revision:
                known.hello = hello
            known.sent = None  # whoever says hello again may have missed its allowance
        if not known.order and known.wants_start:
            known.order = self._next_order()
        effects.append(Send(peer, Welcome(epoch=self.epoch, revision=hello.revision)))
        self._elect({d for d in hello.devices if not self.devices[d].known}, effects)
        if not known.wants_start:
            effects.append(Send(peer, StartTurn(epoch=self.epoch, revision=hello.revision)))

    def _report(
        self, peer: str, instance: Instance, report: Report, now_s: float, effects: list[Effect]
    ) -> None:
        account = instance.account
        held_before, previous = account.held, account.report
        if not account.receive(report):
            return
        if account.held < held_before or not instance.owes:
            instance.late = False
        if not instance.reported:
            instance.reported = True
            self._await_no_longer(peer)
            for device, cost in instance.cost.items():
                self.devices[device].claim(account.held * cost)
        instance.refused = bool(report.refused) or (instance.refused and self._capped(instance))
        for device in report.refused:
            if device in self.devices:
                self.devices[device].capped = True
        # What a refused attempt undoes was never there: only backed bytes that leave say
        # that the device has room again.
        fewer = account.held - report.preparing < held_before - previous.preparing
        for device in instance.cost:
            if fewer and not report.refused:
                self.devices[device].capped = False
        self._take_readings(report, previous, now_s, effects)
        if not report.need:
            instance.order, instance.needs_since_s = 0, None
        elif not instance.order:
            instance.order, instance.needs_since_s = self._next_order(), now_s

    def _take_readings(
        self, report: Report, previous: Report, now_s: float, effects: list[Effect]
    ) -> None:
        """Correct the books by the readings that `report` has and `previous` had not."""
        for reading in report.devices:
            book = self.devices.get(reading.device)
            newer = all(
                reading.sequence > old.sequence
                for old in previous.devices
                if old.device == reading.device
            )
            if book is None or not newer:
                continue
            least, most = membership.bounds(self.instances, reading.device)
            # A clock that is ahead of ours must not make every later reading an old one.
            reading = msgspec.structs.replace(reading, at_s=min(reading.at_s, now_s))
            if not book.read(reading, least_bytes=least, most_bytes=most):
                if book.foreign_bytes:
                    # With this report the books may know better: have it read once more.
                    self._elect({reading.device}, effects)
                continue
            if reading.device in self._elected and not report.refused:
                self._elected.discard(reading.device)
                book.capped = False

    def _leave(self, peer: str, now_s: float, effects: list[Effect]) -> None:
        instance = self.instances.pop(peer, None)
        if instance is None:
            return
        self._await_no_longer(peer)
        effects.append(Note(f"{instance.hello.name} (pid {instance.hello.pid}) left"))
        effects.extend((StopTimer(f"reclaim:{peer}"), StopTimer(f"allow:{peer}")))
        for device in instance.hello.devices:
            # It may have spent its allowance to the full before it could report so.
            gone = instance.account.booked * instance.cost.get(device, 0)
            book = self.devices[device]
            book.leave(gone + instance.base_bytes.get(device, 0))
            book.capped, book.reads_left = False, BACK_READS
        self._read_wait_s = 0.0
        if not self.instances:
            # The next one may share another pool: nothing is held to compare it with.
            self.devices.clear()
            self._elected.clear()
            effects.append(StartTimer("linger", now_s + LINGER_S))

    def _timer_fired(self, event: TimerFired, effects: list[Effect]) -> None:
        name, _, peer = event.timer.partition(":")
        match name:
            case "linger":
                if not self.instances:
                    effects.append(Exit())
            case "gather":
                if self._awaited:
                    names = ", ".join(sorted(self._awaited))
                    effects.append(Note(f"no report from {names}; going on without"))
                self._awaited.clear()
            case "read":
                self._read_again(event.now_s, effects)
            case "back":
                self._read_back(effects)
            case "allow":
                if peer in self.instances:
                    self._allow_again(peer, event.now_s, effects)
            case "reclaim":
                instance = self.instances.get(peer)
                if instance is not None:
                    instance.reclaim_timer = False
                    if instance.owes:
                        instance.late = True
                        text = f"{instance.hello.name} gives nothing back; asking others"
                        effects.append(Note(text))
            case _:
                raise LocalProtocolError(f"no timer is called {event.timer}")

    def _read_again(self, now_s: float, effects: list[Effect]) -> None:
        self._read_wait_s = min(2 * (self._read_wait_s or READ_WAIT_S), READ_WAIT_S_MAX)
        self._read_round += 1
        unsure = self._unsure_devices()
        if unsure:
            self._elect(unsure, effects)
            effects.append(StartTimer("read", now_s + self._read_wait_s))
        else:
            self._read_wait_s = 0.0

    def _read_back(self, effects: list[Effect]) -> None:
        self._back_timer = False
        self._read_round += 1
        devices = self._returning(self._unsure_devices())
        for device in devices:
            self.devices[device].reads_left -= 1
        self._elect(devices, effects)

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

    def _claimant(self, peer: str, instance: Instance) -> policy.Claimant:
        geometry, account = instance.hello.geometry, instance.account
        report = account.report
        starting = instance.hello.start_bytes if instance.wants_start else {}
        if starting and membership.start_under_way(self.instances, set(starting)):
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
            preparing=report.preparing,
            need=report.need,
            want=report.want,
            running=report.running,
            order=instance.order,
            late=instance.late,
            refused=instance.refused and self._capped(instance),
            start_bytes=starting,
        )

    def _capped(self, instance: Instance) -> bool:
        return any(self.devices[device].capped for device in instance.cost)

    def _allow(self, peer: str, instance: Instance, now_s: float, effects: list[Effect]) -> None:
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
            # Nobody is hurried for a want: the busy give as their requests end.
            reclaim = pressure and extents < account.held - account.report.leaving
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
        owes = instance.owes and pressure
        if owes and not instance.reclaim_timer and not instance.late:
            instance.reclaim_timer = True
            effects.append(StartTimer(f"reclaim:{peer}", now_s + self.reclaim_s))
        elif not owes and instance.reclaim_timer:
            instance.reclaim_timer = False
            effects.append(StopTimer(f"reclaim:{peer}"))

    def _watch_devices(self, now_s: float, effects: list[Effect]) -> None:
        """While somebody goes short and a device's figures may be stale, have it read."""
        unsure = self._unsure_devices()
        if unsure and not self._read_wait_s:
            self._read_wait_s = READ_WAIT_S
            # The wait has just begun: what the books call foreign may be free by now.
            self._elect({d for d in unsure if not self.devices[d].capped}, effects)
            effects.append(StartTimer("read", now_s + self._read_wait_s))
        elif not unsure and self._read_wait_s:
            self._read_wait_s = 0.0
            effects.append(StopTimer("read"))
        returning = bool(self._returning(unsure))
        if returning and not self._back_timer:
            effects.append(StartTimer("back", now_s + BACK_WAIT_S))
        elif not returning and self._back_timer:
            effects.append(StopTimer("back"))
        self._back_timer = returning

    def _returning(self, unsure: set[str]) -> set[str]:
        """Those of the unsure devices that are to show back soon what a member that left had."""
        books = {device: self.devices[device] for device in unsure}
        return {d for d, b in books.items() if b.unshown_bytes and b.reads_left and not b.capped}

    def _unsure_devices(self) -> set[str]:
        """Devices on which a need waits or a want is unmet, while their figures may be stale."""
        short = set(self._plan.pressed)
        for peer, instance in self.instances.items():
            wanted = instance.account.held + instance.account.report.want
            if instance.account.report.want and self._plan.allowance.get(peer, wanted) < wanted:
                short |= set(instance.cost)
        return {
            device
            for device in short
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
                # Another one each time: the last may be stopped and never answer.
                chosen = able[self._read_round % len(able)]
                effects.append(Send(chosen, Elect(epoch=self.epoch, device=device)))

    # --- figures ---

    def capacity(self, device: str) -> int:
        """Bytes that members together may hold as elastic KV on `device`."""
        book = self.devices[device]
        margin = max((i.hello.margin_bytes for i in self.instances.values()), default=0)
        base = sum(i.base_bytes.get(device, 0) for i in self.instances.values())
        return book.total_bytes - margin - book.foreign_bytes - base

    def ceiling(self, instance: Instance) -> int:
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
        """Return books and members as plain data, bytes per device and extents per instance.

        An instance is found under its name; of equal names the later ones have `#2`, `#3`...
        """
        names = membership.labels(self.instances)
        return {
            "epoch": self.epoch,
            "awaited": sorted(self._awaited),
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
                names[peer]: instance.describe(
                    peer,
                    self._plan.reason.get(peer, ""),
                    self.ceiling(instance) if instance.hello.geometry is not None else 0,
                )
                for peer, instance in self.instances.items()
            },
            "waiting": [names[p] for p in self._plan.waiting if p in names],
            "counters": dict(self.counters),
        }

    def _sum(self, device: str, figure: str) -> int:
        return sum(
            getattr(i.account, figure) * i.cost.get(device, 0) for i in self.instances.values()
        )

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
            if not 0 <= book.unshown_bytes <= book.foreign_bytes:
                raise InvariantViolation("what is not shown back is foreign", device)

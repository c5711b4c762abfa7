"""The arbitration machine: how much each instance of a host may hold on each device.

Owns: who is a member, the books, the age of needs and starts, and reclaim deadlines. Must not
know: sockets, clocks, CUDA, the policy's rules (`policy`), or who reads a device (`elections`).

Every event ends in one call of `policy.plan`; the difference between its allowances and the
ones last sent is what goes out. Members hear levels only, so a lost or repeated message is
healed by the next one.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvadmit import membership, policy
from kvadmit.arbitration_events import (
    Drop,
    Effect,
    Event,
    Exit,
    Note,
    PeerLost,
    PeerSent,
    Send,
    StartTimer,
    StopTimer,
    TimerFired,
)
from kvadmit.elections import Elections
from kvadmit.errors import InvariantViolation, LocalProtocolError
from kvadmit.ledger import DeviceBook
from kvadmit.membership import Instance
from kvadmit.messages import (
    Allowance,
    Bye,
    Hello,
    Refused,
    Report,
    Resync,
    Seen,
    StartTurn,
    Status,
    StatusQuery,
    Welcome,
)

ANSWER_WAIT_S = 2.0
"""An allowance nobody confirmed is sent again after this long."""
GATHER_S = 2.0
"""For so long nothing is decided before all that live have reported and the devices were read: what
one was granted in an earlier epoch, and has not taken yet, no device shows. Survivors look for the
next arbiter every second at least."""
LINGER_S = 3.0
"""The arbiter ends this long after its last member."""


class Arbitration:
    """The machine of one arbiter, one epoch. `reclaim_s`: how long a victim may take.

    `awaited`: the incarnations that live as it begins; a peer is called INCARNATION.NUMBER.
    """

    def __init__(self, *, epoch: int, reclaim_s: float, awaited: Iterable[str] = ()) -> None:
        self._awaited = set(awaited)
        self._gathering = False
        self._gathered = not self._awaited
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
        self._elections = Elections(epoch, self.devices, self.instances, self.counters)
        self._orders = 0
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
        """Return whether all that live have reported and the devices were read, or time is up."""
        if self._gathered:
            return True
        if not self._gathering:
            self._gathering = True
            effects.append(StartTimer("gather", now_s + GATHER_S))
        if not self._awaited and not self._elections.open:
            self._gathered = True
            effects.append(StopTimer("gather"))
        return self._gathered

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
            for device, base_bytes in (hello.base_bytes or {}).items():
                self.devices[device].claim(base_bytes)  # what was read before calls it foreign
            effects.append(Note(f"{hello.name} (pid {hello.pid}) joined"))
        else:
            if hello.revision > known.hello.revision:
                known.hello = hello
            known.sent = None  # whoever says hello again may have missed its allowance
        if not known.order and known.wants_start:
            known.order = self._next_order()
        effects.append(Send(peer, Welcome(epoch=self.epoch, revision=hello.revision)))
        unread = {device for device in hello.devices if not self.devices[device].known}
        self._elections.elect(unread, effects, first=peer)
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
        if report.silent and not previous.silent:
            self._elections.pass_over(peer, effects)
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
                    self._elections.elect({reading.device}, effects)
                continue
            if not report.refused and self._elections.answered(reading.device):
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
            book.capped = False
        self._elections.member_left(peer, set(instance.hello.devices), effects)
        if not self.instances:
            # The next one may share another pool: nothing is held to compare it with.
            self.devices.clear()
            effects.append(StartTimer("linger", now_s + LINGER_S))

    def _timer_fired(self, event: TimerFired, effects: list[Effect]) -> None:
        name, _, peer = event.timer.partition(":")
        match name:
            case "linger":
                if not self.instances:
                    effects.append(Exit())
            case "gather":
                if not self._gathered:
                    late = ", ".join((*sorted(self._awaited), *sorted(self._elections.open)))
                    effects.append(Note(f"no word from {late}; going on without"))
                self._awaited.clear()
                self._gathered = True
            case "read":
                self._elections.read_again(self._unsure_devices(), event.now_s, effects)
            case "back":
                self._elections.read_back(self._unsure_devices(), effects)
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
        self._elections.watch(self._unsure_devices(), now_s, effects)

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
            "unread": sorted(self._elections.open),
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

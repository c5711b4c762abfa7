"""Members of the arbitration: what each said of itself, and who may become one.

Owns: one record per member and the checks of a hello and a report, before either changes
anything. Must not know: the policy, timers, who gets what.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from kvadmit.errors import RemoteProtocolError
from kvadmit.ledger import Account, DeviceBook
from kvadmit.messages import Allowance, Geometry, Hello, Report
from kvadmit.units import format_bytes


class Instance:
    """One member: what it said, its account, and what it waits for."""

    __slots__ = (
        "account",
        "allowance",
        "hello",
        "late",
        "needs_since_s",
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
        self.needs_since_s: float | None = None
        """When its need was first told, on the monotonic clock; for people."""
        self.allowance: Allowance | None = None
        """The newest one sent, kept for a repeat."""
        self.started = hello.geometry is not None
        """Its start bytes are booked. One that joins with a geometry took them long ago."""
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

    @property
    def wants_start(self) -> bool:
        """Whether it waits for its turn to take bytes beside elastic KV."""
        return not self.started and any(self.hello.start_bytes.values())

    @property
    def loading(self) -> bool:
        """Whether its start was granted and neither measured yet nor so far that KV is mapped."""
        return self.started and self.hello.base_bytes is None and not self.account.report.backed

    @property
    def owes(self) -> bool:
        """Whether it holds more than it is allowed."""
        return self.account.held > self.account.allowance

    def describe(self, peer: str, reason: str, ceiling: int) -> dict[str, object]:
        """Return the record as plain data; `reason`: why it has its allowance."""
        account, geometry = self.account, self.hello.geometry
        return {
            "incarnation": peer,
            "pid": self.hello.pid,
            "held_extents": account.held,
            "allowance_extents": account.allowance,
            "ceiling_extents": ceiling,
            "held_bytes": {d: account.held * cost for d, cost in self.cost.items()},
            "base_bytes": self.base_bytes,
            "geometry": msgspec.to_builtins(geometry) if geometry is not None else None,
            "report": msgspec.to_builtins(account.report),
            "needs_since_s": self.needs_since_s,
            "reason": reason,
            "late": self.late,
            "settings": self.hello.settings,
        }


def bounds(instances: Mapping[str, Instance], device: str) -> tuple[int, int]:
    """Return the least and most bytes that members can hold on `device` at this moment."""
    least = most = 0
    for instance in instances.values():
        cost = instance.cost.get(device, 0)
        account, base = instance.account, instance.base_bytes.get(device, 0)
        most += base + account.booked * cost
        if account.settled:
            least += account.held * cost
        else:
            least += max(0, account.surely_held) * cost
        if instance.hello.base_bytes is not None:
            least += base
    return least, most


def start_under_way(instances: Mapping[str, Instance], devices: set[str]) -> bool:
    """Whether an instance is loading on one of `devices`: one start at a time."""
    return any(
        i.loading and any(i.hello.start_bytes.get(device) for device in devices)
        for i in instances.values()
    )


def labels(instances: Mapping[str, Instance]) -> dict[str, str]:
    """Return peer -> a name for people; of equal names the later ones get `#2`, `#3`..."""
    taken: set[str] = set()
    found: dict[str, str] = {}
    for peer, instance in instances.items():
        label, number = instance.hello.name, 1
        while label in taken:
            number += 1
            label = f"{instance.hello.name}#{number}"
        taken.add(label)
        found[peer] = label
    return found


def why_unfit(
    peer: str, hello: Hello, instances: Mapping[str, Instance], books: Mapping[str, DeviceBook]
) -> str:
    """Return why `hello` cannot be a member, naming who holds what, or ''."""
    for device, total_bytes in hello.devices.items():
        book = books.get(device)
        if book is not None and book.total_bytes != total_bytes:
            return (
                f"{hello.name} says {device} has {format_bytes(total_bytes)}, the instances "
                f"here share {format_bytes(book.total_bytes)}: give all the same host_pool"
            )
    names = labels(instances)
    for other_peer, instance in instances.items():
        other = instance.hello
        shared = sorted(hello.devices.keys() & other.devices.keys())
        if other_peer == peer or not shared or not (hello.mps.needed or other.mps.needed):
            continue
        if not hello.mps.daemon or hello.mps.daemon != other.mps.daemon:
            return (
                f"{hello.name} would share {', '.join(shared)} with {names[other_peer]} and they "
                f"are not clients of one MPS daemon ({hello.mps.daemon or 'none'}, "
                f"{other.mps.daemon or 'none'}): collectives of several ranks would spin in each "
                "other's time slices; start nvidia-cuda-mps-control -d and then both with its "
                "CUDA_MPS_PIPE_DIRECTORY, or set kvadmit.mps to ignore for both"
            )
    if hello.geometry is None or hello.base_bytes is not None:
        # Measured is what holds its memory already: refusing it would free nothing.
        return ""
    for device, cost in hello.geometry.extent_bytes.items():
        others = {
            names[p]: i.hello.geometry.floor * i.cost[device]
            for p, i in instances.items()
            if p != peer and i.hello.geometry is not None and device in i.cost
        }
        floor = hello.geometry.floor * cost
        room = hello.devices[device] - hello.margin_bytes
        room -= sum(i.base_bytes.get(device, 0) for i in instances.values())
        if floor + sum(others.values()) > room:
            held = ", ".join(f"{name} {format_bytes(size)}" for name, size in others.items())
            return (
                f"the floor of {hello.name} ({format_bytes(floor)}) does not fit on {device}: "
                f"{format_bytes(room)} are shared and guaranteed to {held or 'nobody'}; "
                f"lower a floor or max_model_len, or enlarge the pool"
            )
    return ""


def check_hello(hello: Hello) -> None:
    """Raise RemoteProtocolError for a hello no instance sends: the books could not keep it."""
    amounts = [*hello.devices.values(), hello.margin_bytes]
    for booked in (hello.start_bytes, hello.base_bytes or {}):
        _require(booked.keys() <= hello.devices.keys(), f"{hello.name} names unknown devices")
        amounts += booked.values()
    _require(min(amounts) >= 0, f"{hello.name} gives a negative number of bytes")
    if hello.geometry is not None:
        _check_geometry(hello.name, hello.geometry, hello.devices)


def _check_geometry(name: str, geometry: Geometry, devices: Mapping[str, int]) -> None:
    costs = geometry.extent_bytes
    _require(bool(costs) and costs.keys() <= devices.keys(), f"{name} names unknown devices")
    _require(min(costs.values()) > 0, f"{name} has extents without bytes")
    sound = 0 < geometry.prefix <= geometry.extents and geometry.floor >= 0 <= geometry.cap
    _require(sound, f"{name} has a geometry that cannot be: {geometry}")


def check_report(report: Report) -> None:
    """Raise RemoteProtocolError for a report whose figures cannot be true."""
    figures = (
        report.preparing,
        report.orphan,
        report.leaving,
        report.spare,
        report.free,
        report.cached,
        report.need,
        report.want - report.need,
        report.running,
        report.backed - report.leaving - report.spare,
        *report.silent,
    )
    _require(min(figures) >= 0, f"figures that cannot be: {report}")
    times = [reading.at_s for reading in report.devices]
    _require(all(map(math.isfinite, times)), f"times that cannot be: {times}")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise RemoteProtocolError(text)

"""The policy's promises, on any snapshot."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvadmit.policy import Claimant, DeviceView, Plan, plan

DEVICES = ("g0", "g1", "g2")
Snapshot = tuple[dict[str, DeviceView], list[Claimant]]


@st.composite
def claimants(draw: st.DrawFn, number: int) -> Claimant:
    """Draw an instance whose figures agree with each other."""
    on = draw(st.sets(st.sampled_from(DEVICES), min_size=1))
    if draw(st.integers(0, 9)) == 0:
        return Claimant(
            id=f"i{number}",
            cost={},
            running=1,
            order=draw(st.integers(1, 9)),
            start_bytes={device: draw(st.integers(0, 40)) for device in on},
        )
    cap = draw(st.integers(1, 40))
    held = draw(st.integers(0, cap))
    parts = []
    left = held
    for _ in range(5):
        parts.append(draw(st.integers(0, left)))
        left -= parts[-1]
    leaving, spare, free, cached, orphan = parts
    need = draw(st.integers(0, min(4, cap - held)) | st.integers(0, cap - held))
    return Claimant(
        id=f"i{number}",
        cost={device: draw(st.integers(1, 4)) for device in on},
        floor=draw(st.integers(0, min(cap, 9))),
        cap=cap,
        held=held,
        booked=draw(st.just(held) | st.integers(held, cap)),
        leaving=leaving,
        spare=spare,
        free=free,
        cached=cached,
        orphan=orphan,
        need=need,
        want=draw(st.integers(need, cap - held)),
        running=draw(st.integers(0, 2)),
        order=draw(st.integers(0, 9)),
        late=draw(st.integers(0, 5)) == 0,
        refused=draw(st.integers(0, 7)) == 0,
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Draw devices and instances; capacity may have fallen below what is booked."""
    count = draw(st.integers(1, 4))
    them = [draw(claimants(number)) for number in range(count)]
    views = {}
    for device in DEVICES:
        booked = sum(c.booked * c.cost.get(device, 0) for c in them)
        # Mostly a little room, where rules meet; sometimes plenty, or less than is booked.
        room = st.integers(0, 12) | st.integers(0, 60)
        capacity = draw(room.map(booked.__add__) | st.integers(0, 120))
        views[device] = DeviceView(capacity, capped=draw(st.integers(0, 7)) == 0)
    return views, them


def booked_bytes(device: str, them: list[Claimant], decided: Plan | None = None) -> int:
    """Bytes counted on `device`, before a plan or with it."""
    total = 0
    for c in them:
        level = c.booked if decided is None else max(c.booked, decided.allowance[c.id])
        total += level * c.cost.get(device, 0)
        if decided is not None and c.id in decided.started:
            total += c.start_bytes.get(device, 0)
    return total


def scaled_floors(views: dict[str, DeviceView], them: list[Claimant]) -> dict[str, int]:
    """Floors in extents, shrunk by one factor per device that cannot keep them all."""
    floors = {c.id: c.floor for c in them}
    for device, view in views.items():
        total = sum(c.floor * c.cost.get(device, 0) for c in them)
        for c in them:
            if device in c.cost and total > view.capacity_bytes:
                floors[c.id] = min(floors[c.id], c.floor * view.capacity_bytes // total)
    return floors


@settings(max_examples=200)
@given(snapshots())
def test_a_plan_never_books_above_capacity(snapshot: Snapshot) -> None:
    views, them = snapshot
    decided = plan(views, them)
    for device, view in views.items():
        before = booked_bytes(device, them)
        most = before if view.capped else max(before, view.capacity_bytes)
        assert booked_bytes(device, them, decided) <= most


@settings(max_examples=200)
@given(snapshots())
def test_nobody_is_taken_below_its_floor_or_lifted_above_its_cap(snapshot: Snapshot) -> None:
    views, them = snapshot
    decided, floors = plan(views, them), scaled_floors(*snapshot)
    for c in them:
        allowed = decided.allowance[c.id]
        assert allowed >= min(c.kept, floors[c.id])
        assert allowed <= max(c.kept, min(c.cap, c.held + c.want))


@settings(max_examples=200)
@given(snapshots())
def test_what_is_granted_leaves_the_floors_of_others(snapshot: Snapshot) -> None:
    views, them = snapshot
    decided, floors = plan(views, them), scaled_floors(*snapshot)
    for device, view in views.items():
        above = any(
            device in c.cost and decided.allowance[c.id] > max(c.booked, floors[c.id]) for c in them
        )
        started = any(c.start_bytes.get(device) for c in them if c.id in decided.started)
        if above or started:
            owed = sum(
                max(0, floors[c.id] - max(c.booked, decided.allowance[c.id]))
                * c.cost.get(device, 0)
                for c in them
            )
            assert booked_bytes(device, them, decided) + owed <= view.capacity_bytes


@settings(max_examples=200)
@given(snapshots())
def test_the_late_are_not_asked_and_the_refused_get_nothing(snapshot: Snapshot) -> None:
    views, them = snapshot
    decided = plan(views, them)
    for c in them:
        assert decided.allowance[c.id] >= c.kept or not c.late
        assert decided.allowance[c.id] <= c.kept or not c.refused


@settings(max_examples=200)
@given(snapshots())
def test_a_need_is_met_whole_or_waits(snapshot: Snapshot) -> None:
    views, them = snapshot
    decided = plan(views, them)
    for c in them:
        if c.need and decided.allowance[c.id] < min(c.held + c.need, c.cap):
            assert c.id in decided.waiting
            assert decided.pressed >= set(c.cost)
            assert decided.allowance[c.id] <= max(c.kept, c.booked)
        elif c.need:
            assert c.id not in decided.waiting


@settings(max_examples=200)
@given(snapshots())
def test_needs_below_the_floor_come_first(snapshot: Snapshot) -> None:
    views, them = snapshot
    decided, floors = plan(views, them), scaled_floors(*snapshot)
    for poor in them:
        owed = poor.need and poor.held + poor.need <= floors[poor.id]
        if not owed or poor.id not in decided.waiting or poor.refused:
            continue
        # Nobody got more than its floor while it waits, and nothing it could use is free.
        for device in poor.cost:
            for rich in them:
                if device in rich.cost and rich.id != poor.id:
                    most = max(rich.booked, rich.kept, floors[rich.id])
                    assert decided.allowance[rich.id] <= most


@settings(max_examples=200)
@given(snapshots(), st.randoms(use_true_random=False))
def test_order_of_the_snapshot_and_earlier_calls_do_not_matter(
    snapshot: Snapshot, dice: random.Random
) -> None:
    views, them = snapshot
    decided = plan(views, them)
    mixed = dice.sample(them, len(them))
    assert plan(dict(reversed(views.items())), mixed) == decided


@settings(max_examples=200)
@given(snapshots())
def test_no_want_waits_beside_an_extent_that_nobody_else_is_promised(snapshot: Snapshot) -> None:
    """I10: what neither an earmark nor a floor keeps is lent while somebody wants it."""
    views, them = snapshot
    decided, floors = plan(views, them), scaled_floors(*snapshot)
    for c in them:
        allowed = decided.allowance[c.id]
        goal = min(c.held + c.want, c.cap)
        blocked = c.refused or not decided.pressed.isdisjoint(c.cost)
        blocked = blocked or any(views[device].capped for device in c.cost)
        if blocked or not c.want or allowed >= goal or c.id in decided.started:
            continue
        if decided.reason.get(c.id, "").endswith(" extents"):
            continue  # asked to give back for somebody below an equal share
        short = []
        for device, cost in c.cost.items():
            promised = sum(
                max(0, floors[o.id] - max(o.booked, decided.allowance[o.id])) * o.cost[device]
                for o in them
                if o.id != c.id and device in o.cost
            )
            free = views[device].capacity_bytes - booked_bytes(device, them, decided) - promised
            # What is leaving is given to whoever is next once it has gone.
            spare_booking = max(0, c.booked - max(allowed, c.held)) * cost
            short.append(free + spare_booking < cost)
        assert any(short)


def carried_out(c: Claimant, decided: Plan) -> Claimant:
    """Return the instance after it has spent its grant or given back what it could."""
    allowed = decided.allowance[c.id]
    parts = {name: getattr(c, name) for name in ("orphan", "spare", "free", "cached")}
    give = max(0, c.kept - allowed)
    for name, size in parts.items():
        parts[name] = size - min(size, give)
        give -= min(size, give)
    gone = c.leaving + sum(getattr(c, name) for name in parts) - sum(parts.values())
    held = c.held - gone
    take = min(max(0, allowed - held), c.want)
    return msgspec.structs.replace(
        c,
        held=held + take,
        booked=max(held + take, allowed),
        leaving=0,
        need=max(0, c.need - take),
        want=c.want - take,
        running=c.running or int(take > 0),
        refused=False,
        start_bytes={} if c.id in decided.started else c.start_bytes,
        **parts,
    )


@settings(max_examples=200)
@given(snapshots())
def test_carrying_out_plans_comes_to_rest(snapshot: Snapshot) -> None:
    """No ping-pong: with fixed wishes the plans soon ask for nothing new."""
    views, them = snapshot
    for _ in range(12):
        decided = plan(views, them)
        before = views, them
        views = {
            device: DeviceView(
                # What comes back, or a reading, ends a cap.
                view.capacity_bytes
                - sum(c.start_bytes.get(device, 0) for c in them if c.id in decided.started)
            )
            for device, view in views.items()
        }
        them = [carried_out(c, decided) for c in them]
        if (views, them) == before:
            return
    raise AssertionError(f"still moving: {them}")

"""The policy's rules, by example; bytes and extents are small numbers on purpose."""

from __future__ import annotations

from typing import Any

import pytest

from kvadmit.policy import Claimant, DeviceView, Plan, plan


def claimant(name: str, on: str = "g", cost: int = 1, **fields: Any) -> Claimant:
    """Return an instance on `on` (devices by letter), booked for what it holds."""
    fields.setdefault("cap", 100)
    fields.setdefault("booked", fields.get("held", 0))
    fields.setdefault("want", fields.get("need", 0))
    return Claimant(id=name, cost=dict.fromkeys(on, cost), **fields)


def decide(capacity: int | dict[str, int], *them: Claimant, capped: str = "") -> Plan:
    each = {"g": capacity} if isinstance(capacity, int) else capacity
    views = {device: DeviceView(size, capped=device in capped) for device, size in each.items()}
    return plan(views, list(them))


# --- rule 1: needs ---


def test_a_need_that_fits_is_granted_whole() -> None:
    decided = decide(10, claimant("a", held=3, need=4))
    assert decided == Plan({"a": 7}, {"a": "need"}, [], [], set())


def test_a_need_is_met_on_all_devices_or_on_none() -> None:
    decided = decide({"g": 10, "h": 5}, claimant("a", "gh", held=3, need=4))
    assert decided == Plan({"a": 3}, {}, ["a"], [], {"g", "h"})


def test_a_need_above_the_cap_is_a_need_up_to_the_cap() -> None:
    assert decide(10, claimant("a", held=3, need=4, cap=5)).allowance == {"a": 5}


def test_under_its_floor_first_then_below_an_equal_share_then_the_oldest() -> None:
    rich = claimant("rich", held=6, need=2, order=1)
    older = claimant("older", held=1, need=2, order=2)
    newer = claimant("newer", held=1, need=2, order=3)
    poor = claimant("poor", held=1, need=2, order=4, floor=3)
    decided = decide(15, rich, older, newer, poor)
    assert decided.allowance == {"rich": 6, "older": 3, "newer": 3, "poor": 3}
    assert decided.waiting == ["rich"]
    decided = decide(13, rich, older, newer, poor)
    assert decided.allowance["older"] == 3
    assert decided.waiting == ["newer", "rich"]
    assert decide(11, rich, older, newer, poor).allowance["poor"] == 3


def test_nobody_takes_the_bytes_of_an_unfilled_floor() -> None:
    owner = claimant("owner", held=1, floor=4)
    decided = decide(10, owner, claimant("a", held=2, need=5))
    assert decided.waiting == ["a"]
    decided = decide(10, owner, claimant("a", held=2, need=4))
    assert decided.allowance == {"owner": 1, "a": 6}


def test_a_floor_filled_by_a_need_is_not_room_a_second_time() -> None:
    greedy = claimant("a", need=5, want=20, floor=10)
    decided = decide(10, greedy)
    assert decided.allowance == {"a": 10}
    assert decide({"g": 12}, greedy, claimant("b", held=2)).allowance == {"a": 10, "b": 2}


def test_floors_shrink_together_when_capacity_falls_below_them() -> None:
    a, b = claimant("a", held=2, need=8, floor=10), claimant("b", held=8, floor=10, free=8)
    decided = decide(10, a, b)
    assert decided.allowance == {"a": 2, "b": 5}, "half of ten bytes is guaranteed to each"


def test_a_start_is_booked_whole_and_comes_before_needs_above_the_floor() -> None:
    start = Claimant(id="new", cost={}, start_bytes={"g": 6}, running=1, order=9)
    decided = decide(10, claimant("a", held=2, need=3, order=1), start)
    assert decided.started == ["new"]
    assert decided.waiting == ["a"]


def test_a_start_asks_peers_only_for_what_is_missing() -> None:
    start = Claimant(id="new", cost={}, start_bytes={"g": 6}, running=1, order=9)
    decided = decide(10, claimant("idle", held=8, free=8), start)
    assert decided.started == []
    assert decided.allowance == {"idle": 4, "new": 0}


# --- rule 2: earmark and reclaim ---


def test_an_earmark_keeps_freed_bytes_for_the_first_need() -> None:
    first = claimant("first", held=4, need=4, order=1)
    second = claimant("second", held=4, need=1, order=2)
    wisher = claimant("wisher", held=1, want=1)
    decided = decide(11, first, second, wisher)
    assert decided.waiting == ["first", "second"], "one would fit, but it is not for sale"
    assert decided.allowance == {"first": 4, "second": 4, "wisher": 1}
    decided = decide(13, first, second, wisher)
    assert decided.allowance == {"first": 8, "second": 4, "wisher": 1}
    assert decided.waiting == ["second"]


def test_reclaim_asks_the_cheapest_first() -> None:
    needy = claimant("needy", held=1, need=6)
    spare = claimant("spare", held=4, spare=2, orphan=1, running=1)
    free = claimant("free", held=4, free=2, running=1)
    cached = claimant("cached", held=4, cached=2, running=1)
    for missing, taken in {
        2: {"spare": 2, "free": 0, "cached": 0},
        4: {"spare": 3, "free": 1, "cached": 0},
        6: {"spare": 3, "free": 2, "cached": 1},
    }.items():
        decided = decide(19 - missing, needy, spare, free, cached)
        assert {name: 4 - decided.allowance[name] for name in taken} == taken, missing
        assert decided.waiting == ["needy"]


def test_idle_peers_are_asked_before_busy_ones_and_for_the_whole_want() -> None:
    needy = claimant("needy", held=1, need=2, want=4)
    busy = claimant("busy", held=5, spare=5, running=1)
    idle = claimant("idle", held=5, cached=5)
    decided = decide(11, needy, busy, idle)
    assert decided.allowance == {"needy": 1, "busy": 5, "idle": 1}
    assert decided.reason["idle"] == "needy needs cached extents"


def test_nobody_is_asked_below_its_floor() -> None:
    decided = decide(
        10, claimant("needy", held=1, need=8), claimant("idle", held=9, free=9, floor=6)
    )
    assert decided.allowance["idle"] == 6


def test_growth_above_an_equal_share_is_taken_for_a_claimant_below_it() -> None:
    needy, rich = claimant("needy", held=2, need=2), claimant("rich", held=8, running=3)
    assert decide(10, needy, rich).allowance == {"needy": 2, "rich": 6}
    needy = claimant("needy", held=4, need=2)
    rich = claimant("rich", held=6, running=3)
    assert decide(10, needy, rich).allowance == {"needy": 4, "rich": 6}, "six is above five"


def test_who_is_above_an_equal_share_drains_for_a_whole_want_up_to_it() -> None:
    needy, rich = claimant("needy", held=2, need=1, want=9), claimant("rich", held=18, running=3)
    decided = decide(20, needy, rich)
    assert decided.allowance == {"needy": 2, "rich": 10}, "one at a time would take nine rounds"
    assert decided.waiting == ["needy"]
    modest = claimant("needy", held=2, need=1, want=3)
    assert decide(20, modest, rich).allowance["rich"] == 15, "no more than is wanted"


def test_a_late_victim_is_passed_over() -> None:
    needy = claimant("needy", held=1, need=2)
    late = claimant("late", held=5, free=5, late=True)
    other = claimant("other", held=4, cached=4)
    decided = decide(10, needy, late, other)
    assert decided.allowance == {"needy": 1, "late": 5, "other": 2}


def test_what_is_leaving_already_is_not_asked_for_twice() -> None:
    needy = claimant("needy", held=1, need=2)
    victim = claimant("victim", held=9, leaving=2, free=7)
    assert decide(10, needy, victim).allowance["victim"] == 7


def test_an_unspent_grant_of_a_want_is_taken_back_for_a_need() -> None:
    needy = claimant("needy", held=2, need=3)
    wisher = claimant("wisher", held=3, booked=8, want=5)
    decided = decide(10, needy, wisher)
    assert decided.allowance == {"needy": 2, "wisher": 3}
    assert decided.waiting == ["needy"]


def test_a_need_that_is_granted_and_unspent_is_nobodys_prey() -> None:
    granted = claimant("granted", held=2, booked=6, need=4, order=2)
    needy = claimant("needy", held=2, need=4, order=1)
    decided = decide(10, granted, needy)
    assert decided.allowance == {"granted": 6, "needy": 2}


def test_a_refused_grant_is_taken_back_and_its_device_gives_nothing() -> None:
    refused = claimant("refused", held=2, booked=6, need=4, refused=True)
    other = claimant("other", held=2, need=1)
    decided = decide(20, refused, other, capped="g")
    assert decided.allowance == {"refused": 2, "other": 2}
    assert sorted(decided.waiting) == ["other", "refused"]


# --- rule 3: wants ---


def test_a_want_is_given_in_part() -> None:
    decided = decide(10, claimant("a", held=4, want=9), claimant("b", held=2))
    assert decided.allowance == {"a": 8, "b": 2}
    assert decided.reason == {"a": "want"}


def test_wants_fill_the_lowest_holder_first_and_leave_nothing_over() -> None:
    decided = decide(20, claimant("a", held=8, want=20), claimant("b", held=0, want=20))
    assert decided.allowance == {"a": 10, "b": 10}


def test_an_odd_extent_goes_to_somebody() -> None:
    decided = decide(19, *(claimant(name, held=1, want=20) for name in "abc"))
    assert sorted(decided.allowance.values()) == [6, 6, 7]


def test_many_small_chunks_cost_what_they_are() -> None:
    decided = decide(40, claimant("a", want=20), claimant("b", want=20))
    assert decided.allowance == {"a": 20, "b": 20}


def test_idle_peers_give_spare_and_free_but_not_cached_extents_for_a_want() -> None:
    wisher = claimant("wisher", held=2, want=8)
    idle = claimant("idle", held=8, spare=1, free=3, cached=4)
    decided = decide(10, wisher, idle)
    assert decided.allowance == {"wisher": 2, "idle": 4}
    assert decided.waiting == []


def test_who_is_above_an_equal_share_drains_for_a_want_of_who_is_below_it() -> None:
    wisher = claimant("wisher", held=2, want=8)
    busy = claimant("busy", held=8, spare=1, free=3, cached=4, running=1)
    decided = decide(10, wisher, busy)
    assert decided.allowance == {"wisher": 2, "busy": 5}
    assert decided.reason["busy"] == "wisher needs an equal share of extents"
    assert decided.waiting == [], "it is a want: nobody's turn is kept"
    assert decide(10, claimant("wisher", held=5, want=8), busy).allowance["busy"] == 8


def test_a_need_that_is_granted_is_no_prey_of_a_want() -> None:
    wisher = claimant("wisher", held=2, want=8)
    needy = claimant("needy", held=12, need=1, running=1)
    assert decide(20, needy, wisher).allowance == {"needy": 13, "wisher": 7}
    needy = claimant("needy", held=9, need=1, running=1)
    idle = claimant("idle", held=8, cached=8)
    assert decide(20, needy, wisher, idle).allowance == {"needy": 10, "wisher": 2, "idle": 8}


@pytest.mark.parametrize("leaving", range(9))
def test_what_leaves_for_a_want_is_not_granted_back_while_it_goes(leaving: int) -> None:
    wisher = claimant("wisher", held=2, want=8)
    rich = claimant("rich", held=18, leaving=leaving, running=9, want=4)
    assert decide(20, wisher, rich).allowance == {"wisher": 2, "rich": 10}


def test_those_below_an_equal_share_keep_what_they_were_given() -> None:
    idle = claimant("idle", held=10, cached=10)
    both = [claimant(name, held=1, want=20) for name in ("c", "v")]
    assert decide(30, idle, *both).allowance == {"idle": 10, "c": 10, "v": 10}
    large = claimant("large", cost=3, held=10, want=9)
    small = claimant("small", cost=2, held=15, want=9)
    assert decide(64, large, small).allowance == {"large": 10, "small": 17}, "nothing idles"


def test_nobody_drains_for_a_want_that_another_device_blocks() -> None:
    wisher = claimant("wisher", "gh", held=2, want=8)
    busy = claimant("busy", "g", held=18, want=4, running=1)
    idle = claimant("idle", "h", held=18, cached=18)
    decided = decide({"g": 20, "h": 20}, wisher, busy, idle)
    assert decided.allowance == {"wisher": 2, "busy": 18, "idle": 18}


def test_a_granted_want_is_kept_while_nobody_waits() -> None:
    wisher = claimant("wisher", held=3, booked=8, want=5)
    assert decide(10, wisher, claimant("b", held=2)).allowance["wisher"] == 8
    shrunk = claimant("wisher", held=3, booked=8, want=1)
    assert decide(10, shrunk, claimant("b", held=2)).allowance["wisher"] == 4


def test_devices_nobody_waits_for_are_not_held_up() -> None:
    needy = claimant("needy", "g", held=9, need=4)
    elsewhere = claimant("elsewhere", "h", held=2, want=3)
    decided = decide({"g": 10, "h": 10}, needy, elsewhere)
    assert decided.waiting == ["needy"]
    assert decided.pressed == {"g"}
    assert decided.allowance["elsewhere"] == 5

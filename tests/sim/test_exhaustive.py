"""Small hosts searched to the end, and that the search would find what is broken."""

from __future__ import annotations

import pytest

from kvadmit import group, orders, reports
from kvadmit.testing.exhaustive import Budget, Host, Model, search
from kvadmit.testing.fingerprints import fingerprint

ONE_GROWTH = ((0, 1),)
STATES_MAX = 20_000


@pytest.mark.parametrize(
    "budget",
    [Budget(), Budget(losses=1), Budget(repeats=1)],
    ids=["kind", "a message lost", "a message repeated"],
)
def test_one_growth_in_every_order(budget: Budget) -> None:
    found = search(Model(script=ONE_GROWTH, budget=budget), STATES_MAX)
    assert found.complete
    assert not found.broken
    assert found.ends > 0


def test_a_growth_that_does_not_wait_for_all_ranks_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(orders.Operation, "waiting_ranks", property(lambda self: set()))
    found = search(Model(script=ONE_GROWTH), STATES_MAX)
    ways = [way for rule, way in found.broken if "I3 all ranks have it mapped" in rule]
    assert ways
    assert ways[0][0] == "load", "the moves that lead to it, from the first"


def test_a_lost_message_that_nobody_repeats_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports.Reports, "send_again", lambda *_: False)
    monkeypatch.setattr(group.Group, "_ask_again", lambda *_: None)
    found = search(Model(script=ONE_GROWTH, budget=Budget(losses=1)), STATES_MAX)
    assert found.deadlocks > 0


def test_the_way_to_a_state_does_not_count_but_what_it_holds_does() -> None:
    hosts = [Host(Model(script=((0, 1), (1, 1)))) for _ in range(3)]
    assert fingerprint(hosts[0]) == fingerprint(hosts[1])
    for host in hosts[:2]:
        host.move("load")
    assert fingerprint(hosts[0]) == fingerprint(hosts[1]) != fingerprint(hosts[2])
    hosts[0].links = dict(reversed(hosts[0].links.items()))
    assert fingerprint(hosts[0]) == fingerprint(hosts[1])

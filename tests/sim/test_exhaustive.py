"""Small hosts searched to the end, and that the search would find what is broken."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import pytest

from kvadmit import arbitration, group, orders, reports
from kvadmit.testing import exhaustive
from kvadmit.testing.exhaustive import Budget, Found, Host, Model, search
from kvadmit.testing.fingerprints import Catalogue, Piece

ONE_GROWTH = ((0, 1),)
CONTENTION = ((0, 1), (1, 1), (0, 0))
HEIR = Model(devices=1, capacity=3, script=((1, 2),), budget=Budget(crashes=1))
"""Only the memory of the other, who dies, makes its need fit."""
STATES_MAX = 60_000


@pytest.mark.parametrize(
    "budget",
    [
        Budget(),
        Budget(losses=1),
        Budget(repeats=1),
        Budget(losses=1, repeats=1),
        Budget(crashes=1),
        Budget(losses=1, crashes=1),
    ],
    ids=["kind", "lost", "repeated", "lost and repeated", "dead", "lost and dead"],
)
def test_one_growth_in_every_order(budget: Budget) -> None:
    found = search(Model(script=ONE_GROWTH, budget=budget), STATES_MAX)
    assert found.complete
    assert not found.broken
    assert found.ends > 0


@pytest.mark.parametrize(
    "model",
    [Model(devices=1, capacity=3, script=CONTENTION), HEIR],
    ids=["given back", "left by the dead"],
)
def test_who_waits_gets_the_memory_of_the_other_in_every_order(model: Model) -> None:
    found = search(model, STATES_MAX)
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


def test_a_device_that_is_read_for_ever_without_a_grant_is_a_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arbitration.Arbitration, "_take_readings", lambda *_: None)
    found = search(HEIR, STATES_MAX)
    assert found.complete, "time that passes in vain has an end"
    assert found.deadlocks > 0


@pytest.mark.parametrize(
    "model",
    [Model(script=ONE_GROWTH, budget=Budget(losses=1)), HEIR],
    ids=["a message lost", "an instance dies"],
)
def test_what_is_remembered_is_what_would_happen_again(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered = search(model, STATES_MAX)

    def happens(
        self: Catalogue, part: Piece, name: str, does: str, *given: Any
    ) -> tuple[Piece, list[tuple[str, Piece]]]:
        value = copy.deepcopy(part.value)
        arguments = [each.value if isinstance(each, Piece) else each for each in given]
        sent = getattr(value, does)(*arguments)
        self._pieces.clear()
        return self.piece(value, name), [(link, self.piece(said, link)) for link, said in sent]

    monkeypatch.setattr(Catalogue, "after", happens)
    assert search(model, STATES_MAX) == remembered


@pytest.mark.parametrize(
    "model",
    [
        Model(script=ONE_GROWTH, budget=Budget(losses=1)),
        Model(script=ONE_GROWTH, budget=Budget(repeats=1)),
        HEIR,
        Model(devices=1, capacity=3, script=CONTENTION),
    ],
    ids=["lost", "repeated", "dead", "contention"],
)
def test_hosts_of_one_fingerprint_can_do_the_same_and_stay_of_one(model: Model) -> None:
    begin = Host(model)
    seen, left = {_everything(begin)}, deque([begin])
    leads: dict[bytes, dict[str, bytes]] = {}
    while left:
        state, to = left.popleft(), {}
        for name in state.moves():
            host = state.copy()
            host.move(name)
            to[name] = host.fingerprint()
            if _everything(host) not in seen:
                seen.add(_everything(host))
                left.append(host)
        assert leads.setdefault(state.fingerprint(), to) == to
    assert len(leads) < len(seen)
    assert len(leads) == search(model, STATES_MAX).states


def _everything(host: Host) -> tuple[object, ...]:
    """Return all that `host` is, with every number as it stands: pieces are equal if the same."""
    links = tuple(sorted(host.links.items(), key=lambda item: item[0]))
    budget = (host.losses, host.repeats, host.crashes)
    return tuple(host.parts.items()), links, budget, host.script, host.now_s, host.fired


def test_whatever_may_go_wrong_is_among_the_moves() -> None:
    host = Host(Model(script=ONE_GROWTH, budget=Budget(losses=1, repeats=1, crashes=1)))
    host.move("load")
    assert set(host.moves()) == {
        "arrive i0 arbiter",
        "lose i0 arbiter",
        "repeat i0 arbiter",
        "crash i0",
        "crash i1",
    }
    host.move("crash i0")
    assert set(host.moves()) == {
        "arrive i0 arbiter",
        "lose i0 arbiter",
        "repeat i0 arbiter",
        "arrive i0 lease",
        "end i0 r0i0",
        "end i0 r1i0",
    }
    host.move("arrive i0 lease")
    assert set(host.moves()) == {"end i0 r0i0", "end i0 r1i0"}


def test_the_way_to_a_state_does_not_count_but_what_it_holds_does() -> None:
    start = Host(Model(script=((0, 1), (1, 1))))
    hosts = [start.copy() for _ in range(2)]
    assert hosts[0].fingerprint() == start.fingerprint()
    for host in hosts:
        host.move("load")
    assert hosts[0].fingerprint() == hosts[1].fingerprint() != start.fingerprint()
    hosts[0].move("load")
    hosts[0].links = dict(reversed(hosts[0].links.items()))
    hosts[1].move("load")
    assert hosts[0].fingerprint() == hosts[1].fingerprint()


def test_whose_need_is_older_counts_but_not_how_old_it_is() -> None:
    def told(first: int, second: int) -> bytes:
        host = start.copy()
        arbiter = copy.deepcopy(host.parts["arbiter"].value)
        for name, order in (("i0", first), ("i1", second)):
            arbiter.machine.instances[name].order = order
        host.parts["arbiter"] = host.catalogue.piece(arbiter, "arbiter")
        return host.fingerprint()

    start = Host(Model())
    assert told(1, 2) == told(3, 7)
    assert len({told(1, 2), told(2, 1), told(0, 1), told(1, 0), told(0, 0)}) == 5


def test_a_long_search_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhaustive, "PROGRESS_S", 0.0)
    told: list[int] = []

    def progress(found: Found, frontier: int) -> None:
        assert frontier > 0
        told.append(found.states)

    found = search(Model(script=ONE_GROWTH), STATES_MAX, progress)
    assert told == sorted(told)
    assert told[0] < told[-1] <= found.states

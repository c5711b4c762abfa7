"""The arbitration machine, scenario by scenario, with exact effects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvadmit.arbitration import ANSWER_WAIT_S, GATHER_S, LINGER_S, Arbitration
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
from kvadmit.elections import BACK_READS, BACK_WAIT_S, READ_WAIT_S, READ_WAIT_S_MAX
from kvadmit.errors import InvariantViolation, LocalProtocolError, RemoteProtocolError
from kvadmit.messages import (
    Allowance,
    Bye,
    DeviceReading,
    Elect,
    Geometry,
    Hello,
    Mps,
    Refused,
    Report,
    Resync,
    Seen,
    StartTurn,
    Status,
    StatusQuery,
    ToArbiter,
    Welcome,
)
from kvadmit.rendezvous import PAUSE_S_MAX

EPOCH, RECLAIM_S = 4, 5.0
MIB = 1 << 20


class Host:
    """An arbiter over devices of ten MiB; checks the machine after every step.

    Extents are one MiB on each device of an instance, so figures read as extents. Reports are
    honest by default: they confirm the newest allowance and show the device as `free` MiB.
    """

    def __init__(self, *awaited: str) -> None:
        self.machine = Arbitration(epoch=EPOCH, reclaim_s=RECLAIM_S, awaited=awaited)
        self.now_s = 0.0
        self.revision: dict[str, int] = {}
        self.reading = 0
        self.timers: dict[str, float] = {}

    def step(self, event: Event) -> list[Effect]:
        effects = self.machine.step(event)
        self.machine.check()
        for effect in effects:
            if isinstance(effect, StartTimer):
                self.timers[effect.timer] = effect.at_s
            elif isinstance(effect, StopTimer):
                self.timers.pop(effect.timer, None)
        return effects

    def sent(self, peer: str, message: ToArbiter) -> list[Effect]:
        return self.step(PeerSent(self.now_s, peer, message))

    def hello(self, peer: str, *, on: str = "g", **fields: Any) -> list[Effect]:
        return self.sent(peer, hello(peer, on=on, **fields))

    def report(self, peer: str, backed: int, **figures: Any) -> list[Effect]:
        self.revision[peer] = self.revision.get(peer, 0) + 1
        account = self.machine.instances[peer].account
        figures.setdefault("allowance_seen", account.revision)
        figures.setdefault("want", figures.get("need", 0))
        return self.sent(
            peer, Report(epoch=EPOCH, revision=self.revision[peer], backed=backed, **figures)
        )

    def shown(
        self, free: int, device: str = "g", operations: int = 0, at_s: float = 0.0
    ) -> dict[str, Any]:
        """Return the figure of a report that shows `device` as `free` MiB, read at `at_s`."""
        self.reading += 1
        reading = DeviceReading(
            device=device,
            free_bytes=free * MIB,
            total_bytes=10 * MIB,
            sequence=self.reading,
            operations=operations,
            at_s=at_s,
        )
        return {"devices": (reading,)}

    def timer(self, name: str) -> list[Effect]:
        return self.step(TimerFired(self.now_s, name))

    def pass_time(self, until_s: float, free: Callable[[], int]) -> list[float]:
        """Fire every timer that is due; who is elected shows `free()` MiB in its next report.

        Returns when the device was read.
        """
        reads = []
        while (at_s := min(self.timers.values(), default=until_s)) < until_s:
            self.now_s = at_s
            name = min(self.timers, key=lambda timer: self.timers[timer])
            del self.timers[name]
            for effect in self.timer(name):
                if isinstance(effect, Send) and isinstance(effect.message, Elect):
                    reads.append(round(at_s, 3))
                    last = self.machine.instances[effect.peer].account.report
                    figures = {n: getattr(last, n) for n in ("need", "want", "running")}
                    self.report(effect.peer, last.backed, **figures, **self.shown(free()))
        self.now_s = until_s
        return reads

    def join(self, peer: str, backed: int = 1, *, on: str = "g", **fields: Any) -> None:
        """Bring an instance up that holds `backed` extents, its allowance confirmed."""
        self.hello(peer, on=on, **fields)
        free = 10 - self.held(on)
        self.report(peer, 0, need=backed, **self.shown(free, on))
        self.report(peer, backed, running=1, **self.shown(free - backed, on))
        assert self.allowance(peer) == backed

    def held(self, device: str = "g") -> int:
        return sum(i.account.held for i in self.machine.instances.values() if device in i.cost)

    def allowance(self, peer: str) -> int:
        return self.machine.instances[peer].account.allowance

    def foreign(self, device: str = "g") -> int:
        return self.machine.devices[device].foreign_bytes // MIB


def hello(
    peer: str, *, on: str = "g", revision: int = 1, geometry: bool = True, **fields: Any
) -> Hello:
    shape = {
        name: fields.pop(name, default)
        for name, default in {"extents": 10, "floor": 1, "cap": 10}.items()
    }
    plan = Geometry(extent_blocks=4, prefix=1, extent_bytes=dict.fromkeys(on, MIB), **shape)
    fields.setdefault("name", peer)
    fields.setdefault("devices", dict.fromkeys(on, 10 * MIB))
    fields.setdefault("start_bytes", {})
    return Hello(revision=revision, pid=7, geometry=plan if geometry else None, **fields)


def allow(
    host: Host,
    peer: str,
    extents: int,
    *,
    reason: str = "",
    pressure: bool = False,
    ceiling: int = 10,
    deadline_s: float = 0.0,
) -> list[Effect]:
    """Return what sending the newest allowance looks like."""
    message = Allowance(
        epoch=EPOCH,
        revision=host.machine.instances[peer].account.revision,
        extents=extents,
        ceiling=ceiling,
        pressure=pressure,
        reason=reason,
        deadline_s=deadline_s,
    )
    return [Send(peer, message), StartTimer(f"allow:{peer}", host.now_s + ANSWER_WAIT_S)]


def seen(host: Host, peer: str, *, confirmed: bool = True) -> list[Effect]:
    told: list[Effect] = [Send(peer, Seen(epoch=EPOCH, revision=host.revision[peer]))]
    return [*told, StopTimer(f"allow:{peer}")] if confirmed else told


# --- joining ---


def test_the_first_instance_joins_and_gets_its_prefix() -> None:
    host = Host()
    assert host.hello("a") == [
        StopTimer("linger"),
        Note("a (pid 7) joined"),
        Send("a", Welcome(epoch=EPOCH, revision=1)),
        Send("a", Elect(epoch=EPOCH, device="g")),
        Send("a", StartTurn(epoch=EPOCH, revision=1)),
    ]
    effects = host.report("a", 0, need=1, **host.shown(10))
    assert effects == [*seen(host, "a"), *allow(host, "a", 1, reason="need")]
    effects = host.report("a", 1)
    assert effects == [*seen(host, "a"), *allow(host, "a", 1)][:2]


# --- a new epoch ---


def given(effects: list[Effect]) -> dict[str, int]:
    """Return the extents that each peer is allowed by some effects."""
    return {
        e.peer: e.message.extents
        for e in effects
        if isinstance(e, Send) and isinstance(e.message, Allowance)
    }


def test_what_one_is_about_to_take_is_given_to_nobody_before_it_has_reported() -> None:
    host = Host("ia", "ib")
    assert StartTimer("gather", GATHER_S) in host.hello("ia.2")
    effects = host.report("ia.2", 4, need=6, running=1, **host.shown(6))
    assert not given(effects), "ib was granted two before and has taken none"
    host.hello("ib.7")
    effects = host.report("ib.7", 0, preparing=2)
    assert StopTimer("gather") in effects
    assert given(effects) == {"ia.2": 4, "ib.7": 2}, "its need is whole or waits"


def test_who_never_comes_again_is_awaited_for_a_while_only() -> None:
    host = Host("ia", "ib")
    host.hello("ia.1")
    assert not given(host.report("ia.1", 4, need=6, **host.shown(6)))
    assert host.machine.snapshot()["awaited"] == ["ib"]
    host.now_s = GATHER_S
    effects = host.timer("gather")
    assert Note("no word from ib; going on without") in effects
    assert given(effects) == {"ia.1": 10}


@pytest.mark.parametrize("how", ["leaves", "is refused", "says goodbye"])
def test_who_will_not_report_is_awaited_no_longer(how: str) -> None:
    host = Host("ia", "ib")
    host.hello("ia.1")
    host.report("ia.1", 4, need=6, **host.shown(6))
    if how == "is refused":
        effects = host.hello("ib.1", devices={"g": 11 * MIB})
    else:
        host.hello("ib.1")
        gone: Event = PeerLost(0.0, "ib.1")
        effects = host.step(gone) if how == "leaves" else host.sent("ib.1", Bye())
    assert StopTimer("gather") in effects
    assert "ia.1" in given(effects)


def test_nothing_is_granted_on_a_device_nobody_has_read() -> None:
    host = Host()
    host.hello("a")
    effects = host.report("a", 0, need=1)
    assert effects == [
        *seen(host, "a"),
        *allow(host, "a", 0, pressure=True),
        Send("a", Elect(epoch=EPOCH, device="g")),
        StartTimer("read", READ_WAIT_S),
    ]
    effects = host.report("a", 0, need=1, **host.shown(10))
    assert effects == [
        *seen(host, "a"),
        *allow(host, "a", 1, reason="need"),
        StopTimer("read"),
    ]


def test_a_floor_that_does_not_fit_is_refused_naming_who_holds_what() -> None:
    host = Host()
    host.join("a", floor=4)
    host.join("b", floor=5)
    reason = (
        "the floor of c (2MiB) does not fit on g: 10MiB are shared and guaranteed to "
        "a 4MiB, b 5MiB; lower a floor or max_model_len, or enlarge the pool"
    )
    assert host.hello("c", floor=2) == [
        Send("c", Refused(reason=reason)),
        Note(f"refused: {reason}"),
    ]
    assert "c" not in host.machine.instances
    assert host.machine.counters["refusals"] == 1
    host.hello("c", floor=1)
    assert "c" in host.machine.instances


def test_another_host_pool_is_refused() -> None:
    host = Host()
    host.join("a")
    reason = "b says g has 8MiB, the instances here share 10MiB: give all the same host_pool"
    assert host.hello("b", devices={"g": 8 * MIB}) == [
        Send("b", Refused(reason=reason)),
        Note(f"refused: {reason}"),
    ]


NEEDED, ONE, OTHER = Mps(needed=True), "/run/mps", "/run/other"


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [
        (Mps(), Mps(), True),
        (NEEDED, Mps(), False),
        (Mps(), NEEDED, False),
        (NEEDED, NEEDED, False),
        (Mps(ONE, needed=True), Mps(ONE, needed=True), True),
        (Mps(ONE, needed=True), Mps(ONE), True),
        (Mps(ONE, needed=True), Mps(OTHER), False),
        (Mps(ONE, needed=True), Mps(), False),
        (Mps(ONE), Mps(), True),
    ],
)
def test_ranks_that_wait_for_each_other_share_gpus_only_under_one_mps_daemon(
    first: Mps, second: Mps, fits: bool
) -> None:
    host = Host()
    host.hello("a", mps=first)
    effects = host.hello("b", mps=second)
    assert ("b" in host.machine.instances) is fits
    refused = [e.message for e in effects if isinstance(e, Send)]
    reasons = [message.reason for message in refused if isinstance(message, Refused)]
    assert bool(reasons) is not fits
    for reason in reasons:
        assert reason.startswith("b would share g with a and they are not clients of one MPS")
        assert "set kvadmit.mps to ignore for both" in reason


def test_on_other_gpus_nobody_asks_for_mps() -> None:
    host = Host()
    host.hello("a", mps=NEEDED)
    host.hello("b", mps=NEEDED, on="h")
    assert "b" in host.machine.instances


# --- sharing ---


def test_two_instances_share_by_need_and_reclaim_the_cheapest_first() -> None:
    host = Host()
    host.join("a", 6)
    host.join("b", 1)
    host.now_s = 1.0
    effects = host.report("a", 6, spare=1, free=1, cached=1, running=0)
    assert effects == seen(host, "a")
    effects = host.report("b", 1, need=3, running=1)
    assert effects == [*seen(host, "b"), *allow(host, "b", 4, reason="need")], "it still fits"
    host.report("b", 4, running=1)
    for need, kind in ((1, "spare"), (2, "free"), (3, "cached")):
        effects = host.report("b", 4, need=need, running=1)
        victim = [
            *allow(
                host,
                "a",
                6 - need,
                reason=f"b needs {kind} extents",
                pressure=True,
                deadline_s=RECLAIM_S,
            ),
            StartTimer("reclaim:a", 1.0 + RECLAIM_S),
        ]
        waiting = allow(host, "b", 4, pressure=True)
        if need > 1:
            victim, waiting = victim[:-1], []  # both are told already
        assert effects == [*seen(host, "b"), *victim, *waiting], need
        host.report("a", 6, spare=1, free=1, cached=1)
    effects = host.report("a", 3)
    assert effects == [
        *seen(host, "a"),
        *allow(host, "a", 3),
        StopTimer("reclaim:a"),
        *allow(host, "b", 7, reason="need"),
    ]
    assert (host.machine.counters["grants"], host.machine.counters["reclaims"]) == (4, 3)


def test_an_earmark_lapses_with_its_need() -> None:
    host = Host()
    host.join("a", 4)
    host.join("b", 4)
    host.report("a", 4, need=5, running=1)
    host.report("b", 4, want=2, running=1)
    assert host.allowance("b") == 4, "the two free extents are earmarked for a"
    host.report("a", 4, running=1)
    assert host.allowance("b") == 6


def test_needs_that_wait_are_served_by_age() -> None:
    host = Host()
    for peer in ("b", "a"):
        host.join(peer, 5 if peer == "b" else 4)
    host.report("b", 5, need=1, running=1)
    assert host.allowance("b") == 6
    host.report("b", 6, need=1, running=1)
    host.report("a", 4, need=2, running=1)
    assert host.machine.snapshot()["waiting"] == ["b", "a"]
    host.report("b", 6, running=1)
    assert host.machine.snapshot()["waiting"] == ["a"]


def test_two_devices_are_granted_together_or_not_at_all() -> None:
    host = Host()
    host.hello("tp", on="gh")
    both = (host.shown(10)["devices"][0], host.shown(10, "h")["devices"][0])
    host.report("tp", 0, need=1, devices=both)
    host.report("tp", 1, running=1)
    host.join("one", 7, on="h")
    effects = host.report("tp", 1, need=3, running=1)
    assert host.allowance("tp") == 1
    asked = allow(
        host,
        "one",
        6,
        reason="tp needs an equal share of extents",
        pressure=True,
        deadline_s=RECLAIM_S,
    )
    assert asked[0] in effects
    host.report("one", 6, running=1)
    assert host.allowance("tp") == 4


def test_a_want_is_given_in_part_and_taken_back_unspent_for_a_need() -> None:
    host = Host()
    host.join("a", 3)
    host.join("b", 3)
    effects = host.report("a", 3, want=9, running=1)
    assert effects == [*seen(host, "a"), *allow(host, "a", 7, reason="want")]
    host.report("a", 3, want=9, running=1)
    effects = host.report("b", 3, need=2, running=1)
    assert effects == [
        *seen(host, "b"),
        *allow(host, "a", 3, pressure=True),
        *allow(host, "b", 3, pressure=True),
    ]
    effects = host.report("a", 3, want=9, running=1, allowance_seen=2)
    assert effects == seen(host, "a", confirmed=False), "it may still be spending the old one"
    effects = host.report("a", 3, want=9, running=1)
    assert effects == [
        *seen(host, "a"),
        *allow(host, "a", 5, reason="want"),
        *allow(host, "b", 5, reason="need"),
    ]


def test_an_allowance_repeats_until_it_was_seen() -> None:
    host = Host()
    host.join("a", 3)
    host.report("a", 3, need=2, running=1)
    again = allow(host, "a", 5, reason="need")
    assert host.timer("allow:a") == again
    assert host.machine.counters["resends"] == 1
    host.report("a", 5, running=1)
    assert host.timer("allow:a") == []


def test_an_instance_that_greets_again_hears_its_allowance_again() -> None:
    host = Host()
    host.join("a", 3)
    effects = host.hello("a")
    assert effects == [
        Send("a", Welcome(epoch=EPOCH, revision=1)),
        Send("a", StartTurn(epoch=EPOCH, revision=1)),
        *allow(host, "a", 3),
    ]


# --- refusals of the driver ---


def test_a_refused_grant_is_taken_back_and_comes_again_after_an_elected_reading() -> None:
    host = Host()
    host.join("a", 2)
    host.report("a", 2, need=2, running=1)
    assert host.allowance("a") == 4
    effects = host.report("a", 2, need=2, running=1, refused=("g",))
    assert effects == [
        *seen(host, "a"),
        *allow(host, "a", 2, pressure=True),
        StartTimer("read", READ_WAIT_S),
    ]
    effects = host.report("a", 2, need=2, running=1)
    assert effects == seen(host, "a"), "not before a newer reading"
    effects = host.report("a", 2, need=2, running=1, **host.shown(8))
    assert effects == seen(host, "a"), "nor after one nobody asked for"
    effects = host.timer("read")
    assert effects == [
        Send("a", Elect(epoch=EPOCH, device="g")),
        StartTimer("read", 2 * READ_WAIT_S),
    ]
    effects = host.report("a", 2, need=2, running=1, **host.shown(8))
    assert effects == [
        *seen(host, "a"),
        *allow(host, "a", 4, reason="need"),
        StopTimer("read"),
    ]


def capped(host: Host) -> bool:
    return host.machine.devices["g"].capped


def test_an_elected_reading_from_before_the_refusal_ends_no_cap_and_another_is_asked_for() -> None:
    """Its reader was stopped in between, say."""
    host = Host()
    host.now_s = 100.0
    host.join("a", 2)
    host.report("a", 2, need=2, running=1)
    host.report("a", 2, need=2, running=1, refused=("g",), **host.shown(5, at_s=50.0))
    host.timer("read")
    effects = host.report("a", 2, need=2, running=1, **host.shown(8, at_s=49.0))
    assert Send("a", Elect(epoch=EPOCH, device="g")) in effects
    assert capped(host)
    host.report("a", 2, need=2, running=1, **host.shown(8, at_s=51.0))
    assert not capped(host)
    assert host.allowance("a") == 4


def test_a_clock_that_is_ahead_does_not_make_all_others_old() -> None:
    host = Host()
    host.now_s = 10.0
    host.join("a", 2)
    host.report("a", 2, **host.shown(5, at_s=1e9))
    assert host.machine.devices["g"].foreign_bytes == 3 * MIB
    host.now_s = 11.0
    host.report("a", 2, **host.shown(8, at_s=11.0))
    assert host.machine.devices["g"].foreign_bytes == 0
    with pytest.raises(RemoteProtocolError, match="times that cannot be"):
        host.report("a", 2, **host.shown(8, at_s=float("inf")))


def test_bytes_that_come_back_end_a_cap() -> None:
    host = Host()
    host.join("a", 2)
    host.join("b", 3)
    host.report("a", 2, need=2, running=1)
    host.report("a", 2, need=2, running=1, refused=("g",))
    assert host.allowance("a") == 2
    host.report("b", 2, running=1)
    assert host.allowance("a") == 4


# --- victims ---


def test_a_late_victim_is_passed_over_and_asked_again_once_it_speaks() -> None:
    host = Host()
    host.join("a", 4)
    host.join("b", 3)
    host.join("c", 3)
    host.report("b", 3, free=2)
    host.report("c", 3, cached=2)
    effects = host.report("a", 4, need=1, running=1)
    assert StartTimer("reclaim:b", RECLAIM_S) in effects
    assert (host.allowance("b"), host.allowance("c")) == (2, 3)
    host.now_s = RECLAIM_S
    effects = host.timer("reclaim:b")
    assert effects == [
        Note("b gives nothing back; asking others"),
        *allow(host, "b", 3, pressure=True),
        *allow(
            host,
            "c",
            2,
            reason="a needs cached extents",
            pressure=True,
            deadline_s=RECLAIM_S,
        ),
        StartTimer("reclaim:c", 2 * RECLAIM_S),
    ]
    host.report("c", 2)
    assert host.allowance("a") == 5
    host.report("a", 5, need=1, running=1)
    effects = host.report("b", 3, free=2)
    assert host.allowance("b") == 2, "it speaks again, so it is asked again"
    assert StartTimer("reclaim:b", 2 * RECLAIM_S) in effects


# --- foreign bytes and readings ---


def test_who_is_lost_is_foreign_until_a_reading_shows_its_bytes_back() -> None:
    host = Host()
    host.join("a", 2)
    host.join("b", 4)
    host.report("b", 4, want=2, running=1)
    assert host.allowance("b") == 6
    effects = host.step(PeerLost(1.0, "b"))
    assert effects == [Note("b (pid 7) left"), StopTimer("reclaim:b"), StopTimer("allow:b")]
    assert host.foreign() == 6, "it may have spent all it was allowed"
    host.now_s = 1.0
    effects = host.report("a", 2, need=4, running=1)
    assert effects == [
        *seen(host, "a"),
        *allow(host, "a", 2, pressure=True),
        Send("a", Elect(epoch=EPOCH, device="g")),
        StartTimer("read", 1.0 + READ_WAIT_S),
        StartTimer("back", 1.0 + BACK_WAIT_S),
    ]
    effects = host.report("a", 2, need=4, running=1, **host.shown(3))
    assert effects == seen(host, "a")
    assert host.foreign() == 5
    effects = host.report("a", 2, need=4, running=1, **host.shown(8))
    assert effects == [
        *seen(host, "a"),
        *allow(host, "a", 6, reason="need"),
        StopTimer("read"),
        StopTimer("back"),
    ]
    assert host.foreign() == 0


def short_of_the_dead() -> Host:
    """Return a host at 1 s on which a needs what b, just lost, had."""
    host = Host()
    host.join("a", 2)
    host.join("b", 4)
    host.now_s = 1.0
    host.report("a", 2, need=8, running=1)
    assert "back" not in host.timers, "b lives"
    host.step(PeerLost(1.0, "b"))
    return host


@pytest.mark.parametrize("shown_s", [1.01, 1.55, 4.321, 6.9])
def test_bytes_of_the_dead_are_grantable_100_ms_after_the_device_shows_them(
    shown_s: float,
) -> None:
    host = short_of_the_dead()
    host.pass_time(shown_s, lambda: 4)
    assert (host.foreign(), host.allowance("a")) == (4, 2)
    host.pass_time(shown_s + 1.001 * BACK_WAIT_S, lambda: 8)
    assert (host.foreign(), host.allowance("a")) == (0, 10)


def test_bytes_of_the_dead_that_stay_away_are_soon_read_for_no_more_often_than_others() -> None:
    host = short_of_the_dead()
    soon_s = BACK_READS * BACK_WAIT_S
    reads = host.pass_time(1.05 + soon_s, lambda: 4)
    usual = [1.25, 1.75, *(2.75 + 2 * n for n in range(7))]
    assert reads == sorted([*usual, *(round(1 + 0.1 * n, 3) for n in range(1, BACK_READS + 1))])
    assert "back" not in host.timers
    assert host.pass_time(21.0, lambda: 4) == [16.75, 18.75, 20.75]
    host.report("a", 2, running=1)
    host.report("a", 2, need=8, running=1)
    assert "back" not in host.timers, "a new wait begins no new series"
    host.hello("c")
    host.report("c", 1)
    host.step(PeerLost(21.0, "c"))
    assert "back" in host.timers, "a new loss does"


def test_where_nobody_goes_short_the_dead_cause_no_reading() -> None:
    host = Host()
    host.join("a", 2)
    host.join("b", 4)
    reads = host.machine.counters["device_reads"]
    host.step(PeerLost(0.0, "b"))
    host.report("a", 2, running=1)
    assert not host.timers
    host.report("a", 2, need=8, running=1)
    assert {"read", "back"} <= host.timers.keys()
    host.report("a", 2, running=1)
    assert not {"read", "back"} & host.timers.keys()
    assert host.machine.counters["device_reads"] == reads + 1


def test_what_others_take_from_the_dead_is_read_for_no_sooner() -> None:
    """One MiB was foreign before b died; it still is when the device shows what b had."""
    host = Host()
    host.join("a", 2)
    host.join("b", 4)
    host.report("a", 2, running=1, **host.shown(3))
    assert host.foreign() == 1
    host.step(PeerLost(0.0, "b"))
    host.report("a", 2, need=8, running=1)
    assert "back" in host.timers
    host.report("a", 2, need=8, running=1, **host.shown(5))
    assert host.foreign() == 3
    assert "back" in host.timers, "half of it is back"
    host.report("a", 2, need=8, running=1, **host.shown(7))
    assert host.foreign() == 1
    assert host.timers.keys() & {"read", "back"} == {"read"}


def test_a_device_that_refuses_is_not_read_sooner_for_the_dead() -> None:
    host = short_of_the_dead()
    host.report("a", 2, need=8, running=1, refused=("g",))
    assert host.timers.keys() & {"read", "back"} == {"read"}


def test_a_loss_leaves_the_caps_of_other_devices_alone() -> None:
    host = Host()
    host.join("a", 2, on="g")
    host.join("b", 2, on="h")
    host.report("a", 2, need=2, running=1)
    host.report("a", 2, need=2, running=1, refused=("g",))
    host.step(PeerLost(0.0, "b"))
    assert host.allowance("a") == 2
    assert host.machine.devices["g"].capped


def test_the_read_timer_backs_off_asks_others_too_and_ends_with_the_wait() -> None:
    host = Host()
    host.join("a", 2)
    host.join("b", 1)
    host.report("a", 2, running=1, **host.shown(2))
    assert host.foreign() == 5
    host.report("a", 2, need=8, running=1)
    elected, pauses = [], []
    wait_s = READ_WAIT_S
    for _ in range(5):
        host.now_s += wait_s
        effects = host.timer("read")
        (elect, timer) = effects
        assert isinstance(elect, Send)
        assert isinstance(timer, StartTimer)
        elected.append(elect.peer)
        wait_s = timer.at_s - host.now_s
        pauses.append(wait_s)
    assert pauses == [0.5, 1.0, 2.0, READ_WAIT_S_MAX, READ_WAIT_S_MAX]
    assert elected == ["b", "a", "b", "a", "b"], "one of them may be stopped"
    effects = host.report("a", 2, running=1)
    assert StopTimer("read") in effects
    assert host.timer("read") == []


def test_a_reading_while_something_moves_only_bounds_what_is_foreign() -> None:
    host = Host()
    host.join("a", 4)
    host.report("a", 4, leaving=2, running=1, **host.shown(7))
    assert host.foreign() == 0, "one of the two may be gone already"
    host.report("a", 2, running=1)
    host.report("a", 2, running=1, **host.shown(7))
    assert host.foreign() == 1


# --- starts ---


def test_a_start_waits_for_room_and_one_start_at_a_time_loads_on_a_device() -> None:
    host = Host()
    host.join("a", 7)
    host.report("a", 7, free=5)
    first = hello("first", geometry=False, start_bytes={"g": 4 * MIB})
    effects = host.sent("first", first)
    assert effects == [
        Note("first (pid 7) joined"),
        Send("first", Welcome(epoch=EPOCH, revision=1)),
        *allow(
            host,
            "a",
            6,
            reason="first needs free extents",
            pressure=True,
            deadline_s=RECLAIM_S,
            ceiling=10,
        ),
        StartTimer("reclaim:a", RECLAIM_S),
    ]
    effects = host.report("a", 6, free=4)
    assert Send("first", StartTurn(epoch=EPOCH, revision=1)) in effects
    assert host.machine.snapshot()["devices"]["g"]["capacity_bytes"] == 6 * MIB  # type: ignore[index]
    second = hello("second", geometry=False, start_bytes={"g": 1 * MIB})
    turn = Send("second", StartTurn(epoch=EPOCH, revision=1))
    assert turn not in host.sent("second", second)
    host.hello("first", revision=2, start_bytes={"g": 4 * MIB})
    effects = host.report("first", 0, need=1)
    assert turn not in effects, "its weights are loading"
    host.report("a", 5, free=3)
    assert (host.allowance("first"), host.allowance("a")) == (1, 5)
    host.report("first", 1, running=1)
    assert host.allowance("a") == 4, "KV is mapped after the weights: now it is second's turn"
    assert turn in host.report("a", 4, free=2)


def test_a_measured_base_replaces_what_was_announced() -> None:
    host = Host()
    host.sent("a", hello("a", start_bytes={"g": 4 * MIB}))
    host.report("a", 0, **host.shown(10))
    assert host.machine.capacity("g") == 6 * MIB
    host.hello("a", revision=2, start_bytes={"g": 4 * MIB}, base_bytes={"g": 3 * MIB})
    assert host.machine.capacity("g") == 7 * MIB


def test_who_measured_more_than_it_announced_stays_a_member() -> None:
    host = Host()
    host.sent("a", hello("a", start_bytes={"g": 1 * MIB}))
    host.report("a", 2, **host.shown(7))
    effects = host.hello("a", revision=2, start_bytes={"g": 1 * MIB}, base_bytes={"g": 9 * MIB})
    assert not [e for e in effects if isinstance(e, Send) and isinstance(e.message, Refused)]
    assert host.machine.capacity("g") == 1 * MIB
    assert host.machine.instances["a"].account.held == 2, "it goes on with what it has"


def test_who_serves_already_waits_for_no_start_at_a_new_arbiter() -> None:
    host = Host()
    fields: dict[str, Any] = {"start_bytes": {"g": 2 * MIB}}
    turn = Send("a", StartTurn(epoch=EPOCH, revision=1))
    assert turn in host.hello("a", **fields)
    host.report("a", 5, running=1, **host.shown(3))
    assert (host.machine.capacity("g"), host.foreign()) == (8 * MIB, 0)
    late = Send("b", StartTurn(epoch=EPOCH, revision=1))
    assert late in host.sent("b", hello("b", geometry=False, **fields))


def test_a_start_that_dies_frees_the_turn() -> None:
    host = Host()
    host.join("a", 1)
    host.sent("first", hello("first", geometry=False, start_bytes={"g": MIB}))
    host.sent("second", hello("second", geometry=False, start_bytes={"g": MIB}))
    effects = host.step(PeerLost(0.0, "first"))
    assert Send("second", StartTurn(epoch=EPOCH, revision=1)) in effects
    assert host.foreign() == 1


# --- restart ---


def test_after_a_restart_survivors_are_counted_before_anything_is_granted() -> None:
    host = Host()
    host.hello("a")
    host.hello("b")
    effects = host.report("a", 5, need=2, running=1, allowance_seen=0)
    assert effects == [
        *seen(host, "a"),
        *allow(host, "a", 5, pressure=True),
        Send("a", Elect(epoch=EPOCH, device="g")),
        StartTimer("read", READ_WAIT_S),
    ]
    effects = host.report("a", 5, need=2, running=1, **host.shown(1))
    assert effects == seen(host, "a")
    assert host.foreign() == 4, "what b holds is nobody's until it says so"
    effects = host.report("b", 4, running=1, free=1, allowance_seen=0)
    assert host.foreign() == 0
    assert host.allowance("b") == 3
    host.report("b", 3, running=1)
    assert host.allowance("a") == 7


@pytest.mark.parametrize(
    "fields", [{"epoch": EPOCH - 1}, {"epoch": EPOCH + 1}, {"allowance_seen": 9}]
)
def test_a_report_of_another_membership_changes_nothing_and_is_answered_resync(
    fields: dict[str, int],
) -> None:
    host = Host()
    host.join("a", 3)
    before = host.machine.snapshot()
    message = Report(**{"epoch": EPOCH, "revision": 9, "allowance_seen": 1, "backed": 8, **fields})  # type: ignore[arg-type]
    assert host.sent("a", message) == [Send("a", Resync(epoch=EPOCH))]
    assert host.machine.counters["stale"] == 1
    host.machine.counters["stale"] = 0
    assert host.machine.snapshot() == before


def test_a_report_of_a_stranger_is_answered_resync() -> None:
    host = Host()
    stranger = Report(epoch=EPOCH, revision=1, allowance_seen=0, backed=3)
    assert host.sent("x", stranger) == [Send("x", Resync(epoch=EPOCH))]


def test_an_older_report_changes_nothing_but_is_confirmed() -> None:
    host = Host()
    host.join("a", 3)
    before = host.machine.snapshot()
    old = Report(epoch=EPOCH, revision=1, allowance_seen=0, backed=9, need=1, want=1)
    assert host.sent("a", old) == [Send("a", Seen(epoch=EPOCH, revision=1))]
    assert host.machine.snapshot() == before


# --- the end ---


def test_the_arbiter_ends_after_its_last_member_unless_another_comes() -> None:
    host = Host()
    host.join("a", 3)
    host.now_s = 1.0
    assert host.sent("a", Bye()) == [
        Note("a (pid 7) left"),
        StopTimer("reclaim:a"),
        StopTimer("allow:a"),
        StartTimer("linger", 1.0 + LINGER_S),
        Drop("a"),
    ]
    assert host.step(PeerLost(1.0, "a")) == []
    assert host.hello("b")[0] == StopTimer("linger")
    assert host.timer("linger") == []
    host.step(PeerLost(1.0, "b"))
    assert host.timer("linger") == [Exit()]


# --- looking at it ---


def test_status_shows_devices_instances_and_who_waits() -> None:
    host = Host()
    host.join("a", 3)
    host.join("b", 6)
    host.report("b", 6, need=3, running=1)
    (reply,) = host.sent("tool", StatusQuery())
    assert isinstance(reply, Send)
    assert isinstance(reply.message, Status)
    snapshot: dict[str, Any] = reply.message.snapshot
    assert snapshot["epoch"] == EPOCH
    assert snapshot["devices"] == {
        "g": {
            "total_bytes": 10 * MIB,
            "capacity_bytes": 10 * MIB,
            "foreign_bytes": 0,
            "capped": False,
            "held_bytes": 9 * MIB,
            "booked_bytes": 9 * MIB,
        }
    }
    assert snapshot["waiting"] == ["b"]
    described = snapshot["instances"]["b"]
    assert (described["held_extents"], described["held_bytes"]) == (6, {"g": 6 * MIB})
    assert described["report"]["need"] == 3
    assert "tool" not in host.machine.instances


def test_status_shows_ranks_that_do_not_answer_and_nothing_is_decided_on_them() -> None:
    host = Host()
    host.join("a", 3)
    for silent in ((1,), ()):
        effects = host.report("a", 3, running=1, silent=silent)
        seen = Seen(epoch=EPOCH, revision=host.revision["a"])
        assert effects == [Send("a", seen), StopTimer("allow:a")]
        instances: Any = host.machine.snapshot()["instances"]
        assert instances["a"]["report"]["silent"] == silent


def test_instances_of_one_name_do_not_hide_each_other() -> None:
    host = Host()
    for peer in ("x", "y", "z"):
        host.join(peer, 1, name="model")
    host.report("z", 1, need=9, running=1)
    snapshot: dict[str, Any] = host.machine.snapshot()
    peers = {name: shown["incarnation"] for name, shown in snapshot["instances"].items()}
    assert peers == {"model": "x", "model#2": "y", "model#3": "z"}
    assert snapshot["waiting"] == ["model#3"]


# --- what cannot happen ---


def test_an_unknown_timer_raises_and_changes_nothing() -> None:
    host = Host()
    host.join("a", 3)
    before = host.machine.snapshot()
    with pytest.raises(LocalProtocolError):
        host.timer("tea:a")
    assert host.machine.snapshot() == before
    assert host.timer("reclaim:gone") == host.timer("allow:gone") == []


@pytest.mark.parametrize(
    "message",
    [
        hello("x", devices={"g": -1}),
        hello("x", start_bytes={"h": 1}),
        hello("x", base_bytes={"h": 1}),
        hello("x", start_bytes={"g": -1}),
        hello("x", devices={"h": 10 * MIB}),
        hello("x", extents=0),
        hello("x", floor=-1),
        Report(epoch=EPOCH, revision=9, allowance_seen=0, backed=-1),
        Report(epoch=EPOCH, revision=9, allowance_seen=0, backed=1, leaving=2),
        Report(epoch=EPOCH, revision=9, allowance_seen=0, backed=1, need=2, want=1),
        Report(epoch=EPOCH, revision=9, allowance_seen=0, backed=1, silent=(-1,)),
    ],
)
def test_a_message_no_instance_sends_raises_and_changes_nothing(message: ToArbiter) -> None:
    host = Host()
    host.join("a", 3)
    before = host.machine.snapshot()
    with pytest.raises(RemoteProtocolError):
        host.sent("a", message)
    host.machine.check()
    assert host.machine.snapshot() == before


def test_the_check_finds_books_that_cannot_be() -> None:
    host = Host()
    host.join("a", 3)
    host.machine.devices["g"].unshown_bytes = 1
    with pytest.raises(InvariantViolation, match="foreign"):
        host.machine.check()
    host.machine.devices["g"].unshown_bytes = 0
    host.machine.devices["g"].foreign_bytes = -1
    with pytest.raises(InvariantViolation, match="foreign"):
        host.machine.check()
    host.machine.devices["g"].foreign_bytes = 0
    host.machine.instances["a"].account.allowance = 11
    with pytest.raises(InvariantViolation, match="above the cap"):
        host.machine.check()


def test_survivors_look_again_before_they_are_given_up() -> None:
    assert GATHER_S >= 2 * PAUSE_S_MAX


def test_nothing_is_decided_in_a_new_epoch_before_its_devices_are_read() -> None:
    host = Host("ia", "ib")
    host.hello("ia.1")
    host.hello("ib.1")
    host.report("ia.1", 4)
    assert not given(host.report("ib.1", 4, need=1)), "it would be told to give back, unread"
    effects = host.report("ia.1", 4, **host.shown(2))
    assert StopTimer("gather") in effects
    assert given(effects) == {"ia.1": 4, "ib.1": 5}


def elected(effects: list[Effect]) -> list[str]:
    return [e.peer for e in effects if isinstance(e, Send) and isinstance(e.message, Elect)]


def test_one_that_cannot_read_delays_no_decision_of_a_new_epoch() -> None:
    """It may be capturing graphs, or be in a long driver call: nobody can tell."""
    host = Host("ia", "ib")
    assert elected(host.hello("ia.1")) == ["ia.1"]
    assert elected(host.hello("ib.1")) == ["ib.1"], "whoever comes while nothing is known"
    host.report("ia.1", 4)
    effects = host.report("ib.1", 4, need=1, **host.shown(2))
    assert given(effects) == {"ia.1": 4, "ib.1": 5}


def test_what_one_that_leaves_was_to_read_is_read_by_another() -> None:
    host = Host("ia", "ib")
    host.hello("ia.1")
    host.hello("ib.1")
    host.report("ia.1", 4, need=1)
    effects = host.step(PeerLost(0.0, "ib.1"))
    assert elected(effects) == ["ia.1"]
    assert not given(effects)
    assert given(host.report("ia.1", 4, need=1, **host.shown(6))) == {"ia.1": 5}


def test_what_one_with_a_rank_that_stops_answering_was_to_read_is_read_by_another() -> None:
    host = Host("ia", "ib")
    host.hello("ia.1")
    host.hello("ib.1")
    host.report("ia.1", 4)
    assert elected(host.report("ib.1", 4, need=1, silent=(0,))) == ["ia.1"]
    assert elected(host.report("ib.1", 4, need=1, silent=(0,))) == [], "once"
    assert host.machine.snapshot()["unread"] == ["g"]
    assert given(host.report("ia.1", 4, **host.shown(2))) == {"ia.1": 4, "ib.1": 5}
    assert host.machine.snapshot()["unread"] == []


def test_the_log_names_who_and_what_no_word_came_of() -> None:
    host = Host("ia", "ib")
    host.hello("ia.1")
    host.report("ia.1", 4)
    (note,) = [e for e in host.timer("gather") if isinstance(e, Note)]
    assert note.text == "no word from ib, g; going on without"


def test_the_base_of_one_that_joins_after_a_reading_is_counted_once() -> None:
    host = Host()
    for peer, base in (("a.1", 2), ("b.1", 3)):
        host.hello(peer, base_bytes={"g": base * MIB})
        figures = host.shown(1) if peer == "a.1" else {}
        host.report(peer, 2, **figures)
    device = host.machine.snapshot()["devices"]["g"]  # type: ignore[index]
    assert (device["foreign_bytes"], device["capacity_bytes"]) == (0, 5 * MIB)
    host.step(PeerLost(0.0, "b.1"))
    host.hello("b.2", base_bytes={"g": 3 * MIB})
    host.revision["b.2"] = 0
    host.report("b.2", 2)
    device = host.machine.snapshot()["devices"]["g"]  # type: ignore[index]
    assert device["foreign_bytes"] == 0


def test_who_has_a_rank_that_does_not_answer_is_asked_to_read_last() -> None:
    host = Host()
    for peer in ("a", "b", "c"):
        host.join(peer, 2)
    host.report("a", 2, running=1, silent=(0,))
    host.step(PeerLost(0.0, "c"))
    effects = host.report("b", 2, need=8, running=1)
    for _ in range(3):
        effects += host.timer("read")
    assert elected(effects) == ["b"] * 4

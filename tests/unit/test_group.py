"""The group machine, scenario by scenario, with exact effects."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvadmit.errors import InvariantViolation, LocalProtocolError, RemoteProtocolError
from kvadmit.group import ORPHAN_TRIES_MAX, Group
from kvadmit.group_events import (
    AgentJoined,
    AgentLost,
    AgentSent,
    ArbiterFound,
    ArbiterLost,
    ArbiterSent,
    Effect,
    EngineLost,
    Event,
    GeometryKnown,
    GivePool,
    Hold,
    Note,
    Observe,
    PoolSent,
    ReadHere,
    ReadingTaken,
    SendAgent,
    SendArbiter,
    Settle,
    StartRequested,
    StartTimer,
    StopRequested,
    StopTimer,
    TimerFired,
)
from kvadmit.link import ANSWER_WAIT_S
from kvadmit.messages import (
    AgentHello,
    Allowance,
    Answer,
    BaseMeasured,
    Bye,
    DeviceReading,
    Elect,
    Geometry,
    Headroom,
    Hello,
    MapGrant,
    OrderKind,
    ReadDevice,
    Refused,
    Report,
    Resync,
    Runs,
    Seen,
    StartTurn,
    ToInstance,
    Welcome,
)
from kvadmit.orders import ORDER_WAIT_S, ORDER_WAIT_S_MAX
from kvadmit.pool_side import HOLD_S, IDLE_S
from kvadmit.port import Ceiling, Limit, PoolLevels, PoolReturned, Resident

DEVICES = ("g0", "g1")
HELLO = Hello(revision=1, name="alpha", pid=7, devices=dict.fromkeys(DEVICES, 1000), start_bytes={})
GEOMETRY = Geometry(
    extents=16,
    extent_blocks=4,
    prefix=1,
    floor=2,
    cap=12,
    extent_bytes=dict.fromkeys(DEVICES, 10),
)
START_WAIT_S, IDLE_DECAY_S = 60.0, 30.0


def reading(device: str, free_bytes: int = 500, sequence: int = 1) -> DeviceReading:
    return DeviceReading(
        device=device, free_bytes=free_bytes, total_bytes=1000, sequence=sequence, at_s=0.0
    )


def agent_hello(rank: int, mapped: Runs = ((0, 1),)) -> AgentHello:
    return AgentHello(
        rank=rank,
        pid=100 + rank,
        device=DEVICES[rank],
        granule_bytes=1,
        extent_bytes=10,
        extents=GEOMETRY.extents,
        mapped=mapped,
        reading=reading(DEVICES[rank], sequence=0),
    )


class Engine:
    """One engine of two ranks; checks the machine after every step.

    `now_s` is what every event carries. `reported` builds the report a step must have sent
    from the one before it, so that a test names only the figures it is about.
    """

    def __init__(self) -> None:
        self.machine = Group(
            ranks=2, hello=HELLO, start_wait_s=START_WAIT_S, idle_decay_s=IDLE_DECAY_S
        )
        self.now_s = 0.0
        self.epoch = 1
        self.revision = 0
        self.report = self.last_report = Report(epoch=0, revision=0, allowance_seen=0, backed=0)

    def step(self, event: Event) -> list[Effect]:
        effects = self.machine.step(event)
        self.machine.check()
        for effect in effects:
            if isinstance(effect, SendArbiter) and isinstance(effect.message, Report):
                self.last_report, self.report = self.report, effect.message
        return effects

    # --- the arbiter ---

    def found(self) -> list[Effect]:
        return self.step(ArbiterFound(self.now_s))

    def arbiter(self, message: ToInstance) -> list[Effect]:
        return self.step(ArbiterSent(self.now_s, message))

    def allow(
        self, extents: int, *, ceiling: int = 12, pressure: bool = False, epoch: int = 0
    ) -> list[Effect]:
        self.revision += 1
        return self.arbiter(
            Allowance(
                epoch=epoch or self.epoch,
                revision=self.revision,
                extents=extents,
                ceiling=ceiling,
                pressure=pressure,
                reason="need",
            )
        )

    def reported(self, **figures: Any) -> list[Effect]:
        """Return how sending a report looks that differs from the one before in `figures`."""
        figures.setdefault("refused", ())
        counters = {**self.machine.counters, "waiting": self.machine.pool.levels.waiting}
        revision = self.last_report.revision + 1
        report = msgspec.structs.replace(
            self.last_report, revision=revision, counters=counters, **figures
        )
        return [SendArbiter(report), StartTimer("report", self.now_s + ANSWER_WAIT_S)]

    def seen(self) -> list[Effect]:
        return self.arbiter(Seen(epoch=self.epoch, revision=self.report.revision))

    def confirm(self) -> None:
        """Have the arbiter confirm reports until none is outstanding."""
        while self.machine.reports.outstanding:
            self.seen()

    # --- the ranks ---

    def joined(self, rank: int) -> list[Effect]:
        return self.step(AgentJoined(self.now_s, agent_hello(rank)))

    def answer(
        self,
        rank: int,
        order: int,
        kind: OrderKind,
        done: Runs,
        **more: Any,
    ) -> list[Effect]:
        more.setdefault("outcome", "done")
        message = Answer(order=order, rank=rank, kind=kind, done=done, **more)
        return self.step(AgentSent(self.now_s, rank, message))

    def both(self, order: int, kind: OrderKind, done: Runs) -> list[Effect]:
        """Both ranks answer that all is done; the first answer alone causes nothing."""
        assert self.answer(0, order, kind, done) == []
        return self.answer(1, order, kind, done)

    # --- the pool and time ---

    def pool(self, resident: int, **levels: int) -> list[Effect]:
        return self.step(PoolSent(self.now_s, PoolLevels(resident=resident, **levels)))

    def returned(self, extents: Runs, fence: int = 5) -> list[Effect]:
        return self.step(PoolSent(self.now_s, PoolReturned(extents, fence)))

    def timer(self, name: str) -> list[Effect]:
        return self.step(TimerFired(self.now_s, name))

    # --- where scenarios begin ---

    def start(self) -> None:
        """Serve with the prefix, allowance 1 of revision 1 seen, nothing outstanding."""
        self.found()
        self.arbiter(Welcome(epoch=1, revision=1))
        self.confirm()
        self.step(GeometryKnown(self.now_s, GEOMETRY))
        self.arbiter(Welcome(epoch=1, revision=2))
        self.confirm()
        self.allow(1)
        self.confirm()
        self.joined(0)
        self.joined(1)
        self.confirm()
        assert self.machine.serving

    def grow(self, to: int) -> None:
        """Have `to` extents resident, as the pool asked; the pool knows."""
        first, order = self.machine.states.held, self.last_order
        count = to - first
        self.pool(first, need_total=to, want_total=to, running=1)
        self.confirm()
        self.allow(to)
        self.confirm()
        self.both(order + 1, "prepare", ((first, count),))
        self.confirm()
        self.both(order + 2, "commit", ((first, count),))
        self.confirm()
        self.pool(to, running=1)
        self.confirm()
        assert self.states() == {"resident": to, "absent": 16 - to}

    @property
    def last_order(self) -> int:
        return self.machine.book._last_order

    def states(self) -> dict[str, int]:
        return {name: n for name, n in self.machine.states.snapshot().items() if n}


def engine() -> Engine:
    made = Engine()
    made.start()
    return made


def grant(order: int, kind: OrderKind, extents: Runs, fence: int = 0) -> list[Effect]:
    """Return what sending an order to both ranks looks like at time 0."""
    message = MapGrant(order=order, kind=kind, extents=extents, fence=fence)
    wait_s = ORDER_WAIT_S_MAX if kind in ("fence", "decommit") else ORDER_WAIT_S
    return [
        StartTimer(f"answer:{order}", wait_s),
        SendAgent(0, message),
        SendAgent(1, message),
    ]


STOP_REPORT = StopTimer("report")


# --- start ---


def test_a_start_from_hello_to_ready() -> None:
    e = Engine()
    assert e.step(StartRequested(0.0, {"g0": 5})) == [StartTimer("wait:start", START_WAIT_S)]
    hello = msgspec.structs.replace(HELLO, revision=2, start_bytes={"g0": 5})
    assert e.found() == [SendArbiter(hello), StartTimer("hello", ANSWER_WAIT_S)]
    assert e.arbiter(Welcome(epoch=1, revision=2)) == e.reported(epoch=1)
    assert e.seen() == [STOP_REPORT]
    settled = [StopTimer("wait:start"), Settle("start")]
    assert e.arbiter(StartTurn(epoch=1, revision=2)) == settled
    full = msgspec.structs.replace(hello, revision=3, geometry=GEOMETRY)
    assert e.step(GeometryKnown(0.0, GEOMETRY)) == [
        StartTimer("wait:geometry", START_WAIT_S),
        SendArbiter(full),
        StartTimer("hello", ANSWER_WAIT_S),
        *e.reported(need=1, want=1),
    ]
    assert e.arbiter(Welcome(epoch=1, revision=3)) == []
    assert e.seen() == [STOP_REPORT]
    assert e.allow(1) == [
        StopTimer("wait:geometry"),
        Settle("geometry"),
        StartTimer("wait:ready", START_WAIT_S),
        *e.reported(allowance_seen=1, preparing=1, need=0, want=0),
    ]
    assert e.seen() == [STOP_REPORT]
    first = msgspec.structs.replace(reading("g0"), sequence=1)
    assert e.joined(0) == e.reported(devices=(first,))
    assert e.joined(1) == [
        StopTimer("wait:ready"),
        Settle("ready"),
        GivePool(Ceiling(12)),
    ]
    second = msgspec.structs.replace(reading("g1"), sequence=2)
    effects = e.seen()
    assert effects == [
        STOP_REPORT,
        *e.reported(backed=1, preparing=0, devices=(first, second)),
    ]
    assert e.seen() == [STOP_REPORT]
    assert e.states() == {"absent": 15, "resident": 1}


def test_measured_bases_are_announced_once_every_rank_has_said_its_own() -> None:
    e = engine()
    sent = e.machine.link.hello
    assert e.step(AgentSent(0.0, 0, BaseMeasured(rank=0, base_bytes=30))) == []
    measured = msgspec.structs.replace(
        sent, revision=sent.revision + 1, base_bytes={"g0": 30, "g1": 40}
    )
    assert e.step(AgentSent(0.0, 1, BaseMeasured(rank=1, base_bytes=40))) == [
        SendArbiter(measured),
        StartTimer("hello", ANSWER_WAIT_S),
    ]
    with pytest.raises(RemoteProtocolError, match="rank 1 uses -1 bytes"):
        e.step(AgentSent(0.0, 1, BaseMeasured(rank=1, base_bytes=-1)))


def test_bases_of_ranks_on_one_device_add_up_and_wait_for_the_arbiter() -> None:
    e = engine()
    e.step(ArbiterLost(0.0))
    for rank in (0, 1):
        assert e.step(AgentSent(0.0, rank, BaseMeasured(rank=rank, base_bytes=5))) == []
    assert e.found()[0] == SendArbiter(e.machine.link.hello), (
        "a new arbiter hears it with the greeting"
    )
    assert e.machine.link.hello.base_bytes == {"g0": 5, "g1": 5}


def test_a_start_turn_of_an_older_hello_settles_nothing() -> None:
    e = Engine()
    e.found()
    e.arbiter(Welcome(epoch=1, revision=1))
    e.step(StartRequested(0.0, {"g0": 5}))
    assert e.arbiter(StartTurn(epoch=1, revision=1)) == []
    settled = [StopTimer("wait:start"), Settle("start")]
    assert e.arbiter(StartTurn(epoch=1, revision=2)) == settled


def test_a_rank_that_takes_long_is_waited_for_and_nothing_is_ready_before_it() -> None:
    e = Engine()
    e.step(StartRequested(0.0, {"g0": 5}))
    e.found()
    e.arbiter(Welcome(epoch=1, revision=2))
    e.arbiter(StartTurn(epoch=1, revision=2))
    e.step(GeometryKnown(0.0, GEOMETRY))
    waits = e.allow(1)
    e.confirm()
    assert Settle("ready") not in e.joined(0)
    for at_s in (10.0, 30.0, START_WAIT_S - 1.0):
        e.now_s = at_s
        assert not any(isinstance(effect, Settle) for effect in e.seen())
        assert not e.machine.serving
    assert StartTimer("wait:ready", START_WAIT_S) in waits, "nothing ends the wait before"
    assert Settle("ready") in e.joined(1)
    assert e.machine.serving


@pytest.mark.parametrize(
    ("prepare", "call", "cause"),
    [
        ("nothing", "start", "the arbiter has not answered"),
        ("welcome", "start", "other instances hold the memory"),
        ("geometry", "geometry", "other instances hold the memory"),
        ("prefix", "ready", "no hello from rank 1"),
    ],
)
def test_a_start_that_waits_too_long_says_what_for(prepare: str, call: str, cause: str) -> None:
    e = Engine()
    e.step(StartRequested(0.0, {"g0": 5}))
    if prepare != "nothing":
        e.found()
        e.arbiter(Welcome(epoch=1, revision=2))
    if prepare in ("geometry", "prefix"):
        e.arbiter(StartTurn(epoch=1, revision=2))
        e.step(GeometryKnown(0.0, GEOMETRY))
    if prepare == "prefix":
        e.allow(1)
        e.joined(0)
    error = f"no answer within 60 s: {cause}"
    assert e.timer(f"wait:{call}") == [StopTimer(f"wait:{call}"), Settle(call, error)]  # type: ignore[arg-type]
    assert e.timer(f"wait:{call}") == []


def test_a_refusal_answers_the_waiting_call_with_its_reason() -> None:
    e = Engine()
    e.found()
    e.arbiter(Welcome(epoch=1, revision=1))
    e.step(GeometryKnown(0.0, GEOMETRY))
    assert e.arbiter(Refused(reason="beta has it all")) == [
        StopTimer("wait:geometry"),
        Settle("geometry", "beta has it all"),
    ]


def test_a_hello_repeats_until_it_is_answered() -> None:
    e = Engine()
    hello = [SendArbiter(HELLO), StartTimer("hello", ANSWER_WAIT_S)]
    assert e.found() == hello
    assert e.timer("hello") == hello
    assert e.machine.counters["resends"] == 1
    e.arbiter(Welcome(epoch=1, revision=1))
    assert e.timer("hello") == []


def test_a_hello_repeats_while_a_start_waits_for_its_turn() -> None:
    e = Engine()
    e.found()
    e.step(StartRequested(0.0, {"g0": 5}))
    e.arbiter(Welcome(epoch=1, revision=2))
    again = [SendArbiter(e.machine.link.hello), StartTimer("hello", ANSWER_WAIT_S)]
    assert e.timer("hello") == again, "the turn may have been lost on its way"
    assert e.machine.counters["resends"] == 0


def test_a_rank_that_maps_something_else_loses_the_engine() -> None:
    e = Engine()
    e.found()
    e.arbiter(Welcome(epoch=1, revision=1))
    e.step(GeometryKnown(0.0, GEOMETRY))
    e.allow(1)
    e.seen()
    reason = "rank 0 has ((0, 2),) of 16 extents mapped, expected the first 1 of 16"
    assert e.step(AgentJoined(0.0, agent_hello(0, ((0, 2),)))) == [EngineLost(reason)]


# --- growth ---


def test_the_slowest_ranks_driver_call_is_what_a_call_took() -> None:
    e = engine()
    e.pool(1, need_total=2, want_total=2, running=1)
    e.seen()
    e.allow(2)
    e.answer(0, 1, "prepare", ((1, 1),), took_s=0.5)
    assert Observe("prepare_call_s", 0.5) in e.answer(1, 1, "prepare", ((1, 1),), took_s=0.25)


def test_one_growth_over_two_ranks() -> None:
    e = engine()
    assert e.pool(1, need_total=3, want_total=4, running=1) == e.reported(need=2, want=3, running=1)
    assert e.seen() == [STOP_REPORT]
    e.now_s = 1.5
    effects = e.allow(3)
    prepare = MapGrant(order=1, kind="prepare", extents=((1, 2),))
    assert effects == [
        Observe("grant_wait_s", 1.5),
        StartTimer("answer:1", 1.5 + ORDER_WAIT_S),
        SendAgent(0, prepare),
        SendAgent(1, prepare),
        Hold(1.5 + HOLD_S),
        *e.reported(allowance_seen=2, preparing=2, need=0, want=1),
    ]
    assert e.seen() == [STOP_REPORT]
    e.now_s = 1.75
    assert e.answer(1, 1, "prepare", ((1, 2),)) == []
    commit = MapGrant(order=2, kind="commit", extents=((1, 2),))
    assert e.answer(0, 1, "prepare", ((1, 2),)) == [
        StopTimer("answer:1"),
        StartTimer("answer:2", 1.75 + ORDER_WAIT_S),
        SendAgent(0, commit),
        SendAgent(1, commit),
    ]
    e.now_s = 2.0
    assert e.answer(0, 2, "commit", ((1, 2),)) == [], "I3: not before every rank has it"
    effects = e.answer(1, 2, "commit", ((1, 2),))
    assert effects == [
        StopTimer("answer:2"),
        Observe("grow_latency_s", 0.5),
        GivePool(Resident(((1, 2),), 0.5)),
        Hold(0.0),
        *e.reported(backed=3, preparing=0),
    ]
    assert e.machine.counters["growths"] == 1


def test_what_is_needed_comes_before_and_apart_from_what_is_wanted() -> None:
    e = engine()
    e.pool(1, need_total=2, want_total=9, running=1)
    e.seen()
    effects = e.allow(9)
    assert SendAgent(0, MapGrant(order=1, kind="prepare", extents=((1, 1),))) in effects
    e.seen()
    e.both(1, "prepare", ((1, 1),))
    e.answer(0, 2, "commit", ((1, 1),))
    effects = e.answer(1, 2, "commit", ((1, 1),))
    assert GivePool(Resident(((1, 1),))) in effects
    assert SendAgent(0, MapGrant(order=3, kind="prepare", extents=((2, 7),))) in effects


def test_repeated_and_late_answers_change_nothing() -> None:
    e = engine()
    e.grow(to=3)
    assert e.answer(0, 1, "prepare", ((1, 2),)) == []
    assert e.answer(1, 2, "commit", ((1, 2),)) == []
    e.pool(3, need_total=4, want_total=4)
    e.seen()
    e.allow(4)
    assert e.answer(0, 3, "prepare", ((3, 1),)) == []
    assert e.answer(0, 3, "prepare", ((3, 1),)) == [], "one rank's repeat is not the other's"
    assert e.states() == {"absent": 12, "preparing": 1, "resident": 3}


def test_nothing_is_prepared_above_the_allowance() -> None:
    e = engine()
    e.pool(1, need_total=6, want_total=9, running=1)
    e.seen()
    e.allow(4)
    assert e.states() == {"absent": 12, "preparing": 3, "resident": 1}


def test_a_refusal_on_one_rank_is_undone_on_both_and_waits_for_a_newer_allowance() -> None:
    e = engine()
    e.pool(1, need_total=3, want_total=3, running=1)
    e.seen()
    e.allow(3)
    e.seen()
    e.answer(0, 1, "prepare", ((1, 2),))
    effects = e.answer(1, 1, "prepare", (), outcome="refused", reason="no room")
    assert effects == [
        StopTimer("answer:1"),
        *grant(2, "abort", ((1, 2),)),
        Hold(0.0),
        *e.reported(refused=("g1",), need=2, want=2),
    ]
    assert e.machine.counters["headroom_rejections"] == 1
    assert e.machine.counters["allocation_misses"] == 1
    e.seen()
    effects = e.both(2, "abort", ((1, 2),))
    assert effects == [StopTimer("answer:2"), *e.reported(preparing=0)]
    assert e.states() == {"absent": 15, "resident": 1}
    assert e.seen() == [STOP_REPORT]
    e.revision -= 1
    assert e.allow(3) == [], "the same allowance again is no new one"
    effects = e.allow(3)
    assert effects == [
        *grant(3, "prepare", ((1, 2),)),
        Hold(HOLD_S),
        *e.reported(allowance_seen=3, preparing=2, need=0, want=0),
    ]


def test_a_prepare_that_fails_for_another_reason_waits_for_the_arbiter_too() -> None:
    e = engine()
    e.pool(1, need_total=2, want_total=2, running=1)
    e.seen()
    e.allow(2)
    e.seen()
    e.answer(0, 1, "prepare", (), outcome="failed", reason="bad handle")
    effects = e.answer(1, 1, "prepare", ((1, 1),))
    assert effects == [
        StopTimer("answer:1"),
        Note("warning", "prepare failed: rank 0: bad handle"),
        *grant(2, "abort", ((1, 1),)),
        Hold(0.0),
        *e.reported(refused=("g0",), need=1, want=1),
    ]
    assert e.machine.counters["headroom_rejections"] == 0
    assert e.machine.counters["allocation_misses"] == 1


def test_an_abort_that_fails_is_repeated_as_a_decommit_after_a_pause() -> None:
    e = engine()
    e.pool(1, need_total=2, want_total=2, running=1)
    e.seen()
    e.allow(2)
    e.seen()
    e.answer(0, 1, "prepare", (), outcome="refused", reason="no room")
    e.answer(1, 1, "prepare", ((1, 1),))
    e.seen()
    e.answer(0, 2, "abort", ((1, 1),))
    effects = e.answer(1, 2, "abort", (), outcome="failed", reason="busy")
    assert effects == [
        StopTimer("answer:2"),
        Note("error", "abort failed: rank 1: busy"),
        StartTimer("answer:3", ORDER_WAIT_S_MAX),
        *e.reported(backed=1 + 1, preparing=0, leaving=1),
    ]
    decommit = MapGrant(order=3, kind="decommit", extents=((1, 1),))
    assert e.timer("answer:3") == [
        StartTimer("answer:3", ORDER_WAIT_S_MAX),
        SendAgent(0, decommit),
        SendAgent(1, decommit),
    ]
    e.both(3, "decommit", ((1, 1),))
    assert e.states() == {"absent": 15, "resident": 1}


# --- orphans ---


def failed_commit(e: Engine) -> list[Effect]:
    """Prepare extents 1 to 3; rank 0 commits all, rank 1 stops at extent 2 after a map call."""
    e.pool(1, need_total=6, want_total=6, running=1)
    e.seen()
    e.allow(6)
    e.seen()
    e.both(1, "prepare", ((1, 5),))
    e.answer(0, 2, "commit", ((1, 5),))
    return e.answer(
        1, 2, "commit", ((1, 1),), outcome="failed", partial=((2, 1),), reason="map failed"
    )


def test_a_commit_that_fails_on_one_rank_leaves_orphans_finished_before_anything_new() -> None:
    e = engine()
    effects = failed_commit(e)
    again = grant(3, "commit", ((2, 4),))
    assert effects == [
        StopTimer("answer:2"),
        Observe("grow_latency_s", 0.0),
        GivePool(Resident(((1, 1),))),
        Note("error", "commit failed: rank 1: map failed"),
        *again,
        *e.reported(backed=2, preparing=4),
    ]
    assert e.machine.counters["orphans"] == 4
    e.seen()
    e.answer(0, 3, "commit", ((2, 4),))
    effects = e.answer(1, 3, "commit", ((2, 4),))
    assert effects == [
        StopTimer("answer:3"),
        Observe("grow_latency_s", 0.0),
        GivePool(Resident(((2, 4),))),
        Hold(0.0),
        *e.reported(backed=6, preparing=0),
    ]
    assert e.states() == {"absent": 10, "resident": 6}


def test_what_no_rank_touched_is_aborted_and_not_an_orphan() -> None:
    e = engine()
    e.pool(1, need_total=4, want_total=4, running=1)
    e.seen()
    e.allow(4)
    e.seen()
    e.both(1, "prepare", ((1, 3),))
    e.seen()
    stopped: dict[str, Any] = {"outcome": "failed", "partial": ((1, 1),), "reason": "no"}
    e.answer(0, 2, "commit", (), **stopped)
    effects = e.answer(1, 2, "commit", (), **stopped)
    assert effects == [
        StopTimer("answer:2"),
        Note("error", "commit failed: rank 0: no; rank 1: no"),
        *grant(3, "abort", ((2, 2),)),
        Hold(0.0),
        *e.reported(orphan=1, preparing=2, need=2, want=2),
    ]
    e.seen()
    effects = e.both(3, "abort", ((2, 2),))
    assert effects == [
        StopTimer("answer:3"),
        *grant(4, "commit", ((1, 1),)),
        Hold(HOLD_S),
        *e.reported(orphan=0, preparing=1),
    ]
    assert e.states() == {"absent": 14, "committing": 1, "resident": 1}


def test_a_commit_nobody_began_is_not_tried_again_under_the_same_allowance() -> None:
    e = engine()
    e.pool(1, need_total=2, want_total=2, running=1)
    e.seen()
    e.allow(2)
    e.seen()
    e.both(1, "prepare", ((1, 1),))
    e.seen()
    e.answer(0, 2, "commit", (), outcome="failed", reason="no")
    effects = e.answer(1, 2, "commit", (), outcome="failed", reason="no")
    assert effects == [
        StopTimer("answer:2"),
        Note("error", "commit failed: rank 0: no; rank 1: no"),
        *grant(3, "abort", ((1, 1),)),
        Hold(0.0),
        *e.reported(refused=("g0", "g1"), need=1, want=1),
    ]
    e.seen()
    e.both(3, "abort", ((1, 1),))
    assert e.states() == {"absent": 15, "resident": 1}


def test_a_hopeless_orphan_is_decommitted_and_counts_as_a_refusal() -> None:
    e = engine()
    failed_commit(e)
    for number in range(3, 3 + ORPHAN_TRIES_MAX):
        assert e.states() == {"absent": 10, "committing": 4, "resident": 2}
        e.seen()
        e.answer(0, number, "commit", ((2, 4),))
        effects = e.answer(1, number, "commit", ((3, 3),), outcome="failed", reason="map failed")
        if number == 3:
            assert e.states() == {"absent": 10, "committing": 1, "resident": 5}
            break
    for number in range(4, 3 + ORPHAN_TRIES_MAX):
        e.seen()
        e.answer(0, number, "commit", ((2, 1),))
        effects = e.answer(1, number, "commit", (), outcome="failed", reason="map failed")
    last = 3 + ORPHAN_TRIES_MAX
    assert effects == [
        StopTimer(f"answer:{last - 1}"),
        Note("error", "commit failed: rank 1: map failed"),
        *grant(last, "decommit", ((2, 1),)),
        Hold(0.0),
        *e.reported(backed=6, preparing=0, leaving=1, refused=("g1",), need=1, want=1),
    ]
    e.seen()
    e.both(last, "decommit", ((2, 1),))
    assert e.states() == {"absent": 11, "resident": 5}
    assert e.machine.counters["orphans"] == 4


def test_orphans_are_given_up_first_when_the_allowance_falls() -> None:
    e = engine()
    e.pool(1, need_total=2, want_total=2, running=1)
    e.seen()
    e.allow(2)
    e.seen()
    e.both(1, "prepare", ((1, 1),))
    e.seen()
    e.pool(1)  # nobody wants it any more
    e.seen()
    stopped: dict[str, Any] = {"outcome": "failed", "partial": ((1, 1),), "reason": "no"}
    e.answer(0, 2, "commit", (), **stopped)
    e.answer(1, 2, "commit", (), **stopped)
    assert e.states() == {"absent": 14, "orphan": 1, "resident": 1}
    e.seen()
    effects = e.allow(1)
    assert effects == [
        *grant(3, "decommit", ((1, 1),)),
        *e.reported(allowance_seen=3, orphan=0, backed=2, leaving=1),
    ]


# --- lost answers ---


def test_a_lost_answer_is_asked_for_again_from_the_silent_rank_only() -> None:
    e = engine()
    e.pool(1, need_total=2, want_total=2, running=1)
    e.seen()
    e.allow(2)
    e.seen()
    e.answer(0, 1, "prepare", ((1, 1),))
    e.now_s = 2.0
    again = SendAgent(1, MapGrant(order=1, kind="prepare", extents=((1, 1),)))
    text = "no answer to prepare 1 from rank 1 after 2 s; asking again"
    assert e.timer("answer:1") == [
        Note("warning", text),
        StartTimer("answer:1", 2.0 + 2 * ORDER_WAIT_S),
        again,
        *e.reported(silent=(1,)),
    ]
    e.seen()
    assert e.machine.counters["resends"] == 1
    e.now_s = 6.0
    assert e.timer("answer:1") == [StartTimer("answer:1", 6.0 + 4 * ORDER_WAIT_S), again]
    e.answer(1, 1, "prepare", ((1, 1),))
    assert e.timer("answer:1") == []


def test_reports_name_a_rank_from_when_it_was_asked_again_until_it_has_answered() -> None:
    e = engine()
    e.pool(1, need_total=4, want_total=4, running=1)
    e.seen()
    e.allow(2)
    e.seen()
    e.now_s = 2.0
    effects = e.timer("answer:1")
    assert effects[-2:] == e.reported(silent=(0, 1))
    assert e.machine.counters["timer_probes"] == 0, "the need in it was told before"
    e.seen()
    assert e.answer(1, 1, "prepare", ((1, 1),)) == e.reported(silent=(0,))
    e.seen()
    effects = e.answer(0, 1, "prepare", ((1, 1),))
    assert effects[-2:] == e.reported(silent=())
    assert e.seen() == [STOP_REPORT], "the commit that follows is not late"


def test_a_report_repeats_until_it_is_confirmed_and_no_second_one_is_sent() -> None:
    e = engine()
    first = e.pool(1, need_total=2, want_total=2, running=1)
    assert e.pool(1, need_total=5, want_total=5, running=2) == []
    assert e.timer("report") == first
    assert e.machine.counters["resends"] == 1
    effects = e.seen()
    assert effects == [STOP_REPORT, *e.reported(need=4, want=4, running=2)]


# --- the pool ---


def test_an_allowance_below_what_is_held_limits_the_pool_and_its_returns_leave_at_once() -> None:
    e = engine()
    e.grow(to=6)
    effects = e.allow(4, pressure=True)
    assert effects == [GivePool(Limit(4)), *e.reported(allowance_seen=3)]
    e.seen()
    effects = e.returned(((4, 2),), fence=9)
    assert effects == [
        *grant(3, "decommit", ((4, 2),), fence=9),
        GivePool(Limit(16)),
        *e.reported(leaving=2),
    ]
    e.seen()
    e.pool(4, running=1)
    effects = e.both(3, "decommit", ((4, 2),))
    assert effects == [StopTimer("answer:3"), *e.reported(backed=4, leaving=0)]


def test_the_pool_is_never_limited_below_the_prefix() -> None:
    e = engine()
    e.grow(to=3)
    assert e.allow(0)[0] == GivePool(Limit(1))


def test_extents_nobody_waits_for_become_spare_behind_their_fence_and_come_back() -> None:
    e = engine()
    e.grow(to=5)
    effects = e.returned(((3, 2),), fence=7)
    assert effects == grant(3, "fence", ((3, 2),), fence=7), "backed as before: no report"
    assert e.states() == {"absent": 11, "draining": 2, "resident": 3}
    e.pool(3, running=1)
    assert e.both(3, "fence", ((3, 2),)) == [
        StopTimer("answer:3"),
        StartTimer("decay", IDLE_DECAY_S),
    ]
    assert e.states() == {"absent": 11, "resident": 3, "spare": 2}
    assert e.pool(3, need_total=4, want_total=4, running=1) == [GivePool(Resident(((3, 1),)))]
    assert e.states() == {"absent": 11, "resident": 4, "spare": 1}


def test_a_timer_that_asks_for_memory_would_be_counted() -> None:
    e = engine()
    e.grow(to=5)
    e.returned(((3, 2),), fence=7)
    e.pool(3, running=1)
    e.both(3, "fence", ((3, 2),))
    assert e.machine.counters["timer_probes"] == 0
    # As if a need had come in without an event of its own, and a timer had found it.
    e.machine.pool.levels = PoolLevels(resident=3, need_total=9, want_total=9, running=1)
    e.timer("decay")
    assert e.machine.counters["timer_probes"] == 1


def test_an_idle_pool_is_emptied_and_its_spare_extents_decay_together() -> None:
    e = engine()
    e.grow(to=5)
    effects = e.pool(5, free=4)
    assert effects == [StartTimer("idle", IDLE_S), *e.reported(running=0, free=4)]
    e.seen()
    e.now_s = 1.0
    assert e.timer("idle") == [GivePool(Limit(1))]
    e.returned(((1, 4),))
    e.seen()
    e.pool(1)
    e.seen()
    e.now_s = 2.0
    effects = e.both(3, "fence", ((1, 4),))
    assert effects[:2] == [StopTimer("answer:3"), StartTimer("decay", 2.0 + IDLE_DECAY_S)]
    e.seen()
    e.now_s = 40.0
    effects = e.timer("decay")
    gone = MapGrant(order=4, kind="decommit", extents=((1, 4),))
    assert effects == [
        StartTimer("answer:4", 40.0 + ORDER_WAIT_S_MAX),
        SendAgent(0, gone),
        SendAgent(1, gone),
        *e.reported(leaving=4, spare=0),
    ]


def test_work_that_comes_back_ends_the_idle_time_and_its_limit() -> None:
    e = engine()
    e.grow(to=5)
    e.pool(5, free=4)
    e.seen()
    effects = e.pool(5, free=3, running=1)
    assert effects == [StopTimer("idle"), *e.reported(running=1, free=3)]
    e.seen()
    e.pool(5, free=4)
    e.seen()
    e.timer("idle")
    assert e.pool(5, free=3, waiting=1) == [
        GivePool(Limit(16)),
        *e.reported(free=3),
    ]


def test_spare_extents_are_given_up_without_the_scheduler() -> None:
    e = engine()
    e.grow(to=5)
    e.returned(((3, 2),))
    e.pool(3, running=1)
    e.both(3, "fence", ((3, 2),))
    e.seen()
    effects = e.allow(4, pressure=True)
    assert effects[:3] == grant(4, "decommit", ((4, 1),))
    assert not any(isinstance(effect, GivePool) for effect in effects)


def test_a_decommit_that_fails_somewhere_repeats_after_a_pause() -> None:
    e = engine()
    e.grow(to=3)
    e.allow(1)
    e.returned(((1, 2),), fence=9)
    e.answer(0, 3, "decommit", ((1, 2),))
    effects = e.answer(1, 3, "decommit", ((1, 1),), outcome="failed", reason="busy")
    assert effects[:3] == [
        StopTimer("answer:3"),
        Note("error", "decommit failed: rank 1: busy"),
        StartTimer("answer:4", ORDER_WAIT_S_MAX),
    ]
    assert e.states() == {"absent": 14, "fenced": 1, "resident": 1}


def test_running_requests_are_held_only_for_bytes_they_miss() -> None:
    e = engine()
    e.pool(1, need_total=1, want_total=3, running=1)
    e.seen()
    effects = e.allow(3)
    assert not any(isinstance(effect, Hold) for effect in effects)


# --- the arbiter's life ---


def test_a_lost_arbiter_stops_growth_and_nothing_else() -> None:
    e = engine()
    e.grow(to=3)
    e.allow(8)
    e.seen()
    assert e.step(ArbiterLost(0.0)) == [
        Note("warning", "arbiter lost: serving on, growth waits"),
        StopTimer("hello"),
    ]
    assert e.pool(3, need_total=5, want_total=5, running=1) == []
    assert e.machine.link.allowance == 3
    e.returned(((2, 1),), fence=4)
    assert e.both(3, "fence", ((2, 1),)) == [
        StopTimer("answer:3"),
        GivePool(Resident(((2, 1),))),
    ], "what is held already needs nobody's leave"


def test_a_new_epoch_begins_with_hello_and_a_whole_report() -> None:
    e = engine()
    e.grow(to=3)
    e.step(ArbiterLost(0.0))
    assert e.found()[0] == SendArbiter(e.machine.link.hello)
    effects = e.arbiter(Welcome(epoch=2, revision=2))
    assert effects == e.reported(epoch=2, allowance_seen=0, devices=())
    assert (e.report.backed, e.machine.link.allowance) == (3, 3)
    e.epoch, e.revision = 2, 0
    e.seen()
    e.pool(3, need_total=4, want_total=4, running=1)
    e.seen()
    assert e.allow(4)[1:4] == grant(3, "prepare", ((3, 1),))


@pytest.mark.parametrize(
    "message",
    [
        Allowance(epoch=1, revision=99, extents=12, ceiling=12),
        Seen(epoch=1, revision=99),
        Welcome(epoch=1, revision=99),
        StartTurn(epoch=1, revision=99),
        Elect(epoch=1, device="g0"),
        Resync(epoch=1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_of_an_old_epoch_changes_nothing(message: ToInstance) -> None:
    e = engine()
    e.step(ArbiterLost(0.0))
    e.found()
    e.arbiter(Welcome(epoch=2, revision=2))
    before = e.machine.snapshot()
    assert e.arbiter(message) == []
    after = e.machine.snapshot()
    assert before["link"]["stale_messages"] + 1 == after["link"].pop("stale_messages")  # type: ignore[index, attr-defined]
    before["link"].pop("stale_messages")  # type: ignore[attr-defined]
    assert after == before


def test_a_resync_is_answered_with_hello_and_then_a_report() -> None:
    e = engine()
    hello = [SendArbiter(e.machine.link.hello), StartTimer("hello", ANSWER_WAIT_S)]
    assert e.arbiter(Resync(epoch=1)) == hello
    effects = e.arbiter(Welcome(epoch=1, revision=2))
    assert effects == e.reported(allowance_seen=0)


def test_a_reading_is_taken_by_an_agent_of_that_device_or_here() -> None:
    e = Engine()
    e.found()
    e.arbiter(Welcome(epoch=1, revision=1))
    e.seen()
    assert e.arbiter(Elect(epoch=1, device="g1")) == [ReadHere("g1")]
    effects = e.step(ReadingTaken(0.0, reading("g1", 300)))
    assert effects == e.reported(devices=(reading("g1", 300, sequence=1),))
    e = engine()
    assert e.arbiter(Elect(epoch=1, device="g1")) == [SendAgent(1, ReadDevice())]
    shown = Headroom(rank=1, reading=reading("g1", 300, sequence=4))
    effects = e.step(AgentSent(0.0, 1, shown))
    first = reading("g0", sequence=1)
    assert effects == e.reported(devices=(first, reading("g1", 300, sequence=3)))
    e.seen()
    older = Headroom(rank=1, reading=reading("g1", 400, sequence=3))
    assert e.step(AgentSent(0.0, 1, older)) == []
    assert e.machine.counters["device_reads"] == 1


def test_a_reading_that_a_lost_answer_brings_late_does_not_take_a_newer_ones_place() -> None:
    """Of ranks on one device: the one asked again shows how it was before the other's."""
    e = engine()
    newer = msgspec.structs.replace(reading("g0", 300), at_s=9.0)
    older = msgspec.structs.replace(reading("g0", 100), at_s=8.0)
    effects = e.step(AgentSent(9.0, 0, Headroom(rank=0, reading=newer)))
    (sent,) = [x.message for x in effects if isinstance(x, SendArbiter)]
    assert 300 in [shown.free_bytes for shown in sent.devices]  # type: ignore[union-attr]
    e.seen()
    assert e.step(AgentSent(9.5, 1, Headroom(rank=1, reading=older))) == []


# --- the end ---


def test_a_lost_rank_loses_the_engine_unless_it_stops_anyway() -> None:
    e = engine()
    assert e.step(AgentLost(0.0, 1)) == [EngineLost("rank 1 closed its lease line")]
    e.pool(1, need_total=2, want_total=2, running=1)
    e.seen()
    e.allow(2)
    assert e.states() == {"absent": 15, "resident": 1}, "nothing grows without a rank"
    e = engine()
    assert e.step(StopRequested(0.0)) == [SendArbiter(Bye())]
    assert e.step(AgentLost(0.0, 1)) == []
    assert e.pool(1, need_total=2, want_total=2, running=1) == []


# --- what cannot happen ---


@pytest.mark.parametrize(
    "event",
    [
        GeometryKnown(0.0, GEOMETRY),
        TimerFired(0.0, "tea"),
        PoolSent(0.0, PoolReturned(((0, 1),), 1)),
        PoolSent(0.0, PoolReturned(((2, 2),), 1)),
        PoolSent(0.0, PoolReturned(((15, 2),), 1)),
        AgentSent(0.0, 2, Headroom(rank=2, reading=reading("g0"))),
    ],
    ids=["geometry twice", "timer", "extent 0", "not resident", "no extent", "no rank"],
)
def test_an_event_that_cannot_happen_raises_and_changes_nothing(event: Event) -> None:
    e = engine()
    e.grow(to=3)
    before = e.machine.snapshot()
    with pytest.raises(LocalProtocolError):
        e.step(event)
    e.machine.check()
    assert e.machine.snapshot() == before


def test_a_rank_cannot_join_before_its_prefix_was_allowed() -> None:
    e = Engine()
    with pytest.raises(LocalProtocolError):
        e.joined(0)
    e.found()
    e.arbiter(Welcome(epoch=1, revision=1))
    e.step(GeometryKnown(0.0, GEOMETRY))
    with pytest.raises(LocalProtocolError):
        e.joined(0)
    assert e.machine.joined == {}


@pytest.mark.parametrize(
    ("kind", "done"), [("commit", ((1, 1),)), ("prepare", ((2, 1),))], ids=["kind", "extents"]
)
def test_an_answer_to_something_else_raises_and_changes_nothing(
    kind: OrderKind, done: Runs
) -> None:
    e = engine()
    e.pool(1, need_total=2, want_total=2, running=1)
    e.seen()
    e.allow(2)
    before = e.machine.snapshot()
    with pytest.raises(RemoteProtocolError):
        e.answer(0, 1, kind, done)
    assert e.machine.snapshot() == before


def test_a_fence_that_fails_means_the_ranks_have_diverged() -> None:
    e = engine()
    e.grow(to=3)
    e.returned(((2, 1),))
    e.answer(0, 3, "fence", ((2, 1),))
    with pytest.raises(InvariantViolation, match="a fence cannot fail"):
        e.machine.step(
            AgentSent(
                0.0,
                1,
                Answer(order=3, rank=1, kind="fence", outcome="failed", done=(), reason="absent"),
            )
        )


def test_the_check_finds_counts_and_orders_that_disagree() -> None:
    e = engine()
    e.grow(to=3)
    e.machine.states.count[0] += 1
    with pytest.raises(InvariantViolation, match="counts equal states"):
        e.machine.check()
    e = engine()
    e.grow(to=3)
    e.machine.states.move([2], 3, 6)
    with pytest.raises(InvariantViolation, match="every moving extent has an order"):
        e.machine.check()


def test_the_snapshot_says_what_waits_for_whom() -> None:
    e = engine()
    e.pool(1, need_total=2, want_total=2, running=1)
    e.seen()
    e.allow(2)
    e.answer(0, 1, "prepare", ((1, 1),))
    snapshot = e.machine.snapshot()
    assert snapshot["orders"] == [
        {"order": 1, "kind": "prepare", "extents": 1, "waiting_ranks": [1]}
    ]
    assert (snapshot["held"], snapshot["joined"], snapshot["ranks"]) == (2, [0, 1], 2)

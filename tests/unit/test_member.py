"""The member machine, scenario by scenario, with exact effects."""

from __future__ import annotations

import pytest

from kvadmit.errors import InvariantViolation, LocalProtocolError, RemoteProtocolError
from kvadmit.member import (
    ABSENT,
    ANSWERS_KEPT,
    EXIT_GRACE_S,
    MAPPED,
    PARTIAL,
    PREPARED,
    AwaitDevice,
    CallDriver,
    CaptureChanged,
    CoordinatorLost,
    DeviceIdle,
    DriverDone,
    Effect,
    Event,
    ExitProcess,
    Member,
    OrderArrived,
    ReadAsked,
    ReadDone,
    ReadNow,
    Send,
    StartTimer,
    StepEnqueued,
    TimerFired,
)
from kvadmit.messages import Answer, DeviceReading, Headroom, MapGrant, OrderKind, Outcome, Runs

FREE, TOTAL = 700, 1000


class Rank:
    """Rank 2 with eight extents, the first mapped; checks the machine after every step."""

    def __init__(self) -> None:
        self.machine = Member(rank=2, device="g", extents=8, prefix=1)

    def step(self, event: Event) -> list[Effect]:
        effects = self.machine.step(event)
        self.machine.check()
        return effects

    def order(self, number: int, kind: OrderKind, extents: Runs, fence: int = 0) -> list[Effect]:
        grant = MapGrant(order=number, kind=kind, extents=extents, fence=fence)
        return self.step(OrderArrived(0.0, grant))

    def done(self, number: int, *done: int, partial: tuple[int, ...] = ()) -> list[Effect]:
        return self.step(driver_done(number, done, partial))

    def failed(
        self, number: int, error: str, *done: int, partial: tuple[int, ...] = (), room: bool = True
    ) -> list[Effect]:
        return self.step(driver_done(number, done, partial, error, out_of_memory=not room))

    def enqueued(self, number: int) -> list[Effect]:
        return self.step(StepEnqueued(0.0, number))

    def idle(self, number: int) -> list[Effect]:
        return self.step(DeviceIdle(0.0, number))

    def parked(self) -> bool:
        return self.machine.parked

    def map(self, first: int, count: int) -> None:
        """Bring extents up with orders 1 and 2."""
        extents = tuple(range(first, first + count))
        self.order(1, "prepare", ((first, count),))
        self.done(1, *extents)
        self.order(2, "commit", ((first, count),))
        self.done(2, *extents)
        assert self.machine.having(MAPPED) == [0, *extents]


def driver_done(
    number: int,
    done: tuple[int, ...] = (),
    partial: tuple[int, ...] = (),
    error: str = "",
    *,
    out_of_memory: bool = False,
    took_s: float = 0.0,
) -> DriverDone:
    return DriverDone(
        now_s=0.0,
        order=number,
        done=done,
        partial=partial,
        error=error,
        out_of_memory=out_of_memory,
        took_s=took_s,
        free_bytes=FREE,
        total_bytes=TOTAL,
    )


def reading(sequence: int, operations: int = 0) -> DeviceReading:
    return DeviceReading(
        device="g",
        free_bytes=FREE,
        total_bytes=TOTAL,
        sequence=sequence,
        operations=operations,
        at_s=0.0,
    )


def answer(
    order: int,
    kind: OrderKind,
    done: Runs,
    *,
    outcome: Outcome = "done",
    partial: Runs = (),
    reason: str = "",
    seen: int | None = None,
    operations: int = 0,
) -> Send:
    """Return the Send of an answer; `seen` numbers the reading that travels with it."""
    return Send(
        Answer(
            order=order,
            rank=2,
            kind=kind,
            outcome=outcome,
            done=done,
            partial=partial,
            reason=reason,
            reading=None if seen is None else reading(seen, operations),
        )
    )


def test_one_growth() -> None:
    rank = Rank()
    assert rank.order(1, "prepare", ((1, 2),)) == [CallDriver(1, "prepare", (1, 2))]
    assert rank.done(1, 1, 2) == [answer(1, "prepare", ((1, 2),), seen=1)]
    assert rank.machine.having(PREPARED) == [1, 2]
    assert rank.order(2, "commit", ((1, 2),)) == [CallDriver(2, "commit", (1, 2))]
    assert rank.done(2, 1, 2) == [answer(2, "commit", ((1, 2),), seen=2)]
    assert rank.machine.having(MAPPED) == [0, 1, 2]


def test_a_refused_prepare_changes_nothing_and_is_told_apart_from_a_failed_one() -> None:
    rank = Rank()
    rank.order(1, "prepare", ((1, 2),))
    refused = answer(1, "prepare", (), outcome="refused", reason="no room", seen=1)
    assert rank.failed(1, "no room", room=False) == [refused]
    rank.order(2, "prepare", ((1, 2),))
    failed = answer(2, "prepare", (), outcome="failed", reason="bad handle", seen=2)
    assert rank.failed(2, "bad handle") == [failed]
    assert rank.machine.having(ABSENT) == [1, 2, 3, 4, 5, 6, 7]


def test_an_abort_frees_what_was_prepared_and_is_done_where_nothing_was() -> None:
    rank = Rank()
    rank.order(1, "prepare", ((1, 1),))
    rank.done(1, 1)
    assert rank.order(2, "abort", ((1, 2),)) == [CallDriver(2, "abort", (1,))]
    assert rank.done(2, 1) == [answer(2, "abort", ((1, 2),), seen=2)]
    assert rank.order(3, "abort", ((1, 2),)) == [answer(3, "abort", ((1, 2),))]


def test_a_commit_that_stops_midway_is_finished_by_a_second_one() -> None:
    rank = Rank()
    rank.order(1, "prepare", ((1, 3),))
    rank.done(1, 1, 2, 3)
    rank.order(2, "commit", ((1, 3),))
    assert rank.failed(2, "map failed", 1, partial=(2,)) == [
        answer(
            2,
            "commit",
            ((1, 1),),
            outcome="failed",
            partial=((2, 1),),
            reason="map failed",
            seen=2,
        )
    ]
    assert [rank.machine.state[extent] for extent in (1, 2, 3)] == [MAPPED, PARTIAL, PREPARED]
    assert rank.order(3, "commit", ((1, 3),)) == [CallDriver(3, "commit", (2, 3))]
    assert rank.done(3, 2, 3) == [answer(3, "commit", ((1, 3),), seen=3)]


def test_a_decommit_of_mixed_states_aborts_then_unmaps_with_one_answer() -> None:
    rank = Rank()
    rank.order(1, "prepare", ((1, 3),))
    rank.done(1, 1, 2, 3)
    rank.order(2, "commit", ((1, 3),))
    rank.failed(2, "map failed", 1, partial=(2,))
    assert rank.order(3, "decommit", ((1, 4),)) == [AwaitDevice(3, (1, 2))]
    assert rank.idle(3) == [CallDriver(3, "abort", (3,))]
    assert rank.done(3, 3) == [CallDriver(3, "decommit", (1, 2))]
    assert rank.done(3, 1, 2) == [answer(3, "decommit", ((1, 4),), seen=4)]
    assert rank.machine.having(MAPPED) == [0]


def test_a_failed_first_call_leaves_the_second_out() -> None:
    rank = Rank()
    rank.map(1, 1)
    rank.order(3, "prepare", ((2, 1),))
    rank.done(3, 2)
    rank.order(4, "decommit", ((1, 2),))
    rank.idle(4)
    assert rank.failed(4, "busy") == [
        answer(4, "decommit", (), outcome="failed", reason="busy", seen=4)
    ]
    assert (rank.machine.state[1], rank.machine.state[2]) == (MAPPED, PREPARED)


def test_nothing_is_unmapped_before_its_fence_has_passed_and_the_device_is_idle() -> None:
    rank = Rank()
    rank.map(1, 2)
    assert rank.enqueued(4) == []
    assert rank.order(3, "decommit", ((1, 2),), fence=6) == []
    assert rank.parked()
    assert rank.enqueued(5) == []
    assert rank.enqueued(6) == [AwaitDevice(3, (1, 2))]
    assert not rank.parked()
    assert rank.enqueued(7) == [], "one wait is enough"
    assert rank.idle(3) == [CallDriver(3, "decommit", (1, 2))]
    assert rank.done(3, 1, 2) == [answer(3, "decommit", ((1, 2),), seen=3)]


def test_steps_that_arrive_late_or_twice_take_nothing_back() -> None:
    rank = Rank()
    rank.map(1, 1)
    rank.enqueued(6)
    rank.enqueued(5)
    assert rank.order(3, "decommit", ((1, 1),), fence=6) == [AwaitDevice(3, (1,))]


def test_a_fence_order_only_waits() -> None:
    rank = Rank()
    rank.map(1, 2)
    assert rank.order(3, "fence", ((1, 2),), fence=1) == []
    assert rank.enqueued(1) == [AwaitDevice(3)]
    assert rank.idle(3) == [answer(3, "fence", ((1, 2),))]
    assert rank.machine.having(MAPPED) == [0, 1, 2]


def test_an_answer_says_how_long_all_driver_calls_of_its_order_took() -> None:
    rank = Rank()
    rank.map(1, 2)
    rank.order(3, "prepare", ((3, 1),))
    rank.step(driver_done(3, (3,)))
    rank.order(4, "decommit", ((1, 3),))
    rank.idle(4)
    rank.step(driver_done(4, (3,), took_s=0.25))  # the abort
    (sent,) = rank.step(driver_done(4, (1, 2), took_s=0.5))
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Answer)
    assert sent.message.took_s == 0.75


def test_prepare_and_commit_overtake_a_parked_decommit() -> None:
    rank = Rank()
    rank.map(1, 1)
    assert rank.order(3, "decommit", ((1, 1),), fence=9) == []
    assert rank.order(4, "prepare", ((2, 1),)) == [CallDriver(4, "prepare", (2,))]
    assert rank.done(4, 2) == [answer(4, "prepare", ((2, 1),), seen=3)]
    assert rank.order(5, "commit", ((2, 1),)) == [CallDriver(5, "commit", (2,))]
    assert rank.enqueued(9) == [AwaitDevice(3, (1,))]
    assert rank.order(6, "prepare", ((3, 1),)) == []
    assert rank.idle(3) == []
    assert rank.done(5, 2) == [
        answer(5, "commit", ((2, 1),), seen=4, operations=2),
        CallDriver(6, "prepare", (3,)),
    ]
    assert rank.done(6, 3) == [
        answer(6, "prepare", ((3, 1),), seen=5, operations=1),
        CallDriver(3, "decommit", (1,)),
    ]


def test_a_capture_delays_every_driver_call_and_device_wait() -> None:
    rank = Rank()
    rank.map(1, 1)
    assert rank.step(CaptureChanged(0.0, True)) == []
    assert rank.order(3, "prepare", ((2, 1),)) == []
    assert rank.order(4, "decommit", ((1, 1),)) == []
    assert rank.step(ReadAsked(0.0)) == []
    assert rank.step(CaptureChanged(0.0, False)) == [
        AwaitDevice(4, (1,)),
        CallDriver(3, "prepare", (2,)),
    ]
    assert rank.step(CaptureChanged(0.0, True)) == []
    assert rank.idle(4) == []
    assert rank.done(3, 2) == [answer(3, "prepare", ((2, 1),), seen=3, operations=1)]
    assert rank.step(CaptureChanged(0.0, False)) == [CallDriver(4, "decommit", (1,))]
    assert rank.done(4, 1) == [answer(4, "decommit", ((1, 1),), seen=4), ReadNow()]


def test_a_repeat_is_answered_as_before_and_not_carried_out_again() -> None:
    rank = Rank()
    rank.order(1, "prepare", ((1, 1),))
    first = rank.done(1, 1)
    rank.order(2, "commit", ((1, 1),))
    assert rank.order(2, "commit", ((1, 1),)) == [], "its one answer is still to come"
    assert rank.order(1, "prepare", ((1, 1),)) == first
    rank.done(2, 1)
    assert rank.order(1, "prepare", ((1, 1),)) == first
    assert rank.machine.having(MAPPED) == [0, 1]


def test_a_repeat_of_a_parked_order_is_not_parked_twice() -> None:
    rank = Rank()
    rank.map(1, 1)
    rank.order(3, "decommit", ((1, 1),), fence=1)
    assert rank.order(3, "decommit", ((1, 1),), fence=1) == []
    assert rank.enqueued(1) == [AwaitDevice(3, (1,))]
    assert rank.order(3, "decommit", ((1, 1),), fence=1) == []


def test_an_order_older_than_one_seen_for_any_of_its_extents_is_ignored() -> None:
    rank = Rank()
    rank.order(5, "prepare", ((2, 1),))
    rank.done(5, 2)
    assert rank.order(4, "prepare", ((1, 2),)) == []
    assert rank.machine.stale_orders == 1
    assert rank.machine.having(ABSENT) == [1, 3, 4, 5, 6, 7]
    assert rank.order(3, "prepare", ((3, 1),)) == [CallDriver(3, "prepare", (3,))]


def test_an_order_that_does_not_fit_the_state_fails_and_changes_nothing() -> None:
    rank = Rank()
    cases: list[tuple[OrderKind, int, str]] = [
        ("prepare", 0, "mapped"),
        ("commit", 1, "absent"),
        ("abort", 0, "mapped"),
        ("fence", 1, "absent"),
    ]
    for number, (kind, extent, state) in enumerate(cases, start=1):
        reason = f"cannot {kind} extent {extent}: it is {state} on rank 2"
        assert rank.order(number, kind, ((extent, 1),)) == [
            answer(number, kind, (), outcome="failed", reason=reason)
        ]
    assert rank.machine.having(MAPPED) == [0]


def test_old_answers_are_forgotten_but_their_repeats_stay_harmless() -> None:
    rank = Rank()
    rank.order(1, "prepare", ((1, 1),))
    rank.done(1, 1)
    for number in range(2, ANSWERS_KEPT + 2):
        rank.order(number, "abort", ((2, 1),))
    assert rank.order(1, "prepare", ((1, 1),)) == [answer(1, "prepare", ((1, 1),))]
    assert rank.machine.having(PREPARED) == [1]


def test_a_reading_waits_for_the_call_that_is_running() -> None:
    rank = Rank()
    assert rank.step(ReadAsked(0.0)) == [ReadNow()]
    assert rank.step(ReadAsked(0.0)) == []
    shown = ReadDone(0.0, FREE, TOTAL)
    assert rank.step(shown) == [Send(Headroom(rank=2, reading=reading(1))), ReadNow()]
    rank.step(shown)
    rank.order(1, "prepare", ((1, 1),))
    assert rank.step(ReadAsked(0.0)) == []
    assert rank.done(1, 1) == [answer(1, "prepare", ((1, 1),), seen=3), ReadNow()]
    assert rank.step(shown) == [Send(Headroom(rank=2, reading=reading(4)))]


def test_the_process_ends_a_grace_after_its_coordinator() -> None:
    rank = Rank()
    assert rank.step(CoordinatorLost(3.0)) == [StartTimer("exit", 3.0 + EXIT_GRACE_S)]
    fired = TimerFired(3.0 + EXIT_GRACE_S, "exit")
    assert rank.step(fired) == [ExitProcess("the engine core closed its lease line")]


@pytest.mark.parametrize(
    "event",
    [
        driver_done(7, (1,)),
        DeviceIdle(0.0, 7),
        DeviceIdle(0.0, 3),
        ReadDone(0.0, FREE, TOTAL),
        TimerFired(0.0, "exit"),
        TimerFired(0.0, "tea"),
    ],
    ids=["no call", "no order", "still parked", "no reading", "no grace", "no timer"],
)
def test_an_event_that_cannot_happen_raises_and_changes_nothing(event: Event) -> None:
    rank = Rank()
    rank.map(1, 1)
    rank.order(3, "decommit", ((1, 1),), fence=4)
    before = rank.machine.snapshot()
    with pytest.raises(LocalProtocolError):
        rank.step(event)
    rank.machine.check()
    assert rank.machine.snapshot() == before


@pytest.mark.parametrize("runs", [((7, 2),), ((1, 0),), ((2, 1), (1, 1))])
def test_a_malformed_order_raises_and_changes_nothing(runs: Runs) -> None:
    rank = Rank()
    before = rank.machine.snapshot()
    with pytest.raises(RemoteProtocolError):
        rank.order(1, "prepare", runs)
    assert rank.machine.snapshot() == before
    assert rank.order(1, "prepare", ((1, 1),)) == [CallDriver(1, "prepare", (1,))]


def test_the_check_names_a_call_before_its_fence() -> None:
    rank = Rank()
    rank.map(1, 1)
    rank.order(3, "decommit", ((1, 1),), fence=1)
    rank.enqueued(1)
    rank.idle(3)
    rank.machine.enqueued = 0
    with pytest.raises(InvariantViolation, match="I4"):
        rank.machine.check()


def test_the_snapshot_says_what_is_where() -> None:
    rank = Rank()
    rank.map(1, 2)
    rank.order(3, "decommit", ((1, 1),), fence=5)
    assert rank.machine.snapshot() == {
        "rank": 2,
        "device": "g",
        "enqueued": 0,
        "capturing": False,
        "extents": {"absent": 5, "prepared": 0, "mapped": 3, "partial": 0},
        "orders": {3: {"kind": "decommit", "fence": 5, "parked": True}},
        "stale_orders": 0,
    }

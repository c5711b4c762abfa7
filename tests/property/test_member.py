"""A member under repeated and reordered orders, against a twin that gets each order once."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvadmit.extents import from_runs, to_runs
from kvadmit.member import (
    MAPPED,
    PARTIAL,
    PREPARED,
    AwaitDevice,
    CallDriver,
    CaptureChanged,
    DeviceIdle,
    DriverDone,
    Event,
    Member,
    OrderArrived,
    Send,
    StepEnqueued,
)
from kvadmit.messages import Answer, MapGrant, OrderKind

EXTENTS = 6
NEXT: dict[str, tuple[OrderKind, ...]] = {
    "absent": ("prepare",),
    "prepared": ("commit", "abort", "decommit"),
    "mapped": ("fence", "decommit"),
    "partial": ("commit", "decommit"),
}
END = {"prepare": "prepared", "commit": "mapped", "fence": "mapped"}


class MemberAgainstTwin(RuleBasedStateMachine):
    """The coordinator's part: one order at a time per extent, next one after the answer.

    Twin: the physical state of each extent as a word. Every order sent stays on the wire and
    may arrive again at any time.
    """

    @initialize()
    def start(self) -> None:
        self.member = Member(rank=0, device="g", extents=EXTENTS, prefix=3)
        self.twin = ["mapped"] * 3 + ["absent"] * (EXTENTS - 3)
        self.sent: list[MapGrant] = []
        self.open: dict[int, MapGrant] = {}
        self.answers: dict[int, Answer] = {}
        self.call: CallDriver | None = None
        self.waits: set[int] = set()
        self.enqueued = self.last_order = 0
        self.capturing = False

    def feed(self, event: Event) -> None:
        for effect in self.member.step(event):
            match effect:
                case CallDriver():
                    assert not self.capturing
                    assert self.call is None, "never two driver calls at a time"
                    self.call = effect
                    self.may_call(effect)
                case AwaitDevice(order):
                    assert not self.capturing
                    assert order not in self.waits
                    self.waits.add(order)
                case Send(Answer() as answer):
                    self.take_answer(answer)
                case _:
                    raise AssertionError(effect)
        self.member.check()

    def may_call(self, call: CallDriver) -> None:
        grant = self.open[call.order]
        assert set(call.extents) <= set(from_runs(grant.extents))
        if grant.kind == "decommit":
            assert grant.fence <= self.enqueued, "unmapped before its fence"
            assert call.order not in self.waits, "unmapped while the device works"

    def take_answer(self, answer: Answer) -> None:
        known = self.answers.setdefault(answer.order, answer)
        assert answer == known, "a repeat is answered as before"
        grant = self.open.pop(answer.order, None)
        if grant is not None and answer.outcome == "done":
            assert answer.done == grant.extents

    @rule(data=st.data(), ahead=st.integers(0, 2))
    def order(self, data: st.DataObject, ahead: int) -> None:
        busy = {extent for grant in self.open.values() for extent in from_runs(grant.extents)}
        idle = [extent for extent in range(1, EXTENTS) if extent not in busy]
        if not idle:
            return
        word = self.twin[data.draw(st.sampled_from(idle))]
        alike = [extent for extent in idle if self.twin[extent] == word]
        chosen = data.draw(st.sets(st.sampled_from(alike), min_size=1))
        self.last_order += 1
        grant = MapGrant(
            order=self.last_order,
            kind=data.draw(st.sampled_from(NEXT[word])),
            extents=to_runs(chosen),
            fence=self.enqueued + ahead,
        )
        self.open[grant.order] = grant
        self.sent.append(grant)
        if data.draw(st.booleans()):
            self.feed(OrderArrived(0.0, grant))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def arrive_again(self, data: st.DataObject) -> None:
        self.feed(OrderArrived(0.0, data.draw(st.sampled_from(self.sent))))

    @precondition(lambda self: self.call)
    @rule(data=st.data())
    def driver_done(self, data: st.DataObject) -> None:
        assert self.call is not None
        call, self.call = self.call, None
        reached = data.draw(st.just(len(call.extents)) | st.integers(0, len(call.extents) - 1))
        failed = reached < len(call.extents)
        partial: tuple[int, ...] = ()
        if call.kind == "prepare" and failed:
            reached = 0
        for extent in call.extents[:reached]:
            self.twin[extent] = END.get(call.kind, "absent")
        if failed and call.kind == "commit":
            partial = (call.extents[reached],)
            self.twin[partial[0]] = "partial"
        self.feed(
            DriverDone(
                now_s=0.0,
                order=call.order,
                done=call.extents[:reached],
                partial=partial,
                error="no" if failed else "",
                free_bytes=1,
                total_bytes=2,
            )
        )

    @precondition(lambda self: self.waits)
    @rule(data=st.data())
    def device_idle(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.waits)))
        self.waits.remove(number)
        self.feed(DeviceIdle(0.0, number))

    @rule()
    def step_enqueued(self) -> None:
        self.enqueued += 1
        self.feed(StepEnqueued(0.0, self.enqueued))

    @rule()
    def capture(self) -> None:
        self.capturing = not self.capturing
        self.feed(CaptureChanged(0.0, self.capturing))

    @invariant()
    def same(self) -> None:
        words = {MAPPED: "mapped", PARTIAL: "partial", PREPARED: "prepared"}
        assert [words.get(state, "absent") for state in self.member.state] == self.twin

    def teardown(self) -> None:
        """Whatever arrived is answered once steps, device and driver go on."""
        arrived = {n for n in self.open if n in self.member.snapshot()["orders"]}  # type: ignore[operator]
        if self.capturing:
            self.capture()
        self.enqueued += 3
        self.feed(StepEnqueued(0.0, self.enqueued))
        while self.waits or self.call is not None:
            if self.call is None:
                number = self.waits.pop()
                self.feed(DeviceIdle(0.0, number))
                continue
            call, self.call = self.call, None
            self.feed(
                DriverDone(
                    now_s=0.0, order=call.order, done=call.extents, free_bytes=1, total_bytes=2
                )
            )
        assert arrived <= set(self.answers)


TestMemberAgainstTwin = MemberAgainstTwin.TestCase
TestMemberAgainstTwin.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)

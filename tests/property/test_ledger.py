"""Conservation: whatever is lost, doubled or overtaken, the books cover what can be held."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvadmit.ledger import Account, DeviceBook
from kvadmit.messages import DeviceReading, Report


class AccountAgainstInstance(RuleBasedStateMachine):
    """An honest instance over links that lose, double and reorder in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.account = Account()
        self.down: list[tuple[int, int]] = []
        self.up: list[Report] = []
        self.seen = self.allowed = 0
        self.backed = self.preparing = self.leaving = 0
        self.revision = 0

    @property
    def held(self) -> int:
        return self.backed + self.preparing

    @rule(extents=st.integers(0, 20))
    def allow(self, extents: int) -> None:
        self.down.append((self.account.allow(extents), extents))

    @precondition(lambda self: self.down)
    @rule(data=st.data(), keep=st.booleans())
    def hear(self, data: st.DataObject, keep: bool) -> None:
        revision, extents = message = data.draw(st.sampled_from(self.down))
        if not keep:
            self.down.remove(message)
        if revision > self.seen:
            self.seen, self.allowed = revision, extents

    @rule(extents=st.integers(1, 10))
    def prepare(self, extents: int) -> None:
        self.preparing += max(0, min(extents, self.allowed - self.held))

    @rule()
    def commit(self) -> None:
        self.backed, self.preparing = self.backed + self.preparing, 0

    @rule(extents=st.integers(0, 10))
    def leave(self, extents: int) -> None:
        self.leaving += min(extents, self.backed - self.leaving)

    @rule()
    def left(self) -> None:
        self.backed, self.leaving = self.backed - self.leaving, 0

    @rule()
    def report(self) -> None:
        self.revision += 1
        self.up.append(
            Report(
                epoch=1,
                revision=self.revision,
                allowance_seen=self.seen,
                backed=self.backed,
                preparing=self.preparing,
                leaving=self.leaving,
            )
        )

    @precondition(lambda self: self.up)
    @rule(data=st.data(), keep=st.booleans())
    def receive(self, data: st.DataObject, keep: bool) -> None:
        message = data.draw(st.sampled_from(self.up))
        if not keep:
            self.up.remove(message)
        newer = message.revision > self.account.report.revision
        assert self.account.receive(message) is newer

    @invariant()
    def covered(self) -> None:
        assert self.held <= self.account.booked
        assert self.account.allowance <= self.account.booked


TestAccountAgainstInstance = AccountAgainstInstance.TestCase


@given(
    st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.integers(0)
)
def test_a_reading_never_hides_foreign_bytes_that_are_surely_there(
    foreign: int, least: int, more: int, position: int, believed: int
) -> None:
    """The members hold something between `least` and `most`; the truth stays possible."""
    most = least + more
    held = min(least + position, most)
    total = foreign + most + 10
    book = DeviceBook("g", total)
    book.foreign_bytes = believed
    shown = DeviceReading(
        device="g", free_bytes=total - foreign - held, total_bytes=total, sequence=1, at_s=0.0
    )
    book.read(shown, least_bytes=least, most_bytes=most)
    assert abs(book.foreign_bytes - foreign) <= more
    if more == 0:
        assert book.foreign_bytes == foreign
    if believed >= foreign:
        assert book.foreign_bytes >= foreign, "a figure that was safe stays safe"

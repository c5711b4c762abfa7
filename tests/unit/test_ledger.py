"""The arbiter's books: never optimistic."""

from __future__ import annotations

from typing import Any

from kvadmit.ledger import Account, DeviceBook
from kvadmit.messages import DeviceReading, Report


def report(revision: int, seen: int, backed: int, **more: Any) -> Report:
    return Report(epoch=1, revision=revision, allowance_seen=seen, backed=backed, **more)


def reading(free_bytes: int, total_bytes: int = 100, at_s: float = 0.0) -> DeviceReading:
    return DeviceReading(
        device="g", free_bytes=free_bytes, total_bytes=total_bytes, sequence=1, at_s=at_s
    )


def test_a_reading_from_before_another_changes_nothing() -> None:
    """Readings of different ranks and instances overtake each other."""
    book = DeviceBook("g", 100)
    book.read(reading(60, at_s=2.0), least_bytes=40, most_bytes=40)
    assert book.foreign_bytes == 0
    book.read(reading(30, at_s=1.0), least_bytes=40, most_bytes=40)
    assert book.foreign_bytes == 0, "what was used before has gone since"
    book.read(reading(30, at_s=3.0), least_bytes=40, most_bytes=40)
    assert book.foreign_bytes == 30


def test_an_allowance_counts_before_it_was_seen_and_until_its_lowering_was() -> None:
    account = Account()
    assert account.booked == 0
    high = account.allow(10)
    low = account.allow(4)
    assert account.booked == 10
    assert account.receive(report(1, high, 3))
    assert account.booked == 10, "the lower one may still be on its way"
    assert account.receive(report(2, low, 3))
    assert account.booked == 4


def test_what_is_held_counts_above_every_allowance() -> None:
    account = Account()
    revision = account.allow(4)
    account.receive(report(1, revision, 3, preparing=2, orphan=1))
    assert account.held == 6
    assert account.booked == 6


def test_an_older_or_repeated_report_changes_nothing() -> None:
    account = Account()
    revision = account.allow(4)
    newest = report(5, revision, 4)
    assert account.receive(newest)
    assert not account.receive(report(5, 0, 1))
    assert not account.receive(report(4, 0, 1))
    assert account.report is newest
    assert account.booked == 4


def test_settled_means_seen_still_and_nothing_unspent() -> None:
    account = Account()
    revision = account.allow(4)
    cases = (
        (report(1, 0, 4), False, "the allowance is on its way"),
        (report(2, revision, 3), False, "one more may be prepared at any moment"),
        (report(3, revision, 4), True, "nothing moves"),
        (report(4, revision, 4, leaving=1), False, "one is going"),
        (report(5, revision, 4, preparing=1), False, "one is coming"),
        (report(6, revision, 6), True, "more than allowed, and nothing moves"),
    )
    for message, settled, why in cases:
        account.receive(message)
        assert account.settled is settled, why


def test_what_is_surely_held_leaves_out_all_that_moves() -> None:
    account = Account()
    account.receive(report(1, 0, 6, preparing=2, orphan=1, leaving=2))
    assert account.surely_held == 4


def test_a_quiet_reading_is_exact_and_a_busy_one_only_bounds() -> None:
    book = DeviceBook("g", 100)
    assert not book.known
    book.read(reading(30), least_bytes=50, most_bytes=50)
    assert (book.known, book.foreign_bytes) == (True, 20)
    book.read(reading(30), least_bytes=40, most_bytes=60)
    assert book.foreign_bytes == 20, "within 10 and 30: nothing is known better"
    book.read(reading(30), least_bytes=60, most_bytes=65)
    assert book.foreign_bytes == 10
    book.read(reading(30), least_bytes=30, most_bytes=40)
    assert book.foreign_bytes == 30
    book.read(reading(100), least_bytes=0, most_bytes=40)
    assert book.foreign_bytes == 0


def test_who_leaves_is_foreign_and_who_is_found_was() -> None:
    book = DeviceBook("g", 100)
    book.leave(30)
    assert book.foreign_bytes == 30
    book.claim(20)
    assert book.foreign_bytes == 10
    book.claim(20)
    assert book.foreign_bytes == 0
    assert book.unshown_bytes == 0


def test_what_foreign_bytes_fall_by_is_what_the_dead_gave_back() -> None:
    book = DeviceBook("g", 100)
    book.read(reading(50), least_bytes=30, most_bytes=30)
    book.leave(20)
    assert (book.foreign_bytes, book.unshown_bytes) == (40, 20)
    book.read(reading(45), least_bytes=10, most_bytes=10)
    assert (book.foreign_bytes, book.unshown_bytes) == (45, 20), "somebody else took more"
    book.read(reading(60), least_bytes=10, most_bytes=10)
    assert (book.foreign_bytes, book.unshown_bytes) == (30, 5)
    book.read(reading(70), least_bytes=10, most_bytes=10)
    assert (book.foreign_bytes, book.unshown_bytes) == (20, 0)

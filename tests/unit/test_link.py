"""The coordinator's side of the arbiter channel."""

from __future__ import annotations

import pytest

from kvadmit.link import ArbiterLink
from kvadmit.messages import (
    Allowance,
    Elect,
    Geometry,
    Hello,
    Refused,
    Resync,
    Seen,
    StartTurn,
    Status,
    ToInstance,
    Welcome,
)

HELLO = Hello(revision=1, name="alpha", pid=1, devices={"g": 100}, start_bytes={})
GEOMETRY = Geometry(extents=8, extent_blocks=4, prefix=1, floor=2, cap=6, extent_bytes={"g": 10})


def allowance(revision: int, extents: int, *, epoch: int = 1, pressure: bool = False) -> Allowance:
    return Allowance(
        epoch=epoch,
        revision=revision,
        extents=extents,
        ceiling=6,
        pressure=pressure,
        reason="need",
    )


def growing(link: ArbiterLink) -> bool:
    return link.may_grow


def granted(link: ArbiterLink) -> bool:
    return link.start_granted


def joined(epoch: int = 1) -> ArbiterLink:
    link = ArbiterLink(HELLO)
    link.found()
    assert link.receive(Welcome(epoch=epoch, revision=1), held=0) == "report"
    return link


def test_nothing_grows_in_a_new_epoch_before_its_first_allowance() -> None:
    """Also what was held when it began: the new books know of the last report only."""
    link = joined()
    link.receive(allowance(1, 5), held=2)
    assert link.may_grow
    link.lost(held=5)
    link.found()
    link.receive(Welcome(epoch=2, revision=1), held=5)
    assert (link.phase, link.allowance, growing(link)) == ("joined", 5, False)
    link.receive(allowance(1, 5, epoch=2), held=3)
    assert growing(link)
    link.receive(Resync(epoch=2), held=4)
    link.receive(Welcome(epoch=2, revision=1), held=4)
    assert not growing(link)


def test_joining_ends_with_a_report() -> None:
    link = ArbiterLink(HELLO)
    assert (link.phase, link.unanswered, link.may_grow) == ("lost", False, False)
    assert link.found() is HELLO
    assert (link.phase, link.unanswered) == ("greeting", True)
    assert link.receive(Welcome(epoch=3, revision=1), held=2) == "report"
    assert (link.phase, link.unanswered, link.epoch, link.allowance) == ("joined", False, 3, 2)
    assert link.receive(Welcome(epoch=3, revision=1), held=2) == ""


def test_a_newer_hello_is_unanswered_until_its_own_welcome() -> None:
    link = joined()
    hello = link.introduce(geometry=GEOMETRY, base_bytes={"g": 4})
    assert (hello.revision, hello.geometry, hello.base_bytes) == (2, GEOMETRY, {"g": 4})
    assert link.unanswered
    link.receive(Welcome(epoch=1, revision=1), held=0)
    assert link.unanswered
    link.receive(Welcome(epoch=1, revision=2), held=0)
    assert not link.unanswered


def test_the_newest_allowance_wins_and_repeats_change_nothing() -> None:
    link = joined()
    assert link.receive(allowance(2, 5, pressure=True), held=1) == "report"
    assert (link.allowance, link.ceiling, link.pressure, link.reason) == (5, 6, True, "need")
    before = link.snapshot()
    assert link.receive(allowance(2, 4), held=1) == ""
    assert link.receive(allowance(1, 3), held=1) == ""
    assert link.snapshot() == before
    assert link.receive(allowance(3, 2), held=1) == "report"
    assert (link.allowance, link.pressure) == (2, False)


def test_nothing_is_tried_again_under_an_allowance_that_was_refused() -> None:
    link = joined()
    link.receive(allowance(1, 5), held=1)
    assert growing(link)
    link.block()
    assert not growing(link)
    link.receive(allowance(1, 5), held=1)
    assert not growing(link)
    link.receive(allowance(2, 5), held=1)
    assert growing(link)


def test_without_an_arbiter_what_is_held_stays_and_nothing_grows() -> None:
    link = joined()
    link.receive(allowance(4, 5, pressure=True), held=3)
    link.lost(held=3)
    assert (link.phase, link.allowance, link.pressure) == ("lost", 3, False)
    assert not link.may_grow
    assert link.receive(allowance(9, 6), held=3) == "", "its channel is closed"
    assert link.allowance == 3
    link.found()
    assert not link.may_grow
    link.receive(Welcome(epoch=2, revision=1), held=4)
    assert (link.allowance, link.epoch) == (4, 2)
    assert link.receive(allowance(1, 6, epoch=2), held=4) == "report", "revisions begin anew"


@pytest.mark.parametrize(
    "message",
    [
        Welcome(epoch=1, revision=7),
        Seen(epoch=1, revision=7),
        StartTurn(epoch=1, revision=7),
        allowance(7, 6),
        Elect(epoch=1, device="g"),
        Resync(epoch=1),
        Seen(epoch=3, revision=7),
        StartTurn(epoch=3, revision=7),
        allowance(7, 6, epoch=3),
        Elect(epoch=3, device="g"),
    ],
    ids=lambda message: f"{type(message).__name__} {message.epoch}",
)
def test_only_the_epoch_that_welcomed_us_is_heard(message: ToInstance) -> None:
    link = joined(epoch=2)
    before = {**link.snapshot(), "stale_messages": 1}
    assert link.receive(message, held=0) == ""
    assert link.snapshot() == before
    assert (link.report_seen, link.start_granted, link.welcomed) == (0, False, 1)


def test_before_the_welcome_nothing_but_welcome_resync_and_refusal_counts() -> None:
    link = ArbiterLink(HELLO)
    link.found()
    assert link.receive(allowance(1, 5, epoch=0), held=0) == ""
    assert link.allowance == 0
    assert link.receive(Refused(reason="full"), held=0) == ""
    assert link.refusal == "full"


def test_after_a_resync_the_arbiters_revisions_begin_anew() -> None:
    link = joined()
    link.receive(allowance(5, 6), held=2)
    link.block()
    assert link.receive(Resync(epoch=1), held=2) == "hello"
    assert (link.phase, link.allowance) == ("greeting", 2)
    assert link.receive(Welcome(epoch=1, revision=1), held=2) == "report"
    assert link.receive(allowance(1, 4), held=2) == "report"
    assert link.may_grow


def test_a_start_turn_counts_for_the_hello_that_asked_or_a_later_one() -> None:
    link = joined()
    link.receive(StartTurn(epoch=1, revision=1), held=0)
    assert granted(link)
    link.introduce(start_bytes={"g": 30})
    assert not granted(link)
    link.receive(StartTurn(epoch=1, revision=1), held=0)
    assert not granted(link)
    link.introduce(geometry=GEOMETRY)
    link.receive(StartTurn(epoch=1, revision=3), held=0)
    assert granted(link)


def test_seen_reports_and_elections() -> None:
    link = joined()
    assert link.receive(Seen(epoch=1, revision=4), held=0) == ""
    link.receive(Seen(epoch=1, revision=2), held=0)
    assert link.report_seen == 4
    assert link.receive(Elect(epoch=1, device="g"), held=0) == "elect"
    assert link.receive(Status(snapshot={}), held=0) == ""

"""Blocking calls answered by another thread."""

from __future__ import annotations

import threading

import pytest

from kvadmit.errors import CapacityError, PeerLostError, PeerTimeoutError
from kvadmit.pending import PendingCalls


def test_an_outcome_may_come_first_and_is_final() -> None:
    calls = PendingCalls("start", "ready")
    calls.settle("start")
    calls.settle("start", CapacityError("too late to matter"))
    calls.fail(PeerLostError("engine", "gone"))
    calls.wait("start", 0.0)
    for _ in range(2):
        with pytest.raises(PeerLostError, match="gone"):
            calls.wait("ready", 0.0)


def test_a_waiting_thread_is_answered() -> None:
    calls = PendingCalls("start")
    seen: list[str] = []

    def wait() -> None:
        try:
            calls.wait("start", 10.0)
        except CapacityError as error:
            seen.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    calls.settle("start", CapacityError("alpha holds it"))
    thread.join(10.0)
    assert seen == ["alpha holds it"]


def test_no_outcome_in_time_names_the_call() -> None:
    calls = PendingCalls("geometry")
    assert not calls.is_settled("geometry")
    with pytest.raises(PeerTimeoutError, match="settle geometry"):
        calls.wait("geometry", 0.0)

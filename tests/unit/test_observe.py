"""Counters, histograms, stories, traces and the state log."""

from __future__ import annotations

import json
import logging
import threading
import timeit
from pathlib import Path

import msgspec
import pytest

from kvadmit.messages import Answer, MapGrant
from kvadmit.observe import (
    Counters,
    Histogram,
    StateLog,
    Story,
    Trace,
    TraceEntry,
    load_trace,
)


class Asked(msgspec.Struct, frozen=True):
    now_s: float
    name: str


class Answered(msgspec.Struct, frozen=True):
    now_s: float
    rank: int
    message: Answer | MapGrant


class Send(msgspec.Struct, frozen=True):
    rank: int
    message: Answer | MapGrant


CLASSES: dict[str, type] = {c.__name__: c for c in (Asked, Answered, Send)}


def order(number: int) -> MapGrant:
    return MapGrant(order=number, kind="prepare", extents=((1, 2), (7, 1)))


def answer(number: int) -> Answer:
    return Answer(order=number, rank=1, kind="prepare", outcome="done", done=((1, 2), (7, 1)))


# --- counters and histograms -----------------------------------------------------------------


def test_counters_know_their_names() -> None:
    counters = Counters("growths", "resends")
    counters.add("growths")
    counters.add("growths", 2)
    assert counters["growths"] == 3
    assert counters.snapshot() == {"growths": 3, "resends": 0}
    with pytest.raises(KeyError):
        counters.add("grwoths")


def test_empty_histogram_has_no_figures() -> None:
    assert Histogram().snapshot() == {"count": 0, "p50": None, "p99": None, "max": None}


def test_histogram_percentiles() -> None:
    histogram = Histogram()
    for value in reversed(range(101)):
        histogram.add(value)
    assert histogram.snapshot() == {"count": 101, "p50": 50, "p99": 99, "max": 100}


def test_histogram_forgets_old_samples_but_not_the_maximum() -> None:
    histogram = Histogram(samples_max=4)
    for value in (9.0, 1.0, 2.0, 3.0, 4.0, 5.0):
        histogram.add(value)
    # The ring holds 2, 3, 4, 5: nearest ranks of 0.5 * 3 and 0.99 * 3.
    assert histogram.snapshot() == {"count": 6, "p50": 4.0, "p99": 5.0, "max": 9.0}


def test_histogram_maximum_may_be_negative() -> None:
    histogram = Histogram()
    histogram.add(-2.0)
    assert histogram.snapshot()["max"] == -2.0


def test_adding_costs_less_than_a_microsecond() -> None:
    histogram, counters = Histogram(), Counters("a")
    for add in (lambda: histogram.add(1.0), lambda: counters.add("a")):
        best = min(timeit.repeat(add, number=20_000, repeat=7)) / 20_000
        assert best < 1e-6


def test_snapshot_while_another_thread_adds() -> None:
    histogram, trace = Histogram(samples_max=64), Trace(entries_max=64)
    stop = threading.Event()

    def add() -> None:
        while not stop.is_set():
            histogram.add(1.0)
            trace.record("group", Asked(0.0, "x"), [])

    thread = threading.Thread(target=add)
    thread.start()
    try:
        counts = [histogram.snapshot()["count"] for _ in range(500)]
        numbers = [[entry.number for entry in trace.entries()] for _ in range(500)]
    finally:
        stop.set()
        thread.join()
    assert counts == sorted(counts, key=lambda count: count or 0)
    for held in numbers:
        assert held == list(range(held[0], held[0] + len(held))) if held else True


# --- story and trace ---------------------------------------------------------------------------


def test_story_is_bounded_and_relative_to_its_start() -> None:
    story = Story("order 4", lines_max=2)
    assert "nothing recorded" in str(story)
    for number in range(3):
        story.add(10.0 + number / 1000, f"line {number}")
    assert len(story) == 2
    assert str(story).splitlines() == [
        "operation order 4:",
        "      +0.000 ms  line 1",
        "      +1.000 ms  line 2",
    ]


def test_trace_finds_the_story_of_one_order() -> None:
    trace = Trace()
    trace.record("group", Asked(1.0, "x"), [Send(0, order(7)), Send(0, order(8))])
    trace.record("group", Asked(1.5, "y"), [])
    trace.record("group", Answered(2.0, 1, answer(7)), [])
    lines = str(trace.story("order", 7)).splitlines()
    assert len(lines) == 3
    assert "group -> Send" in lines[1]
    assert "order=7" in lines[1]
    assert "group <- Answered" in lines[2]
    assert len(trace.story("order", 9)) == 0


def test_trace_is_a_ring() -> None:
    trace = Trace(entries_max=3)
    for number in range(5):
        trace.record("group", Asked(float(number), "x"), [])
    assert trace.count == 5
    assert [entry.number for entry in trace.entries()] == [3, 4, 5]


def test_dumped_trace_loads_as_the_same_objects(tmp_path: Path) -> None:
    trace = Trace()
    trace.record("group", Asked(1.25, "x"), [Send(0, order(7)), Send(1, order(7))])
    trace.record("group", Answered(2.5, 1, answer(7)), [])
    path = tmp_path / "trace.jsonl"
    assert trace.dump(path) == 2
    for line in path.read_text().splitlines():
        assert set(json.loads(line)) == {"number", "machine", "event", "effects"}
    assert list(load_trace(path, CLASSES)) == trace.entries()
    assert next(iter(load_trace(path, CLASSES))) == TraceEntry(
        1, "group", Asked(1.25, "x"), (Send(0, order(7)), Send(1, order(7)))
    )


def test_loading_names_what_no_longer_fits(tmp_path: Path) -> None:
    trace = Trace()
    trace.record("group", Asked(1.0, "x"), [])
    path = tmp_path / "trace.jsonl"
    trace.dump(path)
    with pytest.raises(KeyError, match="Asked"):
        list(load_trace(path, {}))
    with pytest.raises(msgspec.ValidationError, match="rank"):
        list(load_trace(path, {"Asked": Answered}))


# --- state log ----------------------------------------------------------------------------------


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> StateLog:
    caplog.set_level(logging.INFO, logger="kvadmit")
    return StateLog("coordinator one", interval_s=5.0)


def test_one_line_per_change_with_the_role_in_front(
    log: StateLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.change("arbiter", "lost", level=logging.WARNING, now_s=100.0)
    log.change("arbiter", "lost", now_s=200.0)
    log.change("rank 0", "slow", now_s=200.0)
    assert caplog.record_tuples == [
        ("kvadmit", logging.WARNING, "coordinator one: arbiter: lost"),
        ("kvadmit", logging.INFO, "coordinator one: rank 0: slow"),
    ]


def test_flapping_is_held_back_counted_and_its_end_told(
    log: StateLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.change("rank 0", "slow", now_s=100.0)
    for number in range(7):
        log.change("rank 0", f"state {number}", now_s=101.0)
    assert log.flush(now_s=102.0) == 105.0
    assert len(caplog.messages) == 1
    assert log.suppressed == 7
    assert log.flush(now_s=105.0) is None
    assert caplog.messages[1:] == ["coordinator one: rank 0: state 6 (6 changes not shown)"]
    assert log.flush(now_s=106.0) is None
    assert len(caplog.messages) == 2


def test_change_after_the_interval_tells_what_went_unsaid(
    log: StateLog, caplog: pytest.LogCaptureFixture
) -> None:
    for now_s, state in ((100.0, "a"), (101.0, "b"), (106.0, "c"), (112.0, "d")):
        log.change("x", state, now_s=now_s)
    assert caplog.messages == [
        "coordinator one: x: a",
        "coordinator one: x: c (1 changes not shown)",
        "coordinator one: x: d",
    ]


def test_return_to_the_logged_state_is_no_news(
    log: StateLog, caplog: pytest.LogCaptureFixture
) -> None:
    for state in ("a", "b", "a"):
        log.change("x", state, now_s=100.0)
    assert log.flush(now_s=200.0) is None
    assert caplog.messages == ["coordinator one: x: a"]


def test_forgotten_subject_starts_anew(log: StateLog, caplog: pytest.LogCaptureFixture) -> None:
    log.change("peer", "joined", now_s=100.0)
    log.forget("peer")
    log.forget("peer")
    log.change("peer", "joined", now_s=100.0)
    assert len(caplog.messages) == 2

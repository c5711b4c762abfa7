"""The bench's workload: seeded, equal for every policy, bursts that take turns."""

from __future__ import annotations

import itertools
import random

import pytest
from bench.colocated.order import interleave, missing
from bench.colocated.workload import Shape, draw_length, plan, prompt_ids

CLOSED = Shape(scenario="alternating", instances=2, requests=10, bursts=3)


def test_equal_arguments_make_equal_bursts() -> None:
    assert plan(CLOSED, seed=7, repeat=1) == plan(CLOSED, seed=7, repeat=1)


def test_seed_and_repeat_change_lengths_and_prompts() -> None:
    base = plan(CLOSED, seed=7, repeat=1)
    for other in (plan(CLOSED, seed=8, repeat=1), plan(CLOSED, seed=7, repeat=2)):
        assert [b.instance for b in other] == [b.instance for b in base]
        assert [r.seed for b in other for r in b.requests] != [
            r.seed for b in base for r in b.requests
        ]


def test_alternating_bursts_take_turns_and_cover_every_request() -> None:
    bursts = plan(CLOSED, seed=0, repeat=0)
    assert [burst.instance for burst in bursts] == [0, 1, 0, 1, 0, 1]
    assert [burst.start_s for burst in bursts] == [0.0, None, None, None, None, None]
    for instance in range(2):
        indexes = [r.index for b in bursts if b.instance == instance for r in b.requests]
        assert indexes == list(range(10))
    assert {request.at_s for burst in bursts for request in burst.requests} == {0.0}


def test_open_loop_starts_and_arrivals_are_fixed_in_advance() -> None:
    shape = Shape(scenario="alternating", instances=2, requests=40, rate=10.0, bursts=2)
    bursts = plan(shape, seed=0, repeat=0)
    starts = [burst.start_s for burst in bursts]
    assert all(start is not None for start in starts)
    for burst, following in itertools.pairwise(bursts):
        assert burst.start_s is not None
        assert following.start_s is not None
        arrivals = [request.at_s for request in burst.requests]
        assert arrivals[0] == 0.0
        assert arrivals == sorted(arrivals)
        assert following.start_s > burst.start_s + arrivals[-1]
        # 19 exponential gaps of 0.1 s: far outside this range only if the rate is misread
        assert 0.7 < arrivals[-1] < 4.5


def test_symmetric_presses_every_instance_from_the_start() -> None:
    shape = Shape(scenario="symmetric", instances=3, requests=5)
    bursts = plan(shape, seed=0, repeat=0)
    assert [(b.instance, b.start_s, len(b.requests)) for b in bursts] == [
        (0, 0.0, 5),
        (1, 0.0, 5),
        (2, 0.0, 5),
    ]


def test_more_bursts_than_requests_leave_none_empty() -> None:
    shape = Shape(scenario="alternating", instances=2, requests=2, bursts=5)
    assert all(burst.requests for burst in plan(shape, seed=0, repeat=0))


def test_lengths_fill_the_range_and_lean_to_the_short_side() -> None:
    dice = random.Random(3)
    drawn = [draw_length(dice, 64, 256) for _ in range(2000)]
    assert min(drawn) == 64
    assert max(drawn) == 256
    assert 120 < sorted(drawn)[1000] < 136  # the geometric mean is 128, the middle 160
    assert sum(64 < length < 256 for length in drawn) > 1800


def test_a_range_of_one_length_is_that_length() -> None:
    assert draw_length(random.Random(0), 100, 100) == 100


def test_prompt_ids_are_as_many_as_asked_and_inside_the_vocabulary() -> None:
    request = plan(CLOSED, seed=0, repeat=0)[0].requests[0]
    ids = prompt_ids(request, 256)
    assert len(ids) == request.prompt_tokens
    assert all(8 <= token < 256 for token in ids)
    assert ids == prompt_ids(request, 256)


@pytest.mark.parametrize(
    ("repeats", "expected"),
    [
        (1, [("a", 0), ("b", 0)]),
        (3, [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]),
    ],
)
def test_repeats_are_interleaved(repeats: int, expected: list[tuple[str, int]]) -> None:
    assert interleave(["a", "b"], repeats) == expected


def test_runs_that_are_done_are_not_made_again() -> None:
    order = [(*run, "symmetric") for run in interleave(["a", "b"], 2)]
    done = {("a", 0, "symmetric"), ("b", 1, "symmetric"), ("b", 0, "alternating")}
    assert missing(order, done) == [("b", 0, "symmetric"), ("a", 1, "symmetric")]

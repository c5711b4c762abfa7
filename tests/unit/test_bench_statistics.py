"""The bench's arithmetic."""

from __future__ import annotations

import pytest
from bench.colocated.statistics import Ratio, mean, median, paired_ratio, percentile, summary


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1), (1, 1), (50, 50), (50.5, 51), (95, 95), (99, 99), (100, 100)]
)
def test_percentile_is_a_measured_value(percent: float, expected: float) -> None:
    assert percentile(list(range(100, 0, -1)), percent) == expected


def test_figures_of_nothing_are_none() -> None:
    assert percentile([], 50) is None
    assert mean([]) is None
    assert median([None, None]) is None
    assert summary([]) == {"mean": None, "p50": None, "p95": None, "p99": None}


def test_median_leaves_out_what_does_not_apply() -> None:
    assert median([None, 3.0, 1.0]) == 2.0


def test_ratio_pairs_runs_of_the_same_repeat() -> None:
    ratio = paired_ratio({0: 12.0, 1: 30.0, 2: 10.0, 7: 99.0}, {0: 10.0, 1: 20.0, 2: 10.0, 8: 1.0})
    assert ratio == Ratio(1.2, 1.0, 1.5, 3)
    assert str(ratio) == "1.20 x (1.00 - 1.50)"


def test_ratio_needs_a_pair() -> None:
    assert paired_ratio({0: 1.0}, {1: 1.0}) is None
    assert paired_ratio({0: 1.0}, {0: 0.0}) is None
    assert str(paired_ratio({0: 3.0}, {0: 2.0})) == "1.50 x (one pair)"

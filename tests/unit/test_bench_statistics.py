"""The bench's arithmetic."""

from __future__ import annotations

import pytest
from bench.colocated.statistics import mean, median, percentile, ratio_of_medians, summary


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


def test_ratio_is_of_medians_over_common_repeats() -> None:
    ratio = ratio_of_medians(
        {0: 12.0, 1: 30.0, 2: 10.0, 7: 99.0}, {0: 10.0, 1: 20.0, 2: 16.0, 8: 1.0}
    )
    assert ratio is not None
    assert (ratio.value, ratio.pairs) == (12.0 / 16.0, 3)
    # Of three pairs the bootstrap often draws one three times: no wider than the pairs.
    assert (ratio.low, ratio.high) == (10.0 / 16.0, 30.0 / 20.0)
    assert str(ratio) == "0.75 x (0.62 - 1.50)"


def test_the_interval_narrows_with_more_repeats_and_is_the_same_each_time() -> None:
    few = ratio_of_medians({n: 1.0 + n % 2 for n in range(4)}, dict.fromkeys(range(4), 1.0))
    many = ratio_of_medians({n: 1.0 + n / 40 for n in range(40)}, dict.fromkeys(range(40), 1.0))
    assert few is not None
    assert many is not None
    assert (few.low, few.high) == (1.0, 2.0)
    assert 1.2 < many.low < many.value < many.high < 1.8
    again = ratio_of_medians({n: 1.0 + n / 40 for n in range(40)}, dict.fromkeys(range(40), 1.0))
    assert many == again


def test_ratio_needs_a_pair() -> None:
    assert ratio_of_medians({0: 1.0}, {1: 1.0}) is None
    assert ratio_of_medians({0: 1.0}, {0: 0.0}) is None
    assert str(ratio_of_medians({0: 3.0}, {0: 2.0})) == "1.50 x (one pair)"

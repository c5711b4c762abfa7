"""Percentiles, means and ratios, defined once for table, JSON and plot.

Owns: the arithmetic. Must not know: what is measured. A figure that does not apply is None,
never 0, and None in gives None out.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the smallest value with at least `percent` of `values` at or below it.

    The nearest-rank definition: always a value that was measured, never one between two.
    """
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def mean(values: Sequence[float]) -> float | None:
    """Return the arithmetic mean, None of nothing."""
    return statistics.fmean(values) if values else None


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that apply, None if none does."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def summary(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean, p50, p95 and p99 in the unit of `values`."""
    return {
        "mean": mean(values),
        "p50": percentile(values, 50),
        "p95": percentile(values, 95),
        "p99": percentile(values, 99),
    }


class Ratio(msgspec.Struct, frozen=True):
    """Ratio of two medians, with the interval in which it lies for 95 of 100 resamplings."""

    value: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        if self.pairs == 1:
            return f"{self.value:.2f} x (one pair)"
        return f"{self.value:.2f} x ({self.low:.2f} - {self.high:.2f})"


RESAMPLINGS = 2000


def ratio_of_medians(values: Mapping[int, float], reference: Mapping[int, float]) -> Ratio | None:
    """Return median(values) / median(reference), both by repeat; None without a common repeat.

    Runs of a repeat answered the same requests at about the same time, so the bootstrap draws
    pairs of them (percentile method, seeded: equal runs, equal interval). Other runs do not
    count.
    """
    pairs = [
        (values[repeat], reference[repeat])
        for repeat in sorted(values)
        if repeat in reference and reference[repeat] > 0
    ]
    if not pairs:
        return None
    dice = random.Random(0)
    drawn = [_ratio(dice.choices(pairs, k=len(pairs))) for _ in range(RESAMPLINGS)]
    low, high = percentile(drawn, 2.5), percentile(drawn, 97.5)
    assert low is not None
    assert high is not None
    return Ratio(_ratio(pairs), low, high, len(pairs))


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    ours, theirs = zip(*pairs, strict=True)
    return float(statistics.median(ours) / statistics.median(theirs))

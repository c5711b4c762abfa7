"""Percentiles, means and ratios, defined once for table, JSON and plot.

Owns: the arithmetic. Must not know: what is measured. A figure that does not apply is None,
never 0, and None in gives None out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

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
    """Median of ratios of paired runs, with the smallest and largest of them."""

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        if self.pairs == 1:
            return f"{self.median:.2f} x (one pair)"
        return f"{self.median:.2f} x ({self.low:.2f} - {self.high:.2f})"


def paired_ratio(values: dict[int, float], reference: dict[int, float]) -> Ratio | None:
    """Return the ratio of `values` to `reference`, both by repeat; None without a pair.

    Pairs share a repeat, so they ran the same requests at about the same time.
    """
    ratios = [
        values[repeat] / reference[repeat]
        for repeat in sorted(values)
        if repeat in reference and reference[repeat] > 0
    ]
    if not ratios:
        return None
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), len(ratios))

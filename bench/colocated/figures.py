"""One run's figures: what a run's entry in the result JSON comes to, over its instances.

Owns: how instances are put together (a sum, the worst one, a mean over requests). Must not
know: how figures are shown. A figure that does not apply is None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.colocated.policies import POLICIES
from bench.colocated.statistics import Ratio, ratio_of_medians

Json = dict[str, Any]
Figure = Callable[[Json], float | None]
"""Takes one run's entry."""


def policies_of(runs: Sequence[Json]) -> list[str]:
    """Return the policies of `runs`, in the order in which the bench knows them.

    The first is what the others are compared with, whatever was run first.
    """
    found = {run["policy"] for run in runs}
    return [policy for policy in POLICIES if policy in found]


def by_repeat(runs: Sequence[Json], policy: str, figure: Figure) -> dict[int, float]:
    """Return a figure of the runs of `policy` to which it applies, by repeat."""
    found = {run["repeat"]: figure(run) for run in runs if run["policy"] == policy}
    return {repeat: value for repeat, value in found.items() if value is not None}


def ratio(runs: Sequence[Json], policy: str, reference: str, figure: Figure) -> Ratio | None:
    """Return a figure of `policy` over that of `reference`."""
    return ratio_of_medians(by_repeat(runs, policy, figure), by_repeat(runs, reference, figure))


def throughput_ratio(runs: Sequence[Json], policy: str, reference: str) -> Ratio | None:
    """Return output tokens per second of `policy` over those of `reference`."""
    return ratio(runs, policy, reference, own("output_tokens_per_s"))


def total(key: str) -> Figure:
    """Return the figure `key` added up over the instances to which it applies."""

    def figure(run: Json) -> float | None:
        values = [i[key] for i in run["instances"] if i[key] is not None]
        return sum(values) if values else None

    return figure


def worst(key: str, part: str | None = None) -> Figure:
    """Return the largest `key` (or its part, like p99) of any instance."""

    def figure(run: Json) -> float | None:
        found = [i.get(key) for i in run["instances"]]
        if part is not None:
            found = [spread.get(part) if spread else None for spread in found]
        values = [value for value in found if value is not None]
        return max(values) if values else None

    return figure


def mean_over_requests(key: str) -> Figure:
    """Return the mean of `key` over all completed requests of all instances."""

    def figure(run: Json) -> float | None:
        pairs = [(i["completed"], i[key]["mean"]) for i in run["instances"]]
        known = [(count, value) for count, value in pairs if count and value is not None]
        total = sum(count for count, _ in known)
        return sum(count * value for count, value in known) / total if total else None

    return figure


def own(key: str) -> Figure:
    """Return the figure `key` of the run itself."""
    return lambda run: run[key]

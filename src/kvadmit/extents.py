"""Sets of extents and their run form.

Owns: conversion between extent numbers and the wire's `(first, count)` runs, and the
check that runs from a peer are well formed. Must not know: what an extent's state means.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvadmit.errors import RemoteProtocolError
from kvadmit.messages import Runs


def to_runs(extents: Iterable[int]) -> Runs:
    """Return `extents` (any order, no repeats) as ascending runs that do not touch."""
    runs: list[tuple[int, int]] = []
    first = count = 0
    for extent in sorted(extents):
        if count and extent == first + count:
            count += 1
            continue
        if count:
            runs.append((first, count))
        first, count = extent, 1
    if count:
        runs.append((first, count))
    return tuple(runs)


def from_runs(runs: Runs) -> list[int]:
    """Return the extent numbers of `runs`, ascending."""
    return [extent for first, count in runs for extent in range(first, first + count)]


def check_runs(runs: Runs, extents: int) -> None:
    """Raise RemoteProtocolError unless `runs` ascend without touching inside `[0, extents)`."""
    end = -1
    for first, count in runs:
        if first <= end or count < 1 or first + count > extents:
            raise RemoteProtocolError(
                f"extent runs {runs!r} are not ascending runs within 0..{extents - 1}"
            )
        end = first + count

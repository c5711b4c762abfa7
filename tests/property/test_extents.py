"""Runs against plain sets."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from kvadmit.errors import RemoteProtocolError
from kvadmit.extents import check_runs, from_runs, to_runs

extent_lists = st.lists(st.integers(0, 60), unique=True)
run_tuples = st.lists(st.tuples(st.integers(-2, 20), st.integers(-2, 8)), max_size=5).map(tuple)


@given(extent_lists)
def test_runs_are_the_set_they_were_made_of(extents: list[int]) -> None:
    runs = to_runs(extents)
    assert from_runs(runs) == sorted(extents)
    check_runs(runs, 61)


@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
def test_equal_sets_have_equal_runs_and_others_do_not(one: set[int], other: set[int]) -> None:
    assert (to_runs(one) == to_runs(other)) == (one == other)


@given(run_tuples, st.integers(1, 24))
def test_the_check_passes_exactly_what_to_runs_makes(
    runs: tuple[tuple[int, int], ...], extents: int
) -> None:
    named = from_runs(runs)
    sound = all(0 <= extent < extents for extent in named)
    canonical = sound and len(named) == len(set(named)) and to_runs(named) == runs
    refused = True
    with contextlib.suppress(RemoteProtocolError):
        check_runs(runs, extents)
        refused = False
    assert refused is not canonical

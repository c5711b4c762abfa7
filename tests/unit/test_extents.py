"""Extents and their runs, by example."""

from __future__ import annotations

import pytest

from kvadmit.errors import RemoteProtocolError
from kvadmit.extents import check_runs, from_runs, to_runs
from kvadmit.messages import Runs


@pytest.mark.parametrize(
    ("extents", "runs"),
    [
        ([], ()),
        ([0], ((0, 1),)),
        ([5, 3, 4], ((3, 3),)),
        ([9, 0, 1, 7], ((0, 2), (7, 1), (9, 1))),
    ],
)
def test_runs_ascend_and_do_not_touch(extents: list[int], runs: Runs) -> None:
    assert to_runs(extents) == runs
    assert from_runs(runs) == sorted(extents)


@pytest.mark.parametrize("runs", [(), ((0, 4),), ((0, 1), (2, 1)), ((3, 1),)])
def test_sound_runs_pass(runs: Runs) -> None:
    check_runs(runs, 4)


@pytest.mark.parametrize(
    "runs",
    [
        ((0, 0),),
        ((0, -1),),
        ((-1, 1),),
        ((0, 5),),
        ((4, 1),),
        ((0, 1), (1, 1)),
        ((2, 1), (0, 1)),
        ((0, 2), (1, 2)),
    ],
    ids=["empty", "negative", "below 0", "too long", "past the end", "touch", "fall", "overlap"],
)
def test_malformed_runs_name_what_is_allowed(runs: Runs) -> None:
    with pytest.raises(RemoteProtocolError, match=r"ascending runs within 0\.\.3"):
        check_runs(runs, 4)

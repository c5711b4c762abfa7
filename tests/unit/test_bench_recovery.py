"""When the soak calls an arbiter, or the memory of a killed instance, back."""

from __future__ import annotations

from typing import Any

import pytest
from bench.colocated import recovery


def snapshot(
    instances: dict[str, tuple[int, int]], *, foreign: int = 0, read_at_s: float = 20.0
) -> dict[str, Any]:
    """Return a status: instance -> its pid and the revision of its report."""
    return {
        "devices": {"host": {"foreign_bytes": foreign}},
        "instances": {
            name: {"pid": pid, "report": {"revision": number, "devices": [{"at_s": read_at_s}]}}
            for name, (pid, number) in instances.items()
        },
    }


@pytest.mark.parametrize(
    ("instances", "back"),
    [
        ({"a": (1, 4), "b": (2, 1)}, True),
        ({"a": (1, 4), "b": (2, 1), "c": (3, 0)}, True),
        ({"a": (1, 4), "b": (2, 0)}, False),
        ({"a": (1, 4)}, False),
    ],
)
def test_an_arbiter_is_back_once_it_has_every_report(
    instances: dict[str, tuple[int, int]], back: bool
) -> None:
    assert recovery.all_reported(snapshot(instances), {"a", "b"}) is back


@pytest.mark.parametrize(
    ("pid", "foreign", "read_at_s", "back"),
    [
        (7, 0, 20.0, True),
        (2, 0, 20.0, False),
        (7, 1, 20.0, False),
        (7, 0, 9.0, False),
    ],
)
def test_memory_is_back_once_it_is_neither_held_nor_foreign_by_a_reading_after_the_kill(
    pid: int, foreign: int, read_at_s: float, back: bool
) -> None:
    """The instance of pid 2 or 3 was killed at 10 s; its successor has its name and another pid."""
    told = snapshot({"a": (1, 4), "b": (pid, 1)}, foreign=foreign, read_at_s=read_at_s)
    assert recovery.memory_is_back(told, {2, 3}, 10.0) is back


def test_figures_are_the_median_and_the_worst_of_all() -> None:
    assert recovery.figures([0.3, 0.1, 0.9]) == {
        "median": 0.3,
        "worst": 0.9,
        "all": [0.3, 0.1, 0.9],
    }
    assert recovery.figures([]) is None

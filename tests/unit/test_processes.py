"""What a process that hosts kvadmit's threads is told, by example."""

from __future__ import annotations

import sys

import pytest

from kvadmit.processes import SWITCH_INTERVAL_S, share_interpreter


@pytest.mark.parametrize(
    ("before_s", "after_s"), [(0.005, SWITCH_INTERVAL_S), (0.0001, 0.0001)], ids=["usual", "short"]
)
def test_the_interpreter_is_handed_over_soon_and_never_later_than_before(
    before_s: float, after_s: float
) -> None:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(before_s)
    try:
        share_interpreter()
        assert sys.getswitchinterval() == pytest.approx(after_s)
    finally:
        sys.setswitchinterval(usual_s)

"""The list of mutants stays true, and the tool tells killed from surviving."""

from __future__ import annotations

import ast

import msgspec
import pytest
from tools.mutants import MUTANTS, PACKAGE, ROOT, Mutant, killed_by

PORT = ("tests/unit/test_port.py",)


def test_there_is_one_mutant_for_each_kind_of_guard() -> None:
    assert len(MUTANTS) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_guard_is_still_there_and_can_be_taken_out(mutant: Mutant) -> None:
    text = (PACKAGE / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    ast.parse(text.replace(mutant.old, mutant.new))
    assert all((ROOT / path).exists() for path in mutant.tests)


@pytest.mark.slow
def test_a_guard_without_which_a_test_fails_is_killed_and_a_comment_is_not() -> None:
    (woken,) = (mutant for mutant in MUTANTS if mutant.tests == PORT)
    assert (killed_by(woken) or "").startswith(PORT[0])
    harmless = msgspec.structs.replace(woken, new="        # nothing\n" + woken.old)
    assert killed_by(harmless) is None

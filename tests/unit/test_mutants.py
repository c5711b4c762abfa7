"""The list of mutants stays true, and the tool tells killed from surviving."""

from __future__ import annotations

import ast
import re

import msgspec
import pytest
from tools.fault_mutants import Mutant
from tools.mutants import MUTANTS, PACKAGE, ROOT, killed_by

PORT = ("tests/unit/test_port.py",)


def test_there_is_one_mutant_for_each_kind_of_guard() -> None:
    assert len(MUTANTS) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_guard_is_still_there_and_can_be_taken_out(mutant: Mutant) -> None:
    text = (PACKAGE / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    ast.parse(text.replace(mutant.old, mutant.new))
    for path, _, name in (test.partition("::") for test in mutant.tests):
        assert not name or f"def {name}(" in (ROOT / path).read_text()
        assert (ROOT / path).exists()


def test_every_row_of_the_failure_matrix_has_a_mutant_and_no_other_row() -> None:
    text = (ROOT / "tests" / "README.md").read_text()
    _, _, table = text.partition("## From failure matrix to test")
    rows = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    assert len(rows) > 10
    assert rows[0] == "fault"
    assert {mutant.row for mutant in MUTANTS} - {""} == set(rows[1:])


@pytest.mark.slow
def test_a_guard_without_which_a_test_fails_is_killed_and_a_comment_is_not() -> None:
    (woken,) = (mutant for mutant in MUTANTS if mutant.tests == PORT)
    assert (killed_by(woken) or "").startswith(PORT[0])
    harmless = msgspec.structs.replace(woken, new="        # nothing\n" + woken.old)
    assert killed_by(harmless) is None

"""Every test that tests/README.md and the pages of docs name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LINKED = re.compile(r"\[(\w+)\]\(\.\./tests/([\w/]+\.py)\)")
NAMED = re.compile(r"`([\w/]+\.py)::(\w+(?:::\w+)?)`")


def names_in(path: Path) -> set[str]:
    """Return the test functions and classes of a file, methods as `Class::method`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = {m.name for m in node.body if isinstance(m, ast.FunctionDef)}
            found |= methods | {f"{node.name}::{name}" for name in methods}
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.add(node.targets[0].id)  # hypothesis' state machines
    return found


def test_every_named_test_exists() -> None:
    named = NAMED.findall((TESTS / "README.md").read_text())
    assert len(named) > 100
    missing = [f"{file}::{name}" for file, name in named if name not in names_in(TESTS / file)]
    assert not missing


@pytest.mark.parametrize("page", ["guarantees.md", "failure-modes.md", "threat-model.md"])
def test_every_linked_test_exists(page: str) -> None:
    linked = LINKED.findall((TESTS.parent / "docs" / page).read_text())
    assert len(linked) > 15
    missing = [f"{file}::{name}" for name, file in linked if name not in names_in(TESTS / file)]
    assert not missing

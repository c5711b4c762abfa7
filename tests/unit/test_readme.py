"""The README says what the committed results say, and its settings exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvadmit.config import as_table

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_numbers_are_those_of_the_committed_results() -> None:
    command = [sys.executable, str(ROOT / "bench" / "readme_numbers.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_settings_named_in_the_readme_exist() -> None:
    known = {row[0] for row in as_table()}
    table = README.split("| key | takes | meaning |")[1].split("\n\n")[0]
    named = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert named
    assert named <= known


@pytest.mark.parametrize("name", ["README.md", "docs/measurements.md"])
def test_files_that_are_linked_to_exist(name: str) -> None:
    path = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target

"""The soak from its command line, short and with the simulated engine: kills, restarts and looks at
what is left are real. `make soak` does the same for half an hour with real vLLM.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.soak import is_clean

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "--engine sim --minutes 0.4 --instances 2 --tp 2 --pool 8MiB --seed 4435"
"""A seed that kills an arbiter while both serve, then a front end, and one more instance."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_instances_lose_their_own_requests_only_and_leave_nothing(tmp_path: Path) -> None:
    report, picture = tmp_path / "r.json", tmp_path / "r.png"
    command = [sys.executable, str(ROOT / "bench" / "soak.py"), *FLAGS.split()]
    command += ["--json", str(report), "--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    assert is_clean(found)
    assert found["kills"] >= 2
    assert found["requests"] > 50
    assert found["lost_with_victims"] > 0
    assert found["fixtures"] >= 24
    arbiters = found["arbiter_back_s"]
    assert 1 <= len(arbiters["all"]) <= found["killed"]["arbiter"]
    assert 0 < arbiters["median"] <= arbiters["worst"]
    ended = {role: count for role, count in found["killed"].items() if role != "arbiter"}
    assert {role: len(f["all"]) for role, f in found["memory_back_s"].items()} == ended
    for figures in found["memory_back_s"].values():
        assert 0 < figures["median"] <= figures["worst"]
    assert "an arbiter with all reports" in done.stdout
    assert "memory, by front end" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_soak_that_lost_or_left_anything_or_did_nothing_is_not_clean() -> None:
    clean: dict[str, Any] = {
        "failed_outside_victims": 0,
        "differing_tokens": 0,
        "leaked_bytes": 0,
        "leaked_fds": 0,
        "leaked_files": 0,
        "leaked_processes": 0,
        "books_equal": True,
        "kills": 5,
        "requests": 5,
        "fixtures": 5,
    }
    assert is_clean(clean)
    for name, value in clean.items():
        worse: Any = False if value is True else 1 - min(value, 1)
        assert not is_clean({**clean, name: worse}), name

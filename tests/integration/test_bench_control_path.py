"""The bench of the control path, on the host's real memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_growth_and_shrink_are_timed_for_every_layout_and_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    command = [sys.executable, str(ROOT / "bench" / "control_path.py"), "--rounds", "3"]
    command += ["--tp", "1", "2", "--json", str(path), "--commit", "1f0e"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    result = json.loads(path.read_text())
    assert (result["schema"], result["commit"]) == ("kvadmit.control-path/1", "1f0e")
    seen = [(row["layout"], row["tp"], row["batch"]) for row in result["rows"]]
    layouts = ("block-outermost", "layer-outermost")
    assert seen == [(name, tp, batch) for name in layouts for tp in (1, 2) for batch in (1, 8)]
    for row in result["rows"]:
        for figure in ("growth_us", "told_to_there_us", "shrink_us"):
            assert 0 < row[figure]["p50"] <= row[figure]["p99"]
        assert row["growth_us"]["p50"] <= row["told_to_there_us"]["p99"]
    assert len(printed.stdout.splitlines()) == 1 + len(result["rows"])
    assert printed.stderr == ""

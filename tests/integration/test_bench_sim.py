"""The bench from its command line, with the simulated engine: processes, sockets and memory are
real, so a run that completes has moved memory between instances through kvadmit.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--engine sim --tp 2 --requests 24 --bursts 2 --pool 8MiB --output-tokens 24:64"


def bench(tmp_path: Path, flags: str, limit_s: float) -> dict[str, Any]:
    """Run the program; returns its JSON, having checked that it left a picture."""
    result, picture = tmp_path / "r.json", tmp_path / "r.png"
    command = [sys.executable, str(ROOT / "bench" / "contention.py"), *flags.split()]
    command += ["--json", str(result), "--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIMULATED" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    written: dict[str, Any] = msgspec.json.decode(result.read_bytes())
    return written


def total(run: dict[str, Any], key: str) -> int:
    return sum(instance[key] for instance in run["instances"])


def test_all_policies_complete_and_are_told_apart(tmp_path: Path) -> None:
    result = bench(tmp_path, f"{SMALL} --policy static sync event", 120)
    runs = {run["policy"]: run for run in result["runs"]}
    assert list(runs) == ["static", "sync", "event"]
    for run in runs.values():
        assert run["engine"] == "sim"
        assert (total(run, "completed"), total(run, "failed")) == (48, 0)
    assert {i["peak_held_bytes"] for i in runs["static"]["instances"]} == {4 << 20}
    assert {i["growths"] for i in runs["static"]["instances"]} == {None}
    for policy in ("sync", "event"):
        # More than an even share: memory of the idle instance was lent.
        assert all(i["peak_held_bytes"] > 4 << 20 for i in runs[policy]["instances"])
        assert all(i["growths"] > 0 for i in runs[policy]["instances"])
    assert total(runs["sync"], "headroom_rejections") > 0
    assert total(runs["event"], "headroom_rejections") == 0
    assert total(runs["event"], "allocation_misses") == 0
    assert total(runs["event"], "timer_probes") == 0


def test_append_makes_only_what_is_missing(tmp_path: Path) -> None:
    # A tree with edits has no name of its own, and is refused.
    named = f"{SMALL} --policy static --commit some-tree"
    bench(tmp_path, named, 60)
    before = bench(tmp_path, f"{named} --append --repeats 2", 60)
    assert [(run["policy"], run["repeat"]) for run in before["runs"]] == [
        ("static", 0),
        ("static", 1),
    ]
    after = bench(tmp_path, f"{named} --append --repeats 2", 60)
    assert after["runs"] == before["runs"]


def test_slow_workers_hold_the_scheduler_of_sync_and_not_of_event(tmp_path: Path) -> None:
    flags = f"{SMALL} --requests 12 --policy sync event --worker-delay-ms 60 --probes 1"
    runs = {run["policy"]: run for run in bench(tmp_path, flags, 120)["runs"]}
    for instance in runs["sync"]["instances"]:
        assert instance["grow_latency_s"]["p50"] >= 0.060
        assert instance["scheduler_wait_us"]["max"] >= 60_000
        assert instance["probe_tpot_s"]["mean"] > 0
    grown = [i["grow_latency_s"]["p50"] for i in runs["event"]["instances"] if i["growths"]]
    assert grown
    assert min(grown) >= 0.120  # PREPARE and COMMIT, each answered late
    assert all(i["scheduler_wait_us"]["max"] < 60_000 for i in runs["event"]["instances"])


@pytest.mark.slow
def test_two_instances_of_four_ranks_complete_the_field_reports_load(tmp_path: Path) -> None:
    flags = "--engine sim --tp 4 --requests 390 --pool 32MiB --policy event"
    (run,) = bench(tmp_path, flags, 180)["runs"]
    assert (total(run, "completed"), total(run, "failed")) == (780, 0)
    assert total(run, "timer_probes") == 0
    assert total(run, "headroom_rejections") + total(run, "allocation_misses") == 0

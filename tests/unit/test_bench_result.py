"""The bench's JSON: the contract with other tools, null for what does not apply, resuming."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bench.colocated import plot, table
from bench.colocated.outcome import Answered, Counted, InstanceOutcome, Level, RunOutcome
from bench.colocated.result import ResultFiles, StaleResultError, run_entry
from bench.colocated.setup import Setup
from bench.colocated.workload import Shape
from matplotlib import pyplot
from rich.console import Console

SETUP = Setup(
    shape=Shape(scenario="alternating", instances=2, requests=2),
    engine="vllm",
    tp=1,
    pool_bytes=1 << 25,
    model="/somewhere/tiny-model",
    seed=3,
)
INSTANCE_KEYS = [
    "name",
    "completed",
    "failed",
    "elapsed_s",
    "output_tokens_per_s",
    "ttft_s",
    "tpot_s",
    "preemptions",
    "allocation_misses",
    "no_slot_steps",
    "headroom_rejections",
    "timer_probes",
    "resends",
    "device_reads",
    "held_steps",
    "growths",
    "grow_latency_s",
    "grant_wait_s",
    "prepare_call_s",
    "commit_call_s",
    "decommit_call_s",
    "scheduler_wait_us",
    "scheduler_overlapped_us",
    "peak_held_bytes",
    "engine_core_device_bytes",
]


@pytest.fixture(scope="module")
def fonts_loaded() -> None:
    """Let matplotlib open its fonts, which it keeps for the life of the process."""
    figure = pyplot.figure()
    figure.text(0, 0, "text")
    figure.canvas.draw()
    pyplot.close(figure)


def answered(index: int, at_s: float, tokens: int = 11, error: str = "") -> Answered:
    return Answered(
        index=index,
        submitted_s=at_s,
        first_s=at_s + 0.5,
        last_s=at_s + 1.5,
        tokens=tokens,
        error=error,
    )


def outcome(policy: str, repeat: int, slowness: float = 1.0) -> RunOutcome:
    counted = Counted(preemptions=4, peak_held_bytes=1 << 20)
    if policy == "event":
        counted = Counted(
            preemptions=0,
            counts={"growths": 5, "allocation_misses": 0, "held_steps": None},
            spreads={"grow_latency_s": {"p50": 0.001, "p99": 0.002, "count": 5}},
            peak_held_bytes=1 << 21,
        )
    return RunOutcome(
        policy=policy,
        repeat=repeat,
        scenario="alternating",
        engine="vllm",
        started_s=100.0,
        instances=[
            InstanceOutcome(
                name=f"{policy}-{letter}",
                answered=[answered(0, 100.0), answered(1, 100.0 + slowness, error=error)],
                levels=[
                    Level(at_s=100.0, held_bytes=1 << 20, running=1, waiting=3),
                    Level(at_s=101.0, held_bytes=1 << 21, running=1, waiting=0),
                ],
                counted=counted,
            )
            for letter, error in (("a", ""), ("b", "ValueError: too long"))
        ],
    )


def files(path: Path, *, append: bool = False, seed: int = 3) -> ResultFiles:
    return ResultFiles(path, seed=seed, workload=SETUP.workload(), append=append, tree="1f0e")


def test_schema_is_the_contract(tmp_path: Path) -> None:
    made = files(tmp_path / "r.json")
    made.add(outcome("static", 0))
    written: dict[str, Any] = msgspec.json.decode((tmp_path / "r.json").read_bytes())
    assert list(written) == [
        "schema",
        "commit",
        "seed",
        "hardware",
        "versions",
        "workload",
        "runs",
    ]
    assert written["schema"] == "kvadmit.contention/1"
    run = written["runs"][0]
    assert list(run) == [
        "policy",
        "repeat",
        "scenario",
        "engine",
        "elapsed_s",
        "output_tokens_per_s",
        "instances",
    ]
    assert list(run["instances"][0]) == INSTANCE_KEYS


def test_figures_of_one_run() -> None:
    entry = run_entry(outcome("static", 0))
    assert entry["elapsed_s"] == pytest.approx(2.5)
    assert entry["output_tokens_per_s"] == pytest.approx(33 / 2.5)
    good, bad = entry["instances"]
    assert (good["completed"], good["failed"]) == (2, 0)
    assert (bad["completed"], bad["failed"]) == (1, 1)
    assert good["output_tokens_per_s"] == pytest.approx(22 / 2.5)
    assert good["ttft_s"]["p99"] == pytest.approx(0.5)
    assert good["tpot_s"]["mean"] == pytest.approx(0.1)


def test_what_does_not_apply_is_null_never_zero() -> None:
    static = run_entry(outcome("static", 0))["instances"][0]
    for key in INSTANCE_KEYS[8:19]:
        assert static[key] is None
    assert static["engine_core_device_bytes"] is None
    event = run_entry(outcome("event", 0))["instances"][0]
    assert (event["allocation_misses"], event["held_steps"]) == (0, None)
    assert event["grow_latency_s"] == {"p50": 0.001, "p99": 0.002}
    assert event["scheduler_wait_us"] is None


def test_probes_are_kept_out_of_everything_but_their_own_figure() -> None:
    plain = outcome("static", 0)
    probe = msgspec.structs.replace(answered(9, 150.0, tokens=5), probe=True)
    probed = msgspec.structs.replace(
        plain.instances[0], answered=[*plain.instances[0].answered, probe]
    )
    run = run_entry(msgspec.structs.replace(plain, instances=[probed, plain.instances[1]]))
    expected = run_entry(plain)
    assert run["instances"][0].pop("probe_tpot_s")["mean"] == pytest.approx(0.25)
    assert run == expected


def test_an_instance_without_answers_has_no_figures() -> None:
    nothing = InstanceOutcome(name="x", answered=[], levels=[], counted=Counted())
    run = run_entry(msgspec.structs.replace(outcome("static", 0), instances=[nothing]))
    assert run["elapsed_s"] is None
    assert run["instances"][0]["ttft_s"]["mean"] is None


def test_append_keeps_runs_and_says_which_are_done(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    first = files(path)
    first.add(outcome("static", 0))
    again = files(path, append=True)
    assert again.done("vllm") == {("static", 0, "alternating")}
    assert again.done("sim") == set()
    again.add(outcome("event", 0))
    written: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    samples: dict[str, Any] = msgspec.json.decode((tmp_path / "r.samples.json").read_bytes())
    assert [run["policy"] for run in written["runs"]] == ["static", "event"]
    assert [run["policy"] for run in samples["runs"]] == ["static", "event"]


def test_without_append_a_file_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    files(path).add(outcome("static", 0))
    fresh = files(path)
    fresh.add(outcome("event", 0))
    assert [run["policy"] for run in msgspec.json.decode(path.read_bytes())["runs"]] == ["event"]


def test_append_refuses_another_seed_or_workload(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    files(path).add(outcome("static", 0))
    with pytest.raises(StaleResultError, match="seed was 3, is 4"):
        files(path, append=True, seed=4)
    other = msgspec.structs.replace(SETUP, pool_bytes=1 << 26)
    with pytest.raises(StaleResultError, match=r"workload\.pool_bytes was 33554432, is 67108864"):
        ResultFiles(path, seed=3, workload=other.workload(), append=True, tree="1f0e")


def test_append_refuses_another_commit_or_machine(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    files(path).add(outcome("static", 0))
    with pytest.raises(StaleResultError, match="commit was '1f0e', is 'abc'"):
        ResultFiles(path, seed=3, workload=SETUP.workload(), append=True, tree="abc")
    with pytest.raises(StaleResultError, match="is 1f0e-dirty, so nobody knows whether"):
        ResultFiles(path, seed=3, workload=SETUP.workload(), append=True, tree="1f0e-dirty")
    result = msgspec.json.decode(path.read_bytes())
    result["hardware"]["memory_bytes"] += 1
    path.write_bytes(msgspec.json.encode(result))
    assert files(path, append=True).done("vllm") == {("static", 0, "alternating")}
    result["hardware"]["cores"] = 512
    path.write_bytes(msgspec.json.encode(result))
    with pytest.raises(StaleResultError, match=r"hardware\.cores was 512, is"):
        files(path, append=True)


def test_scenarios_share_a_file(tmp_path: Path) -> None:
    shape = msgspec.structs.replace(SETUP.shape, scenario="symmetric")
    symmetric = msgspec.structs.replace(SETUP, shape=shape)
    assert symmetric.workload() == SETUP.workload()


def shown(made: ResultFiles) -> str:
    console = Console(width=120, file=io.StringIO())
    console.print(table.render(made.result))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_table_names_ratio_and_leaves_dashes(tmp_path: Path) -> None:
    made = files(tmp_path / "r.json")
    for repeat in range(3):
        made.add(outcome("static", repeat, slowness=2.0))
        made.add(outcome("event", repeat, slowness=1.0))
    text = shown(made)
    assert "alternating, real vLLM: 2 instances, TP 1, 2 requests each (closed), pool 32MiB" in text
    assert "1.40 x (1.40 - 1.40)" in text
    rows = {
        line.split("│")[1].strip(): line.split("│")[2:4]
        for line in text.splitlines()
        if "│" in line
    }
    assert [cell.strip() for cell in rows["growths"]] == ["-", "10"]
    assert [cell.strip() for cell in rows["preemptions"]] == ["8", "0"]
    assert "grant wait p50" not in rows  # no policy has it


def test_simulated_runs_are_labelled(tmp_path: Path) -> None:
    made = files(tmp_path / "r.json")
    made.add(msgspec.structs.replace(outcome("static", 0), engine="sim"))
    assert "SIMULATED" in shown(made)


@pytest.mark.usefixtures("fonts_loaded")
def test_plot_draws_a_panel_per_policy(tmp_path: Path) -> None:
    made = files(tmp_path / "r.json")
    made.add(outcome("static", 0))
    made.add(outcome("event", 0))
    plot.draw(tmp_path / "r.png", made.result, made.samples, "vllm", "alternating")
    picture = (tmp_path / "r.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    width = int.from_bytes(picture[16:20])
    assert width > 1000  # two columns

"""The operator's commands, without any process behind them."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvadmit import cli, doctor
from kvadmit.arbitration import Arbitration
from kvadmit.arbitration_events import PeerSent
from kvadmit.config import as_table
from kvadmit.doctor import Finding
from kvadmit.errors import PeerLostError, PeerTimeoutError
from kvadmit.messages import Geometry, Hello, Report
from kvadmit.rundir import ArbiterLock, RunDir

MIB = 1 << 20
SINCE_S = 100.0


def snapshot() -> dict[str, Any]:
    """Return what an arbiter with one member says."""
    machine = Arbitration(epoch=3, reclaim_s=5.0)
    hello = Hello(
        revision=1,
        name="alpha",
        pid=42,
        devices={"host": 64 * MIB},
        start_bytes={},
        geometry=Geometry(
            extents=64, extent_blocks=16, prefix=1, floor=2, cap=64, extent_bytes={"host": MIB}
        ),
    )
    report = Report(
        epoch=3,
        revision=1,
        allowance_seen=0,
        backed=5,
        free=2,
        cached=1,
        need=3,
        want=4,
        running=6,
        counters={"waiting": 7, "growths": 8},
    )
    machine.step(PeerSent(0.0, "peer", hello))
    machine.step(PeerSent(SINCE_S, "peer", report))
    return {**machine.snapshot(), "pid": 4711}


def test_the_table_shows_devices_and_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "time", SimpleNamespace(monotonic=lambda: SINCE_S + 12))
    text = cli.render_status(snapshot())
    lines = text.splitlines()
    assert lines[0].startswith("arbiter pid 4711, epoch 3")
    device = next(line for line in lines if line.startswith("host")).split()
    assert device[:4] == ["host", "64MiB", "64MiB", "5MiB"]
    titles = next(line for line in lines if line.startswith("INSTANCE")).split()
    row = dict(
        zip(titles, next(line for line in lines if line.startswith("alpha")).split(), strict=False)
    )
    expected = {
        "INSTANCE": "alpha",
        "PID": "42",
        "HELD": "5MiB",
        "EXTENTS": "5",
        "NEED": "3",
        "FOR": "12s",
        "WANT": "4",
        "FREE": "2",
        "CACHED": "1",
        "RUNNING": "6",
        "WAITING": "7",
        "GROWTHS": "8",
        "ORPHANS": "-",
    }
    assert expected.items() <= row.items()


@pytest.mark.parametrize(
    ("silent", "late", "reason", "shown"),
    [
        ([], False, "need", "need"),
        ([], True, "need", "late: need"),
        ([1], False, "need", "no answer from rank 1; need"),
        ([0, 1], True, "", "late: no answer from rank 0, 1"),
    ],
)
def test_the_last_column_names_ranks_that_do_not_answer(
    silent: list[int], late: bool, reason: str, shown: str
) -> None:
    host = snapshot()
    alpha = host["instances"]["alpha"]
    alpha["report"]["silent"] = silent
    alpha |= {"late": late, "reason": reason}
    (row,) = (x for x in cli.render_status(host).splitlines() if x.startswith("alpha"))
    assert row.endswith(f"  {shown}")


def test_the_table_of_an_empty_host_has_titles_only() -> None:
    text = cli.render_status(Arbitration(epoch=1, reclaim_s=5.0).snapshot())
    assert text.count("\n") == 4


def test_json_is_the_whole_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(cli, "ask_status", lambda run: snapshot())
    assert cli.main(["status", "--json", "--run-dir", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(snapshot()))


@pytest.mark.parametrize("command", ["status", "top"])
def test_an_error_is_one_line_and_code_2(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "nowhere"
    assert cli.main([command, "--run-dir", str(missing)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"kvadmit: arbiter: there is no run directory {missing}: nothing has run here\n"
    )
    assert not missing.exists(), "looking made it"


def test_a_directory_without_an_arbiter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o700)
    assert cli.main(["status", "--run-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"kvadmit: arbiter: none has run in {tmp_path}\n"
    assert list(tmp_path.iterdir()) == []


def test_top_goes_on_when_the_arbiter_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: list[Any] = [snapshot(), PeerTimeoutError("arbiter", "give its status", 5.0)]

    def ask(run: object) -> dict[str, Any]:
        if not answers:
            raise KeyboardInterrupt
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    tmp_path.chmod(0o700)
    monkeypatch.setattr(cli, "ask_status", ask)
    assert cli.main(["top", "--pause", "0", "--run-dir", str(tmp_path)]) == 0
    screens = capsys.readouterr().out.split("\x1b[H\x1b[J")[1:]
    assert ["alpha" in screens[0], "give its status" in screens[1]] == [True, True]


def test_explain_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain"]) == 0
    text = capsys.readouterr().out
    for key, takes, default, meaning in as_table():
        assert f"\n{key}\n    {meaning}\n    takes: {takes}\n    default: {default}\n" in text


def test_doctor_counts_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [Finding("sky", "ok", "blue"), Finding("sea", "warn", "rough", "wait")]
    monkeypatch.setattr(doctor, "examine", lambda run_dir: list(findings))
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out == "ok    sky: blue\nwarn  sea: rough\n      wait\n"
    findings.append(Finding("ship", "fail", "sunk"))
    assert cli.main(["doctor", "--json"]) == 1
    assert [finding["state"] for finding in json.loads(capsys.readouterr().out)] == [
        "ok",
        "warn",
        "fail",
    ]


@pytest.mark.parametrize(
    "error", [PeerTimeoutError("arbiter", "answer", 1.0), PeerLostError("arbiter", "gone")]
)
def test_doctor_never_advises_to_kill_whom_it_does_not_know(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kill -9 0` would end the shell it is typed into."""

    def silent(*_: object) -> dict[str, Any]:
        raise error

    monkeypatch.setattr(doctor, "ask_status", silent)
    run = RunDir.open(str(tmp_path / "run"))
    lock = ArbiterLock(run)
    assert lock.try_acquire()
    try:
        (held,) = (f for f in doctor.examine(str(run.path)) if f.check == "arbiter")
        assert f"pid {os.getpid()} " in held.text
        assert f"kill -9 {os.getpid()}" in held.cure
        Path(lock._file.path).unlink()
        (unknown,) = (f for f in doctor.examine(str(run.path)) if f.check == "arbiter")
        assert unknown.text.startswith("an arbiter whose pid is not known")
        assert "kill" not in unknown.cure
    finally:
        lock.release()


@pytest.mark.parametrize(
    ("foreign", "state"), [(0, "ok"), (6 * MIB, "ok"), (7 * MIB, "warn"), (40 * MIB, "warn")]
)
def test_doctor_names_devices_of_which_others_hold_much(
    foreign: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of 64 MiB is where it begins."""
    tmp_path.chmod(0o700)
    books = snapshot()
    books["devices"]["g1"] = books["devices"]["host"] | {"foreign_bytes": foreign}
    monkeypatch.setattr(doctor, "ask_status", lambda *_: books)
    (found,) = (f for f in doctor.examine(str(tmp_path)) if f.check == "foreign memory")
    assert found.state == state
    shown = f"g1 has {foreign // MIB}MiB of 64MiB in use that no instance here claims"
    assert (shown in found.text) == (state == "warn")
    assert ("another group of instances" in found.text) == (state == "warn")
    assert "host" not in found.text
    assert ("kvadmit.run_dir" in found.cure) == (state == "warn")


def test_doctor_looks_at_a_host_where_nothing_ran(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    found = {finding.check: finding for finding in doctor.examine(str(missing))}
    assert found["memory files"].state == "ok"
    assert "does not exist yet" in found["run directory"].text
    assert not missing.exists()


def test_doctor_refuses_a_directory_others_may_enter(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    found = {finding.check: finding for finding in doctor.examine(str(tmp_path))}
    assert found["run directory"].state == "fail"
    assert "chmod 700" in found["run directory"].text
    assert "arbiter" not in found


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("0.28.1", "fail"),
        ("0.29.0", "ok"),
        ("0.33.2.post1", "ok"),
        ("0.34.0rc1", "fail"),
        ("dev", "fail"),
    ],
)
def test_doctor_knows_the_vllm_it_can_serve(
    version: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    assert doctor._vllm().state == state


def test_doctor_sees_a_plugin_that_vllm_will_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    assert doctor._entry_point().state == "fail"


def test_doctor_sees_a_plugin_that_is_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "kvadmit"
        value = "kvadmit.vllm:register"

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: (Point(),))
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvadmit")
    assert doctor._entry_point().state == "ok"
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert doctor._entry_point().state == "fail"
    assert "VLLM_PLUGINS" in doctor._entry_point().cure


def test_there_is_no_command_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err

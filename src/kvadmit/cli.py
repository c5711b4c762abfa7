"""The operator's commands: `kvadmit status`, `top`, `doctor` and `explain`.

Owns: what a person sees of a running host. Must not know: how anything is decided; it only
asks the arbiter for its snapshot and looks at files. Changes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvadmit import __version__, doctor
from kvadmit.config import as_table, default_run_dir
from kvadmit.errors import KvAdmitError, PeerLostError
from kvadmit.rendezvous import ask_status
from kvadmit.rundir import ArbiterLock, RunDir
from kvadmit.units import format_bytes

TOP_PAUSE_S = 1.0
_CLEAR = "\x1b[H\x1b[J"
_COUNTERS = ("growths", "allocation_misses", "headroom_rejections", "orphans", "resends")
"""Counters of an instance worth a column; `--json` has them all."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0 well, 1 a check failed, 2 it cannot be done."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except KvAdmitError as error:
        print(f"kvadmit: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of a pipe has seen enough; what is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvadmit", description="Look at the vLLM instances that share memory on this host."
    )
    parser.add_argument("--version", action="version", version=f"kvadmit {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    status = _add(commands, "status", _status, "show devices and instances once")
    top = _add(commands, "top", _top, "show them again and again")
    top.add_argument("--pause", type=float, default=TOP_PAUSE_S, help="seconds between two looks")
    check = _add(commands, "doctor", _doctor, "check that kvadmit can run here")
    for command in (status, top, check):
        command.add_argument("--run-dir", default=None, help="default: as in the settings")
    for command in (status, check):
        command.add_argument("--json", action="store_true", help="machine-readable output")
    _add(commands, "explain", _explain, "list every setting, its default and what it means")
    return parser


def _add(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(command=run)
    return command


def _open(options: argparse.Namespace) -> RunDir:
    path = options.run_dir or default_run_dir()
    run = RunDir.locate(path)
    if os.path.lexists(run.path):
        return RunDir.open(path)
    # Opening would make it.
    if ArbiterLock(run).is_taken():
        raise PeerLostError("arbiter", f"its run directory {path} is not here: see kvadmit doctor")
    raise PeerLostError("arbiter", f"there is no run directory {path}: nothing has run here")


# --- status and top --------------------------------------------------------------------------


def _status(options: argparse.Namespace) -> int:
    snapshot = ask_status(_open(options))
    print(json.dumps(snapshot, indent=2) if options.json else render_status(snapshot))
    return 0


def _top(options: argparse.Namespace) -> int:
    run = _open(options)
    while True:
        try:
            text = render_status(ask_status(run))
        except KvAdmitError as error:
            text = f"kvadmit: {error}"  # an arbiter that ends is replaced: look again
        print(f"{_CLEAR}{time.strftime('%H:%M:%S')}  {text}", flush=True)
        time.sleep(options.pause)


def render_status(snapshot: Mapping[str, Any]) -> str:
    """Return the arbiter's snapshot as two tables for people."""
    devices = [("DEVICE", "TOTAL", "CAPACITY", "HELD", "BOOKED", "FOREIGN", "STATE")]
    for name, device in sorted(snapshot["devices"].items()):
        sizes = ("total_bytes", "capacity_bytes", "held_bytes", "booked_bytes", "foreign_bytes")
        state = "refusing" if device["capped"] else "ok"
        devices.append((name, *(format_bytes(max(0, device[size])) for size in sizes), state))
    head = f"arbiter pid {snapshot.get('pid', '?')}, epoch {snapshot['epoch']}"
    if snapshot["waiting"]:
        head += f"; waiting, first in order first: {', '.join(snapshot['waiting'])}"
    return "\n\n".join((head, _table(devices), _table(_instance_rows(snapshot["instances"]))))


def _instance_rows(instances: Mapping[str, Any]) -> list[tuple[str, ...]]:
    figures = ("want", "free", "cached", "running")
    first = ("INSTANCE", "PID", "HELD", "EXTENTS", "ALLOWED", "NEED", "FOR")
    titles = (*first, *map(str.upper, figures))
    rows = [(*titles, "WAITING", *(name.upper() for name in _COUNTERS), "REASON")]
    for name, instance in sorted(instances.items()):
        report = instance["report"]
        counters = report["counters"]
        held = sum(instance["held_bytes"].values())
        rows.append(
            (
                name,
                str(instance["pid"]),
                format_bytes(held),
                str(instance["held_extents"]),
                str(instance["allowance_extents"]),
                str(report["need"]),
                _age(instance["needs_since_s"]),
                *(str(report[figure]) for figure in figures),
                str(counters.get("waiting", "-")),
                *(str(counters.get(counter, "-")) for counter in _COUNTERS),
                _reason(instance),
            )
        )
    return rows


def _reason(instance: Mapping[str, Any]) -> str:
    """Return why an instance has what it has, and which of its ranks do not answer."""
    silent = instance["report"]["silent"]
    ranks = f"no answer from rank {', '.join(map(str, silent))}" if silent else ""
    late = "late: " if instance["late"] else ""
    return late + "; ".join(filter(None, (ranks, instance["reason"])))


def _age(since_s: float | None) -> str:
    """Return how long ago a moment of this host's monotonic clock was."""
    return "-" if since_s is None else f"{time.monotonic() - since_s:.0f}s"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, figures to the right, the last as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *middle, last = row
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join((*cells, last)).rstrip())
    return "\n".join(lines)


# --- doctor and explain ----------------------------------------------------------------------


def _doctor(options: argparse.Namespace) -> int:
    findings = doctor.examine(options.run_dir or default_run_dir())
    if options.json:
        print(json.dumps([finding.as_mapping() for finding in findings], indent=2))
    else:
        print(render_findings(findings))
    return 1 if any(finding.state == "fail" for finding in findings) else 0


def render_findings(findings: Iterable[doctor.Finding]) -> str:
    """Return one line per finding, worst ones with their cure."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<5} {finding.check}: {finding.text}")
        if finding.cure:
            lines.append(f"      {finding.cure}")
    return "\n".join(lines)


def _explain(options: argparse.Namespace) -> int:
    print('Settings go under "kvadmit" in --additional-config; the only required one is enable.\n')
    for key, takes, default, meaning in as_table():
        print(f"{key}\n    {meaning}\n    takes: {takes}\n    default: {default}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

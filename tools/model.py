"""Search small hosts to the end: every order of messages, and what may go wrong in between.

    python tools/model.py [--states N] [--jobs N] [--json FILE]

The hosts are those of `kvadmit.testing.exhaustive`: the production machines with two instances of
two ranks and three extents each (one rank where the name says so). Every state keeps the
invariants, and nobody waits for ever. Exits 1 if a rule is broken (the moves that lead to it are
printed) or a search did not reach its end. A long search says on stderr how far it is.

Owns: which hosts are searched, and the report. Must not know: how a search goes.
"""

from __future__ import annotations

import argparse
import concurrent.futures as futures
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.colocated.result import commit, hardware, versions

from kvadmit.testing.exhaustive import Budget, Found, Model, search

GROWTH = ((0, 1),)
CONTENTION = ((0, 1), (1, 1), (0, 0))
"""The second needs what the first took, and gets it once the first is done."""
MODELS = {
    "everything at once": Model(script=GROWTH, budget=Budget(losses=2, repeats=1, crashes=1)),
    "one growth": Model(script=GROWTH),
    "one growth of two extents": Model(script=((0, 2),)),
    "a message lost": Model(script=GROWTH, budget=Budget(losses=1)),
    "two messages lost": Model(script=GROWTH, budget=Budget(losses=2)),
    "a message repeated": Model(script=GROWTH, budget=Budget(repeats=1)),
    "one lost, one repeated": Model(script=GROWTH, budget=Budget(losses=1, repeats=1)),
    "an instance dies": Model(script=GROWTH, budget=Budget(crashes=1)),
    "one lost, an instance dies": Model(script=GROWTH, budget=Budget(losses=1, crashes=1)),
    "growth and shrink": Model(script=((0, 1), (0, 0))),
    "contention": Model(capacity=3, script=CONTENTION),
    "contention, one lost": Model(capacity=3, script=CONTENTION, budget=Budget(losses=1)),
    "memory of the dead": Model(capacity=3, script=((1, 2),), budget=Budget(crashes=1)),
    "the same of one rank, one lost": Model(
        devices=1, capacity=3, script=((1, 2),), budget=Budget(losses=1, crashes=1)
    ),
}
"""The longest first: it sets how long all take together."""
STATES_MAX = 4_000_000


def main() -> int:
    """Search, print a table, write the report; returns the exit status."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--states", type=int, default=STATES_MAX, help="most states of one search")
    made.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--json", type=Path, default=None, metavar="FILE")
    options = made.parse_args()
    rows = []
    with futures.ProcessPoolExecutor(options.jobs) as pool:
        tasks = {pool.submit(searched, name, options.states): name for name in MODELS}
        for task in futures.as_completed(tasks):
            rows.append(task.result())
            show(rows[-1])
    report = {
        "schema": "kvadmit.model/1",
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "states": sum(row["states"] for row in rows),
        "moves": sum(row["moves"] for row in rows),
        "violations": sum(len(row["broken"]) for row in rows),
        "deadlocks": sum(row["deadlocks"] for row in rows),
        "complete": all(row["complete"] for row in rows),
        "models": sorted(rows, key=lambda row: list(MODELS).index(row["name"])),
    }
    print(
        f"{report['states']:,} states, {report['moves']:,} moves, {report['violations']} "
        f"violations, {report['deadlocks']} deadlocks"
    )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["complete"] and not report["violations"] else 1


def searched(name: str, states_max: int) -> dict[str, Any]:
    """Search one model; returns what was found as plain data."""
    began_s = time.monotonic()
    model = MODELS[name]

    def progress(so_far: Found, frontier: int) -> None:
        rate = so_far.states / (time.monotonic() - began_s)
        print(
            f"  {name}: {so_far.states:,} states, {frontier:,} not yet left, {rate:,.0f} states/s",
            file=sys.stderr,
            flush=True,
        )

    found = search(model, states_max, progress)
    return {
        "name": name,
        "script": model.script,
        "devices": model.devices,
        "capacity": model.capacity,
        "budget": msgspec.to_builtins(model.budget),
        **msgspec.to_builtins(found),
        "seconds": round(time.monotonic() - began_s, 1),
    }


def show(row: dict[str, Any]) -> None:
    """Print one line for a search, and the shortest way to what broke."""
    end = "to the end" if row["complete"] else "NOT to the end"
    print(
        f"{row['name']:31}{row['states']:>10,} states{row['moves']:>12,} moves, "
        f"{row['budget']['losses']} lost, {row['budget']['repeats']} repeated, "
        f"{row['budget']['crashes']} dead: {end}, "
        f"{len(row['broken'])} broken, {row['deadlocks']} deadlocks, {row['seconds']} s",
        flush=True,
    )
    if row["broken"]:
        rule, way = min(row["broken"], key=lambda one: len(one[1]))
        print(f"  {rule}\n  " + "; ".join(way))


if __name__ == "__main__":
    sys.exit(main())

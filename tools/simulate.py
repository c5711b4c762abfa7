"""Play simulated hosts from seeds, on every core, until enough has happened; report violations.

    python tools/simulate.py [--events 10000000] [--first SEED] [--jobs N] [--json FILE]
    python tools/simulate.py --seed SEED      # replay one

The worlds are those of `kvadmit.testing.worlds`: production machines, links that drop, delay,
duplicate, reorder and are cut, processes that crash and freeze, drivers that fail, memory taken by
others. Every machine checks itself after every event; in the end everyone must be served.
Exits 1 if a seed breaks a rule, and prints the line that replays it.

Owns: which seeds, on how many processes, and the report. Must not know: what a world is.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.colocated.result import commit, hardware, versions

from kvadmit.testing.worlds import faults_of, play

CHUNK = 25
"""Seeds of one task: short enough for progress, long enough to be worth a message."""
BROKEN_MAX = 20
"""So many broken seeds are enough to look at."""
FIRST = 100_000
"""`make test` plays the seeds from 0; others are played here."""


def main() -> int:
    """Play, print, write the report; returns the exit status."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--events", type=int, default=10_000_000, help="at least so many")
    made.add_argument("--first", type=int, default=FIRST, help="the first seed")
    made.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--json", type=Path, default=None, metavar="FILE")
    made.add_argument("--seed", type=int, default=None, help="replay this one and stop")
    options = made.parse_args()
    if options.seed is not None:
        return replay(options.seed)
    began_s = time.monotonic()
    seeds, events, broken = play_all(options.first, options.events, options.jobs)
    took_s = time.monotonic() - began_s
    report = {
        "schema": "kvadmit.simulation/1",
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "first_seed": options.first,
        "seeds": seeds,
        "events": events,
        "violations": len(broken),
        "broken": broken,
        "events_per_s": round(events / took_s),
    }
    print(
        f"{seeds:,} seeds, {events:,} events, {len(broken)} violations, "
        f"{report['events_per_s']:,} events/s on {options.jobs} processes"
    )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if broken else 0


def replay(seed: int) -> int:
    """Play one seed and say how it ended; what it raises is shown whole."""
    print(f"seed {seed}: {faults_of(seed)}")
    world = play(seed)
    print(f"{world.events:,} events in {world.now_s:.1f} simulated seconds: everyone was served")
    return 0


def play_chunk(first: int) -> tuple[int, list[dict[str, Any]]]:
    """Return the events of `CHUNK` seeds, and what broke: seed, rule, replay."""
    events, broken = 0, []
    for seed in range(first, first + CHUNK):
        try:
            events += play(seed).events
        except Exception as error:  # whatever a seed raises is a finding
            line = f"python tools/simulate.py --seed {seed}"
            broken.append({"seed": seed, "rule": f"{type(error).__name__}: {error}", "line": line})
    return events, broken


def play_all(first: int, events_wanted: int, jobs: int) -> tuple[int, int, list[dict[str, Any]]]:
    """Return seeds played, events, and what broke."""
    seeds = events = 0
    broken: list[dict[str, Any]] = []
    shown_s = time.monotonic()
    with futures.ProcessPoolExecutor(jobs) as pool:
        waiting = {pool.submit(play_chunk, first + CHUNK * n) for n in range(2 * jobs)}
        begun = len(waiting)
        while waiting:
            done, waiting = futures.wait(waiting, return_when=futures.FIRST_COMPLETED)
            for task in done:
                happened, found = task.result()
                seeds, events = seeds + CHUNK, events + happened
                for one in found:
                    print(f"BROKEN {one['rule']}\n  {one['line']}", flush=True)
                broken += found
                if events < events_wanted and len(broken) < BROKEN_MAX:
                    waiting.add(pool.submit(play_chunk, first + CHUNK * begun))
                    begun += 1
            if time.monotonic() - shown_s > 5:
                shown_s = time.monotonic()
                print(f"{events:,} of {events_wanted:,} events", flush=True)
    return seeds, events, broken


if __name__ == "__main__":
    sys.exit(main())

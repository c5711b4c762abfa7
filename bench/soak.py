#!/usr/bin/env python3
"""Keep instances under load, kill processes at random, and see what is lost and what is left.

    python bench/soak.py --minutes 30 [--instances 2] [--seed N] [--json FILE] [--plot FILE]
    python bench/soak.py --minutes 1 --engine sim       # a stand-in for the model

Bursts of requests go to every instance all the time, a quarter of them with tokens that are known
from stock vLLM. Meanwhile one process after another gets SIGKILL (a front end, an engine core, a
worker, the arbiter) or is stopped for a while; a struck instance is started again beside others.
After a kill the arbiter's status is looked at every 50 ms, until another arbiter has all reports
or the memory can be granted. Every few minutes the load pauses, and books, files, descriptors and
bytes are looked at. Exits 1 unless nothing was lost but what was under way in a killed instance,
and nothing is left over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench.colocated import leftovers, soak_plot
from bench.colocated.arguments import minutes, positive, size
from bench.colocated.channel import Outcome, Submit
from bench.colocated.fleet import Instance, InstanceError
from bench.colocated.policies import launches
from bench.colocated.result import commit, hardware, versions
from bench.colocated.setup import Setup
from bench.colocated.siege import LOOK_S, Siege
from bench.colocated.tenant import Fixtures, Tally, Tenant
from bench.colocated.workload import Request, Shape, draw_length
from bench.contention import OUT, TINY_MODEL
from kvadmit.testing.tiny_model import make_model
from kvadmit.units import MIB

LENGTHS = {"prompt": (48, 192), "output": (48, 160)}
MAX_MODEL_LEN = 384
FIXTURES = 24
ANSWERS_S = 240.0
SCHEMA = "kvadmit.soak/1"


def main(argv: list[str] | None = None) -> int:
    """Soak, print a table, write report and picture; returns the exit status."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--minutes", type=minutes, default=30.0)
    made.add_argument("--instances", type=positive, default=2)
    made.add_argument("--tp", type=positive, default=1, help="ranks of each instance")
    made.add_argument("--pool", type=size, default=16 * MIB, help="KV memory of them all")
    made.add_argument("--engine", choices=("vllm", "sim"), default="vllm")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path, default=OUT / "soak.json", metavar="FILE")
    made.add_argument("--plot", type=Path, default=None, metavar="FILE", help="left out: beside it")
    made.add_argument("--commit", default=None, help="the tree's commit, where git is not at hand")
    options = made.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 110)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        report = asyncio.run(soak(options, console))
    except InstanceError as error:
        console.print(f"soak: {error}", style="red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; nothing was written")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    show(report, console)
    console.print(f"{options.json}", highlight=False)
    picture = options.plot or options.json.with_suffix(".png")
    soak_plot.draw(picture, report)
    console.print(f"{picture}", highlight=False)
    return 0 if is_clean(report) else 1


def is_clean(report: dict[str, Any]) -> bool:
    """Whether something was done, and nothing was lost, differs or is left."""
    zero = (
        "failed_outside_victims",
        "differing_tokens",
        "leaked_bytes",
        "leaked_fds",
        "leaked_files",
        "leaked_processes",
    )
    something = ("kills", "requests", "fixtures")
    return (
        bool(report["books_equal"])
        and not any(report[name] for name in zero)
        and all(report[name] for name in something)
    )


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report in lines for people."""
    told = (
        ("minutes", f"{report['minutes']:.1f}"),
        ("kills", f"{report['kills']} ({in_words(report['killed'])})"),
        ("stopped and let go on", in_words(report["stopped"])),
        ("requests completed", f"{report['requests']:,}"),
        ("lost with a killed instance", f"{report['lost_with_victims']:,}"),
        ("failed outside", f"{report['failed_outside_victims']}"),
        ("with known tokens / differing", f"{report['fixtures']:,} / {report['differing_tokens']}"),
        ("longest silence of a neighbour", f"{report['longest_silence_s']:.2f} s"),
        ("killed to back, median / worst", ""),
        ("  an arbiter with all reports", as_times(report["arbiter_back_s"])),
        *(
            (f"  memory, by {role}", as_times(times))
            for role, times in report["memory_back_s"].items()
        ),
        ("left: bytes", f"{report['leaked_bytes']}"),
        ("left: descriptors", f"{report['leaked_fds']}"),
        ("left: files", f"{report['leaked_files']} (and {report['engine_files']} of vLLM's own)"),
        ("left: processes", f"{report['leaked_processes']}"),
        ("books equal the reports", f"{report['books_equal']} ({report['rounds']} times looked)"),
    )
    for name, value in told:
        console.print(f"{name:34}{value}", highlight=False)
    for reason in report["reasons"]:
        console.print(f"  {reason}", style="red", markup=False, highlight=False)


def in_words(counts: dict[str, int]) -> str:
    """Return counts by role in words."""
    return ", ".join(f"{count} x {role}" for role, count in counts.items()) or "none"


def as_times(found: dict[str, Any] | None) -> str:
    """Return median and worst in words."""
    return f"{found['median']:.2f} / {found['worst']:.2f} s" if found else "nobody was killed"


async def soak(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Return the report. Raises InstanceError when an instance does not start again."""
    dice = random.Random(options.seed)
    shape = Shape(
        scenario="symmetric",
        instances=options.instances,
        requests=1,
        prompt_tokens=LENGTHS["prompt"],
        output_tokens=LENGTHS["output"],
    )
    setup = Setup(
        shape=shape,
        engine=options.engine,
        tp=options.tp,
        pool_bytes=options.pool,
        model=str(make_model(OUT / "tiny-model", TINY_MODEL)),
        seed=options.seed,
        max_model_len=MAX_MODEL_LEN,
        sample_s=LOOK_S,
    )
    logs = OUT / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    shared = leftovers.shared_files()
    # Short, because sockets live in it; private, because kvadmit insists.
    directory = Path(tempfile.mkdtemp(prefix="kvs-"))
    # vLLM's own sockets, which a killed process leaves, are kept apart from ours.
    site = {"VLLM_RPC_BASE_PATH": str(directory / "v"), "TMPDIR": str(directory / "v")}
    (directory / "v").mkdir()
    run_dir = directory / "run"
    run_dir.mkdir(mode=0o700)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[done]}"),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=console, expand=True) as progress:
            task = progress.add_task("stock vLLM answers the fixtures", total=1.0, done="")

            def tell(text: str, part: float) -> None:
                progress.update(task, description=text, completed=part, done=f"{part:.0%}")
                if not console.is_terminal:
                    console.print(text)

            requests = tuple(
                Request(
                    number,
                    0.0,
                    draw_length(dice, *LENGTHS["prompt"]),
                    draw_length(dice, *LENGTHS["output"]),
                    dice.getrandbits(32),
                )
                for number in range(FIXTURES)
            )
            stock = launches(setup, "static", str(run_dir), site)[0]
            digests = await answers(Instance(stock, logs / "soak-stock.log"), requests)
            fixtures = Fixtures(requests, digests)
            tally = Tally()
            tenants = [
                Tenant(
                    launch,
                    logs / f"soak-{launch.spec.name}.log",
                    lengths=LENGTHS,
                    fixtures=fixtures,
                    tally=tally,
                    dice=random.Random(dice.getrandbits(32)),
                )
                for launch in launches(setup, "event", str(run_dir), site)
            ]
            tell(f"starting {len(tenants)} instances", 0.0)
            siege = Siege(tenants, run_dir, setup, tally, dice, tell)
            report = await siege.play(options.minutes * 60)
        left = leftovers.shared_files() - shared
        theirs = list((directory / "v").iterdir())
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {
        "schema": SCHEMA,
        "commit": options.commit or commit(),
        "hardware": hardware(),
        "versions": versions(),
        "engine": options.engine,
        "seed": options.seed,
        "instances": options.instances,
        "tp": options.tp,
        "pool_bytes": options.pool,
        **report,
        "engine_files": len(left) + len(theirs),
    }


async def answers(instance: Instance, requests: tuple[Request, ...]) -> tuple[str, ...]:
    """Return the digest of each request's tokens, all asked at once of a fresh `instance`."""
    await instance.start()
    try:
        instance.tell(Submit(requests=requests))
        found: dict[int, str] = {}
        while len(found) < len(requests):
            report = await instance.hear(ANSWERS_S)
            if not isinstance(report, Outcome) or report.answered.error:
                raise instance.error(f"said {report}")
            found[report.answered.index] = report.answered.digest
        return tuple(found[number] for number in range(len(requests)))
    finally:
        await instance.stop()


if __name__ == "__main__":
    sys.exit(main())

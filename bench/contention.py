#!/usr/bin/env python3
"""Several vLLM instances on one machine, one KV memory pool: what is sharing it worth.

Runs the same seeded requests under one or more policies, interleaved, and ends with a table,
a JSON file (schema `kvadmit.contention/1`) and a picture:

    python bench/contention.py --demo
    python bench/contention.py --policy static event --scenario symmetric --repeats 3
    python bench/contention.py --engine sim --tp 4 --requests 390
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a file

from rich.console import Console

from bench.colocated import plot, table
from bench.colocated.arguments import bounds, positive, size
from bench.colocated.fleet import InstanceError
from bench.colocated.policies import POLICIES
from bench.colocated.result import ResultFiles, StaleResultError
from bench.colocated.session import run_all
from bench.colocated.setup import BLOCK_TOKENS, Setup
from bench.colocated.workload import Shape
from kvadmit.testing.tiny_model import TinyModel, make_model
from kvadmit.units import MIB, align_up

OUT = Path(__file__).resolve().parent / "out"
DEMO = {"policy": ["static", "sync", "event"], "repeats": 2}
"""What `make demo` runs: real vLLM, and everything else by default."""

TINY_MODEL = TinyModel(layers=16, hidden=64, heads=2, kv_heads=2, head_dim=32)
"""Many thin layers: a step costs much the same for few requests and for many, as on a GPU."""


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--demo", action="store_true", help="static, sync and event on real vLLM, two repeats")
    add(
        "--scenario",
        choices=("alternating", "symmetric"),
        default="alternating",
        help="bursts that take turns between instances, or all instances pressed at once",
    )
    add(
        "--policy",
        nargs="+",
        choices=POLICIES,
        default=["static", "event"],
        metavar="POLICY",
        help=f"one or more of {', '.join(POLICIES)}; ratios are over the first",
    )
    add(
        "--engine",
        choices=("vllm", "sim"),
        default="vllm",
        help="real vLLM, or the same control plane around a timed stand-in for the model",
    )
    add("--instances", type=positive, default=2)
    add("--tp", type=positive, default=1, help="ranks of each instance")
    add("--requests", type=positive, default=120, help="requests per instance")
    add(
        "--rate",
        type=float,
        default=None,
        help="requests/s that arrive at a pressed instance; left out: closed loop",
    )
    add("--pool", type=size, default=16 * MIB, help="KV memory of them all")
    add("--model", default=None, help="model directory; left out: a tiny one made on the spot")
    add("--seed", type=int, default=0)
    add("--repeats", type=positive, default=1, help="interleaved: A-B-B-A")
    add(
        "--worker-delay-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="every worker answers growth orders this much later (sync and event)",
    )
    add(
        "--probes",
        type=int,
        default=0,
        help="clients per instance that send one-block requests, which need no growth",
    )
    add("--bursts", type=positive, default=3, help="bursts per instance (alternating)")
    add(
        "--handover",
        type=float,
        default=1.0,
        metavar="FRACTION",
        help="how much of a burst is answered before the next begins (closed loop)",
    )
    add("--prompt-tokens", type=bounds, default=(64, 192), metavar="LOW:HIGH")
    add("--output-tokens", type=bounds, default=(96, 192), metavar="LOW:HIGH")
    add("--json", type=Path, default=OUT / "contention.json", metavar="FILE")
    add(
        "--append",
        action="store_true",
        help="keep the runs that FILE already has and make only the missing ones",
    )
    add("--plot", type=Path, default=OUT / "contention.png", metavar="FILE")
    add("--commit", default=None, help="the tree's commit, where git is not at hand")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return made


def setup_of(arguments: argparse.Namespace) -> Setup:
    """Return the bench that the command line asks for; makes the tiny model if it is needed."""
    shape = Shape(
        scenario=arguments.scenario,
        instances=arguments.instances,
        requests=arguments.requests,
        rate=arguments.rate,
        bursts=arguments.bursts,
        handover=arguments.handover,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
    )
    longest = shape.prompt_tokens[1] + shape.output_tokens[1]
    model = arguments.model
    if model is None:
        model = str(make_model(OUT / "tiny-model", TINY_MODEL))
    return Setup(
        shape=shape,
        engine=arguments.engine,
        tp=arguments.tp,
        pool_bytes=arguments.pool,
        model=model,
        seed=arguments.seed,
        worker_delay_ms=arguments.worker_delay_ms,
        probes=arguments.probes,
        max_model_len=align_up(longest, BLOCK_TOKENS),
    )


def main(argv: list[str] | None = None) -> int:
    """Run the bench; return the exit status."""
    asked = parser()
    arguments = asked.parse_args(argv)
    if arguments.demo:
        asked.set_defaults(**DEMO)
        arguments = asked.parse_args(argv)
    if arguments.device == "cuda":
        asked.error("--device cuda comes with the GPU release; this one runs on the CPU")
    setup = setup_of(arguments)
    console = Console(width=None if sys.stdout.isatty() else 110)
    try:
        files = ResultFiles(
            arguments.json,
            seed=setup.seed,
            workload=setup.workload(),
            append=arguments.append,
            tree=arguments.commit,
        )
        asyncio.run(run_all(setup, arguments.policy, arguments.repeats, files, console, OUT))
    except (InstanceError, StaleResultError) as error:
        console.print(f"contention: {error}", style="red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print(f"stopped; finished runs are in {arguments.json}, --append goes on")
        return 130
    plot.draw(arguments.plot, files.result, files.samples, setup.engine, setup.shape.scenario)
    console.print(table.render(files.result))
    console.print(f"{arguments.json}\n{arguments.plot}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

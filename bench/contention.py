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
import contextlib
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a file

import msgspec
from rich.console import Console

from bench.colocated import gpus, models, plot, table
from bench.colocated.arguments import bounds, minutes, not_negative, positive, size
from bench.colocated.fleet import InstanceError
from bench.colocated.gpus import GpuError, GpuHost
from bench.colocated.policies import MARGIN_BYTES, ON_GPUS, POLICIES
from bench.colocated.result import ResultFiles, StaleResultError, versions
from bench.colocated.session import Plan, run_all
from bench.colocated.setup import BLOCK_TOKENS, Setup
from bench.colocated.workload import Shape
from kvadmit.testing.tiny_model import TinyModel, make_model
from kvadmit.units import GIB, MIB, align_up, format_bytes

OUT = Path(__file__).resolve().parent / "out"
DEMO = {"policy": ["static", "sync", "event"], "repeats": 2}
"""What `make demo` runs: real vLLM, and everything else by default."""

TINY_MODEL = TinyModel(layers=16, hidden=64, heads=2, kv_heads=2, head_dim=32)
"""Many thin layers: a step costs much the same for few requests and for many, as on a GPU."""


GPU_BLOCK_TOKENS = 16
BASE_BYTES = 3 * GIB
"""Beside weights: what kvadmit's own default for a start is, too."""


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--demo", action="store_true", help="static, sync and event on real vLLM, two repeats")
    add(
        "--scenario",
        nargs="+",
        choices=("alternating", "symmetric"),
        default=["alternating"],
        help="bursts that take turns between instances, or all instances pressed at once, or both",
    )
    add(
        "--policy",
        nargs="+",
        choices=POLICIES,
        default=["static", "event"],
        metavar="POLICY",
        help=f"some of {', '.join(POLICIES)}; ratios are over the first of them",
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
    add("--pool", type=size, default=None, help="KV memory of them all; on the CPU 16MiB")
    add("--model", default=None, help="model directory; left out: one made on the spot")
    add("--seed", type=int, default=0)
    add("--repeats", type=positive, default=1, help="interleaved: A-B-B-A")
    add(
        "--warm-up",
        type=not_negative,
        default=32,
        metavar="N",
        help="requests per instance that are sent after a start and not counted",
    )
    add(
        "--worker-delay-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="every worker answers growth orders this much later (sync and event)",
    )
    add(
        "--probes",
        type=not_negative,
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
    add(
        "--minutes",
        type=minutes,
        default=None,
        help="begin no run after so long; --append goes on with those that are missing",
    )
    add("--plot", type=Path, default=OUT / "contention.png", metavar="FILE")
    add("--commit", default=None, help="the tree's commit, where git is not at hand")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add(
        "--leave-gib",
        type=float,
        default=None,
        metavar="N",
        help="on GPUs: let a ballast take all but N GiB of each; left out: as --pool needs",
    )
    add(
        "--together",
        action="store_true",
        help="on GPUs, with --instances 1: keep the instances of all policies there, each with "
        "memory of its own; runs that follow each other at once compare best",
    )
    add("--attention", default="", metavar="BACKEND", help="on GPUs: vLLM's attention backend")
    add(
        "--base",
        type=size,
        default=None,
        help="on GPUs: what an instance holds on each beside KV memory; left out: an estimate",
    )
    return made


def setup_of(arguments: argparse.Namespace) -> Setup:
    """Return the bench that the command line asks for; makes the model if it is needed.

    Raises GpuError when the GPUs are not there or too small.
    """
    shape = Shape(
        scenario=arguments.scenario[0],
        instances=arguments.instances,
        requests=arguments.requests,
        rate=arguments.rate,
        bursts=arguments.bursts,
        handover=arguments.handover,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
    )
    longest = shape.prompt_tokens[1] + shape.output_tokens[1]
    simulated = arguments.engine == "sim"
    on_gpus = arguments.device == "cuda" or (
        arguments.device == "auto" and not simulated and _serves_on_gpus()
    )
    if on_gpus and simulated:
        raise GpuError("--engine sim runs on the CPU: it has no model to put on a GPU")
    made = Setup(
        shape=shape,
        engine=arguments.engine,
        tp=arguments.tp,
        pool_bytes=arguments.pool or 16 * MIB,
        model=arguments.model or "",
        seed=arguments.seed,
        warm_up=arguments.warm_up,
        worker_delay_ms=arguments.worker_delay_ms,
        probes=arguments.probes,
        max_model_len=align_up(longest, BLOCK_TOKENS),
    )
    if on_gpus:
        return _on_gpus(made, arguments)
    model = arguments.model or str(make_model(OUT / "tiny-model", TINY_MODEL))
    return msgspec.structs.replace(made, model=model)


def _serves_on_gpus() -> bool:
    """Whether there are GPUs and the vLLM that is installed was built for them."""
    vllm = versions()["vllm"]
    return vllm is not None and "+cpu" not in vllm and gpus.present()


def _on_gpus(setup: Setup, arguments: argparse.Namespace) -> Setup:
    """Return `setup` for GPUs: what each instance has of them, and what the ballast leaves.

    Of what is left on a GPU every instance takes its base, MARGIN_BYTES stay free, and the
    rest is the pool; either of the two sizes says the other.
    """
    found = gpus.visible(setup.tp)
    model, base = setup.model, arguments.base
    if base is None:
        weights = models.weights_bytes(models.EIGHT_B) if not model else _weights_in(Path(model))
        base = weights // setup.tp + BASE_BYTES
    if not model:
        model = str(models.make_shape(OUT / "8b-shape", models.EIGHT_B))
    fleets = len(set(arguments.policy)) if arguments.together else 1
    if fleets > 1 and arguments.instances > 1:
        raise GpuError(
            "--together needs --instances 1: several that share would also take what is left of "
            "the memory set aside for others"
        )
    beside = fleets * setup.shape.instances * base + MARGIN_BYTES
    leave = None if arguments.leave_gib is None else int(arguments.leave_gib * GIB)
    pool = arguments.pool
    most = found[0].total_bytes if leave is None else leave
    if pool is None:
        pool = setup.tp * (most - beside) // fleets
    elif leave is None:
        most = leave = fleets * pool // setup.tp + beside
    if pool <= 0 or most > found[0].total_bytes or fleets * pool // setup.tp + beside > most:
        raise GpuError(
            f"{fleets * setup.shape.instances} instances hold {format_bytes(beside)} of each GPU "
            f"beside KV memory; {format_bytes(most)} are too little or too much "
            "with it: change --pool, --leave-gib or --base"
        )
    return msgspec.structs.replace(
        setup,
        device="cuda",
        gpus=tuple(found),
        model=model,
        pool_bytes=pool,
        leave_bytes=leave,
        base_bytes=base,
        fleets=fleets,
        attention=arguments.attention,
        block_tokens=GPU_BLOCK_TOKENS,
        max_num_seqs=256,
        sample_s=0.2,
    )


def _weights_in(model: Path) -> int:
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def main(argv: list[str] | None = None) -> int:
    """Run the bench; return the exit status."""
    asked = parser()
    arguments = asked.parse_args(argv)
    if arguments.demo:
        asked.set_defaults(**DEMO)
        arguments = asked.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 110)
    # Asked to end by whomever, it stops what it started.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        setup = setup_of(arguments)
        for policy in ON_GPUS:
            if setup.device == "cpu" and policy in arguments.policy:
                asked.error(f"--policy {policy} needs GPUs")
        files = ResultFiles(
            arguments.json,
            seed=setup.seed,
            workload=setup.workload(),
            append=arguments.append,
            tree=arguments.commit,
            devices=gpus.hardware(setup.gpus) if setup.gpus else None,
        )
        with contextlib.ExitStack() as stack:
            site: dict[str, str] = {}
            if setup.gpus:
                site = stack.enter_context(GpuHost(setup.gpus, setup.leave_bytes)).environment
            plan = Plan(
                setup=setup,
                scenarios=arguments.scenario,
                policies=arguments.policy,
                repeats=arguments.repeats,
                minutes=arguments.minutes,
                site=site,
            )
            missing = asyncio.run(run_all(plan, files, console, OUT))
    except (GpuError, InstanceError, StaleResultError) as error:
        console.print(f"contention: {error}", style="red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print(f"stopped; finished runs are in {arguments.json}, --append goes on")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    console.print(table.render(files.result))
    console.print(f"{arguments.json}", highlight=False)
    for scenario in arguments.scenario:
        path = arguments.plot
        if len(arguments.scenario) > 1:
            path = path.with_stem(f"{path.stem}-{scenario}")
        if plot.draw(path, files.result, files.samples, setup.engine, scenario):
            console.print(f"{path}", highlight=False)
    if missing:
        console.print(f"{missing} runs are missing; the same command with --append makes them")
    return 0


if __name__ == "__main__":
    sys.exit(main())

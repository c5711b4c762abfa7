#!/usr/bin/env python3
"""Write the documents' numbers from the committed results, or check that they are still those.

    python bench/readme_numbers.py           # rewrite what is between the marks
    python bench/readme_numbers.py --check   # exit 1 if it differs

README.md gets what a user looks for, docs/measurements.md every table. Both are made of
`contention-*.json`, `vmm-calls*.json` and `control-path-*.json` of `bench/results`; nothing is
printed that is not in them. GPU results are shown if they are there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a file

from bench.colocated.figures import (
    Figure,
    Json,
    by_repeat,
    mean_over_requests,
    own,
    policies_of,
    ratio,
    throughput_ratio,
    total,
    worst,
)
from bench.colocated.statistics import median, ratio_of_medians
from kvadmit.units import GIB, format_bytes

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"
ON_CPUS = (
    ("contention-alternating", "Bursts that take turns (`alternating`)"),
    ("contention-symmetric", "Both pressed all the time (`symmetric`)"),
)
ON_GPUS = (
    "contention-gpu-tp1",
    "contention-gpu-tp2",
    "contention-gpu-alone-tp1-v030",
    "contention-gpu-alone-tp1-v032",
    "contention-gpu-alone-tp2",
)
PATHS = ("control-path-host", "control-path-cuda")
DELAYS_MS = (0, 50, 500)
CALLS_BATCH = 8
"""Extents of one order in the table of driver calls."""
NOTHING = "-"
COMPARED = (
    ("output", own("output_tokens_per_s")),
    ("mean TTFT", mean_over_requests("ttft_s")),
    ("TTFT p95", worst("ttft_s", "p95")),
    ("time per token p95", worst("tpot_s", "p95")),
)
"""What is told of `event` over another policy on GPUs."""


def main() -> int:
    """Rewrite the documents, or compare; returns the exit code."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--check", action="store_true", help="change nothing, exit 1 if stale")
    check = arguments.parse_args().check
    stale = 0
    for name, numbers in (("README.md", summary()), ("docs/measurements.md", everything())):
        path = ROOT / name
        text = path.read_text()
        before, rest = text.split(BEGIN)
        _, after = rest.split(END)
        wanted = f"{before}{BEGIN}\n{numbers}{END}{after}"
        if text == wanted:
            continue
        stale = 1
        if check:
            print(f"{name} shows other numbers than bench/results; run bench/readme_numbers.py")
        else:
            path.write_text(wanted)
    return stale if check else 0


def summary() -> str:
    """Return the tables of the README, in Markdown."""
    parts = [headed(name, heading) for name, heading in ON_CPUS]
    rows = [
        "**On GPUs**, an 8B model; `event` over `static`, and over `kvcached` where that was run",
        "",
        "| instances | load | measured on | output over `static` | over `kvcached` "
        "| mean TTFT over `static` | time per token p95 over `static` "
        "| EngineCore's memory on GPUs |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for name in ON_GPUS:
        if is_there(name):
            rows += gpu_rows(load(name))
    return "\n" + "\n\n".join([*parts, "\n".join(rows), soaked()]) + "\n\n"


def soaked() -> str:
    """Return what became of the instances whose processes were killed at random."""
    found = load("soak")
    return (
        f"**{found['minutes']:.0f} minutes of kills** (`make soak`), vLLM "
        f"{found['versions']['vllm']}, {found['hardware']['cpu']}, commit {found['commit'][:12]}: "
        f"{found['kills']} processes killed, {found['requests']:,} requests answered, "
        f"{found['failed_outside_victims']} failed outside of killed instances, "
        f"{found['differing_tokens']} of {found['fixtures']:,} with known tokens differed, "
        f"{found['leaked_bytes']} bytes and {found['leaked_processes']} processes were left.\n\n"
        "![Memory of both instances, and who was killed (x) or stopped for a while (|) when]"
        "(bench/results/soak.png)"
    )


def headed(name: str, heading: str) -> str:
    """Return the table of a result on CPUs under its heading."""
    result = load(name)
    return f"**{heading}**, {described(result)}\n\n{comparison(result)}"


def gpu_rows(result: Json) -> list[str]:
    """Return the rows of a result on GPUs in the README's table: one per scenario."""
    work, hardware = result["workload"], result["hardware"]
    rows = []
    for scenario in dict.fromkeys(run["scenario"] for run in result["runs"]):
        runs = [run for run in result["runs"] if run["scenario"] == scenario]
        mine = [run for run in runs if run["policy"] == "event"]
        held = middle(mine, worst("engine_core_device_bytes"))
        output = own("output_tokens_per_s")
        cells = [
            f"{work['instances']} of TP {work['tp']}",
            "saturated" if work["instances"] == 1 else f"`{scenario}`",
            f"vLLM {result['versions']['vllm']}, {hardware['gpus']} x {hardware['gpu']}",
            str(ratio(runs, "event", "static", output) or NOTHING),
            str(ratio(runs, "event", "kvcached", output) or NOTHING),
            str(ratio(runs, "event", "static", mean_over_requests("ttft_s")) or NOTHING),
            str(ratio(runs, "event", "static", worst("tpot_s", "p95")) or NOTHING),
            NOTHING if held is None else format_bytes(int(held)),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def everything() -> str:
    """Return all tables, in Markdown."""
    simulated = ("contention-sim-tp4", "Simulated: two TP=4 instances, 390 + 390 requests")
    parts = [headed(name, heading) for name, heading in (*ON_CPUS, simulated)]
    parts.append(
        "**Workers that answer every growth order late**, and one-block requests that need no "
        f"growth beside the bursts, {described(load(delayed(DELAYS_MS[-1])))}\n\n{delays()}"
    )
    parts += [on_gpus(name) for name in ON_GPUS if is_there(name)]
    parts += [driver_calls(), start_cost()]
    parts += [control_path(name) for name in PATHS if is_there(name)]
    return "\n" + "\n\n".join(parts) + "\n\n"


def is_there(name: str) -> bool:
    """Whether a result of that name is committed."""
    return (RESULTS / f"{name}.json").exists()


def load(name: str) -> Json:
    """Return a committed result, or its samples."""
    result: Json = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def on_gpus(name: str) -> str:
    """Return the tables of a result on GPUs, one per scenario."""
    result = load(name)
    samples = load(f"{name}.samples")["runs"]
    work = result["workload"]
    parts = []
    for scenario in dict.fromkeys(run["scenario"] for run in result["runs"]):
        runs = [run for run in result["runs"] if run["scenario"] == scenario]
        one = result | {"runs": runs}
        instances = "one instance" if work["instances"] == 1 else f"{work['instances']} instances"
        parts.append(
            f"**On GPUs: {instances} of TP {work['tp']}, {work['requests']} "
            f"requests each, `{scenario}`**, {format_bytes(work['pool_bytes'])} of KV memory, "
            f"{described(one)}\n\n{comparison(one)}\n\n"
            f"{gpu_costs(runs, [run for run in samples if run['scenario'] == scenario])}"
        )
    return "\n\n".join(parts)


def gpu_costs(runs: list[Json], samples: list[Json]) -> str:
    """Return the table of what a policy costs beside throughput: a row per policy."""
    rows = [
        "| policy | time per token p95 | TTFT p95 | growths | growth p50 / p99 "
        "| device memory of one EngineCore | most held as KV cache | most of a GPU in use |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for policy in policies_of(runs):
        mine = [run for run in runs if run["policy"] == policy]
        looked = [run for run in samples if run["policy"] == policy]
        growth = [
            show(scaled(middle(mine, worst("grow_latency_s", part)), 1e3), "{:,.1f}")
            for part in ("p50", "p99")
        ]
        held = middle(mine, worst("engine_core_device_bytes"))
        cells = [
            policy,
            show(scaled(middle(mine, worst("tpot_s", "p95")), 1e3), "{:,.1f} ms"),
            show(middle(mine, worst("ttft_s", "p95")), "{:,.2f} s"),
            show(middle(mine, total("growths")), "{:,.0f}"),
            f"{' / '.join(growth)} ms" if growth[0] != NOTHING else NOTHING,
            NOTHING if held is None else format_bytes(int(held)),
            show(median(map(most_held, looked)), "{:.1f} GiB"),
            show(median(map(most_used, looked)), "{:.1f} GiB"),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    for other in ("static", "kvcached"):
        over = [
            f"{what} {found}"
            for what, figure in COMPARED
            if (found := ratio(runs, "event", other, figure)) is not None
        ]
        if over:
            rows += ["", f"`event` over `{other}`: {', '.join(over)}."]
    return "\n".join(rows)


def most_held(run: Json) -> float | None:
    """Return the most KV memory that all instances held at once, in GiB."""
    looks = zip(*(instance["levels"] for instance in run["instances"]), strict=False)
    return max((sum(level[1] for level in look) / GIB for look in looks), default=None)


def most_used(run: Json) -> float | None:
    """Return the most that was in use of any GPU, by whomever, in GiB."""
    return max((max(look[1:]) / GIB for look in run.get("devices", ())), default=None)


def described(result: Json) -> str:
    """Return where and how a result was measured, with the file that holds it."""
    runs, versions = result["runs"], result["versions"]
    counts = {sum(run["policy"] == policy for run in runs) for policy in policies_of(runs)}
    repeats = " to ".join(map(str, sorted({min(counts), max(counts)})))
    engine = "simulated engine" if runs[0]["engine"] == "sim" else f"vLLM {versions['vllm']}"
    hardware = result["hardware"]
    where = f"{hardware['cpu']}, {hardware['cores']} cores"
    if hardware["device"] == "cuda":
        where = f"{hardware['gpus']} x {hardware['gpu']}"
    return (
        f"{engine}, {where}, commit {result['commit']}, "
        f"{repeats} {'repeat' if repeats == '1' else 'interleaved repeats'}"
    )


def comparison(result: Json) -> str:
    """Return the table of one result: a row per policy."""
    runs = result["runs"]
    policies = policies_of(runs)
    rows = [
        "| policy | completed / failed | output tok/s | ratio | mean TTFT | preemptions "
        "| misses + rejections | timer probes | scheduler wait p99 | overlapped p99 |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for policy in policies:
        mine = [run for run in runs if run["policy"] == policy]
        completed = sum(total("completed")(run) or 0 for run in mine)
        failed = sum(total("failed")(run) or 0 for run in mine)
        over = throughput_ratio(runs, policy, policies[0])
        misses = middle(mine, total("allocation_misses"))
        rejections = middle(mine, total("headroom_rejections"))
        refused = None if misses is None else misses + (rejections or 0)
        cells = [
            policy,
            f"{completed:.0f} / {failed:.0f}",
            show(middle(mine, own("output_tokens_per_s")), "{:,.0f}"),
            "1" if policy == policies[0] else str(over or NOTHING),
            show(middle(mine, mean_over_requests("ttft_s")), "{:.2f} s"),
            show(middle(mine, total("preemptions")), "{:.0f}"),
            show(refused, "{:,.0f}"),
            show(middle(mine, total("timer_probes")), "{:.0f}"),
            show(middle(mine, worst("scheduler_wait_us", "p99")), "{:,.1f} us"),
            show(middle(mine, worst("scheduler_overlapped_us", "p99")), "{:,.1f} us"),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def start_cost() -> str:
    """Return what a start pays for its addresses, on each kind of memory it was measured on."""
    found = [load(name) for name in ("vmm-calls", "vmm-calls-host") if is_there(name)]
    rows = []
    for one in found:
        if "start" not in one:
            continue
        made, objects = one["start"]["reservation"], one["start"].get("block_objects")
        named = one["hardware"]
        memory = "host memory" if named["device"] == "cpu" else named["device"]
        text = (
            f"**What a start pays for addresses**, {memory}, "
            f"{named['cpu']}, commit {one['commit'][:12]}: reserving {format_bytes(made['bytes'])} "
            f"{made['made_ms']['p50']:.1f} / {made['made_ms']['p99']:.1f} ms (p50 / p99 of "
            f"{one['rounds']})"
        )
        if objects:
            text += (
                f"; vLLM's {objects['count']:,} block objects for it {objects['made_ms']:.0f} ms"
            )
        rows.append(f"{text}.")
    return "\n\n".join(rows)


def driver_calls() -> str:
    """Return the table of driver calls on a GPU: a row per layout and what runs beside."""
    found: Json = json.loads((RESULTS / "vmm-calls.json").read_text())
    named = found["hardware"]
    rows = [
        f"**Driver calls per extent of {format_bytes(found['extent_bytes'])}**, {named['device']}, "
        f"driver {named['driver']}, commit {found['commit'][:12]}, batches of {CALLS_BATCH}, "
        f"p50 / p99 of {found['rounds']} batches",
        "",
        "| layout | beside | prepare | commit | zero | decommit | kernels' rate beside it |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in found["rows"]:
        if row["batch"] != CALLS_BATCH:
            continue
        spreads = [row.get(f"{call}_us") for call in ("prepare", "commit", "zero", "decommit")]
        times = [
            NOTHING if one is None else f"{one['p50']:,.0f} / {one['p99']:,.0f} us"
            for one in spreads
        ]
        left = show(row.get("kernel_rate_left"), "{:.2f} x")
        rows.append(f"| {row['layout']} | {row['beside']} | {' | '.join(times)} | {left} |")
    return "\n".join(rows)


def control_path(name: str) -> str:
    """Return the table of one growth and one shrink over all ranks: a row per ranks and layout."""
    found = load(name)
    named = found["hardware"]
    where = f"host memory, {named['cpu']}, {named['cores']} cores"
    if "mps" in named:
        where = f"GPU memory, {named['device']}"
    rows = [
        f"**One growth and one shrink over all ranks, messages included**, {where}, extents of "
        f"{format_bytes(found['extent_bytes'])}, commit {found['commit'][:12]}, p50 / p99 of "
        f"{found['rounds']}",
        "",
        "| layout | ranks | extents at once | growth | told to handed out | shrink |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in found["rows"]:
        spreads = [row[name] for name in ("growth_us", "told_to_there_us", "shrink_us")]
        times = [f"{one['p50'] / 1e3:,.2f} / {one['p99'] / 1e3:,.2f} ms" for one in spreads]
        rows.append(f"| {row['layout']} | {row['tp']} | {row['batch']} | {' | '.join(times)} |")
    return "\n".join(rows)


def delayed(delay_ms: int) -> str:
    """Return the name of the result with workers that are `delay_ms` late."""
    return f"contention-delay-{delay_ms}"


def delays() -> str:
    """Return the table of late workers: a row per policy and delay."""
    results = {delay: load(delayed(delay))["runs"] for delay in DELAYS_MS}
    rows = [
        "| policy | late by | runs | scheduler wait max | growth latency p50 | output tok/s "
        "| time per token of requests without growth, over no delay |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    probe = worst("probe_tpot_s", "mean")
    for policy in sorted(policies_of(results[DELAYS_MS[0]]), reverse=True):
        for delay, runs in results.items():
            mine = [run for run in runs if run["policy"] == policy]
            undelayed = by_repeat(results[0], policy, probe)
            slower = ratio_of_medians(by_repeat(runs, policy, probe), undelayed)
            cells = [
                policy,
                f"{delay} ms",
                str(len(mine)),
                show(scaled(middle(mine, worst("scheduler_wait_us", "max")), 1e-3), "{:,.2f} ms"),
                show(scaled(middle(mine, worst("grow_latency_s", "p50")), 1e3), "{:,.1f} ms"),
                show(middle(mine, own("output_tokens_per_s")), "{:,.0f}"),
                "1" if delay == DELAYS_MS[0] else str(slower or NOTHING),
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def scaled(value: float | None, factor: float) -> float | None:
    """Return `value` in another unit, None as it is."""
    return None if value is None else value * factor


def middle(runs: list[Json], figure: Figure) -> float | None:
    """Return the median over runs of what applies."""
    return median(figure(run) for run in runs)


def show(value: float | None, form: str) -> str:
    """Return `value` in words, a dash where it does not apply."""
    return NOTHING if value is None else form.format(value)


if __name__ == "__main__":
    sys.exit(main())

"""The result as a table for people: a column per policy, a row per figure.

Owns: which figures are shown and how they are put in words. Must not know: how they came
about. Everything is read from the result JSON, so an old file prints the same table.
"""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.colocated.figures import (
    Figure,
    Json,
    mean_over_requests,
    own,
    policies_of,
    throughput_ratio,
    total,
    worst,
)
from bench.colocated.outcome import COUNTS
from bench.colocated.statistics import median
from kvadmit.units import format_bytes

DASH = "-"


def render(result: Json) -> RenderableType:
    """Return the tables of a result, one per engine and scenario."""
    parts: list[RenderableType] = []
    kinds = dict.fromkeys((run["engine"], run["scenario"]) for run in result["runs"])
    for engine, scenario in kinds:
        runs = [r for r in result["runs"] if (r["engine"], r["scenario"]) == (engine, scenario)]
        parts += [Text(title(result, engine, scenario), style="bold"), _table(runs)]
    parts.append(Text(_note(result), style="dim"))
    return Group(*parts)


def title(result: Json, engine: str, scenario: str) -> str:
    """Return one line that says what was measured; a simulated engine is named as such."""
    work = result["workload"]
    what = "real vLLM" if engine == "vllm" else "SIMULATED engine (timed stand-in for the model)"
    rate = "closed" if work["rate"] is None else f"{work['rate']:g} requests/s"
    delay = f", workers {work['worker_delay_ms']:g} ms late" if work["worker_delay_ms"] else ""
    return (
        f"{scenario}, {what}: {work['instances']} instances, TP {work['tp']}, "
        f"{work['requests']} requests each ({rate}), pool {format_bytes(work['pool_bytes'])}{delay}"
    )


def _table(runs: list[Json]) -> Table:
    table = Table(header_style="bold")
    policies = policies_of(runs)
    table.add_column("median over repeats")
    for policy in policies:
        table.add_column(policy, justify="right")
    for name, rows in _SECTIONS:
        table.add_section()
        table.add_row(Text(name, style="bold cyan"))
        for label, figure, show in rows:
            cells = []
            for policy in policies:
                value = median(figure(run) for run in runs if run["policy"] == policy)
                cells.append(DASH if value is None else show(value))
            if any(cell != DASH for cell in cells):
                table.add_row(f"  {label}", *cells)
        if name == "throughput":
            table.add_row(*_ratio_row(runs, policies))
    return table


def _ratio_row(runs: list[Json], policies: list[str]) -> list[str]:
    cells = [f"  output rate over {policies[0]}"]
    for policy in policies:
        ratio = throughput_ratio(runs, policy, policies[0])
        cells.append("1" if policy == policies[0] else DASH if ratio is None else str(ratio))
    return cells


def _note(result: Json) -> str:
    return (
        "Latencies: mean over all requests, percentiles of the worse instance. Counters: all "
        "instances together; waits: the worst. Ratio: of medians (95 % interval, bootstrap over "
        f"repeats). '{DASH}': does not apply.\n"
        f"commit {result['commit']}, seed {result['seed']}, {result['hardware']['cpu']} "
        f"({result['hardware']['cores']} cores), vLLM {result['versions']['vllm']}"
    )


# --- formats -----------------------------------------------------------------------------------


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms"


def _microseconds(value: float) -> str:
    return f"{value:,.0f} us" if value >= 10 else f"{value:.1f} us"


def _bytes(value: float) -> str:
    return format_bytes(int(value))


Show = Callable[[float], str]
_SECTIONS: list[tuple[str, list[tuple[str, Figure, Show]]]] = [
    (
        "throughput",
        [
            ("completed", total("completed"), _count),
            ("failed", total("failed"), _count),
            ("elapsed", own("elapsed_s"), _seconds),
            ("output tokens/s", own("output_tokens_per_s"), _count),
        ],
    ),
    (
        "time to first token",
        [
            ("mean", mean_over_requests("ttft_s"), _seconds),
            *[(p, worst("ttft_s", p), _seconds) for p in ("p50", "p95", "p99")],
        ],
    ),
    (
        "time per output token",
        [
            ("mean", mean_over_requests("tpot_s"), _milliseconds),
            *[(p, worst("tpot_s", p), _milliseconds) for p in ("p95", "p99")],
            ("one-block probes, mean", worst("probe_tpot_s", "mean"), _milliseconds),
        ],
    ),
    (
        "memory",
        [
            ("preemptions", total("preemptions"), _count),
            *[(name.replace("_", " "), total(name), _count) for name in COUNTS],
            ("growth latency p50", worst("grow_latency_s", "p50"), _milliseconds),
            ("growth latency p99", worst("grow_latency_s", "p99"), _milliseconds),
            ("driver's part of a commit p50", worst("commit_call_s", "p50"), _milliseconds),
            ("driver's part of a commit p99", worst("commit_call_s", "p99"), _milliseconds),
            ("grant wait p50", worst("grant_wait_s", "p50"), _milliseconds),
            ("grant wait p99", worst("grant_wait_s", "p99"), _milliseconds),
            ("scheduler wait p50", worst("scheduler_wait_us", "p50"), _microseconds),
            ("scheduler wait p99", worst("scheduler_wait_us", "p99"), _microseconds),
            ("scheduler wait max", worst("scheduler_wait_us", "max"), _microseconds),
            ("scheduler overlapped p99", worst("scheduler_overlapped_us", "p99"), _microseconds),
            ("most held by one instance", worst("peak_held_bytes"), _bytes),
        ],
    ),
]

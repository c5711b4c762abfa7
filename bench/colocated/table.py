"""The result as a table for people: a column per policy, a row per figure.

Owns: which figures are shown and how they are put in words. Must not know: how they came
about. Everything is read from the result JSON, so an old file prints the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.colocated.outcome import COUNTS
from bench.colocated.statistics import Ratio, median, paired_ratio
from kvadmit.units import format_bytes

Json = dict[str, Any]
Figure = Callable[[Json], float | None]
"""Takes one run's entry."""

DASH = "-"


def policies_of(runs: Sequence[Json]) -> list[str]:
    """Return the policies of `runs`, in order of first appearance."""
    return list(dict.fromkeys(run["policy"] for run in runs))


def throughput_ratio(runs: Sequence[Json], policy: str, reference: str) -> Ratio | None:
    """Return output tokens per second of `policy` over those of `reference`, by repeat."""

    def by_repeat(name: str) -> dict[int, float]:
        return {
            run["repeat"]: run["output_tokens_per_s"]
            for run in runs
            if run["policy"] == name and run["output_tokens_per_s"] is not None
        }

    return paired_ratio(by_repeat(policy), by_repeat(reference))


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
        "instances together; waits: the worst. Ratio: median (smallest - largest) over pairs of "
        f"runs of the same repeat. '{DASH}': does not apply.\n"
        f"commit {result['commit']}, seed {result['seed']}, {result['hardware']['cpu']} "
        f"({result['hardware']['cores']} cores), vLLM {result['versions']['vllm']}"
    )


# --- figures -----------------------------------------------------------------------------------


def _sum(key: str) -> Figure:
    def figure(run: Json) -> float | None:
        values = [i[key] for i in run["instances"] if i[key] is not None]
        return sum(values) if values else None

    return figure


def _worst(key: str, part: str | None = None) -> Figure:
    def figure(run: Json) -> float | None:
        found = [i.get(key) for i in run["instances"]]
        if part is not None:
            found = [spread.get(part) if spread else None for spread in found]
        values = [value for value in found if value is not None]
        return max(values) if values else None

    return figure


def _mean(key: str) -> Figure:
    def figure(run: Json) -> float | None:
        pairs = [(i["completed"], i[key]["mean"]) for i in run["instances"]]
        known = [(count, value) for count, value in pairs if count and value is not None]
        total = sum(count for count, _ in known)
        return sum(count * value for count, value in known) / total if total else None

    return figure


def _own(key: str) -> Figure:
    return lambda run: run[key]


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
            ("completed", _sum("completed"), _count),
            ("failed", _sum("failed"), _count),
            ("elapsed", _own("elapsed_s"), _seconds),
            ("output tokens/s", _own("output_tokens_per_s"), _count),
        ],
    ),
    (
        "time to first token",
        [
            ("mean", _mean("ttft_s"), _seconds),
            *[(p, _worst("ttft_s", p), _seconds) for p in ("p50", "p95", "p99")],
        ],
    ),
    (
        "time per output token",
        [
            ("mean", _mean("tpot_s"), _milliseconds),
            *[(p, _worst("tpot_s", p), _milliseconds) for p in ("p95", "p99")],
            ("one-block probes, mean", _worst("probe_tpot_s", "mean"), _milliseconds),
        ],
    ),
    (
        "memory",
        [
            ("preemptions", _sum("preemptions"), _count),
            *[(name.replace("_", " "), _sum(name), _count) for name in COUNTS],
            ("growth latency p50", _worst("grow_latency_s", "p50"), _milliseconds),
            ("growth latency p99", _worst("grow_latency_s", "p99"), _milliseconds),
            ("grant wait p50", _worst("grant_wait_s", "p50"), _milliseconds),
            ("grant wait p99", _worst("grant_wait_s", "p99"), _milliseconds),
            ("scheduler wait p50", _worst("scheduler_wait_us", "p50"), _microseconds),
            ("scheduler wait p99", _worst("scheduler_wait_us", "p99"), _microseconds),
            ("scheduler wait max", _worst("scheduler_wait_us", "max"), _microseconds),
            ("most held by one instance", _worst("peak_held_bytes"), _bytes),
        ],
    ),
]

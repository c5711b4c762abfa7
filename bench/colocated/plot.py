"""The picture: who held how much memory when, and how many requests waited for it.

Owns: the drawing. Must not know: how samples were taken. One column per policy, all on the
same scales, so that the eye may compare: above, memory held by each instance, one on top of
the other, under the line of the pool; below, waiting requests, and what each GPU has in use.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes

from bench.colocated.figures import policies_of, throughput_ratio
from bench.colocated.table import title
from kvadmit.units import GIB, MIB

Json = dict[str, Any]

COLOURS = ("#2f6db3", "#e08a1e", "#3a9a5f", "#b0436e", "#6d5fb8", "#8a6d3b")
"""One per instance; apart in lightness too, so that they stay apart in grey."""
WORDS = {
    "static": "static: an even split",
    "kvcached": "kvcached: EngineCore-owned",
    "sync": "sync: growth on the scheduler's path",
    "event": "event: kvadmit",
    "event-layers": "event-layers: kvadmit, layers outermost",
}
POINTS = 800


def draw(path: Path, result: Json, samples: Json, engine: str, scenario: str) -> bool:
    """Write a PNG of the newest run of every policy to `path`; False if there is none to draw.

    After a whole bench these share a repeat, hence the requests.
    """
    newest: dict[str, Json] = {}
    for run in samples["runs"]:
        if (run["engine"], run["scenario"]) == (engine, scenario):
            newest[run["policy"]] = run
    runs = [r for r in result["runs"] if (r["engine"], r["scenario"]) == (engine, scenario)]
    policies = [policy for policy in policies_of(runs) if policy in newest]
    if not policies:
        return False
    on_gpus = any("devices" in newest[policy] for policy in policies)
    figure, grid = pyplot.subplots(
        2 + on_gpus,
        len(policies),
        figsize=(1.6 + 4.6 * len(policies), 6.2 + 2.2 * on_gpus),
        sharex=True,
        sharey="row",
        height_ratios=(2, 1, 1)[: 2 + on_gpus],
        squeeze=False,
        layout="constrained",
    )
    pool_bytes = result["workload"]["pool_bytes"]
    unit, name = (GIB, "GiB") if pool_bytes >= 4 * GIB else (MIB, "MiB")
    for column, policy in enumerate(policies):
        _memory(grid[0][column], newest[policy], pool_bytes, unit)
        _waiting(grid[1][column], newest[policy])
        if on_gpus:
            _devices(grid[2][column], newest[policy])
        grid[0][column].set_title(_heading(runs, policy, policies[0]), fontsize=11, loc="left")
        grid[-1][column].set_xlabel("seconds")
    grid[0][0].set_ylabel(f"KV memory held, {name}")
    grid[1][0].set_ylabel("requests waiting")
    if on_gpus:
        grid[2][0].set_ylabel("in use on a GPU, GiB")
    grid[0][0].set_ylim(0, pool_bytes / unit * 1.12)
    grid[1][0].set_ylim(bottom=0)
    grid[1][0].set_xlim(left=0)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    heading = "\n".join(textwrap.wrap(title(result, engine, scenario), 60 * len(policies)))
    figure.suptitle(heading, fontsize=12, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _heading(runs: Sequence[Json], policy: str, reference: str) -> str:
    words = WORDS.get(policy, policy)
    if policy == reference:
        return words
    ratio = throughput_ratio(runs, policy, reference)
    return words if ratio is None else f"{words}\noutput rate {ratio} of {reference}"


def _memory(axes: Axes, run: Json, pool_bytes: int, unit: int) -> None:
    times = _times(run)
    heights = [_level(instance, 1, times) / unit for instance in run["instances"]]
    names = [f"instance {instance['name'].rsplit('-', 1)[-1]}" for instance in run["instances"]]
    axes.stackplot(
        times, *heights, labels=names, colors=COLOURS[: len(heights)], step="post", linewidth=0
    )
    axes.axhline(pool_bytes / unit, color="#333333", linewidth=1.2, linestyle="--", label="pool")
    _style(axes)


def _waiting(axes: Axes, run: Json) -> None:
    times = _times(run)
    for instance, colour in zip(run["instances"], COLOURS, strict=False):
        waiting = _level(instance, 3, times)
        axes.fill_between(times, waiting, step="post", color=colour, alpha=0.25, linewidth=0)
        axes.step(times, waiting, where="post", color=colour, linewidth=1.4)
    _style(axes)


def _devices(axes: Axes, run: Json) -> None:
    """Draw what each GPU has in use, by whomever: weights, KV memory, ballast."""
    looks = run.get("devices", [])
    for number in range(1, len(looks[0]) if looks else 1):
        used = [look[number] / GIB for look in looks]
        axes.plot([look[0] for look in looks], used, color="#555555", linewidth=1.2)
    _style(axes)


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _times(run: Json) -> Any:
    end = max((level[0] for i in run["instances"] for level in i["levels"]), default=1.0)
    return np.linspace(0.0, end, POINTS)


def _level(instance: Json, column: int, times: Any) -> Any:
    """Return the instance's levels at `times`; each holds until the next was taken."""
    if not instance["levels"]:
        return np.zeros(len(times))
    taken = np.array([level[0] for level in instance["levels"]])
    values = np.array([level[column] for level in instance["levels"]], dtype=float)
    return values[np.clip(np.searchsorted(taken, times, side="right") - 1, 0, None)]

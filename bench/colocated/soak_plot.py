"""The picture of a soak: who held how much when, and when who was struck.

Owns: the drawing. Must not know: how it came about; everything is read from the report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot

from bench.colocated.plot import COLOURS
from kvadmit.units import MIB

ARBITER = "#555555"


def draw(path: Path, report: dict[str, Any]) -> None:
    """Write a PNG to `path`: memory by instance, one on the other; blows above it."""
    figure, axes = pyplot.subplots(figsize=(14, 4.6), layout="constrained")
    names, held = report["names"], report["held"]
    if held:
        times = [look[0] for look in held]
        heights = np.array([[(part or 0) / MIB for part in look[1:]] for look in held]).T
        axes.stackplot(
            times, *heights, labels=names, colors=COLOURS[: len(names)], step="post", linewidth=0
        )
    top = report["pool_bytes"] / MIB
    axes.axhline(top, color="#333333", linewidth=1.2, linestyle="--", label="pool")
    for at_s, role, name, killed in report["blows"]:
        height = top * (1.06 + 0.05 * (names.index(name) + 1 if name else 0))
        colour = COLOURS[names.index(name)] if name else ARBITER
        axes.plot(at_s, height, "x" if killed else "|", color=colour, markersize=7)
        if killed and role != "arbiter":
            axes.axvline(at_s, color=colour, linewidth=0.5, alpha=0.6)
    axes.set_ylim(0, top * (1.12 + 0.05 * len(names)))
    axes.set_xlim(left=0)
    axes.set_ylabel("KV memory held, MiB")
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    engine = "real vLLM" if report["engine"] == "vllm" else "SIMULATED engine"
    axes.set_title(
        f"{report['minutes']:.0f} minutes, {engine}: {report['kills']} kills (x), stops (|), "
        f"{report['requests']:,} requests, {report['failed_outside_victims']} failed outside of "
        f"killed instances, {report['differing_tokens']} with other tokens",
        loc="left",
        fontsize=11,
    )
    figure.legend(loc="outside lower center", ncols=len(names) + 1, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

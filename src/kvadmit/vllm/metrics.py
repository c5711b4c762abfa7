"""`kvadmit_*` on vLLM's own /metrics.

Owns: a Prometheus collector in the process that answers /metrics. Must not know: EngineCore,
which never writes metrics: the figures are the arbiter's, the same that `kvadmit status`
shows. A stat-logger entry point would turn vLLM's statistics on for users who switched them
off, so the collector registers itself once kvadmit is enabled.

A scrape never waits for a slow arbiter: the question runs on a thread of its own, and after
ANSWER_WAIT_S the last known figures are shown, with their age.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvadmit.errors import KvAdmitError
from kvadmit.rendezvous import ask_status
from kvadmit.rundir import RunDir

ANSWER_WAIT_S = 0.1

GAUGES = {
    "held_extents": "Extents this instance has backed, preparing or orphaned.",
    "allowance_extents": "Most extents the arbiter allows it now.",
    "ceiling_extents": "Most extents it could ever be allowed, alone on its devices.",
}
REPORTED = {
    "need": "Extents it lacks for its next step or its oldest waiter.",
    "want": "Extents its low watermark would like.",
    "free": "Wholly free extents.",
    "cached": "Wholly free extents that hold reusable prefixes.",
}


class Collector:
    """Asks the arbiters of the run directories in use, at each scrape."""

    def __init__(self) -> None:
        """Register nothing yet."""
        self._run_dirs: set[str] = set()
        self._snapshots: dict[str, Mapping[str, Any]] = {}
        self._asked_s = 0.0
        self._thread: threading.Thread | None = None

    def watch(self, run_dir: str) -> None:
        """Show the instances of `run_dir` that belong to this process."""
        if not self._run_dirs:
            REGISTRY.register(self)
        self._run_dirs.add(run_dir)

    def describe(self) -> list[Any]:
        """Return nothing: registering must not ask anybody."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the metric families of one scrape."""
        self._refresh()
        families: dict[str, Any] = {}
        for snapshot in list(self._snapshots.values()):
            for name, instance in snapshot["instances"].items():
                if _is_child(int(instance["pid"])):
                    self._add(families, name, instance)
        if self._snapshots:
            age = GaugeMetricFamily("kvadmit_age_seconds", "Age of the figures shown here.")
            age.add_metric([], time.monotonic() - self._asked_s)
            families["age"] = age
        yield from families.values()

    def _add(self, families: dict[str, Any], name: str, instance: Mapping[str, Any]) -> None:
        def family(kind: Any, key: str, text: str, labels: tuple[str, ...] = ()) -> Any:
            if key not in families:
                families[key] = kind(f"kvadmit_{key}", text, labels=["instance", *labels])
            return families[key]

        for device, held in instance["held_bytes"].items():
            gauge = family(
                GaugeMetricFamily, "held_bytes", "KV memory held, physical.", ("device",)
            )
            gauge.add_metric([name, device], held)
        for key, text in GAUGES.items():
            family(GaugeMetricFamily, key, text).add_metric([name], instance[key])
        since_s = instance["needs_since_s"]
        waits = family(GaugeMetricFamily, "need_age_seconds", "For how long it has lacked extents.")
        waits.add_metric([name], 0.0 if since_s is None else self._asked_s - since_s)
        report = instance["report"]
        silent = family(GaugeMetricFamily, "silent_ranks", "Ranks asked again, still owing.")
        silent.add_metric([name], len(report["silent"]))
        for key, text in REPORTED.items():
            family(GaugeMetricFamily, f"{key}_extents", text).add_metric([name], report[key])
        counters = dict(report["counters"])
        requests = {"running": report["running"], "waiting": counters.pop("waiting", 0)}
        for key, count in requests.items():
            gauge = family(GaugeMetricFamily, f"{key}_requests", f"Requests {key}.")
            gauge.add_metric([name], count)
        for key, count in counters.items():
            text = f"Counter {key} of kvadmit's design, section 13."
            family(CounterMetricFamily, key, text).add_metric([name], count)

    def _refresh(self) -> None:
        thread = self._thread
        if thread is None or not thread.is_alive():
            thread = threading.Thread(target=self._ask, name="kvadmit-metrics", daemon=True)
            self._thread = thread
            thread.start()
        thread.join(ANSWER_WAIT_S)

    def _ask(self) -> None:
        for run_dir in sorted(self._run_dirs):
            try:
                self._snapshots[run_dir] = ask_status(RunDir.open(run_dir))
                self._asked_s = time.monotonic()
            except KvAdmitError:
                continue  # no arbiter now, or one that is stopped: the last figures and their age


def _is_child(pid: int) -> bool:
    """Whether process `pid` is this one or was started by it."""
    if pid == os.getpid():
        return True
    try:
        # Field 4 of /proc/pid/stat, after the parenthesised name, is the parent: proc(5).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return int(fields[1]) == os.getpid()


COLLECTOR = Collector()

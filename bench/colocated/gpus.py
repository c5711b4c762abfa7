"""The GPUs of a bench: what they are, who uses how much of them, and what is kept from everybody.

Owns: readings by NVML (which makes no context), the bench's own MPS daemon in private
directories, and the ballast process. Must not know: policies, workloads. Everything started
here is gone when `GpuHost` is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from bench.colocated.outcome import DeviceUse
from kvadmit.units import MIB

CONTROL = "nvidia-cuda-mps-control"
CONTROL_S = 30.0
BALLAST_S = 120.0
WATCH_MS = 500
QUIT_S = 10


class GpuError(Exception):
    """The GPUs cannot be used as asked; says what is missing."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One visible GPU. `index`: what CUDA_VISIBLE_DEVICES calls it."""

    index: int
    uuid: str
    name: str
    total_bytes: int


def present() -> bool:
    """Whether this machine has an NVIDIA driver with at least one GPU."""
    return Path("/dev/nvidiactl").exists() and bool(_query_gpus())


def visible(count: int) -> list[Gpu]:
    """Return the first `count` GPUs. Raises GpuError if there are fewer."""
    found = _query_gpus()
    if len(found) < count:
        raise GpuError(f"--tp {count} needs {count} GPUs, this machine shows {len(found)}")
    return found[:count]


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver."""
    rows = _query("gpu", "driver_version")
    return rows[0][0] if rows else None


class Watch:
    """Looks at GPUs, if there are any, for as long as it is entered. `seen`: what it saw."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.seen: list[DeviceUse] = []
        self._gpus = gpus
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    async def _look(self, lines: asyncio.StreamReader) -> None:
        used: dict[str, int] = {}
        async for line in lines:
            uuid, _, mib = (cell.strip() for cell in line.decode().partition(","))
            if not mib.isdecimal():
                continue  # a complaint, or a figure that is not there now
            used[uuid] = int(mib) * MIB
            if all(gpu.uuid in used for gpu in self._gpus):
                now_s = time.monotonic()
                self.seen.append(
                    DeviceUse(at_s=now_s, used_bytes=[used[gpu.uuid] for gpu in self._gpus])
                )
                used.clear()

    async def __aenter__(self) -> Self:
        """Begin to look, twice a second, by one process."""
        if self._gpus:
            self._process = await asyncio.create_subprocess_exec(
                "nvidia-smi",
                "--query-gpu=uuid,memory.used",
                "--format=csv,noheader,nounits",
                f"--loop-ms={WATCH_MS}",
                stdout=asyncio.subprocess.PIPE,
            )
            assert self._process.stdout is not None
            self._task = asyncio.create_task(self._look(self._process.stdout))
        return self

    async def __aexit__(self, *exception: object) -> None:
        """End the process and the looking."""
        if self._process is None or self._task is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it ended by itself: less was seen
            self._process.kill()
        await self._process.wait()
        await self._task


def bytes_by_process() -> dict[int, int | None]:
    """Return pid -> bytes it holds on all GPUs together, of processes that have a context.

    None where the driver knows of the process and not of its bytes.
    """
    held: dict[int, int | None] = {}
    for pid, mib in _query("compute-apps", "pid,used_memory"):
        before = held.get(int(pid), 0)
        more = int(mib) * MIB if mib.isdecimal() else None
        held[int(pid)] = None if before is None or more is None else before + more
    return held


def _query_gpus() -> list[Gpu]:
    rows = _query("gpu", "index,uuid,name,memory.total")
    found = [
        Gpu(index=int(index), uuid=uuid, name=name, total_bytes=int(mib) * MIB)
        for index, uuid, name, mib in rows
    ]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return found
    # What the user keeps for others is not ours, in whatever way it is said.
    return [
        gpu
        for word in given.split(",")
        for gpu in found
        if word and (word == str(gpu.index) or gpu.uuid.startswith(word))
    ]


def _query(what: str, columns: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-{what}={columns}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line]


class GpuHost:
    """What a bench keeps on the GPUs: an MPS daemon of its own, and ballast.

    `leave_bytes`: what the ballast leaves free on each GPU; None for no ballast. `environment`
    is what instances need to be clients of the daemon.
    """

    def __init__(self, gpus: Sequence[Gpu], leave_bytes: int | None) -> None:
        self.gpus = list(gpus)
        self.environment: dict[str, str] = {
            "CUDA_VISIBLE_DEVICES": ",".join(str(gpu.index) for gpu in gpus),
            # The order in which NVML numbers them.
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
        self._leave_bytes = leave_bytes
        self._directory: Path | None = None
        self._ballast: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Start the daemon, then the ballast. Raises GpuError; nothing is left running then."""
        try:
            self._start_mps()
            if self._leave_bytes is not None:
                self._start_ballast(self._leave_bytes)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End both."""
        self._stop()

    def _start_mps(self) -> None:
        if shutil.which(CONTROL) is None:
            raise GpuError(f"{CONTROL} is not installed: instances that share GPUs need MPS")
        self._directory = Path(tempfile.mkdtemp(prefix="kvm-"))
        for variable, name in (("PIPE", "pipe"), ("LOG", "log")):
            (self._directory / name).mkdir()
            self.environment[f"CUDA_MPS_{variable}_DIRECTORY"] = str(self._directory / name)
        self._control(["-d"], "")

    def _control(self, arguments: Sequence[str], text: str) -> None:
        environment = os.environ | self.environment
        command = [CONTROL, *arguments]
        try:
            done = subprocess.run(
                command,
                input=text,
                env=environment,
                capture_output=True,
                text=True,
                timeout=CONTROL_S,
            )
        except subprocess.TimeoutExpired:
            raise GpuError(f"{CONTROL} did not answer within {CONTROL_S:.0f} s") from None
        if done.returncode:
            raise GpuError(f"{CONTROL}: {(done.stderr or done.stdout).strip()}")

    def _start_ballast(self, leave_bytes: int) -> None:
        command = [sys.executable, "-m", "bench.colocated.ballast", str(leave_bytes)]
        self._ballast = subprocess.Popen(
            command,
            cwd=Path(__file__).resolve().parents[2],
            env=os.environ | self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._ballast.stdout is not None
        ready, _, _ = select.select([self._ballast.stdout], [], [], BALLAST_S)
        said = self._ballast.stdout.readline().strip() if ready else "it says nothing"
        if said != "ready":
            raise GpuError(f"the ballast did not fit: {said or 'it ended by itself'}")

    def _stop(self) -> None:
        if self._ballast is not None:
            assert self._ballast.stdin is not None
            assert self._ballast.stdout is not None
            self._ballast.stdin.close()
            self._ballast.stdout.close()
            try:
                self._ballast.wait(CONTROL_S)
            except subprocess.TimeoutExpired:
                self._ballast.kill()
                self._ballast.wait()
            self._ballast = None
        if self._directory is not None:
            try:
                self._control([], f"quit -t {QUIT_S}\n")
            except GpuError as error:
                print(f"contention: {error}", file=sys.stderr)
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def hardware(gpus: Sequence[Gpu]) -> Mapping[str, Any]:
    """Return what a result says of the GPUs."""
    return {
        "device": "cuda",
        "gpu": gpus[0].name,
        "gpus": len(gpus),
        "gpu_memory_bytes": gpus[0].total_bytes,
        "driver": driver_version(),
    }

"""The instances of one policy as processes: started together, spoken to, stopped together.

Owns: processes, their sockets and logs. Must not know: workloads or figures. Every wait is
bounded, and every process started here is gone when `stop` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from bench.colocated.channel import (
    LINE_BYTES_MAX,
    Broken,
    FromInstance,
    Ready,
    Stop,
    ToInstance,
    read_report,
    write,
)
from bench.colocated.policies import ROOT, Launch, launches
from bench.colocated.setup import Setup

START_S = 400.0
STOP_S = 30.0
LOG_LINES = 15


class InstanceError(Exception):
    """An instance did not start, broke or went silent; says which and shows its log's end."""


class Instance:
    """One running instance, seen from the bench."""

    def __init__(self, launch: Launch, log: Path) -> None:
        self.name = launch.spec.name
        self.log = log
        self.ready: Ready | None = None
        self._launch = launch
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        """Start the process and wait until its engine can serve."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [sys.executable, "-m", "bench.colocated.instance", str(theirs.fileno())]
        with theirs, self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._launch.environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A group of its own: Ctrl-C reaches the bench, which stops instances in order.
                start_new_session=True,
            )
        self._reader, self._writer = await asyncio.open_unix_connection(
            sock=ours, limit=LINE_BYTES_MAX
        )
        self.tell(self._launch.spec)
        report = await self.hear(START_S)
        if not isinstance(report, Ready):
            raise self.error(f"said {report} before it was ready")
        self.ready = report

    def tell(self, order: ToInstance) -> None:
        """Send an order; the socket's buffer takes it."""
        assert self._writer is not None, "started"
        write(self._writer, order)

    @property
    def pid(self) -> int:
        """The process with its clients and front end; 0 before it was started."""
        return 0 if self._process is None else self._process.pid

    async def hear(self, wait_s: float | None) -> FromInstance:
        """Return the next report; raises InstanceError if none comes or the instance broke."""
        assert self._reader is not None, "started"
        try:
            report = await asyncio.wait_for(read_report(self._reader), wait_s)
        except TimeoutError:
            raise self.error(f"was silent for {wait_s:.0f} s") from None
        if report is None:
            raise self.error("ended by itself")
        if isinstance(report, Broken):
            raise self.error(f"broke: {report.why}")
        return report

    def error(self, what: str) -> InstanceError:
        """Return an InstanceError about this instance with the end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        tail = "".join(f"\n    {line}" for line in lines)
        return InstanceError(f"instance {self.name} {what}; the end of {self.log}:{tail}")

    def ask_to_stop(self) -> None:
        """Have it shut down; idempotent."""
        if self._writer is not None and not self._writer.is_closing():
            self.tell(Stop())
            self._writer.close()

    async def stop(self) -> None:
        """End the process: asked first, killed with its children if it does not go."""
        self.ask_to_stop()
        process = self._process
        if process is None:
            return
        try:
            await asyncio.to_thread(process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            pass  # killed below, like children that outlived an orderly exit
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        if self._writer is not None:
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()


class Fleet:
    """All instances of one policy, in one run directory."""

    def __init__(
        self, setup: Setup, policy: str, log_dir: Path, site: Mapping[str, str] | None = None
    ) -> None:
        """`site`: variables that instances get on this machine."""
        self.policy = policy
        # Short, because sockets live in it; private, because kvadmit insists.
        self._run_dir = tempfile.mkdtemp(prefix="kvb-")
        log_dir.mkdir(parents=True, exist_ok=True)
        self.instances = [
            Instance(launch, log_dir / f"{launch.spec.name}.log")
            for launch in launches(setup, policy, self._run_dir, site)
        ]

    async def start(self) -> Self:
        """Start all of them at once; if one fails, none is left running."""
        try:
            await asyncio.gather(*(instance.start() for instance in self.instances))
        except BaseException:
            await self.stop()
            raise
        return self

    async def stop(self) -> None:
        """Stop every instance; their directory goes with them."""
        await asyncio.gather(*(instance.stop() for instance in self.instances))
        shutil.rmtree(self._run_dir, ignore_errors=True)

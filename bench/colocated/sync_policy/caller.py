"""The scheduler's side of sync: one call goes to all ranks at once and waits for all.

Owns: the connections to the ranks. Must not know: blocks, or when to grow. Stands where
kvadmit's `Coordinator` stands, with the calls the plugin makes of it, but no thread: every
call runs on the scheduler thread, which is the point.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.colocated.sync_policy.wire import Joined, Kind, Order, Reply, receive, send
from kvadmit.config import Settings
from kvadmit.coordinator import NO_MPS
from kvadmit.errors import PeerLostError, PeerTimeoutError
from kvadmit.extents import to_runs
from kvadmit.geometry import ExtentPlan
from kvadmit.messages import Mps
from kvadmit.rundir import RunDir, new_incarnation

READY_S = 60.0
ANSWER_S = 30.0
HOST_POOL_FILE = "host.pool"


class Caller:
    """One instance's connections. The names of its methods are those of `Coordinator`."""

    def __init__(
        self,
        settings: Settings,
        *,
        ranks: int,
        devices: Sequence[str],
        device_total_bytes: Mapping[str, int],
        name: str,
        wake: Callable[[], None],
        on_engine_lost: Callable[[str], None] | None = None,
        read_device: Callable[[str], tuple[int, int]] | None = None,
        details: Mapping[str, str] | None = None,
        backend: str = "host",
        margin_bytes: int = 0,
        mps: Mps = NO_MPS,
    ) -> None:
        self.settings = settings
        self._backend = backend
        self.name = name
        self.incarnation = new_incarnation("sync")
        self._ranks = ranks
        self._devices = list(devices)
        self._run: RunDir | None = None
        self._listener: socket.socket | None = None
        self._links: list[socket.socket] = []
        self._number = 0
        self.describe: Callable[[], dict[str, object]] = dict
        """What `status` returns; set by whoever counts."""

    def start(self) -> None:
        """Listen for the ranks."""
        self._run = RunDir.open(self.settings.run_dir)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._path)
        self._listener.listen(self._ranks)
        self._listener.settimeout(READY_S)

    @property
    def _path(self) -> str:
        assert self._run is not None, "start() first"
        return self._run.instance_path(self.incarnation, "agents")

    def watch_parent(self, pid: int, on_death: Callable[[], None] | None = None) -> None:
        """Do nothing: the bench ends the processes it started."""

    def request_start(self, start_bytes: Mapping[str, int]) -> None:
        """Do nothing: nobody books anything here."""

    def set_geometry(self, plan: ExtentPlan) -> None:
        """Do nothing: nobody is told."""

    @property
    def runtime(self) -> dict[str, object]:
        """What the workers need to know, as plain picklable values."""
        assert self._run is not None, "start() first"
        return {
            "incarnation": self.incarnation,
            "name": self.name,
            "run_dir": str(self._run.path),
            "agents": self._path,
            "lease": "",
            "devices": self._devices,
            "backend": self._backend,
            "host_pool": self.settings.host_pool,
            "host_pool_path": str(Path(self._run.path) / HOST_POOL_FILE),
            "settings": self.settings.as_mapping(),
        }

    def wait_ready(self) -> None:
        """Accept every rank. Raises PeerTimeoutError naming how many did not come."""
        assert self._listener is not None
        links: dict[int, socket.socket] = {}
        while len(links) < self._ranks:
            try:
                link, _ = self._listener.accept()
                link.settimeout(ANSWER_S)
                joined = receive(link)
            except TimeoutError:
                missing = self._ranks - len(links)
                raise PeerTimeoutError(f"{missing} ranks", "connect", READY_S) from None
            assert isinstance(joined, Joined)
            links[joined.rank] = link
        self._links = [links[rank] for rank in range(self._ranks)]

    def call(self, kind: Kind, extents: Sequence[int], fence: int = 0) -> list[Reply]:
        """Send one order to all ranks, wait for all; returns their replies by rank.

        Blocks the caller until the slowest rank has answered. Raises PeerTimeoutError or
        PeerLostError, after which the engine cannot go on.
        """
        self._number += 1
        ranks = range(self._ranks)
        order = Order(number=self._number, kind=kind, extents=to_runs(extents), fence=fence)
        for rank in ranks:
            self._send(rank, order)
        return [self._reply(rank) for rank in ranks]

    def call_some(self, ranks: Sequence[int], kind: Kind, extents: Sequence[int]) -> None:
        """Call some ranks only; raises PeerLostError if one of them cannot do it."""
        self._number += 1
        order = Order(number=self._number, kind=kind, extents=to_runs(extents))
        for rank in ranks:
            self._send(rank, order)
        for rank in ranks:
            reply = self._reply(rank)
            if not reply.done:
                raise PeerLostError(f"rank {rank}", f"{kind}: {reply.reason}")

    def _send(self, rank: int, order: Order) -> None:
        try:
            send(self._links[rank], order)
        except OSError as error:
            raise PeerLostError(f"rank {rank}", f"take {order.kind} ({error})") from None

    def _reply(self, rank: int) -> Reply:
        began_s = time.monotonic()
        try:
            reply = receive(self._links[rank])
        except TimeoutError:
            raise PeerTimeoutError(f"rank {rank}", "answer", ANSWER_S) from None
        if reply is None:
            raise PeerLostError(f"rank {rank}", "answer", time.monotonic() - began_s)
        assert isinstance(reply, Reply)
        return reply

    def status(self) -> dict[str, Any]:
        """Return what the scheduler counted."""
        return {"name": self.name, "pid": os.getpid(), **self.describe()}

    def stop(self) -> None:
        """Close every connection. Idempotent."""
        for link in self._links:
            link.close()
        self._links = []
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            Path(self._path).unlink(missing_ok=True)

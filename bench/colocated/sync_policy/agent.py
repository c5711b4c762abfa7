"""The worker's side of sync: a thread that answers the scheduler's calls one by one.

Owns: one rank's memory after its prefix, and the headroom check. Must not know: why it is
asked. Stands where kvadmit's `Agent` stands, with the same calls.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping

from bench.colocated.delay import delay_s
from bench.colocated.sync_policy.wire import Joined, Order, Reply, receive, send
from kvadmit.extents import from_runs
from kvadmit.vmm import AddressSpace

logger = logging.getLogger("vllm.kvadmit")

CONNECT_S = 10.0
FENCE_S = 10.0
STOP_S = 10.0
EXIT_CODE = 70
"""The scheduler is gone: nobody could use this worker. EX_SOFTWARE of sysexits(3)."""


class SyncAgent:
    """One rank's agent. `prefix` extents are committed in `space` already."""

    def __init__(
        self,
        runtime: Mapping[str, object],
        *,
        rank: int,
        space: AddressSpace,
        prefix: int,
        device_wait: Callable[[], None] | None = None,
    ) -> None:
        self.rank = rank
        self._device_wait = device_wait
        self._path = str(runtime["agents"])
        self._space = space
        settings = runtime["settings"]
        assert isinstance(settings, Mapping)
        self._margin_bytes = int(settings["margin"] or 0)
        self._link: socket.socket | None = None
        self._stopping = False
        self._enqueued = 0
        self._step_published = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name=f"sync-agent-{rank}", daemon=True)

    def start(self) -> None:
        """Connect to the scheduler's process and serve it on a thread."""
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._link.settimeout(CONNECT_S)
        self._link.connect(self._path)
        send(self._link, Joined(self.rank))
        self._link.settimeout(None)  # idle for as long as the scheduler likes; EOF ends it
        self._thread.start()

    def publish_enqueued(self, step: int) -> None:
        """Say that everything of `step` is enqueued."""
        with self._step_published:
            self._enqueued = step
            self._step_published.notify_all()

    def publish_base(self, base_bytes: int) -> None:
        """Do nothing: nobody keeps books here."""

    def set_capturing(self, capturing: bool) -> None:
        """Do nothing: no call comes while graphs are captured, before the first step."""

    def stop(self) -> None:
        """End the thread. Memory stays mapped. Idempotent."""
        self._stopping = True
        if self._link is not None:
            try:
                self._link.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other end was faster
            self._thread.join(STOP_S)
            self._link.close()

    def _serve(self) -> None:
        assert self._link is not None
        late_s = delay_s()
        while True:
            order = receive(self._link)
            if order is None:
                break
            assert isinstance(order, Order)
            reason = self._carry_out(order)
            if late_s and order.kind == "grow":
                time.sleep(late_s)
            try:
                send(
                    self._link,
                    Reply(number=order.number, rank=self.rank, done=not reason, reason=reason),
                )
            except OSError:
                break
        if not self._stopping:
            logger.error("rank %d: the scheduler is gone; this worker ends", self.rank)
            os._exit(EXIT_CODE)

    def _carry_out(self, order: Order) -> str:
        """Return why it could not be done, "" if it was."""
        extents = from_runs(order.extents)
        match order.kind:
            case "grow":
                return self._grow(extents)
            case "undo":
                return self._decommit(extents)
            case "shrink":
                with self._step_published:
                    passed = self._step_published.wait_for(
                        lambda: self._enqueued >= order.fence, FENCE_S
                    )
                if not passed:
                    return f"step {order.fence} did not come"
                return self._decommit(extents)

    def _grow(self, extents: list[int]) -> str:
        space = self._space
        free_bytes, _ = space.read()
        wanted = len(extents) * space.layout.extent_bytes
        if free_bytes - self._margin_bytes < wanted:
            return f"{free_bytes} bytes free, {wanted} and a margin wanted"
        prepared = space.prepare(extents)
        if prepared.error is not None:
            return str(prepared.error)  # another instance was faster; nothing changed
        committed = space.commit(extents)
        if committed.error is None:
            return ""
        undone = [*committed.done, *committed.partial]
        if undone:
            self._decommit(undone)
        space.abort([extent for extent in extents if extent not in undone])
        return str(committed.error)

    def _decommit(self, extents: list[int]) -> str:
        never_touched = self._space.forget_fresh(extents) == len(extents)
        if not never_touched and self._device_wait is not None:
            self._device_wait()
        result = self._space.decommit(extents)
        return "" if result.error is None else str(result.error)

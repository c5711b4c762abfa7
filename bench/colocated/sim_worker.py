"""One rank of a simulated engine: a process with real memory behind its blocks.

Owns: the rank's address space and agent, and the proof that its memory is its own: every
block handed out gets its owner's stamp, and a request that finishes must find its stamps in
all its blocks. A block without memory behind it ends this process with SIGSEGV.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import msgspec
import numpy as np

from bench.colocated import delay
from bench.colocated.sync_policy.agent import SyncAgent
from kvadmit.agent import Agent
from kvadmit.vmm import ExtentLayout
from kvadmit.vmm_host import HostAddressSpace, HostPool

WORD = 8


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """First message to a worker. `prefix`: extents it backs by itself at the start."""

    policy: str
    rank: int
    runtime: dict[str, Any]
    layout: ExtentLayout
    prefix: int


class Run(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """One step. `fresh`, `finishing`: `(block id, stamp)`, to be written and then to be found."""

    step: int
    fresh: list[tuple[int, int]]
    finishing: list[tuple[int, int]]


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The step is enqueued (0: the worker is ready). `wrong`: blocks with a foreign stamp."""

    step: int
    wrong: list[int] = []


encoder = msgspec.msgpack.Encoder()
to_worker: msgspec.msgpack.Decoder[Start | Run] = msgspec.msgpack.Decoder(Start | Run)
from_worker: msgspec.msgpack.Decoder[Done] = msgspec.msgpack.Decoder(Done)
MESSAGE_BYTES_MAX = 1 << 20


class Worker:
    """One rank's memory and agent."""

    def __init__(self, start: Start) -> None:
        runtime = start.runtime
        self.pool = HostPool(str(runtime["host_pool_path"]), int(runtime["host_pool"]))
        self.space = HostAddressSpace(start.layout, device="host", pool=self.pool)
        prefix = range(start.prefix)
        for call in (self.space.prepare, self.space.commit):
            result = call(prefix)
            if result.error is not None:
                raise result.error
        self._words = np.frombuffer(memoryview(self.space.buffer()), dtype=np.int64)
        self._layout = start.layout
        self.agent: Agent | SyncAgent | None = None
        if start.policy != "static":
            kind = Agent if start.policy == "event" else SyncAgent
            self.agent = kind(runtime, rank=start.rank, space=self.space, prefix=start.prefix)
            self.agent.start()

    def run(self, order: Run) -> Done:
        """Write and check stamps, then say that the step is enqueued."""
        for block, stamp in order.fresh:
            for word in self._places(block):
                self._words[word] = stamp
        wrong = [
            block
            for block, stamp in order.finishing
            if any(self._words[word] != stamp for word in self._places(block))
        ]
        if self.agent is not None:
            self.agent.publish_enqueued(order.step)
        return Done(step=order.step, wrong=wrong)

    def _places(self, block: int) -> list[int]:
        """Return the first word of the block in every strip."""
        return [(s.base + block * s.block_stride) // WORD for s in self._layout.strips]

    def close(self) -> None:
        """Free everything."""
        if self.agent is not None:
            self.agent.stop()
        del self._words
        self.space.close()
        self.pool.close()


def main(descriptor: int) -> int:
    """Serve the engine at `descriptor` until it closes its end."""
    link = socket.socket(fileno=descriptor)
    start = to_worker.decode(link.recv(MESSAGE_BYTES_MAX))
    assert isinstance(start, Start)
    if start.policy == "event":
        delay.install()  # sync's agent is late by itself: it answers once per growth
    worker = Worker(start)
    link.send(encoder.encode(Done(step=0)))
    while message := link.recv(MESSAGE_BYTES_MAX):
        order = to_worker.decode(message)
        assert isinstance(order, Run)
        link.send(encoder.encode(worker.run(order)))
    worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

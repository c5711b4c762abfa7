"""A stand-in for vLLM's scheduler: continuous batching over token blocks, with preemption.

Owns: who runs, who waits, and which blocks each request has. Must not know: where blocks come
from (`sim_memory`), processes, clocks. It keeps to vLLM's rules as far as memory is
concerned: first come first served, a prompt is admitted whole, a running request that finds
no block preempts the newest one, and a preempted request starts over at the head of the queue.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import msgspec

from kvadmit.pool import ElasticPool
from kvadmit.units import ceil_div


class SimBlock:
    """A token block: what `kvadmit.pool` reads of one. Nothing is cached here."""

    __slots__ = ("block_id",)
    block_hash: Any = None

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id


class Memory(Protocol):
    """What the scheduler asks of a policy in a step."""

    pool: ElasticPool[SimBlock]

    def grow_now(self, lack: int) -> bool:
        """Return whether at least `lack` more blocks are free now, having waited if need be."""
        ...

    def may_hold(self) -> bool:
        """Whether a running request without a block is better held than preempted."""
        ...


class SimRequest(msgspec.Struct):
    """One request; while it runs, `blocks` hold its tokens. `stamp` marks them as its own."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    generated: int = 0
    blocks: list[SimBlock] = []
    stamp: int = 0

    @property
    def tokens(self) -> int:
        """Tokens known so far; a preempted request computes them all again."""
        return self.prompt_tokens + self.generated


class Step(msgspec.Struct):
    """What one step runs. `fresh`: blocks handed out in it, `finishing`: blocks of requests that
    end with it, both with the stamp of their owner.
    """

    ran: list[SimRequest] = []
    prefill_tokens: int = 0
    fresh: list[tuple[int, int]] = []
    finishing: list[tuple[int, int]] = []
    missing: int = 0
    """Blocks beyond the free ones that somebody lacked."""
    held: bool = False


class SimScheduler:
    """The requests of one simulated engine."""

    def __init__(self, memory: Memory, *, block_tokens: int, requests_max: int) -> None:
        self.running: list[SimRequest] = []
        self.waiting: deque[SimRequest] = deque()
        self.preemptions = 0
        self._memory = memory
        self._block_tokens = block_tokens
        self._requests_max = requests_max
        self._stamps = 0

    @property
    def pool(self) -> ElasticPool[SimBlock]:
        """The blocks of this engine."""
        return self._memory.pool

    def add(self, request: SimRequest) -> None:
        """Queue a request."""
        self._stamps += 1
        request.stamp = self._stamps
        self.waiting.append(request)

    def schedule(self, keep_free: int) -> Step:
        """Give blocks to running requests, then admit waiters; returns what runs.

        `keep_free`: blocks that admissions leave to running requests.
        """
        step = Step()
        preempted = self._schedule_running(step)
        if not preempted and not step.held:
            self._admit(step, keep_free)
        for request in step.ran:
            if request.generated + 1 == request.output_tokens:
                step.finishing += [(block.block_id, request.stamp) for block in request.blocks]
        return step

    def _schedule_running(self, step: Step) -> bool:
        """Return whether anybody was preempted. A held request ends the loop, as in vLLM."""
        preempted = False
        index = 0
        while index < len(self.running):
            request = self.running[index]
            if self._give(request, step):
                step.ran.append(request)
                index += 1
            elif not preempted and self._memory.may_hold():
                step.held = True
                break
            else:
                # The newest goes; when that is this request itself, the loop ends with it.
                self._preempt(self.running.pop())
                preempted = True
        return preempted

    def _admit(self, step: Step, keep_free: int) -> None:
        while self.waiting and len(self.running) < self._requests_max:
            request = self.waiting[0]
            spare = keep_free if self.running else 0
            if not self._give(request, step, spare):
                break
            self.waiting.popleft()
            step.prefill_tokens += request.tokens
            self.running.append(request)
            step.ran.append(request)

    def _give(self, request: SimRequest, step: Step, spare: int = 0) -> bool:
        """Hand out the blocks that `request` lacks for one token more, all or none."""
        queue = self.pool.queue
        lack = ceil_div(request.tokens + 1, self._block_tokens) - len(request.blocks)
        if lack <= 0:
            return True
        missing = lack + spare - queue.num_free_blocks
        if missing > 0 and not self._memory.grow_now(missing):
            step.missing = max(step.missing, missing)
            return False
        blocks = queue.popleft_n(lack)
        request.blocks = request.blocks + blocks
        step.fresh += [(block.block_id, request.stamp) for block in blocks]
        return True

    def _preempt(self, request: SimRequest) -> None:
        self.preemptions += 1
        self._free(request)
        self.waiting.appendleft(request)

    def _free(self, request: SimRequest) -> None:
        self.pool.queue.prepend_n(request.blocks)
        request.blocks = []

    def update(self, step: Step) -> list[str]:
        """Take one new token for every request that ran; returns their ids."""
        for request in step.ran:
            request.generated += 1
            if request.generated == request.output_tokens:
                self._free(request)
                self.running.remove(request)
        return [request.request_id for request in step.ran]

    def blocks_due(self, steps: int) -> int:
        """Return the blocks that running requests take in the next `steps` steps."""
        size = self._block_tokens
        return sum(
            ceil_div(request.tokens + steps, size) - len(request.blocks)
            for request in self.running
            if request.tokens + steps > len(request.blocks) * size
        )

    def blocks_queued(self, requests: int) -> int:
        """Return the blocks that the next `requests` waiters take to be admitted."""
        size = self._block_tokens
        first = list(self.waiting)[:requests]
        return sum(ceil_div(request.tokens + 1, size) for request in first)

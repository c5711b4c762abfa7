"""The simulated engine's scheduler: continuous batching with preemption over blocks."""

from __future__ import annotations

import pytest
from bench.colocated.sim_requests import SimBlock, SimRequest, SimScheduler

from kvadmit.pool import ElasticPool

BLOCK_TOKENS = 4


class FakeMemory:
    """A pool of `extents` extents of two blocks; grows by one extent when told to."""

    def __init__(self, extents: int, resident: int, *, grows: bool = False) -> None:
        blocks = [SimBlock(number) for number in range(2 * extents)]
        self.pool: ElasticPool[SimBlock] = ElasticPool(
            blocks, 2, evict=lambda block: None, prefix=resident
        )
        self.holding = False
        self.lacks: list[int] = []
        self._grows = grows

    def grow_now(self, lack: int) -> bool:
        self.lacks.append(lack)
        if self._grows and self.pool.resident < self.pool.extents:
            self.pool.grow([self.pool.resident])
            return self.grow_now(lack - 2) if lack > 2 else True
        return False

    def may_hold(self) -> bool:
        return self.holding


def scheduler(memory: FakeMemory, requests_max: int = 8) -> SimScheduler:
    return SimScheduler(memory, block_tokens=BLOCK_TOKENS, requests_max=requests_max)


def ids(requests: list[SimRequest]) -> list[str]:
    return [request.request_id for request in requests]


def run_to_end(requests: SimScheduler, steps_max: int = 200) -> dict[str, int]:
    """Run until nothing is left; returns tokens by request."""
    tokens: dict[str, int] = {}
    for _ in range(steps_max):
        if not requests.running and not requests.waiting:
            return tokens
        step = requests.schedule(keep_free=0)
        for request_id in requests.update(step):
            tokens[request_id] = tokens.get(request_id, 0) + 1
    raise AssertionError(f"not done after {steps_max} steps: {tokens}")


def test_a_prompt_takes_blocks_for_one_token_more() -> None:
    requests = scheduler(FakeMemory(8, 8))
    requests.add(SimRequest("a", 7, 3))
    requests.add(SimRequest("b", 8, 3))
    step = requests.schedule(keep_free=0)
    assert ids(step.ran) == ["a", "b"]
    assert step.prefill_tokens == 15
    assert [len(request.blocks) for request in step.ran] == [2, 3]
    assert [stamp for _, stamp in step.fresh] == [1, 1, 2, 2, 2]


def test_everybody_gets_exactly_the_tokens_asked_for() -> None:
    memory = FakeMemory(8, 3)
    requests = scheduler(memory)
    for number in range(6):
        requests.add(SimRequest(str(number), 5, 4 + number))
    assert run_to_end(requests) == {str(number): 4 + number for number in range(6)}
    assert requests.preemptions > 0
    assert memory.pool.queue.num_free_blocks == 5  # all but the null block
    memory.pool.check()


def test_the_newest_is_preempted_and_comes_back_first() -> None:
    requests = scheduler(FakeMemory(8, 2))  # three blocks to hand out
    requests.add(SimRequest("old", 3, 9))
    requests.add(SimRequest("new", 3, 9))
    requests.add(SimRequest("next", 9, 9))
    requests.update(requests.schedule(keep_free=0))
    assert ids(requests.running) == ["old", "new"]
    requests.update(requests.schedule(keep_free=0))  # "old" takes the last block, "new" lacks one
    assert ids(requests.running) == ["old"]
    assert ids(list(requests.waiting)) == ["new", "next"]
    assert requests.waiting[0].blocks == []
    assert requests.waiting[0].generated == 1


def test_admission_leaves_blocks_for_running_requests() -> None:
    requests = scheduler(FakeMemory(8, 3))  # five blocks
    requests.add(SimRequest("a", 3, 9))
    requests.schedule(keep_free=3)  # alone: nobody to keep blocks for
    requests.add(SimRequest("b", 7, 9))
    step = requests.schedule(keep_free=3)
    assert ids(step.ran) == ["a"]
    assert step.missing == 1  # two blocks and three to keep, four are free


def test_growth_is_asked_for_what_is_lacking() -> None:
    memory = FakeMemory(8, 1, grows=True)
    requests = scheduler(memory)
    requests.add(SimRequest("a", 11, 2))
    assert ids(requests.schedule(keep_free=0).ran) == ["a"]
    assert memory.lacks == [2]  # three blocks, one was free
    assert memory.pool.resident == 2


def test_a_held_request_keeps_its_blocks_and_makes_no_token() -> None:
    memory = FakeMemory(8, 2)
    requests = scheduler(memory)
    requests.add(SimRequest("a", 3, 9))
    requests.add(SimRequest("b", 3, 9))
    requests.update(requests.schedule(keep_free=0))
    memory.holding = True
    step = requests.schedule(keep_free=0)
    assert step.held
    assert step.missing == 1
    assert requests.update(step) == ["a"]
    assert ids(requests.running) == ["a", "b"]
    assert len(requests.running[1].blocks) == 1
    assert requests.preemptions == 0


def test_blocks_of_ending_requests_are_named_before_they_are_free() -> None:
    requests = scheduler(FakeMemory(8, 8))
    requests.add(SimRequest("a", 3, 2))
    first = requests.schedule(keep_free=0)
    assert first.finishing == []
    requests.update(first)
    second = requests.schedule(keep_free=0)
    assert second.finishing == first.fresh + second.fresh
    requests.update(second)
    assert requests.running == []


@pytest.mark.parametrize(("steps", "due"), [(1, 1), (4, 2), (5, 3)])
def test_blocks_that_running_requests_take_next(steps: int, due: int) -> None:
    requests = scheduler(FakeMemory(8, 8))
    requests.add(SimRequest("full", 3, 9))
    requests.add(SimRequest("roomy", 4, 9))
    requests.update(requests.schedule(keep_free=0))  # 4 and 5 tokens in 1 and 2 blocks
    assert requests.blocks_due(steps) == due
    assert requests.blocks_queued(5) == 0


def test_no_more_run_than_may() -> None:
    requests = scheduler(FakeMemory(8, 8), requests_max=2)
    for number in range(4):
        requests.add(SimRequest(str(number), 3, 2))
    assert ids(requests.schedule(keep_free=0).ran) == ["0", "1"]
    assert requests.blocks_queued(1) == 1
    assert requests.blocks_queued(9) == 2

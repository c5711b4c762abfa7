"""The door's pieces over vLLM's own classes, without an engine."""

from __future__ import annotations

from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from vllm.exceptions import GracefulHTTPError
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvadmit.admission import Admission
from kvadmit.errors import LocalProtocolError
from kvadmit.geometry import RankBuffer
from kvadmit.pool import ElasticPool
from kvadmit.port import PoolPort
from kvadmit.testing.recording import MemoryBudget, RecordingSpace
from kvadmit.vllm import frontend
from kvadmit.vllm.backends import Backing
from kvadmit.vllm.failures import LATE, NEVER, Failures, never_fits, waited_too_long
from kvadmit.vllm.names import ENABLED, SIDE
from kvadmit.vllm.pageable import wrap_grammar_bitmask
from kvadmit.vllm.replacing import replace
from kvadmit.vllm.windows import WindowPins
from kvadmit.vllm.worker import KvBufferContext, WorkerSide, wrap_execute_model

pytestmark = pytest.mark.vllm

WHOLE = 4
EXTENTS = 8


def elastic(prefix: int = EXTENTS) -> tuple[BlockPool, ElasticPool[Any]]:
    """Return vLLM's block pool with ours under it, as the scheduler mixin builds it."""
    block_pool = BlockPool(EXTENTS * WHOLE, enable_caching=True, hash_block_size=16)
    pool: ElasticPool[Any] = ElasticPool(
        block_pool.blocks, WHOLE, block_pool._maybe_evict_cached_block, prefix
    )
    block_pool.free_block_queue = pool.queue
    block_pool.num_gpu_blocks = pool.blocks
    return block_pool, pool


def cache(block_pool: BlockPool, block: Any, name: int) -> None:
    key = make_block_hash_with_group_id(BlockHash(name.to_bytes(8, "little")), 0)
    block_pool._insert_block_hash(key, block, num_tokens=16)


def hit(block_pool: BlockPool, name: int) -> list[Any] | None:
    found: list[Any] | None = block_pool.get_cached_block(
        BlockHash(name.to_bytes(8, "little")), [0]
    )
    return found


# --- the pool under vLLM's BlockPool ----------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "free", "hit", "reset", "grow", "withdraw"]),
            st.integers(0, 1 << 16),
        ),
        max_size=60,
    )
)
def test_block_pool_keeps_its_promises_on_an_elastic_queue(steps: list[tuple[str, int]]) -> None:
    """Blocks are free or referenced, hits lie in resident extents, usage is a share."""
    block_pool, pool = elastic(prefix=2)
    held: list[Any] = []
    names: dict[int, Any] = {}
    absent = list(range(2, EXTENTS))
    for number, (what, amount) in enumerate(steps):
        match what:
            case "take":
                count = amount % (block_pool.get_num_free_blocks() + 1)
                for block in block_pool.get_new_blocks(count):
                    held.append(block)
                    if block.block_id % 2:
                        cache(block_pool, block, number * 1000 + block.block_id)
                        names[number * 1000 + block.block_id] = block
            case "free":
                count = amount % (len(held) + 1)
                freed, held = held[:count], held[count:]
                block_pool.free_blocks(reversed(freed))
            case "hit" if names:
                name = sorted(names)[amount % len(names)]
                found = hit(block_pool, name)
                if found is None:
                    del names[name]
                else:
                    assert found[0].block_id // WHOLE not in absent
                    block_pool.touch(found)
                    held += found
            case "reset":
                assert block_pool.reset_prefix_cache() == (not held)
                pool.queue.forget_hashes()
            case "grow" if absent:
                pool.grow([absent.pop(amount % len(absent))])
            case "withdraw":
                absent += pool.withdraw(amount % (EXTENTS + 1))
        block_pool.num_gpu_blocks = pool.blocks
        pool.check()
        referenced = {block.block_id for block in held}
        assert block_pool.get_num_free_blocks() + len(referenced) + 1 == pool.blocks
        assert 0 <= block_pool.get_usage() <= 1


def test_asking_for_more_than_is_free_is_the_callers_mistake() -> None:
    block_pool, _ = elastic(prefix=1)
    with pytest.raises(ValueError, match="Cannot get 4 free blocks"):
        block_pool.get_new_blocks(4)


def test_hashes_go_before_memory_goes() -> None:
    block_pool, pool = elastic()
    taken = block_pool.get_new_blocks(EXTENTS * WHOLE - 1)
    for block in taken:
        cache(block_pool, block, block.block_id)
    block_pool.free_blocks(reversed(taken))
    assert hit(block_pool, 5) is not None
    assert len(pool.withdraw(1)) == EXTENTS - 1
    assert all(hit(block_pool, name) is None for name in range(WHOLE, EXTENTS * WHOLE))
    assert hit(block_pool, 1) is not None


# --- windows ----------------------------------------------------------------------------------


def test_an_extent_behind_a_live_window_is_pinned_until_the_request_ends() -> None:
    block_pool, pool = elastic()
    spec = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=32
    )
    manager = SlidingWindowManager(
        spec,
        block_pool=block_pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=16,
    )
    WindowPins(pool, SimpleNamespace(single_type_managers=[manager]), block_pool)
    blocks = block_pool.get_new_blocks(12)
    manager.req_to_blocks["long"] = list(blocks)
    manager.num_cached_block["long"] = 0
    other = block_pool.get_new_blocks(EXTENTS * WHOLE - 13)
    manager.remove_skipped_blocks("long", 12 * 16)
    behind = {block.block_id // WHOLE for block in blocks if not block.ref_cnt} - {0}
    free = pool.levels().free
    assert behind
    assert free == 0
    assert pool.withdraw(1) == []
    block_pool.free_blocks(other)
    assert not behind & set(pool.withdraw(1))
    manager.free("long")
    assert behind <= set(pool.withdraw(1))
    pool.check()


# --- the buffer's context ---------------------------------------------------------------------


def test_the_context_answers_exactly_the_one_allocation() -> None:
    buffer = torch.ones(4096, dtype=torch.int8)
    with KvBufferContext(buffer) as context:
        other = torch.zeros(4096, dtype=torch.float32)
        smaller = torch.zeros(64, dtype=torch.int8)
        ours = torch.zeros(4096, dtype=torch.int8, device=torch.device("cpu"))
    assert context.taken == 1
    assert ours is buffer
    assert other.sum() == smaller.sum() == 0
    assert torch.zeros(4096, dtype=torch.int8) is not buffer


@pytest.mark.parametrize("times", [0, 2])
def test_the_context_fails_unless_it_was_used_once(times: int) -> None:
    buffer = torch.ones(16, dtype=torch.int8)

    def allocate() -> None:
        with KvBufferContext(buffer):
            for _ in range(times):
                torch.zeros(16, dtype=torch.int8)

    with pytest.raises(LocalProtocolError, match=f"{times} times inside the hook"):
        allocate()


# --- a worker's step --------------------------------------------------------------------------


class LoggingSpace(RecordingSpace):
    """A space of EXTENTS that logs on which stream it was zeroed."""

    def __init__(self, log: list[object]) -> None:
        buffer = RankBuffer(device="any", granule_bytes=4096, strides=(4096,))
        super().__init__(buffer.layout(EXTENTS, 1), budget=MemoryBudget(EXTENTS * 4096))
        self.log = log

    def zero_fresh(self, stream: int) -> None:
        super().zero_fresh(stream)
        self.log.append(stream)


def worker_side(space: LoggingSpace) -> Any:
    side: Any = object.__new__(WorkerSide)
    side.plan = SimpleNamespace(prefix=2)
    side.backing = Backing(
        space, torch.empty(0), stream=lambda: 7, device_wait=lambda: space.log.append("waited")
    )
    return side


def test_the_prefix_is_zero_before_anything_else_is_enqueued() -> None:
    """Warm-up and capture write there, on streams of their own."""
    log: list[object] = []
    space = LoggingSpace(log)
    worker_side(space)._back_prefix()
    assert log == [7, "waited"]
    assert space.is_zero(0)
    assert space.is_zero(1)


def test_what_is_new_is_zeroed_on_the_steps_stream_before_the_step() -> None:
    log: list[object] = []
    space = LoggingSpace(log)
    side = worker_side(space)
    worker = SimpleNamespace(**{SIDE: side})
    step = wrap_execute_model(lambda worker, scheduled: log.append(scheduled))
    for name in ("first", "second", "third"):
        if name == "second":
            space.prepare([2, 3])
            space.commit([2, 3])
        step(worker, name)
    assert log == ["first", 7, "second", "third"]
    assert space.is_zero(2)


# --- failures, from scheduler to client -------------------------------------------------------


def admission() -> Admission[Any]:
    _, pool = elastic(prefix=2)
    port = PoolPort(wake_pool=lambda: None, wake_coordinator=lambda: None)
    return Admission(pool, port, ceiling=4)


def request(name: str, client: int = 0) -> Any:
    return SimpleNamespace(
        request_id=name, client_index=client, pooling_params=None, is_finished=lambda: False
    )


def test_a_hopeless_request_is_ended_once_and_told_with_its_clients_outputs() -> None:
    failures = Failures()
    failures.add(request("a", client=1), "first")
    failures.add(request("a", client=1), "second")
    failures.add(request("b"), "other")
    assert [one.request_id for one in failures.take_due()] == ["a", "b"]
    assert not failures.due
    running = EngineCoreOutput(request_id="c", new_token_ids=[7])
    outputs = {0: EngineCoreOutputs(outputs=[running])}
    failures.emit(outputs)
    assert [one.request_id for one in outputs[0].outputs] == ["c", "b"]
    (told,) = outputs[1].outputs
    assert (told.finish_reason, told.stop_reason) == (FinishReason.ERROR, "first")
    assert not failures.ended


def test_the_texts_name_what_is_needed_and_what_there_is() -> None:
    text = never_fits(300, 19, admission(), 1 << 20)
    assert "300 tokens need 5MiB" in text
    assert "can have 4MiB at most" in text
    late = waited_too_long(11, admission(), 1 << 20, 2.5)
    assert "needs 3MiB" in late
    assert "holds 2MiB and got no more from its neighbours within 2.5 s" in late


@pytest.mark.parametrize(
    ("mark", "status"),
    [
        (NEVER, HTTPStatus.BAD_REQUEST),
        (LATE, HTTPStatus.SERVICE_UNAVAILABLE),
    ],
)
def test_a_marked_reason_reaches_whoever_awaits_the_request(mark: str, status: HTTPStatus) -> None:
    queued: list[Exception] = []
    queue = SimpleNamespace(put=queued.append)
    passed: list[Any] = []

    class Processor:
        def __init__(self) -> None:
            self.request_states = {
                "a": SimpleNamespace(queue=queue),
                "b": SimpleNamespace(queue=None),
            }

        def process_outputs(self, outputs: list[Any]) -> None:
            passed.extend(outputs)

    replace(Processor, "process_outputs", frontend.wrap_process_outputs)
    outputs = [
        EngineCoreOutput(
            request_id=name,
            new_token_ids=[],
            finish_reason=FinishReason.ERROR,
            stop_reason=f"{mark}No room.",
        )
        for name in ("a", "b", "gone")
    ]
    Processor().process_outputs(outputs)
    (error,) = queued
    assert isinstance(error, GracefulHTTPError)
    assert (str(error), error.http_status) == ("kvadmit: No room.", status)
    assert passed == outputs
    assert {output.stop_reason for output in outputs} == {"kvadmit: No room."}


def test_other_errors_and_stop_reasons_pass_unseen() -> None:
    assert frontend.error_of(None) is None
    assert frontend.error_of(17) is None
    assert frontend.error_of("a stop string") is None


def test_a_replacement_is_made_once_and_beside_other_plugins() -> None:
    """`activate` runs for each engine of a process; others may have been here before or since."""

    class Owner:
        def act(self) -> list[str]:
            return ["vLLM"]

    def ours(original: Any) -> Any:
        return lambda self: ["ours", *original(self)]

    def wrapped_by_others(name: str) -> None:
        original: Any = Owner.act
        Owner.act = lambda self: [name, *original(self)]  # type: ignore[method-assign]

    wrapped_by_others("before")
    replace(Owner, "act", ours)
    replace(Owner, "act", ours)
    wrapped_by_others("since")
    replace(Owner, "act", ours)
    assert Owner().act() == ["since", "ours", "before", "vLLM"]


# --- structured output ------------------------------------------------------------------------


class Makers(TorchFunctionMode):  # type: ignore[misc]  # vLLM's and torch's are Any here
    """Makes no tensor while entered; notes who would have been pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[bool] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.pinned.append(kwargs["pin_memory"])
        return "mask"


def test_the_token_bitmask_of_an_enabled_engine_is_pageable() -> None:
    def original(self: Any) -> Any:
        if self._grammar_bitmask is None:
            self._grammar_bitmask = torch.full((2, 4), -1, dtype=torch.int32, pin_memory=True)
        return self._grammar_bitmask

    replaced = wrap_grammar_bitmask(original)
    with Makers() as makers:
        for enabled in (True, False):
            config = SimpleNamespace(**{ENABLED: enabled})
            manager = SimpleNamespace(vllm_config=config, _grammar_bitmask=None)
            assert [replaced(manager), replaced(manager)] == ["mask", "mask"]
    assert makers.pinned == [False, True]

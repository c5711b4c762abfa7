"""The scheduler mixin over a base that does as the test says, step by step."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from kvadmit.admission import Admission
from kvadmit.port import Ceiling, Limit, PoolLevels, PoolPort, PoolReturned, Resident
from kvadmit.vllm import scheduler as module
from kvadmit.vllm import stalls
from kvadmit.vllm.failures import LATE, NEVER

pytestmark = pytest.mark.vllm

WHOLE = 4
EXTENTS = 16
SIZE = 32


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.block_hash: object = None


class Queue(deque[Any]):
    def peek_request(self) -> Any:
        return self[0]


class Coordinator:
    """vLLM's KV cache coordinator: one manager, and a count that the test gives."""

    def __init__(self, manager: Any) -> None:
        self.single_type_managers = [manager]

    def get_num_blocks_to_allocate(self, wanted: int) -> int:
        return wanted


class Output(SimpleNamespace):
    total_num_scheduled_tokens: int
    kvadmit_step: int


class Base:
    """As much of vLLM's scheduler as the mixin touches."""

    def __init__(self, prefix: int, wait_s: float, executor: str) -> None:
        spec = SimpleNamespace(max_memory_usage_bytes=lambda _: 1 << 20, page_size_bytes=1)
        manager = SimpleNamespace(block_size=SIZE, kv_cache_spec=spec, req_to_blocks={})
        blocks = [Block(number) for number in range(EXTENTS * WHOLE)]
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            parallel_config=SimpleNamespace(distributed_executor_backend=executor),
        )
        self.running: list[Any] = []
        self.waiting = Queue()
        self.finished: list[tuple[str, Any]] = []
        self._inflight_prefills: set[Any] = set()
        self.freeable = True
        self.kv_cache_manager = SimpleNamespace(
            block_pool=SimpleNamespace(
                blocks=blocks, _maybe_evict_cached_block=lambda _: None, num_gpu_blocks=0
            ),
            coordinator=Coordinator(manager),
            watermark_blocks=0,
            get_computed_blocks=lambda _: None,
        )
        self.unscheduled: set[str] = set()
        self.script: Callable[[], int] = lambda: len(self.running)
        """What vLLM does in a step; returns how many tokens it scheduled."""

    def schedule(self) -> Output:
        tokens = self.script()
        ids = {one.request_id for one in self.running} - self.unscheduled
        scheduled = dict.fromkeys(ids, 1) if tokens else {}
        return Output(total_num_scheduled_tokens=tokens, num_scheduled_tokens=scheduled)

    def get_grammar_bitmask(self, output: Output) -> str:
        return f"bitmask of {output.kvadmit_step}"

    def _request_blocks_can_be_freed(self, request: Any) -> bool:
        return self.freeable

    def add_request(self, request: Any) -> None:
        self.waiting.append(request)

    def finish_requests(self, request_id: str, status: Any) -> None:
        self.finished.append((request_id, status))
        self.waiting = Queue(one for one in self.waiting if one.request_id != request_id)

    def update_from_output(self) -> dict[int, EngineCoreOutputs]:
        return {}

    def reset_prefix_cache(self) -> bool:
        for block in self.kv_cache_manager.block_pool.blocks:
            block.block_hash = None
        return True

    def has_requests(self) -> bool:
        return bool(self.running or self.waiting)


class Elastic(module.ElasticScheduler, Base):
    """The mixin without its constructor, which needs a live engine."""

    kvadmit: Admission[Any]

    def __init__(self, prefix: int = 4, wait_s: float = 60.0, executor: str = "uni") -> None:
        Base.__init__(self, prefix, wait_s, executor)
        self.port = PoolPort(wake_pool=lambda: None, wake_coordinator=lambda: None)
        plan = SimpleNamespace(
            extent_blocks=WHOLE,
            prefix=prefix,
            cap=EXTENTS,
            blocks=EXTENTS * WHOLE,
            extent_bytes={"host": 1 << 20},
        )
        engine: Any = SimpleNamespace(
            plan=plan,
            coordinator=SimpleNamespace(port=self.port),
            lost="",
            core=object(),
            settings=SimpleNamespace(wait_s=wait_s),
        )
        self.engine = engine
        self._kvadmit_setup(engine)

    def ask(self, request: Any, blocks: int) -> None:
        """Do what vLLM does for a waiter: look for cached blocks, count, refuse."""
        self.kv_cache_manager.get_computed_blocks(request)
        self.kv_cache_manager.coordinator.get_num_blocks_to_allocate(blocks)

    def posted(self) -> PoolLevels:
        levels = [event for event in self.port.collect() if isinstance(event, PoolLevels)]
        assert levels, "nothing was posted"
        return levels[-1]


@pytest.fixture(autouse=True)
def _no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "windowed_managers", lambda *_: [])


def request(name: str, tokens: int = 100, status: Any = RequestStatus.RUNNING) -> Any:
    made = SimpleNamespace(
        request_id=name,
        client_index=0,
        pooling_params=None,
        num_tokens=tokens,
        num_computed_tokens=tokens,
        num_prompt_tokens=tokens,
        status=status,
    )
    made.is_finished = lambda: False
    return made


def waiter(name: str, tokens: int = 100) -> Any:
    return request(name, tokens, RequestStatus.WAITING)


def test_every_step_has_a_number_and_an_empty_one_has_the_last() -> None:
    elastic = Elastic()
    elastic.running.append(request("a"))
    assert [elastic.schedule().kvadmit_step for _ in range(3)] == [1, 2, 3]
    elastic.running.clear()
    assert elastic.schedule().kvadmit_step == 3
    assert elastic.kvadmit.step == 3


def test_granted_extents_count_before_vllm_schedules() -> None:
    elastic = Elastic(prefix=1)
    elastic.port.give(Resident(((1, 3),)))
    seen: list[int] = []

    def look() -> int:
        seen.append(elastic.kv_cache_manager.block_pool.num_gpu_blocks)
        return 0

    elastic.script = look
    elastic.schedule()
    assert seen == [4 * WHOLE]


def test_a_withdrawal_carries_the_last_scheduled_step_as_its_fence() -> None:
    elastic = Elastic(prefix=4)
    elastic.running.append(request("a"))
    for _ in range(5):
        elastic.schedule()
    elastic.port.collect()
    elastic.port.give(Limit(2))
    elastic.schedule()
    (returned,) = [event for event in elastic.port.collect() if isinstance(event, PoolReturned)]
    assert returned == PoolReturned(((2, 2),), 5)
    assert elastic.kv_cache_manager.block_pool.num_gpu_blocks == 2 * WHOLE


def short_of_blocks(executor: str) -> Elastic:
    """Return an engine whose next steps find no slots for the second of two requests."""
    elastic = Elastic(prefix=2, executor=executor)
    elastic.running += [request("a"), request("b")]
    elastic.unscheduled.add("b")
    elastic.kvadmit.pool.queue.popleft_n(2 * WHOLE - 1)

    def preempt() -> int:
        elastic._request_blocks_can_be_freed(elastic.running[1])
        return 1

    elastic.script = preempt
    return elastic


def test_in_one_process_a_step_tells_what_it_showed_before_the_model_runs() -> None:
    elastic = short_of_blocks("uni")
    elastic.schedule()
    assert elastic.posted().need_total > 2
    assert elastic.kvadmit.overlapped.count == 0


def test_workers_have_the_step_before_it_tells_what_it_showed() -> None:
    elastic = short_of_blocks("mp")
    output = elastic.schedule()
    assert elastic.port.collect() == []
    assert elastic.get_grammar_bitmask(output) == "bitmask of 1"
    assert elastic.posted().need_total > 2
    assert elastic.kvadmit.overlapped.count == 1
    assert elastic.get_grammar_bitmask(output) == "bitmask of 1"
    assert elastic.kvadmit.overlapped.count == 1


def test_what_a_step_showed_is_told_by_the_next_at_the_latest() -> None:
    elastic = short_of_blocks("mp")
    elastic.schedule()
    assert elastic.port.collect() == []
    elastic.unscheduled.clear()
    elastic.schedule()
    (levels,) = elastic.port.collect()
    assert isinstance(levels, PoolLevels)
    assert levels.need_total > 2
    assert elastic.kvadmit.overlapped.count == 0, "the second step waited for it"


def test_a_held_step_gives_its_watermark_back_before_the_next() -> None:
    elastic = short_of_blocks("mp")
    elastic.port.hold_until_s = time.monotonic() + 60
    watermark = elastic.kv_cache_manager.watermark_blocks
    output = elastic.schedule()
    assert elastic.kvadmit.held_steps == 1
    assert elastic.kv_cache_manager.watermark_blocks == elastic.kvadmit.pool.blocks
    elastic.get_grammar_bitmask(output)
    assert elastic.kv_cache_manager.watermark_blocks < elastic.kvadmit.pool.blocks
    assert elastic.kv_cache_manager.watermark_blocks >= watermark


def test_the_first_request_of_an_idle_engine_is_told_at_once() -> None:
    elastic = Elastic()
    elastic.running.append(request("a"))
    elastic.schedule()
    elastic.running.clear()
    elastic.schedule()
    assert elastic.posted().running == 0
    elastic.running.append(request("b"))
    elastic.schedule()
    assert elastic.posted().running == 1


def test_a_need_is_compared_anew_when_another_waiter_is_refused() -> None:
    elastic = Elastic(prefix=2)
    elastic.running.append(request("a"))
    wanted = {"large": 40, "small": 2}

    def refuse() -> int:
        one = elastic.waiting.peek_request()
        elastic.ask(one, wanted[one.request_id])
        return 1

    elastic.script = refuse
    elastic.kvadmit.pool.queue.popleft_n(2 * WHOLE - 1)
    elastic.waiting.append(waiter("large"))
    elastic.schedule()
    large = elastic.posted().need_total
    elastic.waiting = type(elastic.waiting)([waiter("small")])
    elastic.kvadmit.look_s = 0.0
    elastic.schedule()
    assert elastic.posted().need_total < large


def test_a_step_that_schedules_nothing_tells_at_once_because_no_worker_gets_it() -> None:
    elastic = short_of_blocks("mp")
    elastic.script = lambda: 0
    elastic.schedule()
    assert elastic.posted().running == 2


def test_a_limit_that_nothing_can_be_given_for_costs_no_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elastic = Elastic(prefix=4)
    elastic.running.append(request("a"))
    taken = elastic.kvadmit.pool.queue.popleft_n(4 * WHOLE - 1)
    drains: list[float] = []
    drain = Admission.drain

    def counted(self: Admission[Any], now_s: float) -> int:
        drains.append(now_s)
        return drain(self, now_s)

    monkeypatch.setattr(Admission, "drain", counted)
    elastic.schedule()
    elastic.port.give(Limit(3))
    elastic.schedule()
    elastic.schedule()
    assert drains == []
    elastic.kvadmit.pool.queue.prepend_n(taken)
    elastic.schedule()
    assert len(drains) == 1
    assert elastic.kvadmit.pool.resident == 3


def test_a_refused_waiter_becomes_a_need_of_exactly_what_it_lacks() -> None:
    elastic = Elastic(prefix=2)
    one = waiter("a", 400)
    elastic.waiting.append(one)

    def refuse() -> int:
        elastic.ask(one, 13)
        return 0

    elastic.script = refuse
    elastic.schedule()
    levels = elastic.posted()
    assert levels.need_total == 2 + 2, "13 asked, 7 free, 4 to an extent"
    left = vars(elastic.kv_cache_manager.coordinator)
    assert "get_num_blocks_to_allocate" not in left, "vLLM's own is back"


def test_a_waiter_that_stays_refused_is_counted_each_step_and_looked_at_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elastic = Elastic(prefix=2)
    elastic.running.append(request("busy"))
    one = waiter("a", 400)
    elastic.waiting.append(one)

    def refuse() -> int:
        elastic.ask(one, 13)
        return 1

    elastic.script = refuse
    elastic.schedule()
    need = elastic.posted().need_total
    assert need > 2
    looked: list[float] = []
    lack = elastic._kvadmit_waiter_lack

    def look(request: Any, now_s: float) -> int:
        looked.append(now_s)
        return int(lack(request, now_s))

    monkeypatch.setattr(elastic, "_kvadmit_waiter_lack", look)
    for _ in range(4):
        elastic.schedule()
    assert not looked, "its need is known"
    assert elastic.kvadmit.no_slot_steps == 5
    elastic.kvadmit_step.look_ns = 0
    elastic.schedule()
    assert len(looked) == 1

    def admit() -> int:
        elastic.ask(one, 13)
        one.status = RequestStatus.RUNNING
        return 1

    elastic.script = admit
    elastic.waiting.clear()
    elastic.kvadmit.look_s = 0.0
    elastic.schedule()
    assert elastic.posted().need_total == 0, "a waiter that got in needs nothing"
    assert len(looked) == 1
    assert elastic.kvadmit.no_slot_steps == 6


def test_a_step_that_shows_nothing_new_posts_nothing_and_looks_at_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elastic = Elastic(prefix=8)
    elastic.running += [request(str(number)) for number in range(4)]
    elastic.schedule()
    elastic.port.collect()
    monkeypatch.setattr(elastic, "_kvadmit_after", None)
    for _ in range(20):
        elastic.schedule()
    assert elastic.port.collect() == []
    elastic.kvadmit.pool.queue.popleft_n(elastic.kvadmit.pool.queue.num_free_blocks - 3)
    with pytest.raises(TypeError):
        elastic.schedule()  # three blocks are fewer than four requests may take: it publishes


def test_what_could_be_given_up_is_told_once_somebody_waits() -> None:
    elastic = Elastic(prefix=8)
    elastic.running.append(request("a"))
    taken = elastic.kvadmit.pool.queue.popleft_n(24)
    elastic.schedule()
    before = elastic.posted().free
    elastic.kvadmit.pool.queue.prepend_n(taken)
    elastic.port.pressure = True
    elastic.kvadmit.look_s = 0.0
    elastic.kvadmit.pool.queue.empty_extents()  # as the next hand-out would find
    elastic.schedule()
    assert elastic.posted().free > before + 4


def test_a_preemption_while_a_need_is_posted_is_nothing_new() -> None:
    elastic = Elastic(prefix=2)
    elastic.running += [request("a", 900), request("b", 900), request("c", 900)]
    elastic.script = missing(elastic)
    elastic.schedule()
    assert elastic.posted().need_total > 2
    counted = elastic.kvadmit.no_slot_steps

    def preempt() -> int:
        elastic._request_blocks_can_be_freed(elastic.running[-1])
        return 1

    elastic.script = preempt
    elastic.schedule()
    assert elastic.port.collect() == []
    assert elastic.kvadmit.no_slot_steps == counted + 1


def test_an_admitted_waiter_is_no_need() -> None:
    elastic = Elastic(prefix=4)
    one = waiter("a", 60)

    def admit() -> int:
        elastic.ask(one, 2)
        one.status = RequestStatus.RUNNING
        elastic.running.append(one)
        return 60

    elastic.script = admit
    elastic.schedule()
    assert elastic.posted().need_total == 0


def missing(elastic: Elastic) -> Callable[[], int]:
    """Return a step in which the last running request finds no slots and is to be preempted."""

    def step() -> int:
        victim = elastic.running[-1]
        if elastic._request_blocks_can_be_freed(victim):
            elastic.running.pop()
            assert elastic._request_blocks_can_be_freed(victim), "its blocks are freed now"
            victim.status = RequestStatus.PREEMPTED
            elastic.waiting.appendleft(victim)
        return 0

    return step


def test_without_memory_on_its_way_vllm_preempts_as_always() -> None:
    elastic = Elastic(prefix=2)
    elastic.running.append(request("a", 300))
    elastic.script = missing(elastic)
    elastic.schedule()
    assert [one.request_id for one in elastic.waiting] == ["a"]
    assert elastic.kvadmit.held_steps == 0
    assert elastic.posted().need_total > 2


def test_with_memory_on_its_way_a_request_is_held_twice_and_no_waiter_takes_its_blocks() -> None:
    elastic = Elastic(prefix=2)
    elastic.running.append(request("a", 300))
    step = missing(elastic)
    watermarks: list[int] = []

    def watched() -> int:
        tokens = step()
        watermarks.append(elastic.kv_cache_manager.watermark_blocks)
        return tokens

    elastic.script = watched
    elastic.port.hold_until_s = time.monotonic() + 60
    for held in (1, 2):
        elastic.schedule()
        assert elastic.kvadmit.held_steps == held
        assert not elastic.waiting
        assert elastic.kv_cache_manager.watermark_blocks < 2 * WHOLE
    assert watermarks == [2 * WHOLE] * 2
    elastic.schedule()
    assert elastic.waiting, "the third time it is preempted"


def test_requests_that_end_are_never_held_back() -> None:
    elastic = Elastic(prefix=2)
    one = request("a")
    elastic.running.append(one)
    elastic.port.hold_until_s = time.monotonic() + 60
    assert elastic._request_blocks_can_be_freed(one), "outside a step"
    gone = request("gone")

    def end() -> int:
        assert elastic._request_blocks_can_be_freed(gone)
        return 1

    elastic.script = end
    elastic.schedule()
    elastic.freeable = False
    elastic.script = lambda: 1
    assert not elastic._request_blocks_can_be_freed(one), "vLLM's own answer counts"


def test_a_request_over_the_ceiling_fails_in_the_next_step_and_is_told() -> None:
    elastic = Elastic(prefix=2)
    elastic.add_request(waiter("big", SIZE * WHOLE * EXTENTS))
    elastic.add_request(waiter("small", 10))
    elastic.schedule()
    assert elastic.finished == [("big", RequestStatus.FINISHED_ERROR)]
    (output,) = elastic.update_from_output()[0].outputs
    assert (output.request_id, output.finish_reason) == ("big", FinishReason.ERROR)
    assert output.stop_reason.startswith(NEVER)
    assert elastic.update_from_output() == {}


def test_a_lowered_ceiling_fails_those_who_wait_for_more() -> None:
    elastic = Elastic(prefix=2)
    elastic.add_request(waiter("long", SIZE * WHOLE * 4))
    elastic.add_request(waiter("short", 10))
    elastic.schedule()
    assert elastic.finished == []
    elastic.port.give(Ceiling(3))
    elastic.schedule()
    assert [name for name, _ in elastic.finished] == ["long"]


def test_patience_counts_only_while_the_request_would_not_fit_alone() -> None:
    elastic = Elastic(prefix=2, wait_s=0.0)
    one = waiter("a", SIZE * 3)
    elastic.waiting.append(one)

    def refuse() -> int:
        elastic.ask(one, 30)
        return 0

    elastic.script = refuse
    elastic.schedule()
    elastic.schedule()
    assert elastic.finished == [], "it waits for requests of its own engine"
    one.num_tokens = SIZE * 2 * WHOLE
    elastic.schedule()
    elastic.schedule()
    assert [name for name, _ in elastic.finished] == ["a"]
    (output,) = elastic.update_from_output()[0].outputs
    assert output.stop_reason.startswith(LATE)


def test_an_engine_parks_only_when_memory_is_all_it_waits_for() -> None:
    elastic = Elastic(prefix=2, wait_s=0.5)
    one = waiter("a", SIZE * 2 * WHOLE)
    elastic.waiting.append(one)
    elastic.script = lambda: 0
    elastic.schedule()
    assert elastic.kvadmit_park_s() == 0, "nobody was refused"

    def refuse() -> int:
        elastic.ask(one, 30)
        return 0

    elastic.script = refuse
    elastic.schedule()
    assert 0 < elastic.kvadmit_park_s() <= 0.5, "until its patience ends"
    other = waiter("b")
    other.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    elastic.waiting.append(other)
    assert elastic.kvadmit_park_s() == 0, "vLLM polls for the other one"
    elastic.waiting.pop()
    elastic.port.give(Resident(((2, 1),)))
    assert elastic.kvadmit_park_s() == 0, "an order is there"


def test_a_stall_for_want_of_memory_is_named_and_logged_once_when_it_has_lasted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls.logger, "propagate", True)
    elastic = Elastic(prefix=2)
    one = waiter("a", SIZE * 2 * WHOLE)
    elastic.waiting.append(one)

    def refuse() -> int:
        elastic.ask(one, 30)
        return 0

    def steps(scheduled: int) -> None:
        elastic.script = refuse if not scheduled else lambda: scheduled
        elastic.schedule()

    def wait(seconds: float) -> None:
        elastic.kvadmit_step.stalled_ns -= int(seconds * 1e9)

    steps(0)
    assert stalls.stall(elastic, time.monotonic()) == "", "it has just begun"
    wait(stalls.STALL_S + 2)
    text = stalls.stall(elastic, time.monotonic())
    assert text.startswith("no token for 12 s: request a, the oldest of 1 that wait, needs 3MiB")
    assert text.endswith("this instance holds 2MiB")
    with caplog.at_level(logging.WARNING, "vllm.kvadmit"):
        steps(0)
        steps(0)
        steps(1)
        steps(1)
    assert [record.getMessage() for record in caplog.records] == [
        text,
        "no stall any more, after 12 s",
    ]
    assert stalls.stall(elastic, time.monotonic()) == ""
    # One that left without a step is no reason against those who come later.
    steps(0)
    wait(stalls.STALL_S + 2)
    elastic.waiting.clear()
    elastic.add_request(one)
    elastic.waiting.append(one)
    steps(0)
    assert stalls.stall(elastic, time.monotonic()) == ""


def test_an_engine_that_just_preempted_looks_again_before_it_parks() -> None:
    elastic = Elastic(prefix=2)
    elastic.running.append(request("a", 300))
    elastic.script = missing(elastic)
    elastic.schedule()
    assert elastic.kvadmit_park_s() == 0


def test_waiters_without_a_seat_want_no_memory() -> None:
    elastic = Elastic(prefix=8)
    elastic.running += [request(str(number)) for number in range(8)]
    elastic.waiting += [waiter(f"w{number}", 300) for number in range(20)]
    elastic.schedule()
    assert elastic.posted().want_total <= 8
    elastic.running.pop()
    elastic.kvadmit.pool.queue.popleft_n(24)
    elastic.schedule()
    assert elastic.posted().want_total > 8


def test_orders_reach_an_idle_engine() -> None:
    elastic = Elastic(prefix=6)
    elastic.schedule()
    elastic.port.give(Limit(1))
    elastic.kvadmit_wake()
    assert elastic.kvadmit.pool.resident == 1
    assert elastic.kv_cache_manager.block_pool.num_gpu_blocks == WHOLE
    elastic.waiting.append(waiter("a"))
    elastic.port.give(Resident(((3, 1),)))
    elastic.kvadmit_wake()
    assert elastic.kvadmit.pool.resident == 1, "with requests, the next step drains"


def test_a_reset_of_an_idle_engine_tells_what_it_freed() -> None:
    elastic = Elastic(prefix=4)
    elastic.running.append(request("a"))
    taken = elastic.kvadmit.pool.queue.popleft_n(15)
    elastic.schedule()
    for block in taken:
        block.block_hash = "known"
    elastic.kvadmit.pool.queue.append_n(taken)
    elastic.running.clear()
    elastic.schedule()
    before = elastic.posted()
    assert (before.free, before.cached) == (0, 3)
    assert elastic.reset_prefix_cache()
    after = elastic.posted()
    assert (after.free, after.cached) == (3, 0)


def test_a_lost_rank_ends_an_in_process_engine() -> None:
    elastic = Elastic()
    elastic.kvadmit_step.lost = "rank 0 closed its lease line"
    with pytest.raises(RuntimeError, match="kvadmit: rank 0 closed"):
        elastic.schedule()


def test_running_requests_keep_their_next_blocks_from_new_admissions() -> None:
    elastic = Elastic(prefix=4)
    elastic.running += [request(str(number), SIZE - 1) for number in range(6)]
    elastic.kvadmit.pool.queue.popleft_n(8)
    elastic.schedule()
    # Two steps of six requests are 12 of the 32 tokens of a block.
    assert elastic.kv_cache_manager.watermark_blocks == 1
    levels = elastic.posted()
    assert levels.want_total >= 4, "seven free, six wanted: content"
    elastic.kvadmit.pool.queue.popleft_n(4)
    elastic.schedule()
    assert elastic.posted().want_total > 4

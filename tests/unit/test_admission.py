"""Orders in, levels out: the scheduler thread's side of the port."""

from __future__ import annotations

from typing import Any

import pytest

from kvadmit.admission import REFRESH_S, REFRESH_SLOW_S, Admission, WaitHistogram
from kvadmit.pool import ElasticPool
from kvadmit.port import Ceiling, Limit, PoolLevels, PoolPort, PoolReturned, Resident

WHOLE = 4
EXTENTS = 64


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.block_hash: str | None = None


class Bench:
    """An admission over a pool of 64 extents of 4 blocks, with the coordinator's end."""

    def __init__(self, prefix: int = 1, ceiling: int = EXTENTS) -> None:
        self.blocks = [Block(number) for number in range(EXTENTS * WHOLE)]
        self.evicted: list[int] = []
        self.wakes = 0
        self.port = PoolPort(wake_pool=lambda: None, wake_coordinator=self._woken)
        self.pool: ElasticPool[Block] = ElasticPool(
            self.blocks, WHOLE, lambda block: self.evicted.append(block.block_id), prefix
        )
        self.admission: Admission[Block] = Admission(self.pool, self.port, ceiling=ceiling)

    def _woken(self) -> None:
        self.wakes += 1

    def publish(self, now_s: float, **shown: int) -> list[Any]:
        """Publish one step; return what reached the coordinator."""
        step = {"running": 1, "waiting": 0, "missing": 0, "low": 0} | shown
        self.admission.publish(now_s, **step)
        return self.port.collect()

    def use(self, blocks: int) -> list[Block]:
        return self.pool.queue.popleft_n(blocks)

    def can_give(self) -> bool:
        """Whether the next step drains because of a limit it could come nearer to."""
        return self.pool.queue.frees > self.admission.give_after


def wide() -> Admission[Block]:
    """Return an admission over 16 resident extents of 128 blocks: one step may move two."""
    blocks = [Block(number) for number in range(16 * 128)]
    pool: ElasticPool[Block] = ElasticPool(blocks, 128, lambda _: None, prefix=16)
    port = PoolPort(wake_pool=lambda: None, wake_coordinator=lambda: None)
    return Admission(pool, port, ceiling=16)


def the_one(posted: list[Any]) -> PoolLevels:
    (levels,) = posted
    assert isinstance(levels, PoolLevels)
    return levels


def test_the_first_running_request_is_news() -> None:
    bench = Bench(prefix=8)
    assert the_one(bench.publish(0.0)).running == 1
    assert bench.publish(0.001) == []


def test_a_miss_asks_at_once_for_what_it_lacks_and_no_second_time() -> None:
    bench = Bench(prefix=2)
    bench.publish(0.0)
    bench.use(7)
    levels = the_one(bench.publish(0.001, missing=9))
    assert (levels.resident, levels.need_total) == (2, 2 + 3)
    assert levels.want_total >= levels.need_total
    assert bench.publish(0.002, missing=9) == []
    assert bench.publish(0.003, missing=1) == []


def test_a_look_posts_the_newest_need_and_the_highest_want() -> None:
    bench = Bench(prefix=2)
    bench.use(7)
    bench.publish(0.0, missing=1)
    bench.publish(0.01, missing=20, low=20)
    bench.publish(0.02, missing=1)
    levels = the_one(bench.publish(0.0 + REFRESH_S, missing=5))
    assert levels.need_total == 2 + 2
    assert levels.want_total >= 2 + 5


def test_a_need_that_is_over_is_taken_back_at_the_next_look() -> None:
    bench = Bench(prefix=2)
    bench.use(7)
    bench.publish(0.0, missing=9)
    assert bench.admission.needs_more
    assert bench.publish(0.01) == []
    assert bench.admission.needs_posted
    assert the_one(bench.publish(REFRESH_S)).need_total == 0
    assert not bench.admission.needs_more


def test_a_need_is_corrected_at_once_when_less_or_twice_and_late_when_a_little_more() -> None:
    bench = Bench(prefix=2)
    bench.use(7)

    def shown(now_s: float, extents: int) -> list[Any]:
        return bench.publish(now_s, missing=extents * WHOLE, low=40 * WHOLE)

    assert the_one(shown(0.0, 8)).need_total == 2 + 8
    assert the_one(shown(0.1, 7)).need_total == 2 + 7
    assert shown(0.2, 13) == []
    assert the_one(shown(0.3, 14)).need_total == 2 + 14
    assert shown(0.4, 14) == []
    assert shown(0.5, 15) == []
    assert the_one(shown(0.5 + REFRESH_SLOW_S, 15)).need_total == 2 + 15


def test_a_low_watermark_is_a_want_and_brings_an_eighth_more() -> None:
    bench = Bench(prefix=32)
    bench.publish(0.0)
    bench.use(32 * WHOLE - 1 - 10)
    levels = the_one(bench.publish(0.001, low=12))
    assert levels.need_total == 0
    assert levels.want_total == 32 + (2 + 16 + 3) // WHOLE


def test_cached_blocks_count_as_used_for_a_want_and_as_free_for_a_need() -> None:
    bench = Bench(prefix=8)
    bench.publish(0.0)
    taken = bench.use(8 * WHOLE - 1)
    for block in taken:
        block.block_hash = "hash"
    bench.pool.queue.append_n(taken)
    levels = the_one(bench.publish(0.001, low=4))
    assert levels.need_total == 0
    assert levels.want_total > levels.resident == 8


def test_at_the_ceiling_a_lack_is_no_news() -> None:
    bench = Bench(prefix=4, ceiling=4)
    bench.use(4 * WHOLE - 1)
    first = the_one(bench.publish(0.0, low=100, missing=50))
    assert (first.need_total, first.want_total) == (4, 4)
    assert bench.publish(0.001, low=100, missing=60) == []


def test_what_could_be_given_up_is_news_only_while_others_wait() -> None:
    bench = Bench(prefix=8)
    taken = bench.use(8 * WHOLE - 1)
    bench.publish(0.0)
    bench.pool.queue.prepend_n(taken[-8:])
    assert bench.publish(REFRESH_S + 0.01) == []
    bench.port.pressure = True
    assert the_one(bench.publish(2 * REFRESH_S + 0.02)).free == 2
    bench.port.pressure = False
    bench.pool.queue.prepend_n(taken[-12:-8])
    assert bench.publish(0.3) == []
    assert the_one(bench.publish(0.2 + REFRESH_SLOW_S)).free == 3


def test_an_instance_that_waits_itself_does_not_tell_what_it_could_give() -> None:
    bench = Bench(prefix=8)
    taken = bench.use(8 * WHOLE - 1)
    bench.port.pressure = True
    bench.publish(0.0, missing=4)
    bench.pool.queue.prepend_n(taken[-4:])
    assert bench.publish(2 * REFRESH_S, missing=4) == []


def test_idle_is_told_at_once_and_asks_for_nothing() -> None:
    bench = Bench(prefix=2)
    bench.use(7)
    bench.publish(0.0, missing=5, low=9)
    levels = the_one(bench.publish(0.001, running=0))
    assert (levels.running, levels.need_total, levels.want_total) == (0, 0, 0)


def test_granted_extents_are_handed_out_and_their_latency_remembered() -> None:
    bench = Bench()
    bench.use(3)
    bench.publish(1.0, missing=4)
    bench.port.give(Resident(((1, 2), (5, 1)), 0.5))
    assert bench.admission.drain(9.0) == 3 * WHOLE
    assert bench.pool.resident == 4
    assert bench.admission.growth_latency_s == pytest.approx(0.5), "waiting for it is no part"
    bench.port.give(Resident(((3, 1),), 0.1))
    assert bench.admission.drain(9.1) == WHOLE
    assert 0.1 < bench.admission.growth_latency_s < 0.5
    assert bench.admission.drain(1.6) == 0


def test_a_lowered_limit_takes_extents_back_behind_the_last_step() -> None:
    bench = Bench(prefix=8)
    bench.admission.step = 17
    bench.publish(0.0)
    bench.port.give(Limit(5))
    assert bench.admission.drain(0.1) == 3 * WHOLE
    levels, returned = bench.port.collect()
    assert levels == the_one([levels])
    assert levels.resident == 5
    assert returned == PoolReturned(((5, 3),), 17)
    assert not bench.can_give()


def test_levels_beside_a_withdrawal_tell_of_now_not_of_the_last_step_that_was_looked_at() -> None:
    bench = Bench(prefix=8)
    taken = bench.use(8 * WHOLE - 1)
    assert the_one(bench.publish(0.0, missing=9, low=9)).need_total > 8
    bench.pool.queue.prepend_n(taken)
    bench.admission.missing = 0
    bench.port.give(Limit(7))
    bench.admission.drain(0.1)
    levels = the_one(bench.port.collect()[:1])
    assert (levels.resident, levels.need_total) == (7, 0)
    assert levels.want_total <= 7


def test_a_limit_goes_on_as_extents_come_free() -> None:
    bench = Bench(prefix=4)
    taken = bench.use(4 * WHOLE - 1)
    bench.port.give(Limit(2))
    assert bench.admission.drain(0.0) == 0
    assert not bench.can_give()
    bench.pool.queue.prepend_n(taken)
    assert bench.can_give()
    assert bench.admission.drain(0.1) == 2 * WHOLE
    assert bench.pool.resident == 2
    bench.pool.queue.prepend_n(bench.use(1))
    assert not bench.can_give()


def test_a_limit_goes_on_at_once_after_all_that_one_step_may_move() -> None:
    admission = wide()
    pool, port = admission.pool, admission.port
    port.give(Limit(12))
    assert admission.drain(0.0) == 256
    assert pool.queue.frees > admission.give_after
    assert admission.drain(0.1) == 256
    assert pool.queue.frees <= admission.give_after


def test_a_limit_goes_on_when_a_pin_is_gone() -> None:
    bench = Bench(prefix=2)
    bench.pool.pin(1)
    bench.port.give(Limit(1))
    assert bench.admission.drain(0.0) == 0
    assert not bench.can_give()
    bench.pool.unpin(1)
    assert bench.can_give()
    assert bench.admission.drain(0.1) == WHOLE


def test_an_idle_engine_is_drained_to_the_end() -> None:
    admission = wide()
    port = admission.port
    port.give(Limit(3))
    assert admission.drain_idle(0.0) == 13 * 128
    events = port.collect()
    returned = [event for event in events if isinstance(event, PoolReturned)]
    assert sum(count for event in returned for _, count in event.extents) == 13
    assert len(returned) > 1, "a call moves at most 256 blocks"


def test_a_ceiling_decides_what_fits_never() -> None:
    bench = Bench()
    assert not bench.admission.fits_never(EXTENTS * WHOLE - 1)
    assert bench.admission.fits_never(EXTENTS * WHOLE)
    bench.port.give(Ceiling(10))
    bench.admission.drain(0.0)
    assert bench.admission.fits_never(10 * WHOLE)
    assert bench.admission.fits_alone(WHOLE - 1)
    assert not bench.admission.fits_alone(WHOLE)


def test_holding_is_bounded_by_time_and_by_steps() -> None:
    bench = Bench()
    admission = bench.admission
    assert not admission.may_hold(1.0)
    bench.port.hold_until_s = 1.02
    for _ in range(2):
        assert admission.may_hold(1.0)
        admission.count_step(missed=True, held=True)
    assert not admission.may_hold(1.0)
    admission.count_step(missed=True, held=False)
    assert admission.may_hold(1.0)
    assert not admission.may_hold(1.02)
    assert admission.held_steps == 3
    assert admission.hold_left_s(1.015) == pytest.approx(0.005)


def test_a_step_without_slots_counts_only_when_no_attempt_is_under_way() -> None:
    bench = Bench()
    bench.admission.count_step(missed=True, held=False)
    bench.port.hold_until_s = 5.0
    bench.admission.count_step(missed=True, held=False)
    bench.admission.count_step(missed=False, held=False)
    assert bench.admission.no_slot_steps == 1


def test_flush_tells_what_was_not_worth_telling() -> None:
    bench = Bench(prefix=4)
    taken = bench.use(4 * WHOLE - 1)
    bench.publish(0.0)
    bench.pool.queue.prepend_n(taken[-4:])
    assert bench.publish(0.001) == []
    bench.admission.flush(0.002)
    assert the_one(bench.port.collect()).free == 1
    bench.admission.flush(0.003)
    assert bench.port.collect() == []


def test_histogram_quantiles_are_close_and_the_maximum_exact() -> None:
    histogram = WaitHistogram()
    assert histogram.quantile_us(0.5) is None
    for microseconds in range(1, 1001):
        histogram.add(microseconds * 1000)
    summary = histogram.summary_us()
    assert summary["count"] == 1000
    assert summary["p50"] == pytest.approx(500, rel=0.1)
    assert summary["p99"] == pytest.approx(990, rel=0.1)
    assert summary["max"] == 1000


def test_status_is_plain() -> None:
    bench = Bench()
    bench.publish(0.0)
    status = bench.admission.status()
    assert status["resident_extents"] == 1
    assert status["levels_posted"] == 1

"""The elastic pool against a twin made of plain sets and lists."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvadmit.pool import FULLNESS_STEPS, ElasticPool


class Block:
    """A stand-in for vLLM's block."""

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: int | None = None


class PoolAgainstTwin(RuleBasedStateMachine):
    """Twin: which blocks are in use, free without a hash, free with one (oldest first)."""

    @initialize(
        extents=st.integers(1, 9), extent_blocks=st.sampled_from([1, 2, 3, 7, 16]), data=st.data()
    )
    def start(self, extents: int, extent_blocks: int, data: st.DataObject) -> None:
        self.whole = extent_blocks
        self.extents = extents
        self.blocks = [Block(number) for number in range(extents * extent_blocks)]
        prefix = data.draw(st.integers(1, extents))
        self.evicted: list[int] = []
        self.pool: ElasticPool[Block] = ElasticPool(self.blocks, extent_blocks, self.evict, prefix)
        self.resident = set(range(prefix))
        self.uncached = set(range(1, prefix * extent_blocks))
        self.cached: list[int] = []
        self.used: list[int] = []
        self.age = [0] * extents
        self.clock = 0

    def evict(self, block: Block) -> None:
        block.block_hash = None
        self.evicted.append(block.block_id)

    def rank(self, extent: int) -> int:
        own = range(extent * self.whole, (extent + 1) * self.whole)
        uncached = sum(number in self.uncached for number in own)
        free = uncached + sum(number in self.cached for number in own)
        if free < self.whole:
            return free * FULLNESS_STEPS // self.whole
        return FULLNESS_STEPS + (uncached == self.whole)

    def wholly_free(self) -> tuple[list[int], list[int]]:
        """Return the empty and the cache-only extents."""
        empty, cache_only = [], []
        for extent in self.resident:
            own = set(range(extent * self.whole, (extent + 1) * self.whole))
            if own <= self.uncached:
                empty.append(extent)
            elif own <= self.uncached | set(self.cached):
                cache_only.append(extent)
        return empty, cache_only

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        free = len(self.uncached) + len(self.cached)
        count = data.draw(st.integers(0, free))
        for block in self.pool.queue.popleft_n(count):
            number = block.block_id
            if self.uncached:
                lowest = min(self.rank(other // self.whole) for other in self.uncached)
                assert number in self.uncached
                assert self.rank(number // self.whole) == lowest
                self.uncached.remove(number)
            else:
                assert number == self.cached.pop(0)
                block.block_hash = None
            self.used.append(number)

    @precondition(lambda self: self.used)
    @rule(data=st.data(), hashed=st.booleans(), one_by_one=st.booleans())
    def give_back(self, data: st.DataObject, hashed: bool, one_by_one: bool) -> None:
        numbers = data.draw(st.lists(st.sampled_from(self.used), unique=True))
        blocks = [self.blocks[number] for number in numbers]
        self.used = [number for number in self.used if number not in numbers]
        if not hashed:
            self.pool.queue.prepend_n(blocks)
            self.uncached.update(numbers)
            return
        for block in blocks:
            block.block_hash = block.block_id
        if one_by_one:
            for block in blocks:
                self.pool.queue.append(block)
        else:
            self.pool.queue.append_n(blocks)
        self.cached += numbers
        self.clock += 1
        for position, number in enumerate(numbers):
            self.age[number // self.whole] = self.clock
            self.clock += one_by_one and position < len(numbers) - 1

    @precondition(lambda self: self.uncached or self.cached)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.uncached) + self.cached))
        self.pool.queue.remove(self.blocks[number])
        if number in self.uncached:
            self.uncached.remove(number)
        else:
            self.cached.remove(number)
        self.used.append(number)

    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        absent = sorted(set(range(self.extents)) - self.resident)
        more = data.draw(st.lists(st.sampled_from(absent), unique=True)) if absent else []
        assert self.pool.grow(more) == len(more) * self.whole
        self.resident.update(more)
        for extent in more:
            self.uncached.update(range(extent * self.whole, (extent + 1) * self.whole))

    @rule(data=st.data(), blocks_max=st.integers(1, 40))
    def withdraw(self, data: st.DataObject, blocks_max: int) -> None:
        limit = data.draw(st.integers(0, self.extents))
        empty, cache_only = self.wholly_free()
        self.evicted.clear()
        taken = self.pool.withdraw(limit, blocks_max)
        room = max(1, blocks_max // self.whole)
        over = max(0, len(self.resident) - limit)
        assert len(taken) == len(set(taken)) == min(over, room, len(empty) + len(cache_only))
        from_empty = taken[: len(empty)]
        assert from_empty == sorted(empty, reverse=True)[: len(taken)]
        ages = [self.age[extent] for extent in taken[len(empty) :]]
        kept = [self.age[extent] for extent in cache_only if extent not in taken]
        assert ages == sorted(ages)
        assert all(min(kept, default=age) >= age for age in ages)
        gone = {
            number
            for extent in taken
            for number in range(extent * self.whole, (extent + 1) * self.whole)
        }
        assert sorted(self.evicted) == sorted(gone.intersection(self.cached))
        self.resident.difference_update(taken)
        self.uncached -= gone
        self.cached = [number for number in self.cached if number not in gone]

    @rule()
    def reset_the_prefix_cache(self) -> None:
        for block in self.blocks:
            block.block_hash = None
        self.pool.queue.forget_hashes()
        self.uncached.update(self.cached)
        self.cached = []

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "pool"):
            return
        queue = self.pool.queue
        assert queue.num_free_blocks == len(self.uncached) + len(self.cached)
        listed = [block.block_id for block in queue.get_all_free_blocks()]
        assert set(listed[: len(self.uncached)]) == self.uncached
        assert listed[len(self.uncached) :] == self.cached
        empty, cache_only = self.wholly_free()
        levels = self.pool.levels()
        assert (levels.resident, levels.free, levels.cached) == (
            len(self.resident),
            len(empty),
            len(cache_only),
        )
        self.pool.check()


TestPoolAgainstTwin = PoolAgainstTwin.TestCase
TestPoolAgainstTwin.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)

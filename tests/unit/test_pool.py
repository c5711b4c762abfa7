"""The elastic pool, one behaviour at a time."""

from __future__ import annotations

import pytest

from kvadmit.errors import LocalProtocolError
from kvadmit.pool import ElasticPool, ElasticQueue


class Block:
    """A block with what vLLM's has and the queue may touch."""

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: str | None = None
        self.prev_free_block: Block | None = None
        self.next_free_block: Block | None = None

    def __repr__(self) -> str:
        return f"b{self.block_id}"


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def make(
    extents: int = 4, extent_blocks: int = 4, prefix: int = 1
) -> tuple[ElasticPool[Block], list[Block], list[int]]:
    blocks = [Block(number) for number in range(extents * extent_blocks)]
    evicted: list[int] = []

    def evict(block: Block) -> None:
        block.block_hash = None
        evicted.append(block.block_id)

    return ElasticPool(blocks, extent_blocks, evict, prefix), blocks, evicted


def cache(pool: ElasticPool[Block], blocks: list[Block]) -> None:
    for block in blocks:
        block.block_hash = f"hash {block.block_id}"
    pool.queue.append_n(blocks)


def test_the_null_block_is_never_handed_out() -> None:
    pool, _, _ = make()
    assert pool.queue.num_free_blocks == 3
    assert sorted(ids(pool.queue.popleft_n(3))) == [1, 2, 3]
    pool.check()


def test_taking_more_than_is_free_raises_and_changes_nothing() -> None:
    pool, _, _ = make()
    with pytest.raises(ValueError, match="cannot take 4 blocks, 3 are free"):
        pool.queue.popleft_n(4)
    assert pool.queue.num_free_blocks == 3
    pool.queue.popleft_n(3)
    with pytest.raises(ValueError, match="No free blocks"):
        pool.queue.popleft()
    pool.check()


def test_grown_blocks_go_before_cached_ones() -> None:
    pool, _, _ = make()
    cache(pool, pool.queue.popleft_n(3))
    assert pool.grow([2]) == 4
    assert sorted(ids(pool.queue.popleft_n(4))) == [8, 9, 10, 11]
    assert ids(pool.queue.popleft_n(3)) == [1, 2, 3]


def test_cached_blocks_come_least_recently_used_first() -> None:
    pool, blocks, _ = make(prefix=2)
    taken = pool.queue.popleft_n(7)
    cache(pool, taken)
    again = blocks[taken[0].block_id]
    pool.queue.remove(again)
    pool.queue.append(again)
    assert ids(pool.queue.popleft_n(7)) == [*ids(taken[1:]), again.block_id]


def test_the_fullest_extent_gives_first() -> None:
    pool, blocks, _ = make(prefix=4)
    pool.queue.popleft_n(15)
    pool.queue.prepend_n([blocks[5], blocks[9], blocks[10], blocks[13], blocks[14], blocks[15]])
    assert [number // 4 for number in ids(pool.queue.popleft_n(6))] == [1, 2, 2, 3, 3, 3]


def test_a_half_used_extent_gives_before_a_free_but_cached_one() -> None:
    pool, blocks, _ = make(prefix=3)
    pool.queue.popleft_n(11)
    cache(pool, [blocks[4], blocks[5], blocks[6]])
    pool.queue.prepend_n([blocks[7], blocks[8], blocks[9], blocks[10]])
    assert [number // 4 for number in ids(pool.queue.popleft_n(4))] == [2, 2, 2, 1]


def test_removing_a_block_that_is_not_free_raises() -> None:
    pool, blocks, _ = make()
    with pytest.raises(RuntimeError, match="block 0, which is not free"):
        pool.queue.remove(blocks[0])
    pool.queue.remove(blocks[2])
    assert pool.queue.num_free_blocks == 2
    pool.check()


def test_iteration_goes_uncached_then_cached_and_starts_after_the_cursor() -> None:
    pool, _, _ = make(prefix=2)
    taken = pool.queue.popleft_n(3)
    cache(pool, taken)
    everything = pool.queue.get_all_free_blocks()
    assert everything[4:] == taken
    assert list(pool.queue.iter_blocks_after(everything[2])) == everything[3:]
    assert list(pool.queue.iter_blocks_after(taken[0])) == taken[1:]


def test_withdraw_takes_empty_extents_first_and_from_the_top() -> None:
    pool, _, evicted = make(prefix=4)
    assert pool.withdraw(2) == [3, 2]
    assert (pool.resident, pool.queue.num_free_blocks, evicted) == (2, 7, [])
    pool.check()


def test_withdraw_evicts_what_was_used_longest_ago() -> None:
    pool, blocks, evicted = make(prefix=4)
    pool.queue.popleft_n(15)
    cache(pool, blocks[8:12])
    cache(pool, blocks[4:8])
    pool.queue.prepend_n(blocks[13:16])
    assert pool.withdraw(1) == [2, 1]
    assert evicted == [8, 9, 10, 11, 4, 5, 6, 7]
    assert pool.levels().resident == 2
    pool.check()


def test_withdraw_never_takes_extent_zero_nor_one_in_use() -> None:
    pool, _, _ = make(prefix=2)
    pool.queue.popleft_n(4)
    assert pool.withdraw(0) in ([], [1])
    assert pool.resident >= 1
    pool.check()


def test_withdraw_moves_at_most_so_many_blocks_but_at_least_one_extent() -> None:
    pool, _, _ = make(extents=8, prefix=8)
    assert pool.withdraw(1, blocks_max=11) == [7, 6]
    assert pool.withdraw(1, blocks_max=1) == [5]


def test_a_withdrawn_extent_can_come_back() -> None:
    pool, _, _ = make(prefix=2)
    assert pool.withdraw(1) == [1]
    assert pool.grow([1]) == 4
    with pytest.raises(LocalProtocolError, match="extent 1 is resident already"):
        pool.grow([1])
    with pytest.raises(LocalProtocolError, match="extent 4 of 4"):
        pool.grow([4])
    pool.check()


def test_levels_tell_empty_from_cache_only() -> None:
    pool, blocks, _ = make(prefix=4)
    pool.queue.popleft_n(15)
    cache(pool, blocks[4:7])
    pool.queue.prepend_n([blocks[7], *blocks[8:12], blocks[13]])
    levels = pool.levels()
    assert (levels.resident, levels.free, levels.cached) == (4, 1, 1)
    assert pool.blocks == 16


def test_a_pinned_extent_stays_until_the_last_unpin() -> None:
    pool, _, _ = make(prefix=3)
    pool.pin(2)
    pool.pin(2)
    assert pool.levels().free == 1
    assert pool.withdraw(1) == [1]
    pool.unpin(2)
    assert pool.withdraw(1) == []
    pool.unpin(2)
    assert pool.withdraw(1) == [2]


def test_a_reset_of_the_prefix_cache_makes_cached_blocks_uncached() -> None:
    pool, blocks, _ = make(prefix=2)
    pool.queue.popleft_n(7)
    cache(pool, blocks[1:8])
    for block in blocks:
        block.block_hash = None
    pool.queue.forget_hashes()
    assert len(pool.queue.cached) == 0
    assert pool.levels().free == 1
    pool.check()


def test_blocks_must_be_whole_extents() -> None:
    with pytest.raises(LocalProtocolError, match="7 blocks are not a whole number"):
        ElasticQueue([Block(number) for number in range(7)], 4)

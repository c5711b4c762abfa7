"""Which token blocks may be handed out: a free queue and a pool that grow and shrink by extents.

Owns: `ElasticQueue`, a drop-in for vLLM's free block queue that keeps per-extent counts and
hands out uncached blocks so that extents empty out; `ElasticPool`, which adds the set of
resident extents and the limit on it. Must not know: vLLM, sockets, who decides how many
extents there may be. Runs on the scheduler thread only; nothing here blocks.

Block k belongs to extent `k // extent_blocks`. Block 0 is vLLM's null block: it is never
free, so extent 0 is never wholly free and never withdrawn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from kvadmit.errors import InvariantViolation, LocalProtocolError

BLOCKS_PER_STEP_MAX = 256
"""Most blocks taken back in one scheduler step, so that no step is long because memory moves."""

FULLNESS_STEPS = 16
"""How finely the fullness of partly used extents is told apart when blocks are handed out."""

_CACHE_ONLY, _EMPTY, _NOTHING = FULLNESS_STEPS, FULLNESS_STEPS + 1, FULLNESS_STEPS + 2
"""Ranks behind those of partly used extents; `_NOTHING`: no uncached free block, not ranked."""


class Block(Protocol):
    """What the queue reads of a block: vLLM's `KVCacheBlock`, or any stand-in."""

    @property
    def block_id(self) -> int: ...

    @property
    def block_hash(self) -> Any: ...


B = TypeVar("B", bound=Block)


class ElasticQueue(Generic[B]):
    """The free blocks of the resident extents, in the order in which they are handed out.

    Same calls as vLLM's `FreeKVCacheBlockQueue`. Prepended blocks count as uncached,
    appended ones as cached. Uncached blocks go first, from the fullest extent (to within a
    sixteenth of it), wholly free extents last, those without a cached block last of all;
    cached blocks follow in vLLM's own order, least recently used first.

    Costs are paid in batches: a move only notes the extent as changed, and the order of
    extents is brought up to date when a block is next taken or counts are read.
    """

    __slots__ = (
        "_blocks",
        "_cache_only",
        "_changed",
        "_choose_again",
        "_clock",
        "_current",
        "_free",
        "_rank",
        "_ranked",
        "_settled",
        "_stamp",
        "_uncached",
        "cached",
        "extent_blocks",
        "extents",
        "frees",
        "num_free_blocks",
    )

    def __init__(self, blocks: Sequence[B], extent_blocks: int) -> None:
        """Start with no free block. `blocks`: every block there can ever be, by number."""
        if len(blocks) % extent_blocks:
            raise LocalProtocolError(
                f"{len(blocks)} blocks are not a whole number of extents of {extent_blocks}"
            )
        self.num_free_blocks = 0
        self.frees = 0
        """How often blocks were put back, added or unpinned: only then an extent becomes whole."""
        self._settled = 0
        """`frees` as of the last `_settle`."""
        self.extent_blocks = extent_blocks
        self.extents = len(blocks) // extent_blocks
        self._blocks = blocks
        self.cached: OrderedDict[int, B] = OrderedDict()
        """Free blocks that still hold a reusable prefix. To be looked at, not changed."""
        self._uncached: list[list[B]] = [[] for _ in range(self.extents)]
        self._free = [0] * self.extents
        """Free blocks of the extent, cached ones included."""
        self._stamp = [0] * self.extents
        """When a cached block was last put into the extent, by `_clock`."""
        self._clock = 0
        self._changed: set[int] = set()
        self._current = -1
        """The extent blocks are being taken from: the fullest as long as only we take."""
        self._choose_again = False
        """Other extents than the current one changed since it was chosen."""
        self._rank = bytearray([_NOTHING]) * self.extents
        self._ranked: list[set[int]] = [set() for _ in range(_NOTHING + 1)]
        """Extents by rank, as of the last `_settle`."""
        self._cache_only: set[int] = set()

    # --- vLLM's calls -------------------------------------------------------------------------

    def popleft(self) -> B:
        """Take one block. Raises ValueError when none is free."""
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[B]:
        """Take `n` blocks. Raises ValueError, changing nothing, when fewer are free."""
        if n > self.num_free_blocks:
            raise ValueError(f"cannot take {n} blocks, {self.num_free_blocks} are free")
        uncached = min(n, self.num_free_blocks - len(self.cached))
        self.num_free_blocks -= n
        taken: list[B] = []
        while len(taken) < uncached:
            extent = self._fullest()
            stack = self._uncached[extent]
            count = len(stack)
            if count <= uncached - len(taken):
                stack.reverse()
                taken += stack
                stack.clear()
                self._leave_ranks(extent)
            else:
                count = uncached - len(taken)
                taken += stack[: -count - 1 : -1]
                del stack[-count:]
            self._free[extent] -= count
        if len(taken) < n:
            self._pop_cached(n - len(taken), taken)
        return taken

    def _pop_cached(self, n: int, taken: list[B]) -> None:
        extent_blocks, free, changed = self.extent_blocks, self._free, self._changed
        pop = self.cached.popitem
        for _ in range(n):
            block_id, block = pop(False)
            extent = block_id // extent_blocks
            free[extent] -= 1
            changed.add(extent)
            taken.append(block)

    def remove(self, block: B) -> None:
        """Take this very block (a prefix hit). Raises RuntimeError when it is not free."""
        block_id = block.block_id
        extent = block_id // self.extent_blocks
        if self.cached.pop(block_id, None) is None:
            stack = self._uncached[extent]
            for index, candidate in enumerate(stack):
                if candidate.block_id == block_id:
                    del stack[index]
                    break
            else:
                raise RuntimeError(f"remove() called on block {block_id}, which is not free")
        self._free[extent] -= 1
        self._changed.add(extent)
        self.num_free_blocks -= 1

    def append(self, block: B) -> None:
        """Put a cached block at the end: the last to be handed out."""
        self.append_n([block])

    def append_n(self, blocks: Sequence[B]) -> None:
        """Put cached blocks at the end, in order."""
        extent_blocks, free, stamp = self.extent_blocks, self._free, self._stamp
        cached, note = self.cached, self._changed.add
        clock = self._clock = self._clock + 1
        for block in blocks:
            block_id = block.block_id
            extent = block_id // extent_blocks
            cached[block_id] = block
            free[extent] += 1
            stamp[extent] = clock
            note(extent)
        self.num_free_blocks += len(blocks)
        self.frees += bool(blocks)

    def prepend_n(self, blocks: Sequence[B]) -> None:
        """Put uncached blocks back; within an extent the first of them is taken first."""
        extent_blocks, free = self.extent_blocks, self._free
        uncached, note = self._uncached, self._changed.add
        for block in reversed(blocks):
            extent = block.block_id // extent_blocks
            uncached[extent].append(block)
            free[extent] += 1
            note(extent)
        self.num_free_blocks += len(blocks)
        self.frees += bool(blocks)

    def get_all_free_blocks(self) -> list[B]:
        """Return every free block, about in the order of handing out."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: B | None) -> Iterator[B]:
        """Yield free blocks after `cursor` (all when None), uncached first."""
        self._settle()
        seen = cursor is None
        for extent in sorted(range(self.extents), key=self._rank.__getitem__):
            for block in reversed(self._uncached[extent]):
                if seen:
                    yield block
                seen = seen or block is cursor
        for block in list(self.cached.values()):
            if seen:
                yield block
            seen = seen or block is cursor

    # --- extents ------------------------------------------------------------------------------

    def add_extent(self, extent: int) -> int:
        """Make the blocks of `extent` free; returns how many. They were in no one's hands."""
        first = extent * self.extent_blocks
        stack = list(self._blocks[max(first, 1) : first + self.extent_blocks])
        stack.reverse()
        self._uncached[extent] = stack
        self._free[extent] = len(stack)
        self._changed.add(extent)
        self.num_free_blocks += len(stack)
        self.frees += 1
        return len(stack)

    def take_extent(self, extent: int, evict: Callable[[B], object]) -> None:
        """Take every block of a wholly free extent away, cached ones after `evict(block)`."""
        if self._free[extent] != self.extent_blocks:
            raise LocalProtocolError(f"extent {extent} is not wholly free")
        stack = self._uncached[extent]
        if len(stack) < self.extent_blocks:
            first = extent * self.extent_blocks
            for block_id in range(first, first + self.extent_blocks):
                block = self.cached.get(block_id)
                if block is not None:
                    evict(block)
                    del self.cached[block_id]
        stack.clear()
        self._free[extent] = 0
        self._changed.add(extent)
        self.num_free_blocks -= self.extent_blocks

    def empty_extents(self) -> set[int]:
        """Return the wholly free extents without a cached block. Not to be changed."""
        self._settle()
        return self._ranked[_EMPTY]

    def cache_only_extents(self) -> set[int]:
        """Return the wholly free extents with at least one cached block. Not to be changed."""
        self._settle()
        return self._cache_only

    @property
    def about_whole(self) -> int:
        """Wholly free extents, pinned or not, as of the last hand-out; exact counts cost more."""
        return len(self._ranked[_EMPTY]) + len(self._cache_only)

    @property
    def none_whole(self) -> bool:
        """Whether surely no extent is wholly free; costs nothing, and a no may be wrong."""
        return self._settled == self.frees and not self._ranked[_EMPTY] and not self._cache_only

    def last_cached(self, extent: int) -> int:
        """Return when a cached block last came back to `extent`; smaller is longer ago."""
        return self._stamp[extent]

    def forget_hashes(self) -> None:
        """Count cached blocks that lost their hash as uncached (the prefix cache was reset)."""
        lost = [block for block in self.cached.values() if block.block_hash is None]
        for block in lost:
            self.remove(block)
        self.prepend_n(lost)

    # --- order of extents ---------------------------------------------------------------------

    def _fullest(self) -> int:
        """Return an extent of the lowest rank that has uncached free blocks; there is one.

        Taking from the fullest extent makes it fuller still, so it stays the right one until
        it has no uncached block left or another extent changed.
        """
        current = self._current
        if self._changed:
            self._settle()
        if current >= 0 and not self._choose_again:
            return current
        for rank, extents in enumerate(self._ranked):
            if extents:
                if current < 0 or self._rank[current] != rank:
                    current = extents.pop()
                    extents.add(current)
                self._current = current
                self._choose_again = False
                return current
        raise InvariantViolation("an uncached block is free", f"{self.num_free_blocks} free")

    def _leave_ranks(self, extent: int) -> None:
        """Unrank an extent whose last uncached block was just taken."""
        self._ranked[self._rank[extent]].discard(extent)
        self._rank[extent] = _NOTHING
        self._cache_only.discard(extent)
        self._current = -1

    def _settle(self) -> None:
        """Bring the ranks up to date for every extent that changed."""
        changed = self._changed
        self._settled = self.frees
        if changed:
            self._choose_again = True
        if self._current >= 0:
            changed.add(self._current)
        whole, ranks, ranked = self.extent_blocks, self._rank, self._ranked
        for extent in changed:
            free, uncached = self._free[extent], len(self._uncached[extent])
            if free < whole:
                rank = free * FULLNESS_STEPS // whole if uncached else _NOTHING
                self._cache_only.discard(extent)
            elif uncached == whole:
                rank = _EMPTY
                self._cache_only.discard(extent)
            else:
                rank = _CACHE_ONLY if uncached else _NOTHING
                self._cache_only.add(extent)
            if rank != ranks[extent]:
                ranked[ranks[extent]].discard(extent)
                ranked[rank].add(extent)
                ranks[extent] = rank
        changed.clear()
        ranked[_NOTHING].clear()

    def check(self) -> None:
        """Recount everything; raises InvariantViolation. For tests and idle time."""
        self._settle()
        cached = [0] * self.extents
        for block_id in self.cached:
            cached[block_id // self.extent_blocks] += 1
        for extent in range(self.extents):
            uncached = self._uncached[extent]
            ids = {block.block_id for block in uncached}
            if len(ids) != len(uncached) or not ids.isdisjoint(self.cached):
                raise InvariantViolation("a block is free once", f"extent {extent}: {sorted(ids)}")
            if self._free[extent] != len(uncached) + cached[extent]:
                raise InvariantViolation(
                    "free = uncached + cached",
                    f"extent {extent}: {self._free[extent]} != {len(uncached)} + {cached[extent]}",
                )
        if self.num_free_blocks != sum(self._free):
            raise InvariantViolation("free blocks add up", f"{self.num_free_blocks}")


class Holdings(msgspec.Struct, frozen=True):
    """What a pool has, in extents. `free`: wholly free and uncached; `cached`: wholly free."""

    resident: int
    free: int
    cached: int


class ElasticPool(Generic[B]):
    """The resident extents of one instance and the free blocks in them.

    `evict(block)` drops every trace of a cached block (hashes, events) before it leaves.
    """

    def __init__(
        self,
        blocks: Sequence[B],
        extent_blocks: int,
        evict: Callable[[B], object],
        prefix: int = 1,
    ) -> None:
        """Start with extents `0 .. prefix - 1` resident and all their blocks but block 0 free."""
        self.queue: ElasticQueue[B] = ElasticQueue(blocks, extent_blocks)
        self.extent_blocks = extent_blocks
        self.extents = self.queue.extents
        self.limit = self.extents
        """Most extents that may stay resident; `withdraw` works towards it."""
        self._evict = evict
        self._resident: set[int] = set()
        self._pins: dict[int, int] = {}
        self.grow(range(prefix))

    @property
    def resident(self) -> int:
        """Extents whose blocks may be handed out."""
        return len(self._resident)

    @property
    def blocks(self) -> int:
        """Blocks of all resident extents, the null block included."""
        return len(self._resident) * self.extent_blocks

    def grow(self, extents: Iterable[int]) -> int:
        """Make the blocks of `extents` free; returns how many blocks were added."""
        added = 0
        for extent in extents:
            if extent in self._resident:
                raise LocalProtocolError(f"extent {extent} is resident already")
            if not 0 <= extent < self.extents:
                raise LocalProtocolError(f"extent {extent} of {self.extents}")
            self._resident.add(extent)
            added += self.queue.add_extent(extent)
        return added

    def withdraw(self, limit: int, blocks_max: int = BLOCKS_PER_STEP_MAX) -> list[int]:
        """Take wholly free extents away until at most `limit` are resident.

        Empty extents go first, highest number first; then those whose cached blocks were
        used longest ago. At most `blocks_max` blocks a call, but at least one extent if any
        may go. Returns the extents taken, which the caller must report with a fence; fewer
        than asked for when the rest is in use. Call again as more come free.
        """
        self.limit = limit
        over = len(self._resident) - limit
        if over <= 0:
            return []
        room = max(1, blocks_max // self.extent_blocks)
        count = min(over, room)
        empty, cache_only = self._movable()
        victims = sorted(empty, reverse=True)[:count]
        if len(victims) < count and cache_only:
            by_age = sorted(cache_only, key=self.queue.last_cached)
            victims += by_age[: count - len(victims)]
        for extent in victims:
            self.queue.take_extent(extent, self._evict)
            self._resident.remove(extent)
        return victims

    def _movable(self) -> tuple[set[int], set[int]]:
        """Return the empty and the cache-only extents that nobody has pinned."""
        empty, cache_only = self.queue.empty_extents(), self.queue.cache_only_extents()
        if self._pins:
            return empty - self._pins.keys(), cache_only - self._pins.keys()
        return empty, cache_only

    def pin(self, extent: int) -> None:
        """Keep `extent` resident, free or not, until as many `unpin` calls.

        For blocks that are free but may still be read, like those that left the attention
        window of a live request while the worker's table still names them.
        """
        self._pins[extent] = self._pins.get(extent, 0) + 1

    def unpin(self, extent: int) -> None:
        """Undo one `pin`."""
        left = self._pins[extent] - 1
        if left:
            self._pins[extent] = left
        else:
            del self._pins[extent]
            self.queue.frees += 1

    def levels(self) -> Holdings:
        """Return what the pool has now; pinned extents count as used."""
        empty, cache_only = self._movable()
        return Holdings(len(self._resident), len(empty), len(cache_only))

    def check(self) -> None:
        """Recount everything; raises InvariantViolation."""
        self.queue.check()
        if 0 not in self._resident:
            raise InvariantViolation("extent 0 stays", f"resident: {sorted(self._resident)[:8]}")
        for block in self.queue.get_all_free_blocks():
            if block.block_id // self.extent_blocks not in self._resident or not block.block_id:
                raise InvariantViolation(
                    "free blocks lie in resident extents", f"block {block.block_id}"
                )

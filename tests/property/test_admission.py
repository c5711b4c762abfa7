"""The scheduler's side with drawn moves: no step that could give something back goes by."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvadmit.port import Limit
from unit.test_admission import Bench


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "free", "limit", "pin", "unpin"]), st.integers(0, 40)),
        max_size=40,
    )
)
def test_a_step_that_could_come_nearer_to_its_limit_drains(moves: list[tuple[str, int]]) -> None:
    bench = Bench(prefix=8)
    pool, held = bench.pool, bench.use(3)
    for move, number in moves:
        match move:
            case "take":
                held += bench.use(min(number, pool.queue.num_free_blocks))
            case "free":
                pool.queue.prepend_n(held[:number])
                del held[:number]
            case "limit":
                bench.port.give(Limit(1 + number % 8))
            case "pin":
                pool.pin(number % 8)
            case "unpin" if number % 8 in pool._pins:
                pool.unpin(number % 8)
        if bench.port.limit != bench.admission.limit:
            bench.admission.heed_limit()
        holdings = pool.levels()
        if pool.resident > bench.port.limit and holdings.free + holdings.cached:
            assert bench.can_give()
        if bench.can_give():
            bench.admission.drain(0.0)
            assert pool.resident <= bench.port.limit or not any(pool._movable())

"""Group, member and arbitration joined back to back, with worlds that hypothesis makes up.

The seeded simulation (tests/sim) plays a few known shapes many times; here the shapes and the
faults are drawn too, and a failing world shrinks to few instances, devices and faults.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvadmit.testing.simulation import MIB, Faults, Shape, World

NAMES = ("g0", "g1", "g2")


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Draw devices with room for every floor, and groups over one to three of them."""
    prefix = draw(st.integers(1, 2))
    floor = draw(st.integers(prefix, 3))
    instances = []
    for _ in range(draw(st.integers(1, 3))):
        ranks = tuple(draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3)))
        instances.append((ranks, draw(st.integers(1, 3)) * MIB))
    devices = {}
    for name in NAMES:
        floors = sum(floor * size * ranks.count(name) for ranks, size in instances)
        devices[name] = floors + draw(st.integers(0, 40)) * MIB
    return Shape(devices=devices, instances=tuple(instances), prefix=prefix, floor=floor)


def chances(*more: float) -> st.SearchStrategy[float]:
    return st.sampled_from((0.0, *more))


faults = st.builds(
    Faults,
    drop=chances(0.05, 0.2),
    duplicate=chances(0.1),
    delay_s=st.sampled_from([0.002, 0.05, 0.3]),
    prepare_refused=chances(0.1),
    prepare_failed=chances(0.1),
    commit_failed=chances(0.1, 0.3),
    release_failed=chances(0.1),
    crashes=st.integers(0, 2),
    arbiter_crashes=st.integers(0, 2),
    foreign=st.integers(0, 3),
)


@settings(max_examples=300)
@given(st.integers(0, 2**32), shapes(), faults)
def test_any_host_keeps_the_invariants_and_serves_everyone_in_the_end(
    seed: int, shape: Shape, unkind: Faults
) -> None:
    world = World(seed, shape, unkind)
    world.run(actions=8)
    world.settle(wait_s=120.0)


@settings(max_examples=100)
@given(st.integers(0, 2**32), shapes())
def test_a_kind_host_needs_no_timer_and_wastes_no_attempt(seed: int, shape: Shape) -> None:
    world = World(seed, shape, Faults())
    world.run(actions=8)
    world.settle()
    wasted = ("resends", "timer_probes", "headroom_rejections", "allocation_misses", "orphans")
    for instance in world.instances:
        counters: dict[str, Any] = instance.group.counters
        assert {name: counters[name] for name in wasted} == dict.fromkeys(wasted, 0)
    assert world.arbiter is not None
    assert world.arbiter.counters["resends"] == world.arbiter.counters["stale"] == 0

"""The three machines together, over links and devices that misbehave, from seeds.

Every seed is a whole host: shape, faults, load, crashes. After each event every machine's
`check()` and the world's own truth must hold; when the faults end everyone must be served,
the books must equal the devices, and an idle neighbour's memory must be lent in full.
A failing seed is printed and replays with `world_of(seed)`.
"""

from __future__ import annotations

import random

import pytest

from kvadmit.testing.simulation import MIB, Faults, Shape, World

SHAPES = (
    # two equal instances on one device
    Shape(devices={"g0": 64 * MIB}, instances=((("g0",), 2 * MIB), (("g0",), 2 * MIB))),
    # two tensor-parallel groups on the same two devices, different models
    Shape(
        devices={"g0": 64 * MIB, "g1": 64 * MIB},
        instances=((("g0", "g1"), 2 * MIB), (("g0", "g1"), 3 * MIB)),
    ),
    # host backend: three instances on one pool, one of them with both ranks on it
    Shape(
        devices={"h": 96 * MIB},
        instances=((("h", "h"), 2 * MIB), (("h",), 3 * MIB), (("h",), 1 * MIB)),
    ),
    # device sets that overlap
    Shape(
        devices={"g0": 64 * MIB, "g1": 64 * MIB, "g2": 64 * MIB},
        instances=((("g0", "g1", "g2"), 2 * MIB), (("g1", "g2"), 3 * MIB), (("g2",), 2 * MIB)),
    ),
)
SEEDS = 2000
CHUNK = 100
LOAD_CHANGES = 20


def faults_of(seed: int) -> Faults:
    """Draw how unkind the world of `seed` is; one in five is kind."""
    draw = random.Random(seed * 7919 + 1)
    if draw.random() < 0.2:
        return Faults()
    return Faults(
        drop=draw.choice([0, 0.02, 0.1]),
        duplicate=draw.choice([0, 0.05]),
        delay_s=draw.choice([0.002, 0.05]),
        prepare_refused=draw.choice([0, 0.05]),
        commit_failed=draw.choice([0, 0.05]),
        prepare_failed=draw.choice([0, 0, 0.05]),
        release_failed=draw.choice([0, 0, 0.02]),
        crashes=draw.choice([0, 1, 3]),
        arbiter_crashes=draw.choice([0, 1, 2]),
        foreign=draw.choice([0, 0, 4]),
    )


def world_of(seed: int) -> World:
    """Return the world of `seed`, before anything has happened in it."""
    return World(seed, SHAPES[seed % len(SHAPES)], faults_of(seed))


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_invariants_hold_and_everyone_is_served(first: int) -> None:
    for seed in range(first, first + CHUNK):
        world = world_of(seed)
        try:
            world.run(LOAD_CHANGES)
            world.settle()
        except Exception as error:
            error.add_note(f"replay: seed {seed}, {faults_of(seed)}")
            raise


def test_a_seed_replays_to_the_same_end() -> None:
    ends = []
    for _ in range(2):
        world = world_of(6)
        world.run(LOAD_CHANGES)
        world.settle()
        assert world.arbiter is not None
        ends.append((world.events, world.now_s, world.arbiter.snapshot()))
    assert ends[0] == ends[1]


def test_without_faults_nothing_is_resent_and_no_timer_asks() -> None:
    for seed in range(40):
        world = World(seed, SHAPES[seed % len(SHAPES)], Faults())
        world.run(LOAD_CHANGES)
        world.settle()
        for instance in world.instances:
            counters = instance.group.counters
            assert counters["resends"] == counters["timer_probes"] == 0, (seed, counters)
            assert counters["headroom_rejections"] == counters["allocation_misses"] == 0


@pytest.mark.parametrize("call_s", [0.0005, 0.002, 0.05])
@pytest.mark.parametrize("delay_s", [0.0003, 0.002, 0.05])
def test_memory_taken_behind_the_books_is_refused_a_few_times_and_then_known(
    call_s: float, delay_s: float
) -> None:
    shape = Shape(devices={"g0": 64 * MIB}, instances=((("g0",), 2 * MIB),))
    world = World(1, shape, Faults(delay_s=delay_s, call_s=call_s))
    (instance,) = world.instances
    world.play(1.0)
    world.devices["g0"].foreign_bytes = 40 * MIB
    instance.pool.demand = 30
    world.play(10.0)
    counters = instance.group.counters
    assert 1 <= counters["headroom_rejections"] <= 3, counters
    assert counters["timer_probes"] == counters["resends"] == 0, counters
    taken = len(instance.pool.used)
    assert taken == 12, "what is left is granted all the same"
    world.devices["g0"].foreign_bytes = 0
    world.play(10.0)
    assert len(instance.pool.used) == 31, "and what comes free is found without an event"

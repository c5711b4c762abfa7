"""The worlds that seeds stand for: what runs on a host, and how unkind it is.

Owns: the shapes, the draw of faults, how long a world is played. Must not know: what the machines
do in it. A test and `tools/simulate.py` play the same worlds, so a seed means one thing.
"""

from __future__ import annotations

import random

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
        freezes=draw.choice([0, 0, 3]),
        partitions=draw.choice([0, 0, 3]),
    )


def world_of(seed: int) -> World:
    """Return the world of `seed`, before anything has happened in it."""
    return World(seed, SHAPES[seed % len(SHAPES)], faults_of(seed))


def play(seed: int) -> World:
    """Play the world of `seed` to its end, where everyone must be served; returns it.

    Raises InvariantViolation, or what a machine raised, with a note that names the seed.
    """
    world = world_of(seed)
    try:
        world.run(LOAD_CHANGES)
        world.settle()
    except Exception as error:
        error.add_note(f"replay: python tools/simulate.py --seed {seed}   # {faults_of(seed)}")
        raise
    return world

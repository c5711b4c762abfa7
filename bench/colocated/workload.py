"""Who asks for what, and when: seeded, so every policy is given the same requests.

Owns: the shape of a workload and the requests made of it. Must not know: engines, clocks
or policies.
"""

from __future__ import annotations

import math
import random
from typing import Literal

import msgspec

Scenario = Literal["alternating", "symmetric"]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides a workload, less the seed.

    `requests` per instance. `rate`: requests per second that arrive at an instance whose turn
    it is (open loop, exponential gaps), None for closed: a burst arrives at once and the turn
    passes on when `handover` of it (a fraction) has been answered. `bursts` per instance.
    Lengths in tokens, `(low, high)`.
    """

    scenario: Scenario
    instances: int
    requests: int
    rate: float | None = None
    bursts: int = 3
    handover: float = 1.0
    prompt_tokens: tuple[int, int] = (64, 192)
    output_tokens: tuple[int, int] = (96, 192)


class Request(msgspec.Struct, frozen=True):
    """One request. `at_s`: seconds after its burst starts. `seed` makes the prompt's ids."""

    index: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    seed: int


class Burst(msgspec.Struct, frozen=True):
    """Requests for one instance.

    `start_s`: seconds after the run starts, or None: when the burst before it in the list has
    been answered as far as `Shape.handover` says.
    """

    instance: int
    start_s: float | None
    requests: tuple[Request, ...]


def plan(shape: Shape, seed: int, repeat: int) -> list[Burst]:
    """Return the bursts of one run, in order of start; equal arguments, equal bursts.

    Repeats differ, so that the spread over repeats shows more than the machine's noise.
    """
    made = [_requests(shape, seed, repeat, instance) for instance in range(shape.instances)]
    if shape.scenario == "symmetric":
        return [Burst(instance, 0.0, tuple(made[instance])) for instance in range(shape.instances)]
    bursts: list[Burst] = []
    start_s: float | None = 0.0
    for turn in range(min(shape.bursts, shape.requests)):
        for instance in range(shape.instances):
            mine = _share(made[instance], turn, min(shape.bursts, shape.requests))
            first_s = mine[0].at_s
            mine = [msgspec.structs.replace(r, at_s=r.at_s - first_s) for r in mine]
            bursts.append(Burst(instance, start_s, tuple(mine)))
            if shape.rate is None:
                start_s = None
            elif start_s is not None:
                start_s += mine[-1].at_s + 1 / shape.rate
    return bursts


def _share(requests: list[Request], turn: int, turns: int) -> list[Request]:
    count = len(requests)
    return requests[turn * count // turns : (turn + 1) * count // turns]


def _requests(shape: Shape, seed: int, repeat: int, instance: int) -> list[Request]:
    dice = random.Random(f"{seed}/{repeat}/{instance}")
    at_s = 0.0
    requests = []
    for index in range(shape.requests):
        if shape.rate is not None and index:
            at_s += dice.expovariate(shape.rate)
        requests.append(
            Request(
                index,
                at_s,
                draw_length(dice, *shape.prompt_tokens),
                draw_length(dice, *shape.output_tokens),
                dice.getrandbits(32),
            )
        )
    return requests


def draw_length(dice: random.Random, low: int, high: int) -> int:
    """Draw a length in tokens: log-normal around the geometric mean, clipped to the range.

    Lengths of real traffic lean right (many short, some long); about 95 of 100 draws fall
    inside the range before clipping.
    """
    middle = (math.log(low) + math.log(high)) / 2
    spread = (math.log(high) - math.log(low)) / 4
    return min(high, max(low, round(math.exp(dice.gauss(middle, spread)))))


def prompt_ids(request: Request, vocabulary: int) -> list[int]:
    """Return the request's prompt as token ids, clear of the first few (special) ones."""
    dice = random.Random(request.seed)
    return [dice.randrange(8, vocabulary) for _ in range(request.prompt_tokens)]

"""Which run comes when: repeats are interleaved, so that drift hits every policy alike.

Owns: the order. Must not know: what a run does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

Run = tuple[str, int, str]
"""Policy, repeat, scenario."""


def interleave(policies: Sequence[str], repeats: int) -> list[tuple[str, int]]:
    """Return `(policy, repeat)` in running order: A B, B A, A B ... (A-B-B-A).

    A machine that grows slower over time (heat, neighbours) then costs the first policy as
    much as the last one, over any even number of repeats.
    """
    order: list[tuple[str, int]] = []
    for repeat in range(repeats):
        row = list(policies) if repeat % 2 == 0 else list(reversed(policies))
        order += [(policy, repeat) for policy in row]
    return order


def missing(order: Sequence[Run], done: Collection[Run]) -> list[Run]:
    """Return the runs of `order` that are not among `done`, in order."""
    return [run for run in order if run not in done]

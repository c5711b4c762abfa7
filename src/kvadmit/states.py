"""The state of every extent of a group, kept once for all its ranks.

Owns: the states, how many extents are in each, and that an extent moves only from the state
its mover believes it in. Must not know: orders, ranks, why anything moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvadmit.errors import InvariantViolation
from kvadmit.messages import OrderKind
from kvadmit.orders import Operation

ABSENT, PREPARING, COMMITTING, RESIDENT, DRAINING, SPARE, FENCED, ORPHAN, ABORTING = range(9)
STATE_NAMES = (
    "absent",
    "preparing",
    "committing",
    "resident",
    "draining",
    "spare",
    "fenced",
    "orphan",
    "aborting",
)

ORDERED: dict[OrderKind, int] = {
    "prepare": PREPARING,
    "commit": COMMITTING,
    "abort": ABORTING,
    "fence": DRAINING,
    "decommit": FENCED,
}
"""Order -> the state of its extents while any rank owes an answer."""


class ExtentStates:
    """States of extents 0 to `extents - 1`, all absent at first; `count[state]` of each."""

    def __init__(self, extents: int = 0) -> None:
        self.state = bytearray(extents)
        self.count = [0] * len(STATE_NAMES)
        self.count[ABSENT] = extents

    @property
    def held(self) -> int:
        """Extents backed, preparing or orphaned: what the arbiter books for this instance."""
        return len(self.state) - self.count[ABSENT]

    @property
    def usable(self) -> int:
        """Extents that are or come back to the pool without the arbiter: all but the leaving."""
        return self.held - self.count[FENCED] - self.count[ABORTING]

    @property
    def coming(self) -> int:
        """Extents on their way to the pool."""
        return self.count[PREPARING] + self.count[COMMITTING]

    def missing(self, total: int) -> int:
        """Return how many extents the pool lacks to have `total`, beyond those coming to it."""
        return total - self.count[RESIDENT] - self.coming

    def move(self, extents: Iterable[int], old: int, new: int) -> None:
        """Move `extents` on; raise InvariantViolation at one that is not in `old`."""
        for extent in extents:
            if self.state[extent] != old:
                raise InvariantViolation(
                    "an extent changes state along the table",
                    f"extent {extent} is {STATE_NAMES[self.state[extent]]}, "
                    f"not {STATE_NAMES[old]}, on its way to {STATE_NAMES[new]}",
                )
            self.state[extent] = new
            self.count[old] -= 1
            self.count[new] += 1

    def having(self, state: int) -> list[int]:
        """Return the extents in `state`, ascending."""
        if not self.count[state]:
            return []
        return [extent for extent, s in enumerate(self.state) if s == state]

    def lowest_absent(self, most: int) -> list[int]:
        """Return up to `most` absent extents, ascending."""
        found: list[int] = []
        extent = self.state.find(ABSENT)
        while extent >= 0 and len(found) < most:
            found.append(extent)
            extent = self.state.find(ABSENT, extent + 1)
        return found

    def all_resident(self, extents: Iterable[int]) -> bool:
        """Whether each of `extents` exists and is resident."""
        return all(0 <= e < len(self.state) and self.state[e] == RESIDENT for e in extents)

    def snapshot(self) -> dict[str, int]:
        """Return how many extents are in each state."""
        return dict(zip(STATE_NAMES, self.count, strict=True))

    def check(self, open_operations: Mapping[int, Operation]) -> None:
        """Raise InvariantViolation unless counts, states and open orders agree."""
        for number, name in enumerate(STATE_NAMES):
            if self.count[number] != self.state.count(number):
                raise InvariantViolation("counts equal states", f"{name}: {self.count[number]}")
        owned: set[int] = set()
        for operation in open_operations.values():
            if owned & set(operation.extents):
                raise InvariantViolation("I2 an extent is in one order at a time", str(owned))
            owned |= set(operation.extents)
            for extent in operation.extents:
                if self.state[extent] != ORDERED[operation.kind]:
                    raise InvariantViolation(
                        "an open order matches its extents' state",
                        f"{operation.kind} of {STATE_NAMES[self.state[extent]]} {extent}",
                    )

    def check_serving(self, open_operations: Mapping[int, Operation]) -> None:
        """Raise InvariantViolation unless what moves has an order and extent 0 is backed."""
        owned = sum(len(operation.extents) for operation in open_operations.values())
        moving = {STATE_NAMES[state]: self.count[state] for state in ORDERED.values()}
        if sum(moving.values()) != owned:
            raise InvariantViolation("every moving extent has an order", str(moving))
        if self.state[0] != RESIDENT:
            raise InvariantViolation("extent 0 is always backed", STATE_NAMES[self.state[0]])

"""Where every extent of one address space stands, and what may be asked of it.

Owns: the states and the refusal of a call in the wrong one. Must not know: drivers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from kvadmit.errors import LocalProtocolError

State = Literal["absent", "prepared", "partial", "mapped", "leaving"]
"""`partial`: a commit stopped inside it. `leaving`: a decommit did; only a decommit goes on."""

BEFORE: dict[str, tuple[State, ...]] = {
    "prepare": ("absent",),
    "commit": ("prepared", "partial"),
    "abort": ("prepared",),
    "decommit": ("mapped", "partial", "leaving"),
}
"""The states from which each call of `vmm.AddressSpace` may be made."""


class ExtentStates:
    """The state of every extent: `states[extent]`."""

    def __init__(self, extents: int) -> None:
        """Start with all of them absent."""
        self._states: list[State] = ["absent"] * extents

    def __getitem__(self, extent: int) -> State:
        return self._states[extent]

    def __setitem__(self, extent: int, state: State) -> None:
        self._states[extent] = state

    def set_all(self, extents: Iterable[int], state: State) -> None:
        """Note that all of `extents` are in `state` now."""
        for extent in extents:
            self._states[extent] = state

    def require(self, extents: Sequence[int], call: str) -> None:
        """Raise LocalProtocolError unless `call` may be made for all of `extents`."""
        if len(set(extents)) != len(extents):
            raise LocalProtocolError(f"{call}: an extent is named twice in {list(extents)}")
        for extent in extents:
            if not 0 <= extent < len(self._states):
                raise LocalProtocolError(f"{call}: no extent {extent} of {len(self._states)}")
            if self._states[extent] not in BEFORE[call]:
                raise LocalProtocolError(f"{call}: extent {extent} is {self._states[extent]}")

    @property
    def held(self) -> int:
        """How many extents are not absent."""
        return len(self._states) - self._states.count("absent")

    def forget(self) -> None:
        """Note that all are absent."""
        self._states = ["absent"] * len(self._states)

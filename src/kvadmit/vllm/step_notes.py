"""What the scheduler mixin notes of a step, and what it compares a step with.

Owns: nothing but these words. One object with slots, because each is read in every step,
right after a model step that left nothing in the CPU's caches: an attribute of vLLM's
scheduler, which has a hundred, is several misses, and a slot here shares its line with others.
"""

from __future__ import annotations

from typing import Any

from kvadmit.admission import Admission
from kvadmit.vllm.failures import Failures


class StepNotes:
    """Of the present step: what it showed. Of steps before: what is known or asked for."""

    __slots__ = (
        "admission",
        "ahead",
        "asked",
        "coordinator",
        "failing",
        "held_before",
        "inside",
        "inside_ns",
        "look_ns",
        "lost",
        "may_hold",
        "missed",
        "orders",
        "overlaps",
        "port",
        "queue",
        "refused",
        "seats",
        "showed",
        "stall_told",
        "stalled_ns",
        "told",
        "tried",
        "untold",
    )

    def __init__(
        self,
        admission: Admission[Any],
        coordinator: Any,
        failures: Failures,
        *,
        ahead: int,
        seats: int,
        overlaps: bool,
    ) -> None:
        """Note what does not change.

        `coordinator`: vLLM's, of KV caches. `ahead`: most blocks that one running request takes
        soon; `seats`: most running requests; `overlaps`: the model runs in other processes.
        """
        self.admission = admission
        self.coordinator = coordinator
        self.port = admission.port
        self.orders = admission.orders
        self.queue = admission.pool.queue
        self.failing = failures.due
        self.ahead = ahead
        self.seats = seats
        self.overlaps = overlaps
        self.untold: Any = None
        """The step's output while what it showed is still to be looked at."""
        self.look_ns = 0
        """Until then, on the monotonic clock, a step that shows nothing new is not looked at."""
        self.told = ""
        """The waiter whose refusal the newest levels tell of, by its id."""
        self.lost = ""
        """Why the engine cannot go on; written by the coordinator's thread."""
        self.held_before = False
        """The step before held a request."""
        self.inside = False
        """vLLM schedules."""
        self.stalled_ns = 0
        """Since when requests wait, none runs and no step could; 0 otherwise."""
        self.stall_told = False
        """Whether that was logged."""
        self.forget()

    @property
    def found_no_room(self) -> bool:
        """Whether the last waiter that vLLM tried came as far as asking for blocks."""
        return self.tried is not None and self.asked > 0

    def forget(self) -> None:
        """Forget what the last step showed."""
        self.showed = False
        """Whether any of the following was noted."""
        self.missed = False
        """A running request found no slots."""
        self.may_hold: bool | None = None
        """Whether such a request is held in this step; None: nobody asked."""
        self.tried: Any = None
        """The waiter that vLLM tried to admit last, the blocks that asked for, and a no to it."""
        self.asked = 0
        self.refused = False
        self.inside_ns = 0
        """Our time inside vLLM's schedule."""

"""The blocking calls of an engine's start, as the group machine sees them.

Owns: which calls wait, their deadlines, and what each is waiting for in words. Must not know:
threads or futures (the shell answers the caller), or what makes a call succeed.
"""

from __future__ import annotations

from collections.abc import Collection

from kvadmit.group_events import Effect, Settle, StartTimer, StopTimer
from kvadmit.link import ArbiterLink, Call


class StartCalls:
    """Calls waiting for an answer; each gets exactly one, at the latest after `wait_s`."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self.waiting: set[Call] = set()

    def begin(self, call: Call, now_s: float, effects: list[Effect]) -> None:
        """Let `call` wait."""
        self.waiting.add(call)
        effects.append(StartTimer(f"wait:{call}", now_s + self.wait_s))

    def settle(self, call: Call, error: str, effects: list[Effect]) -> None:
        """Answer `call` if it waits: '' is success, else the reason."""
        if call in self.waiting:
            self.waiting.remove(call)
            effects.append(StopTimer(f"wait:{call}"))
            effects.append(Settle(call, error))

    def refuse(self, reason: str, effects: list[Effect]) -> None:
        """Answer every call that needs the arbiter with its refusal."""
        for call in sorted(self.waiting & {"start", "geometry"}):
            self.settle(call, reason, effects)

    def expire(
        self, name: str, link: ArbiterLink, absent_ranks: Collection[int], effects: list[Effect]
    ) -> None:
        """Answer the call called `name` with what it still waits for."""
        for call in sorted(self.waiting):
            if call == name:
                cause = _cause(call, link, absent_ranks)
                self.settle(call, f"no answer within {self.wait_s:.0f} s: {cause}", effects)


def _cause(call: Call, link: ArbiterLink, absent_ranks: Collection[int]) -> str:
    if call == "ready":
        return f"no hello from rank {', '.join(map(str, sorted(absent_ranks)))}"
    if link.phase != "joined":
        return "the arbiter has not answered"
    return link.reason or "other instances hold the memory"

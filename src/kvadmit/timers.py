"""Named timers of a machine: start, stop, and the event when one is due.

Owns: which timers of one machine run, and when they fire. Must not know: what a name
means. A started timer replaces a running one of the same name, as the machines expect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class LoopTimers:
    """Timers on the running asyncio loop; `on_fire(name)` runs on its thread."""

    def __init__(self, on_fire: Callable[[str], None]) -> None:
        self._on_fire = on_fire
        self._loop = asyncio.get_running_loop()
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def start(self, name: str, at_s: float) -> None:
        """Fire `name` at `at_s` (`time.monotonic`)."""
        self.stop(name)
        delay_s = max(0.0, at_s - time.monotonic())
        self._handles[name] = self._loop.call_later(delay_s, self._fire, name)

    def stop(self, name: str) -> None:
        """Forget `name`; harmless when it does not run."""
        handle = self._handles.pop(name, None)
        if handle is not None:
            handle.cancel()

    def close(self) -> None:
        """Stop all of them. Idempotent."""
        for name in list(self._handles):
            self.stop(name)

    def _fire(self, name: str) -> None:
        del self._handles[name]
        self._on_fire(name)


class PolledTimers:
    """Timers of a thread that waits in a poll of its own. That thread only."""

    def __init__(self) -> None:
        self._at_s: dict[str, float] = {}

    def start(self, name: str, at_s: float) -> None:
        """Make `name` due at `at_s` (`time.monotonic`)."""
        self._at_s[name] = at_s

    def wait_s(self, now_s: float) -> float | None:
        """Return how long the poll may last; None when no timer runs."""
        if not self._at_s:
            return None
        return max(0.0, min(self._at_s.values()) - now_s)

    def due(self, now_s: float) -> list[str]:
        """Return the timers that are due, earliest first, and forget them."""
        due = sorted((at_s, name) for name, at_s in self._at_s.items() if at_s <= now_s)
        for _, name in due:
            del self._at_s[name]
        return [name for _, name in due]

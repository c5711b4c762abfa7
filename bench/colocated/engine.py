"""What the bench asks of an engine, real or simulated.

Owns: the protocol. Must not know: either engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from bench.colocated.channel import Ready
from bench.colocated.outcome import Counted, Level


class EngineStart(Protocol):
    """How an instance makes its engine: from its name and the policy's arguments."""

    async def __call__(self, name: str, policy: str, arguments: dict[str, Any]) -> Engine:
        """Start an engine; returns when it can serve."""
        ...


class Engine(Protocol):
    """One running engine, used from one asyncio loop."""

    ready: Ready

    def generate(
        self, request_id: str, prompt: list[int], tokens: int
    ) -> AsyncIterator[Sequence[int]]:
        """Yield the ids of the new tokens of each output, `tokens` in all; raises on failure."""
        ...

    async def begin_run(self) -> None:
        """Forget cached prefixes and start counting anew. The engine is idle."""
        ...

    async def level(self) -> Level:
        """Return what the engine holds now."""
        ...

    async def counted(self) -> Counted:
        """Return the counters since `begin_run`."""
        ...

    async def stop(self) -> None:
        """Shut down; returns when the engine's processes are gone."""
        ...

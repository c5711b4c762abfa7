"""Which fleets stand ready: started when first needed, kept while memory allows.

Owns: the choice between keeping a policy's idle instances and starting them again later.
Must not know: what they run. An idle vLLM instance sleeps, so keeping one costs memory only,
while starting one costs more than a run; prefixes and counters are forgotten between runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from bench.colocated.conductor import Conductor
from bench.colocated.fleet import Fleet
from bench.colocated.setup import Setup
from kvadmit.units import GIB

WARM_UP_REPEAT = -1
"""No run has this number, so none sends the same prompts."""
RESERVE_BYTES = 1 * GIB
FIRST_GUESS_BYTES = 4 * GIB
"""What a fleet is taken to need before one was seen starting."""


def available_bytes() -> int:
    """Return what the kernel thinks new processes can have without swapping (MemAvailable)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable; kernels before 3.14 are not for us")


class Crew:
    """The fleets of a bench. `async with` stops whatever was started."""

    def __init__(
        self,
        setup: Setup,
        log_dir: Path,
        tell: Callable[[str], None],
        site: Mapping[str, str] | None = None,
    ) -> None:
        self._setup = setup
        self._site = site
        self._log_dir = log_dir
        self._tell = tell
        self._fleets: dict[str, Fleet] = {}
        """By policy, least recently used first."""
        self._fleet_bytes = FIRST_GUESS_BYTES

    async def assemble(self, policies: Collection[str]) -> None:
        """Start the fleets of all `policies` at once, if they are to stand there together."""
        if not policies or self._setup.fleets < max(2, len(policies)):
            return
        self._tell(f"starting instances for {', '.join(policies)}")
        for policy in policies:
            self._fleets[policy] = Fleet(self._setup, policy, self._log_dir, self._site)
        try:
            async with asyncio.TaskGroup() as starts:  # if one fails, none goes on
                for fleet in self._fleets.values():
                    starts.create_task(fleet.start())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        for fleet in self._fleets.values():
            await self._warm_up(fleet)

    async def fleet(self, policy: str) -> Fleet:
        """Return the running fleet of `policy`, starting it if need be."""
        if policy in self._fleets:
            fleet = self._fleets.pop(policy)
        else:
            while self._fleets and not self._has_room():
                await self._fleets.pop(next(iter(self._fleets))).stop()
            self._tell(f"starting {self._setup.shape.instances} instances for {policy}")
            before = available_bytes()
            fleet = await Fleet(self._setup, policy, self._log_dir, self._site).start()
            self._fleets[policy] = fleet
            await self._warm_up(fleet)
            self._fleet_bytes = max(0, before - available_bytes())
        self._fleets[policy] = fleet
        return fleet

    def _has_room(self) -> bool:
        """Whether one more fleet fits; how many a GPU has room for was fixed before."""
        if self._setup.device == "cuda":
            return len(self._fleets) < self._setup.fleets
        return available_bytes() >= self._fleet_bytes + RESERVE_BYTES

    async def _warm_up(self, fleet: Fleet) -> None:
        """Play a few requests nobody counts: first steps of an engine load and allocate."""
        if not self._setup.warm_up:
            return
        shape = msgspec.structs.replace(
            self._setup.shape, scenario="symmetric", requests=self._setup.warm_up, rate=None
        )
        setup = msgspec.structs.replace(self._setup, shape=shape, probes=0)
        await Conductor(setup, fleet, WARM_UP_REPEAT, progress=lambda: None).play()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._fleets:
            _, fleet = self._fleets.popitem()
            await fleet.stop()

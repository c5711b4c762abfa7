"""Blows at loaded instances, and what is found afterwards.

Owns: when who is struck, and the looks at books, files and descriptors in between. Must not know:
how load is made (`tenant`) or how a process is hit (`blows`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.colocated import blows, leftovers, recovery
from bench.colocated.blows import Blow, Role
from bench.colocated.fleet import InstanceError
from bench.colocated.setup import Setup
from bench.colocated.tenant import Tally, Tenant
from kvadmit.coordinator import HOST_POOL_FILE
from kvadmit.errors import KvAdmitError
from kvadmit.rundir import RunDir

DRAIN_S = 240.0
ROUND_S = 240.0
"""Load and blows, then a pause to look at the books."""
SETTLE_S = 30.0
"""Bound of what takes a moment after the last request: spare extents leave, books follow."""
UNHURT_S = (3.0, 12.0)
"""How long all instances serve between two blows at one of them."""
OTHER_S = (6.0, 15.0)
"""Between two blows that end no instance."""
LOOK_S = 0.5


class Siege:
    """Tenants in one run directory, the blows at them, and what is found afterwards."""

    def __init__(
        self,
        tenants: Sequence[Tenant],
        run_dir: Path,
        setup: Setup,
        tally: Tally,
        dice: random.Random,
        tell: Callable[[str, float], object],
    ) -> None:
        """`tell(text, part)` is told what happens, and which part of the time is over."""
        self._tenants = list(tenants)
        self._run = RunDir.open(str(run_dir))
        self._pool = self._run.path / HOST_POOL_FILE
        self._setup = setup
        self._tally = tally
        # One for each series of blows, so that a seed says what they are.
        self._dice = dice
        self._other_dice = random.Random(dice.getrandbits(32))
        self._tell = tell
        self._blows: list[Blow] = []
        self._held: list[list[Any]] = []
        """Time, and bytes held by each instance, None while it is not there."""
        self._began_s = 0.0
        self._ends_s = 0.0
        self._arbiter_back_s: list[float] = []
        self._memory_back_s: dict[Role, list[float]] = {}
        """By which process of an instance was killed."""
        self._rounds = 0
        self._arbiters: set[psutil.Process] = set()
        """All that were seen: in the end none of them may be left."""
        self._lingering = 0
        self._books_equal = True
        self._leaked_bytes = 0
        self._descriptors: dict[str, int] = {}
        self._grown: dict[str, int] = {}
        """Most descriptors more than at the first look, by process."""

    async def play(self, for_s: float) -> dict[str, Any]:
        """Strike and look for `for_s` seconds; returns the report's own part."""
        try:
            await asyncio.gather(*(tenant.start() for tenant in self._tenants))
            self._began_s = time.monotonic()
            self._ends_s = self._began_s + for_s
            try:
                await self._strike_and_look()
            except (InstanceError, TimeoutError, psutil.Error) as error:
                # What was seen until then is worth its report.
                self._tally.failed += 1
                self._tally.reasons.append(f"it ended early: {error}")
            took_s = time.monotonic() - self._began_s
        finally:
            left = await asyncio.gather(*(tenant.bury() for tenant in self._tenants))
            self._lingering += sum(left)
        files = await self._after_all()
        return self._report(took_s, files)

    async def _strike_and_look(self) -> None:
        """Look, then strike for a while and look again, until the time is over."""
        await self._look()  # tokens before the first blow; descriptors to compare with
        watching = asyncio.create_task(self._watch())
        try:
            while (left_s := self._ends_s - time.monotonic()) > 0:
                await self._strike_for(min(ROUND_S, left_s))
                await self._look()
        finally:
            watching.cancel()

    # --- under load ---

    async def _strike_for(self, for_s: float) -> None:
        """Load everybody and strike until `for_s` are over and all instances are up again."""
        until_s = time.monotonic() + for_s
        for tenant in self._tenants:
            tenant.press(True)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._strike_instances(until_s, self._dice))
                group.create_task(self._strike_others(until_s, self._other_dice))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        for tenant in self._tenants:
            tenant.press(False)

    async def _strike_instances(self, until_s: float, dice: random.Random) -> None:
        await asyncio.sleep(dice.uniform(*UNHURT_S))
        while time.monotonic() < until_s:
            tenant = dice.choice(self._tenants)
            role = blows.draw_fatal(dice)
            everything = blows.tree(tenant.pid)
            ends_later = {one.pid for one in everything if blows.helps(one)} | {tenant.pid}
            process = await self._find(role, tenant)
            if process is None or not tenant.up:
                continue
            self._note(role, tenant.name, killed=True)
            tenant.strike()
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
            # Unless it was hit, the front end ends when told to, and its helpers with it.
            own = [one for one in everything if role == "front end" or one.pid not in ends_later]
            pause_s = dice.uniform(0, 3)
            await asyncio.gather(
                self._start_again(tenant, own, pause_s),
                self._time_memory(role, {one.pid for one in everything}),
            )
            await asyncio.sleep(dice.uniform(*UNHURT_S))

    async def _start_again(self, tenant: Tenant, own: list[psutil.Process], pause_s: float) -> None:
        self._lingering += await blows.until_gone(own)
        self._lingering += await tenant.bury()
        await asyncio.sleep(pause_s)
        await tenant.start()

    async def _strike_others(self, until_s: float, dice: random.Random) -> None:
        while time.monotonic() < until_s:
            await asyncio.sleep(dice.uniform(*OTHER_S))
            role, kill = blows.draw_other(dice)
            up = [tenant for tenant in self._tenants if tenant.up]
            tenant = dice.choice(up) if up else None
            if role != "arbiter" and tenant is None:
                continue
            process = await self._find(role, tenant)
            if process is None:
                continue
            name = "" if role == "arbiter" or tenant is None else tenant.name
            self._note(role, name, killed=kill)
            if kill:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                await self._time_arbiter(process)
            else:
                await blows.freeze(process)

    async def _time_memory(self, role: Role, pids: set[int]) -> None:
        """Time until what the processes `pids`, one of them just killed, held can be granted.

        Less the time for which another process was stopped: it may be the one that must answer.
        """
        killed_s = time.monotonic()
        await recovery.until(
            lambda snapshot: recovery.memory_is_back(snapshot, pids, killed_s),
            self._run,
            what="the memory of a killed instance",
        )
        back_s = time.monotonic()
        took_s = back_s - killed_s - self._stopped_s(killed_s, back_s)
        self._memory_back_s.setdefault(role, []).append(round(took_s, 3))

    async def _time_arbiter(self, killed: psutil.Process) -> None:
        """Time until another arbiter than the one just `killed` has all reports."""
        if not any(tenant.up for tenant in self._tenants):
            return  # the next instance that starts will start one
        killed_s = time.monotonic()
        await recovery.until(
            lambda snapshot: (
                snapshot["pid"] != killed.pid
                and recovery.all_reported(snapshot, {t.name for t in self._tenants if t.up})
            ),
            self._run,
            what="the arbiter",
        )
        self._arbiter_back_s.append(round(time.monotonic() - killed_s, 3))

    async def _find(self, role: Role, tenant: Tenant | None) -> psutil.Process | None:
        """Return the process to hit; None while an arbiter that could name it is missing."""
        with contextlib.suppress(KvAdmitError, LookupError, psutil.Error):
            snapshot = await asyncio.to_thread(blows.status, self._run)
            if role == "arbiter":
                return self._arbiter(snapshot)
            if tenant is not None and tenant.up:
                return blows.of_instance(snapshot, tenant.name, tenant.pid)[role][0]
        await asyncio.sleep(0.2)
        return None

    def _arbiter(self, snapshot: dict[str, Any]) -> psutil.Process:
        found = psutil.Process(int(snapshot["pid"]))
        self._arbiters.add(found)
        return found

    def _note(self, role: Role, name: str, *, killed: bool) -> None:
        at_s = time.monotonic() - self._began_s
        self._blows.append(Blow(at_s=round(at_s, 2), role=role, name=name, killed=killed))
        what = "killing" if killed else "stopping"
        whose = f" of {name}" if name else ""
        done = min(1.0, at_s / (self._ends_s - self._began_s))
        self._tell(f"{what} the {role}{whose}; {self._tally.completed:,} requests", done)

    async def _watch(self) -> None:
        """Take down who holds how much, as the arbiter sees it."""
        while True:
            now_s = round(time.monotonic() - self._began_s, 2)
            with contextlib.suppress(KvAdmitError, KeyError):
                snapshot = await asyncio.to_thread(blows.status, self._run)
                self._held.append([now_s, *self._held_by(snapshot).values()])
            await asyncio.sleep(LOOK_S)

    def _held_by(self, snapshot: dict[str, Any]) -> dict[str, int | None]:
        found = snapshot["instances"]
        return {
            tenant.name: sum(found[tenant.name]["held_bytes"].values())
            if tenant.name in found
            else None
            for tenant in self._tenants
        }

    # --- at rest ---

    async def _look(self) -> None:
        """With everybody up and no load: tokens, books, descriptors."""
        self._rounds += 1
        for tenant in self._tenants:
            await tenant.drain(DRAIN_S)
        for tenant in self._tenants:
            tenant.send_fixtures()
        for tenant in self._tenants:
            await tenant.drain(DRAIN_S)
        self._books_equal &= await self._books_agree()
        await self._count_descriptors()

    async def _books_agree(self) -> bool:
        """Whether the arbiter's figures become those of the instances, and nothing is unowned."""
        until_s = time.monotonic() + SETTLE_S
        names = {tenant.name for tenant in self._tenants}
        while True:
            told = {tenant.name: await tenant.held_bytes() for tenant in self._tenants}
            snapshot: dict[str, Any] = await blows.until_joined(self._run, names, SETTLE_S)
            foreign = sum(device["foreign_bytes"] for device in snapshot["devices"].values())
            # The third witness: what is really booked in the pool, by whomever.
            unowned = leftovers.pool_bytes(self._pool, self._setup.pool_bytes) - sum(told.values())
            if self._held_by(snapshot) == told and not foreign and not unowned:
                return True
            if time.monotonic() > until_s:
                self._leaked_bytes = max(self._leaked_bytes, foreign, abs(unowned))
                return False
            await asyncio.sleep(0.2)

    async def _count_descriptors(self) -> None:
        """Compare open files with those of the first look; what is being closed gets a moment."""
        until_s = time.monotonic() + SETTLE_S
        while True:
            now = leftovers.descriptors(await self._processes())
            self._descriptors = self._descriptors or now
            grown = leftovers.grown(self._descriptors, now)
            if not grown:
                return
            if time.monotonic() > until_s:
                self._grown |= {n: max(c, self._grown.get(n, 0)) for n, c in grown.items()}
                return
            await asyncio.sleep(0.5)

    async def _processes(self) -> dict[str, psutil.Process]:
        names = {tenant.name for tenant in self._tenants}
        snapshot = await blows.until_joined(self._run, names, SETTLE_S)
        found = {"arbiter": self._arbiter(snapshot)}
        for tenant in self._tenants:
            parts = blows.of_instance(snapshot, tenant.name, tenant.pid)
            del parts["front end"]  # it has none of ours
            found |= {
                f"{role} {number} of {tenant.name}": one
                for role, several in parts.items()
                for number, one in enumerate(several)
            }
        return found

    async def _after_all(self) -> set[str]:
        """Wait, bounded, for the arbiter's end; returns the files that are still there."""
        until_s = time.monotonic() + SETTLE_S
        while (files := leftovers.own_files(self._run, HOST_POOL_FILE)) and (
            time.monotonic() < until_s
        ):
            await asyncio.sleep(0.2)
        self._lingering += await blows.until_gone(list(self._arbiters), SETTLE_S)
        self._leaked_bytes += leftovers.pool_bytes(self._pool, self._setup.pool_bytes)
        return files

    def _report(self, took_s: float, files: set[str]) -> dict[str, Any]:
        tally = self._tally
        killed = [blow for blow in self._blows if blow.killed]
        return {
            "minutes": round(took_s / 60, 2),
            "kills": len(killed),
            "killed": by_role(killed),
            "stopped": by_role([blow for blow in self._blows if not blow.killed]),
            "requests": tally.completed,
            "lost_with_victims": tally.lost_with_victims,
            "failed_outside_victims": tally.failed,
            "fixtures": tally.fixtures,
            "differing_tokens": tally.differing,
            "longest_silence_s": round(self._longest_silence_s(), 3),
            "arbiter_back_s": recovery.figures(self._arbiter_back_s),
            "memory_back_s": {
                role: recovery.figures(times_s) for role, times_s in self._memory_back_s.items()
            },
            "leaked_bytes": self._leaked_bytes,
            "leaked_fds": sum(self._grown.values()),
            "leaked_files": len(files),
            "leaked_processes": self._lingering,
            "books_equal": self._books_equal,
            "rounds": self._rounds,
            "reasons": [
                *tally.reasons,
                *(f"file left: {name}" for name in sorted(files)),
                *(f"{count} more descriptors: {name}" for name, count in self._grown.items()),
            ],
            "blows": [[b.at_s, b.role, b.name, b.killed] for b in self._blows],
            "names": [tenant.name for tenant in self._tenants],
            "held": self._held,
        }

    def _longest_silence_s(self) -> float:
        """Of an instance, less the time for which a process of its own was stopped."""
        longest_s = 0.0
        for name, begin_s, end_s in self._tally.silences:
            stopped_s = self._stopped_s(begin_s, end_s, {name})
            longest_s = max(longest_s, end_s - begin_s - stopped_s)
        return longest_s

    def _stopped_s(self, begin_s: float, end_s: float, names: Collection[str] = ()) -> float:
        """Return for how long of this time a process was stopped, of `names` if some are given."""
        began = [
            blow.at_s + self._began_s
            for blow in self._blows
            if not blow.killed and (not names or blow.name in names)
        ]
        return sum(
            max(0.0, min(end_s, at_s + blows.FREEZE_S) - max(begin_s, at_s)) for at_s in began
        )


def by_role(struck: list[Blow]) -> dict[str, int]:
    """Return how often each role was hit."""
    return {
        role: count
        for role in ("front end", "engine core", "worker", "arbiter")
        if (count := sum(blow.role == role for blow in struck))
    }

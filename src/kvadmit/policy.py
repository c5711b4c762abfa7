"""Who may hold how much: a pure function from a snapshot to allowances.

Owns: order of needs, earmarks, reclaim prices, the sharing of what is left. Must not know:
messages, time, history. Called after every event of the arbitration machine; the same
snapshot always gives the same plan.

Rules, in the order they are applied:
1. Needs are served whole or not at all, on all devices at once: starting instances and
   those under their floor first, then those below an equal share, then by age of the need.
   Bytes of an unfilled floor are nobody else's.
2. The first need that does not fit earmarks its devices: nothing there goes to anyone
   later, unspent grants of wants are taken back, and peers are asked for the rest in rising
   price: orphans and spare, free, cache-only, and growth above an equal share while the
   claimant is below it (the victim drains, nothing is preempted).
3. What is left is shared among wants by filling the lowest holder first (max-min). A want that
   is not met is covered by what idle peers have free, and up to an equal share by draining
   busy peers that are above theirs.
"""

from __future__ import annotations

import msgspec


class DeviceView(msgspec.Struct, frozen=True):
    """`capacity_bytes`: what all instances together may hold here now."""

    capacity_bytes: int
    capped: bool = False


class Claimant(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as the policy sees it; extents, except `cost` and `start_bytes`.

    `cost`: device -> bytes of one extent. `order`: age of its need or start (lower is
    older). `late`: it did not give back in time, so nothing is expected of it. `refused`: the
    driver said no under its last grant, which is taken back before it gets another.
    """

    id: str
    cost: dict[str, int]
    floor: int = 0
    cap: int = 0
    held: int = 0
    booked: int = 0
    leaving: int = 0
    spare: int = 0
    free: int = 0
    cached: int = 0
    orphan: int = 0
    preparing: int = 0
    need: int = 0
    want: int = 0
    running: int = 0
    order: int = 0
    late: bool = False
    refused: bool = False
    start_bytes: dict[str, int] = {}
    """Bytes beside elastic KV a starting instance waits to book; empty once it has."""

    @property
    def kept(self) -> int:
        """Extents it has and is not giving up already."""
        return self.held - self.leaving

    @property
    def idle(self) -> bool:
        """Whether it serves nobody: its free and cached extents are worth least."""
        return not (self.need or self.want or self.running)


class Plan(msgspec.Struct):
    """What to allow. `allowance`: id -> extents. `reason`: id -> why, for people.

    `waiting`: ids whose need or start does not fit yet, first in order first. `started`:
    starting ids whose bytes are booked by this plan. `pressed`: devices somebody waits for.
    """

    allowance: dict[str, int]
    reason: dict[str, str]
    waiting: list[str]
    started: list[str]
    pressed: set[str]


def plan(devices: dict[str, DeviceView], claimants: list[Claimant]) -> Plan:
    """Return the allowance of every claimant for this snapshot."""
    return _Planner(devices, claimants).run()


class _Planner:
    """The working state of one call of `plan`."""

    def __init__(self, devices: dict[str, DeviceView], claimants: list[Claimant]) -> None:
        self.devices = devices
        self.claimants = {c.id: c for c in claimants}
        self.floor = _scaled_floors(devices, claimants)
        self.available = {d: view.capacity_bytes for d, view in devices.items()}
        self.booked = {c.id: c.booked for c in claimants}
        self.reserved = dict.fromkeys(devices, 0)
        for c in claimants:
            for device, cost in c.cost.items():
                self.available[device] -= c.booked * cost
                self.reserved[device] += self._unfilled(c) * cost
        for device, view in devices.items():
            if view.capped:
                self.available[device] = min(self.available[device], 0)
        # What a refused claimant still prepares is being undone: it is not left to it.
        kept = {c.id: c.kept - (c.preparing if c.refused else 0) for c in claimants}
        self.plan = Plan(kept, {}, [], [], set())
        self.granted: set[str] = set()

    def run(self) -> Plan:
        """Apply the three rules."""
        in_order = self._in_order()
        for claimant in in_order:
            if claimant.need and self._goal(claimant) <= claimant.booked and not claimant.refused:
                self._grant(claimant)
        for claimant in in_order:
            if claimant.start_bytes:
                self._start(claimant)
            if claimant.need and claimant.id not in self.granted:
                self._need(claimant)
        self._keep_unspent()
        self._share_wants()
        return self.plan

    def _in_order(self) -> list[Claimant]:
        asking = [c for c in self.claimants.values() if c.need or c.start_bytes]

        def rank(c: Claimant) -> tuple[bool, bool, int, str]:
            under_floor = bool(c.start_bytes) or c.kept < self.floor[c.id]
            return (not under_floor, not self._below_share(c), c.order, c.id)

        return sorted(asking, key=rank)

    # --- rule 1 ---

    def _start(self, c: Claimant) -> None:
        sizes = {device: size for device, size in c.start_bytes.items() if size}
        missing = {d: size - self.available[d] + self.reserved[d] for d, size in sizes.items()}
        if self.plan.pressed & set(sizes) or any(lack > 0 for lack in missing.values()):
            self._wait(c, missing)
            return
        for device, size in sizes.items():
            self.available[device] -= size
        self.plan.started.append(c.id)

    def _goal(self, c: Claimant) -> int:
        return min(c.held + c.need, c.cap)

    def _need(self, c: Claimant) -> None:
        goal = self._goal(c)
        extra = goal - c.booked
        missing = {d: extra * cost - self._room(c, d) for d, cost in c.cost.items()}
        blocked = bool(self.plan.pressed & set(c.cost)) and goal > self.floor[c.id]
        if c.refused or blocked or any(lack > 0 for lack in missing.values()):
            self._wait(c, missing)
        else:
            self._grant(c)

    def _grant(self, c: Claimant) -> None:
        """Allow `c` its whole need; bytes booked for it already cost nothing more."""
        goal = self._goal(c)
        self._book(c, goal)
        self.plan.allowance[c.id] = goal
        self.plan.reason[c.id] = "need"
        self.granted.add(c.id)

    def _book(self, c: Claimant, extents: int) -> None:
        """Count `c` for `extents` in all, if it is not counted for as many already."""
        before, unfilled = self.booked[c.id], self._unfilled(c)
        self.booked[c.id] = max(before, extents)
        for device, cost in c.cost.items():
            self.available[device] -= (self.booked[c.id] - before) * cost
            self.reserved[device] -= (unfilled - self._unfilled(c)) * cost

    def _unfilled(self, c: Claimant) -> int:
        """Return the extents of its floor that `c` is not counted for yet."""
        return max(0, self.floor[c.id] - self.booked[c.id])

    def _room(self, c: Claimant, device: str) -> int:
        """Bytes `c` may still take on `device`: all but other instances' unfilled floors."""
        own = self._unfilled(c) * c.cost[device]
        return self.available[device] - (self.reserved[device] - own)

    # --- rule 2 ---

    def _wait(self, c: Claimant, missing: dict[str, int]) -> None:
        first = not self.plan.pressed & set(missing)
        self.plan.waiting.append(c.id)
        self.plan.pressed |= set(missing)
        if not first:
            return  # those devices are earmarked for somebody older
        lack = {d: bytes_ for d, bytes_ in missing.items() if bytes_ > 0}
        for other in self.claimants.values():
            if other.id == c.id or other.late:
                continue
            unspent = 0 if other.id in self.granted else other.booked - max(other.held, 0)
            for device in lack:
                lack[device] -= (other.leaving + unspent) * other.cost.get(device, 0)
        self._reclaim(c, lack)

    def _reclaim(self, c: Claimant, lack: dict[str, int]) -> None:
        """Lower peers' allowances until `lack` is covered, cheapest extents first.

        Idle peers are asked for the claimant's whole want at once, and so are those above an
        equal share, up to the claimant's own: coarse steps cost fewer rounds. Other busy ones
        are asked for its need only.
        """
        victims = [
            v
            for v in self.claimants.values()
            if v.id != c.id and not v.late and v.id not in self.granted and set(v.cost) & set(lack)
        ]
        victims.sort(key=lambda v: (-v.kept, v.id))
        beyond = {d: (c.want - c.need) * c.cost.get(d, 0) for d in lack}
        for device in lack:
            lack[device] += beyond[device]
        self._take_by_price([v for v in victims if v.idle], c, lack)
        for device in lack:
            lack[device] -= beyond[device]
        self._take_by_price([v for v in victims if not v.idle], c, lack)
        if not self._below_share(c):
            return
        extra = max(0, min(c.held + c.want, c.cap, self._share(c)) - self._goal(c))
        for device in lack:
            lack[device] += extra * c.cost.get(device, 0)
        for v in victims:
            self._take(v, c, v.kept - self._share(v, c), lack, "an equal share of")

    def _take_by_price(self, victims: list[Claimant], c: Claimant, lack: dict[str, int]) -> None:
        for tier in ("spare", "free", "cached"):
            for v in victims:
                offer = v.orphan + v.spare
                if tier != "spare":
                    offer += v.free
                if tier == "cached":
                    offer += v.cached
                self._take(v, c, offer, lack, tier)

    def _take(self, v: Claimant, c: Claimant, offer: int, lack: dict[str, int], why: str) -> None:
        """Ask `v` for up to `offer` of its kept extents in all, never below its floor."""
        taken = v.kept - self.plan.allowance[v.id]
        most = min(offer, v.kept - self.floor[v.id]) - taken
        wanted = max(
            (-(-lack[d] // v.cost[d]) for d in lack if d in v.cost and lack[d] > 0), default=0
        )
        take = min(most, wanted)
        if take <= 0:
            return
        self.plan.allowance[v.id] -= take
        self.plan.reason[v.id] = f"{c.id} needs {why} extents"
        for device in lack:
            lack[device] -= take * v.cost.get(device, 0)

    def _equal_shares(self, c: Claimant) -> dict[str, int]:
        """Bytes on each of `c`'s devices that every busy instance would have of an equal split."""
        shares = {}
        for device in {**c.cost, **c.start_bytes}:
            sharing = {c.id} | {
                o.id for o in self.claimants.values() if not o.idle and device in o.cost
            }
            shares[device] = self.devices[device].capacity_bytes // len(sharing)
        return shares

    def _share(self, v: Claimant, c: Claimant | None = None) -> int:
        """Return the extents of `v` that lie within an equal share on every device.

        With `c`: on those of its devices that `v` has a part in.
        """
        share = self._equal_shares(v if c is None else c)
        return min((share[d] // cost for d, cost in v.cost.items() if d in share), default=0)

    def _below_share(self, c: Claimant) -> bool:
        """Whether `c`, with what it needs, stays within an equal share on every device."""
        shares = self._equal_shares(c)
        return all(
            (c.held + c.need) * c.cost.get(d, 0) + c.start_bytes.get(d, 0) <= share
            for d, share in shares.items()
        )

    # --- rule 3 ---

    def _keep_unspent(self) -> None:
        """Leave granted wants as they are, except on devices somebody waits for."""
        for c in self.claimants.values():
            if c.refused or c.id in self.granted or self.plan.pressed & set(c.cost):
                continue
            self._give(c, min(c.booked - c.held, c.want, c.cap - c.held))

    def _give(self, c: Claimant, more: int) -> None:
        """Allow `c` so many extents more than it has; what is leaving counts until it is gone.

        With nothing more, what is leaving is not allowed either: it would be granted back while
        it goes.
        """
        if more > 0:
            self._book(c, c.held + more)
            self.plan.allowance[c.id] = c.held + more
            self.plan.reason[c.id] = "want"

    def _share_wants(self) -> None:
        """Give what is left to the lowest holder first, then ask peers for the rest."""
        wanting = {
            c.id: min(c.want, c.cap - c.held)
            for c in self.claimants.values()
            if c.want and not c.refused and not self.plan.pressed & set(c.cost)
        }
        given = {i: max(0, self.plan.allowance[i] - self.claimants[i].held) for i in wanting}
        within = {
            i: self._share(self.claimants[i]) - max(self.claimants[i].kept, self.plan.allowance[i])
            for i in wanting
        }
        """Extents up to an equal share: nobody goes past it before all are there."""
        open_ids = {i for i, want in wanting.items() if want > given[i]}
        unmet: list[Claimant] = []
        while open_ids:
            lowest, *others = sorted(
                open_ids, key=lambda i: (within[i] <= 0, self._bytes_held(i), i)
            )
            c = self.claimants[lowest]
            fits = max(0, min((self._room(c, d) // cost for d, cost in c.cost.items()), default=0))
            chunk = wanting[c.id] - given[c.id]
            if others:
                # Up to the next lowest, or a part of what is left: never far above anybody.
                gap = self._bytes_held(others[0]) - self._bytes_held(c.id)
                level = gap // max(c.cost.values(), default=1)
                chunk = min(chunk, max(1, level, fits // (2 * len(open_ids))))
                if within[c.id] > 0:
                    chunk = min(chunk, within[c.id])
            most = self.booked[c.id] - c.held + fits
            if given[c.id] + chunk > most:
                open_ids.discard(c.id)
                unmet.append(c)
            more = min(given[c.id] + chunk, most)
            if more <= given[c.id]:
                continue
            within[c.id] -= more - given[c.id]
            given[c.id] = more
            self._give(c, more)
            if more >= wanting[c.id]:
                open_ids.discard(c.id)
        for c in unmet:
            self._cover_want(c, wanting[c.id] - given[c.id])

    def _cover_want(self, c: Claimant, missing: int) -> None:
        """Ask the idle for spare and free extents, and those above an equal share to drain.

        Nobody is asked in vain: only for as many as `c` can get on every one of its devices.
        """
        peers = [
            v
            for v in self.claimants.values()
            if v.id != c.id
            and not v.late
            and v.id not in self.granted
            and set(v.cost) & set(c.cost)
        ]
        idle = {v.id: v.kept - v.orphan - v.spare - v.free for v in peers if v.idle}
        self._ask(c, missing, peers, idle, "idle")
        in_share = self._share(c) - max(c.kept, self.plan.allowance[c.id])
        busy = {v.id: self._share(v, c) for v in peers if not v.idle}
        self._ask(c, min(missing, in_share), peers, busy, "an equal share of")

    def _ask(
        self, c: Claimant, missing: int, peers: list[Claimant], lowest: dict[str, int], why: str
    ) -> None:
        """Lower peers' allowances, not below `lowest` nor a floor, until `c` can have `missing`."""
        allowed = self.plan.allowance
        ahead = {d: max(0, self._room(c, d)) for d in c.cost}
        """Bytes that are free for `c` or on their way to it."""
        for v in peers:
            for device in ahead:
                going = v.leaving + max(0, v.kept - allowed[v.id])
                ahead[device] += going * v.cost.get(device, 0)
        givers = sorted((v for v in peers if v.id in lowest), key=lambda v: (-v.kept, v.id))
        could = {v.id: max(0, allowed[v.id] - max(lowest[v.id], self.floor[v.id])) for v in givers}
        attainable = min(
            (ahead[d] + sum(could[v.id] * v.cost.get(d, 0) for v in givers)) // cost
            for d, cost in c.cost.items()
        )
        extra = min(missing, attainable)
        lack = {d: extra * cost - ahead[d] for d, cost in c.cost.items()}
        for v in givers:
            short = [-(-lack[d] // v.cost[d]) for d in lack if d in v.cost and lack[d] > 0]
            take = min(could[v.id], max(short, default=0))
            if take > 0:
                allowed[v.id] -= take
                self.plan.reason[v.id] = f"{c.id} needs {why} extents"
                for device in lack:
                    lack[device] -= take * v.cost.get(device, 0)

    def _bytes_held(self, claimant_id: str) -> int:
        c = self.claimants[claimant_id]
        return self.plan.allowance[claimant_id] * max(c.cost.values(), default=0)


def _scaled_floors(devices: dict[str, DeviceView], claimants: list[Claimant]) -> dict[str, int]:
    """Return floors in extents, scaled by one factor where capacity fell below their sum."""
    floors: dict[str, int] = {c.id: c.floor for c in claimants}
    for device, view in devices.items():
        total = sum(c.floor * c.cost.get(device, 0) for c in claimants)
        if total > view.capacity_bytes:
            for c in claimants:
                if device in c.cost:
                    scaled = c.floor * max(0, view.capacity_bytes) // total
                    floors[c.id] = min(floors[c.id], scaled)
    return floors

"""The group machine: the extents of one instance on all its ranks.

Owns: the state of every extent, the orders under way, when to grow, when to shrink, and
the report the arbiter gets. Must not know: sockets, clocks, threads, the driver, vLLM.

Path of one growth, each arrow an event: the pool's levels show a need -> the report asks
-> an allowance arrives -> PREPARE to all ranks (`preparing`) -> all prepared: COMMIT
(`committing`) -> all committed: `resident`, handed to the pool. A refusal before the first
map call ends in ABORT and the state before; a failure after it leaves an `orphan`, which a
repeated COMMIT finishes.

Path of one shrink: the pool returns extents with a fence -> `draining` (FENCE order, may
become `spare`) or `fenced` (DECOMMIT order, leads only to absent).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvadmit.errors import InvariantViolation, LocalProtocolError
from kvadmit.extents import from_runs, to_runs
from kvadmit.group_events import (
    AgentJoined,
    AgentLost,
    AgentSent,
    ArbiterFound,
    ArbiterLost,
    ArbiterSent,
    Effect,
    EngineLost,
    Event,
    GeometryKnown,
    GivePool,
    Hold,
    Note,
    Observe,
    PoolSent,
    ReadHere,
    ReadingTaken,
    SendAgent,
    SendArbiter,
    Settle,
    StartRequested,
    StartTimer,
    StopRequested,
    StopTimer,
    TimerFired,
)
from kvadmit.link import ArbiterLink, Call
from kvadmit.messages import (
    AgentHello,
    Bye,
    DeviceReading,
    Geometry,
    Headroom,
    Hello,
    OrderKind,
    ReadDevice,
    Report,
)
from kvadmit.orders import Operation, OrderBook
from kvadmit.port import Ceiling, Limit, PoolLevels, PoolReturned, Resident

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

ANSWER_WAIT_S = 2.0
"""An unanswered order is sent again after this long, then after twice as long, and so on."""
ANSWER_WAIT_S_MAX = 30.0
HOLD_S = 0.020
"""Longest time a running request is held for bytes on their way (design section 7)."""
IDLE_S = 1.0
"""After this long without requests the pool's free extents become spare."""
BATCH_EXTENTS_MAX = 256
ORPHAN_TRIES_MAX = 3


class Group:
    """One instance's machine. Made before the geometry is known; grows once it is.

    `step` raises LocalProtocolError for an event that cannot happen in this state; the
    state is then unchanged.
    """

    def __init__(self, *, ranks: int, hello: Hello, start_wait_s: float, idle_decay_s: float):
        self.ranks = ranks
        self.link = ArbiterLink(hello)
        self.start_wait_s = start_wait_s
        self.idle_decay_s = idle_decay_s
        self.geometry: Geometry | None = None
        self.state = bytearray()
        self.count = [0] * len(STATE_NAMES)
        self.book = OrderBook(ranks)
        self.joined: dict[int, AgentHello] = {}
        self.lost_ranks: set[int] = set()
        self.levels = PoolLevels(resident=0)
        self.serving = False
        self.stopping = False
        self.counters = {
            "growths": 0,
            "allocation_misses": 0,
            "headroom_rejections": 0,
            "timer_probes": 0,
            "resends": 0,
            "device_reads": 0,
            "orphans": 0,
        }
        self._waiting: set[Call] = set()
        self._readings: dict[str, DeviceReading] = {}
        self._readings_taken = 0
        self._newest_reading: dict[int, int] = {}
        self._refused: set[str] = set()
        self._growth_began_s = 0.0
        self._need_since_s: float | None = None
        self._orphan_tries: dict[int, int] = {}
        self._orphans_due = False
        self._idle_limit: int | None = None
        self._idle_timer = False
        self._decay_timer = False
        self._limit_given: int | None = None
        self._ceiling_given = 0
        self._report_revision = 0
        self._reported: Report | None = None
        self._held_until_s = 0.0

    # --- events ---

    def step(self, event: Event) -> list[Effect]:
        """Apply one event and return the effects in the order they must be carried out."""
        effects: list[Effect] = []
        now_s = event.now_s
        match event:
            case StartRequested():
                hello = self.link.introduce(start_bytes=event.start_bytes)
                self._await("start", now_s, effects)
                if self.link.phase != "lost":
                    self._say(hello, now_s, effects)
            case GeometryKnown():
                self._set_geometry(event, effects)
            case AgentJoined():
                self._agent_joined(event.hello, effects)
            case AgentLost():
                self.lost_ranks.add(event.rank)
                if not self.stopping:
                    effects.append(EngineLost(f"rank {event.rank} closed its lease line"))
            case AgentSent():
                self._agent_sent(event, effects)
            case ArbiterFound():
                self._say(self.link.found(), now_s, effects)
            case ArbiterLost():
                if self.link.phase != "lost" and not self.stopping:
                    effects.append(Note("warning", "arbiter lost: serving on, growth waits"))
                self.link.lost(self.held)
                self._reported = None
                # The next arbiter must not take what a device showed long ago for its state.
                self._readings.clear()
                effects.extend((StopTimer("hello"), StopTimer("report")))
            case ArbiterSent():
                self._arbiter_sent(event, effects)
            case ReadingTaken():
                self._note_reading(event.reading)
            case PoolSent():
                self._pool_sent(event, effects)
            case StopRequested():
                self.stopping = True
                if self.link.phase == "joined":
                    effects.append(SendArbiter(Bye()))
            case TimerFired():
                self._timer_fired(event, effects)
        if not self.stopping:
            self._advance(now_s, effects)
        return effects

    def _set_geometry(self, event: GeometryKnown, effects: list[Effect]) -> None:
        if self.geometry is not None:
            raise LocalProtocolError("the geometry is known already")
        self.geometry = event.geometry
        self.state = bytearray(event.geometry.extents)
        self.count[ABSENT] = event.geometry.extents
        self._await("geometry", event.now_s, effects)
        hello = self.link.introduce(geometry=event.geometry)
        if self.link.phase != "lost":
            self._say(hello, event.now_s, effects)

    def _agent_joined(self, hello: AgentHello, effects: list[Effect]) -> None:
        if self.geometry is None:
            raise LocalProtocolError(f"rank {hello.rank} joined before the geometry was known")
        if hello.mapped != ((0, self.geometry.prefix),) or hello.extents != self.geometry.extents:
            effects.append(
                EngineLost(
                    f"rank {hello.rank} has {hello.mapped} of {hello.extents} extents mapped, "
                    f"expected the first {self.geometry.prefix} of {self.geometry.extents}"
                )
            )
            return
        self.joined[hello.rank] = hello
        self._note_reading(hello.reading)
        if len(self.joined) == self.ranks and not self.serving:
            self._move(range(self.geometry.prefix), COMMITTING, RESIDENT)
            self.serving = True
            self._settle("ready", "", effects)

    def _agent_sent(self, event: AgentSent, effects: list[Effect]) -> None:
        message = event.message
        if message.reading is not None:
            self._take_reading(event.rank, message.reading)
        if isinstance(message, Headroom):
            return
        operation = self.book.answer(event.rank, message)
        if operation is None:
            return  # a repeat, or the answer of an order already settled
        effects.append(StopTimer(f"answer:{operation.order}"))
        self._finish(operation, event.now_s, effects)

    def _arbiter_sent(self, event: ArbiterSent, effects: list[Effect]) -> None:
        allowance = self.link.allowance
        owed = self.link.receive(event.message, self.held)
        if owed == "hello":
            self._reported = None
            self._say(self.link.found(), event.now_s, effects)
        elif owed == "elect":
            device = getattr(event.message, "device", "")
            ranks = [r for r, hello in self.joined.items() if hello.device == device]
            self.counters["device_reads"] += 1
            effects.append(SendAgent(min(ranks), ReadDevice()) if ranks else ReadHere(device))
        elif owed == "report":
            self._reported = None
        if self.link.refusal and self._waiting & {"start", "geometry"}:
            for call in sorted(self._waiting & {"start", "geometry"}):
                self._settle(call, self.link.refusal, effects)
        if self.link.start_granted and "start" in self._waiting:
            self._settle("start", "", effects)
        if self.link.allowance > allowance:
            self._orphans_due = True
            if self._need_since_s is not None:
                effects.append(Observe("grant_wait_s", event.now_s - self._need_since_s))
                self._need_since_s = None

    def _pool_sent(self, event: PoolSent, effects: list[Effect]) -> None:
        message = event.event
        if isinstance(message, PoolReturned):
            extents = from_runs(message.extents)
            # A clean choice: bytes somebody waits for go behind the fence and away at once,
            # others may come back, so they only wait for the fence.
            excess = max(0, self._excess())
            gone, kept = extents[:excess], extents[excess:]
            if gone:
                self._move(gone, RESIDENT, FENCED)
                self._order("decommit", gone, event.now_s, effects, fence=message.fence)
            if kept:
                self._move(kept, RESIDENT, DRAINING)
                self._order("fence", kept, event.now_s, effects, fence=message.fence)
            return
        if message.need_total > self.levels.need_total:
            self._orphans_due = True
        self.levels = message
        self._watch_idle(event.now_s, effects)

    def _timer_fired(self, event: TimerFired, effects: list[Effect]) -> None:
        name, _, argument = event.timer.partition(":")
        match name:
            case "answer":
                self._resend(int(argument), event.now_s, effects)
            case "wait":
                for call in [call for call in self._waiting if call == argument]:
                    waited = f"no answer within {self.start_wait_s:.0f} s"
                    self._settle(call, f"{waited}: {self._waiting_for(call)}", effects)
            case "hello":
                self._ask_again(event.now_s, effects)
            case "report":
                if self._reported is not None and self._outstanding:
                    self.counters["resends"] += 1
                    self._send_report(self._reported, event.now_s, effects)
            case "idle":
                self._idle_timer = False
                if self.levels.running == self.levels.waiting == 0 and self.levels.free:
                    self._idle_limit = self.levels.resident - self.levels.free
            case "decay":
                self._decay_timer = False
                spare = self._having(SPARE)
                gone = spare[len(spare) // 2 :]
                if gone:
                    self._move(gone, SPARE, FENCED)
                    self._order("decommit", gone, event.now_s, effects)
            case _:
                raise LocalProtocolError(f"no timer is called {event.timer}")

    # --- growth ---

    def _advance(self, now_s: float, effects: list[Effect]) -> None:
        """Do everything the state now allows; every event ends here."""
        if self.geometry is not None:
            self._advance_extents(now_s, effects)
        self._report(now_s, effects)

    def _advance_extents(self, now_s: float, effects: list[Effect]) -> None:
        assert self.geometry is not None
        if "geometry" in self._waiting and self.link.allowance >= self.geometry.prefix:
            if self.count[COMMITTING] == 0 and not self.joined:
                self._move(range(self.geometry.prefix), ABSENT, COMMITTING)
            self._settle("geometry", "", effects)
            self._await("ready", now_s, effects)
        if self.serving:
            self._shrink(now_s, effects)
            self._grow(now_s, effects)
            self._bound_pool(effects)
            self._watch_hold(effects)
            self._watch_decay(now_s, effects)
        self._watch_need(now_s)

    def _grow(self, now_s: float, effects: list[Effect]) -> None:
        missing = self._missing(self.levels.want_total)
        if missing <= 0:
            return
        spare = self._having(SPARE)[:missing]
        if spare:
            self._move(spare, SPARE, RESIDENT)
            effects.append(GivePool(Resident(to_runs(spare))))
            missing -= len(spare)
        if self.book.growing or self.lost_ranks or not self.link.may_grow:
            return
        if self.count[ORPHAN]:
            # Bytes that are held already come before new ones.
            if self._orphans_due:
                self._finish_orphans(now_s, effects)
            return
        room = min(missing, self.link.allowance - self.held, BATCH_EXTENTS_MAX)
        if room <= 0:
            return
        extents = self._lowest_absent(room)
        if not extents:
            return
        self._growth_began_s = now_s
        self._move(extents, ABSENT, PREPARING)
        self._order("prepare", extents, now_s, effects)

    def _finish_orphans(self, now_s: float, effects: list[Effect]) -> None:
        self._orphans_due = False
        extents = self._having(ORPHAN)
        for extent in extents:
            self._orphan_tries[extent] = self._orphan_tries.get(extent, 0) + 1
        hopeless = [e for e in extents if self._orphan_tries[e] > ORPHAN_TRIES_MAX]
        if hopeless:
            self._leave_orphans(hopeless, now_s, effects)
            return
        self._growth_began_s = now_s
        self._move(extents, ORPHAN, COMMITTING)
        self._order("commit", extents, now_s, effects)

    def _finish(self, operation: Operation, now_s: float, effects: list[Effect]) -> None:
        """All ranks have answered `operation`: decide what became of its extents."""
        match operation.kind:
            case "prepare":
                self._prepared(operation, now_s, effects)
            case "commit":
                self._committed(operation, now_s, effects)
            case "abort":
                # An abort can only fail on a rank that mapped, and no rank did.
                self._require_done(operation)
                self._move(operation.extents, ABORTING, ABSENT)
            case "fence":
                self._require_done(operation)
                self._move(operation.extents, DRAINING, SPARE)
            case "decommit":
                left = sorted(set(operation.extents) - operation.done_everywhere)
                self._move(operation.done_everywhere, FENCED, ABSENT)
                if left:
                    # Still mapped somewhere: the order repeats until the driver lets go.
                    effects.append(Note("error", f"decommit failed: {operation.reasons}"))
                    self._order("decommit", left, now_s, effects, retry=True)

    def _prepared(self, operation: Operation, now_s: float, effects: list[Effect]) -> None:
        extents = operation.extents
        if operation.all_done:
            self._move(extents, PREPARING, COMMITTING)
            self._order("commit", extents, now_s, effects)
            return
        self.counters["allocation_misses"] += 1
        self.counters["headroom_rejections"] += len(operation.refused_ranks)
        self._refused.update(self.joined[rank].device for rank in operation.refused_ranks)
        self.link.block()
        if operation.failed_ranks:
            effects.append(Note("warning", f"prepare failed: {operation.reasons}"))
        self._move(extents, PREPARING, ABORTING)
        self._order("abort", extents, now_s, effects)

    def _committed(self, operation: Operation, now_s: float, effects: list[Effect]) -> None:
        done = operation.done_everywhere
        left = set(operation.extents) - done
        if done:
            self._move(done, COMMITTING, RESIDENT)
            for extent in done:
                self._orphan_tries.pop(extent, None)
            self.counters["growths"] += 1
            effects.append(Observe("grow_latency_s", now_s - self._growth_began_s))
            effects.append(GivePool(Resident(to_runs(done))))
        if not left:
            return
        self.counters["allocation_misses"] += 1
        effects.append(Note("error", f"commit failed: {operation.reasons}"))
        # An extent no rank made a map call for is as it was prepared; the rest are orphans.
        touched = left & (operation.touched | set(self._orphan_tries))
        untouched = sorted(left - touched)
        self.counters["orphans"] += len(touched)
        self._move(touched, COMMITTING, ORPHAN)
        if untouched:
            self._move(untouched, COMMITTING, ABORTING)
            self._order("abort", untouched, now_s, effects)

    # --- shrink ---

    def _excess(self) -> int:
        """Extents held above the allowance that are not on their way out yet."""
        return self.held - self.count[FENCED] - self.link.allowance

    def _shrink(self, now_s: float, effects: list[Effect]) -> None:
        """Give up what needs no scheduler: orphans first, then spare extents."""
        if self.link.phase != "joined":
            return
        excess = self._excess()
        if excess > 0 and self.count[ORPHAN]:
            orphans = self._having(ORPHAN)[:excess]
            self._leave_orphans(orphans, now_s, effects)
            excess -= len(orphans)
        if excess > 0 and self.count[SPARE]:
            spare = self._having(SPARE)[-excess:]
            self._move(spare, SPARE, FENCED)
            self._order("decommit", spare, now_s, effects)

    def _leave_orphans(self, orphans: list[int], now_s: float, effects: list[Effect]) -> None:
        for extent in orphans:
            self._orphan_tries.pop(extent, None)
        self._move(orphans, ORPHAN, FENCED)
        # No step ever named an orphan's blocks: the fence is already behind.
        self._order("decommit", orphans, now_s, effects)

    def _bound_pool(self, effects: list[Effect]) -> None:
        """Tell the pool how many extents it may keep, when that changed."""
        assert self.geometry is not None
        limit = self.geometry.extents
        if self.link.phase == "joined":
            # Draining extents leave by themselves once their fence has passed.
            excess = self._excess() - self.count[DRAINING]
            if excess > 0:
                limit = max(self.geometry.prefix, self.count[RESIDENT] - excess)
        if self._idle_limit is not None:
            if self.levels.running or self.levels.waiting or self.levels.free == 0:
                self._idle_limit = None
            else:
                limit = max(self.geometry.prefix, min(limit, self._idle_limit))
        if limit != self._limit_given and (self._limit_given is not None or self._binding(limit)):
            self._limit_given = limit
            effects.append(GivePool(Limit(limit)))
        if self.link.ceiling and self.link.ceiling != self._ceiling_given:
            self._ceiling_given = self.link.ceiling
            effects.append(GivePool(Ceiling(self.link.ceiling)))

    def _binding(self, limit: int) -> bool:
        assert self.geometry is not None
        return limit < self.geometry.extents

    def _watch_idle(self, now_s: float, effects: list[Effect]) -> None:
        idle = self.levels.running == self.levels.waiting == 0 and self.levels.free > 0
        if idle and not self._idle_timer:
            self._idle_timer = True
            effects.append(StartTimer("idle", now_s + IDLE_S))
        elif not idle and self._idle_timer:
            self._idle_timer = False
            effects.append(StopTimer("idle"))

    def _watch_decay(self, now_s: float, effects: list[Effect]) -> None:
        if self.count[SPARE] and not self._decay_timer:
            self._decay_timer = True
            effects.append(StartTimer("decay", now_s + self.idle_decay_s))
        elif not self.count[SPARE] and self._decay_timer:
            self._decay_timer = False
            effects.append(StopTimer("decay"))

    # --- orders ---

    def _order(
        self,
        kind: OrderKind,
        extents: list[int],
        now_s: float,
        effects: list[Effect],
        *,
        fence: int = 0,
        retry: bool = False,
    ) -> None:
        operation = self.book.open(kind, list(extents), fence)
        wait_s = ANSWER_WAIT_S_MAX if retry else ANSWER_WAIT_S
        operation.wait_s = wait_s
        effects.append(StartTimer(f"answer:{operation.order}", now_s + wait_s))
        if not retry:
            effects.extend(SendAgent(rank, operation.grant) for rank in range(self.ranks))

    def _resend(self, order: int, now_s: float, effects: list[Effect]) -> None:
        operation = self.book.open_operations.get(order)
        if operation is None:
            return
        waiting = operation.waiting_ranks - self.lost_ranks
        if operation.wait_s == ANSWER_WAIT_S:
            ranks = ", ".join(str(rank) for rank in sorted(waiting))
            effects.append(
                Note(
                    "warning",
                    f"no answer to {operation.kind} {order} from rank {ranks} "
                    f"after {operation.wait_s:.0f} s; asking again",
                )
            )
        operation.wait_s = min(2 * operation.wait_s, ANSWER_WAIT_S_MAX)
        self.counters["resends"] += len(waiting)
        effects.append(StartTimer(f"answer:{order}", now_s + operation.wait_s))
        effects.extend(SendAgent(rank, operation.grant) for rank in sorted(waiting))

    def _require_done(self, operation: Operation) -> None:
        if not operation.all_done:
            raise InvariantViolation(
                f"{operation.kind} cannot fail", f"order {operation.order}: {operation.reasons}"
            )

    # --- levels ---

    @property
    def held(self) -> int:
        """Extents backed, preparing or orphaned: what the arbiter books for this instance."""
        return len(self.state) - self.count[ABSENT]

    def _missing(self, total: int) -> int:
        """Extents the pool lacks to have `total`, beyond those that are coming to it."""
        count = self.count
        return total - count[RESIDENT] - count[PREPARING] - count[COMMITTING]

    @property
    def _outstanding(self) -> bool:
        """Whether a report is on its way that the arbiter has not confirmed."""
        return self._reported is not None and self.link.report_seen < self._reported.revision

    def _report(self, now_s: float, effects: list[Effect]) -> None:
        """Send the instance's levels when they differ from the last ones sent.

        At most one report is outstanding; what changes meanwhile goes into the next one.
        """
        if self.link.phase != "joined" or self._outstanding:
            return
        effects.append(StopTimer("report"))
        report = self._build_report()
        last = self._reported
        if last is not None and not self._worth_sending(last, report):
            return
        self._report_revision += 1
        self._refused.clear()
        report = msgspec.structs.replace(report, revision=self._report_revision)
        self._send_report(report, now_s, effects)

    def _send_report(self, report: Report, now_s: float, effects: list[Effect]) -> None:
        self._reported = report
        effects.append(SendArbiter(report))
        effects.append(StartTimer("report", now_s + ANSWER_WAIT_S))

    def _ask_again(self, now_s: float, effects: list[Effect]) -> None:
        """Repeat the hello while the arbiter owes an answer to it."""
        if self.link.unanswered:
            self.counters["resends"] += 1
        elif self.link.phase == "lost" or "start" not in self._waiting:
            return
        self._say(self.link.hello, now_s, effects)

    def _build_report(self) -> Report:
        count, levels = self.count, self.levels
        # Spare and draining extents come back without the arbiter, orphans once finished.
        usable = self.held - count[FENCED] - count[ABORTING]
        need = want = room = 0
        if self.serving:
            need = max(0, levels.need_total - usable)
            want = max(need, levels.want_total - usable)
        elif self.geometry is not None:
            need = want = max(0, self.geometry.prefix - self.held)
        if self.geometry is not None:
            room = max(0, self.geometry.cap - self.held)
        return Report(
            epoch=self.link.epoch,
            revision=self._report_revision,
            allowance_seen=self.link.revision,
            backed=count[RESIDENT] + count[DRAINING] + count[SPARE] + count[FENCED],
            preparing=count[PREPARING] + count[COMMITTING] + count[ABORTING],
            orphan=count[ORPHAN],
            leaving=count[FENCED],
            spare=count[SPARE] + count[DRAINING],
            free=levels.free,
            cached=levels.cached,
            need=min(need, room),
            want=min(want, room),
            running=levels.running,
            refused=tuple(sorted(self._refused)),
            devices=tuple(self._readings[device] for device in sorted(self._readings)),
            counters={**self.counters, "waiting": levels.waiting},
        )

    def _worth_sending(self, last: Report, report: Report) -> bool:
        """Whether the arbiter could decide differently on `report` than on `last`."""
        levels = ("allowance_seen", "backed", "preparing", "orphan", "leaving", "need", "want")
        if report.refused or any(getattr(last, n) != getattr(report, n) for n in levels):
            return True
        if last.devices != report.devices:
            return True
        gives = ("spare", "free", "cached")
        if not any(getattr(last, n) != getattr(report, n) for n in gives):
            return bool(last.running) != bool(report.running)
        # While nobody waits, an exact count of what could be taken back interests nobody.
        return self.link.pressure or not report.running

    def _watch_need(self, now_s: float) -> None:
        if not self.serving:
            return
        usable = self.held - self.count[FENCED] - self.count[ABORTING]
        if self.levels.need_total <= min(usable, self.link.allowance):
            self._need_since_s = None
        elif self._need_since_s is None:
            self._need_since_s = now_s

    def _take_reading(self, rank: int, reading: DeviceReading) -> None:
        if reading.sequence > self._newest_reading.get(rank, 0):
            self._newest_reading[rank] = reading.sequence
            self._note_reading(reading)

    def _note_reading(self, reading: DeviceReading) -> None:
        """Keep the newest reading of a device; towards the arbiter we number them ourselves."""
        known = self._readings.get(reading.device)
        if known is not None and reading.free_bytes > known.free_bytes:
            self._orphans_due = True
        self._readings_taken += 1
        self._readings[reading.device] = msgspec.structs.replace(
            reading, sequence=self._readings_taken
        )

    # --- small parts ---

    def _move(self, extents: Iterable[int], old: int, new: int) -> None:
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

    def _having(self, state: int) -> list[int]:
        if not self.count[state]:
            return []
        return [extent for extent, s in enumerate(self.state) if s == state]

    def _lowest_absent(self, most: int) -> list[int]:
        found: list[int] = []
        extent = self.state.find(ABSENT)
        while extent >= 0 and len(found) < most:
            found.append(extent)
            extent = self.state.find(ABSENT, extent + 1)
        return found

    def _watch_hold(self, effects: list[Effect]) -> None:
        """Hold running requests while bytes they miss are granted and on their way."""
        coming = self.count[PREPARING] + self.count[COMMITTING]
        missed = self._missing(self.levels.need_total) + coming > 0
        until_s = self._growth_began_s + HOLD_S if coming and missed else 0.0
        if until_s != self._held_until_s:
            self._held_until_s = until_s
            effects.append(Hold(until_s))

    def _await(self, call: Call, now_s: float, effects: list[Effect]) -> None:
        self._waiting.add(call)
        effects.append(StartTimer(f"wait:{call}", now_s + self.start_wait_s))

    def _settle(self, call: Call, error: str, effects: list[Effect]) -> None:
        if call in self._waiting:
            self._waiting.remove(call)
            effects.append(StopTimer(f"wait:{call}"))
            effects.append(Settle(call, error))

    def _say(self, hello: Hello, now_s: float, effects: list[Effect]) -> None:
        effects.append(SendArbiter(hello))
        effects.append(StartTimer("hello", now_s + ANSWER_WAIT_S))

    def _waiting_for(self, call: str) -> str:
        if call == "ready":
            missing = sorted(set(range(self.ranks)) - set(self.joined))
            return f"no hello from rank {', '.join(map(str, missing))}"
        if self.link.phase != "joined":
            return "the arbiter has not answered"
        return self.link.reason or "other instances hold the memory"

    # --- looking at it ---

    def snapshot(self) -> dict[str, object]:
        """Return the state as plain data: counts per state, link, orders and counters."""
        return {
            "ranks": self.ranks,
            "joined": sorted(self.joined),
            "serving": self.serving,
            "extents": dict(zip(STATE_NAMES, self.count, strict=True)),
            "held": self.held,
            "levels": msgspec.to_builtins(self.levels),
            "link": self.link.snapshot(),
            "orders": self.book.snapshot(),
            "counters": dict(self.counters),
        }

    def check(self) -> None:
        """Raise InvariantViolation unless counts, states and orders agree."""
        for number, name in enumerate(STATE_NAMES):
            if self.count[number] != self.state.count(number):
                raise InvariantViolation("counts equal states", f"{name}: {self.count[number]}")
        expected = {
            "prepare": PREPARING,
            "commit": COMMITTING,
            "abort": ABORTING,
            "fence": DRAINING,
            "decommit": FENCED,
        }
        owned: set[int] = set()
        for operation in self.book.open_operations.values():
            if owned & set(operation.extents):
                raise InvariantViolation("I2 an extent is in one order at a time", str(owned))
            owned |= set(operation.extents)
            for extent in operation.extents:
                if self.state[extent] != expected[operation.kind]:
                    raise InvariantViolation(
                        "an open order matches its extents' state",
                        f"{operation.kind} of {STATE_NAMES[self.state[extent]]} {extent}",
                    )
        if self.serving:
            moving = [self.count[s] for s in (PREPARING, COMMITTING, ABORTING, DRAINING, FENCED)]
            if sum(moving) != len(owned):
                raise InvariantViolation("every moving extent has an order", str(moving))
            if self.state[0] != RESIDENT:
                raise InvariantViolation("extent 0 is always backed", STATE_NAMES[self.state[0]])

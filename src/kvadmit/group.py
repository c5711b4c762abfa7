"""The group machine: the extents of one instance on all its ranks.

Owns: what becomes of every extent (`states`), the orders under way (`orders`), when to grow
and when to shrink; it drives the arbiter's side (`link`, `reports`) and the engine's start
(`start_calls`). Must not know: sockets, clocks, threads, the driver, vLLM.

Path of one growth, each arrow an event: the pool's levels show a need -> the report asks
-> an allowance arrives -> PREPARE to all ranks (`preparing`) -> all prepared: COMMIT
(`committing`) -> all committed: `resident`, handed to the pool. A refusal before the first
map call ends in ABORT and the state before; a failure after it leaves an `orphan`, which a
repeated COMMIT finishes.

Path of one shrink: the pool returns extents with a fence -> `draining` (FENCE order, may
become `spare`) or `fenced` (DECOMMIT order, leads only to absent).
"""

from __future__ import annotations

import msgspec

from kvadmit.errors import InvariantViolation, LocalProtocolError, RemoteProtocolError
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
    Histograms,
    Note,
    Observe,
    PoolSent,
    ReadHere,
    ReadingTaken,
    SendAgent,
    SendArbiter,
    StartRequested,
    StartTimer,
    StopRequested,
    StopTimer,
    TimerFired,
)
from kvadmit.link import ANSWER_WAIT_S, ArbiterLink
from kvadmit.messages import (
    AgentHello,
    Allowance,
    Answer,
    BaseMeasured,
    Bye,
    Elect,
    Geometry,
    Hello,
    MapGrant,
    OrderKind,
    ReadDevice,
    Report,
)
from kvadmit.orders import Operation, OrderBook
from kvadmit.pool_side import PoolSide
from kvadmit.port import PoolReturned, Resident
from kvadmit.reports import Reports, figures
from kvadmit.start_calls import StartCalls
from kvadmit.states import (
    ABORTING,
    ABSENT,
    COMMITTING,
    DRAINING,
    FENCED,
    ORPHAN,
    PREPARING,
    RESIDENT,
    SPARE,
    ExtentStates,
)

BATCH_EXTENTS_MAX = 256
"""Extents of one prepare: bounds the message and the time of one driver call."""
CALL_TIMES: dict[OrderKind, Histograms] = {
    "prepare": "prepare_call_s",
    "commit": "commit_call_s",
    "decommit": "decommit_call_s",
}
ORPHAN_TRIES_MAX = 3
"""Commits an orphan is tried with again before it is decommitted."""


class Group:
    """One instance's machine. Made before the geometry is known; grows once it is.

    `step` raises LocalProtocolError for an event that cannot happen in this state; the
    state is then unchanged.
    """

    def __init__(
        self, *, ranks: int, hello: Hello, start_wait_s: float, idle_decay_s: float
    ) -> None:
        self.ranks = ranks
        self.link = ArbiterLink(hello)
        self.calls = StartCalls(start_wait_s)
        self.reports = Reports(self.link)
        self.idle_decay_s = idle_decay_s
        self.geometry: Geometry | None = None
        self.states = ExtentStates()
        self.book = OrderBook(ranks)
        self.joined: dict[int, AgentHello] = {}
        self.lost_ranks: set[int] = set()
        self.base_bytes: dict[int, int] = {}
        """Rank -> what it holds beside elastic KV, once it has measured that."""
        self.pool = PoolSide()
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
        self._growth_began_s = 0.0
        self._need_since_s: float | None = None
        self._orphan_tries: dict[int, int] = {}
        self._decay_timer = False

    # --- events ---

    def step(self, event: Event) -> list[Effect]:
        """Apply one event and return the effects in the order they must be carried out."""
        effects: list[Effect] = []
        now_s = event.now_s
        told = self.reports.last
        match event:
            case StartRequested():
                hello = self.link.introduce(start_bytes=event.start_bytes)
                self.calls.begin("start", now_s, effects)
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
                self.link.lost(self.states.held)
                self.reports.forget(effects)
                effects.append(StopTimer("hello"))
            case ArbiterSent():
                self._arbiter_sent(event, effects)
            case ReadingTaken():
                self.reports.note_reading(event.reading)
            case PoolSent():
                self._pool_sent(event, effects)
            case StopRequested():
                self.stopping = True
                if self.link.phase == "joined":
                    effects.append(SendArbiter(Bye()))
            case TimerFired():
                self._timer_fired(event, effects)
        done = len(effects)
        if not self.stopping:
            self._advance(now_s, effects)
        if isinstance(event, TimerFired):
            self.counters["timer_probes"] += sum(_asks(effect, told) for effect in effects[done:])
        return effects

    def _set_geometry(self, event: GeometryKnown, effects: list[Effect]) -> None:
        if self.geometry is not None:
            raise LocalProtocolError("the geometry is known already")
        self.geometry = event.geometry
        self.states = ExtentStates(event.geometry.extents)
        self.calls.begin("geometry", event.now_s, effects)
        hello = self.link.introduce(geometry=event.geometry)
        if self.link.phase != "lost":
            self._say(hello, event.now_s, effects)

    def _agent_joined(self, hello: AgentHello, effects: list[Effect]) -> None:
        if self.geometry is None or self.states.state[0] == ABSENT:
            raise LocalProtocolError(f"rank {hello.rank} joined before its prefix was allowed")
        if hello.mapped != ((0, self.geometry.prefix),) or hello.extents != self.geometry.extents:
            effects.append(
                EngineLost(
                    f"rank {hello.rank} has {hello.mapped} of {hello.extents} extents mapped, "
                    f"expected the first {self.geometry.prefix} of {self.geometry.extents}"
                )
            )
            return
        self.joined[hello.rank] = hello
        self.reports.note_reading(hello.reading)
        if len(self.joined) == self.ranks and not self.serving:
            self.states.move(range(self.geometry.prefix), COMMITTING, RESIDENT)
            self.serving = True
            self.calls.settle("ready", "", effects)

    def _agent_sent(self, event: AgentSent, effects: list[Effect]) -> None:
        message = event.message
        if event.rank not in self.joined:
            raise LocalProtocolError(f"rank {event.rank} has not joined")
        if isinstance(message, BaseMeasured):
            self._take_base(message, event.now_s, effects)
            return
        operation = None
        if isinstance(message, Answer):
            operation = self.book.answer(event.rank, message, effects)
        if message.reading is not None:
            self.reports.take_reading(event.rank, message.reading)
        if operation is None:
            return  # a reading, a repeat, or not the last answer yet
        self._finish(operation, event.now_s, effects)

    def _take_base(self, message: BaseMeasured, now_s: float, effects: list[Effect]) -> None:
        """Book what the ranks really use in place of what they announced, once all have said."""
        if message.base_bytes < 0:
            raise RemoteProtocolError(f"rank {message.rank} uses {message.base_bytes} bytes")
        self.base_bytes[message.rank] = message.base_bytes
        if len(self.base_bytes) < self.ranks:
            return
        total = dict.fromkeys((hello.device for hello in self.joined.values()), 0)
        for rank, size in self.base_bytes.items():
            total[self.joined[rank].device] += size
        hello = self.link.introduce(base_bytes=total)
        if self.link.phase != "lost":
            self._say(hello, now_s, effects)

    def _arbiter_sent(self, event: ArbiterSent, effects: list[Effect]) -> None:
        message, allowance = event.message, self.link.allowance
        owed = self.link.receive(message, self.states.held)
        if owed == "hello":
            self.reports.restart()
            self._say(self.link.found(), event.now_s, effects)
        elif owed == "elect" and isinstance(message, Elect):
            self._have_read(message.device, effects)
        elif owed == "report":
            self.reports.restart()
        if self.link.refusal:
            self.calls.refuse(self.link.refusal, effects)
        if self.link.start_granted:
            self.calls.settle("start", "", effects)
        raised = isinstance(message, Allowance) and self.link.allowance > allowance
        if raised and self._need_since_s is not None:
            effects.append(Observe("grant_wait_s", event.now_s - self._need_since_s))
            self._need_since_s = None

    def _have_read(self, device: str, effects: list[Effect]) -> None:
        """Have `device` read by one of its agents, or here while none has joined."""
        ranks = [rank for rank, hello in self.joined.items() if hello.device == device]
        silent = self.book.silent_ranks(self.lost_ranks)
        ranks = [rank for rank in ranks if rank not in silent] or ranks
        self.counters["device_reads"] += 1
        effects.append(SendAgent(min(ranks), ReadDevice()) if ranks else ReadHere(device))

    def _pool_sent(self, event: PoolSent, effects: list[Effect]) -> None:
        message = event.event
        if isinstance(message, PoolReturned):
            extents = from_runs(message.extents)
            if 0 in extents or not self.states.all_resident(extents):
                raise LocalProtocolError(f"the pool returned {message.extents}, not all its own")
            # A clean choice: bytes somebody waits for go behind the fence and away at once,
            # others may come back, so they only wait for the fence.
            excess = max(0, self._excess())
            gone, kept = extents[:excess], extents[excess:]
            if gone:
                self.states.move(gone, RESIDENT, FENCED)
                self.book.send("decommit", gone, event.now_s, effects, fence=message.fence)
            if kept:
                self.states.move(kept, RESIDENT, DRAINING)
                self.book.send("fence", kept, event.now_s, effects, fence=message.fence)
            return
        self.pool.take(message, event.now_s, effects)

    def _timer_fired(self, event: TimerFired, effects: list[Effect]) -> None:
        name, _, argument = event.timer.partition(":")
        match name:
            case "answer":
                self.counters["resends"] += self.book.send_again(
                    int(argument), self.lost_ranks, event.now_s, effects
                )
            case "wait":
                absent = set(range(self.ranks)) - set(self.joined)
                self.calls.expire(argument, self.link, absent, effects)
            case "hello":
                self._ask_again(event.now_s, effects)
            case "report":
                self.counters["resends"] += self.reports.send_again(event.now_s, effects)
            case "idle":
                self.pool.idle_over()
            case "decay":
                self._decay_timer = False
                self._leave_spare(self.states.having(SPARE), event.now_s, effects)
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
        if "geometry" in self.calls.waiting and self.link.allowance >= self.geometry.prefix:
            if self.states.count[COMMITTING] == 0 and not self.joined:
                self.states.move(range(self.geometry.prefix), ABSENT, COMMITTING)
            self.calls.settle("geometry", "", effects)
            self.calls.begin("ready", now_s, effects)
        if self.serving:
            self._shrink(now_s, effects)
            self._grow(now_s, effects)
            self._tell_pool(effects)
            self._watch_decay(now_s, effects)
        self._watch_need(now_s)

    def _grow(self, now_s: float, effects: list[Effect]) -> None:
        missing = self.states.missing(self.pool.levels.want_total)
        if missing <= 0:
            return
        spare = self.states.having(SPARE)[:missing]
        if spare:
            self.states.move(spare, SPARE, RESIDENT)
            effects.append(GivePool(Resident(to_runs(spare))))
            missing -= len(spare)
        if self.book.growing or self.lost_ranks or not self.link.may_grow:
            return
        if self.states.count[ORPHAN]:
            # Bytes that are held already come before new ones.
            self._growth_began_s = now_s
            orphans = self.states.having(ORPHAN)
            self.states.move(orphans, ORPHAN, COMMITTING)
            self.book.send("commit", orphans, now_s, effects)
            return
        # What a step or a waiter lacks comes first and alone: a large batch takes longer.
        needed = self.states.missing(self.pool.levels.need_total)
        batch = min(needed if needed > 0 else missing, BATCH_EXTENTS_MAX)
        room = min(batch, self.link.allowance - self.states.held)
        if room <= 0:
            return
        extents = self.states.lowest_absent(room)
        if not extents:
            return
        self._growth_began_s = now_s
        self.states.move(extents, ABSENT, PREPARING)
        self.book.send("prepare", extents, now_s, effects)

    def _finish(self, operation: Operation, now_s: float, effects: list[Effect]) -> None:
        """All ranks have answered `operation`: decide what became of its extents."""
        if operation.took_s and operation.kind in CALL_TIMES:
            effects.append(Observe(CALL_TIMES[operation.kind], operation.took_s))
        match operation.kind:
            case "prepare":
                self._prepared(operation, now_s, effects)
            case "commit":
                self._committed(operation, now_s, effects)
            case "abort":
                self._freed(operation, ABORTING, now_s, effects)
            case "fence":
                if not operation.all_done:
                    raise InvariantViolation("a fence cannot fail", operation.reasons)
                self.states.move(operation.extents, DRAINING, SPARE)
            case "decommit":
                self._freed(operation, FENCED, now_s, effects)

    def _freed(self, operation: Operation, old: int, now_s: float, effects: list[Effect]) -> None:
        done = operation.done_everywhere
        left = sorted(set(operation.extents) - done)
        self.states.move(done, old, ABSENT)
        if left:
            # Still there on some rank: DECOMMIT repeats until the driver lets go.
            effects.append(Note("error", f"{operation.kind} failed: {operation.reasons}"))
            if old != FENCED:
                self.states.move(left, old, FENCED)
            self.book.send("decommit", left, now_s, effects, later=True)

    def _prepared(self, operation: Operation, now_s: float, effects: list[Effect]) -> None:
        extents = operation.extents
        if operation.all_done:
            self.states.move(extents, PREPARING, COMMITTING)
            self.book.send("commit", extents, now_s, effects)
            return
        self.counters["allocation_misses"] += 1
        self.counters["headroom_rejections"] += len(operation.refused_ranks)
        self._give_way(operation)
        if operation.failed_ranks:
            effects.append(Note("warning", f"prepare failed: {operation.reasons}"))
        self.states.move(extents, PREPARING, ABORTING)
        self.book.send("abort", extents, now_s, effects)

    def _give_way(self, operation: Operation) -> None:
        """Try nothing more under this allowance; the arbiter lets us try again.

        It takes the grant back, has the devices read and grants anew, so that the next attempt
        follows an event and comes no faster than readings do.
        """
        ranks = {*operation.refused_ranks, *operation.failed_ranks}
        self.reports.refuse(self.joined[rank].device for rank in ranks)
        self.link.block()

    def _committed(self, operation: Operation, now_s: float, effects: list[Effect]) -> None:
        done = operation.done_everywhere
        left = set(operation.extents) - done
        if done:
            self.states.move(done, COMMITTING, RESIDENT)
            for extent in done:
                self._orphan_tries.pop(extent, None)
            self.counters["growths"] += 1
            took_s = now_s - self._growth_began_s
            effects.append(Observe("grow_latency_s", took_s))
            effects.append(GivePool(Resident(to_runs(done), took_s)))
        if not left:
            return
        self.counters["allocation_misses"] += 1
        effects.append(Note("error", f"commit failed: {operation.reasons}"))
        # An extent no rank made a map call for is as it was prepared; the rest are orphans.
        touched = left & (operation.touched | set(self._orphan_tries))
        untouched = sorted(left - touched)
        self.counters["orphans"] += len(touched - set(self._orphan_tries))
        self.states.move(touched, COMMITTING, ORPHAN)
        for extent in touched:
            self._orphan_tries[extent] = self._orphan_tries.get(extent, 0) + 1
        if untouched:
            self.states.move(untouched, COMMITTING, ABORTING)
            self.book.send("abort", untouched, now_s, effects)
        hopeless = sorted(e for e in touched if self._orphan_tries[e] > ORPHAN_TRIES_MAX)
        if hopeless or not touched:
            self._give_way(operation)
        if hopeless:
            self._leave_orphans(hopeless, now_s, effects)

    # --- shrink ---

    def _excess(self) -> int:
        """Extents held above the allowance that are not on their way out yet."""
        return self.states.usable - self.link.allowance

    def _shrink(self, now_s: float, effects: list[Effect]) -> None:
        """Give up what needs no scheduler: orphans first, then spare extents."""
        if self.link.phase != "joined":
            return
        excess = self._excess()
        if excess > 0 and self.states.count[ORPHAN]:
            orphans = self.states.having(ORPHAN)[:excess]
            self._leave_orphans(orphans, now_s, effects)
            excess -= len(orphans)
        if excess > 0 and self.states.count[SPARE]:
            self._leave_spare(self.states.having(SPARE)[-excess:], now_s, effects)

    def _leave_spare(self, spare: list[int], now_s: float, effects: list[Effect]) -> None:
        if spare:
            self.states.move(spare, SPARE, FENCED)
            self.book.send("decommit", spare, now_s, effects)

    def _leave_orphans(self, orphans: list[int], now_s: float, effects: list[Effect]) -> None:
        for extent in orphans:
            self._orphan_tries.pop(extent, None)
        self.states.move(orphans, ORPHAN, FENCED)
        # No step ever named an orphan's blocks: the fence is already behind.
        self.book.send("decommit", orphans, now_s, effects)

    def _tell_pool(self, effects: list[Effect]) -> None:
        assert self.geometry is not None
        # Draining extents leave by themselves once their fence has passed.
        excess = self._excess() - self.states.count[DRAINING] if self.link.phase == "joined" else 0
        self.pool.bound(self.states, self.geometry, excess, effects)
        self.pool.raise_ceiling(self.link.ceiling, effects)
        self.pool.hold(self.states, self._growth_began_s, effects)

    def _watch_decay(self, now_s: float, effects: list[Effect]) -> None:
        if self.states.count[SPARE] and not self._decay_timer:
            self._decay_timer = True
            effects.append(StartTimer("decay", now_s + self.idle_decay_s))
        elif not self.states.count[SPARE] and self._decay_timer:
            self._decay_timer = False
            effects.append(StopTimer("decay"))

    # --- towards the arbiter ---

    def _report(self, now_s: float, effects: list[Effect]) -> None:
        """Tell the arbiter the instance's levels when they say something new."""
        if self.link.phase == "joined":
            levels = figures(
                self.states,
                self.pool.levels,
                self.geometry,
                serving=self.serving,
                silent=self.book.silent_ranks(self.lost_ranks),
            )
            counters = {**self.counters, "waiting": self.pool.levels.waiting}
            self.reports.send(levels, counters, now_s, effects)

    def _say(self, hello: Hello, now_s: float, effects: list[Effect]) -> None:
        effects.append(SendArbiter(hello))
        effects.append(StartTimer("hello", now_s + ANSWER_WAIT_S))

    def _ask_again(self, now_s: float, effects: list[Effect]) -> None:
        """Repeat the hello while the arbiter owes an answer to it."""
        if self.link.unanswered:
            self.counters["resends"] += 1
        elif self.link.phase == "lost" or "start" not in self.calls.waiting:
            return
        self._say(self.link.hello, now_s, effects)

    def _watch_need(self, now_s: float) -> None:
        if not self.serving:
            return
        if self.pool.levels.need_total <= min(self.states.usable, self.link.allowance):
            self._need_since_s = None
        elif self._need_since_s is None:
            self._need_since_s = now_s

    # --- looking at it ---

    def snapshot(self) -> dict[str, object]:
        """Return the state as plain data: counts per state, link, orders and counters."""
        return {
            "ranks": self.ranks,
            "joined": sorted(self.joined),
            "serving": self.serving,
            "extents": self.states.snapshot(),
            "held": self.states.held,
            "levels": msgspec.to_builtins(self.pool.levels),
            "link": self.link.snapshot(),
            "orders": self.book.snapshot(),
            "counters": dict(self.counters),
        }

    def check(self) -> None:
        """Raise InvariantViolation unless counts, states and orders agree."""
        self.states.check(self.book.open_operations)
        if self.serving:
            self.states.check_serving(self.book.open_operations)


def _asks(effect: Effect, told: Report | None) -> bool:
    """Whether it asks for memory: by an attempt, or a report that names no other silent ranks."""
    match effect:
        case SendArbiter(Report() as report):
            named = told is not None and report.silent != told.silent
            return not named and (report.need > 0 or report.want > 0)
        case SendAgent(_, MapGrant() as grant):
            return grant.kind == "prepare"
    return False

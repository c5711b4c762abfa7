"""The member machine: physical memory of one rank, decided without touching it.

Owns: the state of every extent on this rank, which order may run when, and the one answer
each order gets. Must not know: the driver, the socket, the clock, the GPU.

States of an extent: absent -> prepared -> mapped -> absent, and `partial` when a commit
stopped after a map call. An order runs when the driver is free; fence and decommit first
wait until the worker has enqueued the fenced step and the device has finished it, while
prepare and commit overtake them. Repeats are answered as before; an order older than the
newest one seen for any of its extents changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from kvadmit.errors import InvariantViolation, LocalProtocolError
from kvadmit.extents import check_runs, from_runs, to_runs
from kvadmit.messages import Answer, DeviceReading, Headroom, MapGrant, OrderKind

ABSENT, PREPARED, MAPPED, PARTIAL = range(4)
STATE_NAMES = ("absent", "prepared", "mapped", "partial")
ANSWERS_KEPT = 256
EXIT_GRACE_S = 5.0

# --- events --------------------------------------------------------------------------------


class OrderArrived(msgspec.Struct, frozen=True):
    """The coordinator sent an order."""

    now_s: float
    grant: MapGrant


class DriverDone(msgspec.Struct, frozen=True, kw_only=True):
    """The CallDriver of `order` came back; fields as in `vmm.BatchResult`.

    `now_s` is when the device was read for it, right after the call, which lasted `took_s`.
    """

    now_s: float
    order: int
    done: tuple[int, ...] = ()
    partial: tuple[int, ...] = ()
    error: str = ""
    out_of_memory: bool = False
    took_s: float = 0.0
    free_bytes: int
    total_bytes: int


class StepEnqueued(msgspec.Struct, frozen=True):
    """The worker's main thread has enqueued everything of step `step`."""

    now_s: float
    step: int


class DeviceIdle(msgspec.Struct, frozen=True):
    """The device has finished all that was enqueued when AwaitDevice of `order` was given."""

    now_s: float
    order: int


class CaptureChanged(msgspec.Struct, frozen=True):
    """The worker began or ended capturing graphs; a driver call now would kill the capture."""

    now_s: float
    capturing: bool


class ReadAsked(msgspec.Struct, frozen=True):
    """The coordinator wants a reading of the device."""

    now_s: float


class ReadDone(msgspec.Struct, frozen=True):
    """The reading asked for by ReadNow; `now_s` is when the device was read."""

    now_s: float
    free_bytes: int
    total_bytes: int


class CoordinatorLost(msgspec.Struct, frozen=True):
    """The lease line to the coordinator closed: EngineCore is gone."""

    now_s: float


class TimerFired(msgspec.Struct, frozen=True):
    """The timer started by StartTimer is due."""

    now_s: float
    timer: str


Event = (
    OrderArrived
    | DriverDone
    | StepEnqueued
    | DeviceIdle
    | CaptureChanged
    | ReadAsked
    | ReadDone
    | CoordinatorLost
    | TimerFired
)

# --- effects -------------------------------------------------------------------------------


class CallDriver(msgspec.Struct, frozen=True):
    """Run one batch call, then report DriverDone. Never two at a time."""

    order: int
    kind: OrderKind
    extents: tuple[int, ...]


class AwaitDevice(msgspec.Struct, frozen=True):
    """Wait off this thread until the device has finished what is enqueued; then DeviceIdle.

    `leaving`: extents that are unmapped after it, so from now on nothing may be enqueued for them.
    """

    order: int
    leaving: tuple[int, ...] = ()


class Send(msgspec.Struct, frozen=True):
    """Send to the coordinator."""

    message: Answer | Headroom


class ReadNow(msgspec.Struct, frozen=True):
    """Read the device, then report ReadDone."""


class StartTimer(msgspec.Struct, frozen=True):
    """Report TimerFired at `at_s`."""

    timer: str
    at_s: float


class ExitProcess(msgspec.Struct, frozen=True):
    """End this worker process: nobody is left who could use it."""

    reason: str


Effect = CallDriver | AwaitDevice | Send | ReadNow | StartTimer | ExitProcess


class _Order:
    """An order under way: the calls it still has to make and what it reached so far."""

    __slots__ = ("calls", "done", "error", "grant", "out_of_memory", "partial", "took_s")

    def __init__(self, grant: MapGrant) -> None:
        self.grant = grant
        self.calls: deque[tuple[OrderKind, tuple[int, ...]]] = deque()
        self.done: list[int] = []
        self.partial: list[int] = []
        self.error = ""
        self.out_of_memory = False
        self.took_s = 0.0


class Member:
    """One rank's machine. `prefix` extents from 0 are mapped already when it is made.

    `step` raises LocalProtocolError for an event that cannot happen here and
    RemoteProtocolError for an order that is malformed; the state is then unchanged.
    """

    def __init__(self, *, rank: int, device: str, extents: int, prefix: int) -> None:
        self.rank = rank
        self.device = device
        self.extents = extents
        self.state = bytearray(extents)
        for extent in range(prefix):
            self.state[extent] = MAPPED
        self.enqueued = 0
        self.capturing = False
        self.abandoned = False
        """Whether the coordinator is gone; this process then ends after a grace."""
        self.stale_orders = 0
        self._newest_order = [0] * extents
        self._orders: dict[int, _Order] = {}
        self._parked: list[int] = []
        """Orders waiting for their fence or the device, by arrival."""
        self._awaiting_device: set[int] = set()
        self._ready: deque[int] = deque()
        self._running: int | None = None
        self._read_wanted = False
        self._reading_now = False
        self._readings = 0
        self._answers: dict[int, Answer] = {}

    # --- events ---

    def step(self, event: Event) -> list[Effect]:
        """Apply one event and return the effects in the order they must be carried out."""
        effects: list[Effect] = []
        match event:
            case OrderArrived():
                self._take_order(event.grant, effects)
            case DriverDone():
                self._driver_done(event, effects)
            case StepEnqueued():
                self.enqueued = max(self.enqueued, event.step)
            case DeviceIdle():
                if event.order not in self._awaiting_device:
                    raise LocalProtocolError(f"order {event.order} does not wait for the device")
                self._awaiting_device.remove(event.order)
                self._parked.remove(event.order)
                self._ready.append(event.order)
            case CaptureChanged():
                self.capturing = event.capturing
            case ReadAsked():
                self._read_wanted = True
            case ReadDone():
                if not self._reading_now:
                    raise LocalProtocolError("a reading nobody asked for")
                self._reading_now = False
                reading = self._reading(event)
                effects.append(Send(Headroom(rank=self.rank, reading=reading)))
            case CoordinatorLost():
                self.abandoned = True
                effects.append(StartTimer("exit", event.now_s + EXIT_GRACE_S))
            case TimerFired():
                if event.timer != "exit" or not self.abandoned:
                    raise LocalProtocolError(f"no timer is called {event.timer}")
                effects.append(ExitProcess("the engine core closed its lease line"))
        self._advance(effects)
        return effects

    def _take_order(self, grant: MapGrant, effects: list[Effect]) -> None:
        check_runs(grant.extents, self.extents)
        if grant.order in self._answers:
            effects.append(Send(self._answers[grant.order]))
            return
        if grant.order in self._orders:
            return  # a repeat of one still under way: it gets its one answer when done
        extents = from_runs(grant.extents)
        if any(self._newest_order[extent] > grant.order for extent in extents):
            self.stale_orders += 1
            return
        for extent in extents:
            self._newest_order[extent] = grant.order
        order = _Order(grant)
        self._orders[grant.order] = order
        wrong = self._plan_calls(order, extents)
        if wrong:
            order.error = wrong
            self._finish(order, effects)
        elif grant.kind in ("fence", "decommit"):
            self._parked.append(grant.order)
        else:
            self._ready.append(grant.order)

    def _plan_calls(self, order: _Order, extents: list[int]) -> str:
        """Choose the driver calls of `order`; return why it cannot run, or ''."""
        by_state: dict[int, list[int]] = {}
        for extent in extents:
            by_state.setdefault(self.state[extent], []).append(extent)

        def having(*states: int) -> list[int]:
            return sorted(extent for state in states for extent in by_state.get(state, ()))

        kind = order.grant.kind
        calls: list[tuple[OrderKind, list[int]]]
        match kind:
            case "prepare":
                wrong, finished = having(MAPPED, PARTIAL), having(PREPARED)
                calls = [("prepare", having(ABSENT))]
            case "commit":
                wrong, finished = having(ABSENT), having(MAPPED)
                calls = [("commit", having(PREPARED, PARTIAL))]
            case "abort":
                wrong, finished = having(MAPPED, PARTIAL), having(ABSENT)
                calls = [("abort", having(PREPARED))]
            case "fence":
                wrong, finished, calls = having(ABSENT, PREPARED, PARTIAL), having(MAPPED), []
            case "decommit":
                wrong, finished = [], having(ABSENT)
                calls = [("abort", having(PREPARED)), ("decommit", having(MAPPED, PARTIAL))]
        if wrong:
            name = STATE_NAMES[self.state[wrong[0]]]
            return f"cannot {kind} extent {wrong[0]}: it is {name} on rank {self.rank}"
        order.done = finished
        order.calls.extend((call, tuple(which)) for call, which in calls if which)
        return ""

    def _driver_done(self, event: DriverDone, effects: list[Effect]) -> None:
        if self._running != event.order:
            raise LocalProtocolError(f"no driver call of order {event.order} is running")
        self._running = None
        order = self._orders[event.order]
        kind, _ = order.calls.popleft()
        end = {"prepare": PREPARED, "commit": MAPPED}.get(kind, ABSENT)
        for extent in event.done:
            self.state[extent] = end
        for extent in event.partial:
            self.state[extent] = PARTIAL
        order.done.extend(event.done)
        order.partial.extend(event.partial)
        order.took_s += event.took_s
        if event.error:
            order.error = event.error
            order.out_of_memory = event.out_of_memory
            order.calls.clear()
        reading = self._reading(event)
        if order.calls:
            self._ready.appendleft(event.order)
        else:
            self._finish(order, effects, reading)

    def _finish(
        self, order: _Order, effects: list[Effect], reading: DeviceReading | None = None
    ) -> None:
        grant = order.grant
        refused = order.out_of_memory and grant.kind == "prepare"
        answer = Answer(
            order=grant.order,
            rank=self.rank,
            kind=grant.kind,
            outcome="refused" if refused else "failed" if order.error else "done",
            done=to_runs(order.done),
            partial=to_runs(order.partial),
            reason=order.error,
            took_s=order.took_s,
            reading=reading,
        )
        del self._orders[grant.order]
        self._answers[grant.order] = answer
        while len(self._answers) > ANSWERS_KEPT:
            del self._answers[next(iter(self._answers))]
        effects.append(Send(answer))

    def _advance(self, effects: list[Effect]) -> None:
        """Start whatever may start now: device waits behind passed fences, then one call."""
        for number in self._parked:
            fence = self._orders[number].grant.fence
            if fence <= self.enqueued and number not in self._awaiting_device:
                # A device sync from another thread kills a graph capture: wait for its end.
                if self.capturing:
                    continue
                self._awaiting_device.add(number)
                effects.append(AwaitDevice(number, self._leaving(number)))
        if self.capturing:
            return
        while self._running is None and self._ready:
            number = self._ready.popleft()
            order = self._orders[number]
            if order.calls:
                kind, extents = order.calls[0]
                self._running = number
                effects.append(CallDriver(number, kind, extents))
            else:
                self._finish(order, effects)
        if self._read_wanted and not self._reading_now and self._running is None:
            self._read_wanted, self._reading_now = False, True
            effects.append(ReadNow())

    def _leaving(self, number: int) -> tuple[int, ...]:
        """Return what is unmapped once the device wait of order `number` is over."""
        calls = self._orders[number].calls
        return tuple(extent for kind, extents in calls if kind == "decommit" for extent in extents)

    def _reading(self, event: DriverDone | ReadDone) -> DeviceReading:
        self._readings += 1
        return DeviceReading(
            device=self.device,
            free_bytes=event.free_bytes,
            total_bytes=event.total_bytes,
            sequence=self._readings,
            at_s=event.now_s,
            operations=len(self._ready) + (self._running is not None),
        )

    # --- looking at it ---

    def having(self, state: int) -> list[int]:
        """Return the extents in `state`, ascending."""
        return [extent for extent in range(self.extents) if self.state[extent] == state]

    @property
    def parked(self) -> bool:
        """Whether an order waits for a step to be enqueued (its publication is then an event)."""
        return any(self._orders[n].grant.fence > self.enqueued for n in self._parked)

    def snapshot(self) -> dict[str, object]:
        """Return the state as plain data: counts per state and the orders under way."""
        return {
            "rank": self.rank,
            "device": self.device,
            "enqueued": self.enqueued,
            "capturing": self.capturing,
            "extents": {name: self.state.count(number) for number, name in enumerate(STATE_NAMES)},
            "orders": {
                number: {
                    "kind": order.grant.kind,
                    "fence": order.grant.fence,
                    "parked": number in self._parked,
                }
                for number, order in self._orders.items()
            },
            "stale_orders": self.stale_orders,
        }

    def check(self) -> None:
        """Raise InvariantViolation unless the books of this rank agree with each other."""
        places = [*self._parked, *self._ready]
        if self._running is not None:
            places.append(self._running)
        if sorted(places) != sorted(self._orders):
            raise InvariantViolation(
                "every order under way is in exactly one place",
                f"{sorted(places)} against {sorted(self._orders)}",
            )
        if not self._awaiting_device <= set(self._parked):
            raise InvariantViolation("only parked orders wait for the device", str(places))
        for number in (*self._ready, *([] if self._running is None else [self._running])):
            grant = self._orders[number].grant
            if grant.kind in ("fence", "decommit") and grant.fence > self.enqueued:
                raise InvariantViolation(
                    "I4 an extent is unmapped only behind its fence",
                    f"order {number} has fence {grant.fence}, enqueued is {self.enqueued}",
                )
        owned: set[int] = set()
        for order in self._orders.values():
            extents = _call_extents(order)
            if owned & extents:
                raise InvariantViolation("an extent is in one order at a time", str(owned))
            owned |= extents


def _call_extents(order: _Order) -> set[int]:
    calls: Iterable[tuple[OrderKind, tuple[int, ...]]] = order.calls
    return {extent for _, extents in calls for extent in extents}

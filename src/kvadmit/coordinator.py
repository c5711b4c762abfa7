"""The coordinator: the shell around one instance's group machine, in EngineCore's process.

Owns: one thread with a uvloop loop, the channels to the agents and to the arbiter, and the
blocking calls of the engine's start. Must not know: vLLM, the driver, or why anything is
decided. Messages, timers, the pool's port and calls become events of `group.Group`, whose
effects it runs in order.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import msgspec
import uvloop

from kvadmit import group_events as events
from kvadmit.config import Settings
from kvadmit.errors import (
    CapacityError,
    KvAdmitError,
    LocalProtocolError,
    PeerLostError,
    PeerTimeoutError,
    UnsupportedError,
    VersionError,
)
from kvadmit.geometry import ExtentPlan
from kvadmit.group import Group
from kvadmit.host_pool import HostPool
from kvadmit.link import Call
from kvadmit.messages import (
    Allowance,
    DeviceReading,
    Elect,
    Hello,
    Message,
    Mps,
    Refused,
    Resync,
    Seen,
    StartTurn,
    Status,
    Welcome,
)
from kvadmit.observe import Histogram, Trace
from kvadmit.pending import PendingCalls
from kvadmit.port import PoolEvent, PoolLevels, PoolPort
from kvadmit.postmortem import write_trace
from kvadmit.processes import (
    ProcessWatch,
    end_this_process,
    is_stopped,
    never_preempt_others,
    share_interpreter,
)
from kvadmit.ranks import RankChannels
from kvadmit.rendezvous import ArbiterChannel, ask_status
from kvadmit.rundir import InstanceClaim, RunDir, new_incarnation
from kvadmit.timers import LoopTimers
from kvadmit.units import format_bytes

logger = logging.getLogger(__name__)

FIND_WAIT_S = 30.0
"""Longest wait for an arbiter at start: one that must be started, on a busy host."""
CALL_SLACK_S = 5.0
"""The machine's own deadline ends a call first; this bounds the wait if the thread is gone."""
BYE_WAIT_S = 1.0
STOP_WAIT_S = 10.0
STATUS_WAIT_S = 5.0
HOLDERS_WAIT_S = 2.0
HOST_POOL_FILE = "host.pool"
CHECK_VARIABLE = "KVADMIT_CHECK"
"""Set in the environment: the machine checks itself after every event (the tests do)."""

NO_MPS = Mps()
_FROM_ARBITER = (Welcome, Seen, StartTurn, Allowance, Elect, Resync, Refused)


class Coordinator:
    """One instance's coordinator.

    `devices`: the device of each rank; `backend`: the kind of driver behind them, "host" or
    "cuda". `device_total_bytes`: device -> bytes that all instances share there, less the
    `margin_bytes` that are never lent; `mps`: how the ranks share GPUs. `name` is for people
    and must be unique on the host. `wake` wakes an idle or parked engine after an order was put
    into `port`;
    `on_engine_lost(reason)` says that a rank or this thread is gone for good.
    `read_device(device)` returns its free and total bytes before any agent is there; by default
    the host pool's. All are called on the coordinator's thread and must not wait.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        ranks: int,
        devices: Sequence[str],
        device_total_bytes: Mapping[str, int],
        name: str,
        wake: Callable[[], None],
        on_engine_lost: Callable[[str], None] | None = None,
        read_device: Callable[[str], tuple[int, int]] | None = None,
        details: Mapping[str, str] | None = None,
        backend: str = "host",
        margin_bytes: int = 0,
        mps: Mps = NO_MPS,
    ) -> None:
        self.settings = settings
        self.name = name
        self.incarnation = new_incarnation("coordinator")
        self.port = PoolPort(wake_pool=wake, wake_coordinator=self._wake_from_pool)
        self._devices = tuple(devices)
        self._backend = backend
        self._on_engine_lost = on_engine_lost
        self._read_device = read_device or self._read_host_pool
        hello = Hello(
            revision=1,
            name=name,
            pid=os.getpid(),
            devices=dict(device_total_bytes),
            start_bytes={},
            margin_bytes=margin_bytes,
            mps=mps,
            settings=dict(details or {}),
        )
        self._group = Group(
            ranks=ranks,
            hello=hello,
            start_wait_s=settings.start_wait_s,
            idle_decay_s=settings.idle_decay_s,
        )
        self._trace = Trace()
        self._checking = bool(os.environ.get(CHECK_VARIABLE))
        self._histograms = {name: Histogram() for name in get_args(events.Histograms)}
        # "greeting" is settled by the arbiter's first word, the others by the machine.
        self._calls = PendingCalls("greeting", "start", "geometry", "ready")
        self._run: RunDir | None = None
        self._claim: InstanceClaim | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_asked: asyncio.Event | None = None
        self._timers: LoopTimers | None = None
        self._ranks: RankChannels | None = None
        self._arbiter: ArbiterChannel | None = None
        self._watches: list[ProcessWatch] = []
        self._pool_woken = False
        self._engine_lost = ""
        self._ending = False
        self._arbiter_trouble = ""
        self._last_status: dict[str, object] = {}
        self._unjoined_s: float | None = None
        """Since when no arbiter has welcomed us; None while one has."""

    # --- engine's main thread ---

    def start(self) -> None:
        """Start the thread, find the arbiter or start one, and greet it.

        Raises ConfigError for a bad run directory, CapacityError when the arbiter refuses
        this instance, UnsupportedError when it is of another release, PeerTimeoutError when
        none answers in FIND_WAIT_S. The thread has ended then.
        """
        self._run = RunDir.open(self.settings.run_dir)
        if self._run.note:
            logger.warning("%s", self._run.note)
        self._claim = self._run.claim(self.incarnation)
        self._run.sweep()
        self._thread = threading.Thread(
            target=self._run_thread, name="kvadmit-coordinator", daemon=True
        )
        self._thread.start()
        try:
            self._calls.wait("greeting", FIND_WAIT_S)
        except PeerTimeoutError:
            self.stop()
            what = f"answer ({self._arbiter_trouble or 'silent'})"
            raise PeerTimeoutError("arbiter", what, FIND_WAIT_S) from None
        except BaseException:
            self.stop()
            raise

    def request_start(self, start_bytes: Mapping[str, int]) -> None:
        """Wait until `start_bytes` (device -> bytes beside elastic KV) are booked for us.

        Raises CapacityError, saying who holds what, when they are not in `start_wait_s`.
        """
        wanted = dict(start_bytes)
        self._post(lambda now_s: events.StartRequested(now_s, wanted))
        self._wait_settled("start")

    def set_geometry(self, plan: ExtentPlan) -> None:
        """Announce the planned KV cache; returns once its prefix may be backed.

        Raises CapacityError when the floor does not fit or the prefix is not allowed in
        `start_wait_s`.
        """
        geometry = plan.wire()
        self._post(lambda now_s: events.GeometryKnown(now_s, geometry))
        self._wait_settled("geometry")

    def wait_ready(self) -> None:
        """Wait until every rank's agent has said hello with the prefix mapped.

        Raises PeerTimeoutError, naming the ranks, after `start_wait_s` from `set_geometry`,
        and PeerLostError when a rank ends meanwhile.
        """
        self._wait_settled("ready")

    @property
    def runtime(self) -> dict[str, object]:
        """What the workers need to know, as plain picklable values. After `start`."""
        assert self._run is not None, "start() first"
        return {
            "incarnation": self.incarnation,
            "name": self.name,
            "run_dir": str(self._run.path),
            "agents": self._run.agents_endpoint(self.incarnation),
            "lease": self._run.agents_lease(self.incarnation),
            "devices": list(self._devices),
            "backend": self._backend,
            "host_pool": self.settings.host_pool,
            "host_pool_path": self._host_pool_path,
            "settings": self.settings.as_mapping(),
        }

    @property
    def _host_pool_path(self) -> str:
        assert self._run is not None, "start() first"
        return str(self._run.path / HOST_POOL_FILE)

    def watch_parent(self, pid: int, on_death: Callable[[], None] | None = None) -> None:
        """Call `on_death` on the coordinator's thread when process `pid` ends.

        By default this process gets SIGTERM, and DEATH_GRACE_S later it is ended.
        """
        act = end_this_process if on_death is None else on_death

        def watch() -> None:
            try:
                self._watches.append(ProcessWatch(pid, act))
            except ProcessLookupError:
                act()

        self._call_soon(watch)

    def status(self) -> dict[str, object]:
        """Return machine, histograms and channels as plain JSON-able data. Any thread.

        The last state once the thread has ended. Raises PeerTimeoutError if the thread
        does not answer.
        """
        answer: concurrent.futures.Future[dict[str, object]] = concurrent.futures.Future()
        asked = self._call_soon(lambda: answer.set_result(self._describe()))
        thread = self._thread
        if not asked or thread is None or thread is threading.current_thread():
            return self._last_status or self._describe()
        try:
            return answer.result(STATUS_WAIT_S)
        except TimeoutError:
            if not thread.is_alive():
                return self._last_status
            raise PeerTimeoutError("coordinator", "give its status", STATUS_WAIT_S) from None

    def arbiter_gone_s(self, now_s: float) -> float:
        """Return for how long there has been no arbiter, in seconds; 0 while there is one."""
        since_s = self._unjoined_s
        return 0.0 if since_s is None else now_s - since_s

    def expect_end(self) -> None:
        """Take ranks that leave from now on for no loss: the engine is shutting down."""
        self._ending = True

    def stop(self) -> None:
        """Say Bye, close every channel, end the thread, remove our files. Idempotent."""
        thread = self._thread
        if thread is None:
            return
        self._call_soon(self._ask_stop)
        if thread is threading.current_thread():
            return  # called from a callback: the thread ends after it
        thread.join(STOP_WAIT_S)
        if thread.is_alive():
            logger.error("the coordinator's thread does not end")
            return
        if self._claim is not None:
            self._claim.release()

    def _wait_settled(self, call: Call) -> None:
        try:
            self._calls.wait(call, self.settings.start_wait_s + CALL_SLACK_S)
        except CapacityError as error:
            raise CapacityError(f"{error}{self._holders()}") from None

    def _holders(self) -> str:
        """Return who holds what, for the end of an error; "" if the arbiter does not say."""
        assert self._run is not None
        try:
            return _holders_in(ask_status(self._run, HOLDERS_WAIT_S), self.name)
        except KvAdmitError:
            return ""

    def _post(self, make: Callable[[float], events.Event]) -> None:
        """Have the machine take an event that `make(now_s)` builds on the loop's thread."""
        if not self._call_soon(lambda: self._step(make(time.monotonic()))):
            raise LocalProtocolError("the coordinator does not run")

    def _call_soon(self, act: Callable[[], object]) -> bool:
        """Run `act` on the loop's thread; False if that has ended."""
        loop = self._loop
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(act)
        except RuntimeError:  # the loop is closed
            return False
        return True

    # --- scheduler's thread ---

    def _wake_from_pool(self) -> None:
        """Have the loop look at the port soon; one wake-up for any number of posts.

        Why the unlocked flag loses nothing: 1. post appends the event; 2. here the flag is
        read. 3. `_drain_pool` clears the flag; 4. it collects. If 2 reads the flag set, then
        3 is yet to come, hence 1 comes before 4 and the event is collected.
        """
        if self._pool_woken:
            return
        self._pool_woken = True
        if not self._call_soon(self._drain_pool):
            self._pool_woken = False  # not started yet: `_main` drains

    # --- the loop's thread ---

    def _run_thread(self) -> None:
        never_preempt_others()  # the scheduler's thread wakes this one
        share_interpreter()
        error: BaseException | None = None
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._main())
        except BaseException as reason:
            error = reason
        self._loop = None
        if error is None:
            self._calls.fail(PeerLostError("coordinator", "it has stopped"))
            return
        logger.critical("coordinator failed", exc_info=error)
        if self._run is not None:
            write_trace(self._trace, self._run.path, "coordinator")
        text = f"coordinator failed: {error}"
        lost = error if isinstance(error, KvAdmitError) else PeerLostError("coordinator", text)
        self._calls.fail(lost)
        self._lose_engine(text)

    async def _main(self) -> None:
        assert self._run is not None
        loop = asyncio.get_running_loop()
        self._stop_asked = asyncio.Event()
        failed: asyncio.Future[bool] = loop.create_future()
        loop.set_exception_handler(lambda _, context: _take_failure(failed, context))
        self._timers = LoopTimers(
            lambda name: self._step(events.TimerFired(time.monotonic(), name))
        )
        try:
            self._open_channels(self._run)
            self._loop = loop
            self._drain_pool()
            asked: asyncio.Future[bool] = loop.create_task(self._stop_asked.wait())
            await asyncio.wait({asked, failed}, return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            if failed.done():
                failed.result()
            failed.cancel()
            await self._say_bye()
        finally:
            self._last_status = self._describe()
            await self._close_channels()

    def _open_channels(self, run: RunDir) -> None:
        self._ranks = RankChannels(
            run,
            self.incarnation,
            self._devices,
            on_joined=lambda hello: self._step(events.AgentJoined(time.monotonic(), hello)),
            on_sent=lambda rank, message: self._step(
                events.AgentSent(time.monotonic(), rank, message)
            ),
            on_lost=lambda rank: self._step(events.AgentLost(time.monotonic(), rank)),
        )
        self._arbiter = ArbiterChannel(
            run,
            self.incarnation,
            reclaim_s=self.settings.reclaim_s,
            newest_epoch=lambda: self._group.link.epoch,
            on_found=lambda: self._step(events.ArbiterFound(time.monotonic())),
            on_lost=lambda: self._step(events.ArbiterLost(time.monotonic())),
            on_message=self._arbiter_sent,
            on_trouble=self._arbiter_failed,
        )

    async def _say_bye(self) -> None:
        self._step(events.StopRequested(time.monotonic()))
        if self._arbiter is not None:
            await self._arbiter.leave(BYE_WAIT_S)

    async def _close_channels(self) -> None:
        for watch in self._watches:
            watch.close()
        if self._timers is not None:
            self._timers.close()
        if self._arbiter is not None:
            await self._arbiter.leave()
        if self._ranks is not None:
            self._ranks.close()

    def _ask_stop(self) -> None:
        assert self._stop_asked is not None
        self._stop_asked.set()

    # --- events ---

    def _step(self, event: events.Event) -> None:
        effects = self._group.step(event)
        self._trace.record("group", event, effects)
        if self._checking:
            self._group.check()
        for effect in effects:
            self._carry_out(effect)
        self.port.pressure = self._group.link.pressure
        if self._group.link.phase == "joined":
            self._unjoined_s = None
        elif self._unjoined_s is None:
            self._unjoined_s = event.now_s

    def _drain_pool(self) -> None:
        self._pool_woken = False
        collected = self.port.collect()
        for position, event in enumerate(collected):
            if not _overtaken(collected, position):
                self._step(events.PoolSent(time.monotonic(), event))

    def _arbiter_sent(self, message: Message) -> None:
        if isinstance(message, Status) or not isinstance(message, _FROM_ARBITER):
            logger.error("unexpected %s from the arbiter", type(message).__name__)
            return
        self._arbiter_trouble = ""
        self._step(events.ArbiterSent(time.monotonic(), message))
        if not self._calls.is_settled("greeting"):
            self._calls.settle("greeting", _refusal_in(message))

    def _arbiter_failed(self, error: KvAdmitError) -> None:
        text = str(error)
        if text != self._arbiter_trouble:
            # A lost one is a matter of moments as a rule; it is replaced.
            level = logging.INFO if isinstance(error, PeerLostError) else logging.WARNING
            logger.log(level, "%s", text)
        self._arbiter_trouble = text
        if isinstance(error, VersionError):
            self._calls.settle("greeting", UnsupportedError(f"another release is running: {text}"))

    # --- effects ---

    def _carry_out(self, effect: events.Effect) -> None:
        assert self._timers is not None
        match effect:
            case events.SendAgent():
                if self._ranks is not None:
                    self._ranks.send(effect.rank, effect.message)
            case events.SendArbiter():
                if self._arbiter is not None:
                    self._arbiter.send(effect.message)
            case events.ReadHere():
                self._read_here(effect.device)
            case events.GivePool():
                self.port.give(effect.order)
            case events.Hold():
                self.port.hold_until_s = effect.until_s
            case events.StartTimer():
                self._timers.start(effect.timer, effect.at_s)
            case events.StopTimer():
                self._timers.stop(effect.timer)
            case events.Settle():
                self._settle(effect.call, effect.error)
            case events.Observe():
                self._histograms[effect.name].add(effect.value_s)
            case events.Note():
                logger.log(getattr(logging, effect.level.upper()), "%s", effect.text)
            case events.EngineLost():
                self._lose_engine(effect.reason)

    def _read_here(self, device: str) -> None:
        at_s = time.monotonic()
        try:
            free_bytes, total_bytes = self._read_device(device)
        except KvAdmitError as error:
            logger.error("%s cannot be read: %s", device, error)
            return
        reading = DeviceReading(
            device=device,
            free_bytes=free_bytes,
            total_bytes=total_bytes,
            sequence=0,
            at_s=at_s,
        )
        # Not from inside another event's effects: those come first.
        self._call_soon(lambda: self._step(events.ReadingTaken(time.monotonic(), reading)))

    def _read_host_pool(self, device: str) -> tuple[int, int]:
        pool = HostPool(self._host_pool_path, self.settings.host_pool)
        try:
            return pool.free_bytes(), pool.total_bytes
        finally:
            pool.close()

    def _settle(self, call: Call, error: str) -> None:
        if not error:
            self._calls.settle(call)
        elif call == "ready":
            self._calls.settle(call, PeerTimeoutError("agents", error))
        else:
            self._calls.settle(call, CapacityError(error))

    def _lose_engine(self, reason: str) -> None:
        if self._engine_lost or self._ending:
            return
        self._engine_lost = reason
        logger.error("the engine cannot serve on: %s", reason)
        self._calls.fail(PeerLostError("engine", reason))
        if self._on_engine_lost is not None:
            self._on_engine_lost(reason)

    # --- looking at it ---

    def _describe(self) -> dict[str, object]:
        arbiter, ranks = self._arbiter, self._ranks
        pid = 0 if arbiter is None else arbiter.arbiter_pid
        return {
            "name": self.name,
            "incarnation": self.incarnation,
            "pid": os.getpid(),
            "engine_lost": self._engine_lost,
            "arbiter": {
                "pid": pid,
                "stopped": is_stopped(pid),
                "trouble": self._arbiter_trouble,
                "connections": 0 if arbiter is None else arbiter.connections,
            },
            "group": self._group.snapshot(),
            "counters": dict(self._group.counters),
            "histograms": {name: h.snapshot() for name, h in self._histograms.items()},
            "channels": {
                **({} if ranks is None else ranks.snapshot()),
                "arbiter": None if arbiter is None else msgspec.to_builtins(arbiter.counters),
            },
        }


def _refusal_in(message: Message) -> KvAdmitError | None:
    """Return the error that the arbiter's first word means, if it does."""
    if not isinstance(message, Refused):
        return None
    expected = message.code == CapacityError.code
    return CapacityError(message.reason) if expected else UnsupportedError(message.reason)


def _holders_in(snapshot: Mapping[str, Any], but: str) -> str:
    """Return what every instance `but` one holds, of what there is, as the end of a line."""
    totals = ", ".join(
        f"{name} {format_bytes(device['total_bytes'])}"
        for name, device in sorted(snapshot["devices"].items())
    )
    held = ", ".join(
        f"{name} {format_bytes(sum(one['held_bytes'].values()) + sum(one['base_bytes'].values()))}"
        for name, one in sorted(snapshot["instances"].items())
        if name != but
    )
    return f" (there is: {totals}; held by: {held or 'nobody else'})"


def _overtaken(collected: list[PoolEvent], position: int) -> bool:
    """Whether the pool's levels at `position` are followed directly by newer ones."""
    following = collected[position + 1 : position + 2]
    return isinstance(collected[position], PoolLevels) and any(
        isinstance(event, PoolLevels) for event in following
    )


def _take_failure(failed: asyncio.Future[bool], context: Mapping[str, object]) -> None:
    """Let an exception that escaped a callback end the thread: a broken rule ends loudly."""
    error = context.get("exception")
    if not isinstance(error, BaseException):
        error = LocalProtocolError(str(context.get("message")))
    if not failed.done():
        failed.set_exception(error)

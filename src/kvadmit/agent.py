"""The agent: the shell around one rank's member machine, in the worker process.

Owns: one thread, the channel and lease line to the coordinator, and every driver call of
this rank. Must not know: why an order came. It decides nothing: messages, wake-ups, timers
and completions become events of `member.Member`, whose effects it runs in order.

The thread never waits for the engine's work on the device: such a wait runs on a thread of its
own, so that prepare and commit overtake what is parked behind a fence.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from kvadmit import member
from kvadmit.agent_channel import AgentPoller, BadPeer, BlockingDealer, LeaseLost, Received, Woken
from kvadmit.errors import (
    DeviceOutOfMemoryError,
    DriverError,
    KvAdmitError,
    PeerTimeoutError,
    RemoteProtocolError,
)
from kvadmit.lease import LeaseLine
from kvadmit.messages import (
    AgentHello,
    Answer,
    BaseMeasured,
    DeviceReading,
    MapGrant,
    Message,
    OrderKind,
    ReadDevice,
)
from kvadmit.observe import Trace
from kvadmit.postmortem import write_trace
from kvadmit.processes import share_interpreter
from kvadmit.rundir import new_incarnation
from kvadmit.timers import PolledTimers
from kvadmit.vmm import AddressSpace, BatchResult

logger = logging.getLogger(__name__)

START_WAIT_S = 10.0
CAPTURE_WAIT_S = 30.0
"""A capture begins after the driver call under way; a batch of 256 extents is far below this."""
STOP_WAIT_S = 10.0
EXIT_CODE = 70
"""EX_SOFTWARE of sysexits(3): nobody is left who could use this worker."""
TRACE_ENTRIES_MAX = 4096
"""A rank's share of a host's memory for traces; there are many ranks."""
CHECK_VARIABLE = "KVADMIT_CHECK"
"""Set in the environment: the machine checks itself after every event (the tests do)."""


class Agent:
    """One rank's agent. `prefix` extents from 0 are committed in `space` already.

    `runtime` is `Coordinator.runtime`. `device_wait` returns once the device has finished
    all that is enqueued; None where a step is finished when it is published as enqueued, as
    on the CPU. `exit_process` ends the process with a code.
    """

    def __init__(
        self,
        runtime: Mapping[str, object],
        *,
        rank: int,
        space: AddressSpace,
        prefix: int,
        device_wait: Callable[[], None] | None = None,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        self.rank = rank
        self._endpoint = str(runtime["agents"])
        self._lease_path = str(runtime["lease"])
        self._run_dir = str(runtime["run_dir"])
        self._incarnation = new_incarnation(f"agent-{rank}")
        self._space = space
        self._prefix = prefix
        self._exit_process = exit_process
        self._member = member.Member(
            rank=rank, device=space.device, extents=space.layout.extents, prefix=prefix
        )
        self._trace = Trace(TRACE_ENTRIES_MAX)
        self._checking = bool(os.environ.get(CHECK_VARIABLE))
        self._timers = PolledTimers()
        self._events: deque[member.Event] = deque()
        self._posted: deque[member.Event] = deque()
        """Events from other threads."""
        self._capture_acks: deque[tuple[bool, threading.Event]] = deque()
        self._waiter = None
        if device_wait is not None:
            self._waiter = _DeviceWaiter(space.forget_fresh, device_wait, self._device_idle)
        self._device_waits = 0
        self._enqueued = 0
        self._step_awaited = False
        self._stopping = False
        self._ended = False
        self._ready = threading.Event()
        self._error: Exception | None = None
        self._memory = (0.0, 0, 0)
        self._outgoing: deque[Message] = deque()
        """Messages from other threads."""
        self._lease: LeaseLine | None = None
        self._dealer: BlockingDealer | None = None
        self._poller: AgentPoller | None = None
        self._thread = threading.Thread(target=self._run, name=f"kvadmit-agent-{rank}", daemon=True)

    # --- worker's main thread ---

    def start(self) -> None:
        """Start the thread; returns once the coordinator has been greeted.

        Raises PeerLostError, PeerTimeoutError or DriverError when that cannot be done.
        """
        self._thread.start()
        if not self._ready.wait(START_WAIT_S):
            raise PeerTimeoutError("coordinator", f"greet it as rank {self.rank}", START_WAIT_S)
        if self._error is not None:
            self._thread.join(STOP_WAIT_S)
            raise self._error

    def publish_enqueued(self, step: int) -> None:
        """Say that everything of `step` is enqueued on the device. Never waits.

        Why a plain store and an unlocked look at `_step_awaited` lose no wake-up, given that
        the GIL puts all four accesses in one order:
        1. here: store `_enqueued`. 2. here: look at `_step_awaited`.
        3. agent: store `_step_awaited`. 4. agent: look at `_enqueued`, then poll.
        If 2 came before 3, then 1 came before 4 and the agent sees the step before it polls.
        If 2 came after 3, the agent is woken.
        """
        self._enqueued = step
        if self._step_awaited and self._poller is not None:
            self._poller.wake()

    def publish_base(self, base_bytes: int) -> None:
        """Say what this process holds on its device beside elastic KV, once it is warmed up."""
        self._outgoing.append(BaseMeasured(rank=self.rank, base_bytes=base_bytes))
        if self._poller is not None:
            self._poller.wake()

    def set_capturing(self, capturing: bool) -> None:
        """Keep the driver quiet while this worker captures graphs.

        With True, returns once no call and no device wait is under way; raises
        PeerTimeoutError if that takes longer than CAPTURE_WAIT_S.
        """
        done = threading.Event()
        self._capture_acks.append((capturing, done))
        if self._poller is not None:
            self._poller.wake()
        # Either the thread sees the request, or its end releases it, or it had ended before.
        if not self._ended and not done.wait(CAPTURE_WAIT_S):
            raise PeerTimeoutError(f"agent of rank {self.rank}", "become quiet", CAPTURE_WAIT_S)

    def stop(self) -> None:
        """End the thread, the channel and the lease. Memory stays mapped. Idempotent."""
        if self._thread.ident is None:
            return
        self._stopping = True
        if self._poller is not None:
            self._poller.wake()
        self._thread.join(STOP_WAIT_S)
        if self._thread.is_alive():
            logger.error("agent of rank %d is still in a driver call", self.rank)

    # --- agent thread ---

    def _run(self) -> None:
        share_interpreter()
        try:
            self._connect()
            self._ready.set()
            self._serve()
        except KvAdmitError as error:
            self._error = error
            if self._ready.is_set():
                logger.critical("agent of rank %d ends: %s", self.rank, error)
        except BaseException:
            logger.critical("agent of rank %d ends", self.rank, exc_info=True)
            write_trace(self._trace, self._run_dir, f"agent-{self.rank}")
            raise
        finally:
            self._close()
            self._ready.set()

    def _connect(self) -> None:
        # The lease comes first: a hello without one is not read.
        self._lease = LeaseLine.open(self._lease_path, self._incarnation)
        self._dealer = BlockingDealer(self._endpoint, self._incarnation, self._lease.server)
        self._poller = AgentPoller(self._dealer, self._lease)
        space = self._space
        self._memory = (time.monotonic(), *space.read())
        at_s, free_bytes, total_bytes = self._memory
        self._send(
            AgentHello(
                rank=self.rank,
                pid=os.getpid(),
                device=space.device,
                granule_bytes=space.granule_bytes,
                extent_bytes=space.layout.extent_bytes,
                extents=space.layout.extents,
                mapped=((0, self._prefix),),
                reading=DeviceReading(
                    device=space.device,
                    free_bytes=free_bytes,
                    total_bytes=total_bytes,
                    sequence=0,
                    at_s=at_s,
                ),
            )
        )

    def _serve(self) -> None:
        assert self._poller is not None
        while not self._stopping:
            self._take_posted()
            for ready in self._poller.wait(self._timers.wait_s(time.monotonic())):
                match ready:
                    case Received():
                        self._receive(ready.message)
                    case LeaseLost():
                        self._handle(member.CoordinatorLost(time.monotonic()))
                    case BadPeer():
                        raise ready.error  # our end closes the lease, so the coordinator knows
                    case Woken():
                        pass
            for timer in self._timers.due(time.monotonic()):
                self._handle(member.TimerFired(time.monotonic(), timer))

    def _take_posted(self) -> None:
        """Turn what other threads left here into events; the last look before the poll."""
        while self._posted:
            event = self._posted.popleft()
            if isinstance(event, member.DeviceIdle):
                self._device_waits -= 1
            self._handle(event)
        while self._outgoing:
            self._send(self._outgoing.popleft())
        for capturing, _ in list(self._capture_acks):
            if capturing != self._member.capturing:
                self._handle(member.CaptureChanged(time.monotonic(), capturing))
            if capturing and self._device_waits:
                break  # acknowledged when the device wait is over
            self._capture_acks.popleft()[1].set()
        while self._enqueued > self._member.enqueued:
            self._handle(member.StepEnqueued(time.monotonic(), self._enqueued))

    def _receive(self, message: Message) -> None:
        match message:
            case MapGrant():
                try:
                    self._handle(member.OrderArrived(time.monotonic(), message))
                except RemoteProtocolError as error:
                    logger.error("rank %d: %s", self.rank, error)
                    self._send(
                        Answer(
                            order=message.order,
                            rank=self.rank,
                            kind=message.kind,
                            outcome="failed",
                            done=(),
                            reason=str(error),
                        )
                    )
            case ReadDevice():
                self._handle(member.ReadAsked(time.monotonic()))
            case _:
                logger.error("rank %d: unexpected %s", self.rank, type(message).__name__)

    def _handle(self, event: member.Event) -> None:
        """Feed the machine; completions that effects bring about follow as further events."""
        self._events.append(event)
        while self._events:
            event = self._events.popleft()
            try:
                effects = self._member.step(event)
            except RemoteProtocolError:
                self._events.clear()
                raise
            self._trace.record("member", event, effects)
            if self._checking:
                self._member.check()
            for effect in effects:
                self._carry_out(effect)
        self._step_awaited = self._member.parked

    def _carry_out(self, effect: member.Effect) -> None:
        match effect:
            case member.CallDriver():
                self._events.append(self._call_driver(effect))
            case member.AwaitDevice():
                if self._waiter is None:
                    self._events.append(member.DeviceIdle(time.monotonic(), effect.order))
                else:
                    self._device_waits += 1
                    self._waiter.submit(effect)
            case member.Send():
                self._send(effect.message)
            case member.ReadNow():
                self._events.append(member.ReadDone(*self._read()))
            case member.StartTimer():
                self._timers.start(effect.timer, effect.at_s)
            case member.ExitProcess():
                logger.error("rank %d: %s; this worker ends", self.rank, effect.reason)
                logging.shutdown()
                self._exit_process(EXIT_CODE)

    def _call_driver(self, call: member.CallDriver) -> member.DriverDone:
        """Run one batch call. Whatever happens, the order gets its answer."""
        began_s = time.monotonic()
        try:
            result = self._batch(call.kind, call.extents)
            error: Exception | None = result.error
        except Exception as unexpected:
            logger.exception("rank %d: %s raised", self.rank, call.kind)
            result, error = BatchResult(), unexpected
        took_s = time.monotonic() - began_s
        at_s, free_bytes, total_bytes = self._read()
        return member.DriverDone(
            now_s=at_s,
            order=call.order,
            done=result.done,
            partial=result.partial,
            error="" if error is None else str(error) or repr(error),
            out_of_memory=isinstance(error, DeviceOutOfMemoryError),
            took_s=took_s,
            free_bytes=free_bytes,
            total_bytes=total_bytes,
        )

    def _batch(self, kind: OrderKind, extents: tuple[int, ...]) -> BatchResult:
        space = self._space
        match kind:
            case "prepare":
                return space.prepare(extents)
            case "commit":
                return space.commit(extents)
            case "abort":
                return space.abort(extents)
            case "decommit":
                return space.decommit(extents)
            case "fence":
                raise AssertionError("a fence makes no driver call")

    def _read(self) -> tuple[float, int, int]:
        """Return the device's free and total bytes, and since when they are known.

        The last known ones if it will not say. The time is that before the call: a reading that
        was long under way must not pass for newer than it is.
        """
        at_s = time.monotonic()
        try:
            self._memory = (at_s, *self._space.read())
        except DriverError as error:
            logger.error("rank %d: %s", self.rank, error)
        return self._memory

    def _send(self, message: Message) -> None:
        assert self._dealer is not None
        if not self._dealer.send(message):
            logger.error("rank %d: %s lost, queue full", self.rank, type(message).__name__)

    def _device_idle(self, order: int) -> None:
        """Waiter thread: the device has finished what `order` waited for."""
        self._posted.append(member.DeviceIdle(time.monotonic(), order))
        if self._poller is not None:
            self._poller.wake()

    def _close(self) -> None:
        self._ended = True
        if self._waiter is not None:
            self._waiter.close()
        for resource in (self._poller, self._dealer, self._lease):
            if resource is not None:
                resource.close()
        while self._capture_acks:
            self._capture_acks.popleft()[1].set()

    def snapshot(self) -> dict[str, object]:
        """Return the machine's state as plain data. For tests, after `stop`."""
        return self._member.snapshot()


class _DeviceWaiter:
    """The thread on which device waits run, one after the other.

    `forget` comes before `wait`: what is enqueued until then is waited for, and nothing after.
    """

    def __init__(
        self,
        forget: Callable[[tuple[int, ...]], object],
        wait: Callable[[], None],
        on_idle: Callable[[int], None],
    ) -> None:
        self._forget = forget
        self._wait = wait
        self._on_idle = on_idle
        self._waits: queue.SimpleQueue[member.AwaitDevice | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvadmit-device-wait", daemon=True)

    def submit(self, wait: member.AwaitDevice) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._waits.put(wait)

    def close(self) -> None:
        """End the thread; one that sits in a device wait is left to it. Idempotent."""
        self._waits.put(None)
        if self._thread.ident is not None:
            self._thread.join(STOP_WAIT_S)

    def _run(self) -> None:
        while (wanted := self._waits.get()) is not None:
            try:
                self._forget(wanted.leaving)
                self._wait()
            except Exception:
                # Then nothing may be unmapped: the order stays parked, and the coordinator,
                # asking again, names this rank.
                logger.exception("device wait of order %d failed", wanted.order)
            else:
                self._on_idle(wanted.order)

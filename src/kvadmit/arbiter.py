"""The arbiter: the shell around the arbitration machine, one process per host.

Owns: its epoch, its sockets and the loop they run on. Must not know: who should get what, or
how its process came about (`arbiter_process`). It ends a few seconds after the last instance left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping

import uvloop

from kvadmit import arbitration, arbitration_events
from kvadmit.channel import AsyncRouter
from kvadmit.errors import KvAdmitError, LocalProtocolError, RemoteProtocolError
from kvadmit.lease import LeaseServer
from kvadmit.messages import Bye, Header, Hello, Message, Refused, Report, StatusQuery
from kvadmit.observe import Trace
from kvadmit.postmortem import write_trace
from kvadmit.processes import preempt_as_usual
from kvadmit.rundir import RunDir, new_incarnation
from kvadmit.timers import LoopTimers

logger = logging.getLogger("kvadmit.arbiter")

REFUSED_WAIT_S = 1.0
CHECK_VARIABLE = "KVADMIT_CHECK"
"""Set in the environment: the machine checks itself after every event (the tests do)."""


class Arbiter:
    """One arbiter's life on the running loop. The caller holds the lock of `run`."""

    def __init__(self, run: RunDir, *, reclaim_s: float, epoch_seen: int = 0) -> None:
        self._run = run
        # Stored before anything is bound: no two lives share a socket name.
        self.epoch = run.next_epoch(epoch_seen)
        run.sweep()
        self._machine = arbitration.Arbitration(
            epoch=self.epoch, reclaim_s=reclaim_s, awaited=run.living()
        )
        self._trace = Trace()
        self._checking = bool(os.environ.get(CHECK_VARIABLE))
        self._refused: set[str] = set()
        incarnation = new_incarnation("arbiter")
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.set_exception_handler(lambda _, context: self._fail(context))
        self._timers = LoopTimers(
            lambda name: self._step(arbitration_events.TimerFired(time.monotonic(), name))
        )
        self._leases = LeaseServer(
            run.arbiter_lease(self.epoch),
            incarnation,
            on_peer=lambda peer, pid: None,
            on_lost=self._lose,
        )
        self._router = AsyncRouter(
            run.arbiter_endpoint(self.epoch),
            incarnation,
            on_message=self._receive,
            on_bad=self._refuse,
            has_lease=self._leases.__contains__,
        )
        # Last, since whoever gets a lease line may send to the router.
        self._leases.start()

    async def serve(self) -> None:
        """Run until nobody is left or SIGTERM comes; our files and those of the dead go then."""
        self._loop.add_signal_handler(signal.SIGTERM, self._end)
        # Nobody may come at all: whoever started us may be dead.
        self._timers.start("linger", time.monotonic() + arbitration.LINGER_S)
        logger.info("epoch %d serves %s", self.epoch, self._run.path)
        try:
            await self._ended
        finally:
            self._timers.close()
            self._router.close()
            self._leases.close()
            with contextlib.suppress(FileNotFoundError):  # libzmq leaves its socket's name behind
                os.unlink(self._router.endpoint.removeprefix("ipc://"))
            # Instances that were killed, as vLLM kills EngineCore when it stops at once.
            self._run.sweep()
            logger.info("epoch %d ends", self.epoch)

    def _receive(self, peer: str, header: Header, message: Message) -> None:
        if peer in self._refused:
            return
        if not isinstance(message, Hello | Report | Bye | StatusQuery):
            kind = type(message).__name__
            self._refuse(peer, RemoteProtocolError(f"the arbiter takes no {kind}"))
            return
        try:
            self._step(arbitration_events.PeerSent(time.monotonic(), peer, message))
        except RemoteProtocolError as error:  # raised before anything changed
            self._refuse(peer, error)

    def _refuse(self, peer: str, error: KvAdmitError) -> None:
        """Part with a peer that broke the contract, and say why.

        Its lease line stays for REFUSED_WAIT_S, as its end could overtake the reason.
        """
        logger.error("%s is dropped: %s", peer, error)
        self._refused.add(peer)
        self._router.send(peer, Refused(reason=str(error), code=error.code))
        self._step(arbitration_events.PeerLost(time.monotonic(), peer))
        self._loop.call_later(REFUSED_WAIT_S, self._drop, peer)

    def _drop(self, peer: str) -> None:
        self._refused.discard(peer)
        self._leases.drop(peer)
        self._router.forget(peer)

    def _lose(self, peer: str) -> None:
        self._refused.discard(peer)
        self._router.forget(peer)
        self._step(arbitration_events.PeerLost(time.monotonic(), peer))

    def _step(self, event: arbitration_events.Event) -> None:
        effects = self._machine.step(event)
        self._trace.record("arbitration", event, effects)
        if self._checking:
            self._machine.check()
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: arbitration_events.Effect) -> None:
        match effect:
            case arbitration_events.Send():
                self._router.send(effect.peer, effect.message)
            case arbitration_events.Drop():
                self._drop(effect.peer)
            case arbitration_events.StartTimer():
                self._timers.start(effect.timer, effect.at_s)
            case arbitration_events.StopTimer():
                self._timers.stop(effect.timer)
            case arbitration_events.Note():
                logger.info("%s", effect.text)
            case arbitration_events.Exit():
                self._end()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, context: Mapping[str, object]) -> None:
        """End loudly with what escaped a callback; the next arbiter starts from reports."""
        error = context.get("exception")
        if not isinstance(error, BaseException):
            error = LocalProtocolError(str(context.get("message")))
        write_trace(self._trace, self._run.path, "arbiter")
        if not self._ended.done():
            self._ended.set_exception(error)


def run_arbiter(run: RunDir, *, reclaim_s: float, epoch_seen: int, ready_fd: int | None) -> int:
    """Be the arbiter of `run`, whose lock the caller holds, until nobody is left.

    Returns the exit code. `ready_fd` gets one byte once the sockets are bound, and is closed.
    """
    preempt_as_usual()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(process)d %(message)s"
    )

    async def serve() -> None:
        arbiter = Arbiter(run, reclaim_s=reclaim_s, epoch_seen=epoch_seen)
        if ready_fd is not None:
            with contextlib.suppress(BrokenPipeError):  # whoever started us is gone
                os.write(ready_fd, b"\1")
            os.close(ready_fd)
        await arbiter.serve()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())
    except Exception:
        logger.critical("the arbiter failed", exc_info=True)
        return 1
    return 0

"""Finding the arbiter of a run directory, and starting one when nobody is it.

Owns: the channel and lease line to the arbiter, finding it again after a loss, and the
launch of its process. Must not know: what is said over the channel.

Nobody can signal that a new arbiter exists, so after a failed try there is a pause, longer by
half each time up to PAUSE_S_MAX. The first try after the loss of a sound arbiter is made at
once: whoever loses the race for the lock then finds the winner. Each connection has a routing
id of its own, the incarnation and a count, since identities are never reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvadmit.agent_channel import AgentPoller, BadPeer, BlockingDealer, LeaseLost, Received
from kvadmit.channel import AsyncDealer
from kvadmit.errors import KvAdmitError, PeerLostError, PeerTimeoutError, RemoteProtocolError
from kvadmit.lease import LeaseClient, LeaseLine
from kvadmit.messages import Header, Message, Refused, Status, StatusQuery, ToArbiter
from kvadmit.outbox import ChannelCounters
from kvadmit.processes import is_stopped
from kvadmit.rundir import ArbiterLock, RunDir, new_incarnation

LAUNCH_WAIT_S = 15.0
"""A Python process on a busy host takes seconds to start at worst."""
PAUSE_S_MIN = 0.02
PAUSE_S_MAX = 1.0
SOUND_S = 2.0
"""An arbiter that lived this long does not fail at start: its successor is not waited for."""
STATUS_WAIT_S = 5.0
LOG_BYTES_MAX = 1 << 20


class ArbiterChannel:
    """This instance's channel to whoever is the arbiter, on the running asyncio loop.

    `on_found()` when a channel is open, `on_lost()` once for each of those, `on_message`
    for what comes over it, `on_trouble(error)` for every try that failed and for an arbiter
    that breaks the contract. `newest_epoch()`: the newest epoch the caller knows of, which
    counts when the run directory was deleted.
    """

    def __init__(
        self,
        run: RunDir,
        incarnation: str,
        *,
        reclaim_s: float,
        newest_epoch: Callable[[], int],
        on_found: Callable[[], None],
        on_lost: Callable[[], None],
        on_message: Callable[[Message], None],
        on_trouble: Callable[[KvAdmitError], None],
    ) -> None:
        self._run = run
        self._incarnation = incarnation
        self._reclaim_s = reclaim_s
        self._newest_epoch = newest_epoch
        self._on_found = on_found
        self._on_lost = on_lost
        self._on_message = on_message
        self._on_trouble = on_trouble
        self.connections = 0
        self.counters = ChannelCounters()
        """Of the present channel, or of the last one."""
        self._lease: LeaseClient | None = None
        self._dealer: AsyncDealer | None = None
        self._closed = asyncio.Event()
        self._closed.set()
        self._task = asyncio.get_running_loop().create_task(self._stay_connected())
        # A bug in there must reach the loop's exception handler, not lie in a finished task.
        self._task.add_done_callback(lambda task: None if task.cancelled() else task.result())

    @property
    def arbiter_pid(self) -> int:
        """The arbiter's process; 0 while there is no channel."""
        return 0 if self._lease is None else self._lease.server_pid

    def send(self, message: ToArbiter) -> bool:
        """Send if a channel is open; never waits. False: the message is gone."""
        return self._dealer is not None and self._dealer.send(message)

    async def leave(self, timeout_s: float = 0.0) -> None:
        """Close the channel and look for no other. Idempotent.

        After a Bye the arbiter closes its end, which shows that the Bye was read; that is
        waited for, `timeout_s` at most.
        """
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._closed.wait()
        self._drop()

    # --- connecting ---

    async def _stay_connected(self) -> None:
        pause_s = PAUSE_S_MIN
        while True:
            try:
                await self._connect()
            except KvAdmitError as error:
                self._on_trouble(error)
            else:
                found_s = time.monotonic()
                self._on_found()
                await self._closed.wait()
                if time.monotonic() - found_s > SOUND_S:
                    pause_s = PAUSE_S_MIN
                    continue  # it was a sound one: look for its successor at once
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, PAUSE_S_MAX)

    async def _connect(self) -> None:
        """Open a channel to the arbiter of the newest epoch, started here if need be."""
        epoch = self._run.epoch()
        if epoch:
            try:
                await self._open_channel(epoch)
                return
            except PeerLostError:
                pass  # nobody listens there
        if not await self._launch():
            raise PeerLostError("arbiter", "another process holds its lock and is not ready yet")
        await self._open_channel(self._run.epoch())

    async def _open_channel(self, epoch: int) -> None:
        self.connections += 1
        routing_id = f"{self._incarnation}.{self.connections}"
        lease = await LeaseClient.open(self._run.arbiter_lease(epoch), routing_id, self._lease_lost)
        try:
            self._dealer = AsyncDealer(
                self._run.arbiter_endpoint(epoch),
                routing_id,
                lease.server,
                on_message=self._receive,
                on_bad=self._bad,
            )
        except BaseException:
            lease.close()
            raise
        self._lease = lease
        self.counters = self._dealer.counters
        self._closed.clear()

    def _receive(self, peer: str, header: Header, message: Message) -> None:
        self._on_message(message)

    def _bad(self, peer: str, error: KvAdmitError) -> None:
        self._on_trouble(error)
        self._lease_lost()

    def _lease_lost(self) -> None:
        self._drop()
        self._on_lost()

    def _drop(self) -> None:
        lease, self._lease = self._lease, None
        dealer, self._dealer = self._dealer, None
        if dealer is not None:
            dealer.close()
        if lease is not None:
            lease.close()
        self._closed.set()

    # --- launching ---

    async def _launch(self) -> bool:
        """Start an arbiter; True once it is bound, False if another process is it already.

        It detaches itself (its parent is not this process), so that it outlives us. Raises
        PeerTimeoutError when it neither binds nor ends in LAUNCH_WAIT_S.
        """
        if ArbiterLock(self._run).is_taken():
            return False  # its process may be starting: one more would only slow it down
        loop = asyncio.get_running_loop()
        read, write = os.pipe()
        told = asyncio.Event()
        loop.add_reader(read, told.set)
        process: subprocess.Popen[bytes] | None = None
        try:
            try:
                process = self._start_process(write)
            except OSError as error:
                raise PeerLostError("arbiter", f"start its process: {error.strerror}") from error
            finally:
                os.close(write)
            async with asyncio.timeout(LAUNCH_WAIT_S):
                await told.wait()
            return os.read(read, 1) == b"\1"
        except TimeoutError as error:
            raise PeerTimeoutError("arbiter", "start", LAUNCH_WAIT_S) from error
        finally:
            loop.remove_reader(read)
            os.close(read)
            if process is not None:
                _reap(process)

    def _start_process(self, ready: int) -> subprocess.Popen[bytes]:
        self._run.restore()
        log = _open_log(self._run)
        command = [
            sys.executable,
            "-P",  # no module of the working directory takes the place of a real one
            "-m",
            "kvadmit.arbiter_process",
            f"--run-dir={self._run.path}",
            f"--reclaim-s={self._reclaim_s}",
            f"--epoch-seen={self._newest_epoch()}",
            f"--ready-fd={ready}",
        ]
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(ready,),
                start_new_session=True,
            )
        finally:
            os.close(log)


def ask_status(run: RunDir, timeout_s: float = STATUS_WAIT_S) -> dict[str, object]:
    """Return the snapshot of the arbiter of `run`; for threads without a loop.

    Raises PeerLostError when there is no arbiter, PeerTimeoutError when it does not answer
    (saying so if it is stopped), VersionError when it is of another release.
    """
    try:
        return _ask_status(run, timeout_s)
    except PeerTimeoutError as error:
        pid = ArbiterLock(run).holder()
        what = "is stopped and cannot" if is_stopped(pid) else "does not"
        raise PeerTimeoutError(f"arbiter (pid {pid})", f"{what} answer", timeout_s) from error


def _ask_status(run: RunDir, timeout_s: float) -> dict[str, object]:
    epoch = run.epoch()
    if not epoch:
        raise PeerLostError("arbiter", f"none has run in {run.path}")
    incarnation = new_incarnation("status")
    deadline_s = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        lease = LeaseLine.open(run.arbiter_lease(epoch), incarnation, timeout_s=timeout_s)
        stack.callback(lease.close)
        dealer = BlockingDealer(run.arbiter_endpoint(epoch), incarnation, lease.server)
        stack.callback(dealer.close)
        poller = AgentPoller(dealer, lease)
        stack.callback(poller.close)
        dealer.send(StatusQuery())
        while (left_s := deadline_s - time.monotonic()) > 0:
            for ready in poller.wait(left_s):
                match ready:
                    case Received(message=Status() as status):
                        return {**status.snapshot, "pid": lease.server_pid}
                    case Received(message=Refused() as refused):
                        raise RemoteProtocolError(refused.reason)
                    case BadPeer():
                        raise ready.error
                    case LeaseLost():
                        raise PeerLostError("arbiter", "it ended before it answered")
    raise PeerTimeoutError("arbiter", "give its status", timeout_s)


def log_path(run: RunDir) -> Path:
    """Return the file in which arbiters of `run` log."""
    return run.path / "arbiter.log"


def _open_log(run: RunDir) -> int:
    """Open the arbiter's log for appending; one that has grown too long starts anew."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(log_path(run), flags, 0o600)
    if os.fstat(descriptor).st_size > LOG_BYTES_MAX:
        os.ftruncate(descriptor, 0)
    return descriptor


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Collect the launcher, which ends as soon as it has detached the arbiter."""
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(1.0)

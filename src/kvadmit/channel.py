"""Channels: ZeroMQ sockets that carry kvadmit's messages. Only this and `agent_channel` import zmq.

Owns: contexts, socket options, the send queues, sequence numbers and the counting of
everything that did not fit. Must not know: what a message means, beyond which types are
levels. Errors of zmq are translated here and nowhere else.

Rules of every socket here:
- It belongs to the thread that made it (asserted) and to the process that made it: after a
  fork it refuses to work, since libzmq's threads do not survive one.
- A send never waits. What the socket does not take at once is queued per peer, bounded; of
  a level only the newest is kept. A message gets its sequence number when the socket takes
  it, so a replaced level leaves no gap.
- A broken connection is not resumed: identities are incarnations, and a life that lost its
  channel starts another. (A ROUTER without handover ignores a reconnect that overtakes the
  news of the break, for ever; and libzmq shows neither.)
- The descriptor of a zmq socket is edge-triggered and also fires for the library's own
  commands: after every send and receive its EVENTS must be read again, else a message may
  lie there unseen (zmq_getsockopt(3), ZMQ_FD).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import zmq

from kvadmit.errors import (
    KvAdmitError,
    LocalProtocolError,
    PeerError,
    RemoteProtocolError,
    VersionError,
)
from kvadmit.messages import (
    FRAME_BYTES_MAX,
    PROTOCOL_VERSION,
    Header,
    Message,
    decode,
    encode,
)
from kvadmit.outbox import ChannelCounters, Outbox, Peer

HIGH_WATER_MARK = 64
"""Messages in libzmq's own pipe, each way. Small, so that levels wait where they are replaced."""

RECEIVE_BATCH = 64
"""Messages handled before the loop may do something else."""

BACKLOG = 256


# --- contexts ------------------------------------------------------------------------------


class _Contexts:
    """One zmq context per process, made for the first socket and ended after the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._users = 0
        self._abandoned: list[object] = []
        os.register_at_fork(after_in_child=self._abandon)

    def acquire(self) -> zmq.Context[zmq.Socket[bytes]]:
        with self._lock:
            if self._context is None:
                self._context = zmq.Context(io_threads=1)
            self._users += 1
            return self._context

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            context, self._context = self._context, None
        if context is not None:
            context.term()  # at once: every socket was closed with linger 0

    def _abandon(self) -> None:
        # The child must neither use the parent's context nor end it: its threads are not here.
        # The lock may have been held by a thread that does not exist here either.
        self._lock = threading.Lock()
        if self._context is not None:
            self._abandoned.append(self._context)
        self._context = None
        self._users = 0


_contexts = _Contexts()


# --- what all sockets share -----------------------------------------------------------------


class ChannelSocket:
    """A zmq socket with its owner, its options, and the codec above it."""

    def __init__(self, kind: int, endpoint: str, incarnation: str) -> None:
        self.endpoint = endpoint
        self.incarnation = incarnation
        self.counters = ChannelCounters()
        self.closed = False
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        context = _contexts.acquire()
        try:
            self._socket: zmq.Socket[bytes] = context.socket(kind)
        except zmq.ZMQError as error:
            _contexts.release()
            self.closed = True
            raise PeerError(endpoint, f"open channel: {error}") from error
        options: dict[int, Any] = {
            zmq.LINGER: 0,
            zmq.MAXMSGSIZE: FRAME_BYTES_MAX,
            zmq.SNDHWM: HIGH_WATER_MARK,
            zmq.RCVHWM: HIGH_WATER_MARK,
            zmq.BACKLOG: BACKLOG,
            zmq.RECONNECT_IVL: -1,
            zmq.IMMEDIATE: 0,  # a hello may be sent while the connection is being made
        }
        if kind == zmq.ROUTER:
            options |= {zmq.ROUTER_MANDATORY: 1, zmq.ROUTER_HANDOVER: 0}
        else:
            options[zmq.ROUTING_ID] = incarnation.encode()
        try:
            for option, value in options.items():
                self._socket.setsockopt(option, value)
            if kind == zmq.ROUTER:
                self._socket.bind(endpoint)
            else:
                self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise PeerError(endpoint, f"open channel: {error}") from error

    def _check_owner(self) -> None:
        if self.closed:
            raise LocalProtocolError(f"channel {self.endpoint} is closed")
        if os.getpid() != self._pid:
            raise LocalProtocolError(
                f"channel {self.endpoint} of process {self._pid} used after fork in {os.getpid()}"
            )
        assert threading.get_ident() == self._thread, "a zmq socket has one owner thread"

    def close(self) -> None:
        """Close the socket at once; what the peer has not got is lost. Idempotent.

        Whoever needs his last word heard waits, bounded, for the peer to end the lease.
        """
        if self.closed or os.getpid() != self._pid:
            return
        self._check_owner()
        self.closed = True
        self._socket.close(linger=0)
        _contexts.release()

    def _transmit(self, peer: Peer, prefix: list[bytes], message: Message) -> bool:
        """Hand one message to libzmq. False: no room now. Raises LocalProtocolError, ZMQError."""
        header = Header(PROTOCOL_VERSION, self.incarnation, peer.sequence_out + 1)
        try:
            self._socket.send_multipart(prefix + self._encode(header, message), zmq.DONTWAIT)
        except zmq.Again:
            return False
        peer.sequence_out += 1
        self.counters.sent += 1
        return True

    def _flush_to(self, peer: Peer) -> None:
        """Hand the only peer what waits for it, as far as there is room."""
        while peer.outbox and self._transmit(peer, [], peer.outbox.first()):
            peer.outbox.remove_first()

    def _encode(self, header: Header, message: Message) -> list[bytes]:
        frames = encode(header, message)
        if len(frames[1]) > FRAME_BYTES_MAX:
            raise LocalProtocolError(
                f"{type(message).__name__} of {len(frames[1])} bytes; {FRAME_BYTES_MAX} at most"
            )
        return frames

    def _queue(self, peer: Peer, message: Message) -> bool:
        # Refuse one that is too large to its sender, not later to whoever empties the queue.
        self._encode(Header(PROTOCOL_VERSION, self.incarnation, 0), message)
        before = peer.outbox.replaced
        accepted = peer.outbox.put(message)
        self.counters.levels_replaced += peer.outbox.replaced - before
        if accepted:
            self.counters.queued += 1
        else:
            self.counters.queue_full += 1
        return accepted

    def _accept(self, peer: Peer, frames: list[bytes]) -> tuple[Header, Message]:
        """Parse and account one message. Raises ProtocolError; the peer is then dropped."""
        try:
            header, message = decode(frames)
            if header.incarnation != peer.name:
                raise RemoteProtocolError(
                    f"a message of {header.incarnation!r} came over the channel of {peer.name!r}"
                )
        except KvAdmitError as error:
            peer.dropped = True
            self.counters.bad_messages += 1
            if isinstance(error, VersionError):
                self.counters.version_errors += 1
            raise
        self.counters.received += 1
        if header.sequence <= peer.sequence_in:
            self.counters.sequence_repeats += 1
        else:
            self.counters.sequence_gaps += header.sequence - peer.sequence_in - 1
            peer.sequence_in = header.sequence
        return header, message


OnMessage = Callable[[str, Header, Message], None]
OnBad = Callable[[str, KvAdmitError], None]


class _AsyncSocket(ChannelSocket):
    """A socket driven by the asyncio loop of the thread that makes it."""

    def __init__(
        self, kind: int, endpoint: str, incarnation: str, on_message: OnMessage, on_bad: OnBad
    ) -> None:
        self._on_message = on_message
        self._on_bad = on_bad
        self._loop = asyncio.get_running_loop()
        self._pump_due = False
        self._descriptor = -1
        super().__init__(kind, endpoint, incarnation)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._pump)
        self._schedule_pump()

    def close(self) -> None:
        if not self.closed and os.getpid() == self._pid and self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
        super().close()

    def _schedule_pump(self) -> None:
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Receive a batch and push queues on, until EVENTS says there is nothing more.

        Runs when the descriptor fires and after every send (see the module's last rule).
        """
        self._pump_due = False
        again = True  # a handler that raises must not leave messages lying behind the edge
        try:
            for _ in range(RECEIVE_BATCH):
                if self.closed:
                    return
                if not self._has_messages():
                    break
                self._receive()
            if not self.closed:
                self._flush()
                again = self._has_messages()
        finally:
            if again and not self.closed:
                self._schedule_pump()

    def _has_messages(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _receive(self) -> None:
        raise NotImplementedError

    def _flush(self) -> None:
        raise NotImplementedError

    def _deliver(self, peer: Peer, frames: list[bytes]) -> None:
        if peer.dropped:
            self.counters.from_dropped += 1
            return
        try:
            header, message = self._accept(peer, frames)
        except KvAdmitError as error:
            self._on_bad(peer.name, error)
            return
        self._on_message(peer.name, header, message)


class AsyncRouter(_AsyncSocket):
    """Receive from and answer many dealers, bound at `endpoint`, on the running loop.

    `has_lease(incarnation)` decides whether a sender is known (`LeaseServer.__contains__`);
    others are dropped and counted. `on_bad(peer, error)` is called once: from then on the
    peer's messages are dropped, while it can still be sent to (to say why). The caller then
    drops its lease. All callbacks run on the loop's thread.
    """

    def __init__(
        self,
        endpoint: str,
        incarnation: str,
        *,
        on_message: OnMessage,
        on_bad: OnBad,
        has_lease: Callable[[str], bool],
    ) -> None:
        self._has_lease = has_lease
        self._peers: dict[str, Peer] = {}
        self._waiting: dict[str, Peer] = {}
        super().__init__(zmq.ROUTER, endpoint, incarnation, on_message, on_bad)

    def send(self, peer: str, message: Message) -> bool:
        """Send to a peer that has spoken before. Never waits; order per peer is kept.

        False, counted, when it is not connected or its queue is full (it does not read):
        the message is gone. True says only that it was taken on. Raises LocalProtocolError
        for a message that is too large, and then nothing was sent.
        """
        self._check_owner()
        known = self._peers.get(peer)
        if known is None:
            self.counters.unreachable += 1
            return False
        if known.outbox:
            return self._queue(known, message)
        self._schedule_pump()
        try:
            if self._transmit(known, [peer.encode()], message):
                return True
        except zmq.ZMQError:  # EHOSTUNREACH: it has closed its end
            self.counters.unreachable += 1
            return False
        self._waiting[peer] = known
        return self._queue(known, message)

    def forget(self, peer: str) -> None:
        """Drop a lost peer's queue and sequence state. Idempotent."""
        self._peers.pop(peer, None)
        self._waiting.pop(peer, None)

    def backlog(self, peer: str) -> int:
        """Return how many messages wait for a peer that does not read."""
        known = self._peers.get(peer)
        return 0 if known is None else len(known.outbox)

    def _receive(self) -> None:
        identity, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
        name = identity.decode("ascii", "replace")
        if not self._has_lease(name):
            self.counters.without_lease += 1
            return
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = Peer(name)
        self._deliver(peer, frames)

    def _flush(self) -> None:
        for name, peer in list(self._waiting.items()):
            try:
                while peer.outbox and self._transmit(peer, [name.encode()], peer.outbox.first()):
                    peer.outbox.remove_first()
            except zmq.ZMQError:
                self.counters.unreachable += len(peer.outbox)
                peer.outbox = Outbox()
            if not peer.outbox:
                del self._waiting[name]


class AsyncDealer(_AsyncSocket):
    """Talk to one router at `endpoint`, on the running loop; the identity is `incarnation`.

    `server`: the router's incarnation, as its lease line said. `on_bad(server, error)` is
    called once; then its messages are dropped. Callbacks run on the loop's thread.
    """

    def __init__(
        self,
        endpoint: str,
        incarnation: str,
        server: str,
        *,
        on_message: OnMessage,
        on_bad: OnBad,
    ) -> None:
        self._peer = Peer(server)
        super().__init__(zmq.DEALER, endpoint, incarnation, on_message, on_bad)

    def send(self, message: Message) -> bool:
        """Send to the router. As `AsyncRouter.send`."""
        self._check_owner()
        if self._peer.outbox:
            return self._queue(self._peer, message)
        self._schedule_pump()
        return self._transmit(self._peer, [], message) or self._queue(self._peer, message)

    def backlog(self) -> int:
        """Return how many messages wait because the router does not read."""
        return len(self._peer.outbox)

    def _receive(self) -> None:
        self._deliver(self._peer, self._socket.recv_multipart(zmq.DONTWAIT))

    def _flush(self) -> None:
        self._flush_to(self._peer)

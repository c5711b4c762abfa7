"""The agent's side of a channel: a dealer without a loop, and the wait for it.

Owns: the socket of a thread that polls, and everything that wakes that thread. Must not know:
what a message means. The rules of every socket are those of `channel`.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from kvadmit.channel import RECEIVE_BATCH, ChannelSocket
from kvadmit.errors import KvAdmitError
from kvadmit.lease import LeaseLine
from kvadmit.messages import Header, Message
from kvadmit.outbox import Peer


class BlockingDealer(ChannelSocket):
    """Talk to one router from a thread without a loop; wait for it with an `AgentPoller`."""

    def __init__(self, endpoint: str, incarnation: str, server: str) -> None:
        self._peer = Peer(server)
        super().__init__(zmq.DEALER, endpoint, incarnation)

    def send(self, message: Message) -> bool:
        """Send to the router. As `AsyncRouter.send`; a queue moves on in `AgentPoller.wait`."""
        self._check_owner()
        if self._peer.outbox:
            return self._queue(self._peer, message)
        return self._transmit(self._peer, [], message) or self._queue(self._peer, message)

    def backlog(self) -> int:
        """Return how many messages wait because the router does not read."""
        return len(self._peer.outbox)

    def flush(self) -> None:
        """Push the queue on, as far as there is room."""
        self._flush_to(self._peer)

    def _received(self) -> Iterator[Ready]:
        for _ in range(RECEIVE_BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if self._peer.dropped:
                self.counters.from_dropped += 1
                continue
            try:
                header, message = self._accept(self._peer, frames)
            except KvAdmitError as error:
                yield BadPeer(self._peer.name, error)
            else:
                yield Received(self._peer.name, header, message)


class Received(msgspec.Struct, frozen=True):
    """A message came."""

    peer: str
    header: Header
    message: Message


class BadPeer(msgspec.Struct, frozen=True):
    """The router broke the contract; nothing more of it is read."""

    peer: str
    error: Any


class Woken(msgspec.Struct, frozen=True):
    """`AgentPoller.wake` was called since the last wait, once or more often."""


class LeaseLost(msgspec.Struct, frozen=True):
    """The router's process is gone. Reported once, after all messages that came before."""

    peer: str


Ready = Received | BadPeer | Woken | LeaseLost


class AgentPoller:
    """Wait for a dealer, its lease line and wake-ups from other threads at once.

    Belongs to the dealer's thread, except `wake`.
    """

    def __init__(self, dealer: BlockingDealer, lease: LeaseLine) -> None:
        self._dealer = dealer
        self._lease = lease
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._lease_open = True
        self._poller = zmq.Poller()
        self._poller.register(dealer._socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._poller.register(lease.fileno(), zmq.POLLIN)

    def wake(self) -> None:
        """Make the present or next `wait` return `Woken`. Any thread; never waits."""
        with self._wake_lock:  # against `close`: the number may be another file by then
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def wait(self, timeout_s: float | None = None) -> list[Ready]:
        """Return what is ready, in the order it is to be handled; empty after `timeout_s`.

        None waits without end. A time is rounded up to whole milliseconds.
        """
        dealer = self._dealer
        dealer._check_owner()
        dealer.flush()
        interest = zmq.POLLIN | (zmq.POLLOUT if dealer.backlog() else 0)
        self._poller.modify(dealer._socket, interest)
        timeout_ms = None if timeout_s is None else max(0, math.ceil(timeout_s * 1000))
        found = dict(self._poller.poll(timeout_ms))
        ready: list[Ready] = []
        if self._wake in found:
            os.eventfd_read(self._wake)
            ready.append(Woken())
        if dealer._socket in found:
            ready.extend(dealer._received())
            dealer.flush()
        if self._lease_open and self._lease.fileno() in found and self._lease.is_lost():
            self._lease_open = False
            self._poller.unregister(self._lease.fileno())
            ready.extend(dealer._received())
            ready.append(LeaseLost(self._lease.server))
        return ready

    def close(self) -> None:
        """Give up the wake-up descriptor; dealer and lease stay the caller's. Idempotent."""
        with self._wake_lock:
            descriptor, self._wake = self._wake, -1
        if descriptor >= 0:
            os.close(descriptor)

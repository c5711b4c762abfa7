"""The coordinator's channels to the agents of its ranks.

Owns: the router, the lease lines, and which peer speaks for which rank. Must not know:
what an order or an answer means. A peer that breaks the contract is dropped; its rank
stays taken, since a worker that lost its agent cannot get another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from kvadmit.channel import AsyncRouter
from kvadmit.errors import KvAdmitError, ProtocolError, RemoteProtocolError
from kvadmit.lease import LeaseServer
from kvadmit.messages import AgentHello, Answer, BaseMeasured, Header, Headroom, Message, ToAgent
from kvadmit.rundir import RunDir

logger = logging.getLogger(__name__)


class RankChannels:
    """Receive the agents of one instance, on the running asyncio loop.

    `devices`: the device of each rank. `on_joined(hello)` and `on_sent(rank, message)` may
    raise ProtocolError, which drops that peer; `on_lost(rank)` runs once for each that
    joined. All on the loop's thread.
    """

    def __init__(
        self,
        run: RunDir,
        incarnation: str,
        devices: Sequence[str],
        *,
        on_joined: Callable[[AgentHello], None],
        on_sent: Callable[[int, Answer | Headroom | BaseMeasured], None],
        on_lost: Callable[[int], None],
    ) -> None:
        self._devices = tuple(devices)
        self._on_joined = on_joined
        self._on_sent = on_sent
        self._on_lost = on_lost
        self._ranks: dict[str, int] = {}
        """Peer -> its rank, while it is here."""
        self._peers: dict[int, str] = {}
        """Rank -> the peer that took it, for ever."""
        self._leases = LeaseServer(
            run.agents_lease(incarnation),
            incarnation,
            on_peer=lambda peer, pid: None,
            on_lost=self._lose,
        )
        self._router = AsyncRouter(
            run.agents_endpoint(incarnation),
            incarnation,
            on_message=self._receive,
            on_bad=self._drop,
            has_lease=self._leases.__contains__,
        )
        # Last, since whoever gets a lease line may send to the router.
        self._leases.start()

    def send(self, rank: int, message: ToAgent) -> bool:
        """Send to a rank; never waits. False: it is not here, and the message is gone."""
        peer = self._peers.get(rank)
        return peer is not None and self._router.send(peer, message)

    def close(self) -> None:
        """Close every channel: the agents see the end of their lease lines. Idempotent."""
        self._router.close()
        self._leases.close()

    def snapshot(self) -> dict[str, object]:
        """Return the counters of both as plain data."""
        return {
            "agents": msgspec.to_builtins(self._router.counters),
            "leases": msgspec.to_builtins(self._leases.counters),
        }

    def _receive(self, peer: str, header: Header, message: Message) -> None:
        try:
            match message:
                case AgentHello():
                    self._join(peer, message)
                case Answer() | Headroom() | BaseMeasured():
                    rank = self._ranks.get(peer)
                    if rank is None or rank != message.rank:
                        raise RemoteProtocolError(f"{peer} answered as rank {message.rank}")
                    self._on_sent(rank, message)
                case _:
                    raise RemoteProtocolError(f"unexpected {type(message).__name__}")
        except ProtocolError as error:
            self._drop(peer, error)

    def _join(self, peer: str, hello: AgentHello) -> None:
        rank = hello.rank
        if not 0 <= rank < len(self._devices) or self._devices[rank] != hello.device:
            raise RemoteProtocolError(
                f"pid {hello.pid} greets as rank {rank} on {hello.device}; "
                f"the ranks' devices are {', '.join(self._devices)}"
            )
        if rank in self._peers:
            raise RemoteProtocolError(f"pid {hello.pid} greets as rank {rank}, which is here")
        self._ranks[peer] = rank
        self._peers[rank] = peer
        self._on_joined(hello)

    def _drop(self, peer: str, error: KvAdmitError) -> None:
        logger.error("agent %s is dropped: %s", peer, error)
        self._leases.drop(peer)
        self._lose(peer)

    def _lose(self, peer: str) -> None:
        self._router.forget(peer)
        rank = self._ranks.pop(peer, None)
        if rank is not None:
            self._on_lost(rank)

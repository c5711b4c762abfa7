"""Channels and lease lines over real sockets, on uvloop, with peers as real processes."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import zmq

from kvadmit import channel, outbox
from kvadmit.agent_channel import AgentPoller, BadPeer, BlockingDealer, LeaseLost, Received, Woken
from kvadmit.channel import AsyncDealer, AsyncRouter
from kvadmit.errors import (
    KvAdmitError,
    LocalProtocolError,
    PeerLostError,
    PeerTimeoutError,
    RemoteProtocolError,
    VersionError,
)
from kvadmit.lease import LeaseClient, LeaseLine, LeaseServer
from kvadmit.messages import (
    FRAME_BYTES_MAX,
    PROTOCOL_VERSION,
    Allowance,
    Answer,
    Bye,
    Header,
    MapGrant,
    Message,
    ReadDevice,
    Refused,
    StatusQuery,
    encode,
)
from kvadmit.rundir import RunDir, new_incarnation

WAIT_S = 20.0
PEER = Path(__file__).with_name("channel_peer.py")


pytestmark = pytest.mark.asyncio


def open_descriptors() -> set[str]:
    """Return what is open here; a socket shows its inode, so a reused number still differs."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            pass  # the descriptor of the listing itself
    return found


class Server:
    """A router with its lease lines, recording what happens; `until` waits for it."""

    def __init__(self, run: RunDir, **lease: Any) -> None:
        self.incarnation = new_incarnation("server")
        self.endpoint = run.agents_endpoint(self.incarnation)
        self.lease_path = run.agents_lease(self.incarnation)
        self.messages: list[tuple[str, Header, Message]] = []
        self.bad: list[tuple[str, KvAdmitError]] = []
        self.joined: list[tuple[str, int]] = []
        self.lost: list[str] = []
        self.reply: Callable[[str, Message], None] = lambda peer, message: None
        self._changed = asyncio.Event()
        self.leases = LeaseServer(
            self.lease_path, self.incarnation, on_peer=self._on_peer, on_lost=self._on_lost, **lease
        )
        self.router = AsyncRouter(
            self.endpoint,
            self.incarnation,
            on_message=self._on_message,
            on_bad=self._on_bad,
            has_lease=self.leases.__contains__,
        )
        self.leases.start()

    def _on_message(self, peer: str, header: Header, message: Message) -> None:
        self.messages.append((peer, header, message))
        self._changed.set()
        self.reply(peer, message)

    def _on_bad(self, peer: str, error: KvAdmitError) -> None:
        self.bad.append((peer, error))
        self.leases.drop(peer)
        self._changed.set()

    def _on_peer(self, peer: str, pid: int) -> None:
        self.joined.append((peer, pid))
        self._changed.set()

    def _on_lost(self, peer: str) -> None:
        self.lost.append(peer)
        self.router.forget(peer)
        self._changed.set()

    def part_on_bye(self, peer: str, message: Message) -> None:
        """Show a peer that its goodbye was heard: end its lease."""
        if isinstance(message, Bye):
            self.leases.drop(peer)
            self.router.forget(peer)

    def has_messages(self, count: int) -> bool:
        return len(self.messages) == count

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def close(self) -> None:
        self.router.close()
        self.leases.close()


class Agent:
    """A blocking dealer with lease and poller, used from the thread that makes it."""

    def __init__(self, endpoint: str, lease_path: str, name: str | None = None) -> None:
        self.name = name or new_incarnation("agent")
        self.lease = LeaseLine.open(lease_path, self.name)
        self.dealer = BlockingDealer(endpoint, self.name, self.lease.server)
        self.poller = AgentPoller(self.dealer, self.lease)

    def close(self) -> None:
        self.poller.close()
        self.dealer.close()
        self.lease.close()


def fail(*received: object) -> None:
    raise AssertionError(f"nothing should come here: {received}")


def grant(order: int) -> MapGrant:
    return MapGrant(order=order, kind="prepare", extents=((order, 1),))


def answer(order: int) -> Answer:
    return Answer(order=order, rank=0, kind="prepare", outcome="done", done=((order, 1),))


class Process:
    """A `channel_peer.py` beside us, and what it tells."""

    def __init__(self, server: Server) -> None:
        command = [sys.executable, str(PEER), server.endpoint, server.lease_path]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self.pid = self.process.pid

    async def told(self) -> Any:
        assert self.process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            line = await asyncio.to_thread(self.process.stdout.readline)
        assert line, "the peer ended without a word"
        return json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    made: list[Process] = []
    yield made
    for process in made:
        process.end()


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    made = Server(RunDir.open(str(tmp_path / "run")))
    yield made
    made.close()
    assert channel._contexts._users == 0, "a channel was left open"


async def test_closing_leaves_no_descriptor_open(tmp_path: Path) -> None:
    await asyncio.to_thread(lambda: None)  # the loop's own descriptors come first
    before = open_descriptors()
    server = Server(RunDir.open(str(tmp_path / "run")))
    server.reply = server.part_on_bye
    await asyncio.to_thread(run_agent_once, server.endpoint, server.lease_path, 3)
    assert len(server.messages) == 5
    assert open_descriptors() - before
    server.close()
    server.close()
    assert open_descriptors() == before


async def test_fan_out_to_four_and_back(server: Server, processes: list[Process]) -> None:
    processes += [Process(server) for _ in range(4)]
    await server.until(lambda: len(server.messages) == 4)
    peers = [peer for peer, _, _ in server.messages]
    assert sorted(peers) == sorted([await process.told() for process in processes])
    assert sorted(server.joined) == sorted((peer, pid) for peer, pid in server.leases.peers.items())
    assert sorted(pid for _, pid in server.joined) == sorted(p.pid for p in processes)
    for order in range(1, 301):
        for peer in peers:
            assert server.router.send(peer, grant(order))
    await server.until(lambda: len(server.messages) == 4 + 4 * 300)
    for peer in peers:
        answers = [(h, m) for p, h, m in server.messages if p == peer][1:]
        assert [m for _, m in answers] == [answer(order) for order in range(1, 301)]
        assert [h.sequence for h, _ in answers] == list(range(2, 302))
    counters = server.router.counters
    assert (counters.sent, counters.received) == (1200, 1204)
    assert (counters.sequence_gaps, counters.sequence_repeats, counters.bad_messages) == (0, 0, 0)
    server.close()
    for process in processes:
        assert await process.told() == list(range(1, 301))


async def test_stopped_peer_gets_newest_level_only_and_hinders_nobody(
    server: Server, processes: list[Process]
) -> None:
    processes += [Process(server) for _ in range(2)]
    await server.until(lambda: len(server.messages) == 2)
    frozen, lively = [await process.told() for process in processes]
    os.kill(processes[0].pid, signal.SIGSTOP)
    last = 20_000
    for revision in range(1, last + 1):  # more than every buffer on the way can hold
        level = Allowance(
            epoch=1, revision=revision, extents=revision, ceiling=last, reason="x" * 100
        )
        assert server.router.send(frozen, level)
    assert server.router.backlog(frozen) == 1
    assert server.router.counters.levels_replaced > 0

    began = time.monotonic()
    for order in range(1, 101):
        assert server.router.send(lively, grant(order))
    await server.until(lambda: len(server.messages) == 102)
    assert time.monotonic() - began < 5.0
    assert {peer for peer, _, _ in server.messages[2:]} == {lively}

    os.kill(processes[0].pid, signal.SIGCONT)
    seen = [await processes[0].told()]
    while seen[-1][0] != last:
        seen.append(await processes[0].told())
    assert [sequence for _, sequence in seen] == list(range(1, len(seen) + 1)), "no gap"
    revisions = [revision for revision, _ in seen]
    assert revisions == sorted(set(revisions))
    assert len(seen) < last
    assert server.lost == []
    assert server.router.backlog(frozen) == 0


async def test_queue_of_orders_is_bounded(server: Server, processes: list[Process]) -> None:
    processes.append(Process(server))
    await server.until(lambda: len(server.messages) == 1)
    peer = await processes[0].told()
    os.kill(processes[0].pid, signal.SIGSTOP)
    taken = 0
    while server.router.send(peer, grant(taken + 1)):
        taken += 1
        assert taken < 100_000
    assert server.router.backlog(peer) == outbox.QUEUE_MESSAGES_MAX
    assert server.router.counters.queue_full == 1
    os.kill(processes[0].pid, signal.SIGCONT)
    await server.until(lambda: len(server.messages) == 1 + taken)
    assert [m for _, _, m in server.messages[1:]] == [answer(n) for n in range(1, taken + 1)]


async def test_killed_peer_is_an_event_and_sends_to_it_are_refused(
    server: Server, processes: list[Process]
) -> None:
    processes.append(Process(server))
    await server.until(lambda: len(server.messages) == 1)
    peer = await processes[0].told()
    os.kill(processes[0].pid, signal.SIGKILL)
    await server.until(lambda: server.lost == [peer])
    assert peer not in server.leases
    assert not server.router.send(peer, grant(1))
    assert server.router.counters.unreachable == 1


async def test_a_new_life_has_a_new_identity(server: Server) -> None:
    loop = asyncio.get_running_loop()
    names: list[str] = []
    for _ in range(2):
        name = new_incarnation("coordinator")
        lost = asyncio.Event()
        lease = await LeaseClient.open(server.lease_path, name, lost.set)
        dealer = AsyncDealer(server.endpoint, name, lease.server, on_message=fail, on_bad=fail)
        assert lease.server == server.incarnation
        assert lease.server_pid == os.getpid()
        assert dealer.send(StatusQuery())
        await server.until(partial(server.has_messages, len(names) + 1))
        dealer.close()
        lease.close()
        await server.until(partial(server.lost.__contains__, name))
        assert not lost.is_set(), "closing is not losing"
        names.append(name)
    assert names[0] != names[1]
    assert [h.sequence for _, h, _ in server.messages] == [1, 1]
    # The same identity while its first life still holds the lease is refused.
    held = await LeaseClient.open(server.lease_path, "twin", lambda: None)
    with pytest.raises(PeerLostError, match="refused"):
        await LeaseClient.open(server.lease_path, "twin", lambda: None)
    assert server.leases.counters.refused_duplicate == 1
    held.close()
    assert loop.is_running()


async def test_send_that_swallows_the_edge_hides_no_message(server: Server) -> None:
    """A send runs the socket's pending commands, so its descriptor never fires for them."""
    peer = await RawPeer.join(server, "peer-1")
    peer.socket.send_multipart(encode(Header(PROTOCOL_VERSION, "peer-1", 1), StatusQuery()))
    await server.until(lambda: len(server.messages) == 1)
    for sequence in (2, 3, 4):
        peer.socket.send_multipart(encode(Header(PROTOCOL_VERSION, "peer-1", sequence), Bye()))
        # From here to `until` the loop does not run: only these sends touch the socket.
        descriptor = server.router._descriptor
        assert select.select([descriptor], [], [], WAIT_S)[0], "the message has arrived"
        while select.select([descriptor], [], [], 0)[0]:
            time.sleep(0.005)  # libzmq looks at its commands once per 3 million ticks at most
            assert server.router.send("peer-1", ReadDevice())
        await server.until(partial(server.has_messages, sequence))
    peer.close()


async def test_handlers_answer_over_an_async_pair(server: Server) -> None:
    def three_orders(peer: str, message: Message) -> None:
        if isinstance(message, StatusQuery):
            for order in range(3):
                server.router.send(peer, grant(order))

    server.reply = three_orders
    name = new_incarnation("coordinator")
    lease = await LeaseClient.open(server.lease_path, name, lambda: None)
    got: list[Message] = []
    done = asyncio.Event()

    def on_message(peer: str, header: Header, message: Message) -> None:
        got.append(message)
        if len(got) == 3 * 500:
            done.set()
        elif len(got) % 3 == 0:
            dealer.send(StatusQuery())
            dealer.send(Bye())

    dealer = AsyncDealer(server.endpoint, name, lease.server, on_message=on_message, on_bad=fail)
    dealer.send(StatusQuery())
    async with asyncio.timeout(WAIT_S):
        await done.wait()
    assert got == [grant(n) for n in range(3)] * 500
    dealer.close()
    lease.close()


async def test_handler_that_raises_leaves_nothing_lying(server: Server) -> None:
    loop = asyncio.get_running_loop()
    raised: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: raised.append(context["exception"]))

    def fail_once(peer: str, message: Message) -> None:
        if isinstance(message, StatusQuery):
            raise RuntimeError("handler")
        server.part_on_bye(peer, message)

    server.reply = fail_once
    agent = await asyncio.to_thread(run_agent_once, server.endpoint, server.lease_path, 5)
    assert [m for _, _, m in server.messages[1:-1]] == [answer(n) for n in range(5)]
    assert [str(error) for error in raised] == ["handler"]
    assert agent not in server.leases


def run_agent_once(endpoint: str, lease_path: str, answers: int) -> str:
    """Say hello, answer unasked, say goodbye, and go when the server has heard that."""
    agent = Agent(endpoint, lease_path)
    agent.dealer.send(StatusQuery())
    for order in range(answers):
        agent.dealer.send(answer(order))
    agent.dealer.send(Bye())
    assert agent.poller.wait(WAIT_S) == [LeaseLost(agent.lease.server)]
    agent.close()
    return agent.name


class RawPeer:
    """A peer that speaks ZeroMQ but writes what frames it likes."""

    def __init__(self, server: Server, name: str, lease: LeaseLine | None) -> None:
        self.name = name
        self.lease = lease
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, name.encode())
        self.socket.connect(server.endpoint)

    @classmethod
    async def join(cls, server: Server, name: str) -> RawPeer:
        line = await asyncio.to_thread(LeaseLine.open, server.lease_path, name)
        return cls(server, name, line)

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()
        if self.lease is not None:
            self.lease.close()


async def test_other_version_is_named_on_both_sides(server: Server) -> None:
    peer = await RawPeer.join(server, "future-1")
    header = msgspec.msgpack.encode(Header(PROTOCOL_VERSION + 6, "future-1", 1))
    peer.socket.send_multipart([header, b"\xc1 anything"])
    await server.until(lambda: bool(server.bad))
    name, error = server.bad[0]
    assert name == "future-1"
    assert isinstance(error, VersionError)
    assert "future-1" in str(error)
    assert str(PROTOCOL_VERSION + 6) in str(error)
    assert str(PROTOCOL_VERSION) in str(error)
    assert server.router.counters.version_errors == 1
    # It can still be told why.
    assert server.router.send("future-1", Refused(reason=str(error), code=error.code))
    frames = await asyncio.to_thread(peer.socket.recv_multipart)
    assert msgspec.msgpack.decode(frames[0])[0] == PROTOCOL_VERSION
    peer.close()


@pytest.mark.parametrize(
    "frames",
    [
        [b"garbage"],
        [b"garbage", b"garbage"],
        [b"", b"", b""],
        encode(Header(PROTOCOL_VERSION, "somebody-else", 1), Bye()),
        [b"h" * 4096, b""],
    ],
    ids=["one-frame", "unreadable", "three-frames", "wrong-sender", "long-header"],
)
async def test_bad_peer_is_dropped_alone(server: Server, frames: list[bytes]) -> None:
    bad = await RawPeer.join(server, "bad-1")
    good = await RawPeer.join(server, "good-1")
    good.socket.send_multipart(encode(Header(PROTOCOL_VERSION, "good-1", 1), StatusQuery()))
    bad.socket.send_multipart(frames)
    await server.until(lambda: bool(server.bad) and bool(server.messages))
    assert [name for name, _ in server.bad] == ["bad-1"]
    assert isinstance(server.bad[0][1], RemoteProtocolError)
    assert bad.lease is not None
    assert good.lease is not None
    assert "bad-1" not in server.leases
    assert "good-1" in server.leases
    # What it sends now is not read; the good one is.
    bad.socket.send_multipart(encode(Header(PROTOCOL_VERSION, "bad-1", 2), Bye()))
    good.socket.send_multipart(encode(Header(PROTOCOL_VERSION, "good-1", 2), Bye()))
    await server.until(lambda: len(server.messages) == 2)
    assert [(p, h.sequence) for p, h, _ in server.messages] == [("good-1", 1), ("good-1", 2)]
    assert server.router.counters.bad_messages == 1
    bad.close()
    good.close()


async def test_oversized_frame_and_noise_drop_only_that_connection(server: Server) -> None:
    big = await RawPeer.join(server, "big-1")
    good = await RawPeer.join(server, "good-1")
    big.socket.setsockopt(zmq.RECONNECT_IVL, -1)
    watch = big.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    header = msgspec.msgpack.encode(Header(PROTOCOL_VERSION, "big-1", 1))
    big.socket.send_multipart([header, b"b" * (FRAME_BYTES_MAX + 1)])
    assert await asyncio.to_thread(watch.poll, int(WAIT_S * 1000)), "libzmq cuts it off"
    big.socket.disable_monitor()
    watch.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as noise:
        noise.connect(server.endpoint.removeprefix("ipc://"))
        noise.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        good.socket.send_multipart(encode(Header(PROTOCOL_VERSION, "good-1", 1), Bye()))
        await server.until(lambda: bool(server.messages))
    assert [p for p, _, _ in server.messages] == ["good-1"]
    assert server.bad == []
    big.close()
    good.close()


async def test_gaps_and_repeats_are_counted_and_delivered(server: Server) -> None:
    peer = await RawPeer.join(server, "skips-1")
    for sequence in (1, 4, 4, 2, 5):
        peer.socket.send_multipart(encode(Header(PROTOCOL_VERSION, "skips-1", sequence), Bye()))
    await server.until(lambda: len(server.messages) == 5)
    counters = server.router.counters
    assert (counters.sequence_gaps, counters.sequence_repeats) == (2, 2)
    peer.close()


async def test_sender_without_lease_is_not_heard(server: Server) -> None:
    stranger = RawPeer(server, "stranger", None)
    stranger.socket.send_multipart(encode(Header(PROTOCOL_VERSION, "stranger", 1), Bye()))
    async with asyncio.timeout(WAIT_S):
        while not server.router.counters.without_lease:
            await asyncio.sleep(0.005)  # nothing calls back for it, by design
    assert server.messages == []
    assert not server.router.send("stranger", ReadDevice())
    stranger.close()


async def test_too_large_message_is_refused_to_its_sender(server: Server) -> None:
    peer = await RawPeer.join(server, "peer-1")
    peer.socket.send_multipart(encode(Header(PROTOCOL_VERSION, "peer-1", 1), StatusQuery()))
    await server.until(lambda: bool(server.messages))
    with pytest.raises(LocalProtocolError, match="Refused of"):
        server.router.send("peer-1", Refused(reason="x" * (FRAME_BYTES_MAX + 1)))
    assert server.router.send("peer-1", ReadDevice())
    frames = await asyncio.to_thread(peer.socket.recv_multipart)
    assert msgspec.msgpack.decode(frames[0])[2] == 1, "the refused one took no number"
    peer.close()


# --- lease lines ---------------------------------------------------------------------------


async def test_silent_client_delays_nobody_and_is_dropped(tmp_path: Path) -> None:
    server = Server(RunDir.open(str(tmp_path / "run")), hello_wait_s=0.3)
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    silent.connect(server.lease_path)
    lease = await LeaseClient.open(server.lease_path, "prompt", lambda: None, timeout_s=0.25)
    assert "prompt" in server.leases
    silent.settimeout(WAIT_S)
    assert await asyncio.to_thread(silent.recv, 1) == b""
    assert server.leases.counters.refused_silent == 1
    assert server.lost == [], "it never was a peer"
    silent.close()
    lease.close()
    server.close()


@pytest.mark.parametrize("line", [b"\n", b"two words\n", b"x" * 100, b"a\nb\n", b"../up\n"])
async def test_malformed_line_is_refused(server: Server, line: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.connect(server.lease_path)
        stream.send(line)
        stream.settimeout(WAIT_S)
        try:
            assert await asyncio.to_thread(stream.recv, 1) == b""
        except ConnectionResetError:
            pass  # closed with part of the line unread
    assert server.leases.counters.refused_line == 1
    assert server.joined == []


async def test_line_in_pieces_is_taken_and_noise_afterwards_ends_the_lease(server: Server) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.connect(server.lease_path)
        stream.settimeout(WAIT_S)
        stream.send(b"slow-")
        await asyncio.sleep(0)
        stream.send(b"one\n")
        answer_line = await asyncio.to_thread(stream.recv, 100)
        assert answer_line == server.incarnation.encode() + b"\n"
        stream.send(b"hello?")
        await server.until(lambda: server.lost == ["slow-one"])
    assert server.leases.counters.broke_silence == 1


async def test_other_uid_is_refused(tmp_path: Path) -> None:
    server = Server(RunDir.open(str(tmp_path / "run")), uid=os.getuid() + 1)
    with pytest.raises(PeerLostError):
        await LeaseClient.open(server.lease_path, "foreign", lambda: None)
    assert server.leases.counters.refused_uid == 1
    assert server.joined == []
    server.close()


async def test_frozen_and_absent_servers_are_told_apart(tmp_path: Path) -> None:
    path = str(tmp_path / "lease")
    with pytest.raises(PeerLostError, match="connect"):
        await LeaseClient.open(path, "a", lambda: None)
    with pytest.raises(PeerLostError, match="connect"):
        LeaseLine.open(path, "a")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as frozen:
        frozen.bind(path)
        frozen.listen(0)
        for _ in range(2):  # the second finds the backlog full
            with pytest.raises(PeerTimeoutError):
                await LeaseClient.open(path, "a", lambda: None, timeout_s=0.1)
            with pytest.raises(PeerTimeoutError):
                await asyncio.to_thread(LeaseLine.open, path, "a", timeout_s=0.1)


async def test_lease_client_hears_the_server_end(server: Server) -> None:
    lost = asyncio.Event()
    await LeaseClient.open(server.lease_path, "client", lost.set)
    server.close()
    async with asyncio.timeout(WAIT_S):
        await lost.wait()


# --- the agent's thread ----------------------------------------------------------------------


async def test_agent_poller_reports_wakes_messages_and_loss(server: Server) -> None:
    seen: list[object] = []
    agents: list[Agent] = []
    ready = threading.Event()

    def body() -> None:
        agent = Agent(server.endpoint, server.lease_path)
        agents.append(agent)
        assert agent.poller.wait(0.0) == []
        agent.dealer.send(StatusQuery())
        ready.set()
        while not any(isinstance(item, LeaseLost) for item in seen):
            seen.extend(agent.poller.wait(WAIT_S))
        assert agent.poller.wait(0.0) == [], "a loss is reported once"
        agent.close()
        agent.poller.wake()  # after close: nothing

    thread = asyncio.create_task(asyncio.to_thread(body))
    await server.until(lambda: len(server.messages) == 1)
    agents[0].poller.wake()
    agents[0].poller.wake()
    peer = agents[0].name
    server.router.send(peer, grant(1))
    while len(seen) < 2:
        await asyncio.sleep(0.002)
    server.close()
    await asyncio.wait_for(thread, WAIT_S)
    kinds = [type(item) for item in seen]
    assert kinds.count(Received) == 1
    assert kinds[-1] is LeaseLost
    assert 1 <= kinds.count(Woken) <= 2
    assert seen[-1] == LeaseLost(server.incarnation)


async def test_agent_drops_a_bad_server(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    leases = LeaseServer(
        str(tmp_path / "l"), "server", on_peer=lambda *_: None, on_lost=lambda *_: None
    )
    leases.start()
    # Opened from a thread: the lease server answers on this one.
    lease = await asyncio.to_thread(LeaseLine.open, str(tmp_path / "l"), "agent")
    dealer = BlockingDealer(endpoint, "agent", lease.server)
    poller = AgentPoller(dealer, lease)
    dealer.send(StatusQuery())
    identity = (await asyncio.to_thread(router.recv_multipart))[0]
    router.send_multipart([identity, *encode(Header(9, "server", 1), Bye())])
    (bad,) = poller.wait(WAIT_S)
    assert isinstance(bad, BadPeer)
    assert isinstance(bad.error, VersionError)
    router.send_multipart([identity, *encode(Header(PROTOCOL_VERSION, "server", 2), ReadDevice())])
    assert poller.wait(WAIT_S) == []
    assert dealer.counters.from_dropped == 1
    poller.close()
    dealer.close()
    lease.close()
    leases.close()
    router.close(0)
    context.term()


async def test_other_thread_is_refused(server: Server) -> None:
    with pytest.raises(AssertionError, match="one owner thread"):
        await asyncio.to_thread(server.router.send, "anybody", Bye())


# --- fork ----------------------------------------------------------------------------------


async def test_forked_child_cannot_use_the_channel_nor_keep_leases_open(server: Server) -> None:
    client = await LeaseClient.open(server.lease_path, "forking", lambda: None)
    await server.until(lambda: "forking" in server.leases)
    streams = [server.leases._listener, client._line]
    streams += [peer.stream for peer in server.leases._peers.values()]
    lines = {os.readlink(f"/proc/self/fd/{s.fileno()}") for s in streams if s is not None}
    assert len(lines) == 3
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            verdicts = []
            try:
                server.router.send("anybody", Bye())
            except LocalProtocolError as error:
                verdicts.append("fork" in str(error))
            server.router.close()  # harmless
            verdicts.append(not lines & open_descriptors())
            fresh = channel._contexts.acquire()  # a new context, not the parent's
            fresh.socket(zmq.DEALER).close(0)
            channel._contexts.release()
            verdicts.append(fresh.closed)
            os.write(write, repr(verdicts).encode())
            signal.pause()
        finally:
            os._exit(0)
    try:
        told = await asyncio.to_thread(os.read, read, 100)
        assert told == b"[True, True, True]"
        # The child lives and holds copies of nothing: closing here is seen over there.
        client.close()
        await server.until(lambda: server.lost == ["forking"])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)

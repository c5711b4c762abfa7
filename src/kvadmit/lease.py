"""Lease lines: the plain unix stream beside each channel whose EOF ends a peer's lease.

Owns: opening, checking and watching these streams. Must not know: what a lost lease means.

ZeroMQ reports no EOF, so a peer first connects here: it sends one line, its incarnation,
and gets one line back, the server's; from then on both are silent. The kernel closes the
stream however a process ends; a frozen process keeps it. EOF says "no more messages", not
"its memory is free". The peer's uid is the kernel's word (SO_PEERCRED), not the peer's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import struct
import time
from collections.abc import Callable

import msgspec

from kvadmit.descriptors import close_after_fork
from kvadmit.errors import PeerLostError, PeerTimeoutError, RemoteProtocolError

LINE_BYTES_MAX = 64
HELLO_WAIT_S = 2.0
"""How long a peer may take for its line. It is sent at once; this only bounds the silent."""

PENDING_MAX = 256
"""Connections without a line so far; the newest beyond are refused."""

_LINE = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\n")
_CREDENTIALS = struct.Struct("iII")


class LeaseCounters(msgspec.Struct):
    """What a lease server refused, and why. Written by its loop only."""

    opened: int = 0
    lost: int = 0
    refused_uid: int = 0
    refused_line: int = 0
    refused_silent: int = 0
    refused_duplicate: int = 0
    refused_full: int = 0
    broke_silence: int = 0
    accept_errors: int = 0


def peer_credentials(stream: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the process that made the other end, as the kernel knows them."""
    raw = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def _line_of(incarnation: str) -> bytes:
    line = incarnation.encode() + b"\n"
    assert _LINE.fullmatch(line), f"not an incarnation: {incarnation!r}"
    return line


class _Stream:
    """One accepted connection; `incarnation` is "" until its line has come."""

    __slots__ = ("deadline", "incarnation", "line", "pid", "stream")

    def __init__(self, stream: socket.socket, pid: int) -> None:
        self.stream = stream
        self.pid = pid
        self.line = b""
        self.incarnation = ""
        self.deadline: asyncio.TimerHandle | None = None


class LeaseServer:
    """Accept lease lines at `path` on the running asyncio loop.

    `on_peer(incarnation, pid)` runs before the peer gets its answer, so before its first
    message can be under way; `on_lost(incarnation)` once for each of those, unless we
    dropped it ourselves. All on the loop's thread.
    """

    def __init__(
        self,
        path: str,
        incarnation: str,
        *,
        on_peer: Callable[[str, int], None],
        on_lost: Callable[[str], None],
        hello_wait_s: float = HELLO_WAIT_S,
        uid: int | None = None,
    ) -> None:
        self.path = path
        self.counters = LeaseCounters()
        self._line = _line_of(incarnation)
        self._on_peer = on_peer
        self._on_lost = on_lost
        self._hello_wait_s = hello_wait_s
        self._uid = os.getuid() if uid is None else uid
        self._loop = asyncio.get_running_loop()
        self._peers: dict[str, _Stream] = {}
        self._pending: set[_Stream] = set()
        self._listener: socket.socket | None = None
        self._paused: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Bind and listen. Raises OSError if the name is taken."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(self.path)
            listener.listen(PENDING_MAX)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        close_after_fork(self)
        self._loop.add_reader(listener.fileno(), self._accept)

    def __contains__(self, incarnation: object) -> bool:
        return incarnation in self._peers

    @property
    def peers(self) -> dict[str, int]:
        """Incarnation -> pid of every peer that holds a lease."""
        return {name: peer.pid for name, peer in self._peers.items()}

    def drop(self, incarnation: str) -> None:
        """Close a peer's lease line: it sees EOF. `on_lost` is not called. Idempotent."""
        peer = self._peers.get(incarnation)
        if peer is not None:
            self._forget(peer)

    def close(self) -> None:
        """Close every line and the listening socket, and remove its file. Idempotent."""
        if self._listener is None:
            return
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener = None
        for peer in [*self._pending, *self._peers.values()]:
            self._forget(peer)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def close_inherited(self) -> None:
        for holder in (
            self._listener,
            *(p.stream for p in (*self._pending, *self._peers.values())),
        ):
            if holder is not None:
                holder.close()

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                stream, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError:
                # Out of descriptors: the connection stays pending and the loop would spin.
                self.counters.accept_errors += 1
                self._loop.remove_reader(self._listener.fileno())
                self._paused = self._loop.call_later(0.1, self._resume)
                return
            self._admit(stream)

    def _resume(self) -> None:
        self._paused = None
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _admit(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        pid, uid = peer_credentials(stream)
        if uid != self._uid:
            self.counters.refused_uid += 1
            stream.close()
            return
        if len(self._pending) >= PENDING_MAX:
            self.counters.refused_full += 1
            stream.close()
            return
        peer = _Stream(stream, pid)
        self._pending.add(peer)
        peer.deadline = self._loop.call_later(self._hello_wait_s, self._expire, peer)
        self._loop.add_reader(stream.fileno(), self._read, peer)

    def _expire(self, peer: _Stream) -> None:
        self.counters.refused_silent += 1
        self._forget(peer)

    def _read(self, peer: _Stream) -> None:
        try:
            data = peer.stream.recv(LINE_BYTES_MAX + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if peer.incarnation:
            if data:
                self.counters.broke_silence += 1
            self._lose(peer)
        elif not data:
            self._forget(peer)
        else:
            self._read_line(peer, data)

    def _read_line(self, peer: _Stream, data: bytes) -> None:
        peer.line += data
        if b"\n" not in data and len(peer.line) < LINE_BYTES_MAX:
            return
        if not _LINE.fullmatch(peer.line):
            self.counters.refused_line += 1
            self._forget(peer)
            return
        name = peer.line[:-1].decode()
        if name in self._peers:
            self.counters.refused_duplicate += 1
            self._forget(peer)
            return
        assert peer.deadline is not None
        peer.deadline.cancel()
        self._pending.discard(peer)
        peer.incarnation = name
        self._peers[name] = peer
        self.counters.opened += 1
        self._on_peer(name, peer.pid)
        try:
            peer.stream.send(self._line)  # 64 bytes into an empty buffer: never short
        except OSError:
            self._lose(peer)

    def _lose(self, peer: _Stream) -> None:
        if self._peers.get(peer.incarnation) is peer:
            self.counters.lost += 1
            self._forget(peer)
            self._on_lost(peer.incarnation)

    def _forget(self, peer: _Stream) -> None:
        if peer.deadline is not None:
            peer.deadline.cancel()
        self._pending.discard(peer)
        if self._peers.get(peer.incarnation) is peer:
            del self._peers[peer.incarnation]
        if peer.stream.fileno() >= 0:
            self._loop.remove_reader(peer.stream.fileno())
            peer.stream.close()


class LeaseLine:
    """The client's end of an open lease line: a descriptor for a poller, no thread of its own.

    `server` is the other side's incarnation, `server_pid` the process that listens there.
    """

    def __init__(self, stream: socket.socket, server: str) -> None:
        self._stream = stream
        self.server = server
        self.server_pid = peer_credentials(stream)[0]
        close_after_fork(self)

    @classmethod
    def open(cls, path: str, incarnation: str, *, timeout_s: float = HELLO_WAIT_S) -> LeaseLine:
        """Open a lease at `path`, waiting at most `timeout_s`; for threads without a loop.

        Raises PeerLostError when nobody listens or we were refused, PeerTimeoutError when
        the server does not answer (frozen), RemoteProtocolError for an impostor.
        """
        deadline = time.monotonic() + timeout_s
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            while not _connect(stream, path):
                if time.monotonic() >= deadline:
                    raise PeerTimeoutError(path, "connect lease line", timeout_s)
                time.sleep(0.01)  # its backlog is full; the kernel signals no end of that
            _greet(stream, path, incarnation)
            answer = b""
            while not answer.endswith(b"\n"):
                stream.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    data = stream.recv(LINE_BYTES_MAX)
                except TimeoutError as error:
                    raise PeerTimeoutError(path, "answer lease line", timeout_s) from error
                except OSError as error:
                    raise PeerLostError(path, "answer lease line") from error
                answer = _extend(answer, data, path)
            stream.setblocking(False)
            return cls(stream, _server_of(answer, path))
        except BaseException:
            stream.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor that turns readable when the lease ends."""
        return self._stream.fileno()

    def is_lost(self) -> bool:
        """Say whether the server is gone (or broke the silence). Never waits."""
        try:
            self._stream.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        """End the lease: the server sees EOF. Idempotent."""
        self._stream.close()

    def close_inherited(self) -> None:
        self._stream.close()


class LeaseClient:
    """An open lease line watched by the running asyncio loop.

    `on_lost()` runs once, on the loop's thread, when the server's end closes; never after
    `close`.
    """

    def __init__(self, line: LeaseLine, on_lost: Callable[[], None]) -> None:
        self.server = line.server
        self.server_pid = line.server_pid
        self._line = line
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(line.fileno(), self._read)

    @classmethod
    async def open(
        cls,
        path: str,
        incarnation: str,
        on_lost: Callable[[], None],
        *,
        timeout_s: float = HELLO_WAIT_S,
    ) -> LeaseClient:
        """Open a lease at `path` without blocking the loop. Raises as `LeaseLine.open`."""
        loop = asyncio.get_running_loop()
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            async with asyncio.timeout(timeout_s):
                while not _connect(stream, path):
                    await asyncio.sleep(0.01)
                _greet(stream, path, incarnation)
                answer = b""
                while not answer.endswith(b"\n"):
                    try:
                        data = await loop.sock_recv(stream, LINE_BYTES_MAX)
                    except OSError as error:
                        raise PeerLostError(path, "answer lease line") from error
                    answer = _extend(answer, data, path)
            return cls(LeaseLine(stream, _server_of(answer, path)), on_lost)
        except TimeoutError as error:
            stream.close()
            raise PeerTimeoutError(path, "answer lease line", timeout_s) from error
        except BaseException:
            stream.close()
            raise

    def _read(self) -> None:
        if self._line.is_lost():
            self.close()
            self._on_lost()

    def close(self) -> None:
        """End the lease: the server sees EOF. Idempotent."""
        if self._line.fileno() >= 0:
            self._loop.remove_reader(self._line.fileno())
            self._line.close()


def _connect(stream: socket.socket, path: str) -> bool:
    """Try to connect; False while the server's backlog is full (EAGAIN, never EINPROGRESS)."""
    stream.setblocking(False)
    try:
        stream.connect(path)
    except BlockingIOError:
        return False
    except OSError as error:
        raise PeerLostError(path, f"connect lease line: {error.strerror}") from error
    return True


def _greet(stream: socket.socket, path: str, incarnation: str) -> None:
    uid = peer_credentials(stream)[1]
    if uid != os.getuid():
        raise RemoteProtocolError(f"{path} is served by uid {uid}, this process is {os.getuid()}")
    try:
        stream.send(_line_of(incarnation))  # 64 bytes into an empty buffer: never short
    except OSError as error:
        raise PeerLostError(path, "open lease line") from error


def _extend(answer: bytes, data: bytes, path: str) -> bytes:
    if not data:
        raise PeerLostError(path, "refused the lease line")
    if len(answer) + len(data) > LINE_BYTES_MAX:
        raise RemoteProtocolError(f"{path} answered the lease line with more than one line")
    return answer + data


def _server_of(answer: bytes, path: str) -> str:
    if not _LINE.fullmatch(answer):
        raise RemoteProtocolError(f"{path} answered the lease line with {answer!r}")
    return answer[:-1].decode()

"""The host pool between real processes: one budget, whoever lives or dies."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvadmit import host_pool
from kvadmit.errors import CapacityError, ConfigError, DriverError, LocalProtocolError
from kvadmit.host_pool import HostPool

MIB = 1 << 20

MEMBER = """
import sys
from kvadmit.host_pool import HostPool
pool = HostPool(sys.argv[1], int(sys.argv[2]))
print("ready", flush=True)
for line in sys.stdin:
    call, count = line.split()
    print(getattr(pool, call)(int(count)), flush=True)
"""

RACER = """
import itertools, sys
from kvadmit.host_pool import HostPool
path, total, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
pool = HostPool(path, total)
worst, won = total, 0
for turn in itertools.count():
    if turn >= rounds and won:
        break
    if pool.try_book(total * 2 // 3):
        won += 1
        worst = min(worst, pool.free_bytes())
        pool.unbook(total * 2 // 3)
    if turn % 500 == 499:  # leave and come back: slots change hands under way
        pool.close()
        pool = HostPool(path, total)
print(worst, won)
"""


class Member:
    """A process with an account in the pool, told what to do line by line."""

    def __init__(self, path: Path, total_bytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(path), str(total_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready"

    def call(self, name: str, count: int) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name} {count}\n")
        self.process.stdin.flush()
        return self._read()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "host_pool"


@pytest.fixture
def pool(path: Path) -> Iterator[HostPool]:
    pool = HostPool(path, 10 * MIB)
    yield pool
    pool.close()


@pytest.fixture
def member(pool: HostPool) -> Iterator[Member]:
    member = Member(pool.path, pool.total_bytes)
    yield member
    member.kill()


def test_booking_is_shared_between_processes(pool: HostPool, member: Member) -> None:
    assert member.call("try_book", 6 * MIB) == "True"
    assert pool.free_bytes() == 4 * MIB
    assert not pool.try_book(5 * MIB)
    assert pool.booked_bytes == 0
    assert pool.try_book(4 * MIB)
    assert pool.holders() == [(os.getpid(), 4 * MIB), (member.process.pid, 6 * MIB)]
    assert member.call("try_book", 1) == "False"
    assert member.call("unbook", 2 * MIB) == "None"
    assert pool.free_bytes() == 2 * MIB


def test_the_bytes_of_a_killed_process_return(pool: HostPool, member: Member) -> None:
    assert member.call("try_book", 8 * MIB) == "True"
    assert not pool.try_book(3 * MIB)
    os.kill(member.process.pid, signal.SIGKILL)
    member.process.wait()
    assert pool.free_bytes() == 10 * MIB
    assert pool.try_book(10 * MIB)


def test_a_stopped_process_keeps_its_bytes(pool: HostPool, member: Member) -> None:
    member.call("try_book", 8 * MIB)
    os.kill(member.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, member.process.pid, os.WSTOPPED | os.WNOWAIT)
    assert pool.free_bytes() == 2 * MIB
    assert not pool.try_book(3 * MIB)
    assert pool.try_book(2 * MIB)


def test_slots_of_killed_processes_are_used_again(
    pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pool, "SLOTS", 2)
    for _ in range(3):
        member = Member(pool.path, pool.total_bytes)
        assert member.call("try_book", MIB) == "True"
        member.kill()
    other = HostPool(pool.path, pool.total_bytes)
    with pytest.raises(CapacityError, match="all 2 places"):
        HostPool(pool.path, pool.total_bytes)
    other.close()


def test_racing_processes_never_exceed_the_pool(path: Path) -> None:
    """Three processes want two thirds each: one at a time, and all of them get turns."""
    total = 9 * MIB
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(path), str(total), "5000"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    try:
        for racer in racers:  # each goes on until it has had its turn
            worst, won = map(int, racer.communicate(timeout=120)[0].split())
            assert worst >= 0
            assert won > 0
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    last = HostPool(path, total)
    assert last.free_bytes() == total
    last.close()


def test_threads_of_one_process_share_an_account(pool: HostPool) -> None:
    def book() -> None:
        for _ in range(100):
            if pool.try_book(3 * MIB):
                pool.unbook(3 * MIB)

    threads = [threading.Thread(target=book) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.free_bytes() == pool.total_bytes


def test_another_total_is_refused_while_the_pool_is_used(pool: HostPool) -> None:
    with pytest.raises(ConfigError) as refusal:
        HostPool(pool.path, 11 * MIB)
    assert refusal.value.key == "host_pool"
    assert "10MiB" in refusal.value.allowed
    assert "11MiB" in str(refusal.value.given)
    assert pool.try_book(10 * MIB)


def test_a_pool_nobody_uses_may_change_its_total(path: Path, pool: HostPool) -> None:
    pool.try_book(MIB)
    pool.close()
    pool.close()
    larger = HostPool(path, 20 * MIB)
    assert larger.free_bytes() == 20 * MIB
    larger.close()


def test_a_file_of_something_else_is_started_anew(path: Path) -> None:
    path.write_bytes(b"something else, left by nobody alive")
    pool = HostPool(path, MIB)
    assert pool.free_bytes() == MIB
    pool.close()


def test_removing_the_file_does_not_disturb_its_users(pool: HostPool, member: Member) -> None:
    member.call("try_book", 8 * MIB)
    pool.path.unlink()
    assert pool.free_bytes() == 2 * MIB
    assert not pool.try_book(3 * MIB)
    member.kill()
    assert pool.try_book(10 * MIB)


def test_a_lock_that_never_comes_free_is_a_named_error(
    pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pool, "LOCK_WAIT_S", 0.05)
    holder = os.open(pool.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        request = host_pool._FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        fcntl.fcntl(holder, fcntl.F_OFD_SETLK, request)
        with pytest.raises(DriverError, match="stayed locked"):
            pool.try_book(1)
    finally:
        os.close(holder)
    assert pool.try_book(1)


def test_a_forked_child_does_not_keep_the_account_alive(path: Path) -> None:
    """The child of a dead holder lives on; the holder's bytes are free all the same."""
    script = f"""
import os, sys
from kvadmit.host_pool import HostPool
pool = HostPool({str(path)!r}, {10 * MIB})
pool.try_book({8 * MIB})
if os.fork() == 0:
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
os.kill(os.getpid(), 9)
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert int(holder.stdout.readline()) != holder.pid
    assert holder.wait(30) == -signal.SIGKILL
    pool = HostPool(path, 10 * MIB)
    assert pool.free_bytes() == 10 * MIB
    pool.close()
    holder.communicate()  # closes the child's input, which ends it


def test_more_than_booked_cannot_be_given_back(pool: HostPool) -> None:
    pool.try_book(5)
    with pytest.raises(LocalProtocolError, match="6 bytes"):
        pool.unbook(6)
    assert pool.booked_bytes == 5


def test_a_closed_pool_refuses(path: Path) -> None:
    pool = HostPool(path, MIB)
    pool.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        pool.try_book(1)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="ENOENT"):
        HostPool(tmp_path / "missing" / "host_pool", MIB)

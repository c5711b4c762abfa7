"""The coordinator with real agents, a real arbiter and real host memory."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.cluster import (
    POOL_EXTENTS,
    WAIT_S,
    Engine,
    arbiter_pid,
    make_plan,
    running,
    wait_until,
)
from kvadmit import coordinator
from kvadmit.config import Settings
from kvadmit.errors import (
    CapacityError,
    ConfigError,
    LocalProtocolError,
    PeerLostError,
    PeerTimeoutError,
)
from kvadmit.processes import is_stopped


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_instance_grows_and_shrinks(run_dir: Path, ranks: int) -> None:
    engine = Engine(run_dir, "alpha", ranks=ranks)
    each = POOL_EXTENTS // ranks
    with running(engine):
        for total in (5, each):
            engine.pool.use(total)
            engine.pool.wait_resident(total)
        engine.pool.rest()
        engine.wait_held(1)
        for rank in engine.ranks:
            assert rank.pool.booked_bytes == rank.space.layout.extent_bytes
        counters = engine.counters
        assert counters["growths"] >= 2
        quiet = ("allocation_misses", "headroom_rejections", "timer_probes")
        assert [counters[name] for name in quiet] == [0, 0, 0]


def test_a_need_above_the_pool_waits_and_harms_nobody(run_dir: Path) -> None:
    engine = Engine(run_dir, "alpha", plan=make_plan(extents=2 * POOL_EXTENTS))
    with running(engine):
        engine.pool.wait_for(lambda: engine.pool.ceiling == POOL_EXTENTS, "told its ceiling")
        engine.pool.use(POOL_EXTENTS)
        engine.pool.wait_resident(POOL_EXTENTS)
        assert engine.counters["headroom_rejections"] == 0


def test_stop_leaves_no_file_and_may_be_repeated(run_dir: Path) -> None:
    engine = Engine(run_dir, "alpha")
    engine.stop()  # never started
    with running(engine):
        assert list(run_dir.glob("i-*"))
    engine.stop()
    assert not list(run_dir.glob("i-*"))
    assert engine.coordinator.status()["name"] == "alpha"


def test_calls_before_start_or_after_stop_are_errors(run_dir: Path) -> None:
    engine = Engine(run_dir, "alpha")
    with pytest.raises(LocalProtocolError, match="does not run"):
        engine.coordinator.request_start({})
    with running(engine):
        pass
    with pytest.raises(LocalProtocolError, match="does not run"):
        engine.coordinator.set_geometry(engine.plan)


def test_missing_ranks_are_named(run_dir: Path) -> None:
    engine = Engine(run_dir, "alpha", ranks=3, start_wait_s=1.0)
    try:
        engine.greet()
        engine.add_rank(1)
        with pytest.raises(PeerTimeoutError, match="no hello from rank 0, 2"):
            engine.coordinator.wait_ready()
    finally:
        engine.stop()


def test_a_rank_that_ends_before_all_are_ready_ends_the_wait(run_dir: Path) -> None:
    engine = Engine(run_dir, "alpha", ranks=2)
    try:
        engine.greet()
        engine.add_rank(0)
        wait_until(lambda: engine.group["joined"] == [0], "rank 0 is here")
        engine.ranks[0].agent.stop()
        with pytest.raises(PeerLostError, match="rank 0 closed its lease line"):
            engine.coordinator.wait_ready()
        assert engine.lost.wait(WAIT_S)
    finally:
        engine.stop()


def test_a_second_agent_of_a_rank_is_sent_away(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(run_dir, "alpha", ranks=2)
    try:
        engine.greet()
        engine.add_rank(0)
        wait_until(lambda: engine.group["joined"] == [0], "rank 0 is here")
        engine.add_rank(0)
        wait_until(lambda: "greets as rank 0, which is here" in caplog.text, "it is told off")
        assert engine.group["joined"] == [0]
        assert not engine.lost.is_set()
    finally:
        engine.stop()


def test_another_pool_size_is_refused(run_dir: Path) -> None:
    with running(Engine(run_dir, "alpha")):
        other = Engine(run_dir, "beta", host_pool=1 << 20)
        with pytest.raises(CapacityError, match="give all the same host_pool"):
            other.start()


def test_a_bad_run_directory_is_refused(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o755)
    run_dir.chmod(0o755)
    try:
        with pytest.raises(ConfigError, match="chmod 700"):
            Engine(run_dir, "alpha").start()
    finally:
        run_dir.chmod(0o700)


def test_status_is_plain_data_and_may_be_asked_from_any_thread(run_dir: Path) -> None:
    engine = Engine(run_dir, "alpha")
    with running(engine):
        texts: list[str] = []

        def ask() -> None:
            texts.extend(json.dumps(engine.coordinator.status()) for _ in range(20))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        engine.pool.use(9)
        engine.pool.wait_resident(9)
        for thread in threads:
            thread.join()
        assert len(texts) == 80
        status = engine.coordinator.status()
        histograms = status["histograms"]
        assert isinstance(histograms, dict)
        assert histograms["grow_latency_s"]["count"] >= 1
        assert 0 < histograms["grow_latency_s"]["p50"] <= histograms["grow_latency_s"]["p99"]
        assert histograms["grant_wait_s"]["count"] >= 1
        for call in ("prepare_call_s", "commit_call_s"):
            assert 0 < histograms[call]["p50"] <= histograms["grow_latency_s"]["p99"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


def test_the_death_of_the_front_end_is_seen(
    run_dir: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    engine = Engine(run_dir, "alpha")
    died = threading.Event()
    with running(engine):
        engine.coordinator.watch_parent(sleeper.pid, died.set)
        engine.held  # noqa: B018  # a round trip: the watch is in place
        assert not died.is_set()
        sleeper.kill()
        assert died.wait(WAIT_S)


def test_a_front_end_that_is_dead_already_is_seen(
    run_dir: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    sleeper.kill()
    sleeper.wait()
    engine = Engine(run_dir, "alpha")
    died = threading.Event()
    with running(engine):
        engine.coordinator.watch_parent(sleeper.pid, died.set)
        assert died.wait(WAIT_S)


def test_a_stopped_arbiter_is_named(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(run_dir, "alpha")
    with running(engine):
        pid = arbiter_pid(run_dir)
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: is_stopped(pid), "stopped")
            arbiter = engine.coordinator.status()["arbiter"]
            assert isinstance(arbiter, dict)
            assert (arbiter["pid"], arbiter["stopped"]) == (pid, True)
            monkeypatch.setattr(coordinator, "FIND_WAIT_S", 2.5)
            with pytest.raises(PeerTimeoutError, match="answer lease line"):
                Engine(run_dir, "beta").start()
            # What is resident serves on, and growth goes on where it stopped.
            engine.pool.use(7)
        finally:
            os.kill(pid, signal.SIGCONT)
        engine.pool.wait_resident(7)


def test_losing_the_loop_ends_the_engine_loudly(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(run_dir, "alpha")
    with running(engine), caplog.at_level(logging.CRITICAL):
        engine.coordinator._call_soon(lambda: 1 / 0)
        assert engine.lost.wait(WAIT_S)
        assert "division by zero" in engine.lost_reason
        assert "coordinator failed" in caplog.text
    assert len((run_dir / "failed-coordinator.trace").read_bytes().splitlines()) > 3


def test_the_defaults_name_a_run_directory() -> None:
    assert Settings.parse({}).run_dir.startswith("/")

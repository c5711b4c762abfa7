"""The sync policy: one call to all ranks, all or nothing, whole extents given back at once."""

from __future__ import annotations

import inspect
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from bench.colocated import status
from bench.colocated.sim_requests import SimBlock
from bench.colocated.sync_policy.agent import SyncAgent
from bench.colocated.sync_policy.caller import Caller
from bench.colocated.sync_policy.growth import SyncGrowth
from bench.colocated.sync_policy.wire import Joined, Kind, Order, Reply, receive, send

from kvadmit.agent import Agent
from kvadmit.config import Settings
from kvadmit.coordinator import Coordinator
from kvadmit.errors import PeerLostError
from kvadmit.pool import ElasticPool
from kvadmit.vmm import ExtentLayout, Strip
from kvadmit.vmm_host import HostAddressSpace, HostPool

EXTENT_BYTES = 1 << 14
LAYOUT = ExtentLayout(16 * EXTENT_BYTES, 16, 2, (Strip(0, EXTENT_BYTES // 2),))


class FakeCaller:
    """Notes calls; refuses growth on `refusing` ranks."""

    def __init__(self, ranks: int = 2) -> None:
        self.calls: list[tuple[str, tuple[int, ...], tuple[int, ...] | int]] = []
        self.refusing: set[int] = set()
        self.describe: Any = None
        self._ranks = ranks

    def call(self, kind: Kind, extents: Sequence[int], fence: int = 0) -> list[Reply]:
        self.calls.append((kind, tuple(extents), fence))
        return [
            Reply(number=1, rank=rank, done=kind != "grow" or rank not in self.refusing)
            for rank in range(self._ranks)
        ]

    def call_some(self, ranks: Sequence[int], kind: Kind, extents: Sequence[int]) -> None:
        self.calls.append((kind, tuple(extents), tuple(ranks)))


def pool(resident: int = 1) -> ElasticPool[SimBlock]:
    blocks = [SimBlock(number) for number in range(32)]
    return ElasticPool(blocks, 2, evict=lambda block: None, prefix=resident)


def growth(caller: Any) -> SyncGrowth:
    return SyncGrowth(caller, pool(), prefix=1)


def test_growth_asks_all_ranks_for_the_lack_and_a_little_ahead() -> None:
    caller = FakeCaller()
    grown = growth(caller)
    assert grown.grow(3)
    assert caller.calls == [("grow", (1, 2, 3, 4), 0)]  # two extents for three blocks, two ahead
    assert grown.pool.resident == 5
    counters = grown.status()["counters"]
    assert counters == {"growths": 1, "allocation_misses": 0, "headroom_rejections": 0}


def test_a_refusal_undoes_what_others_mapped_and_the_next_try_is_smaller() -> None:
    caller = FakeCaller(ranks=3)
    caller.refusing = {1}
    grown = growth(caller)
    assert not grown.grow(1)
    assert caller.calls[1] == ("undo", (1, 2, 3), (0, 2))
    assert grown.pool.resident == 1
    caller.refusing = {0, 1, 2}
    assert not grown.grow(1)
    assert caller.calls[2:] == [("grow", (1,), 0), ("undo", (1,), ())]
    counters = grown.status()["counters"]
    assert counters == {"growths": 0, "allocation_misses": 2, "headroom_rejections": 4}


def test_more_than_the_address_range_is_refused_without_a_call() -> None:
    caller = FakeCaller()
    assert not growth(caller).grow(100)
    assert caller.calls == []


def test_free_extents_beyond_the_reserve_go_back_behind_the_fence() -> None:
    caller = FakeCaller()
    grown = growth(caller)
    grown.grow(2)  # three extents
    grown.give_back(step=6)
    assert len(caller.calls) == 1  # at most four are kept
    grown.grow(4)  # four more
    grown.give_back(step=7)
    assert caller.calls[2:] == [("shrink", (7, 6, 5, 4, 3), 7)]
    assert grown.pool.resident == 3
    grown.grow(1)
    assert caller.calls[-1] == ("grow", (3, 4, 5), 0)  # what went back can be had again


def test_its_parts_are_made_as_those_they_stand_in_for() -> None:
    made, wanted = (inspect.signature(kind).parameters for kind in (Caller, Coordinator))
    assert list(made) == list(wanted)
    made, wanted = (inspect.signature(kind).parameters for kind in (SyncAgent, Agent))
    assert list(made) == [name for name in wanted if name != "exit_process"]


def test_status_has_the_form_of_kvadmits_own() -> None:
    caller = FakeCaller()
    grown = growth(caller)
    grown.grow(1)
    grown.end_step()
    found = status.parse({"coordinator": caller.describe(), "pool": grown.pool_status()})
    assert found.counts["growths"] == 1
    assert found.counts["timer_probes"] is None
    assert found.spreads["grant_wait_s"] is None
    wait = found.spreads["scheduler_wait_us"]
    assert wait is not None
    assert wait["max"] is not None
    grown.restart()
    assert grown.status()["counters"]["growths"] == 0


def test_counts_of_a_run_are_differences_and_spreads_are_its_own() -> None:
    def parsed(growths: int, longest: float) -> status.Status:
        return status.parse(
            {
                "coordinator": {
                    "counters": {"growths": growths, "resends": 0},
                    "histograms": {"grow_latency_s": {"p50": 1.0, "p99": 2.0}},
                },
                "pool": {
                    "held_steps": 3,
                    "scheduler_wait_us": {"p50": 1.0, "p99": 2.0, "max": 3.0},
                    "scheduler_wait_moving_us": {"p50": 9.0, "p99": 9.0, "max": longest},
                },
            }
        )

    counted = status.counted(parsed(9, 50.0), parsed(4, 50.0), 2, 77)
    assert counted.counts["growths"] == 5
    assert counted.counts["resends"] == 0
    assert counted.counts["held_steps"] == 0
    assert counted.counts["no_slot_steps"] is None
    assert counted.spreads["scheduler_wait_us"] == {"p50": 1.0, "p99": 2.0, "max": 50.0}
    assert (counted.preemptions, counted.peak_held_bytes) == (2, 77)


# --- over real sockets, with real memory ---------------------------------------------------------


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[tuple[Caller, list[SyncAgent], list[HostAddressSpace]]]:
    """Connect a caller and two ranks whose pool has room for five extents."""
    settings = Settings.parse({"run_dir": str(tmp_path / "run"), "host_pool": 5 * EXTENT_BYTES})
    caller = Caller(
        settings,
        ranks=2,
        devices=["host", "host"],
        device_total_bytes={"host": settings.host_pool},
        name="x",
        wake=lambda: None,
    )
    caller.start()
    pools = [HostPool(tmp_path / "pool", settings.host_pool) for _ in range(2)]
    spaces = [HostAddressSpace(LAYOUT, device="host", pool=pool) for pool in pools]
    agents = [
        SyncAgent(caller.runtime, rank=rank, space=space, prefix=0)
        for rank, space in enumerate(spaces)
    ]
    for agent in agents:
        agent.start()
    caller.wait_ready()
    yield caller, agents, spaces
    for agent in agents:
        agent.stop()
    caller.stop()
    for space, host_pool in zip(spaces, pools, strict=True):
        space.close()
        host_pool.close()


Linked = tuple[Caller, list[SyncAgent], list[HostAddressSpace]]


def test_growth_over_sockets_is_all_or_nothing(linked: Linked) -> None:
    caller, _, spaces = linked
    assert [reply.done for reply in caller.call("grow", [1, 2])] == [True, True]
    refused = caller.call("grow", [3])  # one extent is left for two ranks
    assert sorted(reply.done for reply in refused) == [False, True]
    caller.call_some([reply.rank for reply in refused if reply.done], "undo", [3])
    assert spaces[0].read()[0] == EXTENT_BYTES
    assert [reply.done for reply in caller.call("shrink", [1, 2])] == [True, True]
    assert spaces[1].read()[0] == 5 * EXTENT_BYTES


def test_shrink_waits_for_its_fence(linked: Linked) -> None:
    caller, agents, spaces = linked
    caller.call("grow", [1])
    agents[0].publish_enqueued(7)
    answered = threading.Event()

    def shrink() -> None:
        caller.call("shrink", [1], fence=7)
        answered.set()

    thread = threading.Thread(target=shrink)
    thread.start()
    assert not answered.wait(0.1)  # rank 1 is a step behind
    agents[1].publish_enqueued(7)
    thread.join(10)
    assert answered.is_set()
    assert spaces[0].read()[0] == 5 * EXTENT_BYTES


def test_a_lost_rank_ends_the_call(linked: Linked) -> None:
    caller, agents, _ = linked
    agents[1].stop()
    with pytest.raises(PeerLostError, match="rank 1"):
        caller.call("grow", [1])


def test_frames_survive_the_wire_and_a_closed_one_is_none() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames: list[Joined | Order | Reply] = [
            Joined(3),
            Order(number=1, kind="shrink", extents=((1, 2),), fence=9),
            Reply(number=1, rank=3, done=False, reason="no"),
        ]
        for frame in frames:
            send(ours, frame)
        assert [receive(theirs) for _ in frames] == frames
        os.close(ours.detach())
        assert receive(theirs) is None

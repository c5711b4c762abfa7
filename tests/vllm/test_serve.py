"""Two plain `vllm serve` of different models, OpenAI's client against both, one pool."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError

import pytest
from openai import BadRequestError

from integration.cluster import Engine as Neighbour
from integration.cluster import arbiter_pid, make_plan, run_directory
from kvadmit.arbitration import LINGER_S
from kvadmit.testing.tiny_model import TinyModel
from kvadmit.units import KIB, MIB
from kvadmit.vmm_host import GRANULE_BYTES
from vllm_engines import DENSE, kvadmit, model_directory
from vllm_servers import (
    Load,
    ProcessTree,
    Server,
    command_line_status,
    held_bytes,
    serving,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

POOL = 16 * MIB
EXTENT = 512 * KIB
MODEL_LEN = 8192
WIDE = TinyModel(kv_heads=4)
"""Twice the bytes of DENSE per token, so half as many tokens per extent."""
ALPHA_CAP = 12 * MIB
ALPHA_LEN = (ALPHA_CAP // EXTENT * (EXTENT // (32 * DENSE.kv_token_bytes())) - 1) * 32
"""The longest request of alpha: all blocks under its cap but the null block."""


class Pair(NamedTuple):
    run_dir: Path
    alpha: Server
    beta: Server


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two servers; the settings of one as JSON, of the other as dotted flags."""
    with run_directory() as run_dir:
        # Long enough that nothing is given back unless somebody else asks for it.
        more = {"host_pool": POOL, "extent": EXTENT, "floor": MIB, "idle_decay_s": 600}
        alpha = kvadmit(run_dir, name="alpha", cap=ALPHA_CAP, **more)
        beta = kvadmit(run_dir, name="beta", **more)["kvadmit"]
        flags = [f"--max-model-len={MODEL_LEN}", "--max-num-seqs=64"]
        servers = (
            Server(
                model_directory(DENSE), [*flags, "--additional-config", json.dumps(alpha)], core=0
            ),
            Server(
                model_directory(WIDE),
                [
                    *flags,
                    f"--kv-cache-memory-bytes={4 * POOL}",
                    *(
                        f"--additional-config.kvadmit.{key}={json.dumps(value).strip(chr(34))}"
                        for key, value in beta.items()
                    ),
                ],
                core=1,
            ),
        )
        with serving(*servers):
            yield Pair(run_dir, *servers)


def test_both_serve_and_are_seen(pair: Pair) -> None:
    for server in (pair.alpha, pair.beta):
        answer = server.complete("The quick brown fox", 12)
        assert answer.usage.prompt_tokens == 19
        assert answer.usage.completion_tokens == 12
        assert answer.choices[0].text == server.complete("The quick brown fox", 12).choices[0].text
        pieces = server.client.completions.create(
            model=server.model, prompt="more", max_tokens=5, stream=True
        )
        assert [piece.choices[0].finish_reason for piece in pieces][-1] is not None
        chat = server.client.chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": "hello"}], max_tokens=4
        )
        assert chat.usage is not None
        assert chat.usage.prompt_tokens >= 5
        assert "vllm:kv_cache_usage_perc" in server.get("/metrics")
    assert set(held_bytes(pair.run_dir)) == {"alpha", "beta"}
    table = command_line_status(pair.run_dir)
    rows = [line.split()[0] for line in table.splitlines() if line]
    assert {"host", "alpha", "beta"} <= set(rows), table


def test_memory_follows_the_load(pair: Pair) -> None:
    """Either could use more than the pool alone, so what one gets has to come from the other."""
    requests = {"alpha": 22, "beta": 11}
    for turn, busy in enumerate(("alpha", "beta", "alpha")):
        idle = "beta" if busy == "alpha" else "alpha"
        before = held_bytes(pair.run_dir)
        # Of other tokens in each turn: nothing is found in the prefix cache.
        wanted = [[turn * 50 + number] * 100 for number in range(requests[busy])]
        load = Load(getattr(pair, busy), wanted, tokens=400)
        load.finish()
        after = held_bytes(pair.run_dir)
        seen = f"turn {turn}: {before} -> {after}\n{command_line_status(pair.run_dir)}"
        assert after[busy] >= 10 * MIB, seen
        assert after[busy] >= before[busy] + 4 * MIB, seen
        assert sum(after.values()) <= POOL, seen
        if turn > 0:
            assert after[idle] <= before[idle] - 4 * MIB, seen


def test_a_request_over_the_ceiling_is_told_so_at_once(pair: Pair) -> None:
    (model,) = pair.alpha.client.models.list().data
    assert model.model_dump()["max_model_len"] == ALPHA_LEN
    began_s = time.monotonic()
    # The cap bounds the length of alpha's requests: vLLM's own error.
    with pytest.raises(BadRequestError, match=f"maximum context length is {ALPHA_LEN} tokens"):
        pair.alpha.complete([7] * (ALPHA_LEN + 1), 1)
    # Beta's addresses hold longer requests than the pool has memory for: ours.
    tokens = POOL // WIDE.kv_token_bytes() + 100
    with pytest.raises(BadRequestError) as refusal:
        pair.beta.complete([7] * tokens, 1)
    text = refusal.value.message
    assert f"This request's {tokens} tokens need" in text
    assert "this server can have 16MiB at most" in text
    assert time.monotonic() - began_s < 10
    for server in (pair.alpha, pair.beta):
        assert server.complete("still there", 8).usage.completion_tokens == 8


def test_without_memory_health_says_so_and_is_green_again_with_it(pair: Pair) -> None:
    """A neighbour that needs all there is leaves alpha its floor, which its request exceeds."""
    for server in (pair.alpha, pair.beta):
        assert server.get("/health") == ""
    plan = make_plan(extents=POOL // EXTENT, pages=EXTENT // GRANULE_BYTES)
    neighbour = Neighbour(pair.run_dir, "neighbour", plan=plan, host_pool=POOL)
    try:
        neighbour.start()
        all_but_floors = (POOL - 2 * MIB) // EXTENT
        neighbour.pool.use(all_but_floors)
        neighbour.pool.wait_resident(all_but_floors)
        load = Load(pair.alpha, [[9] * (2 * MIB // DENSE.kv_token_bytes())], tokens=8)
        refusal = wait_until_unready(pair.alpha)
        assert refusal["error"]["message"].startswith("kvadmit: no token for 1"), refusal
        assert "of KV cache memory" in refusal["error"]["message"]
        assert refusal["error"]["code"] == 503
        assert pair.beta.get("/health") == "", "one instance's trouble is its own"
        assert kvadmit_metrics(pair.alpha)['kvadmit_need_age_seconds{instance="alpha"}'] > 9
    finally:
        neighbour.stop()
    load.finish()
    assert pair.alpha.get("/health") == ""
    assert kvadmit_metrics(pair.alpha)['kvadmit_need_age_seconds{instance="alpha"}'] == 0
    log = pair.alpha.log()
    assert log.count("no token for 1") == 1
    assert log.count("no stall any more, after") == 1


def wait_until_unready(server: Server) -> Any:
    """Look at /health, bounded, until it fails; returns what it said."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        try:
            server.get("/health")
            time.sleep(0.5)
        except HTTPError as error:
            return json.loads(error.read())
    raise AssertionError(server.log())


def kvadmit_metrics(server: Server) -> dict[str, float]:
    """Return kvadmit's own lines of a server's /metrics."""
    lines = [line.split() for line in server.get("/metrics").splitlines() if line[:1] != "#"]
    return {name: float(value) for name, value in lines if name.startswith("kvadmit_")}


METRICS = (
    "held_bytes",
    "held_extents",
    "allowance_extents",
    "ceiling_extents",
    "need_age_seconds",
    "silent_ranks",
    "free_extents",
    "waiting_requests",
    "growths_total",
    "timer_probes_total",
)


def test_metrics_say_what_status_says(pair: Pair) -> None:
    found = kvadmit_metrics(pair.alpha)
    mine = {name for name in found if 'instance="alpha"' in name}
    assert {name.partition("{")[0].removeprefix("kvadmit_") for name in mine} >= set(METRICS)
    assert not any("beta" in name for name in found), "each server shows its own engines"
    status = json.loads(command_line_status(pair.run_dir, "--json"))["instances"]["alpha"]
    held = found['kvadmit_held_bytes{device="host",instance="alpha"}']
    assert held == status["held_bytes"]["host"]
    assert found['kvadmit_allowance_extents{instance="alpha"}'] == status["allowance_extents"]
    assert found['kvadmit_ceiling_extents{instance="alpha"}'] == ALPHA_CAP // EXTENT
    assert found['kvadmit_growths_total{instance="alpha"}'] > 0
    assert found["kvadmit_age_seconds"] < 5


def test_sigterm_ends_both_and_leaves_nothing(pair: Pair) -> None:
    """The last one here: the servers are gone afterwards."""
    trees = [server.tree() for server in (pair.alpha, pair.beta)]
    arbiter = ProcessTree(arbiter_pid(pair.run_dir))
    try:
        shared = set().union(*(tree.shared_memory() for tree in trees))
        assert shared, "vLLM's own queues lie there"
        for server in (pair.alpha, pair.beta):
            status, took_s = server.terminate()
            assert status == 0, server.log()
            assert took_s < 30
        for tree in trees:
            tree.wait_ended(15)
        arbiter.wait_ended(LINGER_S + 10)
    finally:
        for tree in (*trees, arbiter):
            tree.close()
    assert not [path for path in shared if Path(path).exists()]
    left = {path.name for path in pair.run_dir.iterdir()}
    # Documented to stay: a few bytes each (`rundir`), the log, the pool's size and slots.
    stays = {name for name in left if name.startswith("a-") and name.endswith((".epoch", ".lock"))}
    assert left - stays == {"arbiter.log", "host.pool"}
    assert (pair.run_dir / "host.pool").stat().st_blocks * 512 <= 64 * KIB

"""The bench on GPUs, as far as it needs none: NVIDIA's two tools are stand-ins on the PATH."""

from __future__ import annotations

import asyncio
import os
import struct
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from bench import contention
from bench.colocated import crew, gpus, kvcached_levels
from bench.colocated.fleet import InstanceError
from bench.colocated.gpus import Gpu, GpuError, GpuHost, Watch
from bench.colocated.kvcached_levels import KvcachedLevels
from bench.colocated.policies import MARGIN_BYTES, ON_GPUS, POLICIES, launches
from bench.colocated.setup import Setup

from kvadmit.config import Settings
from kvadmit.units import GIB, MIB

SMI = """#!/bin/sh
case "$*" in
*loop-ms*) echo "a complaint"; while :; do echo "GPU-a, 100"; echo "GPU-b, 200"; sleep 0.01; done;;
*compute-apps*) echo "7, 500"; echo "7, 20"; echo "8, [N/A]";;
*driver_version*) echo 580.1; echo 580.1;;
*) echo "0, GPU-a, H200, 1000"; echo "1, GPU-b, H200, 1000";;
esac
"""
CONTROL = """#!/bin/sh
echo "$* $(cat) in $CUDA_MPS_PIPE_DIRECTORY" >> $TOLD
exit $FAILS
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the two stand-ins first on the PATH; returns the file in which one notes its calls."""
    for name, text in (("nvidia-smi", SMI), (gpus.CONTROL, CONTROL)):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    monkeypatch.setenv("FAILS", "0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "told"


def arguments(*argv: str) -> Setup:
    return contention.setup_of(contention.parser().parse_args(["--device", "cuda", *argv]))


def test_gpus_are_read_without_a_context(tools: Path) -> None:
    two = gpus.visible(2)
    assert [gpu.uuid for gpu in two] == ["GPU-a", "GPU-b"]
    assert gpus.hardware(two) == {
        "device": "cuda",
        "gpu": "H200",
        "gpus": 2,
        "gpu_memory_bytes": 1000 * MIB,
        "driver": "580.1",
    }
    assert gpus.bytes_by_process() == {7: 520 * MIB, 8: None}
    with pytest.raises(GpuError, match="needs 3 GPUs, this machine shows 2"):
        gpus.visible(3)


def test_gpus_that_the_user_hides_are_left_alone(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, expected in (("1", ["GPU-b"]), ("GPU-b,0", ["GPU-b", "GPU-a"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert [gpu.uuid for gpu in gpus.visible(len(expected))] == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not gpus._query_gpus()


def test_without_nvidias_tools_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus.Path, "exists", lambda self: True)  # type: ignore[attr-defined]
    assert not gpus.present(), "a device file alone is not a driver"
    assert gpus.bytes_by_process() == {}
    with pytest.raises(GpuError, match="nvidia-cuda-mps-control is not installed"):
        GpuHost([], None).__enter__()


def test_the_daemon_has_directories_of_its_own_and_ends(tools: Path) -> None:
    with GpuHost(gpus.visible(2), None) as host:
        pipe = Path(host.environment["CUDA_MPS_PIPE_DIRECTORY"])
        assert pipe.is_dir()
        assert host.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert tools.read_text().splitlines() == [f"-d  in {pipe}", f" quit -t {gpus.QUIT_S} in {pipe}"]
    assert not pipe.parent.exists()


def test_a_daemon_that_does_not_start_leaves_nothing(
    tools: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAILS", "1")
    host = GpuHost(gpus.visible(1), None)
    with pytest.raises(GpuError, match=gpus.CONTROL):
        host.__enter__()
    assert not Path(host.environment["CUDA_MPS_PIPE_DIRECTORY"]).parent.exists()


def test_a_ballast_that_does_not_fit_is_said_and_ends(
    tools: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho GPU 0 has 5 bytes free\n")
    python.chmod(0o755)
    monkeypatch.setattr(gpus.sys, "executable", str(python))  # type: ignore[attr-defined]
    with pytest.raises(GpuError, match="did not fit: GPU 0 has 5 bytes free"):
        GpuHost(gpus.visible(1), GIB).__enter__()
    assert "quit" in tools.read_text()


def test_the_watch_sees_all_gpus_at_once(tools: Path) -> None:
    async def look() -> Watch:
        async with Watch(gpus.visible(2)) as watch:
            while len(watch.seen) < 2:
                await asyncio.sleep(0.01)
        return watch

    seen = asyncio.run(asyncio.wait_for(look(), 30)).seen
    assert seen[0].used_bytes == [100 * MIB, 200 * MIB]


def test_no_gpus_nothing_to_watch() -> None:
    async def look() -> Watch:
        async with Watch(()) as watch:
            return watch

    assert asyncio.run(look()).seen == []


BIG = Gpu(index=0, uuid="GPU-a", name="H200", total_bytes=140 * GIB)


@pytest.fixture
def big(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there are as many large GPUs as anybody asks for."""
    monkeypatch.setattr(gpus, "visible", lambda count: [BIG] * count)


def test_a_pool_says_what_the_ballast_leaves_and_the_other_way_round(big: None) -> None:
    beside = 2 * 10 * GIB + MARGIN_BYTES
    made = arguments("--tp", "2", "--pool", "24GiB", "--base", "10GiB")
    assert made.leave_bytes == 12 * GIB + beside
    made = arguments("--tp", "2", "--leave-gib", "33", "--base", "10GiB")
    assert made.pool_bytes == 2 * (33 * GIB - beside)
    made = arguments("--base", "10GiB")
    assert (made.leave_bytes, made.pool_bytes) == (None, 140 * GIB - beside)
    assert {"leave_bytes", "base_bytes"} <= made.workload().keys()


@pytest.mark.parametrize("argv", [["--leave-gib", "20"], ["--pool", "130GiB"]])
def test_what_does_not_fit_on_a_gpu_names_the_flags(big: None, argv: list[str]) -> None:
    with pytest.raises(GpuError, match="change --pool, --leave-gib or --base"):
        arguments("--base", "10GiB", *argv)


def test_the_shape_served_by_default_is_that_of_an_8b_model(big: None) -> None:
    made = arguments("--tp", "2", "--pool", "24GiB")
    assert (Path(made.model) / "config.json").exists()
    assert 14 < made.base_bytes * 2 / GIB - 6 < 16, "half of the weights, and 3 GiB"


def test_every_policy_has_the_same_memory_on_gpus(big: None) -> None:
    setup = arguments("--tp", "2", "--pool", "24GiB", "--base", "10GiB")
    site = {"CUDA_MPS_PIPE_DIRECTORY": "/mps"}
    made = {policy: launches(setup, policy, "/run/x", site)[0] for policy in POLICIES}
    for launch in made.values():
        assert launch.environment["CUDA_MPS_PIPE_DIRECTORY"] == "/mps"
        assert "enforce_eager" not in launch.spec.engine_args
    assert made["static"].spec.engine_args["kv_cache_memory_bytes"] == 6 * GIB
    for policy in ("sync", "event", "event-layers"):
        section = made[policy].spec.engine_args["additional_config"]["kvadmit"]
        settings = Settings.parse(section)
        assert (settings.cap, settings.margin) == (12 * GIB, MARGIN_BYTES)
        assert settings.start == 10 * GIB
    kvcached = made["kvcached"]
    share = kvcached.spec.engine_args["gpu_memory_utilization"]
    assert share == pytest.approx(22 / 140)
    assert kvcached.environment["ENABLE_KVCACHED"] == "true"
    assert float(kvcached.environment["KVCACHED_GPU_UTILIZATION"]) == pytest.approx(139 / 140)


@pytest.mark.parametrize("policy", ON_GPUS)
def test_some_policies_are_for_gpus(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        contention.main(["--device", "cpu", "--policy", policy])
    assert ended.value.code == 2
    assert f"--policy {policy} needs GPUs" in capsys.readouterr().err


def test_policies_that_stand_there_together_have_memory_of_their_own(big: None) -> None:
    """Each as much as it would have alone."""
    size = ["--instances", "1", "--tp", "2", "--pool", "24GiB", "--base", "10GiB"]
    of_one = [*size, "--policy", "static", "event"]
    alone, both = arguments(*of_one), arguments(*of_one, "--together")
    assert (alone.fleets, both.fleets) == (1, 2)
    assert alone.leave_bytes is not None
    assert both.leave_bytes == 2 * (alone.leave_bytes - MARGIN_BYTES) + MARGIN_BYTES
    assert both.pool_bytes == alone.pool_bytes
    assert "fleets" in both.workload(), "their runs are not those of one at a time"
    one = ["--instances", "1", "--together", "--policy"]
    filled = arguments("--base", "10GiB", *one, "static", "event")
    assert filled.pool_bytes == (140 * GIB - MARGIN_BYTES - 2 * 10 * GIB) // 2
    with pytest.raises(GpuError, match="4 instances hold"):
        arguments("--base", "40GiB", *one, *POLICIES[:4])
    with pytest.raises(GpuError, match="--together needs --instances 1"):
        arguments("--base", "10GiB", "--policy", "static", "event", "--together")


def test_the_layout_compared_is_the_one_that_is_no_default(big: None) -> None:
    setup = arguments("--attention", "TRITON_ATTN")
    layouts = {}
    for policy in ("event", "event-layers"):
        (launch, _) = launches(setup, policy, "/run/x", {})
        assert launch.spec.engine_args["attention_backend"] == "TRITON_ATTN"
        section = launch.spec.engine_args["additional_config"]["kvadmit"]
        layouts[policy] = Settings.parse(section).layout
    assert layouts == {"event": "auto", "event-layers": "LBNHC"}


def test_kvcacheds_levels_are_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvcached_levels, "SEGMENTS", tmp_path)
    monkeypatch.setenv("KVCACHED_IPC_NAME", "one")
    levels = KvcachedLevels(2)
    assert levels.held_bytes() == 0, "before it has any"
    (tmp_path / "one").write_bytes(struct.pack("=3q", 100, 30, 5))
    assert levels.held_bytes() == 70


class StubFleet:
    """Stands for a fleet: starts once another one has begun to, or fails."""

    started: ClassVar[list[str]] = []
    stopped: ClassVar[list[str]] = []
    others: ClassVar[asyncio.Event]

    def __init__(self, setup: Setup, policy: str, *_: object) -> None:
        self.policy = policy

    async def start(self) -> StubFleet:
        self.started.append(self.policy)
        if self.policy == "sync":
            raise InstanceError("sync-a broke")
        if len(self.started) > 1:
            self.others.set()
        await asyncio.wait_for(self.others.wait(), 10)
        return self

    async def stop(self) -> None:
        self.stopped.append(self.policy)


@pytest.mark.parametrize("third", ["kvcached", "sync"])
def test_fleets_that_stand_there_together_start_at_once_and_none_is_left(
    big: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, third: str
) -> None:
    policies = ["static", "event", third]
    setup = arguments("--instances", "1", "--base", "9GiB", "--together", "--policy", *policies)
    monkeypatch.setattr(crew, "Fleet", StubFleet)
    StubFleet.started, StubFleet.stopped = [], []

    async def run() -> None:
        StubFleet.others = asyncio.Event()
        ready = msgspec.structs.replace(setup, warm_up=0)
        async with crew.Crew(ready, tmp_path, lambda text: None) as made:
            await made.assemble(policies)
            assert (await made.fleet("event")).policy == "event"

    if third == "sync":
        with pytest.raises(InstanceError, match="sync-a broke"):
            asyncio.run(run())
    else:
        asyncio.run(run())
    assert sorted(StubFleet.started) == sorted(StubFleet.stopped) == sorted(policies)

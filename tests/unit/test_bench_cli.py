"""The bench's command line and how it starts instances under each policy."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from bench import contention
from bench.colocated import delay
from bench.colocated.policies import ON_GPUS, POLICIES, launches, share_bytes
from bench.colocated.setup import Setup
from bench.colocated.workload import Shape

from kvadmit.config import Settings
from kvadmit.vmm import ExtentLayout, Strip
from kvadmit.vmm_cuda import CudaAddressSpace
from kvadmit.vmm_host import HostAddressSpace, HostPool

ON_CPUS = [policy for policy in POLICIES if policy not in ON_GPUS]
SETUP = Setup(
    shape=Shape(scenario="alternating", instances=2, requests=2),
    engine="vllm",
    tp=2,
    pool_bytes=64 << 20,
    model="/m",
    seed=0,
)


def arguments(*argv: str) -> Setup:
    return contention.setup_of(contention.parser().parse_args([*argv, "--model", "/m"]))


def test_flags_become_the_setup() -> None:
    text = (
        "--scenario symmetric --instances 3 --tp 2 --requests 7 --rate 2.5 --pool 48MiB --seed 5 "
        "--worker-delay-ms 50 --engine sim --prompt-tokens 10:20 --probes 1"
    )
    setup = arguments(*text.split())
    assert setup.shape == Shape(
        scenario="symmetric",
        instances=3,
        requests=7,
        rate=2.5,
        prompt_tokens=(10, 20),
        output_tokens=setup.shape.output_tokens,
    )
    assert (setup.tp, setup.pool_bytes, setup.seed) == (2, 48 << 20, 5)
    assert (setup.worker_delay_ms, setup.engine, setup.probes) == (50.0, "sim", 1)


def test_longest_request_fits_the_model_and_the_static_share() -> None:
    setup = arguments()
    longest = setup.shape.prompt_tokens[1] + setup.shape.output_tokens[1]
    assert longest <= setup.max_model_len


@pytest.mark.parametrize(
    ("argv", "cure"),
    [
        (["--policy", "magic"], "static, kvcached, sync, event"),
        (["--requests", "0"], "1 or more"),
        (["--requests", "few"], "1 or more"),
        (["--prompt-tokens", "9:3"], "LOW:HIGH"),
        (["--output-tokens", "some"], "LOW:HIGH"),
        (["--pool", "many"], "a size looks like"),
        (["--pool", "128M"], "use KiB, MiB"),
    ],
)
def test_nonsense_is_refused_with_the_cure(
    argv: list[str], cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        contention.parser().parse_args(argv)
    assert ended.value.code == 2
    said = capsys.readouterr().err.replace("'", "")
    assert argv[0] in said
    assert cure in said


def test_demo_is_a_preset_that_flags_still_change() -> None:
    asked = contention.parser()
    asked.set_defaults(**contention.DEMO)
    assert asked.parse_args(["--demo"]).policy == ["static", "sync", "event"]
    assert asked.parse_args(["--demo", "--policy", "event"]).policy == ["event"]


def test_static_is_stock_vllm_with_an_even_share() -> None:
    made = launches(SETUP, "static", "/run/x")
    assert [launch.spec.name for launch in made] == ["static-a", "static-b"]
    for launch in made:
        assert launch.environment["VLLM_PLUGINS"] == "kvadmit_bench_short_waits"
        assert launch.spec.engine_args["kv_cache_memory_bytes"] == 16 << 20
        assert "additional_config" not in launch.spec.engine_args
    assert share_bytes(SETUP) * SETUP.tp * SETUP.shape.instances == SETUP.pool_bytes


@pytest.mark.parametrize("policy", ["sync", "event"])
def test_sharing_policies_get_the_whole_pool_by_settings_kvadmit_accepts(policy: str) -> None:
    for launch in launches(SETUP, policy, "/run/x"):
        section = launch.spec.engine_args["additional_config"]["kvadmit"]
        settings = Settings.parse(section)
        assert (settings.host_pool, settings.run_dir) == (64 << 20, "/run/x")
        assert "kv_cache_memory_bytes" not in launch.spec.engine_args


def test_policies_differ_in_nothing_but_memory_and_plugins() -> None:
    stripped = []
    for policy in ON_CPUS:
        launch = launches(SETUP, policy, "/run/x")[0]
        engine_args = dict(launch.spec.engine_args)
        engine_args.pop("kv_cache_memory_bytes", None)
        engine_args.pop("additional_config", None)
        environment = dict(launch.environment)
        environment.pop("VLLM_PLUGINS")
        stripped.append((engine_args, environment))
    assert stripped[0] == stripped[1] == stripped[2]


def test_the_plugins_named_are_announced() -> None:
    launch = launches(SETUP, "sync", "/run/x")[0]
    plugins = Path(launch.environment["PYTHONPATH"].split(":")[1])
    text = next(plugins.glob("*.dist-info/entry_points.txt")).read_text()
    assert "kvadmit_bench_sync = bench.colocated.sync_policy.vllm_plugin:register" in text
    assert "kvadmit_bench_event = bench.colocated.event_plugin:register" in text


def test_delay_is_passed_on_and_waits_in_prepare_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = msgspec.structs.replace(SETUP, worker_delay_ms=250.0)
    environment = launches(late, "event", "/run/x")[0].environment
    monkeypatch.setenv(delay.VARIABLE, environment[delay.VARIABLE])
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    for driver in (HostAddressSpace, CudaAddressSpace):  # restored after the test
        for name in ("prepare", "commit"):
            monkeypatch.setattr(driver, name, getattr(driver, name))
    delay.install()
    pool = HostPool(tmp_path / "pool", 1 << 20)
    layout = ExtentLayout(4 * 8192, 4, 2, (Strip(0, 4096),))
    space = HostAddressSpace(layout, device="host", pool=pool)
    try:
        for extents in ((0,), (1, 2)):
            for call in (space.prepare, space.commit):
                assert call(extents).error is None
        assert waited == [0.25, 0.25]  # not for the prefix, which nobody waits for
        assert space.decommit((1,)).error is None
        assert len(waited) == 2
    finally:
        space.close()
        pool.close()


def test_no_delay_wraps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(delay.VARIABLE, "0.0")
    before = HostAddressSpace.prepare
    delay.install()
    assert HostAddressSpace.prepare is before

"""Off by default and off in every attribute but one; refusals at start; several engines."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from integration.cluster import run_directory
from kvadmit.config import Settings
from kvadmit.errors import UnsupportedError
from kvadmit.units import MIB
from vllm_engines import DENSE, EngineProcess, engine, engine_arguments, kvadmit, prompts

PLUGINS = Path(__file__).parent / "plugins"
"""A plugin of these tests: it lets EngineCore say what is replaced in its process."""
PLUGIN_PATH = os.pathsep.join(
    [str(PLUGINS), str(PLUGINS.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with run_directory() as path:
        yield path


def test_the_plugin_is_installed() -> None:
    """Without the entry point the test below would prove nothing."""
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert "kvadmit.vllm:register" in [point.value for point in found]


@pytest.mark.slow
@pytest.mark.parametrize("multiprocessing", ["1", "0"], ids=["mp", "in_process"])
def test_not_enabled_exactly_one_attribute_differs(multiprocessing: str) -> None:
    """In the process of the API; in EngineCore and worker, where they are others, too."""
    arguments = engine_arguments(
        DENSE, kv_cache_memory_bytes=16 * MIB, additional_config={"kvadmit": {"enable": False}}
    )
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing,
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the question to the workers is a function
        "PYTHONPATH": PLUGIN_PATH,
    }
    with engine(arguments, **environment) as child:
        one = ["EngineArgs.create_engine_config"]
        assert child.first["differs"] == one
        assert child.ask("differing") == {"engine_core": one, "workers": [one]}


@pytest.mark.slow
def test_enabled_in_process_serves_the_same_tokens_and_installs_its_hooks(run_dir: Path) -> None:
    stock = engine_arguments(DENSE, kv_cache_memory_bytes=16 * MIB)
    ours = engine_arguments(DENSE, additional_config=kvadmit(run_dir, host_pool=16 * MIB))
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with engine(stock, **in_process) as child:
        expected = child.generate(prompts(16), 60)
    with engine(ours, **in_process) as child:
        assert "EngineCoreProc._process_engine_step" in child.first["differs"]
        assert "Worker.initialize_from_config" in child.first["differs"]
        assert child.generate(prompts(16), 60) == expected
        assert child.status()["pool"]["resident_extents"] > 1
    assert not list(run_dir.glob("i-*")), "an instance that ended left files behind"


@pytest.mark.slow
def test_a_stock_engine_beside_an_enabled_one_stays_stock(run_dir: Path) -> None:
    """Two engines of one process; the second one's children inherit the mark of the first."""
    stock = engine_arguments(DENSE, kv_cache_memory_bytes=16 * MIB)
    ours = engine_arguments(DENSE, additional_config=kvadmit(run_dir, host_pool=16 * MIB))
    with engine(ours) as child:
        expected = child.generate(prompts(8), 40)
        other = child.ask("another", arguments=stock, prompts=prompts(8), tokens=40)
        assert other["ids"] == expected
        assert other["status"] == {}
        assert child.status()["pool"]["resident_extents"] >= 1
        log = child.log()
    for line in ("this process", "EngineCore: instance", "the worker of rank 0: "):
        assert log.count(f"kvadmit is active in {line}") == 1, log


@pytest.mark.slow
def test_a_worker_without_the_plugin_is_missed_and_named(run_dir: Path) -> None:
    """Its EngineCore has the plugin; the worker would serve stock memory that nobody counts."""
    config = kvadmit(run_dir, host_pool=16 * MIB, start_wait_s=6)
    arguments = engine_arguments(DENSE, additional_config=config)
    child = EngineProcess(arguments, PYTHONPATH=PLUGIN_PATH, KVADMIT_TESTS_KEEP_OUT="1")
    try:
        child.refusal()
        log = child.log()
        assert "no answer within 6 s: no hello from rank 0" in log, log
        assert "does VLLM_PLUGINS name kvadmit" in log
        assert "kvadmit is active in the worker" not in log
    finally:
        child.close()
    nothing_is_left(log, run_dir)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"flor": "1MiB"}, ["ConfigError", "kvadmit.flor", "did you mean 'floor'"]),
        ({"cap": "many"}, ["ConfigError", "kvadmit.cap: got 'many'", "4GiB"]),
        ({"weight": 2}, ["ConfigError", "kvadmit.weight", "not in this release"]),
        ({"enable": "perhaps"}, ["ConfigError", "kvadmit.enable", "true or false"]),
    ],
    ids=["unknown", "bad_value", "later", "not_a_bool"],
)
@pytest.mark.slow
def test_a_bad_setting_stops_the_start(
    run_dir: Path, settings: dict[str, Any], words: list[str]
) -> None:
    config = {"kvadmit": {"enable": True, "run_dir": str(run_dir)} | settings}
    child = EngineProcess(engine_arguments(DENSE, additional_config=config))
    try:
        error = child.refusal()
        assert all(word in error for word in words), error
        assert "\n" not in error
    finally:
        child.close()


@pytest.mark.slow
def test_a_gated_feature_is_refused_with_the_reason(run_dir: Path) -> None:
    arguments = engine_arguments(DENSE, max_model_len=-1, additional_config=kvadmit(run_dir))
    child = EngineProcess(arguments)
    try:
        error = child.refusal()
        assert error.startswith("UnsupportedError: max_model_len=-1")
    finally:
        child.close()


@pytest.mark.slow
def test_without_require_a_gated_feature_runs_stock(run_dir: Path) -> None:
    arguments = engine_arguments(
        DENSE,
        max_model_len=-1,
        kv_cache_memory_bytes=32 * MIB,
        additional_config=kvadmit(run_dir, require=False),
    )
    with engine(arguments) as child:
        assert child.first["differs"] == ["EngineArgs.create_engine_config"]
        assert child.generate(prompts(2), 4)
        assert "serving with stock vLLM: max_model_len=-1" in child.log()


@pytest.mark.slow
def test_a_start_that_cannot_fit_leaves_no_process_behind(run_dir: Path) -> None:
    """The floor exceeds the pool: refused in the middle of EngineCore's construction."""
    config = kvadmit(run_dir, host_pool=2 * MIB, floor="64MiB")
    child = EngineProcess(engine_arguments(DENSE, max_model_len=64, additional_config=config))
    try:
        child.refusal()
        log = child.log()
        assert "kvadmit.floor" in log, log
    finally:
        child.close()
    nothing_is_left(log, run_dir)


def nothing_is_left(log: str, run_dir: Path) -> None:
    """Fail if a worker that `log` tells of lives, or a file of an instance is there."""
    workers = [
        int(line.split("pid=")[1].split(")")[0])
        for line in log.splitlines()
        if "Worker pid=" in line
    ]
    assert workers, "no worker had been started: the test proves nothing"
    assert not [pid for pid in set(workers) if Path(f"/proc/{pid}").exists()]
    assert not list(run_dir.glob("i-*"))


# --- gates, without an engine ---------------------------------------------------------------


def plain_config() -> SimpleNamespace:
    """Return as much of a VllmConfig as the gates read, with nothing gated in it."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            nnodes=1, distributed_executor_backend="mp", enable_elastic_ep=False
        ),
        model_config=SimpleNamespace(original_max_model_len=1024, enable_sleep_mode=False),
        cache_config=SimpleNamespace(is_attention_free=False),
        attention_config=SimpleNamespace(hisparse_config=None, backend=None),
        load_config=SimpleNamespace(),
        kv_transfer_config=None,
    )


def connector(name: str) -> SimpleNamespace:
    return SimpleNamespace(kv_connector=name)


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("parallel_config.nnodes", 2, "2 nodes"),
        ("parallel_config.distributed_executor_backend", "external_launcher", "external_launcher"),
        ("parallel_config.distributed_executor_backend", "ray", "other hosts"),
        ("parallel_config.enable_elastic_ep", True, "elastic expert"),
        ("model_config.original_max_model_len", -1, "max_model_len=-1"),
        ("model_config.enable_sleep_mode", True, "sleep mode"),
        ("cache_config.is_attention_free", True, "no KV cache"),
        ("cache_config.extensible_kv_cache", True, "extensible"),
        ("attention_config.hisparse_config", object(), "HiSparse"),
        ("attention_config.backend", SimpleNamespace(name="FLEX_ATTENTION"), "FlexAttention"),
        ("kv_transfer_config", connector("NixlConnector"), "NixlConnector"),
        ("kv_transfer_config", connector("OffloadingConnector"), "after they were freed"),
        ("parallel_config.pipeline_parallel_size", 2, "pipeline_parallel_size=2"),
        ("load_config.snapshot_path", "/somewhere", "snapshot"),
    ],
)
def test_each_gate_names_its_reason(path: str, value: object, word: str) -> None:
    from kvadmit.vllm import gates

    config: Any = plain_config()
    gates.check_supported(config, "cpu")
    *owners, name = path.split(".")
    owner = config
    for one in owners:
        owner = getattr(owner, one)
    setattr(owner, name, value)
    with pytest.raises(UnsupportedError, match=word):
        gates.check_supported(config, "cpu")


def test_a_device_without_a_backend_is_refused() -> None:
    from kvadmit.vllm import gates

    with pytest.raises(UnsupportedError, match=r"'tpu'.*NVIDIA GPUs"):
        gates.check_supported(plain_config(), "tpu")


def test_virtual_size_is_the_pool_shared_by_ranks_or_what_the_user_gave_vllm() -> None:
    from kvadmit.vllm.engine_config import virtual_bytes

    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
        parallel_config=SimpleNamespace(world_size=2),
    )
    settings = Settings.parse({"host_pool": "8GiB", "cap": "2GiB"})
    assert virtual_bytes(config, settings) == 4 << 30
    config.cache_config.kv_cache_memory_bytes = 3 << 30
    assert virtual_bytes(config, settings) == 3 << 30


# --- shapes ---------------------------------------------------------------------------------


def test_the_installed_vllm_has_known_shapes() -> None:
    import vllm
    from kvadmit.vllm import shapes

    shapes.check_installed(vllm.__version__, str(Path(vllm.__file__).parent))


def test_an_unknown_version_names_both_sides() -> None:
    from kvadmit.vllm import shapes

    with pytest.raises(UnsupportedError, match=r"vLLM 0\.99\.1 is not known.*0\.29, .*0\.33"):
        shapes.check("0.99.1", {}, shapes.recorded())


def test_a_changed_hook_names_place_and_both_shapes() -> None:
    from kvadmit.vllm import shapes

    known = shapes.recorded()
    found = dict(known["0.32.0"])
    found["Worker.sample_tokens"] = ["self", "grammar_output", "surprise"]
    with pytest.raises(UnsupportedError) as caught:
        shapes.check("0.32.0", found, known)
    text = str(caught.value)
    assert "Worker.sample_tokens(self, grammar_output, surprise)" in text
    assert "knows (self, grammar_output)" in text
    assert "\n" not in text


def test_every_recorded_version_has_every_place() -> None:
    from kvadmit.vllm import shapes

    known = shapes.recorded()
    assert {shapes.minor(version) for version in known} == {
        "0.29",
        "0.30",
        "0.31",
        "0.32",
        "0.33",
    }
    names = {place.name for place in shapes.PLACES}
    for version, places in known.items():
        assert set(places) == names, version
        missing = [name for name, shape in places.items() if shape is None]
        optional = ["Scheduler._request_blocks_can_be_freed"] if version == "0.29.0" else []
        assert missing == optional, version


def test_a_repeated_body_is_the_same_whatever_its_comments_say() -> None:
    from kvadmit.vllm.shapes import Place, Reader

    place = Place("f", ("a.py",), "body")

    def digest(text: str) -> object:
        return Reader(lambda _: text).shape(place)

    plain = "def f(x):\n    y = x\n    return y\n"
    noted = 'def f(x):\n    """Say."""\n    # why\n    y = x  # here\n\n    return y\n'
    assert digest(plain) == digest(noted)
    assert digest(plain) != digest(plain.replace("return y", "return x"))

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path

import pytest

from kvadmit.config import (
    LATER_KEYS,
    Settings,
    as_table,
    default_host_pool,
    default_run_dir,
)
from kvadmit.errors import ConfigError
from kvadmit.units import GIB, MIB

ALL_KEYS = {
    "enable",
    "name",
    "floor",
    "cap",
    "extent",
    "margin",
    "start",
    "layout",
    "mps",
    "idle_decay_s",
    "wait_s",
    "reclaim_s",
    "start_wait_s",
    "require",
    "run_dir",
    "host_pool",
}


def refusal(**given: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Settings.parse(given)
    return caught.value


def test_nothing_given_is_off_and_valid() -> None:
    settings = Settings.parse({})
    assert not settings.enable
    assert settings.require
    assert (settings.floor, settings.cap, settings.extent) == (None,) * 3
    assert settings.host_pool > 0
    assert settings.run_dir.startswith("/")


def test_values_as_json_gives_them() -> None:
    settings = Settings.parse(
        {
            "enable": True,
            "name": "chat-7b",
            "floor": "1GiB",
            "cap": "4GiB",
            "extent": "16MiB",
            "layout": "blnhc",
            "idle_decay_s": 5,
            "wait_s": "2min",
            "reclaim_s": "500ms",
            "start_wait_s": 60.5,
            "require": False,
            "run_dir": "/run/shared",
            "host_pool": "8GiB",
        }
    )
    assert settings == Settings(
        enable=True,
        name="chat-7b",
        floor=GIB,
        cap=4 * GIB,
        extent=16 * MIB,
        layout="BLNHC",
        idle_decay_s=5.0,
        wait_s=120.0,
        reclaim_s=0.5,
        start_wait_s=60.5,
        require=False,
        run_dir="/run/shared",
        host_pool=8 * GIB,
    )


@pytest.mark.parametrize(
    ("key", "given", "value"),
    [
        ("enable", "true", True),
        ("enable", "False", False),
        ("name", 7, "7"),
        ("floor", 2**30, GIB),
        ("floor", "64Mi", 64 * MIB),
        ("floor", 0, 0),
        ("cap", 1.0 * GIB, GIB),
        ("cap", "auto", None),
        ("cap", None, None),
        ("wait_s", 0, 0.0),
        ("wait_s", "2.5", 2.5),
    ],
)
def test_values_as_the_dotted_command_line_gives_them(
    key: str, given: object, value: object
) -> None:
    assert getattr(Settings.parse({key: given}), key) == value


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("enable", 1),
        ("enable", "yes"),
        ("name", "-a"),
        ("name", "a/b"),
        ("name", "x" * 64),
        ("name", True),
        ("floor", "4G"),
        ("floor", -1),
        ("floor", True),
        ("cap", 0),
        ("cap", [1]),
        ("extent", "0MiB"),
        ("layout", "LHBNC"),
        ("layout", 3),
        ("wait_s", "soon"),
        ("wait_s", float("nan")),
        ("reclaim_s", 0),
        ("start_wait_s", "0s"),
        ("require", None.__class__),
        ("run_dir", "relative/path"),
        ("run_dir", 7),
        ("host_pool", "auto"),
        ("host_pool", 0),
    ],
)
def test_bad_values_name_the_key_and_what_is_allowed(key: str, given: object) -> None:
    error = refusal(**{key: given})
    assert error.key == key
    assert error.allowed
    assert str(error).startswith(f"kvadmit.{key}: got ")


def test_an_unknown_key_lists_the_keys_and_the_nearest() -> None:
    error = refusal(flor="1GiB")
    assert error.key == "flor"
    assert "did you mean 'floor'?" in error.allowed
    assert all(key in error.allowed for key in ALL_KEYS)


def test_an_unknown_key_like_no_other_gets_no_guess() -> None:
    assert "did you mean" not in refusal(zzz=1).allowed


@pytest.mark.parametrize("key", LATER_KEYS)
def test_a_key_of_a_later_release_is_called_that(key: str) -> None:
    error = refusal(**{key: 1})
    assert error.key == key
    assert "not in this release" in error.allowed


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"floor": "3GiB", "cap": "2GiB"}, "floor"),
        ({"extent": "64MiB", "cap": "32MiB"}, "extent"),
    ],
)
def test_values_that_contradict_each_other(given: dict[str, object], key: str) -> None:
    error = refusal(**given)
    assert error.key == key
    assert "the cap" in error.allowed


def test_values_that_just_agree() -> None:
    settings = Settings.parse({"floor": "2GiB", "cap": "2GiB", "extent": "2GiB"})
    assert settings.floor == settings.cap == settings.extent


def test_a_mapping_of_settings_parses_to_the_same() -> None:
    for settings in (Settings.parse({}), Settings.parse({"enable": True, "name": "a", "cap": 9})):
        mapping = settings.as_mapping()
        assert Settings.parse(pickle.loads(pickle.dumps(mapping))) == settings  # noqa: S301 - ours


def test_the_table_covers_every_key_once() -> None:
    rows = as_table()
    assert [key for key, *_ in rows] == list(Settings.__struct_fields__)
    assert {key for key, *_ in rows} == ALL_KEYS
    assert all(all(cells) for cells in rows)


class TestDefaultRunDir:
    def test_the_session_directory_where_there_is_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        assert default_run_dir() == f"{tmp_path}/kvadmit"
        assert Settings.parse({}).run_dir == f"{tmp_path}/kvadmit"
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("session", [None, "", "/missing/dir", "file"])
    def test_else_the_temporary_directory(
        self, session: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.gettempdir", lambda: "/scratch")
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        if session == "file":
            (tmp_path / "file").touch()
            session = str(tmp_path / "file")
        if session is not None:
            monkeypatch.setenv("XDG_RUNTIME_DIR", session)
        assert default_run_dir() == f"/scratch/kvadmit-{os.getuid()}"

    def test_never_a_directory_of_somebody_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        other = tmp_path.stat().st_uid + 1
        monkeypatch.setattr("os.getuid", lambda: other)
        assert default_run_dir() == f"{tempfile.gettempdir()}/kvadmit-{other}"


def test_the_host_pool_is_a_quarter_of_the_memory() -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    pool = default_host_pool()
    assert pool % MIB == 0
    assert 0 < pool <= machine // 4


@pytest.mark.parametrize(("limit", "pool"), [("1073741824\n", GIB // 4), ("max\n", None)])
def test_the_host_pool_keeps_to_the_cgroup(
    limit: str, pool: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlimited = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4 // MIB * MIB
    monkeypatch.setattr("pathlib.Path.read_text", lambda _: limit)
    assert default_host_pool() == (unlimited if pool is None else pool)

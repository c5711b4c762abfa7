"""Settings: what a user may write under `additional_config["kvadmit"]`.

Owns: the keys, their types, defaults and meanings, and every check that needs nothing but
the settings themselves. Must not know: vLLM's configuration, or what a key leads to.

Values arrive in two shapes: JSON as written, and vLLM's dotted command line, which has
already turned `true`, `null`, `0.5` and `8k` into Python values but leaves `64MiB` a string.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvadmit.errors import ConfigError
from kvadmit.units import MIB, align_down, format_bytes, parse_bytes, parse_seconds

LAYOUTS = ("auto", "stock", "LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC")
"""vLLM's `KVCacheLayout` names, less LHBNC, which puts heads outside blocks."""

LATER_KEYS = ("weight", "cache")
"""Keys of the design that later releases will read."""

MPS_WORDS = ("require", "ignore")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SIZE_TEXT = 'a size like "4GiB", "64MiB" or a number of bytes'
_SECONDS_TEXT = 'seconds, like 2.5, "500ms" or "2min"'


def default_run_dir() -> str:
    """Return the directory of this user's sockets and the host pool, without making it.

    `$XDG_RUNTIME_DIR/kvadmit` where that variable names an existing directory of ours,
    else `kvadmit-<uid>` in the directory for temporary files.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime:
        try:
            found = os.stat(runtime)
        except OSError:
            pass  # a stale variable is common in containers; the fallback is meant for it
        else:
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                return str(Path(runtime) / "kvadmit")
    return str(Path(tempfile.gettempdir()) / f"kvadmit-{os.getuid()}")


def default_host_pool() -> int:
    """Return a quarter of the memory this process may use, in bytes, whole MiB.

    The smaller of the machine's memory and the cgroup's limit counts, because a container
    that books more than its limit is killed, not refused.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        limit = machine  # no cgroup v2, or the word "max"
    return align_down(min(machine, limit) // 4, MIB)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting of one instance, checked; sizes in bytes, times in seconds.

    Sizes of memory are per device. Build with `Settings.parse`: the constructor checks
    nothing.
    """

    enable: bool = False
    name: str = ""
    floor: int | None = None
    cap: int | None = None
    extent: int | None = None
    margin: int | None = None
    start: int | None = None
    layout: str = "auto"
    mps: str = "require"
    idle_decay_s: float = 30.0
    wait_s: float = 120.0
    reclaim_s: float = 5.0
    start_wait_s: float = 300.0
    require: bool = True
    run_dir: str = msgspec.field(default_factory=default_run_dir)
    host_pool: int = msgspec.field(default_factory=default_host_pool)

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> Settings:
        """Return the settings `given` means; a value of None stands for the default.

        Raises ConfigError naming the key, what was given and what is allowed: for an unknown
        key, a key of a later release, a bad value, or two values that contradict.
        """
        values: dict[str, Any] = {}
        for key, value in given.items():
            if key not in _KEYS:
                raise _unknown_key(key, value)
            if value is not None:
                values[key] = _KEYS[key].read(key, value)
        settings = cls(**values)
        _check_together(settings)
        return settings

    def as_mapping(self) -> dict[str, object]:
        """Return plain values that `parse` turns into equal settings (it may be pickled)."""
        return msgspec.structs.asdict(self)


def as_table() -> list[tuple[str, str, str, str]]:
    """Return a row per key for people: key, what it takes, its default, what it means."""
    return [(key, spec.takes, spec.default, spec.meaning) for key, spec in _KEYS.items()]


def _read_bool(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "false": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise ConfigError(key, value, "true or false")


def _read_name(key: str, value: object) -> str:
    # The dotted command line makes a number of a name that looks like one.
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str) and (text == "" or _NAME.fullmatch(text)):
        return text  # empty: the default, as in `as_mapping`
    raise ConfigError(key, value, "1 to 63 letters, digits, dots, dashes or underscores")


def _read_layout(key: str, value: object) -> str:
    for layout in LAYOUTS:
        if isinstance(value, str) and value.lower() == layout.lower():
            return layout
    raise ConfigError(key, value, ", ".join(LAYOUTS))


def _read_mps(key: str, value: object) -> str:
    if value in MPS_WORDS:
        return str(value)
    raise ConfigError(key, value, " or ".join(MPS_WORDS))


def _read_directory(key: str, value: object) -> str:
    if isinstance(value, str) and value.startswith("/") and "\0" not in value:
        return value
    raise ConfigError(key, value, "an absolute path")


def _read_size(key: str, value: object) -> int:
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ConfigError(key, value, f"{_SIZE_TEXT} ({error})") from None


def _read_positive_size(key: str, value: object) -> int:
    size = _read_size(key, value)
    if size == 0:
        raise ConfigError(key, value, f"{_SIZE_TEXT}, more than 0")
    return size


def _read_optional_size(key: str, value: object) -> int | None:
    if value == "auto":
        return None
    return _read_positive_size(key, value)


def _read_seconds(key: str, value: object) -> float:
    try:
        return parse_seconds(value)
    except ValueError as error:
        raise ConfigError(key, value, f"{_SECONDS_TEXT} ({error})") from None


class _Key(msgspec.Struct, frozen=True):
    read: Callable[[str, object], Any]
    takes: str
    default: str
    meaning: str


_KEYS: dict[str, _Key] = {
    "enable": _Key(
        _read_bool,
        "true or false",
        "false",
        "Share KV memory with the other instances of this host.",
    ),
    "name": _Key(
        _read_name,
        "text",
        "made from the model's name and the process id",
        "How the instance is called in status, metrics and messages about who holds what.",
    ),
    "floor": _Key(
        _read_size,
        "size per device",
        "what one request of max_model_len needs",
        "KV memory this instance can always get back, whatever its neighbours do.",
    ),
    "cap": _Key(
        _read_optional_size,
        'size per device or "auto"',
        "auto: all that the device can give",
        "Most KV memory this instance may ever hold.",
    ),
    "extent": _Key(
        _read_optional_size,
        'size per rank or "auto"',
        "auto: 1/64 of the buffer, at most 32MiB",
        "Memory that is mapped and given back as one.",
    ),
    "margin": _Key(
        _read_size,
        "size per device",
        "a fiftieth of a GPU, nothing of the host pool",
        "Memory of a device that is never lent: for what processes take beside KV cache after "
        "they have started. Of several instances' margins the largest counts.",
    ),
    "start": _Key(
        _read_size,
        "size per device",
        "on GPUs what the checkpoint's weights take, and 3GiB",
        "Memory beside KV cache that a start needs on each device; neighbours make room for it "
        "first.",
    ),
    "layout": _Key(
        _read_layout,
        " | ".join(LAYOUTS),
        "auto",
        "Order of the KV cache in memory: auto puts blocks outermost on GPUs, where an extent is "
        "then one mapping, and leaves vLLM's choice on CPUs; stock always leaves it; a name of "
        "vLLM's forces that one, also where the attention backend does not list it.",
    ),
    "mps": _Key(
        _read_mps,
        " | ".join(MPS_WORDS),
        "require",
        "What an engine of several ranks asks of neighbours on its GPUs: to be clients of one "
        "NVIDIA MPS daemon with it, or nothing.",
    ),
    "idle_decay_s": _Key(
        _read_seconds,
        "seconds",
        "30",
        "How long a free extent is kept when nobody asks for it; 0 gives it back at once.",
    ),
    "wait_s": _Key(
        _read_seconds,
        "seconds",
        "120",
        "How long a request may wait for memory that neighbours hold before it fails.",
    ),
    "reclaim_s": _Key(
        _read_seconds,
        "seconds",
        "5",
        "Within what time an instance that was asked for memory gives some back, before others "
        "are asked instead. The instance that starts the arbiter sets it for all.",
    ),
    "start_wait_s": _Key(
        _read_seconds,
        "seconds",
        "300",
        "How long a start waits for its first memory before it fails and says who holds what.",
    ),
    "require": _Key(
        _read_bool,
        "true or false",
        "true",
        "Refuse to serve when this vLLM, feature or machine is not supported; false serves with "
        "stock vLLM instead. A bad setting is refused either way.",
    ),
    "run_dir": _Key(
        _read_directory,
        "absolute path",
        "$XDG_RUNTIME_DIR/kvadmit, else kvadmit-<uid> in the temporary directory",
        "Where sockets and the host pool live; the same for all instances that share memory.",
    ),
    "host_pool": _Key(
        _read_positive_size,
        "size",
        "a quarter of the machine's memory",
        "Host memory that all CPU instances share; the same for all of them.",
    ),
}


def _unknown_key(key: object, value: object) -> ConfigError:
    allowed = "the keys " + ", ".join(_KEYS)
    if key in LATER_KEYS:
        return ConfigError(str(key), value, f"nothing: not in this release; {allowed}")
    close = difflib.get_close_matches(str(key), _KEYS, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ConfigError(str(key), value, f"{hint}{allowed}")


def _check_together(settings: Settings) -> None:
    """Refuse values that are fine alone but cannot hold together."""
    floor, cap, extent = settings.floor, settings.cap, settings.extent
    if floor is not None and cap is not None and floor > cap:
        raise ConfigError("floor", format_bytes(floor), f"at most the cap, {format_bytes(cap)}")
    if extent is not None and cap is not None and extent > cap:
        raise ConfigError("extent", format_bytes(extent), f"at most the cap, {format_bytes(cap)}")
    # Only waits that a fault ends; a request that may wait for no time is a valid wish.
    for key in ("reclaim_s", "start_wait_s"):
        if getattr(settings, key) == 0:
            raise ConfigError(key, 0, f"{_SECONDS_TEXT}, more than 0")

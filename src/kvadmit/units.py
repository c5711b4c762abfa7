"""Bytes and seconds as people write them, and the arithmetic of whole units.

Owns: reading and printing sizes and times, rounding to multiples. Must not know: which
setting a value belongs to (callers turn the ValueError into a ConfigError naming the key).
"""

from __future__ import annotations

import math
import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "ki": KIB,
    "mi": MIB,
    "gi": GIB,
    "ti": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
"""By lower-cased suffix. A bare k, m, g or t is left out: tools disagree on what it means."""

_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|h|)\s*")
_TIME_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}

_PRINTED = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))


def parse_bytes(value: object) -> int:
    """Return the bytes `value` means: a whole number, or text like `"4GiB"` or `"64Mi"`.

    Raises ValueError for anything else: negative, not whole bytes, unknown unit, a bool.
    """
    if isinstance(value, bool):
        raise ValueError("a size is not true or false")
    if isinstance(value, int):
        if value < 0:
            raise ValueError("a size is not negative")
        return value
    if isinstance(value, float):
        # vLLM's dotted command line reads `1.0` as a float.
        if value < 0 or not value.is_integer():
            raise ValueError("a size is a whole number of bytes")
        return int(value)
    if not isinstance(value, str):
        raise ValueError(f"a size is a number or text, not {type(value).__name__}")
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError('a size looks like "4GiB", "64MiB" or a number of bytes')
    factor = _SIZE_UNITS.get(match[2].lower())
    if factor is None:
        raise ValueError(f"unknown unit {match[2]!r}; use KiB, MiB, GiB, TiB, kB, MB, GB or TB")
    whole, _, fraction = match[1].partition(".")
    scale = int("1" + "0" * len(fraction))
    bytes_scaled = int(whole + fraction) * factor
    if bytes_scaled % scale:
        raise ValueError("a size is a whole number of bytes")
    return bytes_scaled // scale


def format_bytes(count: int) -> str:
    """Return `count` bytes for people: exact with a unit where it divides, else 2 digits."""
    if count < 0:
        return "-" + format_bytes(-count)
    for name, size in _PRINTED:
        if count >= size:
            return f"{count // size}{name}" if count % size == 0 else f"{count / size:.2f}{name}"
    return f"{count}B"


def parse_seconds(value: object) -> float:
    """Return the seconds `value` means: a number, or text like `"2.5"`, `"500ms"`, `"2min"`.

    Raises ValueError for anything else: negative, not finite, a bool, unknown unit.
    """
    if isinstance(value, bool):
        raise ValueError("a time is not true or false")
    if isinstance(value, (int, float)):
        if not math.isfinite(value) or value < 0:
            raise ValueError("a time is finite and not negative")
        return float(value)
    if not isinstance(value, str):
        raise ValueError(f"a time is a number or text, not {type(value).__name__}")
    match = _TIME.fullmatch(value)
    if match is None:
        raise ValueError('a time looks like 2.5, "2.5s", "500ms", "2min" or "1h"')
    return float(match[1]) * _TIME_UNITS[match[2]]


def ceil_div(count: int, unit: int) -> int:
    """Return how many `unit`s hold `count`."""
    return -(-count // unit)


def align_up(count: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not below `count`."""
    return ceil_div(count, unit) * unit


def align_down(count: int, unit: int) -> int:
    """Return the largest multiple of `unit` that is not above `count`."""
    return count // unit * unit

from __future__ import annotations

import pytest

from kvadmit.units import (
    GIB,
    MIB,
    align_down,
    align_up,
    ceil_div,
    format_bytes,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (0, 0),
        (4096, 4096),
        (1.0, 1),
        ("4096", 4096),
        ("4GiB", 4 * GIB),
        ("4 GiB", 4 * GIB),
        (" 64mib ", 64 * MIB),
        ("64Mi", 64 * MIB),
        ("1.5GiB", 3 * GIB // 2),
        ("2MB", 2_000_000),
        ("0.1kB", 100),
        ("1TiB", 1 << 40),
        ("7b", 7),
        # Exact where a float would not be.
        ("9007199254740993", 9007199254740993),
        ("4503599627370496.5KiB", 4503599627370496 * 1024 + 512),
    ],
)
def test_sizes(given: object, count: int) -> None:
    assert parse_bytes(given) == count


@pytest.mark.parametrize(
    "given",
    [
        "",
        "GiB",
        "-1",
        -1,
        -1.0,
        1.5,
        "0.3B",
        "4G",
        "4k",
        "1e9",
        "0x10",
        "inf",
        float("nan"),
        float("inf"),
        True,
        False,
        None,
        [4],
    ],
    ids=repr,
)
def test_what_is_not_a_size(given: object) -> None:
    with pytest.raises(ValueError):
        parse_bytes(given)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(0, 0.0), (2, 2.0), (0.25, 0.25), ("2.5", 2.5), ("2.5s", 2.5), ("500ms", 0.5), ("2 min", 120)],
)
def test_times(given: object, seconds: float) -> None:
    assert parse_seconds(given) == seconds


@pytest.mark.parametrize(
    "given", ["", "s", "-1", -1, "1d", True, None, float("nan"), float("inf")], ids=repr
)
def test_what_is_not_a_time(given: object) -> None:
    with pytest.raises(ValueError):
        parse_seconds(given)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1536, "1.50KiB"),
        (64 * MIB, "64MiB"),
        (5 * GIB, "5GiB"),
        (5 * GIB + 1, "5.00GiB"),
        (3 << 40, "3TiB"),
        (-2 * MIB, "-2MiB"),
    ],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(("count", "up", "down"), [(0, 0, 0), (1, 8, 0), (8, 8, 8), (9, 16, 8)])
def test_multiples(count: int, up: int, down: int) -> None:
    assert align_up(count, 8) == up
    assert align_down(count, 8) == down
    assert ceil_div(count, 8) == up // 8

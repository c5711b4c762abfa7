"""Values of the benches' command lines: one clear line for what cannot be read.

Owns: turning a ValueError of a parser into what argparse prints. Must not know: any option.
"""

from __future__ import annotations

import argparse

from kvadmit.units import parse_bytes


def size(text: str) -> int:
    """Read a size like `64MiB`. Raises argparse.ArgumentTypeError that says what is allowed."""
    try:
        return parse_bytes(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def not_negative(text: str) -> int:
    """Read a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def minutes(text: str) -> float:
    """Read a time in minutes, above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time in minutes above 0")
    return value


def bounds(text: str) -> tuple[int, int]:
    """Read `LOW:HIGH` or one number, both at least 1."""
    low, _, high = text.partition(":")
    high = high or low
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH with 1 <= LOW <= HIGH")
    return int(low), int(high)

"""Replacing an attribute of vLLM's, once, and telling ours from theirs.

Owns: which attributes are replaced already. Must not know: what by, or why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_replaced: set[tuple[Any, str]] = set()
"""Not a mark on the replacement: what another plugin puts around ours would hide it."""


def replace(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace `owner.name` by `make(original)`, unless that was done before."""
    if (owner, name) in _replaced:
        return
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))
    _replaced.add((owner, name))

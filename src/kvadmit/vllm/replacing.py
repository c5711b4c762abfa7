"""Replacing an attribute of vLLM's, once, and telling ours from theirs.

Owns: the mark on a replacement. Must not know: which attributes, or why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "__kvadmit_original__"


def replace(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace `owner.name` by `make(original)`, unless that was done before."""
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return
    replacement = functools.wraps(original)(make(original))
    setattr(replacement, _MARK, original)
    setattr(owner, name, replacement)

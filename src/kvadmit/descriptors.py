"""Descriptors whose closing means something to another process.

Owns: the list of sockets and lock files that a forked child must not keep open. A lease
line, a lock or a listening socket ends when its *last* copy closes; a child made by
`fork()` holds copies of all of them, so the death of the parent would go unseen as long as
any child lives. They are closed in the child, first thing, by `os.register_at_fork`. (Exec
needs no help: Python opens every descriptor close-on-exec.) Must not know: what they are.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Closeable(Protocol):
    """Something holding descriptors: `close_inherited` closes this process's copies only."""

    def close_inherited(self) -> None: ...


_held: weakref.WeakSet[Closeable] = weakref.WeakSet()


def close_after_fork(holder: Closeable) -> None:
    """Have `holder.close_inherited()` called in every child forked from now on.

    Held weakly: nothing to undo when the holder goes away.
    """
    _held.add(holder)


def close_quietly(descriptor: int) -> None:
    """Close `descriptor`; one that is already gone is no error. Negative ones are ignored."""
    if descriptor < 0:
        return
    try:
        os.close(descriptor)
    except OSError:  # an engine's own clean-up may close everything above 2 before us
        return


def _close_in_child() -> None:
    for holder in list(_held):
        holder.close_inherited()
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)

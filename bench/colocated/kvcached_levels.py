"""What an instance under kvcached holds, as kvcached itself tells its own tools.

Owns: reading the shared memory segment that its EngineCore keeps up to date (three 64-bit
numbers: total, used and preallocated bytes of one rank). Must not know: anything else of it.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

SEGMENTS = Path("/dev/shm")  # noqa: S108  # where POSIX puts them
_NUMBERS = struct.Struct("=3q")


class KvcachedLevels:
    """The levels of the instance whose name is in the environment; `ranks` of it hold alike."""

    def __init__(self, ranks: int) -> None:
        self._path = SEGMENTS / os.environ["KVCACHED_IPC_NAME"]
        self._ranks = ranks

    def held_bytes(self) -> int:
        """Return the bytes backed on all ranks; 0 before the first are."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return 0
        if len(content) < _NUMBERS.size:
            return 0  # being made at this moment
        _, used, preallocated = _NUMBERS.unpack_from(content)
        return int((used + preallocated) * self._ranks)

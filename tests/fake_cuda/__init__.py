"""The fake driver: built once per test session, steered by tests in the same process."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "fake_cuda.c"
GRANULE_BYTES = 64 * 1024
KINDS = ("handles", "reservations", "mappings", "contexts", "pushed")


def build(directory: Path, source: Path = SOURCE) -> Path:
    """Compile the library into `directory`."""
    library = directory / "libcuda-fake.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Werror"]
    subprocess.run([*command, "-o", str(library), str(source), "-lpthread"], check=True)
    return library


class FakeCuda:
    """The library as a test sees it."""

    def __init__(self, library: Path) -> None:
        self.path = str(library)
        self._calls = ctypes.CDLL(self.path)

    def use_budget(self, path: Path, total_bytes: int) -> None:
        """Share the budget in `path`, made with `total_bytes` if it is not there."""
        made = self._calls.fake_budget(str(path).encode(), ctypes.c_size_t(total_bytes))
        assert made == 0

    def drop_budget(self) -> None:
        """Close the budget's file."""
        self._calls.fake_drop_budget()

    def fail(self, call: str, nth: int, number: int = 2, *, for_good: bool = False) -> None:
        """Have the `nth` such call from now on fail; 0: none any more."""
        if nth == 0:
            nth = -self.made(call)
        self._calls.fake_fail(call.encode(), ctypes.c_long(nth), number, int(for_good))

    def delay(self, call: str, microseconds: int) -> None:
        """Have every such call take this much longer."""
        self._calls.fake_delay(call.encode(), microseconds)

    def made(self, call: str) -> int:
        """How many such calls there were."""
        return int(self._calls.fake_made(call.encode()))

    def live(self, kind: str) -> int:
        """How many of `kind`, one of KINDS, there are."""
        return int(self._calls.fake_live(kind.encode()))

    def have(self, *, vmm: bool = True, mps: int = 0) -> None:
        """Set what the devices say of themselves. `mps`: -1 for a driver that cannot tell."""
        self._calls.fake_capabilities(int(vmm), mps)

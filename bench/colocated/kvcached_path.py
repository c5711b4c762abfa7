"""kvcached's own way to all ranks: one map and one unmap, as its EngineCore asks for them.

Owns: ranks as processes that serve kvcached's listener, and the clock around its two broadcasts.
Must not know: our own path. Each rank is started as `python -m bench.colocated.kvcached_path RANK
RANKS LAYERS PAGES SIGN`. Growing here ends when every rank has answered; nothing is zeroed.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

START_S = 120.0
STOP_S = 30.0
PAGE_BYTES = 2 << 20
"""kvcached's default: of one layer's keys, or values. A page of its compound layout is that of
all layers."""


class KvcachedRanks:
    """As many ranks as asked for, each on its own GPU; `cycle` maps and unmaps `batch` pages."""

    def __init__(self, ranks: int, layers: int, pages: int) -> None:
        """Start nothing yet."""
        self.page_bytes = PAGE_BYTES * layers * 2
        self._ranks, self._layers, self._pages = ranks, layers, pages
        self._processes = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Start the ranks; returns when every one serves."""
        # Read by kvcached when it is first imported, here and in the ranks.
        os.environ["KVCACHED_IPC_NAME"] = f"path{os.getpid()}"
        with contextlib.ExitStack() as undo:
            signs = [undo.enter_context(_rank(number, self)) for number in range(self._ranks)]
            for number, sign in enumerate(signs):
                ready, _, _ = select.select([sign], [], [], START_S)
                if not ready or not os.read(sign, 1):
                    raise SystemExit(f"kvcached's rank {number} did not start")
            self._processes = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End the ranks."""
        self._processes.close()

    def command(self, rank: int, sign: int) -> list[str]:
        """Return the command line of a rank, which writes to `sign` once it serves."""
        numbers = (rank, self._ranks, self._layers, self._pages, sign)
        return [sys.executable, "-m", "bench.colocated.kvcached_path", *map(str, numbers)]

    def cycle(self, batch: int) -> tuple[float, float]:
        """Return the microseconds that one map and one unmap of `batch` pages took."""
        from kvcached import tp_ipc_util

        offsets = [page * self.page_bytes for page in range(1, batch + 1)]
        began_s = time.perf_counter()
        tp_ipc_util.broadcast_map_to_kv_tensors(self._ranks, offsets)
        mapped_s = time.perf_counter()
        tp_ipc_util.broadcast_unmap_from_kv_tensors(self._ranks, offsets)
        return (mapped_s - began_s) * 1e6, (time.perf_counter() - mapped_s) * 1e6


@contextlib.contextmanager
def _rank(number: int, peer: KvcachedRanks) -> Iterator[int]:
    """Run a rank until the block ends; yields what becomes readable when it serves, or ended."""
    ours, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            peer.command(number, theirs),
            cwd=Path(__file__).resolve().parents[2],
            stdin=subprocess.PIPE,
            pass_fds=[theirs],
        )
    finally:
        os.close(theirs)
    try:
        yield ours
    finally:
        os.close(ours)
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def serve(rank: int, ranks: int, layers: int, pages: int, sign: int) -> None:
    """Own one rank's tensors until stdin ends."""
    import torch
    from kvcached.integration.vllm import interfaces
    from kvcached.vmm_ops import create_kv_tensors

    device = f"cuda:{rank}"
    torch.cuda.set_device(rank)
    interfaces.init_kvcached(tp_rank=rank, world_size=ranks, is_worker=True, device=device)
    tensors = create_kv_tensors(2 * PAGE_BYTES * pages, 2, device, layers)
    os.write(sign, b"1")
    sys.stdin.read()
    del tensors
    interfaces.shutdown_kvcached()


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))

"""Which memory driver a worker uses.

Owns: the choice, by the runtime's `backend`. Must not know: vLLM's workers. The next
backend is one more branch here; everything else speaks `AddressSpace`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvadmit.errors import UnsupportedError
from kvadmit.vmm import AddressSpace, ExtentLayout
from kvadmit.vmm_host import GRANULE_BYTES, HostAddressSpace, HostPool


class Backing:
    """One rank's address space, the tensor over it, and what has to be closed with it."""

    def __init__(self, space: AddressSpace, tensor: torch.Tensor, pool: HostPool) -> None:
        """Take ownership of `space` and `pool`."""
        self.space = space
        self.tensor: torch.Tensor | None = tensor
        self._pool = pool

    def close(self) -> None:
        """Free the memory; the addresses stay reserved while a tensor refers to them."""
        self.tensor = None
        self.space.close()
        self._pool.close()


def granule_bytes() -> int:
    """Return the driver's allocation unit on this machine."""
    return GRANULE_BYTES


def make_backing(runtime: Mapping[str, Any], layout: ExtentLayout, *, device: str) -> Backing:
    """Reserve addresses for `layout` with nothing behind them, and lay a tensor over them.

    The int8 tensor has exactly `layout.buffer_bytes`. Raises DriverError, CapacityError.
    """
    backend = runtime["backend"]
    if backend != "host":
        raise UnsupportedError(f"memory backend {backend!r}: this release has 'host' only")
    pool = HostPool(str(runtime["host_pool_path"]), int(runtime["host_pool"]))
    try:
        space = HostAddressSpace(layout, device=device, pool=pool)
    except BaseException:
        pool.close()
        raise
    tensor = torch.frombuffer(space.buffer(), dtype=torch.int8)
    return Backing(space, tensor, pool)

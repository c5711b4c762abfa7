"""Which memory driver a worker uses.

Owns: the choice, by the runtime's `backend`. Must not know: vLLM's workers. The next
backend is one more branch here; everything else speaks `AddressSpace`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvadmit.errors import DriverError, UnsupportedError
from kvadmit.vllm.devices import process_bytes
from kvadmit.vmm import AddressSpace, ExtentLayout
from kvadmit.vmm_cuda import CudaAddressSpace
from kvadmit.vmm_host import HostAddressSpace, HostPool

logger = logging.getLogger("vllm.kvadmit")


class Backing:
    """One rank's address space, the tensor over it, and what has to be closed with it.

    `device_wait` returns once the device has finished what is enqueued; None where nothing is
    ever enqueued, as on the CPU. `stream` returns the driver's number of the stream on which the
    calling thread enqueues now.
    """

    def __init__(
        self,
        space: AddressSpace,
        tensor: torch.Tensor,
        *,
        pool: HostPool | None = None,
        device_wait: Callable[[], None] | None = None,
        stream: Callable[[], int] = lambda: 0,
        base_bytes: Callable[[int], int | None] = lambda kv_bytes: None,
    ) -> None:
        """Take ownership of `space` and `pool`.

        `base_bytes(kv_bytes)` returns what this process holds on the device beside `kv_bytes`
        of KV memory; None where that is nothing or nobody can say.
        """
        self.space = space
        self.tensor: torch.Tensor | None = tensor
        self.device_wait = device_wait
        self.stream = stream
        self.base_bytes = base_bytes
        self._pool = pool

    def close(self) -> None:
        """Free the memory; the addresses stay reserved while a tensor refers to them."""
        self.tensor = None
        self.space.close()
        if self._pool is not None:
            self._pool.close()


def make_backing(
    runtime: Mapping[str, Any], layout: ExtentLayout, *, device: str, ordinal: int, ranks: int
) -> Backing:
    """Reserve addresses for `layout` with nothing behind them, and lay a tensor over them.

    The int8 tensor has exactly `layout.buffer_bytes`. `ordinal`: what PyTorch calls a GPU in
    this process; `ranks` of the whole engine. Raises DriverError, CapacityError, UnsupportedError.
    """
    if runtime["backend"] == "cuda":
        return _on_gpu(layout, device, ordinal, ranks)
    pool = HostPool(str(runtime["host_pool_path"]), int(runtime["host_pool"]))
    try:
        space = HostAddressSpace(layout, device=device, pool=pool)
    except BaseException:
        pool.close()
        raise
    tensor = torch.frombuffer(space.buffer(), dtype=torch.int8)
    return Backing(space, tensor, pool=pool)


def _on_gpu(layout: ExtentLayout, device: str, ordinal: int, ranks: int) -> Backing:
    space = CudaAddressSpace(layout, ordinal=ordinal)
    if ranks > 1 and space.described.mps is False:
        logger.warning(
            "no MPS daemon serves %s: with another instance on the same GPUs the collectives of "
            "both would spin in each other's time slices; start nvidia-cuda-mps-control first",
            device,
        )
    try:
        if space.device != device:
            raise UnsupportedError(
                f"EngineCore expects this worker on {device}, its GPU {ordinal} is {space.device}"
            )
        tensor = torch.utils.dlpack.from_dlpack(space.dlpack())
    except BaseException:
        space.close()
        raise

    def base_bytes(kv_bytes: int) -> int | None:
        try:
            held = process_bytes(device, os.getpid())
        except DriverError as error:
            logger.warning("%s cannot say what this process holds: %s", device, error)
            return None
        if held is None:
            return None
        # What PyTorch gave back to the driver since its peak (the activations of the largest
        # batch) it will take again.
        again = torch.cuda.max_memory_reserved(ordinal) - torch.cuda.memory_reserved(ordinal)
        return max(0, held - kv_bytes) + max(0, int(again))

    def stream() -> int:
        return int(torch.cuda.current_stream(ordinal).cuda_stream)

    return Backing(
        space, tensor, device_wait=space.wait_device, stream=stream, base_bytes=base_bytes
    )

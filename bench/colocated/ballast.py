"""A process that makes big GPUs small: it holds all but some bytes of each until stdin closes.

    python -m bench.colocated.ballast LEAVE_BYTES

Owns: the allocations. Must not know: who shares the rest. Prints "ready" once they are made, else
one line that says why not.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Allocate, say so, wait for the end of stdin."""
    import torch

    leave_bytes = int(sys.argv[1])
    held = []
    for index in range(torch.cuda.device_count()):
        # The context that this makes is part of what is taken: look after it.
        held.append(torch.empty(1, dtype=torch.uint8, device=f"cuda:{index}"))
        free_bytes, _ = torch.cuda.mem_get_info(index)
        if free_bytes < leave_bytes:
            print(f"GPU {index} has {free_bytes} bytes free, {leave_bytes} should be left")
            return 1
        size = free_bytes - leave_bytes
        held.append(torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}"))
    print("ready", flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())

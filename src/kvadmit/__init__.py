"""kvadmit: several vLLM instances share the KV cache memory of the same devices.

Stock vLLM gives each instance a fixed slice; here every instance reserves addresses for
more than it holds, and physical memory moves to where requests need it. Decisions are made
in pure code, acts happen at the edges, and their results come back as events.

Leaves (`errors`, `units`, `config`, `messages`, `vmm`): values without behaviour of their
own. What can go wrong, what a setting means, what goes over the wire, what a memory driver
offers and which bytes belong to which extent.

Pure core (`extents`, `geometry`, `ledger`, `policy`, `group`, `member`, `arbitration`,
`link`, `pool`, `port`): three machines with `step(event) -> effects`, `check()` and
`snapshot()`. *Group* knows the extents of one instance on all its ranks, *member* the
physical memory of one rank, *arbitration* how much each instance may hold on each device.
Beside them the pool, which hands blocks to vLLM, and the port between its thread and the
coordinator's. No clock, socket, thread, driver or randomness.

Edges (`vmm_host`, `vmm_cuda`, `channel`, `rundir`, `observe`): the only code that touches the
machine. Virtual memory of the host and of NVIDIA GPUs (the driver calls are in `_vmm_cuda.c`),
ZeroMQ sockets and lease lines, the run directory, counters.

Shells (`coordinator`, `agent`, `arbiter`): one thread or process each, which owns a
machine, runs its effects in order and feeds every completion back as an event.

Doors (`vllm`, `cli`, `arbiter_process`): how users come in. The plugin with its hooks into vLLM,
the operator's commands, and the process that becomes the arbiter.

Fakes (`testing`): a memory driver made of arithmetic and what else the tests and the
simulator stand on.

The path of one growth:

1. *need*. The scheduler finds no blocks for its next step, or fewer free than its low
   watermark. The pool posts absolute levels through the port and goes on; the coordinator
   sends the arbiter a Report.
2. *allowance*. The arbiter finds the bytes on all devices of the group, asking neighbours
   for spare, free and cache-only extents if it must, and raises the instance's Allowance.
3. *prepare*. The coordinator sends every rank one batched PREPARE; the agents create the
   physical memory. A "no" undoes the step on all ranks, and nobody else notices.
4. *commit*. All ranks prepared: COMMIT maps and allows access. From the first map call on
   nothing is undone; what is half done is finished later.
5. *resident*. All ranks committed: the extents' blocks enter the pool through the port at
   the scheduler's next step, and a parked engine is woken. Each worker zeroes what is new
   on the step's stream, before the step.
"""

__version__ = "0.1.0.dev0"

__all__ = ["__version__"]

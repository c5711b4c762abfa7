"""The design kvadmit replaces, built as well as it can be: growth on the scheduler's path.

Workers own the memory; the scheduler, when it lacks blocks, calls all ranks at once over
persistent connections and waits for all of them. Each rank looks once at the device's
headroom, just in time, and maps or refuses; if any refuses, those that mapped undo it, and
the next step tries again. Wholly free extents go back the same way, behind a fence. There is
no arbiter: who asks when there is room gets it.

Buffer, geometry, blocks and memory driver are kvadmit's own, so that only the way growth is
decided differs: `vllm_plugin` puts this package's `Caller`, `SyncAgent` and scheduler mixin
in the places of kvadmit's coordinator, agent and mixin. `growth` is what both the mixin and
the simulated engine do per step; `wire` is the talk between scheduler and ranks.
"""

"""vLLM's busy waits, made the shortest sleeps: a plugin of vLLM's, the same for every policy.

Owns: how a process of vLLM's waits for another one's message. Changes no decision.

vLLM's message queues spin on `sched_yield` between any two messages. With more spinning
processes than cores some kernels then let other processes wait for seconds (observed on Linux
6.18 with two cores: even kernel threads), and what a run shows is the kernel's luck. The spin
also keeps the interpreter lock, which a sleep gives up. And who wakes to look, a thousand
times a second, must not push a scheduler's thread off its core each time; how often it looks is
how often a timer's interrupt falls into whatever is being measured.
"""

from __future__ import annotations

import time

from kvadmit.processes import never_preempt_others

WAIT_S = 0.001
"""Against steps of 10 ms and more: a timer must seldom fall into the 3 us that kvadmit takes."""


def register() -> None:
    """Entry point of `vllm.general_plugins`: in every process of an instance."""
    from vllm.distributed.device_communicators import shm_broadcast

    never_preempt_others()
    shm_broadcast.sched_yield = _wait


def _wait() -> None:
    time.sleep(WAIT_S)

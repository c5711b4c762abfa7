"""Named points in a rank or an engine core at which a test makes something go wrong.

The package has no switch for faults: what is wrapped here are the doors of one agent or one
coordinator. A child process of `cluster` is armed by what its first line says, an engine of the
test's own process by `arm_coordinator`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from kvadmit import group_events as events
from kvadmit.agent import Agent
from kvadmit.coordinator import Coordinator
from kvadmit.errors import DeviceOutOfMemoryError, DriverError
from kvadmit.messages import Allowance, Answer, MapGrant, Report
from kvadmit.port import Resident
from kvadmit.vmm import BatchResult

FAILING_RANK = 1
"""Of an engine with several ranks, the one that a failpoint is for."""


class Failpoint(msgspec.Struct, frozen=True):
    """One point, and what happens when it is passed for the first time.

    `at` of a rank: "KIND begun" and "KIND done" around a driver call, KIND being prepare, commit,
    abort or decommit, and "KIND answered", also for a fence. `at` of an engine core: "KIND sent",
    "need reported", "allowance heard", "resident given".
    """

    at: str
    act: Literal[
        "kill", "stop", "fail", "refuse", "lose", "kill arbiter", "stop arbiter", "kill parent"
    ]


class _Trigger:
    """Fires once."""

    def __init__(self, failpoint: Failpoint, arbiter_pid: Callable[[], int] = lambda: 0) -> None:
        self._failpoint = failpoint
        self._arbiter_pid = arbiter_pid
        self._passed = False

    def passed(self, at: str) -> str:
        """Return what the caller has to do at this point, "" for nothing; signals are sent."""
        if self._passed or at != self._failpoint.at:
            return ""
        self._passed = True
        act = self._failpoint.act
        if act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif act == "stop":
            # To this very thread: sent to the process, it would run on for a while.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        elif act == "kill parent":
            os.kill(os.getppid(), signal.SIGKILL)
        elif act.endswith("arbiter"):
            pid = self._arbiter_pid()
            assert pid > 0, "there is an arbiter to strike"
            os.kill(pid, signal.SIGKILL if act.startswith("kill") else signal.SIGSTOP)
        return act


def arm_agent(agent: Agent, failpoint: Failpoint) -> None:
    """Wrap the driver calls and answers of `agent`."""
    trigger = _Trigger(failpoint)
    batch, send = agent._batch, agent._send

    def armed_batch(kind: Any, extents: Any) -> BatchResult:
        act = trigger.passed(f"{kind} begun")
        if act == "fail":
            error = DriverError("a test's call", "host", "FAILPOINT", "it was told to fail")
            return BatchResult(step=kind, error=error)
        if act == "refuse":
            full = DeviceOutOfMemoryError("a test's call", "host", "FAILPOINT", "it is full")
            return BatchResult(step=kind, error=full)
        result = batch(kind, extents)
        trigger.passed(f"{kind} done")
        return result

    def armed_send(message: Any) -> None:
        if isinstance(message, Answer) and trigger.passed(f"{message.kind} answered") == "lose":
            return
        send(message)

    agent._batch = armed_batch  # type: ignore[method-assign]
    agent._send = armed_send  # type: ignore[method-assign]


def arm_coordinator(coordinator: Coordinator, failpoint: Failpoint) -> None:
    """Wrap the events and effects of `coordinator`."""

    def arbiter_pid() -> int:
        assert coordinator._arbiter is not None, "it runs"
        return coordinator._arbiter.arbiter_pid

    trigger = _Trigger(failpoint, arbiter_pid)
    carry_out, step = coordinator._carry_out, coordinator._step

    def armed_carry_out(effect: events.Effect) -> None:
        carry_out(effect)
        match effect:
            case events.SendAgent(message=MapGrant() as grant):
                trigger.passed(f"{grant.kind} sent")
            case events.SendArbiter(Report() as report) if report.need:
                trigger.passed("need reported")
            case events.GivePool(Resident()):
                trigger.passed("resident given")

    def armed_step(event: events.Event) -> None:
        if isinstance(event, events.ArbiterSent) and isinstance(event.message, Allowance):
            trigger.passed("allowance heard")
        step(event)

    coordinator._carry_out = armed_carry_out  # type: ignore[method-assign]
    coordinator._step = armed_step  # type: ignore[method-assign]

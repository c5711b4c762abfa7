"""What /health says beside "the engine lives": whether it can serve, and if not, why.

Owns: the hook on AsyncLLM's health check and the question behind it. Must not know: what makes an
engine unready (`engine_core.Engine.trouble`). Stock vLLM is green while every request waits; with
kvadmit the check fails with HTTP 503 and the reason, so that a load balancer sends requests
elsewhere. It is about readiness: whoever restarts on it restarts an engine that would recover.

An engine in the middle of a long step answers late: the check then says what it said last. One
that has not answered for SILENT_S is not ready, whatever keeps it.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine.exceptions import EngineDeadError

from kvadmit.vllm.engine_config import is_enabled

UTILITY = "kvadmit_trouble"
"""EngineCore's method that answers."""
ANSWER_WAIT_S = 0.5
"""Probes of orchestrators often wait for one second only."""
SILENT_S = 60.0
"""No step takes so long; a question without an answer for so long is asked anew."""


class Readiness:
    """What the engines behind one front end said last."""

    def __init__(self) -> None:
        """Ready until an engine says otherwise."""
        self._reason = ""
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = 0.0
        self._silent = False
        """The last question was given up."""

    async def check(self, engine_core: Any) -> str:
        """Return why the engines are not ready, "" if they are; asks, but never waits for long."""
        asking, now_s = self._asking, time.monotonic()
        if asking is not None and not asking.done() and now_s - self._asked_s >= SILENT_S:
            asking.cancel()
            self._silent, asking = True, None
        if asking is None or asking.done():
            asking = self._asking = asyncio.create_task(self._ask(engine_core))
            self._asked_s = now_s
        await asyncio.wait({asking}, timeout=ANSWER_WAIT_S)
        if self._silent:
            return f"EngineCore did not answer within {SILENT_S:.0f} s"
        return self._reason

    async def _ask(self, engine_core: Any) -> None:
        every = getattr(engine_core, "call_utility_all_async", None)
        try:
            if every is not None:
                answers = await every(UTILITY)
            else:
                answers = [await engine_core.call_utility_async(UTILITY)]
        except EngineDeadError:
            return  # vLLM's own check finds that
        except Exception as error:
            answers = [f"EngineCore cannot be asked: {error}"]
        self._silent = False
        self._reason = "; ".join(str(answer) for answer in answers if answer)


_readiness: weakref.WeakKeyDictionary[Any, Readiness] = weakref.WeakKeyDictionary()


def wrap_check_health(original: Any) -> Callable[..., Any]:
    """Make the replacement of `AsyncLLM.check_health`."""

    async def check_health(self: Any) -> None:
        await original(self)
        if not is_enabled(self.vllm_config):
            return
        reason = await _readiness.setdefault(self, Readiness()).check(self.engine_core)
        if reason:
            raise GracefulHTTPError(f"kvadmit: {reason}", HTTPStatus.SERVICE_UNAVAILABLE)

    return check_health

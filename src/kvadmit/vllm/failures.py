"""Requests that cannot be served: what they are told, and the outputs that tell it.

Owns: the texts and the hand-over from scheduler to front end. Must not know: when a request
counts as hopeless.

vLLM's engine has no field for a reason, so the text travels as the output's `stop_reason`
behind a mark; `frontend` turns it into the client's error.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from kvadmit.admission import Admission
from kvadmit.units import ceil_div, format_bytes

NEVER = "kvadmit.never: "
LATE = "kvadmit.late: "
"""Marks before a text: the request can never be served here, or not in time."""


def never_fits(tokens: int, blocks: int, admission: Admission[Any], extent_bytes: int) -> str:
    """Say that a request exceeds the ceiling."""
    extents = ceil_div(blocks + 1, admission.pool.extent_blocks)
    return (
        f"{NEVER}This request's {tokens} tokens need {format_bytes(extents * extent_bytes)} of KV "
        f"cache memory, and this server can have {format_bytes(admission.ceiling * extent_bytes)} "
        "at most. Shorten it, or raise kvadmit.cap."
    )


def waited_too_long(
    blocks: int, admission: Admission[Any], extent_bytes: int, wait_s: float
) -> str:
    """Say that memory for a request did not come in time."""
    extents = ceil_div(blocks + 1, admission.pool.extent_blocks)
    held = admission.pool.resident
    return (
        f"{LATE}This request needs {format_bytes(extents * extent_bytes)} of KV cache memory; the "
        f"server holds {format_bytes(held * extent_bytes)} and got no more from its neighbours "
        f"within {wait_s:g} s. Try again later or on another server."
    )


class Failures:
    """Requests on their way out: found hopeless, then ended, then told."""

    __slots__ = ("_ended", "due")

    def __init__(self) -> None:
        """Start with none."""
        self.due: dict[str, tuple[Any, str]] = {}
        """Requests found hopeless and not ended yet, by id. To be looked at, not changed."""
        self._ended: list[tuple[int, EngineCoreOutput]] = []

    @property
    def ended(self) -> bool:
        """Whether requests are ended whose clients have not been told."""
        return bool(self._ended)

    def add(self, request: Any, text: str) -> None:
        """Have `request` fail with `text`."""
        self.due.setdefault(request.request_id, (request, text))

    def take_due(self) -> list[Any]:
        """Return the requests to end now; their outputs are ready for `emit`."""
        requests = []
        for request, text in self.due.values():
            requests.append(request)
            if not request.is_finished():
                output = EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    stop_reason=text,
                    # vLLM's front end expects one of every pooling request, also of a failed one.
                    pooling_output=torch.empty(0) if request.pooling_params else None,
                )
                self._ended.append((request.client_index, output))
        self.due.clear()
        return requests

    def emit(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add the outputs of ended requests to those of a step, by client."""
        for client_index, output in self._ended:
            of_client = outputs.get(client_index)
            if of_client is None:
                of_client = outputs[client_index] = EngineCoreOutputs()
            of_client.outputs.append(output)
        self._ended.clear()

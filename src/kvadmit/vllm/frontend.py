"""Where requests come in: a failed request's reason becomes the client's error.

Owns: the hook on the output processor. Must not know: why a request failed. Outputs without
our mark pass unseen, so engines without kvadmit in the same process stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import FinishReason

from kvadmit.vllm.failures import LATE, NEVER


def wrap_process_outputs(original: Any) -> Callable[..., Any]:
    """Make the replacement of `OutputProcessor.process_outputs`."""

    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            if output.finish_reason is FinishReason.ERROR:
                _tell(self, output)
        return original(self, engine_core_outputs, *args, **kwargs)

    return process_outputs


def _tell(processor: Any, output: Any) -> None:
    """Hand the error to whoever awaits the request; the offline API returns it as text."""
    error = error_of(output.stop_reason)
    if error is None:
        return
    output.stop_reason = error.message
    state = processor.request_states.get(output.request_id)
    if state is not None and state.queue is not None:
        # An exception replaces what is queued, and nothing replaces an exception: the
        # output that follows only cleans up.
        state.queue.put(error)


def error_of(stop_reason: object) -> GracefulHTTPError | None:
    """Return the client's error for a marked stop reason: HTTP 400, or 503 to try again."""
    if not isinstance(stop_reason, str):
        return None
    for mark, status in ((NEVER, HTTPStatus.BAD_REQUEST), (LATE, HTTPStatus.SERVICE_UNAVAILABLE)):
        if stop_reason.startswith(mark):
            return GracefulHTTPError(f"kvadmit: {stop_reason.removeprefix(mark)}", status)
    return None

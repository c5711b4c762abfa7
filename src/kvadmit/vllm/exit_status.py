"""What `vllm serve` ends with when its engine died: a status that is not 0.

Owns: the hook on the life of the HTTP server. Must not know: why an engine died. Stock vLLM stops
the server of a dead engine and ends with 0, which a supervisor takes for an end that was asked
for: it restarts nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from kvadmit.vllm.engine_config import is_enabled

EXIT_CODE = 72


def wrap_build_and_serve(original: Any) -> Callable[..., Any]:
    """Make the replacement of `build_and_serve`.

    It returns, when the server is over, what vLLM awaits after it has ended the engine.
    """

    async def build_and_serve(engine_client: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_enabled(engine_client.vllm_config):
            return await original(engine_client, *args, **kwargs)
        asked = _note_shutdown(engine_client)
        ending = await original(engine_client, *args, **kwargs)
        died = engine_client.errored and not asked
        return _fail_after(ending) if died else ending

    return build_and_serve


def _note_shutdown(engine_client: Any) -> list[bool]:
    """Return what is empty until a sound engine is shut down; then it counts as errored too."""
    asked: list[bool] = []
    original = engine_client.shutdown

    def shutdown(*args: Any, **kwargs: Any) -> Any:
        if not engine_client.errored:
            asked.append(True)
        return original(*args, **kwargs)

    engine_client.shutdown = shutdown
    return asked


async def _fail_after(ending: Awaitable[Any]) -> None:
    await ending
    raise SystemExit(EXIT_CODE)

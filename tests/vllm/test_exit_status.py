"""The status of a server whose engine died, by a stand-in for vLLM's server and client."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvadmit.vllm.exit_status import EXIT_CODE, wrap_build_and_serve
from kvadmit.vllm.names import ENABLED

pytestmark = [pytest.mark.vllm]


class Client:
    """An engine's client: errored once its engine is dead, for whatever reason."""

    def __init__(self, *, enabled: bool) -> None:
        self.vllm_config = SimpleNamespace(**{ENABLED: enabled})
        self.errored = False
        self.ended = False

    def shutdown(self) -> None:
        self.errored = True


def status_of(*events: str, enabled: bool = True) -> int:
    """Serve, with `events` meanwhile; return the status with which the process would end."""
    client = Client(enabled=enabled)

    async def original(served: Any) -> Any:
        assert served is client
        for event in events:
            if event == "dies":
                client.errored = True
            else:
                client.shutdown()

        async def ending() -> None:
            client.ended = True

        return ending()

    async def serve() -> None:
        await (await wrap_build_and_serve(original)(client))

    try:
        asyncio.run(serve())
    except SystemExit as end:
        return int(str(end.code))
    finally:
        assert client.ended, "what vLLM awaits in the end was awaited"
    return 0


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ((), 0),
        (("asked",), 0),
        (("dies",), EXIT_CODE),
        (("dies", "asked"), EXIT_CODE),
        (("asked", "dies"), 0),
    ],
)
def test_a_server_ends_with_a_status_when_its_engine_died_unasked(
    events: tuple[str, ...], status: int
) -> None:
    assert status_of(*events) == status


def test_stock_engines_end_as_they_did() -> None:
    assert status_of("dies", enabled=False) == 0

"""Integration tests run on the loop the package runs on: uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from integration.cluster import run_directory


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session", autouse=True)
def _loop_library_is_set_up() -> None:
    """Have libuv open its process-wide signal pipe before any test counts descriptors."""
    loop = uvloop.new_event_loop()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Name a run directory that does not exist yet; its arbiter ends with the test."""
    with run_directory() as path:
        yield path

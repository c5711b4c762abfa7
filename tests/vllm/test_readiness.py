"""What an instance says of its readiness: the front end's question, the engine's answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine.exceptions import EngineDeadError

from kvadmit.vllm import readiness
from kvadmit.vllm.engine_core import ARBITER_WAIT_S, Engine
from kvadmit.vllm.readiness import Readiness, wrap_check_health

pytestmark = pytest.mark.vllm


class Core:
    """A client of engines that answer when told to."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.silent = asyncio.Event()
        self.silent.set()
        self.error: Exception | None = None

    async def call_utility_all_async(self, method: str) -> list[str]:
        assert method == "kvadmit_trouble"
        self.asked += 1
        await self.silent.wait()
        if self.error is not None:
            raise self.error
        return self.answers


class OlderCore:
    """One of a vLLM that asks a single engine."""

    async def call_utility_async(self, method: str) -> str:
        return f"{method} here"


def test_the_reasons_of_all_engines_are_given() -> None:
    async def check() -> None:
        core, one = Core("", "no token for 12 s"), Readiness()
        assert await one.check(core) == "no token for 12 s"
        core.answers = ["no arbiter", "no token for 13 s"]
        assert await one.check(core) == "no arbiter; no token for 13 s"
        core.answers = ["", ""]
        assert await one.check(core) == ""
        assert await Readiness().check(OlderCore()) == "kvadmit_trouble here"

    asyncio.run(check())


def test_an_engine_in_a_long_step_is_not_waited_for_and_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readiness, "ANSWER_WAIT_S", 0.01)

    async def check() -> None:
        core, one = Core("stalled"), Readiness()
        core.silent.clear()
        assert await one.check(core) == "", "nothing known yet"
        assert await one.check(core) == ""
        assert core.asked == 1
        core.silent.set()
        await asyncio.sleep(0)
        assert await one.check(core) == "stalled"
        core.silent.clear()
        core.answers = [""]
        assert await one.check(core) == "stalled", "what it said last"

    asyncio.run(check())


def test_an_engine_that_never_answers_is_not_ready_until_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readiness, "ANSWER_WAIT_S", 0.01)
    monkeypatch.setattr(readiness, "SILENT_S", 0.05)

    async def check() -> None:
        core, one = Core(""), Readiness()
        core.silent.clear()
        assert await one.check(core) == ""
        await asyncio.sleep(0.06)
        assert (await one.check(core)).startswith("EngineCore did not answer within")
        assert core.asked == 2
        core.silent.set()
        await asyncio.sleep(0)
        assert await one.check(core) == ""

    asyncio.run(check())


def test_a_dead_engine_is_left_to_vllm() -> None:
    async def check() -> None:
        core, one = Core("stalled"), Readiness()
        core.error = EngineDeadError()
        assert await one.check(core) == ""
        core.error = ValueError("broken")
        assert await one.check(core) == "EngineCore cannot be asked: broken"

    asyncio.run(check())


def test_the_check_fails_with_503_and_the_reason_only_where_kvadmit_is_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readiness, "is_enabled", lambda config: config.on)
    stock: list[Any] = []

    async def original(self: Any) -> None:
        stock.append(self)

    hooked = wrap_check_health(original)

    class Client:
        def __init__(self, *, on: bool) -> None:
            self.vllm_config = SimpleNamespace(on=on)
            self.engine_core = Core("no memory")

    async def check() -> None:
        off, on = Client(on=False), Client(on=True)
        await hooked(off)
        assert off.engine_core.asked == 0
        with pytest.raises(GracefulHTTPError, match=r"^kvadmit: no memory$") as refusal:
            await hooked(on)
        assert refusal.value.http_status == 503
        on.engine_core.answers = [""]
        await hooked(on)
        assert stock == [off, on, on], "vLLM's own check comes first"

    asyncio.run(check())


def engine(*, lost: str = "", gone_s: float = 0.0) -> Any:
    coordinator = SimpleNamespace(arbiter_gone_s=lambda now_s: gone_s)
    return SimpleNamespace(lost=lost, coordinator=coordinator, scheduler=None)


def test_an_engine_names_what_is_lost() -> None:
    assert Engine.trouble(engine()) == ""
    assert Engine.trouble(engine(gone_s=ARBITER_WAIT_S - 1)) == ""
    text = Engine.trouble(engine(gone_s=ARBITER_WAIT_S))
    assert text.startswith("there has been no arbiter for 10 s")
    assert Engine.trouble(engine(lost="rank 1 is gone")) == "the engine ends: rank 1 is gone"

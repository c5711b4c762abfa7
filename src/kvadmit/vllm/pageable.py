"""Keeps structured output from making a CUDA context in EngineCore.

Owns: where the token bitmask lies. Must not know: grammars.

Three of vLLM's four back ends pin the bitmask, and pinning makes a context on the first GPU, at
the first such request. EngineCore never copies the mask to a GPU: it goes to the workers as a
message, so pageable memory serves as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

from kvadmit.vllm.engine_config import is_enabled


class Pageable(TorchFunctionMode):
    """While entered, tensors that this thread makes are pageable, whoever asks for pinned."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Make the call without the wish to pin."""
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def wrap_grammar_bitmask(original: Any) -> Callable[..., Any]:
    """Make the replacement of `StructuredOutputManager.grammar_bitmask`, which makes the mask."""

    def grammar_bitmask(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._grammar_bitmask is not None or not is_enabled(self.vllm_config):
            return original(self, *args, **kwargs)
        with Pageable():
            return original(self, *args, **kwargs)

    return grammar_bitmask

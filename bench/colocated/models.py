"""Models of which only the shape matters: a config.json, and weights that vLLM makes up.

Owns: the shape served on GPUs, and what its weights come to. Must not know: who serves it.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvadmit.testing.tiny_model import TinyModel

EIGHT_B = TinyModel(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocabulary=128_256,
)
"""The shape of an 8B Llama: 128 KiB of KV cache per token in 16 bits, over all ranks."""
ELEMENT_BYTES = 2


def make_shape(directory: Path, model: TinyModel) -> Path:
    """Write what vLLM needs to serve `model` with `load_format` dummy; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model.config(), indent=1))
    return directory


def weights_bytes(model: TinyModel) -> int:
    """Return the bytes of the weights in 16 bits, over all ranks."""
    heads = 2 * model.heads + 2 * model.kv_heads
    layer = model.hidden * (heads * model.head_dim + 3 * model.intermediate)
    return ELEMENT_BYTES * (model.layers * layer + 2 * model.vocabulary * model.hidden)

"""A model small enough to be made on the spot: config, random weights, byte tokenizer.

Owns: the files vLLM loads a model from. Must not know: who serves it. No download; needs
numpy, safetensors and tokenizers, which come with vLLM.

Weights are random but not tiny, so that the best token leads by far more than rounding: two
engines that compute the same thing in another batch order still choose the same tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

BYTE_TOKENS = 256
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")


class TinyModel(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a model. `sliding_window` tokens make it a Mistral, None a Llama.

    One token's KV cache takes `2 * layers * kv_heads * head_dim * element` bytes.
    """

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 256
    vocabulary: int = 512
    positions: int = 8192
    sliding_window: int | None = None
    seed: int = 0

    def kv_token_bytes(self, element_bytes: int = 4) -> int:
        """Return the KV cache bytes of one token over all ranks."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

    def config(self) -> dict[str, object]:
        """Return the model's config.json."""
        windowed = self.sliding_window is not None
        return {
            "architectures": ["MistralForCausalLM" if windowed else "LlamaForCausalLM"],
            "model_type": "mistral" if windowed else "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "sliding_window": self.sliding_window,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": BYTE_TOKENS,
            "eos_token_id": BYTE_TOKENS + 1,
            "pad_token_id": BYTE_TOKENS + 2,
            "torch_dtype": "float32",
        }


def make_model(directory: Path, model: TinyModel) -> Path:
    """Write `model` to `directory`, unless it is there already; returns `directory`."""
    stamp = directory / "tiny_model.json"
    wanted = msgspec.json.encode(model)
    if stamp.exists() and stamp.read_bytes() == wanted:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model.config(), indent=1))
    _write_weights(directory / "model.safetensors", model)
    _write_tokenizer(directory)
    stamp.write_bytes(wanted)
    return directory


def _write_weights(path: Path, model: TinyModel) -> None:
    import numpy
    from safetensors.numpy import save_file

    generator = numpy.random.default_rng(model.seed)

    def random(rows: int, columns: int, scale: float = 1.0) -> object:
        values = generator.standard_normal((rows, columns)) * scale / columns**0.5
        return values.astype(numpy.float32)

    def ones() -> object:
        return numpy.ones(model.hidden, numpy.float32)

    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    tensors: dict[str, object] = {
        "model.embed_tokens.weight": random(model.vocabulary, model.hidden, model.hidden**0.5),
        "model.norm.weight": ones(),
        "lm_head.weight": random(model.vocabulary, model.hidden, 4.0),
    }
    for layer in range(model.layers):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.self_attn.q_proj.weight": random(queries, model.hidden),
            f"{name}.self_attn.k_proj.weight": random(keys, model.hidden),
            f"{name}.self_attn.v_proj.weight": random(keys, model.hidden),
            f"{name}.self_attn.o_proj.weight": random(model.hidden, queries),
            f"{name}.mlp.gate_proj.weight": random(model.intermediate, model.hidden),
            f"{name}.mlp.up_proj.weight": random(model.intermediate, model.hidden),
            f"{name}.mlp.down_proj.weight": random(model.hidden, model.intermediate),
            f"{name}.input_layernorm.weight": ones(),
            f"{name}.post_attention_layernorm.weight": ones(),
        }
    save_file(tensors, str(path))


def _write_tokenizer(directory: Path) -> None:
    """Write a tokenizer with one token per byte, so that any text has a known length."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    beginning, end, padding = SPECIAL_TOKENS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": beginning,
        "eos_token": end,
        "pad_token": padding,
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))

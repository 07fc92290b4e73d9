"""What the planner knows of a model, read from config.json and the headers of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BYTES_PER_ELEMENT = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


class UnknownModel(ValueError):
    """A config.json whose architecture this planner cannot size; the message names the missing key."""


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of one dense decoder model with grouped-query attention.

    Counts are elements, `weight_bytes` are bytes of the whole model on disk.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context_tokens: int
    element_bytes: int
    weight_bytes: int
    weights_from: str
    """`headers` when read from the safetensors headers, `config` when computed from config.json."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache per token over all layers: two tensors, K and V, per layer (16 bit cache)."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


def _number(config: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
        if value is not None:
            raise UnknownModel(f"config.json has {key} = {value!r}, which is not a size")
    raise UnknownModel(f"config.json has no {' or '.join(keys)}")


def _parameters(facts: Mapping[str, int], tied: bool) -> int:
    """Parameters of a Llama-style decoder: attention, gated MLP, two norms per layer, embeddings, head."""
    hidden, inter = facts["hidden"], facts["intermediate"]
    attention = hidden * facts["head_dim"] * (2 * facts["heads"] + 2 * facts["kv_heads"])
    layer = attention + 3 * hidden * inter + 2 * hidden
    embeddings = facts["vocab"] * hidden * (1 if tied else 2)
    return facts["layers"] * layer + embeddings + hidden


def read_facts(config: Mapping[str, Any], weight_bytes: int | None) -> ModelFacts:
    """Size a model from its config.json; `weight_bytes` from the headers wins over the computed figure.

    Raises:
        UnknownModel: when a size that every decoder has is missing.
    """
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config
    heads = _number(config, "num_attention_heads")
    hidden = _number(config, "hidden_size")
    sizes = {
        "layers": _number(config, "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or hidden // heads),
        "intermediate": _number(config, "intermediate_size"),
        "vocab": _number(config, "vocab_size"),
    }
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    element_bytes = BYTES_PER_ELEMENT.get(dtype)
    if element_bytes is None:
        raise UnknownModel(f"config.json has the dtype {dtype}, known are {', '.join(BYTES_PER_ELEMENT)}")
    computed = _parameters(sizes, bool(config.get("tie_word_embeddings"))) * element_bytes
    return ModelFacts(
        **sizes,
        context_tokens=_number(config, "max_position_embeddings"),
        element_bytes=element_bytes,
        weight_bytes=computed if weight_bytes is None else weight_bytes,
        weights_from="config" if weight_bytes is None else "headers",
    )

"""Reads config.json: what a model is made of and what it keeps of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuready.planning.model.facts import AttentionGroup, Component, ModelFacts
from gpuready.planning.model.families import ARCHITECTURES, FAMILIES, Family
from gpuready.planning.model.fields import Fields, UnknownModel

__all__ = ["UnknownModel", "read_facts"]

MOST_LAYERS = 1024
MOST_TOKENS = 1 << 30
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def _dtype(fields: Fields) -> str:
    dtype = fields.text("dtype", "torch_dtype").removeprefix("torch.")
    if not dtype:
        fields.assume("config.json says no dtype, taken as bfloat16")
        return "bfloat16"
    if dtype not in ELEMENT_BYTES:
        raise UnknownModel(f"config.json has the dtype {dtype}, known are {', '.join(ELEMENT_BYTES)}")
    return dtype


def _family(fields: Fields, architecture: str) -> tuple[str, Family]:
    name = ARCHITECTURES.get(architecture) or fields.text("model_type", default="llama")
    return name, FAMILIES.get(name, FAMILIES["llama"])


def read_facts(config: Mapping[str, Any], headers: int | None = None) -> ModelFacts:
    """Return the sizes of a model.

    `headers` is the total of bytes in the safetensors headers; it wins over what was computed, and the computed
    components are scaled to it.

    Raises:
        UnknownModel: when config.json does not tell the sizes, in one sentence.
    """
    text = config.get("text_config")
    fields = Fields({**config, **text} if isinstance(text, Mapping) else config)
    architecture = (fields.texts("architectures") or ("",))[0]
    model_type, family = _family(fields, architecture)
    fields = fields.over(family.defaults)
    layers = fields.number("num_hidden_layers", most=MOST_LAYERS)
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    kv_heads = fields.optional("num_key_value_heads") or heads
    head_dim = fields.optional("head_dim") or max(1, hidden // heads)
    intermediate, vocabulary = fields.number("intermediate_size"), fields.number("vocab_size")
    dtype = _dtype(fields)
    tied = fields.flag("tie_word_embeddings", default=family.tied)
    bias = family.qkv_bias
    norms = family.layer_norms * hidden + (2 * head_dim if family.qk_norm else 0)
    elements = {
        ("embedding", "vocabulary", "first", False): vocabulary * hidden,
        ("head", "vocabulary", "last", False): 0 if tied else vocabulary * hidden,
        ("attention", "tensor", "layers", True): layers * heads * head_dim * (2 * hidden + bias),
        ("kv", "kv_heads", "layers", True): layers * 2 * kv_heads * head_dim * (hidden + bias),
        ("mlp", "tensor", "layers", True): layers * 3 * hidden * intermediate,
        ("norms", "whole", "layers", False): layers * norms + hidden,
    }
    scale = 1.0
    computed = sum(elements.values()) * ELEMENT_BYTES[dtype]
    if headers is not None:
        scale = headers / computed
    components = [
        Component(name, count, round(count * ELEMENT_BYTES[dtype] * scale), split, place, quantizable)
        for (name, split, place, quantizable), count in elements.items()
        if count
    ]
    if headers is not None:
        first = components[0]
        rest = headers - sum(one.bytes for one in components[1:])
        components[0] = Component(first.name, first.elements, rest, first.split, first.place, first.quantizable)
    window = fields.optional("sliding_window", most=MOST_TOKENS) or 0
    context = fields.number("max_position_embeddings", most=MOST_TOKENS)
    sliding = [bool(window) and window < context and _slides(fields, family, index) for index in range(layers)]
    groups = []
    for kind in (False, True):
        if kind in sliding:
            name, limit = ("sliding", window) if kind else ("full", 0)
            groups.append(AttentionGroup(name, sliding.count(kind), kv_heads, head_dim, head_dim, limit))
    order = tuple(int(slides and len(groups) > 1) for slides in sliding)
    return ModelFacts(
        architecture=architecture,
        model_type=model_type,
        task="generate",
        layers=layers,
        hidden=hidden,
        heads=heads,
        intermediate=intermediate,
        vocabulary=vocabulary,
        context_tokens=context,
        dtype=dtype,
        groups=tuple(groups),
        order=order,
        components=tuple(components),
        weights_from="config" if headers is None else "headers",
        rotary_elements=context * head_dim,
        assumptions=tuple(fields.assumptions),
    )


def _slides(fields: Fields, family: Family, index: int) -> bool:
    types = fields.texts("layer_types")
    if types:
        return types[index % len(types)] == "sliding_attention"
    if family.window == "upper":
        return fields.flag("use_sliding_window") and index >= (fields.optional("max_window_layers", least=0) or 0)
    if family.window == "others":
        return bool((index + 1) % family.pattern)
    return family.window == "all"

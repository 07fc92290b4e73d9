"""Reads config.json: what a model is made of and what it keeps of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuready.planning.model import headers as shards
from gpuready.planning.model import language, quantization, vision
from gpuready.planning.model.dialects import usual
from gpuready.planning.model.facts import AttentionGroup, Component, Experts, ModelFacts
from gpuready.planning.model.families import Family, family_of
from gpuready.planning.model.fields import Fields, UnknownModel, shown
from gpuready.planning.model.headers import Headers
from gpuready.planning.model.layers import Layer, read_layers
from gpuready.planning.model.modules import Module
from gpuready.planning.model.positions import context_tokens, rotary_elements
from gpuready.planning.model.quantization import Quantized
from gpuready.planning.model.tensors import fused

__all__ = ["Headers", "UnknownModel", "read_facts"]

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_LANGUAGE_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
_MOST_NESTED = 3
_MOST_KEYS = 4096
_MOST_APART = 64
"""Headers of less than that part of what config.json describes belong to another model."""


@dataclass(frozen=True)
class _Model:
    """What was read of one model before it is put into the contract's form."""

    name: str
    family: Family
    fields: Fields
    architecture: str
    layers: Sequence[Layer]
    context: int
    tied: bool
    dtype: str
    modules: Sequence[Module]
    draft: Sequence[Module]
    encoder: Sequence[Module] | None
    tower: tuple[int, int]
    pixels: int
    quantized: Quantized | None


def read_facts(config: Mapping[str, Any], headers: int | Headers | None = None) -> ModelFacts:
    """Return the sizes of a model.

    `headers` are those of its safetensors files, or their total of bytes; they win over what was computed. A total is
    spread over the computed components in proportion, or is the encoder's where that one could not be counted.

    Raises:
        UnknownModel: when config.json does not tell the sizes, in one sentence.
    """
    model = _read(config)
    components, source = _components(model, headers)
    groups, order = _groups(model.layers)
    fields, quantized = model.fields, model.quantized
    sparse = [layer for layer in model.layers if layer.feed in ("experts", "both")]
    return ModelFacts(
        architecture=model.architecture,
        model_type=model.name,
        task=_task(model.architecture, fields),
        layers=len(model.layers),
        hidden=fields.number("hidden_size"),
        heads=fields.optional("num_attention_heads") or 0,
        intermediate=_width(model),
        vocabulary=fields.number("vocab_size"),
        context_tokens=model.context,
        dtype=model.dtype,
        groups=groups,
        order=order,
        components=components,
        weights_from=source,
        experts=_experts(model, len(sparse)) if sparse else None,
        quantization=quantized.facts if quantized is not None else None,
        vision=model.encoder is None or bool(model.encoder),
        vision_layers=model.tower[0],
        vision_hidden=model.tower[1],
        pixels_per_token=model.pixels,
        latent_up_elements=sum(one.elements for one in model.modules if one.name.endswith(".kv_b_proj")),
        draft_layers=_draft_layers(fields),
        draft_components=_sized(model.draft, model.dtype, quantized),
        tensors=fused([*model.modules, *(model.encoder or ())], ELEMENT_BYTES[model.dtype], quantized),
        rotary_elements=rotary_elements(fields, model.family, model.layers, model.context),
        assumptions=tuple(fields.assumptions),
    )


def _read(config: Mapping[str, Any]) -> _Model:
    outer, fields = _language_part(config)
    architectures = outer.texts("architectures") or fields.texts("architectures") or ("",)
    name, family = family_of(fields.text("model_type"), (fields.texts("architectures") or architectures)[0])
    fields, family = usual(fields, name, family)
    context = context_tokens(fields, name)
    layers = read_layers(fields, name, family, context)
    tied = fields.flag("tie_word_embeddings", default=family.tied)
    encoder = vision.modules(outer, fields.number("hidden_size"))
    if encoder is None:
        fields.assume("the encoder of images could not be counted from vision_config; its weights are missing here")
    draft = language.draft(fields, name, family, layers, _draft_layers(fields))
    return _Model(
        name,
        family,
        fields,
        architectures[0],
        layers,
        context,
        tied,
        _dtype(fields),
        language.modules(fields, name, family, layers, context, tied),
        draft,
        encoder,
        vision.tower(outer),
        vision.pixels_per_token(outer),
        quantization.read(fields),
    )


def _language_part(config: Mapping[str, Any]) -> tuple[Fields, Fields]:
    """Return the whole configuration and the one of its language model, which many composite models nest."""
    if not isinstance(config, Mapping):
        raise UnknownModel(f"config.json is {shown(config)}, not an object")
    outer = Fields(config)
    values: dict[str, Any] = dict(config)
    inside: Mapping[str, Any] = config
    nested = False
    for _ in range(_MOST_NESTED):
        key = next((one for one in _LANGUAGE_PARTS if inside.get(one) is not None), None)
        if key is None:
            break
        inner = inside[key]
        if not isinstance(inner, Mapping):
            raise UnknownModel(f"config.json has {key} = {shown(inner)}, which is not an object")
        nested, inside = True, inner
        values = {**values, **{name: value for name, value in inner.items() if value is not None}}
    else:
        raise UnknownModel(f"config.json nests its language model more than {_MOST_NESTED - 1} times")
    if len(values) > _MOST_KEYS:
        raise UnknownModel(f"config.json has {len(values)} keys, more than {_MOST_KEYS}")
    if nested:
        values["nested"] = True
    return outer, Fields(values, outer.assumptions)


def _dtype(fields: Fields) -> str:
    dtype = fields.text("dtype", "torch_dtype").removeprefix("torch.")
    if dtype in ("", "auto"):
        fields.assume("config.json says no dtype, taken as bfloat16")
        return "bfloat16"
    if dtype not in ELEMENT_BYTES:
        raise UnknownModel(f"config.json has the dtype {shown(dtype)}, known are {', '.join(ELEMENT_BYTES)}")
    return dtype


def _task(architecture: str, fields: Fields) -> str:
    """Return what a model is made for, by the name of its architecture."""
    if architecture.endswith(("ForSequenceClassification", "ForRewardModel", "ForTokenClassification")):
        names = fields.raw("id2label")
        one = fields.optional("num_labels") == 1 or (isinstance(names, dict) and len(names) == 1)
        return "rerank" if one else "classify"
    if architecture.endswith(("Model", "ForMaskedLM")) and not architecture.startswith(("ChatGLM", "GLM")):
        return "embed"
    return "generate"


def _width(model: _Model) -> int:
    """Return the width of the widest dense feed-forward part, or of what a token passes of the experts."""
    if any(layer.feed in ("dense", "both") for layer in model.layers):
        return language.dense_width(model.fields, model.name)
    if any(layer.feed == "experts" for layer in model.layers):
        return language.shared_width(model.fields, model.name) or language.expert_width(model.fields)
    return model.fields.optional("intermediate_size") or model.fields.number("hidden_size")


def _experts(model: _Model, layers: int) -> Experts:
    fields = model.fields
    count = fields.number("num_experts")
    active = fields.optional("num_experts_per_tok")
    if active is None:
        fields.assume("config.json does not say how many experts a token passes, taken as one")
    return Experts(count, active or 1, language.expert_width(fields), layers, language.shared_width(fields, model.name))


def _draft_layers(fields: Fields) -> int:
    return fields.optional("num_nextn_predict_layers", least=0, most=64) or 0


def _groups(layers: Sequence[Layer]) -> tuple[tuple[AttentionGroup, ...], tuple[int, ...]]:
    """Return the kinds of layers and, for every layer, which it is."""
    kinds: dict[AttentionGroup, int] = {}
    order = tuple(kinds.setdefault(layer.keeps, len(kinds)) for layer in layers)
    return tuple(replace(kind, layers=order.count(index)) for kind, index in kinds.items()), order


def _sized(modules: Sequence[Module], dtype: str, quantized: Quantized | None) -> tuple[Component, ...]:
    """Return the components that modules make up."""
    sums: dict[tuple[str, str, str, bool], list[int]] = {}
    plain = ELEMENT_BYTES[dtype]
    for module in modules:
        scheme = quantized.scheme(module) if quantized is not None else None
        size = module.elements * plain
        if scheme is not None:
            size = module.copies * (scheme.bytes_of(module.outputs, module.inputs) + module.bias * plain)
        one = sums.setdefault((module.component, module.split, module.place, module.linear), [0, 0])
        one[0] += module.elements
        one[1] += size
    return tuple(
        Component(name, elements, size, split, place, quantizable)
        for (name, split, place, quantizable), (elements, size) in sums.items()
    )


def _components(model: _Model, headers: int | Headers | None) -> tuple[tuple[Component, ...], str]:
    """Return the components and where their sizes come from."""
    if isinstance(headers, Headers):
        bits = model.quantized.facts.weight_bits if model.quantized is not None else 16
        heads = model.fields.optional("num_attention_heads") or 0
        groups, _ = _groups(model.layers)
        return shards.components(headers, groups, heads, model.tied, bits), "headers"
    found = _sized([*model.modules, *(model.encoder or ())], model.dtype, model.quantized)
    if headers is None:
        return found, "config"
    if isinstance(headers, bool) or not 0 < headers < 1 << 60:
        raise UnknownModel(f"the headers of the weights add up to {shown(headers)} bytes, which is not a size")
    draft = sum(one.bytes for one in _sized(model.draft, model.dtype, model.quantized))
    computed = sum(one.bytes for one in found)
    if headers * _MOST_APART < computed:
        raise UnknownModel(f"the headers of the weights add up to {headers} bytes, config.json describes {computed}")
    if model.encoder is None and headers > computed + draft:
        rest = headers - computed - draft
        return (*found, Component("vision", rest // ELEMENT_BYTES[model.dtype], rest)), "headers"
    scale = headers / (computed + draft)
    sizes = [round(one.bytes * scale) for one in found]
    if not draft:
        sizes[0] += headers - sum(sizes)
    return tuple(replace(one, bytes=size) for one, size in zip(found, sizes, strict=True)), "headers"

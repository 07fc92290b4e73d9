"""Public models that the catalog knows by name, so that a plan needs no download."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpuready import catalog
from gpuready.planning.model.config import UnknownModel, read_facts
from gpuready.planning.model.facts import ModelFacts
from gpuready.planning.model.fields import shown

_LONGEST_NAME = 256
_UNTOUCHED = [
    "lm_head",
    "visual",
    "vision_tower",
    "vision_model",
    "multi_modal_projector",
    "mm_projector",
    "embed_vision",
]
_GROUPED_4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}


def _groups(form: str, weights: Mapping[str, Any], activation_bits: int | None = None) -> dict[str, Any]:
    """Return a configuration of compressed-tensors with one format for all linear layers."""
    inputs = {"num_bits": activation_bits} if activation_bits else None
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": list(_UNTOUCHED),
    }


def _channel(kind: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True}


_CONVENTIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "awq": (
        "AWQ: 4 bits, groups of 128, zero points",
        {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": _UNTOUCHED},
    ),
    "gptq": (
        "GPTQ: 4 bits, groups of 128",
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "modules_to_not_convert": _UNTOUCHED},
    ),
    "gptq8": (
        "GPTQ: 8 bits, groups of 128",
        {"quant_method": "gptq", "bits": 8, "group_size": 128, "modules_to_not_convert": _UNTOUCHED},
    ),
    "w4a16": ("4 bit weights in groups of 128", _groups("pack-quantized", _GROUPED_4)),
    "w8a16": ("8 bit weights, one scale per channel", _groups("pack-quantized", _channel("int"))),
    "w8a8": ("8 bit integers, one scale per channel", _groups("int-quantized", _channel("int"), 8)),
    "fp8": ("8 bit floats, one scale per channel", _groups("float-quantized", _channel("float"), 8)),
    "nvfp4": (
        "NVFP4: 4 bit floats in groups of 16",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": _UNTOUCHED},
    ),
    "mxfp4": (
        "MXFP4: 4 bit floats in groups of 32",
        _groups("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    ),
    "bnb": (
        "bitsandbytes: 4 bits, twice quantized",
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_use_double_quant": True,
            "llm_int8_skip_modules": _UNTOUCHED,
        },
    ),
    "bnb8": (
        "bitsandbytes: 8 bits",
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": _UNTOUCHED},
    ),
}
"""How those who publish a checkpoint of one of these names usually make it; each with the words that say so."""

_FORMAT_OF_WORD = {
    "awq": "awq",
    "gptq": "gptq",
    "autoround": "gptq",
    "w4a16": "w4a16",
    "w4": "w4a16",
    "int4": "w4a16",
    "w8a16": "w8a16",
    "w8a8": "w8a8",
    "int8": "w8a8",
    "fp8": "fp8",
    "nvfp4": "nvfp4",
    "nvfp4a16": "nvfp4",
    "fp4": "nvfp4",
    "mxfp4": "mxfp4",
    "bnb": "bnb",
    "bitsandbytes": "bnb",
}
FORMATS = ("awq", "gptq", "fp8", "w8a8", "w8a16", "w4a16", "mxfp4", "nvfp4", "bnb-4bit", "bnb-8bit", "bf16")
"""Words for formats of checkpoints, one for each, that can be asked for."""
_BITS = {"w4a4": "nvfp4", "w4a8": "w4a16", "4bit": "w4a16", "8bit": "w8a16"}
"""Formats of words that say bits alone, where no other word says more."""
_SIXTEEN = frozenset(("bf16", "fp16", "float16", "bfloat16"))
_EIGHT_BITS = {"gptq": "gptq8", "w4a16": "w8a16", "awq": "w8a16", "bnb": "bnb8"}
"""What formats of usually 4 bits are with 8; those who publish AWQ of 8 bits keep it as compressed-tensors."""
_OTHER_FORMATS = re.compile(
    r"gguf|ggml|mlx|exl[23]|aqlm|hqq|eetq|quip|torchao|onnx|ov|openvino|spqr|vptq|squeezellm|marlin24|i?q\d|fp32|float32"
    r"|(?![48]bit$)\d+(?:\.\d+)?bits?|int(?![48]$)\d+|w(?![48]a)\d+a\d+|\d+(?:\.\d+)?bpw"
)
"""Words of formats whose sizes do not follow from the name, or that none of the engines reads."""
_FORMAT_WORDS = frozenset(
    (
        *_FORMAT_OF_WORD,
        *_BITS,
        *_SIXTEEN,
        "dynamic",
        "static",
        "quantized",
        "block",
        "g128",
        "unsloth",
        "qat",
        "ptq",
        "marlin",
    )
) | frozenset(("w8", "a8", "kv", "compressed", "tensors", "pertensor", "int", "sym"))
_ROLES = frozenset(("instruct", "chat", "it", "base", "pt", "hf", "meta", "class", "thinking", "preview"))
_DATE = re.compile(r"(?:0[1-9]|1[0-2])[0-3]\d|2[4-9](?:0[1-9]|1[0-2])")
_SIZE = re.compile(r"(?:\d+x)?\d+(?:\.\d+)?[bmk]|a\d+(?:\.\d+)?b")
_OTHER_SHAPES = frozenset(
    (
        *("vl", "vision", "llava", "vlm", "omni", "audio", "ocr", "embed", "embedding", "reranker", "reward", "rm"),
        *("eagle", "eagle2", "eagle3", "draft", "speculator", "dflash", "mtp", "medusa", "lora", "qlora", "adapter"),
        *("minitron", "pruned", "sparse", "2of4", "moe", "merge", "long", "frankenmerge", "upscaled", "width", "depth"),
    )
)
"""Words that speak of other layers, another head or a part of a model: nothing is concluded from the rest of a name."""
_UNQUANTIZED = "16 bits"
_MADE_WHILE_LOADING = frozenset(("fp8", "bnb", _UNQUANTIZED))
"""With these words beside it, the checkpoint of an exact name is the one as published."""


@dataclass(frozen=True)
class Known:
    """What the catalog says of one model."""

    id: str
    config: Mapping[str, Any]
    weight_bytes: int | None
    """Bytes in the safetensors headers, where they were read; None: to be computed from the configuration."""
    source: str
    assumptions: tuple[str, ...] = ()


def _words(name: str) -> tuple[str, ...]:
    """Return the words of a model's name without its owner, in lower case."""
    plain = re.sub(r"\([^)]*\)", " ", name.lower()).partition("+")[0].strip().rpartition("/")[2]
    return tuple(word for word in re.split(r"[-_\s]+", plain.replace("quantized.", "quantized-")) if word)


def _stem(words: tuple[str, ...], loose: bool) -> tuple[str, ...]:
    """Return the words that say which model it is: without formats, and loosely also without roles and dates."""
    kept = [word for word in words if word not in _FORMAT_WORDS]
    if loose:
        kept = [word for word in kept if word not in _ROLES and not _DATE.fullmatch(word)]
    return tuple(kept)


@functools.cache
def _index() -> tuple[Mapping[str, Any], ...]:
    return tuple(catalog.load("models")["models"])


@functools.cache
def _by(key: str) -> Mapping[Any, Mapping[str, Any]]:
    """Return the models of the catalog by one of their keys; the first of the same key counts."""
    keys: dict[str, Callable[[str], Any]] = {
        "id": lambda name: name,
        "lower": str.lower,
        "words": _words,
        "stem": lambda name: _stem(_words(name), loose=False),
        "loose": lambda name: _stem(_words(name), loose=True),
    }
    found: dict[Any, Mapping[str, Any]] = {}
    for entry in _index():
        quantized = bool(set(_words(entry["id"])) & set(_FORMAT_OF_WORD))
        if not (quantized and key in ("stem", "loose")):
            found.setdefault(keys[key](entry["id"]), entry)
    return found


def _format(words: tuple[str, ...], quantization: str | None) -> str | None:
    """Return the format that a name or the word for a quantization speaks of."""
    said = (*words, *_words(quantization or ""))
    for table in (_FORMAT_OF_WORD, _BITS, dict.fromkeys(_SIXTEEN, _UNQUANTIZED)):
        found = next((table[word] for word in said if word in table), None)
        if found is not None:
            return _EIGHT_BITS.get(found, found) if "int8" in said or "8bit" in said else found
    return None


def find(name: str, quantization: str | None = None) -> Known | None:
    """Return a model of the catalog by its name, None where there is none.

    First its id, then its id in any case and of any owner, then the model from which its name says that it was derived:
    another revision, a quantized checkpoint, whose format is then the usual one of that name, or a model trained from
    it, which keeps its sizes. What was concluded stands in `assumptions`. `quantization` is the word that an engine or
    a log has for the format.
    """
    if not name or len(name) > _LONGEST_NAME:
        return None
    words = _words(name)
    if not words or any(_OTHER_FORMATS.fullmatch(word) for word in (*words, *_words(quantization or ""))):
        return None
    kind = _format(words, quantization)
    for key, value in (("id", name), ("lower", name.lower()), ("words", words)):
        entry = _by(key).get(value)
        if entry is not None:
            break
    else:
        return _derived(name, words, kind)
    if kind is None or kind in _MADE_WHILE_LOADING or _quantized(entry["config"]):
        return _known(entry)
    return _as_format(_known(entry), name, kind)


def _derived(name: str, words: tuple[str, ...], kind: str | None) -> Known | None:
    """Return the model from which a name says that it was derived, in the format that it speaks of."""
    for loose in (False, True):
        stem = _stem(words, loose)
        entry = _by("loose" if loose else "stem").get(stem) if stem else None
        if entry is None:
            continue
        known = _known(entry, f"{shown(name)} is taken as having the sizes of {entry['id']}")
        return _as_format(known, name, kind) if kind is not None else known
    entry = _trained_from(_stem(words, loose=True))
    if entry is None:
        return None
    said = f"{shown(name)} is taken as trained from {entry['id']}, whose name stands in it, with the same sizes"
    known = _known(entry, said)
    return _as_format(known, name, kind) if kind is not None else known


def _trained_from(stem: tuple[str, ...]) -> Mapping[str, Any] | None:
    """Return the model whose family and size stand in a name, None where other words speak of other sizes."""
    for length in range(len(stem) - 1, 1, -1):
        for start in range(len(stem) - length + 1):
            part, others = stem[start : start + length], (*stem[:start], *stem[start + length :])
            entry = _by("loose").get(part)
            if entry is None or not any(_SIZE.fullmatch(word) for word in part):
                continue
            changed = any(word in _OTHER_SHAPES or _SIZE.fullmatch(word) for word in others)
            return None if changed else entry
    return None


def _known(entry: Mapping[str, Any], *assumptions: str) -> Known:
    said = (*entry.get("assumptions", ()), *assumptions)
    return Known(entry["id"], entry["config"], entry.get("weight_bytes"), entry["source"], said)


def _quantized(config: Mapping[str, Any]) -> bool:
    inner = config.get("text_config")
    return "quantization_config" in config or (isinstance(inner, Mapping) and "quantization_config" in inner)


def _as_format(known: Known, name: str, kind: str) -> Known:
    """Return the same model in a format, as it is usually made."""
    if kind == _UNQUANTIZED and not _quantized(known.config):
        return known
    config = copy.deepcopy(dict(known.config))
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.pop("quantization_config", None)
    if kind == _UNQUANTIZED:
        said = f"{shown(name)} is taken as having all weights in 16 bits, as its name says"
        return replace(known, config=config, weight_bytes=None, assumptions=(*known.assumptions, said))
    words, form = _CONVENTIONS[kind]
    config["quantization_config"] = form
    said = f"{shown(name)} is taken as made the usual way of its name: {words}, embeddings and head in 16 bits"
    return replace(known, config=config, weight_bytes=None, assumptions=(*known.assumptions, said))


@functools.lru_cache(maxsize=512)
def facts(name: str, quantization: str | None = None) -> ModelFacts:
    """Return the sizes of a model of the catalog.

    Raises:
        UnknownModel: when the catalog has no model of that name.
    """
    known = find(name, quantization)
    if known is None:
        raise UnknownModel(f"the catalog has no model {shown(name)}; give its config.json instead")
    return sizes(known)


def sizes(known: Known) -> ModelFacts:
    """Return the sizes of a known model, with what was concluded of it.

    Raises:
        UnknownModel: when its configuration cannot be read.
    """
    read = read_facts(known.config, known.weight_bytes)
    return replace(read, assumptions=(*known.assumptions, *read.assumptions))


def in_format(known: Known, word: str) -> Known:
    """Return a checkpoint of a model in the format that a word names, made the usual way; as it is where it is one.

    In contrast to `find`, which reads logs, the word is a wish: fp8 is a checkpoint in FP8, not made while loading.

    Raises:
        UnknownModel: when no format is known by the word.
    """
    words = _words(word)
    kind = _format(words, None)
    if kind is None or not all(one in _FORMAT_WORDS for one in words):
        raise UnknownModel(f"no format is known as {shown(word)}; known are {', '.join(FORMATS)}")
    wanted = _as_format(known, known.id, kind)
    before, after = read_facts(known.config).quantization, read_facts(wanted.config).quantization
    if before and after and (before.method, before.weight_bits) == (after.method, after.weight_bits):
        return known
    if kind == _UNQUANTIZED:
        return wanted
    said = f"a checkpoint made the usual way: {_CONVENTIONS[kind][0]}, embeddings and head in 16 bits"
    return replace(wanted, assumptions=(*known.assumptions, said))

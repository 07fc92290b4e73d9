"""What the headers of safetensors files tell: every tensor's name, type and size, summed up by kind."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuready.planning.model.facts import AttentionGroup, Component

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_MOST_KINDS = 4096
DRAFT = "draft."
"""Before the name of a tensor that belongs to the layers for speculative decoding."""
_UNPACKED = {"weight_packed": 2, "qweight": 0, "qzeros": 0}
_SCALES = (
    "scale",
    "scales",
    "scale_inv",
    "qzeros",
    "zero_point",
    "g_idx",
    "absmax",
    "quant_map",
    "weight_shape",
    "SCB",
)


@dataclass(frozen=True)
class Kind:
    """Tensors whose names differ by numbers alone, such as the query projections of all layers."""

    name: str
    """With # for every number, e.g. model.layers.#.self_attn.q_proj.weight."""
    dtype: str
    count: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class Headers:
    """The tensors of a checkpoint."""

    kinds: tuple[Kind, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(kind.bytes for kind in self.kinds)

    @staticmethod
    def of(rows: Iterable[Mapping[str, Any]]) -> Headers:
        """Return the headers from what `summary` made of them."""
        return Headers(
            tuple(
                Kind(str(row["name"]), str(row["dtype"]), int(row["count"]), int(row["elements"]), int(row["bytes"]))
                for row in rows
            )
        )


def _layers(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers that config.json speaks of, without judging it."""
    text = config.get("text_config")
    for values in (text if isinstance(text, Mapping) else {}, config):
        for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            value = values.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def summary(tensors: Mapping[str, Mapping[str, Any]], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tensors of all shards, summed up by kind, as plain data.

    `tensors` by name: dtype, shape, data_offsets. Layers beyond those of config.json draft (multi-token prediction).
    """
    layers = _layers(config)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for name, entry in tensors.items():
        kind = _NUMBER.sub("#", name)
        layer = _LAYER.search(name)
        visual = any(word in name for word in ("visual", "vision"))
        if name.startswith(("mtp.", "model.mtp.")) or (
            layer and layers is not None and int(layer.group(1)) >= layers and not visual
        ):
            kind = DRAFT + kind
        dtype = str(entry["dtype"])
        if len(rows) >= _MOST_KINDS and (kind, dtype) not in rows:
            kind = "other"
        begin, end = entry["data_offsets"]
        row = rows.setdefault((kind, dtype), {"name": kind, "dtype": dtype, "count": 0, "elements": 0, "bytes": 0})
        row["count"] += 1
        row["elements"] += math.prod(entry["shape"])
        row["bytes"] += end - begin
    return sorted(rows.values(), key=lambda row: (row["name"], row["dtype"]))


_WORDS: Sequence[tuple[tuple[str, ...], tuple[str, str, str, bool]]] = (
    (
        ("visual", "vision", "image", "multi_modal", "mm_projector", "audio", "embed_vision"),
        ("vision", "tensor", "layers", True),
    ),
    (
        ("shared_expert_gate", "router", "e_score_correction", "gate.weight", "gate.bias"),
        ("router", "whole", "layers", False),
    ),
    (("shared_expert", "share_expert"), ("shared_experts", "tensor", "layers", True)),
    (("experts.",), ("experts", "experts", "layers", True)),
    (("lm_head", "embed_out", "output_layer", "score.", "classifier"), ("head", "vocabulary", "last", False)),
    (("norm", "ln_", "layer_scalar"), ("norms", "whole", "layers", False)),
    (("embed", "wte.", "wpe.", "position"), ("embedding", "vocabulary", "first", False)),
    (("mamba", "linear_attn", "mixer.", ".conv", "a_log"), ("recurrent", "tensor", "layers", True)),
    (("kv_a_proj", "q_a_proj", "indexer"), ("attention", "whole", "layers", True)),
    (("k_proj", "v_proj"), ("kv", "kv_heads", "layers", True)),
    (("qkv", "query_key_value", "c_attn", "w_pack", "wqkv"), ("qkv", "tensor", "layers", True)),
    (
        (
            "mlp",
            "feed_forward",
            "ffn",
            "fc1",
            "fc2",
            "gate_up",
            "up_proj",
            "down_proj",
            "gate_proj",
            "block_sparse_moe",
        ),
        ("mlp", "tensor", "layers", True),
    ),
    (("attn", "attention", "q_proj", "o_proj"), ("attention", "tensor", "layers", True)),
)


def _place(name: str) -> tuple[str, str, str, bool]:
    plain = name.lower()
    return next(
        (place for words, place in _WORDS if any(word in plain for word in words)), ("other", "whole", "layers", False)
    )


def _elements(kind: Kind, bits: int) -> int:
    """Return the weights that a kind of tensor holds: none in scales, several in one number where they are packed."""
    last = kind.name.rpartition(".")[2]
    if last.endswith(_SCALES) or any(word in last for word in ("absmax", "quant_state", "quant_map")):
        return 0
    if kind.dtype in ("I32", "U8", "I8") and bits < 8:
        return kind.elements * (32 if kind.dtype == "I32" else 8) // bits
    return kind.elements


def components(
    headers: Headers, groups: Sequence[AttentionGroup], heads: int, tied: bool, bits: int
) -> tuple[Component, ...]:
    """Return the components that the tensors make up; a fused projection is divided by the heads of its parts.

    Tensors for speculative decoding and a head that is the embedding once more are left out: engines do not load them.
    """
    sums: dict[tuple[str, str, str, bool], list[int]] = {}
    kv_heads = max((group.kv_heads for group in groups), default=0)
    for kind in headers.kinds:
        if kind.name.startswith(DRAFT) or kind.name.endswith("rotary_emb.inv_freq"):
            continue
        place = _place(kind.name)
        if place[0] == "head" and tied and "lm_head" in kind.name:
            continue
        count = _elements(kind, bits)
        if place[0] == "qkv":
            share = 2 * kv_heads / (heads + 2 * kv_heads) if heads + 2 * kv_heads else 0
            kv = (round(count * share), round(kind.bytes * share))
            _add(sums, ("kv", "kv_heads", "layers", True), *kv)
            _add(sums, ("attention", "tensor", "layers", True), count - kv[0], kind.bytes - kv[1])
        else:
            _add(sums, place, count, kind.bytes)
    return tuple(
        Component(name, elements, size, split, place, quantizable)
        for (name, split, place, quantizable), (elements, size) in sums.items()
    )


def _add(
    sums: dict[tuple[str, str, str, bool], list[int]], place: tuple[str, str, str, bool], elements: int, size: int
) -> None:
    one = sums.setdefault(place, [0, 0])
    one[0] += elements
    one[1] += size

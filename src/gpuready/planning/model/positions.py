"""How far a model looks back, and the tables of sines that engines build for it."""

from __future__ import annotations

from collections.abc import Sequence

from gpuready.planning.model.families import Family
from gpuready.planning.model.fields import Fields
from gpuready.planning.model.layers import MOST_TOKENS, Layer

_KEPT = ("default", "llama3", "longrope", "su", "mrope", "proportional")
"""Kinds of scaling that `max_position_embeddings` has in it already."""
_ENDLESS = ("mamba", "falcon_mamba", "mamba2")


def _scaling(fields: Fields) -> Fields | None:
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(fields.raw(key), dict):
            return fields.below(key)
    return None


def _factor(scaling: Fields | None) -> float:
    value = scaling.raw("factor") if scaling is not None else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= 4096:
        return 1.0
    return float(value)


def context_tokens(fields: Fields, name: str) -> int:
    """Return the longest context that the model was made for.

    As vllm/config/model.py derives it: a scaling of the rotary positions multiplies, but for those kinds whose result
    stands in `max_position_embeddings`.
    """
    if name in _ENDLESS and "max_position_embeddings" not in fields:
        fields.assume("a state-space model has no context length, taken as 1,048,576 tokens")
        return 1 << 20
    tokens = fields.number("max_position_embeddings", most=MOST_TOKENS)
    scaling = _scaling(fields)
    kind = scaling.text("rope_type", "type") if scaling is not None else ""
    if kind in ("", *_KEPT) or name == "gemma3" or scaling is None:
        return tokens
    if kind in ("yarn", "deepseek_yarn"):
        tokens = scaling.optional("original_max_position_embeddings", most=MOST_TOKENS) or tokens
    return min(MOST_TOKENS, round(tokens * _factor(scaling)))


def rotary_elements(fields: Fields, family: Family, layers: Sequence[Layer], context: int) -> int:
    """Return the elements of the cosine and sine tables: one row per position, one table per kind of rotation.

    vllm/model_executor/layers/rotary_embedding: as wide as the part of a head that is rotated, as long as the scaled
    context; layers with a window may have a base of their own, and so an unscaled table of their own.
    """
    if not family.rotary:
        return 0
    plain = max(context, fields.optional("max_position_embeddings", most=MOST_TOKENS) or 0)
    scaling = _scaling(fields)
    linear = scaling is not None and scaling.text("rope_type", "type") in ("linear", "dynamic")
    scaled = max(plain, round((fields.optional("max_position_embeddings", most=MOST_TOKENS) or 0) * _factor(scaling)))
    share = fields.raw("partial_rotary_factor") or fields.raw("rotary_pct")
    part = float(share) if isinstance(share, (int, float)) and 0 < share <= 1 else 1.0
    own = family.pattern == 6 or any(
        key in fields for key in ("rope_local_base_freq", "swa_rope_theta", "global_head_dim")
    )
    tables = set()
    for layer in layers:
        local = own and layer.keeps.kind == "sliding"
        rows = scaled if linear and not local else plain
        if layer.mixer == "latent":
            tables.add((rows, fields.number("qk_rope_head_dim", least=0), local))
        elif layer.mixer in ("grouped", "both") and layer.keeps.head_dim:
            tables.add((rows, round(layer.keeps.head_dim * part), local))
    return sum(rows * width for rows, width, _ in tables)

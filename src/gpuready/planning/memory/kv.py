"""What the layers of a model keep of a request on one GPU: bytes per token and per state, for every engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from gpuready.planning.model.facts import AttentionGroup, ModelFacts

ELEMENT_BYTES: Mapping[str, float] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp16": 2,
    "bf16": 2,
    "half": 2,
    "float": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
"""Bytes of one element of a KV cache, by the names that the engines' flags have."""
SCALED_FOUR_BITS = 0.5 + 1 / 16
"""Half a byte, and a scale of one byte for 16 elements."""


def element_bytes(kv_dtype: str | None, model: ModelFacts, dtype: str | None = None) -> float:
    """Return the bytes of one element; None is the type that the model runs in.

    A type that is not known counts like 16 bits: the larger figure is the safe one.
    """
    name = (kv_dtype or dtype or model.dtype).lower()
    if "fp4" in name:
        return SCALED_FOUR_BITS
    if name.startswith("fp8"):
        return 1
    return ELEMENT_BYTES.get(name, 2)


def heads_per_gpu(heads: int, split: int) -> int:
    """Return how many KV heads one of `split` GPUs holds; heads fewer than GPUs are held by several."""
    return max(1, -(-heads // split)) if heads else 0


def token_bytes(group: AttentionGroup, split: int, element: float) -> float:
    """Return the bytes that one layer of a group keeps of one token on one of `split` GPUs.

    A latent layer's vector is one head, which every GPU holds; what an indexer keeps is bytes already.
    """
    if group.kind in ("recurrent", "none"):
        return 0.0
    if group.latent:
        return group.latent * element / group.compression + group.indexer
    heads = heads_per_gpu(group.kv_heads, split)
    return heads * (group.head_dim + group.v_head_dim) * element + group.indexer


def state_bytes(group: AttentionGroup, model: ModelFacts, split: int) -> float:
    """Return the bytes of one layer's recurrent state on one of `split` GPUs, for one request."""
    convolution = group.conv_elements * ELEMENT_BYTES.get(model.dtype, 2)
    return (convolution + group.state_elements * group.state_bytes_per_element) / split


def stages(model: ModelFacts, pp: int) -> list[list[tuple[AttentionGroup, int]]]:
    """Return, for each of `pp` pipeline stages, the groups that have layers there, and how many.

    Layers that cannot be divided evenly are taken by the stages before the last one, as vLLM and SGLang do.
    """
    order = model.order or tuple(index for index, group in enumerate(model.groups) for _ in range(group.layers))
    pp = max(1, min(pp, len(order) or 1))
    sizes = [len(order) // pp] * pp
    for index in range(len(order) % pp):
        sizes[max(0, pp - 2 - index)] += 1
    found, start = [], 0
    for size in sizes:
        counted = Counter(order[start : start + size])
        found.append([(model.groups[index], layers) for index, layers in sorted(counted.items())])
        start += size
    return found

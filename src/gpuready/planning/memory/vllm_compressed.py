"""The KV cache of DeepSeek-V4 under vLLM: vectors of several tokens, the last tokens, and unfinished vectors.

vllm/models/deepseek_v4 (attention.py, compressor.py) and v1/core/kv_cache_utils.py (group_and_unify_kv_cache_specs),
read in the 0.25.0 wheel. Every layer keeps the last tokens in blocks of 64. A layer that compresses also keeps vectors
in blocks of 256 tokens, and what it has gathered for the next vector in blocks of 4 or 8. Layers of one kind are a
group; a block holds one page of every layer of the largest group, so even 4 tokens of an unfinished vector take one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuready.planning.model.facts import AttentionGroup

_VECTOR_BYTES = 584
"""448 numbers in 8 bits, 64 rotary ones in 16, 8 scales."""
_STEP = 576
"""Bytes to which a page is rounded up."""
_BLOCK, _RECENT_BLOCK = 256, 64
_FINE_RATIO = 4
_UNFINISHED_BLOCKS = {_FINE_RATIO: 4}
_OTHER_UNFINISHED_BLOCK = 8


@dataclass(frozen=True)
class Part:
    """One group: layers that take blocks of as many tokens, all of a request's or those of a window."""

    window: int
    """0: all tokens."""
    block_tokens: int
    layers: int


@dataclass(frozen=True)
class Layout:
    """How the cache is divided."""

    parts: tuple[Part, ...]
    block_bytes: int
    token_bytes: float


def is_compressed(held: Sequence[tuple[AttentionGroup, int]]) -> bool:
    """Return whether these layers keep several tokens in one vector."""
    return any(group.compression > 1 for group, _ in held)


def layout(held: Sequence[tuple[AttentionGroup, int]]) -> Layout:
    """Return the layout of a pipeline stage that holds that many layers of each group."""
    kept = [(group, count) for group, count in held if group.compression > 1]
    layers = sum(count for group, count in held if group.latent)
    largest = max(count for _, count in kept)
    width = _least_padding([largest, layers, *(count for _, count in kept)], largest)
    recent = -(-layers // width)
    pages = [width * _page(_RECENT_BLOCK * _VECTOR_BYTES)]
    parts = [Part(0, _BLOCK, sum(count for _, count in kept))]
    parts += [Part(max(group.window for group, _ in held), _RECENT_BLOCK, width) for _ in range(recent)]
    for group, count in kept:
        if group.compression != _FINE_RATIO:
            pages.append(count * _page(_BLOCK // group.compression * _VECTOR_BYTES))
        if group.indexer:
            pages.append(count * _page(_BLOCK * group.indexer))
        block = _UNFINISHED_BLOCKS.get(group.compression, _OTHER_UNFINISHED_BLOCK)
        overlap = 2 if group.compression == _FINE_RATIO else 1
        parts.append(Part(overlap * group.compression, block, count))
    return Layout(tuple(parts), sum(pages), sum(pages) / _BLOCK)


def _page(size: int) -> int:
    return -(-size // _STEP) * _STEP


def _least_padding(counts: Sequence[int], least: int) -> int:
    """Return the group size from `least` on that fills groups up the least (kv_cache_utils.py, _approximate_gcd)."""
    return min(range(least, max(counts) + 1), key=lambda size: (sum(-count % size for count in counts), -size))

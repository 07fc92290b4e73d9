"""vLLM's KV cache: layers in groups of equal size, which take blocks of equal bytes from one pool.

vllm/v1/core/kv_cache_utils.py (from 0.32 kv_cache_planning.py) and vllm/v1/kv_cache_interface.py. A model whose layers
all keep every token has one group. Others are split into groups of as many layers as the rarest kind has, so that a
block of any group has the same bytes; the last group of a kind is filled up with layers that hold nothing. Recurrent
states are pages too: the attention's blocks are made long enough for one to fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuready.planning.memory import kv, vllm_compressed
from gpuready.planning.memory.run import Run
from gpuready.planning.memory.vllm_settings import Settings
from gpuready.planning.model.facts import AttentionGroup, ModelFacts

_STATE_BLOCK, _LATENT_STATE_BLOCK = 16, 64
"""Multiples of which a block must be that is made longer for a recurrent state."""
_SPARSE_BYTES = 656
"""512 numbers in 8 bits with 4 scales of 4 bytes, and 64 in 16 bits (backends/mla/flashmla_sparse.py, fp8_ds_mla)."""


@dataclass(frozen=True)
class Layers:
    """Layers that keep the same: their number and the bytes of one's block."""

    kind: str
    window: int
    count: int
    block_tokens: int
    page_bytes: int


@dataclass(frozen=True)
class Pool:
    """How a GPU's KV cache is divided."""

    groups: tuple[Layers, ...]
    """Each takes its own blocks for a request."""
    block_bytes: int
    """Of one block, over all layers of a group."""
    token_bytes: float
    """That one more token of a long request takes."""
    steps: int
    """Batches that may hold tokens at once."""
    batched_tokens: int
    split: int
    """GPUs over which the tokens of a request are spread."""
    states: int
    """States that a request keeps of a recurrent layer."""

    @property
    def block_tokens(self) -> int:
        """Return the tokens of the shortest block."""
        return min((group.block_tokens for group in self.groups), default=1)

    def blocks(self, kv_bytes: float) -> int:
        """Return how many blocks that many bytes hold."""
        return int(max(0.0, kv_bytes) // self.block_bytes) if self.block_bytes else 0

    def request_blocks(self, tokens: int) -> int:
        """Return the blocks that one request of that many tokens may take."""
        return sum(self._blocks_of(group, tokens) for group in self.groups)

    def request_bytes(self, tokens: int) -> int:
        """Return the bytes that one request of that many tokens may take."""
        return self.request_blocks(tokens) * self.block_bytes

    def longest(self, kv_bytes: float, most: int) -> int:
        """Return the longest request that fits, 0 where none does (estimate_max_model_len)."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.request_bytes(middle) <= kv_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def printed_tokens(self, blocks: int, length: int, by_concurrency: bool) -> int:
        """Return the tokens that vLLM prints: since 0.21 the requests that fit times their length, before by blocks."""
        if not self.groups:
            return 0
        if by_concurrency:
            return int(blocks / max(1, self.request_blocks(length)) * length)
        return blocks // len(self.groups) * self.block_tokens * self.split

    def _blocks_of(self, group: Layers, tokens: int) -> int:
        if group.kind == "recurrent":
            return self.states
        if group.kind in ("sliding", "chunked"):
            seen = group.window - 1 if group.kind == "sliding" else group.window
            kept = min(seen + self.steps * self.batched_tokens, tokens)
            return math.ceil(kept / group.block_tokens) + (group.kind == "sliding")
        return math.ceil(math.ceil(tokens / self.split) / group.block_tokens)


def pool(
    model: ModelFacts, run: Run, chosen: Settings, rules: Mapping[str, Any], held: Sequence[tuple[AttentionGroup, int]]
) -> Pool:
    """Return the pool of one pipeline stage, which holds that many layers of each group."""
    if vllm_compressed.is_compressed(held):
        return _compressed_pool(run, chosen, rules, held)
    layers, states = _layers(model, run, chosen, rules, held)
    kinds = {(one.kind, one.window) for one in layers}
    if len(kinds) > 1 or (rules["hybrid_groups"] and len({one.page_bytes for one in layers}) > 1 and states):
        layers, block_bytes = _grouped(layers, rules["group_ratio"])
    else:
        block_bytes = sum(one.page_bytes * one.count for one in layers)
        layers = [replace(layers[0], count=sum(one.count for one in layers))] if layers else []
    if run.draft is not None and layers:
        block_bytes += int(run.draft.kv_bytes_per_token / run.tp * layers[0].block_tokens)
    full = [one for one in layers if one.kind not in ("sliding", "chunked", "recurrent")] or layers
    token_bytes = sum(block_bytes / one.block_tokens for one in full if one.kind != "recurrent")
    return Pool(
        groups=tuple(layers),
        block_bytes=block_bytes,
        token_bytes=token_bytes / max(1, run.dcp),
        steps=_steps(run, rules),
        batched_tokens=chosen.max_num_batched_tokens,
        split=max(1, run.dcp),
        states=states,
    )


def _steps(run: Run, rules: Mapping[str, Any]) -> int:
    """Return the batches that may be under way at once (config/vllm.py, max_concurrent_batches)."""
    return int(rules["in_flight_steps"]) if run.pp == 1 else run.pp


def _compressed_pool(
    run: Run, chosen: Settings, rules: Mapping[str, Any], held: Sequence[tuple[AttentionGroup, int]]
) -> Pool:
    made = vllm_compressed.layout(held)
    groups = tuple(
        Layers("sliding" if part.window else "full", part.window, part.layers, part.block_tokens, made.block_bytes)
        for part in made.parts
    )
    return Pool(
        groups=groups,
        block_bytes=made.block_bytes,
        token_bytes=made.token_bytes,
        steps=_steps(run, rules),
        batched_tokens=chosen.max_num_batched_tokens,
        split=1,
        states=0,
    )


def _layers(
    model: ModelFacts, run: Run, chosen: Settings, rules: Mapping[str, Any], held: Sequence[tuple[AttentionGroup, int]]
) -> tuple[list[Layers], int]:
    """Return the layers of each kind with their pages, and the states that a request keeps of a recurrent layer."""
    brought = model.quantization.kv_dtype if model.quantization is not None and rules["checkpoint_kv_type"] else None
    element = kv.element_bytes(run.kv_dtype or brought, model, run.dtype)
    block, found = chosen.block_tokens, []
    state = max(
        (int(kv.state_bytes(group, model, run.tp)) for group, _ in held if group.kind == "recurrent"), default=0
    )
    if state:
        block = max(block, _state_block(run, element, state, held))
    drafted = model.draft_layers if run.draft is not None and not run.draft.weight_bytes else 0
    for group, count in held:
        if group.kind == "none" or not count:
            continue
        if group.kind == "recurrent":
            found.append(Layers("recurrent", 0, count, chosen.max_model_len, state))
            continue
        local = group.kind if group.kind in ("sliding", "chunked") else "full"
        allowed = rules["hybrid_groups"] and (local != "chunked" or rules["chunked_groups"])
        kind = local if allowed and not chosen.old_engine else "full"
        page = int(block * _token_bytes(group, run, element, rules))
        found.append(Layers(kind, group.window if kind != "full" else 0, count, block, page))
    if drafted and found:
        index = next((number for number, one in enumerate(found) if one.kind == "full"), len(found) - 1)
        found[index] = replace(found[index], count=found[index].count + drafted)
    tokens = run.draft.tokens if run.draft is not None else 0
    return found, ((2 if chosen.prefixes_kept else 1) + tokens if state else 0)


def _token_bytes(group: AttentionGroup, run: Run, element: float, rules: Mapping[str, Any]) -> float:
    """Return the bytes of one token in one layer; a sparse latent layer has an 8 bit form of its own."""
    eight_bits = element == 1 or (run.kv_dtype is None and rules["sparse_in_eight_bits"])
    if group.latent and group.indexer and eight_bits:
        return _SPARSE_BYTES + group.indexer
    return kv.token_bytes(group, run.tp, element)


def _state_block(run: Run, element: float, state: int, held: Sequence[tuple[AttentionGroup, int]]) -> int:
    """Return the tokens of an attention block that has at least the bytes of a recurrent state."""
    full = [group for group, _ in held if group.kind not in ("recurrent", "none")]
    if not full:
        return 1
    per_token = max(kv.token_bytes(group, run.tp, element) for group in full)
    step = _LATENT_STATE_BLOCK if any(group.latent for group in full) else _STATE_BLOCK
    return step * -(-state // int(step * per_token))


def _grouped(layers: Sequence[Layers], ratio: float) -> tuple[list[Layers], int]:
    """Return groups of equal size, and the bytes of a block over one (_get_kv_cache_groups_uniform_page_size)."""
    largest = max(one.page_bytes for one in layers)
    unified = [_longer(one, largest) for one in layers]
    merged: dict[tuple[str, int, int], Layers] = {}
    for one in unified:
        key = (one.kind, one.window, one.block_tokens)
        merged[key] = replace(one, count=one.count + (merged[key].count if key in merged else 0))
    counts = [one.count for one in merged.values()]
    size = max(counts) if max(counts) < min(counts) * ratio else min(counts)
    groups = [replace(one, count=size) for one in merged.values() for _ in range(-(-one.count // size))]
    return groups, size * largest


def _longer(one: Layers, largest: int) -> Layers:
    """Return layers with a page of the largest one's bytes: longer blocks where that divides, else padded."""
    if one.page_bytes == largest or one.kind == "recurrent":
        return replace(one, page_bytes=largest)
    times = largest // one.page_bytes if largest % one.page_bytes == 0 else 1
    return replace(one, block_tokens=one.block_tokens * times, page_bytes=largest)

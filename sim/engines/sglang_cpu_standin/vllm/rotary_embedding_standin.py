"""Stand-in of one CUDA operator, so that SGLang's own server runs on a CPU: rotary position embedding.

On a device that is neither CUDA nor one of its other backends, SGLang 0.5.23 takes this operator alone from vLLM's
compiled ones (srt/layers/rotary_embedding/base.py: `from vllm._custom_ops import rotary_embedding`), and its wheel
brings none. All else is SGLang's: server, scheduler, attention by torch, metrics, shutdown. It says nothing of SGLang's
kernels or speed.
"""

from __future__ import annotations

from typing import Any


def halves(rotary: int, is_neox: bool) -> tuple[slice, slice]:
    """Return where the first and the second numbers of the rotated pairs lie among `rotary` numbers of a head.

    GPT-NeoX pairs each number of the first half with its fellow of the second, GPT-J each even one with the next.
    """
    return (
        (slice(0, rotary // 2), slice(rotary // 2, rotary)) if is_neox else (slice(0, rotary, 2), slice(1, rotary, 2))
    )


def rotated(first: Any, second: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """Return pairs (first, second), numbers or tensors, turned by the angles of cos and sin."""
    return first * cos - second * sin, second * cos + first * sin


def rotary_embedding(positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool) -> None:
    """Rotate query and key in place, with the arguments of vLLM's operator; it computes in 32 bits.

    `positions` are whole numbers, one per token, `query` and `key` [tokens, heads * head_size] (or key None), and
    `cos_sin_cache` [positions, rotary]: the cosines of a position's angles, then their sines.
    """
    angles = cos_sin_cache.index_select(0, positions.flatten()).float()
    cos, sin = angles.unsqueeze(1).chunk(2, dim=-1)
    first, second = halves(angles.shape[-1], is_neox)
    for tensor in (query, key):
        if tensor is not None:
            heads = tensor.view(angles.shape[0], -1, head_size)
            turned = rotated(heads[..., first].float(), heads[..., second].float(), cos, sin)
            heads[..., first], heads[..., second] = turned

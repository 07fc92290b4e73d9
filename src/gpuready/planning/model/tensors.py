"""The large tensors in which engines keep the weights: projections of the same input are one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpuready.planning.model.facts import Tensor
from gpuready.planning.model.modules import Module
from gpuready.planning.model.quantization import Quantized

SMALLEST = 1 << 20
"""Tensors of fewer bytes are not told: allocators put them together."""
_FUSED: Mapping[str, str] = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "q_a_proj": "latent",
    "kv_a_proj_with_mqa": "latent",
    "in_proj_qkv": "in_proj",
    "in_proj_z": "in_proj",
}
"""As vllm/model_executor/models and sglang/srt/models merge them (packed_modules_mapping, stacked_params_mapping)."""


def fused(modules: Iterable[Module], element_bytes: int, quantized: Quantized | None) -> tuple[Tensor, ...]:
    """Return the tensors of a model, equal ones together; scales and what is small are left out."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for module in modules:
        scheme = quantized.scheme(module) if quantized is not None else None
        bits = scheme.bits if scheme is not None else 8 * element_bytes
        parent, _, last = module.name.rpartition(".")
        split = "tensor" if module.split == "kv_heads" else module.split
        one = sums.setdefault((f"{parent}.{_FUSED.get(last, last)}", split, module.place), [0, 0])
        size = module.copies * module.outputs * module.inputs * bits // 8
        one[module.split == "kv_heads"] += size
    counts: dict[Tensor, int] = {}
    for (_, split, place), (size, kv_size) in sums.items():
        if size + kv_size >= SMALLEST:
            tensor = Tensor(size + kv_size, kv_size, split, place)
            counts[tensor] = counts.get(tensor, 0) + 1
    return tuple(Tensor(one.bytes, one.kv_bytes, one.split, one.place, count) for one, count in counts.items())

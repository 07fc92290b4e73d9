"""Where the memory of one GPU goes when vLLM serves a model on it.

The form is vLLM's own: requested = utilization x total; what weights, activations and non-torch memory
leave of it is KV cache (vllm/v1/worker/gpu_worker.py, determine_available_memory). The constants fit
vLLM 0.17 to 0.19 on H100 (62 start-up logs published with llm-d-incubation/llm-d-planner PR 205).
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuready.planning.model.facts import ModelFacts

GIB = 1024**3
UTILIZATION = 0.90
SAMPLER_BYTES = 14.9
"""Bytes of the dummy sampler pass per sequence and vocabulary entry."""
NON_TORCH_GIB = {1: 0.26}
"""One GPU: cuBLAS and context growth; several: NCCL and custom all-reduce buffers as well."""
NON_TORCH_PARALLEL_GIB = 2.13


@dataclass(frozen=True)
class Budget:
    """The memory of one GPU of a deployment, in GiB, and the KV cache in tokens of the whole deployment."""

    total_gib: float
    requested_gib: float
    weights_gib: float
    activation_gib: float
    non_torch_gib: float
    kv_gib: float
    kv_tokens: int


def kv_bytes_per_token_per_gpu(model: ModelFacts, tensor_parallel: int) -> float:
    """Bytes per token on one GPU; KV heads fewer than GPUs are replicated, not split."""
    shards = min(tensor_parallel, min(group.kv_heads or 1 for group in model.groups))
    return model.kv_bytes_per_token() / shards


def activation_bytes(model: ModelFacts, max_num_seqs: int, max_num_batched_tokens: int) -> float:
    """Peak of the profiling pass: sampler over all sequences, plus one forward pass's hidden states."""
    return SAMPLER_BYTES * max_num_seqs * model.vocabulary + 1.5 * max_num_batched_tokens * model.hidden * 2


def budget(
    model: ModelFacts,
    total_gib: float,
    tensor_parallel: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    utilization: float = UTILIZATION,
) -> Budget:
    """Return where the memory of one GPU goes; `kv_gib` is negative when the weights do not fit."""
    requested = utilization * total_gib
    weights = model.weight_bytes / tensor_parallel / GIB
    activation = activation_bytes(model, max_num_seqs, max_num_batched_tokens) / GIB
    non_torch = NON_TORCH_GIB.get(tensor_parallel, NON_TORCH_PARALLEL_GIB)
    kv_gib = requested - weights - activation - non_torch
    per_token = kv_bytes_per_token_per_gpu(model, tensor_parallel)
    return Budget(
        total_gib=round(total_gib, 2),
        requested_gib=round(requested, 2),
        weights_gib=round(weights, 2),
        activation_gib=round(activation, 2),
        non_torch_gib=round(non_torch, 2),
        kv_gib=round(kv_gib, 2),
        kv_tokens=max(0, int(kv_gib * GIB / per_token)),
    )

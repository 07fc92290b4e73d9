"""Bytes of weights on each GPU of a deployment, under tensor, pipeline and expert parallelism."""

from __future__ import annotations

from gpuready.planning.memory.kv import heads_per_gpu
from gpuready.planning.memory.run import Run
from gpuready.planning.model.facts import Component, ModelFacts

_LOADED_BYTES = {"fp8": 1.0, "bitsandbytes": 0.5 + 1 / 16}
"""Bytes per element of a linear layer that an engine quantizes while it loads; bitsandbytes scales 64 together."""
_ELEMENT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_VOCABULARY_STEP = 64
"""Rows to which engines pad a vocabulary before they split it (vLLM's and SGLang's vocab_parallel_embedding.py)."""
_PIECE, _LARGE = 2 << 20, 10 << 20


def by_stage(model: ModelFacts, run: Run) -> list[float]:
    """Return the bytes of weights on one GPU of each pipeline stage.

    A head that is the embedding lies on the first stage and again on the last one.
    """
    pp = max(1, min(run.pp, model.layers))
    layers = [model.layers // pp] * pp
    for index in range(model.layers % pp):
        layers[max(0, pp - 2 - index)] += 1
    found = [0.0] * pp
    has_head = any(component.name == "head" for component in model.components)
    drafted = model.draft_components if run.draft is not None and not run.draft.weight_bytes else ()
    for component in (*model.components, *drafted):
        size = component_bytes(component, model, run)
        if component.place == "layers":
            for stage, count in enumerate(layers):
                found[stage] += size * count / model.layers
        else:
            found[0 if component.place == "first" else -1] += size
        if component.name == "embedding" and not has_head and pp > 1:
            found[-1] += size
    if run.draft is not None:
        found[-1] += run.draft.weight_bytes / run.tp
    return found


def per_rank(model: ModelFacts, run: Run) -> float:
    """Return the bytes of weights on the GPU that holds the most."""
    return max(by_stage(model, run))


def component_bytes(component: Component, model: ModelFacts, run: Run) -> float:
    """Return a component's bytes on one GPU, over all its layers."""
    return _loaded_bytes(component, model, run) * _share(component, model, run)


def block_rounding(model: ModelFacts, run: Run) -> list[float]:
    """Return the bytes by which PyTorch's blocks exceed the large tensors of one GPU of each pipeline stage.

    A tensor of 10 MiB or more gets whole pieces of 2 MiB, and keeps what is left of the last one unless that is more
    than 1 MiB (c10/cuda/CUDACachingAllocator.cpp). Tensors in another format than the checkpoint's are not counted.
    """
    stages = max(1, min(run.pp, model.layers))
    found = [0.0] * stages
    if run.quantization is not None or run.dtype == "float32":
        return found
    for tensor in model.tensors:
        size = (tensor.bytes - tensor.kv_bytes) * _part(tensor.split, model, run)
        size += tensor.kv_bytes * _part("kv_heads", model, run)
        left = -int(size) % _PIECE
        if size < _LARGE or left > _PIECE // 2:
            continue
        if tensor.place == "layers":
            found = [one + left * tensor.count / stages for one in found]
        else:
            found[0 if tensor.place == "first" else -1] += left * tensor.count
    return found


def _loaded_bytes(component: Component, model: ModelFacts, run: Run) -> float:
    plain = component.bytes >= component.elements * _ELEMENT_BYTES.get(model.dtype, 2.0) * 0.99
    if component.quantizable and run.quantization in _LOADED_BYTES and model.quantization is None:
        return component.elements * _LOADED_BYTES[run.quantization]
    if plain and run.dtype in _ELEMENT_BYTES:
        return component.bytes * _ELEMENT_BYTES[run.dtype] / _ELEMENT_BYTES.get(model.dtype, 2.0)
    return float(component.bytes)


def _share(component: Component, model: ModelFacts, run: Run) -> float:
    if component.split == "tensor" and component.name not in ("attention", "kv", "recurrent"):
        return 1 / run.tp
    return _part(component.split, model, run)


def _part(split: str, model: ModelFacts, run: Run) -> float:
    """Return the part of a tensor that one GPU holds."""
    attention = max(1, run.tp // run.dp) if run.attention_dp else run.tp
    if split == "whole":
        return 1.0
    if split == "experts":
        # vLLM divides experts over the data-parallel ranks too (fused_moe/config.py, FusedMoEParallelConfig.make).
        return 1 / (run.ep if run.ep > 1 else run.tp * (max(1, run.dp) if run.engine == "vllm" else 1))
    if split == "vocabulary":
        padded = -(-model.vocabulary // _VOCABULARY_STEP) * _VOCABULARY_STEP
        return padded / model.vocabulary / run.tp if run.tp > 1 else 1.0
    if split == "kv_heads":
        heads = max((group.kv_heads for group in model.groups), default=0)
        return heads_per_gpu(heads, attention) / heads if heads else 1 / attention
    return 1 / attention

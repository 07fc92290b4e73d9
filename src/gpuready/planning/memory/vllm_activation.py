"""The peak of vLLM's profiling run, array by array.

The run passes `max_num_batched_tokens` tokens through the model once, then samples for as many requests as may run at
once (vllm/v1/worker/gpu_model_runner.py, profile_run and _dummy_sampler_run). The larger of both peaks counts. For a
large vocabulary that is the sampler's: it keeps several float32 arrays of requests x vocabulary.
"""

from __future__ import annotations

from gpuready.planning.memory.run import Device, Range, Run
from gpuready.planning.memory.versions import ConstantSet
from gpuready.planning.memory.vllm_settings import POOLING, Settings
from gpuready.planning.model.facts import ModelFacts

_MIB = 1 << 20
_FLOAT = 4
_SORTED_TOGETHER = 128
"""Rows from which on PyTorch sorts all at once, which takes more memory (ATen/native/cuda/Sort.cu)."""
_PENALTY_BYTES = 4 + 1 / 8
"""Per request and entry of the vocabulary, what the second model runner keeps (worker/gpu/sample/penalties.py)."""


def peak(
    model: ModelFacts, device: Device, run: Run, chosen: Settings, constants: ConstantSet, last_stage: bool = True
) -> Range:
    """Return the bytes of the profiling run's peak on one GPU of a pipeline stage."""
    tokens, width = chosen.max_num_batched_tokens, model.hidden * chosen.element_bytes
    workspace = expert_workspace(model, run, chosen)
    resident = Range.exact(gemm_workspace(device)) + _images(model, chosen, constants)
    if workspace and constants.values["workspace_kept"]:
        resident += Range.exact(workspace)
        workspace = 0.0
    forward = _forward(model, run, chosen, constants) + Range.exact(workspace)
    if not last_stage:
        # Its hidden states and residual are handed on.
        return forward + resident + Range.exact(2 * tokens * width)
    if run.task in POOLING:
        return forward + resident
    sampler = _sampler(model, chosen, constants) + Range.exact(tokens * width)
    higher = Range(*(max(a, b) for a, b in zip(_parts(forward), _parts(sampler), strict=True)))
    return higher + resident


def kept_by_second_runner(model: ModelFacts, run: Run, chosen: Settings) -> float:
    """Return the bytes that the second model runner holds for penalties, all the time."""
    if not chosen.second_runner or run.task in POOLING:
        return 0.0
    return chosen.max_num_seqs * _vocabulary(model) * _PENALTY_BYTES


def gemm_workspace(device: Device) -> float:
    """Return cuBLAS's workspace: 32 MiB on Hopper and newer, else 8 (ATen/cuda/CublasHandlePool.cpp)."""
    return (32 if device.compute >= 9 else 8.125) * _MIB


def expert_workspace(model: ModelFacts, run: Run, chosen: Settings) -> float:
    """Return the two buffers of a mixture-of-experts layer (fused_moe.py, TritonExperts.workspace_shapes).

    Every token takes as many rows as it passes experts, each as wide as the widest array on its way. The tokens of
    all data-parallel ranks come together, and what is not spread by expert is divided over them too. Kernels for 4
    bit floats keep none.
    """
    experts = model.experts
    if experts is None or (model.quantization is not None and model.quantization.method in ("mxfp4", "nvfp4")):
        return 0.0
    rows = chosen.max_num_batched_tokens * experts.active * max(1, run.dp)
    inner = experts.intermediate / (1 if run.ep > 1 else run.tp * max(1, run.dp))
    return rows * (max(inner, model.hidden) + max(2 * inner, model.hidden)) * chosen.element_bytes


def _vocabulary(model: ModelFacts) -> int:
    return model.sampled_vocabulary or model.vocabulary


def _forward(model: ModelFacts, run: Run, chosen: Settings, constants: ConstantSet) -> Range:
    """Return the widest feed-forward part, what goes in and out of its activation, with hidden states beside it."""
    tokens, size = chosen.max_num_batched_tokens, chosen.element_bytes
    dense = model.intermediate if model.experts is None else model.experts.shared_intermediate
    inner = (3 if _gated(model) else 2) * tokens * dense / run.tp * size
    return Range.exact(inner) + constants.range("forward_widths").scaled(tokens * model.hidden * size)


def _gated(model: ModelFacts) -> bool:
    """Return whether the feed-forward parts have two matrices at their entrance, a gate and what passes it."""
    matrices = sum(one.elements for one in model.components if one.name == "mlp")
    return model.experts is not None or matrices > 2.5 * model.layers * model.hidden * model.intermediate


def _sampler(model: ModelFacts, chosen: Settings, constants: ConstantSet) -> Range:
    """Return what lives at once while a token is drawn for every request."""
    requests, vocabulary = chosen.sampled, _vocabulary(model)
    last_states = 2 * requests * model.hidden * chosen.element_bytes
    logits = requests * vocabulary * chosen.element_bytes
    if chosen.second_runner:
        drawn = Range.exact(constants.values["second_runner_sampler_bytes"])
        rows = Range.exact(0.0)
    else:
        drawn = constants.range("sampler_bytes" if requests >= _SORTED_TOGETHER else "small_sampler_bytes")
        rows = constants.range("row_buffers")
    kept = Range(*(min(count, requests) * vocabulary * _FLOAT for count in _parts(rows)))
    return drawn.scaled(requests * vocabulary) + Range.exact(last_states + logits) + kept


def _images(model: ModelFacts, chosen: Settings, constants: ConstantSet) -> Range:
    """Return the images of the profiling run, and what their encoder made of them: as many as a batch has tokens."""
    if not model.vision:
        return Range.exact(0.0)
    tokens = chosen.max_num_batched_tokens
    pixels = Range.exact(model.pixels_per_token) if model.pixels_per_token else constants.range("pixels")
    encoded = Range.exact(tokens * model.hidden * chosen.element_bytes)
    return encoded + pixels.scaled(tokens * chosen.element_bytes)


def _parts(figure: Range) -> tuple[float, float, float]:
    return figure.value, figure.low, figure.high

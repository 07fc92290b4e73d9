"""What vLLM holds of weights on each GPU, beyond the checkpoint's own bytes."""

from __future__ import annotations

from gpuready.planning.memory import weights
from gpuready.planning.memory.run import Device, Run
from gpuready.planning.memory.versions import ConstantSet
from gpuready.planning.memory.vllm_settings import Settings
from gpuready.planning.model.facts import ModelFacts

_HOPPER = 9.0


def by_stage(model: ModelFacts, device: Device, run: Run, chosen: Settings, constants: ConstantSet) -> list[float]:
    """Return the bytes of weights on one GPU of each pipeline stage, as vLLM logs them after the load.

    With them are rotary tables, in the model's own type, on every stage; a copy of the projection that decompresses a
    latent KV, which decoding takes apart (v1/attention/backends/mla, process_weights_after_loading); padding of 4 bit
    experts; slots for adapters; and what PyTorch's blocks exceed the tensors by.
    """
    stages = weights.by_stage(model, run)
    rounding = weights.block_rounding(model, run)
    copied = model.latent_up_elements * chosen.element_bytes / run.tp + _expert_padding(model, device, run, constants)
    copied += adapter_bytes(model, run, chosen)
    tables = model.rotary_elements * chosen.element_bytes
    return [size + rest + tables + copied / len(stages) for size, rest in zip(stages, rounding, strict=True)]


def adapter_bytes(model: ModelFacts, run: Run, chosen: Settings) -> float:
    """Return the bytes of the slots for LoRA adapters on one GPU, over all layers (vllm/lora/layers).

    Of every linear layer of attention and dense feed-forward parts a slot has `rank` rows as wide as its input and as
    many as wide as its output; the side on which the layer itself is divided is divided too. Experts are not counted.
    """
    if run.lora is None:
        return 0.0
    hidden, widths = model.hidden, 0.0
    for group in model.groups:
        queries, keys = model.heads * group.head_dim, group.kv_heads * group.head_dim
        values = group.kv_heads * group.v_head_dim
        if queries and keys:
            divided = 2 * queries + keys + values
            widths += group.layers * (4 * hidden + divided / run.tp)
    inner = model.intermediate if model.experts is None else model.experts.shared_intermediate
    if inner:
        widths += model.layers * 3 * (hidden + inner / run.tp)
    return run.lora.slots * run.lora.rank * widths * chosen.element_bytes


def _expert_padding(model: ModelFacts, device: Device, run: Run, constants: ConstantSet) -> float:
    """Return the bytes by which MXFP4 experts are padded to what their kernel takes (quantization/mxfp4.py)."""
    if model.experts is None or model.quantization is None or model.quantization.method != "mxfp4":
        return 0.0
    steps = constants.values["mxfp4_steps"]["hopper" if device.compute == _HOPPER else "others"]
    inner = model.experts.intermediate / (1 if run.ep > 1 else run.tp * max(1, run.dp))
    padded = _up(inner, steps[0]) * _up(model.hidden, steps[1])
    held = sum(weights.component_bytes(one, model, run) for one in model.components if one.split == "experts")
    return held * (padded / (inner * model.hidden) - 1)


def _up(size: float, step: int) -> int:
    return -(-int(size) // step) * step

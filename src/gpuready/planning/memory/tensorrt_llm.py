"""How TensorRT-LLM's PyTorch backend divides a GPU: the KV cache is a fraction of what a trial run leaves free.

    KV cache = (total - peak of weights, activations and all outside PyTorch) x free_gpu_memory_fraction

from tensorrt_llm/_torch/pyexecutor/_util.py::KvCacheCreator; the trial's own small KV cache is given back there. What
the fraction leaves is nobody's. The least of all GPUs holds for all (resource_manager.py::calculate_max_num_blocks).
"""

from __future__ import annotations

from dataclasses import replace

from gpuready.planning.memory import kv, weights
from gpuready.planning.memory.run import GIB, Device, Estimate, Range, Run
from gpuready.planning.memory.versions import ConstantSet
from gpuready.planning.model.facts import ModelFacts

_HIDDEN_COPIES, _FEED_FORWARD_COPIES, _SIXTEEN_BITS = 8, 3, 2


def token_bytes(model: ModelFacts, run: Run) -> float:
    """Return the bytes of one token on the GPU that holds the most layers.

    Sliding layers are charged like full ones, for no attention window is given. With attention data parallelism every
    GPU holds all KV heads of its own requests.
    """
    split = max(1, run.tp // run.dp) if run.attention_dp else run.tp
    element = kv.element_bytes(_kv_dtype(model, run), model)
    stages = kv.stages(model, run.pp)
    return max(sum(layers * kv.token_bytes(group, split, element) for group, layers in stage) for stage in stages)


def request_gib(model: ModelFacts, run: Run, constants: ConstantSet, tokens: int) -> float:
    """Return what one request takes of a GPU's KV cache, in whole blocks, with its recurrent states."""
    block = run.block_size or constants.values["block_tokens"]
    return (-(-tokens // block) * block * token_bytes(model, run) + _state_bytes(model, run)) / GIB


def estimate(model: ModelFacts, device: Device, run: Run, constants: ConstantSet) -> Estimate:
    """Return where the memory of the fullest GPU goes, with TensorRT-LLM's defaults filled in."""
    rules = constants.values
    fraction, block = run.memory_fraction or float(rules["fraction"]), run.block_size or int(rules["block_tokens"])
    asked = run.max_model_len
    run = replace(
        run,
        memory_fraction=fraction,
        max_num_seqs=run.max_num_seqs or rules["max_batch_size"],
        max_num_batched_tokens=run.max_num_batched_tokens or rules["max_num_tokens"],
        block_size=block,
        max_model_len=asked or model.context_tokens,
    )
    loaded = Range.exact((weights.per_rank(model, run) + _padding(model, run, rules["expert_padding"])) / GIB)
    activation, outside = _activation(model, run, constants), _outside(model, device, constants)
    non_torch = constants.range("non_torch_gib", "several" if run.tp * run.pp > 1 else "one")
    states = (run.max_num_seqs or 0) * _state_bytes(model, run) / GIB
    used = loaded + activation + non_torch + outside
    free = [device.total_gib - one for one in (used.value, used.high, used.low)]
    pool = [_pool(gib * fraction, run) for gib in free]
    per_token = token_bytes(model, run)
    tokens = [_tokens(gib - states, per_token, block) for gib in pool]
    length = asked or min(model.context_tokens, max(1, tokens[0]))
    return Estimate(
        run=run,
        constants=constants.name,
        total_gib=device.total_gib,
        budget_gib=used.value + max(0.0, pool[0]),
        outside=outside,
        weights=loaded,
        activation=activation,
        non_torch=non_torch,
        graphs=Range.exact(0.0),
        graphs_counted=True,
        kv=Range(*pool),
        kv_tokens=Range(*tokens),
        bytes_per_token=per_token,
        block_tokens=block,
        blocks=tokens[0] // block,
        request_gib=request_gib(model, run, constants, length),
        fits=tokens[0] >= length,
        surely_fits=tokens[1] >= length,
        refusal="" if tokens[0] >= length else _refusal(run, device, loaded, free[0], tokens[0], length),
        free_gib=max(0.0, free[0]) - max(0.0, pool[0]),
        notes=_notes(run, device, free[0]),
    )


def _kv_dtype(model: ModelFacts, run: Run) -> str | None:
    """Return the KV cache's type: a checkpoint that brings scales for one is taken at its word."""
    return run.kv_dtype or (model.quantization.kv_dtype if model.quantization else None)


def _activation(model: ModelFacts, run: Run, constants: ConstantSet) -> Range:
    """Return the peak of the trial run, a forward pass of max_num_tokens without logits but of the last token."""
    width = _HIDDEN_COPIES * model.hidden + _FEED_FORWARD_COPIES * model.intermediate / run.tp
    factor = constants.range("activation_factor")
    return factor.scaled((run.max_num_batched_tokens or 0) * width * _SIXTEEN_BITS / GIB)


def _state_bytes(model: ModelFacts, run: Run) -> float:
    stages = kv.stages(model, run.pp)
    recurrent = [[(group, count) for group, count in stage if group.kind == "recurrent"] for stage in stages]
    return max(sum(count * kv.state_bytes(group, model, run.tp) for group, count in stage) for stage in recurrent)


def _padding(model: ModelFacts, run: Run, step: int) -> float:
    """Return the bytes that MXFP4 experts grow by, whose rows and columns are padded to whole tiles."""
    if model.experts is None or model.quantization is None or model.quantization.method != "mxfp4":
        return 0.0
    grown = 1.0
    for size in (model.hidden, model.experts.intermediate):
        grown *= -(-size // step) * step / size
    experts = [component for component in model.components if component.name == "experts"]
    return (grown - 1) * sum(weights.component_bytes(component, model, run) for component in experts) / run.pp


def _outside(model: ModelFacts, device: Device, constants: ConstantSet) -> Range:
    """Return what others use before the start: what is known not to be free, or unified memory's page cache."""
    if device.free_gib is not None:
        return Range.exact(max(0.0, device.total_gib - device.free_gib))
    if device.unified:
        return constants.range("page_cache_part").scaled(model.weight_bytes / GIB)
    return Range.exact(0.0)


def _pool(gib: float, run: Run) -> float:
    return min(gib, run.kv_bytes / GIB) if run.kv_bytes else gib


def _tokens(gib: float, per_token: float, block: int) -> int:
    return int(max(0.0, gib) * GIB // per_token) // block * block if per_token else 0


def _refusal(run: Run, device: Device, loaded: Range, free: float, tokens: int, length: int) -> str:
    if tokens:
        return f"one request of {length:,} tokens needs more than the {tokens:,} tokens of the KV cache"
    return (
        f"the weights take {loaded.value:.2f} GiB of every GPU, and with activations and what lies outside PyTorch "
        f"{device.total_gib - free:.2f} of the {device.total_gib:.2f} GiB of {device.name}; use more GPUs than "
        f"{run.tp * run.pp}, a smaller format, or fewer max_num_tokens than {run.max_num_batched_tokens:,}"
    )


def _notes(run: Run, device: Device, free: float) -> tuple[str, ...]:
    left = max(0.0, free) * (1 - (run.memory_fraction or 0))
    notes = [
        f"free_gpu_memory_fraction {run.memory_fraction} is of the {max(0.0, free):.2f} GiB that are free after the "
        f"trial run; {left:.2f} of them are left to nobody"
    ]
    if device.unified and device.free_gib is None:
        notes.append(
            "the page cache of the host counts as used on unified memory; drop it before the start to plan with more"
        )
    return tuple(notes)

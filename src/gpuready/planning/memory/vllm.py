"""How vLLM divides a GPU: what its fraction of the card's memory leaves after a profiling run is KV cache.

    KV cache = ceil(total x gpu_memory_utilization) - weights - activation peak - what PyTorch does not show - graphs

(vllm/v1/worker/gpu_worker.py, determine_available_memory). CUDA graphs are taken off since 0.20, by an estimate; in
older releases they come on top of the fraction. All GPUs take as many blocks as the one that has room for the fewest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gpuready.planning.memory import kv, vllm_activation, vllm_pages, vllm_weights
from gpuready.planning.memory.run import GIB, Device, Estimate, Range, Run
from gpuready.planning.memory.versions import ConstantSet
from gpuready.planning.memory.vllm_pages import Pool
from gpuready.planning.memory.vllm_settings import Settings, settings
from gpuready.planning.model.facts import ModelFacts

_GRAPHS_MEASURED = 51
"""Batch sizes of the runs from which graphs are known."""
_BAND = {"dense": 0.05, "others": 0.15}
"""The widest band that is told, as a part of the KV cache."""
_WEIGHTS_BAND = 0.004
_UNIFIED_PLACES = "pages that the host caches"


@dataclass(frozen=True)
class Stage:
    """One GPU of a pipeline stage, in GiB."""

    weights: Range
    activation: Range
    non_torch: Range
    graphs: Range
    pool: Pool
    left: Range
    """What the budget leaves for the KV cache."""

    @property
    def taken(self) -> float:
        """Return the expected GiB of all but KV cache and graphs."""
        return self.weights.value + self.activation.value + self.non_torch.value

    @property
    def blocks(self) -> int:
        """Return how many blocks it has room for."""
        return self.pool.blocks(self.left.value * GIB)


@dataclass(frozen=True)
class Verdict:
    """Whether a run starts, by the expected figures and by the worst of their bands."""

    fits: bool
    surely_fits: bool
    refusal: str


def estimate(model: ModelFacts, device: Device, run: Run, constants: ConstantSet) -> Estimate:
    """Return where the memory of the fullest GPU goes, with vLLM's defaults filled in."""
    rules = constants.values
    chosen = settings(model, device, run, rules)
    budget = math.ceil(device.total_gib * GIB * chosen.fraction) / GIB
    stages = _stages(model, device, run, chosen, constants, budget)
    stage = min(stages, key=lambda one: (one.blocks, one.left.value))
    found = stage.pool
    blocks = [found.blocks(gib * GIB) for gib in (stage.left.value, stage.left.low, stage.left.high)]
    tokens = [found.printed_tokens(count, chosen.max_model_len, rules["tokens_by_concurrency"]) for count in blocks]
    before, counted = _before(device, run, constants), _counted(device, constants)
    outside = before if counted else before + stage.graphs
    if not rules["all_counted"]:
        outside += _kept(model, run, chosen)
    verdict = _verdict(device, run, chosen, constants, stage, budget, before)
    if not found.groups:
        # An encoder has no KV cache, and leaves the rest of its budget alone.
        stage = replace(stage, left=Range.exact(min(0.0, stage.left.value)))
    if run.kv_bytes is not None or not found.groups:
        budget = stage.taken + stage.left.value + (stage.graphs.value if counted else 0.0)
    return Estimate(
        run=_filled(run, chosen, found),
        constants=constants.name,
        total_gib=device.total_gib,
        budget_gib=budget,
        outside=outside,
        weights=stage.weights,
        activation=stage.activation,
        non_torch=stage.non_torch,
        graphs=stage.graphs,
        graphs_counted=counted,
        kv=stage.left,
        kv_tokens=Range(*(float(count) for count in tokens)),
        bytes_per_token=found.token_bytes,
        block_tokens=found.block_tokens,
        blocks=blocks[0],
        request_gib=found.request_bytes(chosen.max_model_len) / GIB,
        fits=verdict.fits,
        surely_fits=verdict.surely_fits,
        refusal=verdict.refusal,
        free_gib=device.total_gib - outside.value - budget,
        notes=_notes(model, device, run, chosen, constants, stage, len(stages)),
        # The engine before V1 refuses fewer batched tokens than the longest request, unless it splits prompts.
        whole_prompts=chosen.old_engine and chosen.max_num_batched_tokens >= chosen.max_model_len,
    )


def _verdict(
    device: Device, run: Run, chosen: Settings, constants: ConstantSet, stage: Stage, budget: float, before: Range
) -> Verdict:
    """Return whether the run starts: the fraction is free, a KV cache of given bytes has room, one request fits."""
    needed = stage.pool.request_bytes(chosen.max_model_len) / GIB
    spare = stage.pool.block_bytes / GIB if constants.values["null_block"] else 0.0
    refusal = _start_refusal(device, chosen, budget, before)
    room = device.total_gib - before.value - stage.taken - stage.graphs.value
    if not refusal and run.kv_bytes is not None and stage.left.value > room:
        refusal = (
            f"the KV cache is set to {stage.left.value:.2f} GiB and {max(0.0, room):.2f} of {device.total_gib:.2f} GiB "
            f"on {device.name} are left beside the weights ({stage.weights.value:.2f}) and what else the engine takes; "
            "set less, or use more GPUs"
        )
    fits = not refusal and _fits(stage.pool, stage.left.value - spare, needed)
    surely = not refusal and _fits(stage.pool, stage.left.low - spare, needed)
    if not fits and not refusal:
        refusal = _refusal(run, device, chosen, stage, budget, needed, spare)
    return Verdict(fits, surely, refusal)


def request_gib(model: ModelFacts, run: Run, constants: ConstantSet, tokens: int) -> float:
    """Return what one request of that many tokens takes of a GPU's KV cache, in whole blocks."""
    chosen = settings(model, Device("", 0.0, 9.0), run, constants.values)
    held = kv.stages(model, run.pp)
    return max(vllm_pages.pool(model, run, chosen, constants.values, one).request_bytes(tokens) for one in held) / GIB


def _stages(
    model: ModelFacts, device: Device, run: Run, chosen: Settings, constants: ConstantSet, budget: float
) -> list[Stage]:
    loaded = vllm_weights.by_stage(model, device, run, chosen, constants)
    non_torch = _non_torch(device, run, chosen, model, constants)
    graphs = _graphs(model, device, run, chosen, constants)
    kind = "dense" if model.family == "dense" else "others"
    found = []
    for index, held in enumerate(kv.stages(model, run.pp)):
        size = loaded[index] / GIB
        taken = Range(size, size * (1 - _WEIGHTS_BAND), size * (1 + _WEIGHTS_BAND))
        last = index == len(loaded) - 1
        activation = vllm_activation.peak(model, device, run, chosen, constants, last).scaled(1 / GIB)
        pool = vllm_pages.pool(model, run, chosen, constants.values, held)
        parts = [taken, activation, non_torch, constants.range("unexplained_gib", kind)]
        parts += [graphs] if _counted(device, constants) else []
        found.append(Stage(taken, activation, non_torch, graphs, pool, _left(kind, run, budget, parts)))
    return found


def _left(kind: str, run: Run, budget: float, parts: list[Range]) -> Range:
    """Return what is left of a budget: the parts are not all wrong at once, so their deviations add up as squares."""
    if run.kv_bytes is not None:
        return Range.exact(run.kv_bytes / GIB)
    value = budget - sum(part.value for part in parts)
    less = math.sqrt(sum((part.high - part.value) ** 2 for part in parts))
    more = math.sqrt(sum((part.value - part.low) ** 2 for part in parts))
    widest = abs(value) * _BAND[kind]
    return Range(value, value - min(less, widest), value + min(more, widest))


def _before(device: Device, run: Run, constants: ConstantSet) -> Range:
    """Return what is used before vLLM looks at what is free."""
    if device.free_gib is not None:
        return Range.exact(device.total_gib - device.free_gib)
    several = Range.exact(0.0) if constants.values["nccl_counted"] else _nccl(device, run, constants)
    context = Range.exact(0.0) if constants.values["context_counted"] else constants.range("context_gib")
    return context + several


def _nccl(device: Device, run: Run, constants: ConstantSet) -> Range:
    several = run.tp * run.pp > 1 and device.nvlink
    return constants.range("several_gpus_gib") if several else Range.exact(0.0)


def _non_torch(device: Device, run: Run, chosen: Settings, model: ModelFacts, constants: ConstantSet) -> Range:
    """Return what grows outside PyTorch, or stays in it, between that look and the end of the profiling run."""
    if run.tp > 1:
        found = constants.range("non_torch_gib", _parallel(device, run, constants))
    else:
        found = constants.range("non_torch_gib", "pipeline" if run.pp > 1 else "one")
    if constants.values["context_counted"]:
        found += constants.range("context_gib")
    if constants.values["nccl_counted"]:
        found += _nccl(device, run, constants)
    return found + _kept(model, run, chosen) if constants.values["all_counted"] else found


def _kept(model: ModelFacts, run: Run, chosen: Settings) -> Range:
    return Range.exact(vllm_activation.kept_by_second_runner(model, run, chosen) / GIB)


def _counted(device: Device, constants: ConstantSet) -> bool:
    """Return whether graphs are taken off the budget; on AMD's cards they are estimated in newer releases only."""
    return bool(constants.values["graphs_counted" if device.vendor == "nvidia" else "graphs_counted_on_amd"])


def _parallel(device: Device, run: Run, constants: ConstantSet) -> str:
    """Return how tensor parallelism communicates; fused with what follows on Hopper and Blackwell (config/vllm.py)."""
    if not device.nvlink:
        return "several_pcie"
    fused = constants.values["fused_all_reduce"] and 9 <= device.compute < 12 and not run.enforce_eager
    return "several_fused" if fused else "several"


def _graphs(model: ModelFacts, device: Device, run: Run, chosen: Settings, constants: ConstantSet) -> Range:
    """Return what CUDA graphs take: vLLM's estimate where it counts that, else what they are measured to take."""
    if not chosen.graph_sizes:
        return Range.exact(0.0)
    layers, part = model.layers / max(1, run.pp), chosen.graph_sizes / _GRAPHS_MEASURED
    sparse = model.experts is not None or any(group.kind == "latent" for group in model.groups)
    if _counted(device, constants):
        per_layer = constants.range("graph_estimate_gib", "per_sparse_layer" if sparse else "per_layer")
        return per_layer.scaled(layers * part)
    found = constants.range("graph_gib", "base") + constants.range("graph_gib", "per_layer").scaled(layers)
    return (found + constants.range("graph_gib", "sparse") if sparse else found).scaled(part)


def _fits(pool: Pool, left: float, needed: float) -> bool:
    return left > 0 and needed <= left if pool.groups else left >= 0


def _start_refusal(device: Device, chosen: Settings, budget: float, before: Range) -> str:
    """Return why vLLM does not start: its fraction is more than what is free (worker/utils.py, request_memory)."""
    free = device.total_gib - before.value
    if budget <= free:
        return ""
    most = math.floor(free / device.total_gib * 100) / 100
    return (
        f"gpu_memory_utilization {chosen.fraction:g} asks for {budget:.2f} of {device.total_gib:.2f} GiB on "
        f"{device.name}, and {free:.2f} GiB are free when vLLM starts; set it to {most:g} or less"
    )


def _refusal(
    run: Run, device: Device, chosen: Settings, stage: Stage, budget: float, needed: float, spare: float
) -> str:
    """Return the sentence for what does not fit, with the arithmetic and what would."""
    taken = (
        f"of {budget:.2f} GiB ({chosen.fraction:g} of {device.total_gib:.2f} on {device.name}) weights take "
        f"{stage.weights.value:.2f}, activations {stage.activation.value:.2f} and the rest of the process "
        f"{budget - stage.left.value - stage.weights.value - stage.activation.value:.2f}"
    )
    if stage.left.value <= 0:
        return (
            f"{taken}: {-stage.left.value:.2f} GiB are missing before the first token of KV cache; use more GPUs "
            f"(now {run.tp * run.pp}), a smaller format of the weights or a larger card"
        )
    longest = stage.pool.longest((stage.left.value - spare) * GIB, chosen.max_model_len)
    shorter = f"set max_model_len to {longest:,} or less" if longest else "use more GPUs"
    if run.kv_bytes is not None:
        taken = f"the KV cache is set to {stage.left.value:.2f} GiB"
    return (
        f"{taken}; one request of {chosen.max_model_len:,} tokens needs {needed:.2f} GiB of KV cache and "
        f"{max(0.0, stage.left.value - spare):.2f} are left; {shorter}"
    )


def _filled(run: Run, chosen: Settings, pool: Pool) -> Run:
    return replace(
        run,
        memory_fraction=chosen.fraction,
        max_model_len=chosen.max_model_len,
        max_num_seqs=chosen.max_num_seqs,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        block_size=pool.block_tokens if pool.groups else chosen.block_tokens,
        prefix_caching=chosen.prefixes_kept,
    )


def _notes(
    model: ModelFacts, device: Device, run: Run, chosen: Settings, constants: ConstantSet, stage: Stage, stages: int
) -> tuple[str, ...]:
    notes = []
    if chosen.old_engine:
        notes.append("this release takes its older engine (V0) for this card, model or task")
    if stage.graphs.value and not _counted(device, constants):
        notes.append(
            f"CUDA graphs take about {stage.graphs.value:.2f} GiB on top of gpu_memory_utilization in this release"
        )
    heads = [group.kv_heads for group in model.groups if group.kv_heads]
    if heads and run.tp > min(heads):
        notes.append(f"{min(heads)} KV heads on {run.tp} GPUs: each is held more than once")
    if run.tp > run.dcp and any(group.latent for group in model.groups):
        notes.append("every GPU of a tensor-parallel group holds the whole latent KV cache; dcp or dp would divide it")
    counts = {(one.kind, one.window, one.block_tokens) for one in stage.pool.groups}
    if len(counts) > 1:
        notes.append(
            f"the KV cache has {len(stage.pool.groups)} groups of {stage.pool.groups[0].count} layers, "
            f"blocks of {stage.pool.block_tokens} tokens; its tokens are counted as the engine prints them, "
            "and are not its bytes by those of a token"
        )
    if stages > 1:
        notes.append(f"the fullest of {stages} pipeline stages decides how many blocks all of them have")
    if _counted(device, constants) and run.dp > 1 and run.ep > 1:
        notes.append(
            "for experts spread over data-parallel GPUs vLLM's own estimate of CUDA graphs has been 33 and 62 GiB, "
            "which it takes off the KV cache; VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 gives that back"
        )
    if device.unified:
        notes.append(f"this card shares its memory with the host: {_UNIFIED_PLACES} count as used until they are freed")
    return tuple(notes)

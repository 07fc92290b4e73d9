"""How SGLang divides a GPU: weights and KV cache may take a fraction of what was free before the weights were loaded.

    KV cache = free after the load - free before it x (1 - mem_fraction_static)

from srt/model_executor/model_runner*.py::profile_max_num_token (to 0.5.13) and srt/mem_cache/kv_cache_configurator.py::
_profile_available_bytes (from 0.5.14); both amounts free are the least over all GPUs. What the fraction leaves is room
for activations and CUDA graphs, which SGLang does not measure. So a fraction that is too small for the weights has to
be raised, and one is lowered only where a server runs out of memory after its start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gpuready.planning.memory import kv, weights
from gpuready.planning.memory.run import GIB, Device, Estimate, Range, Run
from gpuready.planning.memory.sglang_settings import Settings, settings
from gpuready.planning.memory.versions import ConstantSet
from gpuready.planning.model.facts import ModelFacts

_LEAST_REQUESTS, _MOST_REQUESTS, _REQUESTS_PER_CONTEXT = 2048, 4096, 512
_ROTARY_BYTES, _SIXTEEN_BITS = 4, 2
_STATE_BYTES = 4
"""States of recurrent layers are float32 unless SGLANG_MAMBA_SSM_DTYPE says otherwise (configs/mamba_utils.py)."""
_HIDDEN_COPIES = 8
"""Arrays as wide as the model that live at once in one layer: residual, norm, queries, keys, values, attention."""


@dataclass(frozen=True)
class Pools:
    """The KV cache of one GPU: tokens in full layers, tokens in sliding ones where these have a pool of their own."""

    tokens: int
    sliding_tokens: int
    recurrent_slots: int
    bytes: int


@dataclass(frozen=True)
class Cell:
    """Bytes of one token on one GPU, over its layers of each kind, and of one state of recurrent layers."""

    full: float
    sliding: float
    """Of the layers whose tokens lie in the second pool; 0 where there is one pool."""
    state: float

    def per_token(self, ratio: float) -> float:
        """Return the bytes for one more token of both pools."""
        return self.full + ratio * self.sliding


def cell(model: ModelFacts, run: Run, constants: ConstantSet) -> Cell:
    """Return what a token takes on the GPU that holds the most layers.

    KV heads fewer than GPUs are held by several (get_num_kv_heads), a latent layer's cache by all of them. Sliding
    layers share the pool of the full ones, and those of encoders, which vLLM keeps nothing of, have it too
    (layers/radix_attention.py), unless the version has two pools for the architecture
    (pool_configurator.py::HybridSWAPoolConfigurator).
    """
    heads_split = max(1, run.tp // run.dp) if run.attention_dp else run.tp
    two = model.architecture in constants.values["two_pools"]
    element = kv.element_bytes(run.kv_dtype, model, run.dtype)
    encoder = all(group.kind == "none" for group in model.groups)
    full = sliding = state = 0.0
    for group, layers in max(kv.stages(model, run.pp), key=lambda stage: sum(layers for _, layers in stage)):
        if group.kind == "recurrent":
            state += layers * kv.state_bytes(replace(group, state_bytes_per_element=_STATE_BYTES), model, heads_split)
        elif two and group.kind in ("sliding", "chunked"):
            sliding += layers * kv.token_bytes(group, heads_split, element)
        else:
            kept = replace(group, kind="full") if encoder else group
            full += layers * kv.token_bytes(kept, heads_split, element)
    if run.draft and constants.values["draft_kv_counted"]:
        full += run.draft.kv_bytes_per_token or full * model.draft_layers / max(1, model.layers)
    return Cell(full, sliding, state)


def pools(budget_gib: float, model: ModelFacts, run: Run, constants: ConstantSet) -> Pools:
    """Return how a KV budget is divided: states first (handle_max_mamba_cache), then whole pages of tokens."""
    size, ratio = cell(model, run, constants), float(constants.values["sliding_ratio"])
    page, left, slots = run.block_size or 1, max(0.0, budget_gib * GIB), 0
    if run.kv_bytes:
        left = min(left, run.kv_bytes)
    if size.state:
        rule = constants.values["recurrent"]
        if "ratio" in rule and run.prefix_caching is not False:
            slots = int(left * rule["ratio"] / (1 + rule["ratio"]) // size.state)
        else:
            slots = run.max_num_seqs or rule.get("slots", _LEAST_REQUESTS)
        left -= slots * size.state
    per_token = size.per_token(ratio)
    tokens = int(max(0.0, left) // per_token) // page * page if per_token else 0
    sliding = int(tokens * ratio) // page * page if size.sliding else 0
    return Pools(tokens, sliding, slots, int(tokens * size.full + sliding * size.sliding + slots * size.state))


def request_gib(model: ModelFacts, run: Run, constants: ConstantSet, tokens: int) -> float:
    """Return what one request takes of a GPU's KV cache: whole pages, of the sliding pool no more than its windows."""
    size, page = cell(model, run, constants), run.block_size or 1
    window = max((group.window for group in model.groups if group.kind in ("sliding", "chunked")), default=0)
    paged = -(-tokens // page) * page
    sliding = min(paged, -(-window // page) * page + page)
    return (paged * size.full + sliding * size.sliding + size.state) / GIB


def max_running_requests(tokens: int, model: ModelFacts, run: Run) -> int:
    """Return how many requests SGLang runs at once where nothing is said (resolve_max_num_reqs)."""
    by_length = int(tokens / (run.max_model_len or model.context_tokens) * _REQUESTS_PER_CONTEXT)
    return max(1, min(max(min(by_length, _MOST_REQUESTS), _LEAST_REQUESTS), tokens // 2))


def estimate(model: ModelFacts, device: Device, run: Run, constants: ConstantSet) -> Estimate:
    """Return where the memory of the fullest GPU goes, with SGLang's defaults filled in."""
    chosen = settings(model, device, run, constants.values)
    before, outside = _before(device, run, constants)
    loaded = _weights(model, run, constants)
    cache = constants.values["vision_cache_gib"] if model.vision else 0.0
    slack = before.value * (1 - chosen.fraction)
    kv_budget = Range(
        before.value * chosen.fraction - loaded.value - cache,
        before.low * chosen.fraction - loaded.high - cache,
        before.high * chosen.fraction - loaded.low - cache,
    )
    found = [pools(gib, model, run, constants) for gib in (kv_budget.value, kv_budget.low, kv_budget.high)]
    held = found[0]
    activation, graphs = _activation(model, run, chosen, constants), _graphs(run, chosen, constants)
    length = run.max_model_len or min(model.context_tokens, max(1, held.tokens))
    pool = _gib(held, kv_budget.value)
    fits, surely = held.tokens >= length, found[1].tokens >= length
    filled = replace(
        run,
        memory_fraction=round(chosen.fraction, 4),
        chunked_prefill_size=chosen.chunk,
        graph_max_batch=chosen.graph_batch,
        max_num_batched_tokens=chosen.chunk,
        block_size=chosen.page,
        max_num_seqs=run.max_num_seqs or max_running_requests(held.tokens, model, run),
        max_model_len=run.max_model_len or model.context_tokens,
    )
    return Estimate(
        run=filled,
        constants=constants.name,
        total_gib=device.total_gib,
        budget_gib=before.value * chosen.fraction,
        outside=outside + graphs,
        weights=loaded,
        activation=activation,
        non_torch=Range.exact(cache),
        graphs=graphs,
        graphs_counted=False,
        kv=Range(pool, _gib(found[1], kv_budget.low), _gib(found[2], kv_budget.high)),
        kv_tokens=Range(held.tokens, found[1].tokens, found[2].tokens),
        bytes_per_token=cell(model, run, constants).per_token(float(constants.values["sliding_ratio"])),
        block_tokens=chosen.page,
        blocks=held.tokens // chosen.page,
        request_gib=request_gib(model, run, constants, length),
        fits=fits,
        surely_fits=surely,
        refusal="" if fits else _refusal(run, device, chosen, before, loaded, held.tokens, length),
        free_gib=before.value - graphs.value - loaded.value - cache - activation.value - pool,
        notes=_notes(model, run, chosen, constants, held, slack, activation.value + graphs.value),
    )


def _gib(held: Pools, budget: float) -> float:
    """Return what the pools hold; what is missing, below 0, where no token fits."""
    return held.bytes / GIB if held.tokens else min(0.0, budget)


def _before(device: Device, run: Run, constants: ConstantSet) -> tuple[Range, Range]:
    """Return what is free before the weights, and what context and communication have taken by then."""
    several = "several" if device.vendor == "nvidia" else "several_amd"
    if device.free_gib is not None:
        return Range.exact(device.free_gib), Range.exact(device.total_gib - device.free_gib)
    context = constants.range("context_gib", several if run.tp * run.pp > 1 else "one")
    free = Range(*(device.total_gib - taken for taken in (context.value, context.high, context.low)))
    return free, context


def _weights(model: ModelFacts, run: Run, constants: ConstantSet) -> Range:
    """Return what the load takes, as SGLang logs it: the weights, its float32 rotary tables, and what the load leaves.

    A draft model is loaded before the KV cache is sized since 0.5.14, and after it in older versions.
    """
    counted = run if constants.values["draft_counted"] else replace(run, draft=None)
    exact = (weights.per_rank(model, counted) + model.rotary_elements * _ROTARY_BYTES) / GIB
    plain = model.family == "dense" and model.quantization is None and run.quantization is None
    packed = Range.exact(0.0) if plain else constants.range("repacked_part").scaled(exact)
    return Range.exact(exact) + packed + constants.range("load_gib")


def _activation(model: ModelFacts, run: Run, chosen: Settings, constants: ConstantSet) -> Range:
    """Return the peak of one prefill chunk's forward pass: SGLang does not measure it, and no log says it."""
    width = _HIDDEN_COPIES * model.hidden + 3 * model.intermediate / run.tp
    usual = max(chosen.chunk, 1) * width * _SIXTEEN_BITS / GIB
    return constants.range("activation_factor").scaled(usual)


def _graphs(run: Run, chosen: Settings, constants: ConstantSet) -> Range:
    if run.enforce_eager:
        return Range.exact(0.0)
    prefill = constants.range("graph_gib", "prefill").scaled(chosen.prefill_graphs)
    return constants.range("graph_gib", "decode") + prefill


def _refusal(run: Run, device: Device, chosen: Settings, before: Range, loaded: Range, tokens: int, length: int) -> str:
    """Return the sentence for what does not fit, with the fraction from which on it does."""
    least = loaded.value / before.value
    if least >= 1:
        return (
            f"the weights take {loaded.value:.2f} GiB of every GPU and {before.value:.2f} are free on {device.name}; "
            f"use more GPUs than {run.tp * run.pp}, a larger card or a smaller format"
        )
    if not tokens:
        raised = math.ceil(least * 1000) / 1000
        return (
            f"the weights take {loaded.value:.2f} of the {before.value:.2f} GiB that are free before the load, and "
            f"mem_fraction_static {chosen.fraction:.3f} allows {before.value * chosen.fraction:.2f} for them and the "
            f"KV cache; raise it above {raised:.3f}, with as little left for activations, or use more GPUs"
        )
    return f"one request of {length:,} tokens needs more than the {tokens:,} tokens of the KV cache"


def _notes(
    model: ModelFacts, run: Run, chosen: Settings, constants: ConstantSet, held: Pools, slack: float, needed: float
) -> tuple[str, ...]:
    notes = []
    if run.memory_fraction is None:
        notes.append(
            f"mem_fraction_static {chosen.fraction:.3f} is the default of {constants.name} for this card: "
            "weights and KV cache may take that part; raise it to fit more, "
            "lower it only where a running server ends out of memory"
        )
    if held.sliding_tokens:
        notes.append(
            f"full layers hold {held.tokens:,} tokens, sliding ones {held.sliding_tokens:,} in a pool of their own"
        )
    if held.recurrent_slots:
        notes.append(f"{held.recurrent_slots:,} states of recurrent layers are set aside before the tokens")
    if slack < needed:
        notes.append(
            f"{slack:.2f} GiB are left for activations and CUDA graphs, which are expected to need {needed:.2f}: "
            "a smaller chunked_prefill_size or mem_fraction_static is safer"
        )
    if any(group.compression > 1 for group in model.groups):
        notes.append(
            "this model's compressed cache is counted vector by vector; SGLang's own pools for its windows and states "
            "are not, so it will hold other numbers of tokens"
        )
    return tuple(notes)

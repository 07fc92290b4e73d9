"""What SGLang sets by itself, by its version, the card and the parallelism: fraction, prefill chunk, graph sizes.

The rules are those of srt/server_args.py (to 0.5.18) and srt/arg_groups/memory_hook.py (from 0.5.19); their numbers
stand in the catalog. Sizes are MiB as nvidia-smi reports them, as SGLang asks there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuready.planning.memory.run import Device, Run
from gpuready.planning.model.facts import ModelFacts

_LEAST_CHUNK = 2048
_USUAL_TOWER = 24 * 1024**2
"""Layers times width squared of the vision tower that SGLang measures others by (ViT-L/14)."""


@dataclass(frozen=True)
class Settings:
    """What one server runs with, where nothing else is said."""

    fraction: float
    """mem_fraction_static: the part of what is free before the weights that weights and KV cache may take."""
    chunk: int
    """chunked_prefill_size, in tokens."""
    graph_batch: int
    """The largest decode batch for which a CUDA graph is captured."""
    prefill_graphs: int
    """CUDA graphs of prefill chunks."""
    page: int
    """Tokens of one page of the KV cache."""


def settings(model: ModelFacts, device: Device, run: Run, rules: Mapping[str, Any]) -> Settings:
    """Return what a server runs with; what `run` says wins over the default."""
    board = board_mib(device, rules)
    tier = next(tier for tier in rules["tiers"] if board < tier.get("below_mib", float("inf")))
    chunk = run.chunked_prefill_size or run.max_num_batched_tokens or tier["chunk"]
    graphs = tier["graph_batch_from_tp4"] if run.tp >= 4 else tier["graph_batch"]
    graph_batch = 0 if run.enforce_eager else run.graph_max_batch or graphs
    prefill_graphs = len(_prefill_sizes(chunk)) if _captures_prefill(model, run, rules) else 0
    fraction = run.memory_fraction
    if fraction is None:
        reserved = _reserved_mib(model, run, rules, board, chunk, graph_batch, prefill_graphs)
        fraction = _fraction(rules["fraction"], board, run, reserved)
    if model.vision and (run.memory_fraction is None or rules["vision"].get("even_if_given")):
        fraction *= _vision_factor(model, rules["vision"])
    if run.attention_dp:
        # Divided after the fraction was chosen (handle_data_parallelism).
        chunk = max(1, chunk // run.dp)
    return Settings(fraction, chunk, graph_batch, prefill_graphs, run.block_size or 1)


def board_mib(device: Device, rules: Mapping[str, Any]) -> float:
    """Return what nvidia-smi calls the total, in MiB; where it has no such figure, the program's own."""
    if device.board_mib is not None:
        return device.board_mib
    total = device.total_gib * 1024
    alone = ":" in device.name or device.unified or device.vendor != "nvidia"
    return total if alone else total + float(rules["board_over_cuda_mib"]["value"])


def _fraction(rule: Mapping[str, Any], board: float, run: Run, reserved: float) -> float:
    if rule["form"] == "reserved":
        return round((board - reserved) / board, 3)
    parallel = run.tp * run.pp
    fraction = float(next(value for least, value in rule["by_parallel"] if parallel >= least))
    for case in rule.get("large", ()):
        if board <= case["above_mib"]:
            continue
        if "fraction" in case:
            fraction = case["fraction"]
        elif "pool_mib" in case:
            widened = fraction + case["pool_mib"] * (1 - fraction) / board
            reserve = case["reserve_mib"] + (case.get("draft_mib", 0) if run.draft else 0)
            fraction = min(widened, (board - reserve) / board)
        else:
            fraction = (board - case["reserve_mib"]) / board
    drafted = rule.get("draft")
    return fraction * drafted["factor"] if drafted and run.draft and board <= drafted["up_to_mib"] else fraction


def _reserved_mib(
    model: ModelFacts,
    run: Run,
    rules: Mapping[str, Any],
    board: float,
    chunk: int,
    graph_batch: int,
    prefill_graphs: int,
) -> float:
    rule = rules["fraction"]
    if rule["form"] != "reserved":
        return 0.0
    drafted = rule.get("draft_mib", 0) if run.draft else 0
    shared = run.dp if run.attention_dp else 0
    if "by_board" in rule:
        size = next(size for size in rule["by_board"] if board < size.get("below_mib", float("inf")))
        parallel = float(size["mib"] + size["per_gpu_mib"] * run.tp * run.pp)
        return parallel + drafted + (rule["attention_dp_mib"] if shared else 0)
    reserved = rule["base_mib"] + max(chunk, _LEAST_CHUNK) * rule["per_token_mib"]
    reserved += rule["per_gpu_mib"] * run.tp * run.pp + rule["per_graph_batch_mib"] * graph_batch
    reserved += (
        shared * graph_batch * (rule["attention_dp_mib"] + (rule["attention_dp_large_mib"] if graph_batch > 300 else 0))
    )
    if prefill_graphs:
        latent = any(group.kind == "latent" for group in model.groups)
        reserved += rule["latent_prefill_graphs_mib"] if latent else rule["per_prefill_graph_mib"] * prefill_graphs
    if board > rule["large_above_mib"]:
        reserved = max(reserved, rule["large_least_mib"])
    return float(reserved + drafted)


def _captures_prefill(model: ModelFacts, run: Run, rules: Mapping[str, Any]) -> bool:
    if not rules["prefill_graphs"] or run.enforce_eager or model.vision or run.lora or run.dcp > 1:
        return False
    return not (rules["prefill_graphs"] == "piecewise" and (run.pp > 1 or run.attention_dp))


def _prefill_sizes(largest: int) -> list[int]:
    """Return the chunk sizes, in tokens, for which a graph is captured."""
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, largest + 1, 512))
    return [size for first, last, step in steps for size in range(first, last, step) if size <= largest]


def _vision_factor(model: ModelFacts, rule: Mapping[str, Any]) -> float:
    """Return by what a multimodal model's fraction is smaller: its image tower needs room of its own."""
    if "by_tower" not in rule:
        return float(rule["factor"])
    tower = (model.vision_layers or 24) * (model.vision_hidden or 1024) ** 2
    bend = 1 - rule["by_tower"] * (tower / _USUAL_TOWER - 1)
    return float(rule["factor"] * max(rule["least"], min(rule["most"], bend)))

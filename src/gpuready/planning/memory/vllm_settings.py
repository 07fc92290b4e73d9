"""The settings with which vLLM starts where nothing is said: by release, card, model and task.

vllm/engine/arg_utils.py (get_batch_defaults and what follows it) and vllm/config/ of each release, for the server; the
Python class `LLM` takes larger batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuready.planning.memory.kv import ELEMENT_BYTES
from gpuready.planning.memory.run import Device, Run
from gpuready.planning.model.facts import ModelFacts

POOLING = ("embed", "rerank", "classify")
_LARGE_CARD_GIB = 70
_OLD_ENGINE_LONG, _OLD_ENGINE_TOKENS, _OLD_ENGINE_POOLING, _OLD_ENGINE_IMAGES = 32768, 2048, 32768, 5120
_BLOCK_TOKENS, _LATENT_BLOCK_TOKENS = 16, 64
_LARGEST_GRAPH = 512
_FINE_GRAPHS = 256


@dataclass(frozen=True)
class Settings:
    """What vLLM runs with."""

    fraction: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_tokens: int
    element_bytes: float
    """Of what is not quantized."""
    old_engine: bool
    """The engine before V1, which older releases fall back to."""
    second_runner: bool
    """The model runner that newer releases have beside the first, with another sampler."""
    prefixes_kept: bool
    graph_sizes: int
    """Batch sizes for which CUDA graphs are captured; 0: none."""

    @property
    def sampled(self) -> int:
        """Requests of the profiling run: it has no more of them than tokens (gpu_model_runner.py, _dummy_run)."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


def settings(model: ModelFacts, device: Device, run: Run, rules: Mapping[str, Any]) -> Settings:
    """Return the settings of one run, with the engine's defaults for what it leaves open."""
    length = run.max_model_len or max(1, model.context_tokens)
    old = _old_engine(model, device, run, rules["old_engine"])
    tokens, requests = _old_batches(model, run, length) if old else _batches(device, rules)
    if run.max_num_batched_tokens is None and rules["batched_tokens_within_requests"]:
        tokens = min(tokens, (run.max_num_seqs or requests) * length)
    tokens = run.max_num_batched_tokens or tokens
    requests = run.max_num_seqs or min(requests, tokens)
    kept = run.prefix_caching
    if kept is None:
        kept = not any(group.kind == "recurrent" for group in model.groups) or rules["recurrent_prefixes"]
    return Settings(
        fraction=run.memory_fraction if run.memory_fraction is not None else rules["memory_fraction"],
        max_model_len=length,
        max_num_seqs=requests,
        max_num_batched_tokens=tokens,
        block_tokens=run.block_size or _block(model, device),
        element_bytes=ELEMENT_BYTES.get(run.dtype or model.dtype, 2),
        old_engine=old,
        second_runner=_second_runner(model, run, rules["second_runner"]),
        prefixes_kept=kept,
        graph_sizes=0 if run.enforce_eager else _graph_sizes(run, requests, tokens, rules),
    )


def _old_engine(model: ModelFacts, device: Device, run: Run, rule: str) -> bool:
    """Return whether a release falls back to the engine before V1 (arg_utils.py, _is_v1_supported_oracle)."""
    recurrent = any(group.kind == "recurrent" for group in model.groups)
    return (rule != "never" and device.compute < 8) or (rule == "often" and (recurrent or run.task in POOLING))


def _batches(device: Device, rules: Mapping[str, Any]) -> tuple[int, int]:
    """Return batched tokens and requests by card."""
    if device.total_gib >= rules["largest_batches_from_gib"]:
        return 16384, 1024
    small = (rules["small_batches_for_a100"] and device.name.startswith("a100")) or (
        rules["small_batches_for_gb10"] and device.unified
    )
    named = rules["large_batches_for"]
    large = device.total_gib >= _LARGE_CARD_GIB if named == "all" else device.name.startswith(tuple(named))
    if large and not small:
        return 8192, 1024
    return 2048, 256 if rules["fewer_requests_on_small_cards"] else 1024


def _old_batches(model: ModelFacts, run: Run, length: int) -> tuple[int, int]:
    """Return batched tokens and requests of the engine before V1, which splits only long prompts into chunks."""
    chunked = length > _OLD_ENGINE_LONG and not model.vision and run.task not in POOLING and run.lora is None
    chunked = chunked and not any(group.kind in ("sliding", "latent") for group in model.groups)
    tokens = _OLD_ENGINE_TOKENS if chunked else max(length, _OLD_ENGINE_TOKENS)
    if run.task in POOLING:
        tokens = max(tokens, _OLD_ENGINE_POOLING)
    return (max(tokens, _OLD_ENGINE_IMAGES) if model.vision else tokens), 256


def _block(model: ModelFacts, device: Device) -> int:
    """Return the tokens of a block: latent attention's kernels on Blackwell, and those for sparse layers, take 64."""
    latent = [group for group in model.groups if group.kind == "latent"]
    if any(group.indexer for group in latent) or (latent and device.compute >= 10):
        return _LATENT_BLOCK_TOKENS
    return _BLOCK_TOKENS


def _second_runner(model: ModelFacts, run: Run, rule: Any) -> bool:
    """Return whether a release takes its second model runner for a model (config/vllm.py, use_v2_model_runner)."""
    if run.task in POOLING:
        return False
    if rule == "all":
        return True
    if model.architecture in rule["architectures"]:
        return rule["quantized"] or (model.quantization is None and run.quantization is None)
    recurrent = any(group.kind == "recurrent" for group in model.groups)
    return bool(rule["dense"]) and model.experts is None and not recurrent


def _graph_sizes(run: Run, requests: int, tokens: int, rules: Mapping[str, Any]) -> int:
    """Return how many batch sizes are captured: 1, 2, 4, then every 8th and above 256 every 16th (every 8th before)."""
    largest = run.graph_max_batch or min(2 * requests, _LARGEST_GRAPH, tokens)
    step = rules["graph_step"]
    fine = sum(1 for size in (1, 2, 4) if size <= largest) + len(range(8, min(largest + 1, _FINE_GRAPHS), 8))
    return fine + len(range(_FINE_GRAPHS, largest + 1, step))

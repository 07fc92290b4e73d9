"""Plans one deployment: engine settings, where the memory goes, and why, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gpuready.outcome import Failure
from gpuready.planning.memory import UTILIZATION, Budget, budget, kv_bytes_per_token_per_gpu
from gpuready.planning.model import ModelFacts

BATCHED_TOKENS = 8192
# Flags that gpuready itself must own: the gateway and the drain rely on them.
OWN_FLAGS = {
    "model",
    "served-model-name",
    "host",
    "port",
    "tensor-parallel-size",
    "shutdown-timeout",
    "config",
}


def _context(where: str, declared: Mapping[str, Any], model: ModelFacts) -> tuple[int, list[Failure]]:
    """Return the context length that the longest request in a hundred needs, rounded up to 256 tokens."""
    workload = declared["workload"]
    wanted = workload["prompt_tokens"]["p99"] + workload["output_tokens"]["p99"]
    if wanted > model.context_tokens:
        what = f"{where}: prompt and output p99 are {wanted} tokens together"
        why = f"{declared['model']} has a context of {model.context_tokens}"
        return model.context_tokens, [
            Failure("plan.context", what, why, "lower p99 or choose a model with more context")
        ]
    return min(model.context_tokens, -(-wanted // 256) * 256), []


def _too_small(where: str, card: Mapping[str, Any], found: Budget, gpus: int, context: int) -> list[Failure]:
    arithmetic = (
        f"{card['title']}: {found.requested_gib} GiB usable ({UTILIZATION:.0%} of {found.total_gib}) - weights "
        f"{found.weights_gib} - activations {found.activation_gib} - non-torch {found.non_torch_gib} = {found.kv_gib} "
        f"GiB per GPU for the KV cache"
    )
    if found.kv_gib <= 0:
        why = arithmetic
    elif found.kv_tokens < context:
        why = f"{arithmetic}, {found.kv_tokens} tokens, and one request may take {context}"
    else:
        return []
    fix = f"give it more than {gpus} GPU{'s' if gpus > 1 else ''}, a smaller or quantized model, or shorter requests"
    return [Failure("plan.memory", f"{where} does not fit", why, fix)]


def _heads_failure(where: str, model: ModelFacts, gpus: int) -> list[Failure]:
    if model.heads % gpus == 0:
        return []
    allowed = [count for count in range(1, 17) if model.heads % count == 0]
    what = f"{where}, gpus = {gpus}: the model's {model.heads} attention heads cannot be split over {gpus} GPUs"
    return [Failure("plan.heads", what, "", f"allowed are {', '.join(map(str, allowed))}")]


def _flag_failures(where: str, declared: Mapping[str, Any], found: Budget) -> list[Failure]:
    failures = []
    flags = declared["flags"]
    for flag in sorted(set(flags) & OWN_FLAGS):
        what = f"{where}, flags.{flag} is set by gpuready itself"
        failures.append(Failure("plan.flag", what, "", "remove it"))
    length = flags.get("max-model-len")
    if isinstance(length, int) and length > found.kv_tokens:
        what = f"{where}, flags.max-model-len = {length} does not fit"
        why = f"the KV cache holds {found.kv_tokens} tokens ({found.kv_gib} GiB per GPU)"
        failures.append(Failure("plan.flag_memory", what, why, f"set at most {found.kv_tokens}"))
    return failures


def _explain(
    declared: Mapping[str, Any],
    model: ModelFacts,
    card: Mapping[str, Any],
    gpus: int,
    found: Budget,
    settings: Mapping[str, Any],
) -> list[str]:
    workload = declared["workload"]
    median = workload["prompt_tokens"]["p50"] + workload["output_tokens"]["p50"]
    return [
        f"{declared['model']} on {gpus} x {card['title']}, engine {declared['engine']}",
        f"weights {found.weights_gib} GiB per GPU (from {model.weights_from})",
        f"KV cache {found.kv_gib} GiB per GPU = {found.kv_tokens} tokens at "
        f"{kv_bytes_per_token_per_gpu(model, gpus):.0f} bytes per token and GPU",
        f"context {settings['max_model_len']} tokens: prompt and output p99, rounded up to 256",
        f"{settings['max_num_seqs']} requests at once: {workload['concurrency']} wanted, "
        f"{found.kv_tokens // median} fit at the median of {median} tokens",
    ]


def plan_deployment(
    host: str,
    declared: Mapping[str, Any],
    model: ModelFacts,
    card: Mapping[str, Any],
    stack: Mapping[str, Any],
    placement: Mapping[str, Any],
) -> tuple[dict[str, Any], list[Failure]]:
    """Return the plan of one deployment and what is refused about it."""
    where = f"host {host}, deployment {declared['name']}"
    gpus = len(placement["gpus"])
    context, failures = _context(where, declared, model)
    failures += _heads_failure(where, model, gpus)
    workload = declared["workload"]
    median = workload["prompt_tokens"]["p50"] + workload["output_tokens"]["p50"]
    found = budget(model, card["usable_gib"], gpus, workload["concurrency"], BATCHED_TOKENS)
    failures += _too_small(where, card, found, gpus, context)
    failures += _flag_failures(where, declared, found)
    settings: dict[str, Any] = {
        "tensor_parallel_size": gpus,
        "max_model_len": context,
        "max_num_seqs": max(1, min(workload["concurrency"], found.kv_tokens // median)),
        "max_num_batched_tokens": BATCHED_TOKENS,
        "gpu_memory_utilization": UTILIZATION,
    }
    explain = _explain(declared, model, card, gpus, found, settings)
    if stack["engine_memory"]:
        explain.append(_shrink_to_stand_in(settings, stack["engine_memory"], model))
    return {
        "name": declared["name"],
        "model": declared["model"],
        "engine": declared["engine"],
        "settings": settings,
        "flags": dict(declared["flags"]),
        "extra": dict(stack["engines"][declared["engine"]].get("settings", {})),
        "environment": dict(stack["engines"][declared["engine"]].get("environment", {})),
        "memory": asdict(found),
        "explain": explain,
        "replicas": [{"index": 0, "gpus": list(placement["gpus"]), "port": placement["port"]}],
    }, failures


def _shrink_to_stand_in(settings: dict[str, Any], memory: Mapping[str, Any], model: ModelFacts) -> str:
    """Give the CPU engine its own small memory: the plan stays the card's, the engine is a stand-in."""
    tokens = memory["kv_cache_mib"] * 1024**2 // model.kv_bytes_per_token
    settings["tensor_parallel_size"] = 1
    settings["kv_cache_memory_bytes"] = memory["kv_cache_mib"] * 1024**2
    settings["max_num_seqs"] = min(settings["max_num_seqs"], memory["max_num_seqs"])
    settings["max_num_batched_tokens"] = memory["max_num_batched_tokens"]
    del settings["gpu_memory_utilization"]
    return (
        f"simulation: the engine runs on the CPU with {memory['kv_cache_mib']} MiB of KV cache of its own "
        f"({tokens} tokens), {settings['max_num_seqs']} requests at once"
    )

"""Plans one deployment: engine settings, where the memory goes, and why, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gpuready.outcome import Failure
from gpuready.planning.features import feature_flags
from gpuready.planning.flags import as_yaml, split
from gpuready.planning.memory.budget import UTILIZATION, Budget, budget, kv_bytes_per_token_per_gpu
from gpuready.planning.model.facts import ModelFacts

BATCHED_TOKENS = 8192


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
    share = f"{found.requested_gib / found.total_gib:.0%}"
    arithmetic = (
        f"{card['title']}: {found.requested_gib} GiB usable ({share} of {found.total_gib}) - weights "
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


def _flag_memory(where: str, chosen: Mapping[str, Any], found: Budget) -> list[Failure]:
    length = chosen.get("max_model_len", 0)
    if 0 < found.kv_tokens < length:
        what = f"{where}, flags.max-model-len = {length} does not fit"
        why = f"the KV cache holds {found.kv_tokens} tokens ({found.kv_gib} GiB per GPU)"
        return [Failure("plan.flag_memory", what, why, f"set at most {found.kv_tokens}")]
    return []


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


def start_seconds(model: ModelFacts) -> int:
    """Return how long the first token may take: ten minutes to compile and warm up, and the weights at 100 MB/s.

    100 MB/s is a slow disk or network share; a faster one is ready sooner, and the limit is only for what hangs.
    """
    return 600 + model.weight_bytes // 100_000_000


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
    workload = declared["workload"]
    chosen, flags, failures = split(where, declared["flags"])
    context, refused = _context(where, declared, model)
    context = chosen.get("max_model_len", context)
    failures += refused + _heads_failure(where, model, gpus)
    found = budget(
        model,
        card["usable_gib"],
        gpus,
        chosen.get("max_num_seqs", workload["concurrency"]),
        chosen.get("max_num_batched_tokens", BATCHED_TOKENS),
        chosen.get("gpu_memory_utilization", UTILIZATION),
    )
    failures += _flag_memory(where, chosen, found) or _too_small(where, card, found, gpus, context)
    median = workload["prompt_tokens"]["p50"] + workload["output_tokens"]["p50"]
    settings: dict[str, Any] = {
        "tensor_parallel_size": gpus,
        "max_model_len": context,
        "max_num_seqs": max(1, min(workload["concurrency"], found.kv_tokens // median)),
        "max_num_batched_tokens": BATCHED_TOKENS,
        "gpu_memory_utilization": UTILIZATION,
        **chosen,
    }
    explain = _explain(declared, model, card, gpus, found, settings)
    stand_in: dict[str, float] | None = None
    if stack["engine_memory"]:
        explain.append(_shrink_to_stand_in(settings, stack["engine_memory"], model, chosen))
        stand_in = {
            "kv_bytes": settings["kv_cache_memory_bytes"],
            "bytes_per_token": model.kv_bytes_per_token(),
        }
    engine = stack["engines"][declared["engine"]]
    extra = {name: value for name, value in engine.get("settings", {}).items() if name not in flags}
    features, refused = feature_flags(where, declared, engine["version"], flags)
    failures += refused
    return {
        "name": declared["name"],
        "model": declared["model"],
        "engine": declared["engine"],
        "task": declared.get("task") or model.task,
        "settings": settings,
        "flags": as_yaml({**extra, **features, **flags}),
        "environment": dict(engine.get("environment", {})),
        "cuda_home": stack["host"]["cuda"]["home"],
        "start_seconds": start_seconds(model),
        "memory": asdict(found),
        "stand_in": stand_in,
        "explain": explain,
        "replicas": [{"index": 0, "gpus": list(placement["gpus"]), "port": placement["port"]}],
    }, failures


def _shrink_to_stand_in(
    settings: dict[str, Any], memory: Mapping[str, Any], model: ModelFacts, chosen: Mapping[str, Any]
) -> str:
    """Give the CPU engine its own small memory: the plan stays the card's, the engine is a stand-in."""
    tokens = memory["kv_cache_mib"] * 1024**2 // int(model.kv_bytes_per_token())
    settings["tensor_parallel_size"] = 1
    settings.setdefault("kv_cache_memory_bytes", memory["kv_cache_mib"] * 1024**2)
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if name not in chosen:
            settings[name] = min(settings[name], memory[name])
    del settings["gpu_memory_utilization"]
    return (
        f"simulation: the engine runs on the CPU with {memory['kv_cache_mib']} MiB of KV cache of its own "
        f"({tokens} tokens), {settings['max_num_seqs']} requests at once"
    )

"""What a deployment asks for beside its model, as the engine's own flags: task, draft, LoRA slots, KV in host memory.

Values as in vLLM's engine/arg_utils.py and config/speculative.py, lora.py, cache.py of 0.11.0 to 0.33.0; which release
has which flag is in catalog/engine_support.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpuready.outcome import Failure
from gpuready.planning import sources, support

_TASKS = {"generate": "generate", "embed": "embed", "rerank": "score", "classify": "classify"}
_RUNNERS = {
    "generate": {"runner": "generate"},
    "embed": {"runner": "pooling", "convert": "embed"},
    # Rerankers are converted by what their architecture is: a head of their own, or embeddings that are compared.
    "rerank": {"runner": "pooling"},
    "classify": {"runner": "pooling", "convert": "classify"},
}


def _task(name: str, task: str) -> dict[str, Any]:
    return dict(_RUNNERS[task]) if name == "runner" else {name: _TASKS[task]}


def _draft(name: str, draft: Mapping[str, Any]) -> dict[str, Any]:
    path = sources.draft_path(draft)
    drafts = {"model": path} if path else {"method": "mtp"}
    return {name: {**drafts, "num_speculative_tokens": draft["tokens"]}}


def _lora(name: str, lora: Mapping[str, Any]) -> dict[str, Any]:
    adapters = [f"{one['name']}={one['path']}" for one in sources.adapters({"lora": lora})]
    loaded = {"lora-modules": adapters} if adapters else {}
    return {name: True, "max-loras": lora["slots"], "max-lora-rank": lora["rank"], **loaded}


def _kv_offload(name: str, gib: float) -> dict[str, Any]:
    return {name: gib}


_WRITTEN: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "task": _task,
    "draft": _draft,
    "lora": _lora,
    "kv_offload_gib": _kv_offload,
}


def feature_flags(
    where: str, declared: Mapping[str, Any], version: str, flags: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Failure]]:
    """Return the flags of what a deployment declares beside its model, and what is refused about it.

    `flags` are the operator's own, in the engine's spelling.
    """
    found: dict[str, Any] = {}
    failures = []
    for field, written in _asked(declared):
        engine = declared["engine"]
        name = support.flag(engine, version, field)
        if name is None:
            what = f"{where}, {field}: {engine} {version} has no setting for it"
            failures.append(Failure("plan.feature", what, "", f"remove {field}, or choose another engine or stack"))
            continue
        made = written(name, declared[field])
        twice = sorted({one.removeprefix("no-") for one in flags} & made.keys())
        failures += [
            Failure("plan.flag_twice", f"{where}, flags.{one} and {field} say the same", "", "keep one of them")
            for one in twice
        ]
        found |= made
    return found, failures


def _asked(declared: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[str, Any], dict[str, Any]]]]:
    for field, written in _WRITTEN.items():
        if declared.get(field):
            yield field, written

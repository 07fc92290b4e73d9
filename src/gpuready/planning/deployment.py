"""What a declared deployment asks of the planner, and its part of the plan: settings, memory, replicas, reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from gpuready.outcome import Failure
from gpuready.planning import explain, options, variables
from gpuready.planning.features import feature_flags
from gpuready.planning.flags import settings_of, split
from gpuready.planning.memory.run import GIB, Draft, Lora, Run
from gpuready.planning.model.facts import ModelFacts
from gpuready.planning.wish import Lengths, Option, Wish, Workload

_LONGER = ("hf-overrides", "rope-scaling", "hf-config-path")
"""Flags by which an operator may give a model more context than its config.json says."""
_MEGA = 1 << 20
_NAMES = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "memory_fraction": "gpu_memory_utilization",
    "kv_bytes": "kv_cache_memory_bytes",
}
"""The plan's names of the settings that every deployment has; others stand among its flags."""


def wish_of(
    where: str, declared: Mapping[str, Any], model: ModelFacts, version: str, drafting: ModelFacts | None
) -> tuple[Wish, list[Failure]]:
    """Return what a deployment asks for, and what of it contradicts itself; `drafting` is its draft model's facts."""
    settings, rest, failures, _ = split(where, declared["flags"], declared["engine"], version)
    failures += variables.refused(where, declared.get("environment", {}), declared["engine"], version)
    load = declared["workload"]
    if any(name in rest for name in _LONGER):
        model = replace(model, context_tokens=max(model.context_tokens, int(settings.get("max_model_len", 0))))
    draft, refused = _draft(where, declared, model, drafting)
    lora = declared.get("lora")
    wish = Wish(
        name=declared["name"],
        model_id=declared["model"],
        model=model,
        engine=declared["engine"],
        version=version,
        workload=Workload(
            Lengths(**load["prompt_tokens"]),
            Lengths(**load["output_tokens"]),
            load["concurrency"],
            load.get("preemption_probability", 0.01),
        ),
        task=declared.get("task") or model.task,
        allow_lossy=bool(declared.get("allow_lossy")),
        headroom_gib=declared.get("headroom_gib"),
        settings=settings,
        draft=draft,
        lora=Lora(lora["slots"], lora["rank"]) if lora else None,
        kv_offload_gib=declared.get("kv_offload_gib") or 0.0,
    )
    return wish, failures + refused


def _draft(
    where: str, declared: Mapping[str, Any], model: ModelFacts, drafting: ModelFacts | None
) -> tuple[Draft | None, list[Failure]]:
    asked = declared.get("draft")
    if not asked:
        return None, []
    if asked.get("model") is None:
        if model.draft_layers:
            return Draft(asked["tokens"]), []
        what = f"{where}, draft: the checkpoint of {declared['model']} brings no layers that draft"
        return None, [Failure("plan.draft", what, "", "name draft.model and draft.model_path, or remove draft")]
    if drafting is None:
        return None, []  # said by whoever reads models
    return Draft(asked["tokens"], drafting.weight_bytes, drafting.kv_bytes_per_token()), []


def named(where: str, wish: Wish, failures: Iterable[Failure]) -> list[Failure]:
    """Return failures of the search with the host, the deployment, and the flag that each is about."""
    names = {known.field: name for name, known in settings_of(wish.engine, wish.version).items()}
    found = []
    for one in failures:
        field = one.what.partition(" ")[0]
        what = f"{where}, flags.{names[field]}{one.what[len(field) :]}" if field in names else f"{where}: {one.what}"
        fix = one.fix.replace("set max_model_len to", f"set flags.{names['max_model_len']} to")
        found.append(replace(one, what=what, fix=fix))
    return found


def start_seconds(model: ModelFacts) -> int:
    """Return how long the first token may take: ten minutes to compile and warm up, and the weights at 100 MB/s.

    100 MB/s is a slow disk or network share; a faster one is ready sooner, and the limit is only for what hangs.
    """
    return 600 + model.weight_bytes // 100_000_000


def plan_deployment(
    where: str,
    declared: Mapping[str, Any],
    option: Option,
    stack: Mapping[str, Any],
    replicas: Sequence[Mapping[str, Any]],
    place: Mapping[str, Any],
) -> tuple[dict[str, Any], list[Failure]]:
    """Return a deployment's part of the plan, and what is refused of its flags.

    `place` says where things lie on the server: model_path, engine_folder.
    """
    engine = stack["engines"][declared["engine"]]
    run = option.run
    shrunk: dict[str, str] = {}
    told = explain.explain(option)
    sentences = told.sentences()
    stand_in: dict[str, float] | None = None
    if stack["engine_memory"]:
        run, shrunk = _on_stand_in(option, stack["engine_memory"])
        sentences.append(_stand_in_told(run, option))
        stand_in = {"kv_bytes": run.kv_bytes or 0, "bytes_per_token": option.wish.model.kv_bytes_per_token()}
    asked = split(where, declared["flags"], option.wish.engine, engine["version"])
    sentences += asked.notes
    _, failures = feature_flags(where, declared, engine["version"], asked.rest)
    served = options.Served(
        declared=declared,
        option=option,
        run=run,
        stand_in=shrunk,
        stack=stack["name"],
        stack_settings=engine.get("settings", {}),
        stack_environment=engine.get("environment", {}),
        set_names=frozenset(_set_flags(option)),
        place=place,
    )
    return {
        "name": declared["name"],
        "model": declared["model"],
        "engine": declared["engine"],
        "engine_version": engine["version"],
        "task": option.wish.task,
        "settings": _settings(run),
        "options": options.options_of(served, asked.rest),
        "environment": options.environment_of(served),
        "cuda_home": stack["host"]["cuda"]["home"],
        "start_seconds": start_seconds(option.wish.model),
        "memory": asdict(option.estimate),
        "stand_in": stand_in,
        "explain": sentences,
        "explanation": told.as_dict(),
        "replicas": [dict(one) for one in replicas],
        **place,
    }, failures


def _settings(run: Run) -> dict[str, Any]:
    """Return the settings that every deployment has, by the plan's names."""
    known = {name: getattr(run, field) for field, name in _NAMES.items()}
    return {name: value for name, value in known.items() if value is not None}


def _set_flags(option: Option) -> dict[str, Any]:
    """Return what the operator set and no setting of the plan says, so that a stack's own settings do not win."""
    names = {known.field: name for name, known in settings_of(option.wish.engine, option.wish.version).items()}
    return {names[field]: value for field, value in option.wish.settings.items() if field not in _NAMES}


def _on_stand_in(option: Option, memory: Mapping[str, Any]) -> tuple[Run, dict[str, str]]:
    """Return what the CPU engine runs with, and why, by field: the plan stays the card's, the engine is a stand-in."""
    chosen, run = option.wish.settings, option.run
    own = run.kv_bytes if chosen.get("kv_bytes") is not None else memory["kv_cache_mib"] * _MEGA
    limits = {
        name: min(getattr(run, name) or memory[name], memory[name])
        for name in ("max_num_seqs", "max_num_batched_tokens")
        if name not in chosen
    }
    small = replace(run, tp=1, pp=1, memory_fraction=None, kv_bytes=own, **limits)
    why = "the stand-in on the CPU has a small memory of its own"
    return small, dict.fromkeys(("tp", "pp", "kv_bytes", *limits), why)


def _stand_in_told(run: Run, option: Option) -> str:
    own = run.kv_bytes or 0
    per_token = int(option.wish.model.kv_bytes_per_token())
    # A model without attention keeps a state for each request, whatever its length.
    tokens = f" ({own // per_token} tokens)" if per_token else ""
    size = f"{own // _MEGA} MiB" if own < GIB else f"{own / GIB:.1f} GiB"
    return (
        f"simulation: planned for the declared card; the engine is a stand-in on the CPU with {size} of KV cache of "
        f"its own{tokens}, {run.max_num_seqs} requests at once"
    )

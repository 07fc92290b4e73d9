"""Which kind of out-of-memory it was, what says so, and the one flag that cures it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpuready.memory import events, lines, neighbours
from gpuready.memory.cures import NEWEST, Cure, Known, cure
from gpuready.memory.events import Event
from gpuready.memory.neighbours import Holder

KINDS = ("weights", "kv_cache", "graph_capture", "activation", "fragmentation", "host_ram", "foreign_process")
TITLES = {
    "weights": "the weights do not fit",
    "kv_cache": "the KV cache does not fit what is asked of it",
    "graph_capture": "no room to capture CUDA graphs",
    "activation": "a step needs more than is left",
    "fragmentation": "free memory in pieces (fragmentation)",
    "host_ram": "the host's memory",
    "foreign_process": "another process on the GPU",
}
_FIGURES = (
    "fraction", "tp", "max_num_batched_tokens", "chunked_prefill_size", "max_num_seqs", "max_model_len",
    "kv_offload_gib", "available_kv_gib", "weights_gib", "before_weights_gib", "after_weights_gib", "total_gib",
)  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """One out-of-memory, explained."""

    kind: str
    """One of KINDS."""
    what: str
    """What happened, as a clause."""
    evidence: tuple[str, ...]
    """The lines that say so, as written."""
    cure: Cure
    engine: str | None = None
    """None: nothing tells which engine wrote the log."""
    phase: str | None = None
    """How far the engine was; None: not known."""
    arithmetic: tuple[str, ...] = ()
    """The figures of the message, one a line."""

    def sentence(self) -> str:
        """Return kind and cure as one clause, for the failure of a release."""
        return f"out of memory, {TITLES[self.kind]}: {self.what}; {self.cure.words()}"

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def of_log(text: str, known: Known | None = None) -> Diagnosis | None:
    """Return the root cause in a log, of its last start that says anything of memory; None where it is not memory.

    `known` holds what the plan knows beside the log; the log's own figures win.
    """
    logs = lines.read(text)
    for log in logs:
        if event := events.root(log) or events.root(log.glued()):
            return _diagnosis(log, event, known or Known())
        if _not_memory(log) is not None:
            return None
    return None


def diagnose(
    log: str, kernel: str = "", holders: Sequence[Holder] = (), plan: Mapping[str, Any] | None = None
) -> Diagnosis | None:
    """Return the root cause by all that a server knows; None where it was no lack of memory.

    `log` is the engine's, `kernel` the kernel's of the same time, `holders` who else holds the replica's GPUs by NVML,
    `plan` the deployment's part of the plan that the engine was started with.
    """
    known = known_of(plan) if plan else Known()
    found = of_log(log, known)
    if found is None:
        killed = of_log(kernel, known)
        return killed if killed is not None and killed.kind == "host_ram" and _is_ours(kernel) else None
    return _beside(found, holders)


def _is_ours(kernel: str) -> bool:
    """Say whether the kernel killed an engine, and not something else on the server."""
    return any(events.names_an_engine(log) for log in lines.read(kernel))


def _beside(found: Diagnosis, holders: Sequence[Holder]) -> Diagnosis:
    """Return the diagnosis with who else holds the GPUs, which is the cause where they hold enough."""
    others = neighbours.counted(holders)
    if not others or found.kind == "host_ram":
        return found
    evidence = (*found.evidence, *(one.words() for one in others))
    cure = Cure("", None, neighbours.remedy(others), "set", "", "host")
    if found.kind == "foreign_process":
        # A value that the engine's own figures give stays the answer for whoever must live with the other process.
        return replace(found, evidence=evidence, cure=cure if not found.cure.flag else found.cure)
    if neighbours.exceeding(others) or sum(one.gib or 0 for one in others) >= events.INITIAL_GIB:
        return replace(found, kind="foreign_process", what=neighbours.said(others), evidence=evidence, cure=cure)
    return replace(found, evidence=evidence)


_PLANNED = {
    "fraction": "gpu_memory_utilization",
    "kv_bytes": "kv_cache_memory_bytes",
    "tp": "tensor_parallel_size",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "max_model_len": "max_model_len",
}


def known_of(plan: Mapping[str, Any]) -> Known:
    """Return what a deployment's part of the plan knows beside the log."""
    settings, memory = plan.get("settings", {}), plan.get("memory", {})
    figures: dict[str, float] = {"planned": 1.0}
    for name, planned in _PLANNED.items():
        if settings.get(planned) is not None:
            figures[name] = float(settings[planned])
    # On the stand-in the plan's memory is the declared card's, which the engine never sees.
    if not plan.get("stand_in") and memory.get("total_gib"):
        figures["total_gib"] = float(memory["total_gib"])
    given = plan.get("environment") or ()
    pairs = given.items() if isinstance(given, Mapping) else ((one["name"], one["value"]) for one in given)
    environment = {name: str(value) for name, value in pairs}
    return Known(plan.get("engine"), plan.get("engine_version") or NEWEST, figures, environment)


def other_cause(text: str) -> str | None:
    """Return what a log says the fault was, where it is no lack of memory; None where it says nothing that is known."""
    return next((said for log in lines.read(text) if (said := _not_memory(log))), None)


def _not_memory(log: lines.Log) -> str | None:
    for rule in lines.faults()["others"]:
        if found := log.search(rule["pattern"]):
            line = found[0].match[0].strip().split("\n")[0]
            return f"{rule['what']} ({line[:200]}); {rule['fix']}"
    return None


def _diagnosis(log: lines.Log, event: Event, known: Known) -> Diagnosis:
    engine = known.engine or event.engine or events.engine(log)
    figures: dict[str, float] = dict(known.figures)
    for name in _FIGURES:
        found = events.figure(log, name)
        if found is not None:
            figures[name] = found
    version = events.version(log) or known.version or NEWEST
    whole = Known(engine, version, figures, known.environment)
    found_cure = cure(event, whole)
    # Where no share of the memory would do, the weights are what does not fit.
    kind = "weights" if event.kind == "kv_cache" and found_cure.setting == "tp" else event.kind
    what = "no share of the memory holds the weights and a KV cache" if kind != event.kind else event.what
    return Diagnosis(kind, what, event.quoted, found_cure, engine, event.phase, tuple(_arithmetic(event, figures)))


def _arithmetic(event: Event, figures: Mapping[str, float]) -> list[str]:
    """Return the figures that the diagnosis rests on, one a line."""
    said = []
    if short := event.shortage:
        said.append(f"asked for {short.tried:.2f} GiB")
        for value, words in (
            (short.total, "of the GPU's memory in all"),
            (short.free, "free"),
            (short.allocated, "in use by the engine's tensors"),
            (short.pools, "of these in CUDA graphs"),
            (short.unallocated, "held by torch and free, in pieces"),
        ):
            if value is not None:
                said.append(f"{value:.2f} GiB {words}")
        said += [f"{size:.2f} GiB held by process {pid}" for pid, size in short.others]
    units = {"needed": "needed", "available": "available", "free": "free", "total": "in all", "wanted": "asked for"}
    said += [f"{event.figures[name]:g} GiB {words}" for name, words in units.items() if name in event.figures]
    if (weights := figures.get("weights_gib")) is not None:
        said.append(f"{weights:g} GiB of weights")
    return said

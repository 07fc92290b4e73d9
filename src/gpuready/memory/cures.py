"""The one flag that cures an out-of-memory, as the engine's release spells it, with the value that the figures give.

Directions differ: a KV cache that is too small wants a larger share of the memory, a step that finds none left wants a
smaller one (sgl-project/sglang-omni pull request 292).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuready.memory.events import Event
from gpuready.planning import support

GIB = 1 << 30
SPARE_GIB = 0.5
"""Left beyond what was missing: torch takes memory in segments, and the next step may need a little more."""
MOST = 0.95
"""The largest share that is proposed: the rest is the driver's, the context's and the communication's."""
NEWEST = "999"
"""Names no release: the newest spelling."""
ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The names that torch reads, the newer one first; releases before 2.10 know the second alone."""
PIECES = "expandable_segments:True"


@dataclass(frozen=True)
class Cure:
    """What to set; `flag` is empty where no flag of the engine cures it."""

    flag: str
    value: Any
    """None: the figures do not give one."""
    why: str
    """The arithmetic, or what to do where there is no flag."""
    direction: str = "set"
    """raise, lower or set."""
    setting: str = ""
    """The planner's name of it; empty where it has none."""
    where: str = "flags"
    """Where an operator declares it: flags, environment, gpus, host."""
    gib: float | None = None
    """What a smaller share leaves free beyond what was left; None where that is not what cures it."""

    def declared(self, deployment: str) -> str:
        """Return where an operator writes it down; empty where there is nothing to write."""
        value = "..." if self.value is None else self.value
        if not self.flag:
            return ""
        if self.where == "host":
            knob = self.flag == "base_shm_percent"
            return f"group_vars: {self.flag}: {value}" if knob else f"a drop-in of the unit: {self.flag}={value}"
        if self.where == "environment":
            return f"your inventory's template serving/ENGINE/environment.j2 (docs/templates.md): {self.flag}={value}"
        field = f"gpus: {value}" if self.where == "gpus" else f"flags: {{{self.flag}: {value}}}"
        return f"gpuready_deployments, {deployment}: {field}"

    def words(self) -> str:
        """Return the cure as a clause."""
        if not self.flag:
            return self.why
        if self.value is None:
            return f"{self.direction} {self.flag} ({self.why})"
        to = "to " if self.direction in ("raise", "lower") else ""
        joined = f"{self.flag}={self.value}" if self.where == "environment" else f"{self.flag} {to}{self.value}"
        return f"{self.direction} {joined} ({self.why})"


@dataclass(frozen=True)
class Known:
    """What is known beside the message: of the log, and of the plan."""

    engine: str | None = None
    version: str = NEWEST
    figures: Mapping[str, float] = field(default_factory=dict)
    """fraction, total_gib, tp, max_num_batched_tokens, max_num_seqs, max_model_len, weights_gib, kv_bytes ..."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def spell(self, setting: str) -> str:
        """Return a setting as the engine's release spells it."""
        name = support.flag(self.engine, self.version, setting) if self.engine else None
        return name or _PLAIN.get(setting, setting.replace("_", "-"))

    def get(self, name: str) -> float | None:
        """Return a figure; None where it is not known."""
        return self.figures.get(name)


_KEPT_GB = 10 * GIB / 1e9
"""What SGLang leaves the host beside its hierarchical cache (mem_cache/memory_pool_host.py), in its GB."""
_PLAIN = {"tp": "tensor-parallel-size", "memory_fraction": "memory fraction", "kv_bytes": "KV cache bytes"}


def cure(event: Event, known: Known) -> Cure:
    """Return what cures it."""
    return _BY_KIND[event.kind](event, known)


def _weights(_: Event, known: Known) -> Cure:
    now = known.get("tp")
    value = None
    why = "each GPU then holds a smaller part of the weights; a smaller quantization does the same on the same GPUs"
    if now is not None:
        value = int(now) * 2
        weights, total = known.get("weights_gib"), known.get("total_gib")
        while weights and total and value < 16 and weights * now / value > 0.8 * total:
            value *= 2
        why = f"on {int(now)} GPU{'s' if now > 1 else ''} they do not fit, and {why}"
    return Cure(known.spell("tp"), value, why, "raise", "tp", "gpus")


def _kv_cache(event: Event, known: Known) -> Cure:
    if event.to == "estimate" or event.setting == "max_model_len":
        return _length(event, known)
    if event.setting == "max_num_seqs":
        return _half(known, "max_num_seqs", "fewer requests at once need less KV cache")
    return _raised(event, known) if event.to == "raise" else _lowered(event, known)


def _length(event: Event, known: Known) -> Cure:
    """Return a larger share where it is known to suffice, else the length that the engine itself says it can hold."""
    needed, available = event.figures.get("needed"), event.figures.get("available")
    fraction, total = known.get("fraction"), known.get("total_gib")
    if None not in (needed, available, fraction, total):
        assert needed is not None and available is not None and fraction is not None and total  # noqa: S101, PT018
        wanted = math.ceil((fraction + (needed - available) / total) * 100) / 100
        if wanted <= MOST and known.get("planned") is None:
            why = f"{needed:g} GiB are needed, {available:g} there: {needed - available:.2f} GiB more of {total:g} GiB"
            return Cure(known.spell("memory_fraction"), wanted, why, "raise", "memory_fraction")
    estimate = event.figures.get("estimate")
    if estimate:
        why = "so many tokens the KV cache holds, by the engine's own estimate"
        if needed is not None and available is not None:
            why += f": {needed:g} GiB are needed for {event.figures['length']:.0f}, {available:g} are there"
        return Cure(known.spell("max_model_len"), int(estimate), why, "lower", "max_model_len")
    length = event.figures.get("length")
    if length and needed and available and available > 0:
        value = int(length * available / needed) // 16 * 16
        why = f"{needed:g} GiB are needed for {length:.0f} tokens and {available:g} are there, in proportion"
        return Cure(known.spell("max_model_len"), value, why, "lower", "max_model_len")
    if event.figures.get("length"):
        return Cure(known.spell("memory_fraction"), None, "more memory for the KV cache", "raise", "memory_fraction")
    return Cure(known.spell("max_model_len"), None, "a shorter request needs less KV cache", "lower", "max_model_len")


def _raised(event: Event, known: Known) -> Cure:
    """Return the larger share that leaves something for the KV cache; more GPUs where no share would."""
    total = known.get("total_gib") or event.figures.get("total")
    fraction = event.figures.get("fraction") or known.get("fraction")
    before, after = known.get("before_weights_gib"), known.get("after_weights_gib")
    available, weights = known.get("available_kv_gib"), known.get("weights_gib")
    name = known.spell("memory_fraction")
    wanted: float | None = None
    why = "the share holds weights and KV cache together, so it must be more than the weights"
    if before and after is not None:
        wanted = 1 - after / before + 0.05
        why = f"the weights take {before - after:.1f} of {before:.1f} GiB, and the share holds them and the KV cache"
    elif fraction and total and available is not None and available <= 0:
        wanted = fraction + (-available + 1) / total
        why = f"{-available:.2f} GiB are missing before the first token, 1 GiB is added; {total:g} GiB in all"
    elif weights and total:
        wanted = weights / total + 0.1
        why = f"the weights alone take {weights:g} of {total:g} GiB"
    if wanted is None:
        return Cure(name, None, why, "raise", "memory_fraction")
    value = math.ceil(wanted * 100) / 100
    if value > MOST or (fraction and value <= fraction):
        return _weights(event, known)
    return Cure(name, value, why, "raise", "memory_fraction")


def _lowered(event: Event, known: Known) -> Cure:
    """Return the smaller share that leaves what was missing."""
    short = event.shortage
    total = (short.total if short else None) or known.get("total_gib") or event.figures.get("total")
    missing = short.missing + SPARE_GIB if short else None
    size = f"{short.missing:.2f} GiB were missing, and {SPARE_GIB} GiB are spared" if short else ""
    if (own := known.get("kv_bytes")) is not None and known.engine != "tensorrt_llm":
        value = int(own - missing * GIB) if missing is not None else None
        enough = value if value is not None and value > 0 else None
        why = size or "less KV cache leaves more"
        return Cure(known.spell("kv_bytes"), enough, why, "lower", "kv_bytes", gib=missing)
    fraction = event.figures.get("fraction") or known.get("fraction")
    name = known.spell("memory_fraction")
    base = event.figures.get("free") if known.engine == "tensorrt_llm" else total
    if fraction is not None and missing is not None and base:
        smaller = math.floor((fraction - missing / base) * 100) / 100
        if smaller > 0:
            why = f"{size}; {missing:.2f} of {base:g} GiB"
            return Cure(name, smaller, why, "lower", "memory_fraction", gib=missing)
    if missing is not None and base:
        why = f"{size}: by at least {math.ceil(missing / base * 100) / 100:.2f}"
        return Cure(name, None, why, "lower", "memory_fraction", gib=missing)
    why = size or "a smaller KV cache leaves more for what is missing"
    return Cure(name, None, why, "lower", "memory_fraction", gib=missing)


def _half(known: Known, setting: str, why: str) -> Cure:
    now = known.get(setting)
    value = int(now) // 2 if now is not None and now >= 2 else None
    return Cure(known.spell(setting), value, f"{why}; half of {int(now)}" if value and now else why, "lower", setting)


def _activation(event: Event, known: Known) -> Cure:
    if event.multimodal and event.phase == "profile" and known.engine == "vllm":
        why = "fewer images or videos in a request need less at once"
        return Cure("limit-mm-per-prompt", None, why, "lower")
    if event.setting == "max_model_len":
        return _half(known, "max_model_len", "its buffers grow with the greatest length")
    if event.setting == "max_num_batched_tokens":
        setting = "chunked_prefill_size" if known.engine == "sglang" else "max_num_batched_tokens"
        return _half(known, setting, "activations grow with the tokens of a step")
    return _lowered(event, known)


def _fragmentation(event: Event, known: Known) -> Cure:
    if any(PIECES in known.environment.get(name, "") for name in ALLOCATORS):
        return _lowered(event, known)
    short = event.shortage
    name = short.variable if short and short.variable else ALLOCATORS[0]
    size = (
        f"{short.unallocated:.2f} GiB were free in pieces, {short.tried:.2f} wanted in one" if short else "pieces grow"
    )
    why = (
        f"{size}; segments that grow are pieced together again; set both names of it, {' and '.join(ALLOCATORS)}, alike"
    )
    if (known.get("tp") or 1) > 1 and known.engine == "vllm":
        why += "; with several GPUs try it before relying on it, because of vLLM's custom all-reduce (vllm issue 42609)"
    return Cure(name, PIECES, why, "set", "", "environment")


def _host_ram(event: Event, known: Known) -> Cure:
    if event.shm:
        why = "the engine's processes share memory there; the host's stage base sets its size"
        return Cure("base_shm_percent", None, why, "raise", "", "host")
    if event.cgroup:
        rss = event.figures.get("rss_kb")
        why = "the limit of the unit or container is less than the engine needs"
        held = f"; it held {rss / (1 << 20):.1f} GiB" if rss and rss >= 1 << 20 else ""
        return Cure("MemoryMax", None, why + held, "raise", "", "host")
    offload = known.get("kv_offload_gib")
    if event.setting == "kv_offload_gib" or offload:
        free, wanted = event.figures.get("free_gb"), event.figures.get("wanted_gb")
        if free is not None and wanted is not None and free >= wanted:
            free -= _KEPT_GB  # releases before 0.4.10 tell what is free before they keep that
        value = math.floor(free) if free is not None and free >= 1 else None
        why = (
            f"{wanted:g} GB are asked for and {free:g} free"
            if wanted and free is not None
            else "the host holds less of it"
        )
        return Cure(known.spell("kv_offload_gib"), value, why, "lower", "kv_offload_gib")
    if event.setting == "kv_bytes":
        free, wanted = event.figures.get("free"), event.figures.get("wanted")
        value = int(free * 0.9 * GIB) if free else None
        return Cure(known.spell("kv_bytes"), value, f"{free:g} GiB are free, {wanted:g} asked for", "lower", "kv_bytes")
    return Cure("", None, "give the host more memory or swap, or move away what else uses it", "set", "", "host")


def _foreign(event: Event, known: Known) -> Cure:
    free, total = event.figures.get("free"), event.figures.get("total")
    who = "end or move the other process"
    if free is not None and total:
        value = math.floor(free / total * 100) / 100
        why = f"{free:g} of {total:g} GiB are free; or {who}, which keeps the planned KV cache"
        return Cure(known.spell("memory_fraction"), value, why, "lower", "memory_fraction")
    short = event.shortage
    if short and short.others:
        names = ", ".join(f"process {pid} with {size:.2f} GiB" for pid, size in short.others)
        return Cure("", None, f"end or move what else uses the GPU: {names}", "set", "", "host")
    return Cure("", None, "end or move what else uses the GPU", "set", "", "host")


_BY_KIND = {
    "weights": _weights,
    "kv_cache": _kv_cache,
    "graph_capture": _lowered,
    "activation": _activation,
    "fragmentation": _fragmentation,
    "host_ram": _host_ram,
    "foreign_process": _foreign,
}

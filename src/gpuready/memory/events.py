"""What of a log is about memory, where the engine was then, and which of it is the root cause.

Every rule is data with its source: catalog/memory_faults.yaml.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpuready.memory import allocator
from gpuready.memory.allocator import Shortage
from gpuready.memory.lines import Found, Log, faults, pattern

_FRAME = re.compile(r'File "[^"]+", line \d+, in (\w+)')
_TRACEBACK = "Traceback (most recent call last)"
_REACH = 400
"""Lines in which a traceback and its message belong together."""
FOREIGN_GIB = 1.0
FOREIGN_SHARE = 0.05
"""What others must hold of a GPU, and of its memory, to count: a process of the engine may keep a context of half a
GiB on each GPU, which is no neighbour."""
INITIAL_GIB = 3.0
"""More than a context and the communication of many GPUs take before anything is loaded."""
UNEXPLAINED_SHARE = 0.15
"""Of a GPU: torch's older words name no process, and NCCL, graphs and libraries take memory beside torch."""
_OURS = re.compile(r"python|vllm|sglang|trtllm|ray|pt_main_thread|mpi|orted|VLLM|EngineCore|Worker", re.IGNORECASE)


@dataclass(frozen=True)
class Event:
    """One thing that a log says about memory."""

    kind: str
    line: int
    quoted: tuple[str, ...]
    """The lines of the log that say so."""
    what: str
    setting: str | None = None
    to: str = "lower"
    phase: str | None = None
    """weights, profile, kv_cache, after_kv, graph_capture, runtime, init; None: the log does not say."""
    figures: Mapping[str, float] = field(default_factory=dict)
    shortage: Shortage | None = None
    origin: str = "engine"
    program: str = ""
    shm: bool = False
    cgroup: bool = False
    multimodal: bool = False
    engine: str | None = None
    """Whose words they are; None: anybody's."""
    named: bool = True
    """The engine itself said which kind it is."""


def root(log: Log) -> Event | None:
    """Return the root cause in one start of an engine; None where it says nothing of memory."""
    events = sorted([*_named(log), *_unnamed(log)], key=lambda one: one.line)
    events = [one for one in events if not _somebody_elses(one)] or events
    if not events:
        return None
    first = events[0]
    if not first.named:
        # torch's own words come first and the engine's after them: the same fault, said twice.
        said = next((one for one in events if one.named and one.origin == "engine"), None)
        if said is not None and said.kind != "host_ram":
            quoted = tuple(dict.fromkeys([*first.quoted, *said.quoted]))
            first = replace(said, quoted=quoted, shortage=said.shortage or first.shortage, phase=first.phase)
    elif first.shortage is None and first.origin == "engine" and first.kind not in ("host_ram", "foreign_process"):
        near = next((one for one in events if one.shortage and one.line - first.line < _REACH), None)
        first = replace(first, shortage=near.shortage) if near else first
    return _refined(first, figure(log, "initial_gib"))


def _somebody_elses(event: Event) -> bool:
    """Say whether the kernel killed a program that is no engine's."""
    return event.origin == "kernel" and not _OURS.search(event.program)


def names_an_engine(log: Log) -> bool:
    """Say whether a kernel's log tells of a killed program that an engine consists of."""
    return any(one.origin == "kernel" and not _somebody_elses(one) for one in _named(log))


def _named(log: Log) -> Iterator[Event]:
    """Yield what engines, kernel and systemd said in words of their own, each rule once."""
    for rule in faults()["messages"]:
        found = [one for one in log.search(rule["pattern"]) if not _ruled_out(rule, one)]
        if not found:
            continue
        first = found[0]
        groups = first.match.groupdict()
        yield Event(
            kind=rule["kind"],
            line=first.line,
            quoted=_quoted(first),
            what=rule["what"],
            setting=rule.get("setting"),
            to=rule.get("to", "lower"),
            figures={name: float(text) for name, text in groups.items() if text and name != "program"},
            shortage=_shortage(log, first),
            origin=rule.get("origin", "engine"),
            program=groups.get("program") or "",
            shm=bool(rule.get("shm")),
            cgroup=bool(rule.get("cgroup")),
            engine=rule.get("engine"),
        )


def _ruled_out(rule: Mapping[str, Any], found: Found) -> bool:
    """Say whether the lines around a place give the message another cause than memory."""
    return "unless" in rule and pattern(rule["unless"]).search("\n".join(_around(found))) is not None


def _shortage(log: Log, found: Found) -> Shortage | None:
    """Return torch's figures where the same message quotes them."""
    return allocator.read(found.stream.text[found.match.start() : found.match.start() + 2000], log.pids)


def _unnamed(log: Log) -> Iterator[Event]:
    """Yield what torch and CUDA said; what it means follows from where the engine was."""
    gpu = faults()["gpu"]
    torch = log.search(gpu["torch"])
    found = torch[:1] or sorted((one for text in gpu["bare"] for one in log.search(text)), key=lambda one: one.line)[:1]
    for one in found:
        frames = _frames(one)
        shortage = allocator.read(one.stream.text[one.match.start() :], log.pids) if torch else None
        phase = _phase_of(frames) or _progress(log, one) or ("weights" if shortage and shortage.full else None)
        event = Event("", one.line, _quoted(one), "", phase=phase, shortage=shortage, named=False)
        if not torch and pattern(gpu["pinned"]).search("\n".join(_around(one))):
            yield replace(event, kind="host_ram", what="memory of the host could not be pinned for the GPU")
        else:
            yield replace(_by_phase(event), multimodal=any(name in faults()["multimodal"] for name in frames))


def _by_phase(event: Event) -> Event:
    """Return what running out of GPU memory means at that point of an engine's life."""
    kind, what, setting, to = _MEANS[event.phase]
    return replace(event, kind=kind, what=what, setting=setting, to=to)


_MEANS: Mapping[str | None, tuple[str, str, str | None, str]] = {
    "init": ("foreign_process", "the GPU was full before the engine had loaded anything", None, "lower"),
    "weights": ("weights", "the weights do not fit", "tp", "raise"),
    "profile": (
        "activation",
        "one step with as many tokens as allowed does not fit beside the weights",
        "max_num_batched_tokens",
        "lower",
    ),
    "kv_cache": ("kv_cache", "the KV cache that was asked for is larger than what is free", "memory_fraction", "lower"),
    "after_kv": (
        "activation",
        "beside weights and KV cache too little is left for the engine to warm up",
        "memory_fraction",
        "lower",
    ),
    "graph_capture": (
        "graph_capture",
        "beside weights and KV cache too little is left for CUDA graphs",
        "memory_fraction",
        "lower",
    ),
    "runtime": (
        "activation",
        "a step while serving needed more than is left beside weights and KV cache",
        "memory_fraction",
        "lower",
    ),
    None: (
        "activation",
        "a step needed more than was left, and the log does not say how far the engine was",
        "memory_fraction",
        "lower",
    ),
}


def _refined(event: Event, initial: float | None) -> Event:
    """Return the event with what torch's figures tell: others on the GPU, or free memory in pieces."""
    short = event.shortage
    if event.kind == "foreign_process":
        return _share_too_large(event)
    if event.kind == "kv_cache" and event.to == "raise" and (initial or 0) >= INITIAL_GIB:
        what = f"{initial:g} GiB of the GPU were in use before the engine had loaded anything"
        return replace(event, kind="foreign_process", what=what, setting=None)
    if event.kind == "host_ram" or short is None:
        return event
    floor = max(FOREIGN_GIB, FOREIGN_SHARE * (short.total or 0))
    if short.held_by_others >= floor and short.held_by_others + (short.free or 0) >= short.tried:
        return replace(event, kind="foreign_process", what="another process holds memory of the GPU", setting=None)
    if short.unexplained >= max(INITIAL_GIB, UNEXPLAINED_SHARE * (short.total or 0)):
        what = f"{short.unexplained:.1f} GiB of the GPU are neither free nor this process's"
        return replace(event, kind="foreign_process", what=what, setting=None)
    # Weights that do not fit leave pieces as well, which would not hold the rest of them.
    while_running = event.kind == "activation" if event.named else event.phase not in ("weights", "graph_capture")
    pieces = short.fragmented and (while_running or (short.unallocated or 0) >= 0.1 * (short.total or math.inf))
    if pieces and event.kind in ("activation", "weights", "graph_capture"):
        what = "torch held enough free memory, in pieces of which none is large enough"
        return replace(event, kind="fragmentation", what=what, setting=None)
    return event


def _share_too_large(event: Event) -> Event:
    """Return what it means that less is free than asked for: nobody but the driver may hold the rest."""
    free, total = event.figures.get("free"), event.figures.get("total")
    if free is None or total is None or total - free >= FOREIGN_GIB:
        return event
    what = "the share asked for is more than the card has beside driver and context"
    return replace(event, kind="kv_cache", what=what)


def _frames(found: Found) -> list[str]:
    """Return the functions of the traceback that ends in a message, or else follows it; the deepest first."""
    before = found.stream.before(found)[-_REACH:]
    begin = max((at for at, line in enumerate(before) if _TRACEBACK in line), default=None)
    names = [name for line in before[begin:] for name in _FRAME.findall(line)] if begin is not None else []
    if not names:
        after = found.stream.text[found.match.end() :].split("\n")[:_REACH]
        names = [name for line in after for name in _FRAME.findall(line)]
    return names[::-1]


def _around(found: Found) -> list[str]:
    return [*found.stream.before(found)[-8:], *found.stream.text[found.match.end() :].split("\n")[:8]]


def _phase_of(frames: list[str]) -> str | None:
    """Return the phase of the deepest known function; that a step runs says least, because profiling runs one."""
    phase_of: dict[str, str] = {name: phase for phase, names in faults()["phases"].items() for name in names}
    known = [phase_of[name] for name in frames if name in phase_of]
    return next((phase for phase in known if phase not in ("runtime", "init")), known[0] if known else None)


def _progress(log: Log, found: Found) -> str | None:
    """Return the phase of the last line of progress before a place."""
    reached = [
        (one.line, rule["phase"])
        for rule in faults()["progress"]
        for one in log.search(rule["pattern"])
        if one.line <= found.line
    ]
    return str(max(reached)[1]) if reached else None


def _quoted(found: Found) -> tuple[str, ...]:
    """Return the whole lines of a place, in its worker's words."""
    text = found.stream.text
    begin = text.rfind("\n", 0, found.match.start() + 1) + 1 if found.match.start() else 0
    end = text.find("\n", max(found.match.end() - 1, found.match.start()))
    whole = text[begin : None if end < 0 else end]
    return tuple(line.strip() for line in whole.split("\n") if line.strip())[:6]


def figure(log: Log, name: str) -> float | None:
    """Return the last figure of that name that the engine wrote; None where it wrote none."""
    found = [one for text in faults()["figures"][name] for one in log.search(text)]
    return float(max(found, key=lambda one: one.line).match["value"]) if found else None


def version(log: Log) -> str | None:
    """Return the release that the engine names."""
    found = [one for text in faults()["figures"]["version"] for one in log.search(text)]
    return found[-1].match["value"] if found else None


def engine(log: Log) -> str | None:
    """Return which engine wrote it; None where nothing in it tells."""
    pages: dict[str, Any] = faults()["engines"]
    counts = {name: len(pattern(text).findall(log.text)) for name, text in pages.items()}
    best = max(counts, key=lambda name: counts[name])
    return best if counts[best] else None

"""What engines say that they have, beside what was planned: from the records of their start, not asked again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuready.hardware import nvml
from gpuready.planning.accuracy.measured import Comparison, compare
from gpuready.planning.memory.run import GIB
from gpuready.serving import figures, readiness
from gpuready.serving.files import read_json
from gpuready.serving.layout import Layout, split_replica
from gpuready.serving.releases import Store

SLACK_GIB = 0.5
"""What a replica may hold above its part: the driver counts whole pages, and contexts differ by its version."""
BEFORE = "it was started before its figures were read; restart it to have them"


def taken(engine: str, port: int, main_pid: int, uuids: Sequence[str]) -> dict[str, Any]:
    """Return what an engine that just gave a token says of itself, and NVML of its GPUs; what is not known is None."""
    found, unread = figures.read(engine, port)
    return {"engine": found, "engine_unread": unread or None, **gpu_memory(main_pid, uuids)}


def gpu_memory(main_pid: int, uuids: Sequence[str]) -> dict[str, Any]:
    """Return what NVML says that a replica's processes hold, in bytes: on all GPUs, and on each beside all others."""
    report = nvml.probe()
    if report is None or report.problem:
        return {"gpu_process_bytes": None, "gpus": None}
    pids = set(readiness.process_tree(main_pid))
    own = {gpu.uuid: _held(gpu, pids) for gpu in report.gpus}
    known = [held for held in own.values() if held is not None]
    gpus = [
        {"uuid": gpu.uuid, "used_bytes": gpu.memory_used_bytes, "own_bytes": own[gpu.uuid]}
        for gpu in report.gpus
        if gpu.uuid in uuids
    ]
    return {"gpu_process_bytes": sum(known) if known else None, "gpus": gpus}


def _held(gpu: nvml.NvmlGpu, pids: set[int]) -> int | None:
    """Return what processes hold on a GPU; None where the driver does not say."""
    held = [process.used_bytes for process in gpu.processes or () if process.pid in pids]
    known = [size for size in held if size is not None]
    return sum(known) if known else None


def comparison(layout: Layout, replica: str) -> Comparison | None:
    """Return a replica's KV cache, planned and measured, for the release that it runs; None where it serves nothing."""
    name, index = split_replica(replica)
    ready = read_json(layout.run(replica) / "ready.json") or {}
    store, number = Store(layout, name), ready.get("release")
    if not isinstance(number, int):
        return None
    plan, part = read_json(store.folder(number) / "plan.json"), store.part(number, index)
    if plan is None or part is None:
        return None
    unread = ready.get("engine_unread") or ("" if "engine" in ready else BEFORE)
    return compare(plan, ready.get("engine"), unread, len(part["gpus"]), _others_gib(ready.get("gpus")))


def _others_gib(gpus: Any) -> float | None:
    """Return what others held of that GPU of a replica where they held most; None where NVML did not say."""
    rows = [(one.get("used_bytes"), one.get("own_bytes")) for one in gpus or ()]
    others = [used - own for used, own in rows if used is not None and own is not None]
    return max(0, *others) / GIB if others and len(others) == len(rows) else None


def sentences(layout: Layout, deployments: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return one sentence for each replica that serves, under its deployment's name where it has no other replica."""
    said = []
    for one in deployments:
        for part in one["replicas"]:
            replica = f"{one['name']}.{part['index']}"
            found = comparison(layout, replica)
            if found is not None:
                said.append(found.sentence(one["name"] if len(one["replicas"]) == 1 else replica))
    return said


@dataclass(frozen=True)
class TooMuch:
    """A replica that holds more of a GPU than was planned."""

    sentence: str
    takes_from_others: bool
    """It is more than its part of a GPU that others share."""


def beyond(part: Mapping[str, Any], plan: Mapping[str, Any], ready: Mapping[str, Any]) -> TooMuch | None:
    """Compare what NVML says that a replica's processes hold with its part of the plan; None where it is no more.

    `part` is the replica's part of the plan, `plan` its deployment's, `ready` what was written after its token. What
    the driver does not say is not judged, nor is a stand-in on the CPU, which holds nothing of a card.
    """
    held = [one["own_bytes"] / GIB for one in ready.get("gpus") or () if one.get("own_bytes") is not None]
    if not held or plan.get("stand_in"):
        return None
    most = max(held)
    shared = part.get("shared_gib")
    if shared and most > shared + SLACK_GIB:
        what = (
            f"holds {most:.1f} GiB of its GPU and its part of it is {shared:.1f} GiB, so others have less than theirs"
        )
        return TooMuch(what, takes_from_others=True)
    high = _most_planned(plan.get("memory"))
    if high is None or most <= high + SLACK_GIB:
        return None
    what = f"holds {most:.1f} GiB of a GPU and was planned to hold at most {high:.1f} GiB"
    return TooMuch(what, takes_from_others=False)


def _most_planned(memory: Any) -> float | None:
    """Return the GiB that a plan's estimate comes to by the worst of its bands; None where it has none."""
    if not isinstance(memory, Mapping):
        return None
    names = ["outside", "weights", "activation", "non_torch", "kv"]
    if memory.get("graphs_counted"):
        names.append("graphs")
    total = 0.0
    for name in names:
        part = memory.get(name)
        if not isinstance(part, Mapping) or part.get("high") is None:
            return None
        total += part["high"]
    return total

"""A deployment's part of the plan as its engine spells it: every option and variable with its value and its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gpuready.planning.options import environment, sglang, tensorrt_llm, vllm
from gpuready.planning.options.entry import GROUPS, Entry, Served, bare

__all__ = ["GROUPS", "Entry", "Served", "bare", "environment_of", "options_of"]

_ENGINES: dict[str, Callable[[Served], Iterator[tuple[str, Entry]]]] = {
    "vllm": vllm.options,
    "sglang": sglang.options,
    "tensorrt_llm": tensorrt_llm.options,
}
_WRITTEN: dict[str, Callable[[Entry], Entry | None]] = {
    "vllm": vllm.written,
    "sglang": sglang.written,
    "tensorrt_llm": tensorrt_llm.written,
}


def options_of(served: Served, flags: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the groups of options of one deployment, each option with name, value and why.

    `flags` are the operator's own that no setting of the plan says, in the engine's spelling. They win over all else,
    and what the stack sets wins over the plan.
    """
    found: dict[str, tuple[str, Entry]] = {}
    for group, entry in _ENGINES[served.engine](served):
        found[bare(entry.name)] = (group, entry)
    for name, value in served.stack_settings.items():
        group = found[bare(name)][0] if bare(name) in found else "features"
        if bare(name) not in served.set_names:
            found[bare(name)] = (group, Entry(name, value, f"stack {served.stack} sets it"))
    for name, value in flags.items():
        found[bare(name)] = ("declared", Entry(name, value, "set under flags"))
    groups: dict[str, list[dict[str, Any]]] = {group: [] for group in GROUPS}
    for group, entry in found.values():
        told = _WRITTEN[served.engine](entry)
        if told is not None:
            groups[group].append(told.as_dict())
    return groups


def environment_of(served: Served) -> list[dict[str, Any]]:
    """Return the environment of one deployment's engines, each variable with name, value and why."""
    found = {entry.name: entry for entry in environment.variables(served)}
    for name, value in served.stack_environment.items():
        if name not in found or found[name].value != value:
            found[name] = Entry(name, value, f"stack {served.stack} sets it")
    for name, value in served.declared.get("environment", {}).items():
        found[name] = Entry(name, value, "set under environment")
    return [entry.as_dict() for entry in _sorted(found.values())]


def _sorted(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry.name)

"""What a new plan would change on a server that has one already, in sentences, and how to take it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

TAKE = "take it with -e gpuready_replan=true"


def sentences(plan: Mapping[str, Any], stored: Mapping[str, Any] | None) -> list[str]:
    """Return what of a plan differs from the one that the server has, and what brings it there.

    `plan` is the newest, `stored` what the server recorded; None where it recorded none.
    """
    if stored is None:
        return ["the server has no plan yet: site.yml brings this one"]
    if stored.get("schema") != plan["schema"]:
        return ["the server's plan is of an older form: site.yml replaces it with this one, and restarts what differs"]
    before = {one["name"]: one for one in stored.get("deployments", [])}
    after = {one["name"]: one for one in plan["deployments"]}
    found = [f"{name} is new" for name in after if name not in before]
    found += [f"{name} is no longer declared" for name in before if name not in after]
    for name, one in after.items():
        if name in before and before[name] != one:
            told = list(_changes(before[name], one))
            found.append(f"{name}: {', '.join(told) if told else 'only what is said about it differs'}")
    if not found:
        return ["the server has this plan"]
    if stored.get("inputs") == plan["inputs"]:
        return [*found, f"nothing that was declared has changed, so site.yml leaves the server's plan as it is; {TAKE}"]
    return [*found, "site.yml brings this plan, because what was declared or found on the server has changed"]


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for part in (_options, _environment):
        old, new = part(before), part(after)
        for key in (*old, *(one for one in new if one not in old)):
            if old.get(key) != new.get(key):
                yield f"{key} {_shown(old.get(key))} -> {_shown(new.get(key))}"
    for key in ("model", "model_path", "engine_folder", "start_after"):
        if before.get(key) != after.get(key):
            yield f"{key} {_shown(before.get(key))} -> {_shown(after.get(key))}"
    old_gpus, new_gpus = ([part["gpus"] for part in one["replicas"]] for one in (before, after))
    if old_gpus != new_gpus:
        yield f"GPUs of its replicas {_shown(old_gpus)} -> {_shown(new_gpus)}"
    tokens = [_tokens(one) for one in (before, after)]
    if tokens[0] is not None and tokens[1] is not None and tokens[0] != tokens[1]:
        yield f"planned KV cache {tokens[0]:,} -> {tokens[1]:,} tokens"


def _options(deployment: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options by their names; the reasons of two plans may differ where the values do not."""
    return {one["name"]: one["value"] for group in deployment["options"].values() for one in group}


def _environment(deployment: Mapping[str, Any]) -> dict[str, Any]:
    return {one["name"]: one["value"] for one in deployment["environment"]}


def _tokens(deployment: Mapping[str, Any]) -> int | None:
    try:
        return int(deployment["memory"]["kv_tokens"]["value"])
    except (KeyError, TypeError):
        return None


def _shown(value: Any) -> str:
    text = "(not set)" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

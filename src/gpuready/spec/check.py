"""Checks what an operator declared for one host and says every mistake at once, each with its place."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from gpuready import catalog
from gpuready.outcome import Failure
from gpuready.spec.model import HostSpec

PREFIX = "gpuready_"

Locate = Callable[[str], str]
"""Says where a variable is set, e.g. `inventories/production/group_vars/h100-sg.yml:4`; empty when not known."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that `word` most likely means; empty when none is near."""
    found = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return found[0] if found else ""


def _meant(word: str, known: Iterable[str], prefix: str = "") -> str:
    known = sorted(known)
    # What all names share says nothing about which one was meant.
    near = nearest(word.removeprefix(prefix), [name.removeprefix(prefix) for name in known])
    near = f"{prefix}{near}" if near else ""
    return f"did you mean {near}?" if near else f"known are {', '.join(known)}"


def unknown_names(
    host: str, declared: Iterable[str], roles: Mapping[str, Iterable[str]], locate: Locate
) -> list[Failure]:
    """Return a failure for every variable under our prefixes that nobody defines.

    `roles` maps each role's name to its public variables; a role's prefix is its name and an underscore.
    """
    failures = []
    for name in sorted(declared):
        if name.startswith(PREFIX):
            known, prefix = set(HostSpec.model_fields), PREFIX
            if name in known:
                continue
        else:
            owner = next((role for role in roles if name.startswith(f"{role}_")), None)
            if owner is None:
                continue
            known, prefix = set(roles[owner]), f"{owner}_"
            if name in known:
                continue
        what = f"host {host}, {_place(locate, name)}{name}: no such variable"
        failures.append(Failure("spec.unknown_name", what, "", _meant(name, known, prefix)))
    return failures


def with_place(failure: Failure, host: str, locate: Locate) -> Failure:
    """Return a failure of planner or preflight with the file and line of the variable that it names."""
    named = re.match(rf"host {re.escape(host)}, ((?:gpuready|gateway|base)_[a-z_]+|deployment )", failure.what)
    if named is None:
        return failure
    key = "gpuready_deployments" if named[1] == "deployment " else named[1]
    start = len(f"host {host}, ")
    return replace(failure, what=f"{failure.what[:start]}{_place(locate, key)}{failure.what[start:]}")


def _place(locate: Locate, key: str) -> str:
    place = locate(key.split("[")[0].split(".")[0])
    return f"{place}, " if place else ""


def _path(location: tuple[int | str, ...]) -> str:
    """Write pydantic's location as an operator would: gpuready_deployments[0].workload.p50."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part in ("constrained-int", "int", "MigClaim") or "[" in part:
            break  # the rest names an alternative of a union, not something that an operator wrote
        else:
            text += f".{part}" if text else part
    return text


def _known_at(location: tuple[int | str, ...]) -> list[str]:
    """Return the field names that are known where an unknown key stands."""
    model: Any = HostSpec
    for part in location[:-1]:
        if isinstance(part, int) or not hasattr(model, "model_fields"):
            continue
        field = model.model_fields.get(part)
        if field is None:
            continue
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        model = next((kind for kind in kinds if hasattr(kind, "model_fields")), model)
    return sorted(model.model_fields)


def _failure(host: str, error: Mapping[str, Any], locate: Locate) -> Failure:
    location = tuple(error["loc"])
    key = _path(location)
    where = f"host {host}, {_place(locate, key)}{key or 'declaration'}"
    kind = error["type"]
    if kind == "missing":
        return Failure("spec.missing", f"{where} is not set", "", "set it; inventories/example shows how")
    if kind == "extra_forbidden":
        return Failure("spec.unknown_key", f"{where}: no such key", "", _meant(str(location[-1]), _known_at(location)))
    message = error["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return Failure("spec.value", f"{where} is refused", message, "correct it in the inventory")
    value = error.get("input")
    shown = repr(value) if len(repr(value)) < 80 else f"{repr(value)[:77]}..."
    return Failure("spec.value", f"{where} = {shown} is refused", _allowed(error, key), "correct it in the inventory")


def _allowed(error: Mapping[str, Any], key: str) -> str:
    """Say what is allowed, in an operator's words where pydantic's are a programmer's."""
    if key.endswith(".gpus"):
        return "allowed are a number of GPUs (4), a list of their indices ([0, 1]) or {mig: 3g.40gb, count: 1}"
    if error["type"] == "string_pattern_mismatch":
        if key.endswith("path"):
            return "allowed is an absolute path"
        if key.endswith(".model"):
            return "allowed are letters, digits and _ . / : @ + -, a letter or digit first"
        return "allowed are 1 to 32 lower case letters, digits and dashes, a letter first"
    message: str = error["msg"]
    return message[:1].lower() + message[1:]


def _catalog_failures(host: str, spec: HostSpec, locate: Locate) -> list[Failure]:
    failures = []
    cards = catalog.load("gpus")["cards"]
    names = [name for key, card in cards.items() for name in (key, *card["aliases"])]
    for key, value, known, noun in (
        ("gpuready_gpu_model", spec.gpuready_gpu_model, names, "GPU"),
        ("gpuready_stack", spec.gpuready_stack, list(catalog.load("stacks")["stacks"]), "stack"),
    ):
        if value not in known:
            what = f"host {host}, {_place(locate, key)}{key} = {value!r}: no such {noun} in the catalog"
            failures.append(Failure(f"spec.unknown_{noun.lower()}", what, "", _meant(value, known)))
    return failures


def _union_arm_noise(errors: list[Any]) -> list[Any]:
    """Keep one error per value: a union reports one per alternative."""
    kept: dict[str, Any] = {}
    for error in errors:
        kept.setdefault(_path(tuple(error["loc"])), error)
    return list(kept.values())


def check_declaration(
    host: str, declared: Mapping[str, Any], roles: Mapping[str, Iterable[str]], locate: Locate = lambda _: ""
) -> tuple[HostSpec | None, list[Failure]]:
    """Return the checked declaration of one host, and every mistake at once.

    The declaration is None when its own values cannot be read; with other mistakes (an unknown name beside it, a
    name that the catalog lacks) it is still returned, so that more can be checked in the same pass.
    """
    failures = unknown_names(host, declared, roles, locate)
    known = {key: value for key, value in declared.items() if key in HostSpec.model_fields}
    try:
        spec = HostSpec.model_validate(known)
    except ValidationError as error:
        errors = _union_arm_noise(error.errors(include_url=False, include_context=False))
        return None, failures + [_failure(host, one, locate) for one in errors]
    return spec, failures + _catalog_failures(host, spec, locate)

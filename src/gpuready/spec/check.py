"""Checks what an operator declared for one host and says every mistake at once, each with its place."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from gpuready import catalog
from gpuready.outcome import Failure
from gpuready.spec.model import HostSpec
from gpuready.spec.options import Path, Problem
from gpuready.spec.values import Sealed, Secret, path_text, shown, yaml_hint

PREFIX = "gpuready_"
CORRECT = "correct it in the inventory"

Locate = Callable[[Path], str]
"""Says where a variable, or a key in it, is set, e.g. `inventories/production/group_vars/h100-sg.yml:4`; or nothing."""


def nowhere(_: Path) -> str:
    """Say nothing about the place: for declarations that come from no file."""
    return ""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known word that `word` most likely means; empty when none is near."""
    found = difflib.get_close_matches(word[:200], sorted(known), n=1, cutoff=cutoff)
    return found[0] if found else ""


def meant(word: object, known: Iterable[str], prefix: str = "", listed: Iterable[str] = ()) -> str:
    """Say which of the known words was meant, or which there are: those of `listed`, where all would be too many."""
    known = sorted(known)
    # What all names share says nothing about which one was meant.
    near = nearest(str(word).removeprefix(prefix), [name.removeprefix(prefix) for name in known])
    if near:
        return f"did you mean {prefix}{near}?"
    return f"known are {', '.join(sorted(listed) or known)}" if known else "there are none"


def where(host: str, path: Path, locate: Locate) -> str:
    """Return the beginning of every sentence: host, place, key."""
    place = locate(path)
    return f"host {host}, {f'{place}, ' if place else ''}{path_text(path)}"


def unknown_names(
    host: str, declared: Iterable[str], roles: Mapping[str, Iterable[str]], locate: Locate
) -> list[Failure]:
    """Return a failure for every variable that nobody defines, under our prefixes or nearly under them.

    `roles` maps each role's name to its public variables; a role's prefix is its name and an underscore.
    """
    known_by_prefix = {PREFIX: set(HostSpec.model_fields)} | {f"{role}_": set(names) for role, names in roles.items()}
    known_at_all = set().union(*known_by_prefix.values())
    failures = []
    for name in sorted(set(declared) - known_at_all):
        prefix = next((one for one in known_by_prefix if name.startswith(one)), "")
        near = "" if prefix else _nearly(name, known_at_all)
        if prefix or near:
            fix = meant(name, known_by_prefix[prefix], prefix) if prefix else f"did you mean {near}?"
            what = f"{where(host, (name,), locate)}: no such variable"
            failures.append(Failure("spec.unknown_name", what, "", fix))
    return failures


def _nearly(name: str, known: set[str]) -> str:
    """Return the variable of ours that a name is but for a slip: a variable that nobody reads goes unnoticed."""
    folded = name.lower().replace("-", "_")
    return folded if folded in known else nearest(folded, known, cutoff=0.92)


_NAMED = re.compile(
    r"((?:gpuready|gateway|base|models)_[a-z_]+)|deployment ([a-z0-9-]+)(?:, (flags)\.(\S+)|, ([a-z_]+))?"
)


def with_place(failure: Failure, host: str, locate: Locate, deployments: Sequence[str] = ()) -> Failure:
    """Return a failure of planner or preflight with the file and line of what it names.

    `deployments` are the names of the host's deployments, in their order.
    """
    start = len(f"host {host}, ")
    named = _NAMED.match(failure.what, start) if failure.what.startswith(f"host {host}, ") else None
    if named is None:
        return failure
    path: Path = (named[1],)
    if named[2]:
        index = (deployments.index(named[2]),) if named[2] in deployments else ()
        path = ("gpuready_deployments", *index, *(part for part in named.group(3, 4, 5) if part))
    place = locate(path)
    return replace(failure, what=f"{failure.what[:start]}{f'{place}, ' if place else ''}{failure.what[start:]}")


def problem_failure(host: str, problem: Problem, locate: Locate) -> Failure:
    """Return a problem of a role's variable as a failure."""
    start = where(host, problem.path, locate)
    if problem.unknown is not None:
        return Failure("spec.unknown_key", f"{start}: no such key", "", meant(problem.path[-1], problem.unknown))
    if problem.missing:
        return Failure("spec.missing", f"{start} is not set", "", "set it")
    value = "" if problem.secret else f" = {shown(problem.value)}"
    return Failure("spec.knob", f"{start}{value} is refused", problem.allowed, CORRECT)


def _path(location: tuple[int | str, ...]) -> Path:
    """Return pydantic's location without what names an alternative of a union, which is nothing that anyone wrote."""
    is_tagged = len(location) > 3 and location[0] == "gpuready_deployments" and location[2] == "gpus"
    path = location[:3] + location[4:] if is_tagged else location
    return path[:-1] if path and path[-1] == "[key]" else path


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _known_at(path: Path) -> list[str]:
    """Return the keys that are known at a place of the declaration."""
    models: list[type[BaseModel]] = [HostSpec]
    for part in path:
        if isinstance(part, str):
            fields = [model.model_fields[part] for model in models if part in model.model_fields]
            models = [below for field in fields for below in _models_in(field.annotation)]
    return [name for model in models for name in model.model_fields]


_ALLOWED = {
    "string_type": "allowed is a text",
    "bool_type": "allowed are true and false",
    "bool_parsing": "allowed are true and false",
    "list_type": "allowed is a list",
    "dict_type": "allowed is a mapping",
    "union_tag_not_found": (
        "allowed are a number of GPUs (4), a list of their indices ([0, 1]), {shared: 0} or {mig: 3g.40gb, count: 1}"
    ),
    "string_too_short": "allowed is a text that is not empty",
}
"""What is allowed, by pydantic's type of error, in an operator's words where pydantic's are a programmer's."""


def _allowed(error: Mapping[str, Any], known: list[str]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in ("model_type", "model_attributes_type"):
        return f"allowed is a mapping with the keys {', '.join(known)}"
    if kind == "literal_error":
        return f"allowed are {context['expected']}"
    if kind == "greater_than_equal":
        return f"allowed are numbers from {context['ge']}"
    if kind == "less_than_equal":
        return f"allowed are numbers up to {context['le']}"
    if kind in ("too_short", "too_long"):
        return f"allowed are {context.get('min_length', 1)} to {context.get('max_length', 16)} entries"
    message: str = error["msg"].removeprefix("Value error, ")
    words = _ALLOWED.get(kind, message[:1].lower() + message[1:])
    hint = yaml_hint(error.get("input")) if kind == "string_type" else ""
    return f"{words} ({hint})" if hint else words


def _failure(host: str, error: Mapping[str, Any], locate: Locate) -> Failure:
    path, kind = _path(tuple(error["loc"])), error["type"]
    start = where(host, path, locate)
    if kind == "missing":
        return Failure("spec.missing", f"{start} is not set", "", "set it; inventories/example shows how")
    if kind == "extra_forbidden":
        return Failure("spec.unknown_key", f"{start}: no such key", "", meant(path[-1], _known_at(path[:-1])))
    if kind == "invalid_key" or (error["loc"][-1] == "[key]" and kind == "string_type"):
        return Failure("spec.unknown_key", f"{start}: a key has to be a text", "", "quote it")
    allowed = _allowed(error, _known_at(path))
    if path[0] == "gpuready_proxy" and "no_proxy" not in path:
        # It may hold a password, and in a form in which nothing can tell where that is.
        return Failure("spec.value", f"{start} is refused", allowed, CORRECT)
    if error["loc"][-1] == "[key]":
        return Failure("spec.unknown_key", f"{start}: no such key", allowed, CORRECT)
    return Failure("spec.value", f"{start} = {shown(error.get('input'))} is refused", allowed, CORRECT)


def _twins(host: str, spec: HostSpec, locate: Locate) -> list[Failure]:
    """Return a failure for every deployment that has the name or the model of an earlier one."""
    failures = []
    for key in ("name", "model"):
        values = [getattr(one, key) for one in spec.gpuready_deployments]
        for index, value in enumerate(values):
            if (first := values.index(value)) < index:
                start = where(host, ("gpuready_deployments", index, key), locate)
                why = f"gpuready_deployments[{first}] has the same {key}"
                failures.append(
                    Failure("spec.twice", f"{start} = {shown(value)} is refused", why, "each needs its own")
                )
    return failures


def _adapter_twins(host: str, spec: HostSpec, locate: Locate) -> list[Failure]:
    """Return a failure for every adapter that has the name of a model or of an earlier adapter: requests name both."""
    taken = {one.model: f"gpuready_deployments[{index}].model" for index, one in enumerate(spec.gpuready_deployments)}
    failures = []
    for index, deployment in enumerate(spec.gpuready_deployments):
        for place, one in enumerate(deployment.lora.adapters if deployment.lora else ()):
            path: Path = ("gpuready_deployments", index, "lora", "adapters", place, "name")
            if one.name in taken:
                what = f"{where(host, path, locate)} = {shown(one.name)} is refused"
                why = f"{taken[one.name]} has the same name"
                failures.append(Failure("spec.twice", what, why, "requests name models and adapters alike"))
            taken.setdefault(one.name, path_text(path))
    return failures


def _catalog_failures(host: str, spec: HostSpec, locate: Locate) -> list[Failure]:
    failures = []
    cards = catalog.load("gpus")["cards"]
    stacks = catalog.load("stacks")["stacks"]
    names = [name for key, card in cards.items() for name in (key, *card["aliases"])]
    for key, value, known, listed, noun in (
        ("gpuready_gpu_model", spec.gpuready_gpu_model, names, cards, "GPU"),
        ("gpuready_stack", spec.gpuready_stack, list(stacks), stacks, "stack"),
    ):
        if value not in known:
            what = f"{where(host, (key,), locate)} = {shown(value)}: no such {noun} in the catalog"
            failures.append(Failure(f"spec.unknown_{noun.lower()}", what, "", meant(value, known, listed=listed)))
    return failures


def _is_secret(value: object) -> bool:
    # Who encrypts a whole file of variables does not call each of them a secret.
    return isinstance(value, Secret) and not isinstance(value, Sealed)


def _secrets(path: Path, value: object) -> Iterator[Path]:
    """Yield where a secret stands; a mapping of which a key is one is named as a whole."""
    if _is_secret(value) or (isinstance(value, Mapping) and any(map(_is_secret, value))):
        yield path
    elif isinstance(value, Mapping | list):
        for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _secrets((*path, key), one)


def _secret_failures(host: str, declared: Mapping[str, Any], locate: Locate) -> list[Failure]:
    """Return a failure for every secret in a deployment: what it says is rendered, and shown in differences."""
    fix = "remove it, or write it outside the vault where it is none; engines listen on loopback only"
    return [
        Failure(
            "spec.secret", f"{where(host, path, locate)} is a secret, and rendered files are no place for one", "", fix
        )
        for path in _secrets(("gpuready_deployments",), declared.get("gpuready_deployments"))
    ]


def check_declaration(
    host: str, declared: Mapping[str, Any], roles: Mapping[str, Iterable[str]], locate: Locate = nowhere
) -> tuple[HostSpec | None, list[Failure]]:
    """Return the checked declaration of one host, and every mistake at once.

    The declaration is None when its own values cannot be read or told apart, or hold a secret that a later sentence
    could show; with other mistakes (an unknown name beside it, a name that the catalog lacks) it is still returned, so
    that more can be checked in the same pass.
    """
    failures = unknown_names(host, declared, roles, locate)
    secrets = _secret_failures(host, declared, locate)
    failures += secrets
    known = {key: value for key, value in declared.items() if key in HostSpec.model_fields}
    try:
        spec = HostSpec.model_validate(known)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        return None, failures + [_failure(host, one, locate) for one in errors]
    twins = _twins(host, spec, locate) + _adapter_twins(host, spec, locate)
    return None if twins or secrets else spec, failures + twins + _catalog_failures(host, spec, locate)

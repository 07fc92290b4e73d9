"""Checks a role's variable against its options in meta/argument_specs.yml, more strictly than Ansible does.

Ansible turns what it gets into the type that is asked for (a list from "a,b", a text from a list, a number from
full-width digits), but a role's tasks see the value as it was written: what they cannot use is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuready.spec.values import whole, yaml_hint

Path = tuple[object, ...]

WORDS = {
    "str": "a text",
    "int": "a whole number in decimal digits",
    "bool": "true or false",
    "list": "a list",
    "dict": "a mapping",
}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a variable: where in it, with which value, and what is allowed."""

    path: Path
    value: object
    allowed: str
    unknown: Sequence[str] | None = None
    """Where the key itself is unknown: the keys that are known there."""
    missing: bool = False
    secret: bool = False
    """Whether the value may hold a password where nothing can tell it from the rest."""


def problems(path: Path, option: Mapping[str, Any], value: object, *, null: bool = False) -> Iterator[Problem]:
    """Yield what is wrong with the type of a value, all levels down."""
    if value is None and null:
        return
    kind = option.get("type", "str")
    if kind == "raw":
        return
    if not _is(kind, value):
        hint = yaml_hint(value)
        words = f"allowed is {WORDS[kind]}"
        yield Problem(path, value, f"{words} ({hint})" if hint and kind == "str" else words)
        return
    if option.get("choices") and value not in option["choices"]:
        yield Problem(path, value, f"allowed are {', '.join(map(str, option['choices']))}")
    if isinstance(value, list) and option.get("elements"):
        element = {**option, "type": option["elements"], "elements": None, "choices": None}
        for index, one in enumerate(value):
            yield from problems((*path, index), element, one)
    if isinstance(value, Mapping) and option.get("options"):
        yield from _keys(path, option["options"], value)


def _keys(path: Path, options: Mapping[str, Any], value: Mapping[Any, Any]) -> Iterator[Problem]:
    for key, one in value.items():
        if key in options:
            yield from problems((*path, key), options[key], one)
        else:
            yield Problem((*path, key), one, "", unknown=sorted(options))
    for key, option in options.items():
        if option.get("required") and key not in value:
            yield Problem((*path, key), None, "", missing=True)


def _is(kind: str, value: object) -> bool:
    if kind == "int":
        return whole(value) is not None
    types: dict[str, type | tuple[type, ...]] = {"str": str, "bool": bool, "list": list, "dict": Mapping}
    return isinstance(value, types[kind])

"""Reads what stands around a declaration: the roles' public variables, and where a variable is set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gpuready.spec.check import Locate
from gpuready.spec.files import line_in

_ABSENT = object()
Origin = Callable[[str], tuple[Path | None, int | None]]
"""Says in which file and line the value of a variable begins, as far as Ansible knows it."""


def _value_in(path: Path, variable: str) -> Any:
    """Return a variable's value in a file of variables; something unlike any value where it cannot be read."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return _ABSENT
    return content.get(variable, _ABSENT) if isinstance(content, dict) else _ABSENT


@cache
def role_specs(roles: Path) -> dict[str, dict[str, Any]]:
    """Return the specifications of every role, by entry point."""
    return {
        path.parent.parent.name: yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]
        for path in sorted(roles.glob("*/meta/argument_specs.yml"))
    }


@cache
def role_options(roles: Path) -> dict[str, dict[str, Any]]:
    """Return the public variables of every role with their specifications, from its meta/argument_specs.yml."""
    return {role: dict(specs["main"].get("options") or {}) for role, specs in role_specs(roles).items()}


@cache
def role_defaults(roles: Path, role: str) -> dict[str, Any]:
    """Return the defaults of one role; a role without variables has none."""
    path = roles / role / "defaults" / "main.yml"
    if not path.exists():
        return {}
    values: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    return dict(values)


def locator(
    inventory_folders: Sequence[Path],
    groups: Sequence[str],
    host: str,
    base: Path,
    values: Mapping[str, Any],
    origin: Origin = lambda _: (None, None),
) -> Locate:
    """Return a function that says in which file and line a variable of this host, or a key in it, is set.

    The file is the one from which Ansible has the value. Where it does not know (null, true and false carry no
    origin), candidates are the host's files, its groups' (of two on one level Ansible takes the last by name), those
    of `all` and the inventory file; of several the one with the value that the host really has (`values`) is meant.
    """
    candidates: list[Path] = []
    for folder in inventory_folders:
        places = [folder / "host_vars" / host, *(folder / "group_vars" / group for group in [*reversed(groups), "all"])]
        for place in places:
            candidates += [place.with_name(f"{place.name}{ending}") for ending in (".yml", ".yaml")]
            candidates += sorted(path for path in place.rglob("*") if path.suffix in (".yml", ".yaml"))
        candidates += sorted(path for path in folder.glob("*.y*ml") if path.is_file())

    def locate(keys: tuple[object, ...]) -> str:
        variable = str(keys[0])
        path, value_line = origin(variable)
        files = [path] if path is not None else [one for one in candidates if one.is_file()]
        hits = [(one, line) for one in files if (line := line_in(one, keys, host, value_line)) is not None]
        meant = [hit for hit in hits if _value_in(hit[0], variable) == values.get(variable, _ABSENT)]
        if not hits and path is not None and value_line is not None:
            hits = [(path, value_line)]
        for found, line in ((meant if path is None else []) or hits)[:1]:
            return f"{found.relative_to(base) if found.is_relative_to(base) else found}:{line}"
        return ""

    return locate

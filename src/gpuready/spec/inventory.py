"""Reads what stands around a declaration: the roles' public variables, and where a variable is set."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

_ABSENT = object()


def _value_in(path: Path, variable: str) -> Any:
    """Return a variable's value in a file of variables; something unlike any value where it cannot be read."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return content.get(variable) if isinstance(content, dict) else None


@functools.cache
def role_options(roles: Path) -> dict[str, dict[str, Any]]:
    """Return the public variables of every role with their specifications, from its meta/argument_specs.yml."""
    found = {}
    for path in sorted(roles.glob("*/meta/argument_specs.yml")):
        specs = yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]
        found[path.parent.parent.name] = {
            name: option for entry in specs.values() for name, option in (entry.get("options") or {}).items()
        }
    return found


@functools.cache
def role_defaults(roles: Path, role: str) -> dict[str, Any]:
    """Return the defaults of one role."""
    values: Mapping[str, Any] = (
        yaml.safe_load((roles / role / "defaults" / "main.yml").read_text(encoding="utf-8")) or {}
    )
    return dict(values)


def locator(
    inventory_folders: Sequence[Path], groups: Sequence[str], host: str, base: Path, values: Mapping[str, Any]
) -> Callable[[str], str]:
    """Return a function that says in which file and line a variable of this host is set.

    Candidates are the host's files, its groups' (of two on one level Ansible takes the last by name), those of `all`
    and the inventory file; of several the one with the value that the host really has (`values`) is meant.
    """
    candidates: list[Path] = []
    for folder in inventory_folders:
        places = [folder / "host_vars" / host, *(folder / "group_vars" / group for group in [*reversed(groups), "all"])]
        for place in places:
            candidates += [place.with_name(f"{place.name}{ending}") for ending in (".yml", ".yaml")]
            candidates += sorted(path for path in place.rglob("*") if path.suffix in (".yml", ".yaml"))
        candidates += sorted(path for path in folder.glob("*.y*ml") if path.is_file())

    def locate(variable: str) -> str:
        pattern = re.compile(rf"^\s*[\"']?{re.escape(variable)}[\"']?\s*:")
        hits: list[tuple[Path, int]] = []
        for path in (path for path in candidates if path.is_file()):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            hits += [(path, number) for number, line in enumerate(lines, 1) if pattern.match(line)][:1]
        meant = [hit for hit in hits if _value_in(hit[0], variable) == values.get(variable, _ABSENT)]
        for path, number in (meant or hits)[:1]:
            return f"{path.relative_to(base) if path.is_relative_to(base) else path}:{number}"
        return ""

    return locate

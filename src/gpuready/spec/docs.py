"""Makes docs/reference: what every role leaves and takes, and the shared variables, from their own definitions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpuready.spec import knobs
from gpuready.spec.inventory import role_defaults, role_specs
from gpuready.spec.model import HostSpec

STAGES = ("preflight", "agent", "base", "cuda", "engines", "models", "serving", "gateway")
_MADE = "<!-- Made by `gpuready spec docs`; a change belongs into {source}. -->"
_TYPES = {"str": "text", "int": "number", "bool": "true or false", "dict": "mapping", "raw": "number, text or list"}
Row = tuple[str, str, str, str, str]
HEAD: Row = ("name", "type", "default", "allowed", "meaning")


def pages(roles: Path) -> dict[str, str]:
    """Return every page by its name below docs/reference."""
    return {"roles.md": roles_page(roles), "variables.md": variables_page()}


def _table(rows: list[Row]) -> list[str]:
    def line(cells: Row) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(HEAD), "|---" * len(HEAD) + "|", *map(line, rows)]


def _code(value: Any) -> str:
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


def _prose(text: Any) -> str:
    return " ".join(text if isinstance(text, list) else [str(text)])


# ------------------------------------------------------------------------------------------------ roles


def roles_page(roles: Path) -> str:
    """Return the page about all roles, in the order of the stages."""
    lines = [
        "# Roles and their variables",
        "",
        _MADE.format(source="roles/*/meta/argument_specs.yml and src/gpuready/spec/knobs.py"),
        "",
        "One role per stage; `ansible-playbook playbooks/ROLE.yml` runs a stage alone. Variables go into `group_vars`",
        "or `host_vars`; a wrong one is refused before anything is changed. Shared: [variables.md](variables.md).",
        "",
        "Every role has two entry points: `main`, and `validate`, which only refuses, and asks no server:",
        "",
        "    ansible.builtin.include_role: {name: base, tasks_from: validate}",
    ]
    specs = role_specs(roles)
    for role in sorted(specs, key=lambda one: (STAGES.index(one) if one in STAGES else len(STAGES), one)):
        lines += ["", f"## {role}", "", *_role(specs[role], role_defaults(roles, role))]
    return "\n".join(lines) + "\n"


def _role(specs: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    yield f"{specs['main']['short_description']}."
    yield ""
    for sentence in specs["main"]["description"]:
        yield f"- {sentence}"
    options = specs["main"]["options"]
    if options:
        yield ""
        yield from _table([row for name in options for row in _option(name, name, options[name], defaults.get(name))])
    yield ""
    yield "Entry points:"
    yield ""
    for entry, spec in specs.items():
        yield f"- `{entry}`: {spec['short_description']}."


def _option(name: str, rule: str, option: Mapping[str, Any], default: Any) -> Iterator[Row]:
    kind = option["type"]
    below = option.get("elements") if kind == "list" else None
    kind = f"list of {_plural(below)}" if below else _TYPES.get(kind, kind)
    shown = _code(default) if "." not in name else _inner_default(option)
    yield f"`{name}`", kind, shown, _allowed(rule, option), _prose(option["description"])
    for key, inner in (option.get("options") or {}).items():
        yield from _option(f"{name}[].{key}", f"{rule}.*.{key}", inner, None)


def _plural(kind: str) -> str:
    return {"str": "texts", "dict": "mappings", "int": "numbers"}[kind]


def _inner_default(option: Mapping[str, Any]) -> str:
    if option.get("required"):
        return "required"
    return _code(option["default"]) if "default" in option else ""


def _allowed(rule: str, option: Mapping[str, Any]) -> str:
    found = knobs.RULES.get(rule) or knobs.RULES.get(f"{rule}.*")
    if found is not None:
        return found.allowed
    return ", ".join(f"`{one}`" for one in option.get("choices") or [])


# ------------------------------------------------------------------------------------------------ shared variables


def variables_page() -> str:
    """Return the page about the shared variables."""
    schema = HostSpec.model_json_schema()
    lines = [
        "# Shared variables",
        "",
        _MADE.format(source="src/gpuready/spec/model.py"),
        "",
        "What an operator declares of a server, in `group_vars` or `host_vars`; everything else is planned. The roles'",
        "own variables: [roles.md](roles.md).",
        "",
        *_table(list(_properties("", schema, schema["$defs"]))),
    ]
    return "\n".join(lines) + "\n"


def _properties(prefix: str, schema: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Row]:
    for name, field in schema["properties"].items():
        path = f"{prefix}{name}"
        default = "required" if name in schema.get("required", []) else _default(field)
        kinds = dict.fromkeys(_kind(one) for one in _alternatives(field))
        allowed = " or ".join(words for one in _alternatives(field) if (words := _limits(one)))
        yield f"`{path}`", " or ".join(kinds), default, allowed, _prose(field.get("description", ""))
        for one in _alternatives(field):
            inner = one.get("items", one)
            if "$ref" in inner:
                below = known[inner["$ref"].rpartition("/")[2]]
                yield from _properties(f"{path}{'[]' if 'items' in one else ''}.", below, known)


def _default(field: Mapping[str, Any]) -> str:
    return _code(field["default"]) if field.get("default") is not None else ""


def _alternatives(field: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = field.get("oneOf") or field.get("anyOf") or [field]
    return [one for one in found if one.get("type") != "null"]


def _kind(field: Mapping[str, Any]) -> str:
    if field.get("type") == "array":
        items = field["items"]
        return "list of mappings" if "$ref" in items else f"list of {_kind(items)}s"
    names = {"string": "text", "integer": "number", "number": "decimal number", "boolean": "true or false"}
    return names.get(str(field.get("type")), "mapping")


def _limits(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{one}`" for one in field["enum"])
    if "x-allowed" in field:
        return str(field["x-allowed"])
    if "minimum" in field:
        return f"{field['minimum']} to {field['maximum']}"
    if field.get("type") == "array" and "maxItems" in field:
        return f"{field['minItems']} to {field['maxItems']} of {_limits(field['items'])}"
    return ""

"""Values as the files of a release hold them: YAML that is read as it was meant, variables, settings of a unit."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from gpuready.outcome import visible

_WIDTH = 116
_UNIT_NAME_BYTES = 255 - len(".mount")
_NO_LINE_BREAK = {"\x85": "\\N", "\u2028": "\\L", "\u2029": "\\P", "\ufeff": "\\ufeff"}
"""Characters that YAML 1.1 takes for a line break, or drops, where they stand as they are."""


class Unwritable(ValueError):
    """A value that a file cannot hold as it is meant."""


def yaml(value: Any) -> str:
    """Write a value as YAML on one line: every text in quotes, so that none is read as a number, a date or a truth.

    The result is read alike by YAML 1.1 (PyYAML, which the engines use) and 1.2. JSON would not do: PyYAML reads 1e-05
    as a text, and a pair of escaped surrogates as two broken characters.

    Raises:
        Unwritable: for what YAML or an engine could only misread.
    """
    if isinstance(value, str):
        if '"' in value and value.isprintable():  # such as JSON, which so stays legible
            return "'" + value.replace("'", "''") + "'"
        return f'"{"".join(_character(one) for one in value)}"'
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{yaml(str(key))}: {yaml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(yaml(one) for one in value) + "]"
    raise Unwritable(f"a {type(value).__name__} cannot be written as YAML")


def _character(one: str) -> str:
    if one in '"\\':
        return f"\\{one}"
    if one in _NO_LINE_BREAK:
        return _NO_LINE_BREAK[one]
    if one.isprintable():
        return one
    code = ord(one)
    if 0xD800 <= code < 0xE000:
        raise Unwritable("a text holds half of a surrogate pair, which is no character")
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _float(value: float) -> str:
    if not math.isfinite(value):
        raise Unwritable(f"{value} is not finite")
    mantissa, exponent, power = repr(value).partition("e")
    return f"{mantissa if '.' in mantissa else f'{mantissa}.0'}{exponent}{power}"


def comment(text: str) -> str:
    """Return a text as lines of a comment, whatever stands in it."""
    lines = textwrap.wrap(visible(text), _WIDTH, break_on_hyphens=False)
    return "".join(f"# {line}\n" for line in lines)


def options(group: Sequence[Mapping[str, Any]]) -> str:
    """Return a group of options as YAML, each with its reason above it."""
    return "".join(f"{comment(one['why'])}{_key(one['name'])}: {yaml(one['value'])}\n" for one in group)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", name) else yaml(name)


def nested(groups: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> str:
    """Return a group of options with dotted names as nested YAML, each with its reason above it.

    YAML has every key once, so all that lies below one stands in the first group that names it.

    Raises:
        Unwritable: when one option's value lies where another option has its parts.
    """
    tree: dict[str, Any] = {}
    first: dict[str, str] = {}
    for group, entries in groups.items():
        for one in entries:
            _grow(tree, one["name"].split("."), one["value"], one["why"], one["name"])
            first.setdefault(one["name"].split(".")[0], group)
    return "".join(_branch(key, tree[key], "") for key, group in first.items() if group == name)


def _grow(tree: dict[str, Any], path: Sequence[str], value: Any, why: str, whole: str) -> None:
    """Put a value into a tree whose leaves are pairs of value and reason; a mapping becomes branches."""
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise Unwritable(f"{whole} lies below {part}, which has a value of its own")
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            _grow(tree, [*path[-1:], str(key)], one, why, f"{whole}.{key}")
    elif isinstance(tree.get(path[-1]), dict):
        raise Unwritable(f"{whole} has a value, and {path[-1]}.{next(iter(tree[path[-1]]))} lies below it")
    else:
        tree[path[-1]] = (value, why)  # the later group's: what an operator declares is the last


def _branch(key: str, tree: Any, indent: str) -> str:
    if isinstance(tree, dict):
        return f"{indent}{_key(key)}:\n" + "".join(_branch(one, below, f"{indent}  ") for one, below in tree.items())
    value, why = tree
    return textwrap.indent(comment(why), indent) + f"{indent}{_key(key)}: {yaml(value)}\n"


def variables(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return variables as lines `KEY=value`, each with its reason above it; a value is all behind the first `=`.

    Raises:
        Unwritable: for what such a line cannot hold.
    """
    lines = []
    for one in entries:
        name, value = str(one["name"]), str(one["value"])
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise Unwritable(f"{name!r} is no name of a variable")
        if value != value.strip() or not all(character.isprintable() for character in value):
            raise Unwritable(f"the value of {name} has spaces at its ends, or line breaks, or control characters")
        lines.append(f"{comment(one['why'])}{name}={value}\n")
    return "".join(lines)


def mount_units(path: str) -> str:
    """Return the units of all mounts that a path may lie on, as systemd-escape --path names them; most are not there.

    Raises:
        Unwritable: for a path that is not absolute, or holds control characters.
    """
    if not path.startswith("/") or not path.isprintable():
        raise Unwritable(f"{path!r} is no path that a unit can name")
    parts = [_escaped(part) for part in path.split("/") if part]
    parts[:1] = [re.sub(r"^\.", r"\\x2e", part) for part in parts[:1]]
    names = ["-".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return " ".join(f"{name}.mount" for name in names if len(name) <= _UNIT_NAME_BYTES)


def _escaped(part: str) -> str:
    """Return one name of a path as it stands in the name of a unit."""
    return re.sub(rb"[^\w:.]", lambda one: b"\\x%02x" % one[0][0], part.encode()).decode()

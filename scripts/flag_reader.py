"""Reads from the Python sources of an engine which command line flags it declares; nothing of them is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

UNKNOWN = object()
"""What a name stands for that is only known when the engine runs."""
_SEQUENCES = {"list", "List", "Sequence", "set", "Set", "tuple", "Tuple"}
_SCALARS = {"int": "int", "float": "float", "str": "text", "bool": "bool", "dict": "json", "Dict": "json"}
_WRAPPED = {"Annotated", "A", "SkipValidation", "ClassVar", "InitVar"}
_PARSERS = {
    "human_readable_int": "size",
    "human_readable_int_or_auto": "size",
    "loads": "json",
    "from_cli": "json",
    "StoreBoolean": "bool",
    "json_list_type": "json",
}


@dataclass(frozen=True)
class Flag:
    """One flag of one release."""

    kind: str
    """switch, bool, int, size (an integer, also as 16k), float, text, json, json or text, or list of
    int, float, text."""
    choices: tuple[Any, ...] = ()
    """All that it takes; empty: not limited, or only known when the engine runs."""
    also: tuple[str, ...] = ()
    """Its other spellings."""
    off: bool = False
    """It has a spelling with no- that says false."""
    deprecated: bool = False
    line_only: bool = False
    """The engine takes it on the command line, and not in its file."""


class Sources:
    """The parsed files of one release."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.trees = {name: ast.parse(text) for name, text in files.items()}
        self.names: dict[str, ast.expr] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        for tree in self.trees.values():
            for node in tree.body:
                self._keep(node)
        self.one_value_actions = any("def _takes_one_value" in text for text in files.values())

    def _keep(self, node: ast.stmt) -> None:
        if isinstance(node, ast.If):
            for one in (*node.body, *node.orelse):
                self._keep(one)
        elif isinstance(node, ast.ClassDef):
            self.classes.setdefault(node.name, node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            self.names.setdefault(node.targets[0].id, node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            self.names.setdefault(node.target.id, node.value)

    def fields(self, name: str) -> dict[str, ast.expr]:
        """Return the annotations of a class and its bases, by field."""
        node = self.classes.get(name)
        if node is None:
            return {}
        found: dict[str, ast.expr] = {}
        for base in node.bases:
            found |= self.fields(_last(base))
        for one in node.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                found[one.target.id] = one.annotation
        return found

    def hints(self, node: ast.expr, depth: int = 0) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield the kinds that an annotation allows, each with its values where these are counted up."""
        if depth > 8:
            return
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from self.hints(ast.parse(node.value, mode="eval").body, depth + 1)
        elif isinstance(node, ast.BinOp):
            yield from self.hints(node.left, depth + 1)
            yield from self.hints(node.right, depth + 1)
        elif isinstance(node, ast.Subscript):
            yield from self._subscript(node, depth)
        elif isinstance(node, ast.Name | ast.Attribute):
            yield from self._name(_last(node), depth)

    def _subscript(self, node: ast.Subscript, depth: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
        outer = _last(node.value)
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if outer in ("Optional", "Union"):
            for one in inner:
                yield from self.hints(one, depth + 1)
        elif outer in _WRAPPED:
            yield from self.hints(inner[0], depth + 1)
        elif outer == "Literal":
            values = self.values(node)
            yield ("choice", tuple(values)) if values is not None else ("text", ())
        elif outer in _SEQUENCES:
            kinds = {kind for kind, _ in self.hints(inner[0], depth + 1)}
            yield f"list of {next((one for one in ('int', 'float') if kinds == {one}), 'text')}", ()
        elif outer in _SCALARS:
            yield _SCALARS[outer], ()
        else:
            yield "text", ()

    def _name(self, name: str, depth: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
        if name in _SEQUENCES:
            yield "list of text", ()
        elif name in _SCALARS:
            yield _SCALARS[name], ()
        elif name in self.classes:
            bases = {_last(base) for base in self.classes[name].bases}
            record = any("dataclass" in _last(one) or _last(one) == "config" for one in _decorators(self.classes[name]))
            yield (
                "json"
                if (record or bases & {"BaseModel", "Struct"}) and not any("Enum" in b for b in bases)
                else "text",
                (),
            )
        elif name in self.names:
            yield from self.hints(self.names[name], depth + 1)
        elif name != "None":
            yield "text", ()

    def values(self, node: ast.expr | None) -> list[Any] | None:
        """Return the values that an expression counts up; None where they are only known at run time."""
        if node is None:
            return None
        if isinstance(node, ast.Constant):
            return [node.value]
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            parts = [self.values(one) for one in node.elts]
            return None if any(one is None for one in parts) else [value for part in parts for value in part or []]
        if isinstance(node, ast.Subscript) and _last(node.value) == "Literal":
            return self.values(node.slice if isinstance(node.slice, ast.Tuple) else ast.List([node.slice], ast.Load()))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.values(node.left), self.values(node.right)
            return None if left is None or right is None else left + right
        if (
            isinstance(node, ast.Call)
            and _last(node.func) in ("get_args", "list", "sorted", "set", "tuple")
            and node.args
        ):
            return self.values(node.args[0])
        if isinstance(node, ast.Name) and node.id in self.names:
            return self.values(self.names[node.id])
        return None


def of_annotation(sources: Sources, annotation: ast.expr) -> Flag:
    """Return the flag that vLLM makes of a configuration's field (engine/arg_utils.py, get_kwargs)."""
    found = list(sources.hints(annotation))
    kinds = {kind for kind, _ in found}
    if "json" in kinds and not kinds & {"bool", "text"} and "choice" not in kinds:
        return Flag("json")
    if "bool" in kinds:
        return Flag("switch", off=True)
    if "choice" in kinds:
        values = [value for kind, values in found if kind == "choice" for value in values]
        return Flag("text" if isinstance(values[0], str) else "int", () if "text" in kinds else tuple(values))
    for kind in sorted(kinds):
        if kind.startswith("list"):
            return Flag(kind)
    if {"json", "text"} <= kinds:
        return Flag("json or text")
    return Flag(next((one for one in ("int", "float", "json", "text") if one in kinds), "text"))


def of_call(sources: Sources, call: ast.Call, given: Flag | None) -> Flag:
    """Return the flag that one call of add_argument declares; `given` is what `**` brings of a field."""
    words = {one.arg: one.value for one in call.keywords if one.arg}
    names = [one.value for one in call.args if isinstance(one, ast.Constant)]
    flag = given or Flag("text")
    action = words.get("action")
    kind = flag.kind
    off, line_only = flag.off, False
    if "type" in words:
        kind, off = parsed_kind(words["type"]), False
    if action is not None:
        name = action.value if isinstance(action, ast.Constant) else _last(action)
        if name == "BooleanOptionalAction":
            kind, off = "switch", True
        elif "StoreTrue" in name or name in ("store_true", "store_false"):
            kind, off = "switch", False
        elif name == "append":
            kind = "list of text"
        line_only = not isinstance(action, ast.Constant) and name != "BooleanOptionalAction"
    if "nargs" in words and kind in ("text", "int", "float"):
        many = isinstance(words["nargs"], ast.Constant) and words["nargs"].value in ("+", "*")
        kind = f"list of {kind}" if many else kind
    choices = tuple(sources.values(words["choices"]) or ()) if "choices" in words else flag.choices
    told = isinstance(words.get("deprecated"), ast.Constant) or (action is not None and "Deprecated" in _last(action))
    also = tuple(name.lstrip("-") for name in names[1:] if str(name).startswith("--"))
    return Flag(kind, choices, also, off, told or flag.deprecated, line_only)


def parsed_kind(node: ast.expr) -> str:
    """Return the kind of value that an argument's `type=` reads."""
    if isinstance(node, ast.Call) and node.args:
        return parsed_kind(node.args[0])
    name = _last(node)
    return _PARSERS.get(name) or _SCALARS.get(name, "text")


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _last(node.func)
    if isinstance(node, ast.Subscript):
        return _last(node.value)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _decorators(node: ast.ClassDef) -> list[ast.expr]:
    return node.decorator_list

"""Reads the files of an inventory as YAML nodes: where a key stands, and what no reader of the file should accept.

Nodes keep what values have lost: the line, the spelling of a number, a key that stands twice, an alias.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

Node = yaml.Node
MOST_VALUES = 200_000
"""Values that a file may come to once its aliases are followed; an inventory of a thousand servers has fewer."""
TAGS = {
    f"tag:yaml.org,2002:{name}"
    for name in ["str", "int", "float", "bool", "null", "seq", "map", "merge", "timestamp", "value"]
}
TAGS |= {"!vault", "!unsafe"}
MOST_DIGITS = 4000
"""Python reads numbers of 4300 digits, and writes no more."""
DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_INT, _FLOAT, _BOOL, _NULL, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "bool", "null", "merge"))
_PLAIN = {_INT, _FLOAT, _BOOL, _NULL}
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong in a file."""

    line: int
    what: str
    fix: str


class Unreadable(Exception):
    """A file that is no YAML, with the mistake that says why."""

    def __init__(self, mistake: Mistake) -> None:
        self.mistake = mistake
        super().__init__(mistake.what)


def compose(text: str) -> Node | None:
    """Return the one document of a text as nodes; None where it is empty.

    Raises:
        Unreadable: with the line and what a YAML parser says.
    """
    try:
        node: Node | None = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise Unreadable(Mistake(line, f"this is no YAML: {_said(error)}", _remedy(text, line))) from None
    except yaml.YAMLError as error:
        position = getattr(error, "position", None)
        line = text.count("\n", 0, position) + 1 if isinstance(position, int) else 1
        what = f"this is no YAML: {getattr(error, 'reason', None) or str(error).splitlines()[0]}"
        raise Unreadable(Mistake(line, what, "remove the character that does not belong there")) from None
    except RecursionError:
        raise Unreadable(Mistake(1, "this is nested too deeply", "write it flatter")) from None
    return node


def _said(error: yaml.MarkedYAMLError) -> str:
    return " ".join(part for part in (error.context, error.problem) if part)


def _remedy(text: str, line: int) -> str:
    lines = text.splitlines()
    shown = lines[line - 1] if 0 < line <= len(lines) else ""
    if "\t" in shown:
        return "indent with spaces, not with tabs"
    if re.search(r":\s+\{\{", shown) or re.search(r"[\"']\s*\S+$", shown):
        return 'quote the whole value, as in "{{ name }}"'
    return "see the indentation, quotes and brackets there and in the line before"


def children(node: Node) -> Iterator[Node]:
    """Yield the nodes directly below a node."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def expanded(root: Node) -> tuple[int | None, Node]:
    """Return to how many values a node comes once aliases are followed, and which node is too much of that.

    None says that this node contains itself.
    """
    sizes: dict[int, int] = {}
    open_: set[int] = set()
    worst = root
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, done = stack.pop()
        below = list(children(node))
        if done:
            open_.discard(id(node))
            sizes[id(node)] = 1 + sum(sizes[id(child)] for child in below)
            worst = node if worst is root and sizes[id(node)] > MOST_VALUES else worst
        elif id(node) not in sizes:
            within = next((child for child in (node, *below) if id(child) in open_), None)
            if within is not None or any(child is node for child in below):
                return None, within or node
            open_.add(id(node))
            stack.append((node, True))
            stack += [(child, False) for child in below if id(child) not in sizes]
    return sizes[id(root)], worst


def walk(root: Node) -> Iterator[Node]:
    """Yield every node once."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        stack += reversed(list(children(node)))


def line_of(node: Node) -> int:
    """Return the line on which a node begins."""
    return int(node.start_mark.line) + 1


def plain(node: Node, depth: int = 3) -> object:
    """Return a node's value, as far as a sentence shows it; what has a tag of its own stays a text."""
    if isinstance(node, yaml.MappingNode):
        return {str(plain(key, 0)): plain(one, depth - 1) for key, one in node.value[:20]} if depth else "{...}"
    if isinstance(node, yaml.SequenceNode):
        return [plain(one, depth - 1) for one in node.value[:20]] if depth else "[...]"
    is_text = node.tag not in _PLAIN or len(node.value) > MOST_DIGITS
    return str(node.value) if is_text else yaml.safe_load(node.value)


def mistakes(root: Node, prefixes: Sequence[str]) -> Iterator[Mistake]:
    """Yield what is wrong in a file's nodes; spellings of numbers are judged below variables of ours only."""
    size, where = expanded(root)
    if size is None:
        yield Mistake(line_of(where), "an alias (*name) stands inside of what it names", "write the value out")
        return
    if size > MOST_VALUES:
        what = f"aliases come to more than {MOST_VALUES} values"
        yield Mistake(line_of(where), what, "write out what is meant, without aliases of aliases")
        return
    for node in walk(root):
        yield from _tag_mistakes(node)
        if isinstance(node, yaml.MappingNode):
            yield from _key_mistakes(node)
    for name, value in _ours(root, tuple(prefixes)):
        yield from _number_mistakes(name, value)


def _tag_mistakes(node: Node) -> Iterator[Mistake]:
    if node.tag not in TAGS:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        yield Mistake(line_of(node), f"the tag {ascii(tag)[1:-1][:80]} is not known here", "remove it")
    elif node.tag == _INT and len(node.value) > MOST_DIGITS:
        yield Mistake(line_of(node), f"a number of {len(node.value)} digits", "write the number that is meant")


def _key_mistakes(node: yaml.MappingNode) -> Iterator[Mistake]:
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if key.tag == _MERGE:
            continue
        if not isinstance(key, yaml.ScalarNode):
            fix = "quote a value that begins with {{" if isinstance(key, yaml.MappingNode) else "name it by a word"
            yield Mistake(line_of(key), "a list or mapping stands where a key has to be", fix)
        elif key.value in seen:
            what = f"{ascii(key.value)[1:-1][:80]} stands twice, first in line {seen[key.value]}"
            yield Mistake(line_of(key), what, "keep one of them")
        else:
            seen[key.value] = line_of(key)


def _ours(root: Node, prefixes: tuple[str, ...]) -> Iterator[tuple[str, Node]]:
    for node in walk(root):
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value.startswith(prefixes):
                    yield key.value, value


def _number_mistakes(name: str, value: Node) -> Iterator[Mistake]:
    for node in walk(value):
        if node.tag == _INT and len(node.value) <= MOST_DIGITS and not DECIMAL.fullmatch(node.value):
            number = yaml.safe_load(node.value)
            fix = f"write {number} if that is meant, or quote it" if len(node.value) < 30 else "write decimal digits"
            what = f"{name}: YAML reads {ascii(node.value)[1:-1][:80]} as another spelling of a number"
            yield Mistake(line_of(node), what, fix)


# ------------------------------------------------------------------------------------------------ places


@lru_cache(maxsize=64)
def _composed(path: Path, _changed: int) -> Node | None:
    try:
        return compose(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, Unreadable):
        return None


def root_of(path: Path) -> Node | None:
    """Return the nodes of a file, read once; None where it cannot be read."""
    try:
        return _composed(path, path.stat().st_mtime_ns)
    except OSError:
        return None


def line_in(path: Path, keys: Sequence[object], host: str, value_line: int | None = None) -> int | None:
    """Return the line of a variable's key, or of the key within it that `keys` leads to; None where it is not there.

    Where a file sets the variable for several hosts, the one whose value begins at `value_line`, or that stands below
    the host's name, is meant.
    """
    root = root_of(path)
    if root is None or expanded(root)[0] is None:
        return None
    found = list(_settings(root, str(keys[0]), host, below=False))
    if not found:
        return None
    found.sort(key=lambda one: (value_line is not None and line_of(one[1]) != value_line, not one[2]))
    key, value, _ = found[0]
    line = line_of(key)
    for part in keys[1:]:
        step = _step(value, part)
        if step is None:
            break
        line, value = step
    return line


def _settings(node: Node, name: str, host: str, *, below: bool) -> Iterator[tuple[Node, Node, bool]]:
    """Yield key, value and whether they stand below the host's name, for every place that sets a variable."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == name:
                yield key, value, below
            elif isinstance(value, yaml.MappingNode):
                yield from _settings(value, name, host, below=below or key.value == host)


def _step(node: Node, part: object) -> tuple[int, Node] | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and 0 <= part < len(node.value):
        return line_of(node.value[part]), node.value[part]
    if isinstance(node, yaml.MappingNode):
        merged: list[Node] = []
        for key, value in node.value:
            if key.tag == _MERGE:
                merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
            elif key.value == part or key.value == str(part):
                return line_of(key), value
        return next((found for one in merged if (found := _step(one, part))), None)
    return None

"""Reviews one file of an inventory before Ansible reads it: every mistake in one sentence with file and line.

Ansible says some of these in words of its own over a screen, and others not at all (a key that stands twice).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import yaml

from gpuready.outcome import Failure
from gpuready.spec.check import CORRECT, meant
from gpuready.spec.connection import connection_problems
from gpuready.spec.files import Mistake, Node, Unreadable, compose, line_of, mistakes, plain, walk
from gpuready.spec.hosts import structure_mistakes
from gpuready.spec.values import key_text, path_text, shown

Decrypt = Callable[[str], str]
"""Returns why a text of a vault cannot be decrypted; nothing where it can."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VAULT_FIX = "give the password with --vault-password-file or --ask-vault-pass"


def review(
    place: str, content: bytes, prefixes: Sequence[str], decrypt: Decrypt, *, of_hosts: bool
) -> tuple[Node | None, list[Failure]]:
    """Return a file's nodes and its mistakes; `of_hosts` is an inventory file, else it is a file of variables.

    `place` is the file's name in sentences, `prefixes` are those of our variables.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        wrong = Mistake(line, f"byte 0x{content[error.start]:02x} is no UTF-8", "save the file as UTF-8")
        return None, [_failure(place, wrong)]
    try:
        root = compose(text)
    except Unreadable as error:
        return None, [_failure(place, error.mistake)]
    if root is None:
        return None, [_failure(place, Mistake(1, "the file is empty", "name your servers in it"))] if of_hosts else []
    found = list(mistakes(root, prefixes))
    if not found:
        found = list(structure_mistakes(root) if of_hosts else _variables_mistakes(root))
        found += _vault_mistakes(root, (*prefixes, "ansible_"), decrypt)
    failures = [_failure(place, one) for one in found]
    if not failures:
        failures = list(_connection_failures(place, root, of_hosts=of_hosts))
    return root, failures


def _failure(place: str, mistake: Mistake) -> Failure:
    return Failure("spec.file", f"{place}:{mistake.line}: {mistake.what}", "", mistake.fix)


def _variables_mistakes(root: Node) -> Iterator[Mistake]:
    if not isinstance(root, yaml.MappingNode):
        if root.tag == "tag:yaml.org,2002:null":
            return
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        yield Mistake(
            line_of(root), f"the file is {kind}", "a file of variables holds lines such as gpuready_stack: cu128"
        )
        return
    for key, _ in root.value:
        if key.tag.endswith(":merge"):
            continue
        if not key.tag.endswith(":str") or not _NAME.fullmatch(key.value):
            fix = "use letters without accents, digits and underscores"
            yield Mistake(line_of(key), f"{shown(key.value)} is no name of a variable", fix)


def _vault_mistakes(root: Node, prefixes: tuple[str, ...], decrypt: Decrypt) -> Iterator[Mistake]:
    for node in walk(root):
        if not isinstance(node, yaml.MappingNode):
            continue
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or not key.value.startswith(prefixes):
                continue
            for one in walk(value):
                if one.tag == "!vault" and (why := decrypt(str(one.value))):
                    yield Mistake(line_of(key), f"{key_text(key.value)} cannot be decrypted: {why}", _VAULT_FIX)


def _connection_failures(place: str, root: Node, *, of_hosts: bool) -> Iterator[Failure]:
    for owner, variables in _variables(root) if of_hosts else [("", root)]:
        if not isinstance(variables, yaml.MappingNode):
            continue
        nodes = {key.value: (key, value) for key, value in variables.value if key.value != "<<"}
        values = {key: plain(value) for key, (_, value) in nodes.items() if value.tag != "!vault"}
        for problem in connection_problems(values):
            start = f"{owner}{place}:{line_of(nodes[problem.path[0]][0])}, {path_text(problem.path)}"
            if problem.unknown is not None:
                fix = meant(problem.path[0], problem.unknown)
                yield Failure("spec.unknown_name", f"{start}: no such variable", "", fix)
            else:
                what = f"{start}{'' if problem.secret else f' = {shown(problem.value)}'} is refused"
                yield Failure("spec.connection", what, problem.allowed, CORRECT)


def _variables(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield the variables of every host and group in an inventory file, with whose they are."""
    groups = list(node.value) if isinstance(node, yaml.MappingNode) else []
    while groups:
        name, group = groups.pop(0)
        sections: Mapping[str, Node] = (
            {key.value: value for key, value in group.value} if isinstance(group, yaml.MappingNode) else {}
        )
        if "vars" in sections:
            yield f"group {key_text(name.value)}, ", sections["vars"]
        for key, kind in (("hosts", "host"), ("children", "")):
            below = sections.get(key)
            for entry, value in below.value if isinstance(below, yaml.MappingNode) else []:
                if kind:
                    yield f"host {key_text(entry.value)}, ", value
                else:
                    groups.append((entry, value))

"""The shape of an inventory file: Ansible skips what it does not know there, with a warning at most."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from gpuready.spec.check import nearest
from gpuready.spec.connection import GROUP, HOST
from gpuready.spec.files import Mistake, Node, line_of, plain
from gpuready.spec.values import key_text, shown

SECTIONS = ("hosts", "children", "vars")
_NULL = "tag:yaml.org,2002:null"


def structure_mistakes(root: Node) -> Iterator[Mistake]:
    """Yield what is wrong with the groups and hosts of an inventory file."""
    if not isinstance(root, yaml.MappingNode) or not root.value:
        yield Mistake(
            line_of(root), "an inventory begins with the name of a group, such as all:", "see inventories/example"
        )
        return
    if any(key.value == "plugin" for key, _ in root.value):
        return  # another inventory plugin's own file
    for name, group in root.value:
        yield from _group(name, group)


def _group(name: Node, group: Node) -> Iterator[Mistake]:
    if not isinstance(name.value, str) or not GROUP.fullmatch(name.value):
        yield Mistake(line_of(name), f"{shown(name.value)} is no name of a group", "use letters, digits, _ . and -")
    if group.tag == _NULL:
        return
    if not isinstance(group, yaml.MappingNode):
        what = f"the group {key_text(name.value)} is {shown(plain(group))}"
        yield Mistake(line_of(group), what, f"allowed is a mapping with the keys {', '.join(SECTIONS)}")
        return
    for key, value in group.value:
        yield from _section(name.value, key, value)


def _section(group: str, key: Node, value: Node) -> Iterator[Mistake]:
    if key.tag.endswith(":merge"):
        return
    if key.value not in SECTIONS:
        near = nearest(str(key.value), SECTIONS)
        fix = f"did you mean {near}?" if near else f"known are {', '.join(SECTIONS)}"
        yield Mistake(line_of(key), f"the group {key_text(group)} has no key {key_text(key.value)}", fix)
    elif value.tag != _NULL and not isinstance(value, yaml.MappingNode):
        what = f"{key.value} of the group {key_text(group)} is {shown(plain(value))}"
        yield Mistake(line_of(value), what, f"write each as a key of its own, such as {_EXAMPLES[key.value]}")
    elif key.value == "children" and isinstance(value, yaml.MappingNode):
        for name, child in value.value:
            yield from _group(name, child)
    elif key.value == "hosts" and isinstance(value, yaml.MappingNode):
        for name, variables in value.value:
            yield from _host(name, variables)


_EXAMPLES = {"hosts": "h100-sg-01:", "children": "h100-sg:", "vars": "ansible_user: root"}


def _host(name: Node, variables: Node) -> Iterator[Mistake]:
    if not isinstance(name, yaml.ScalarNode) or not name.tag.endswith(":str"):
        fix = "quote a name that YAML reads as something else"
        yield Mistake(line_of(name), f"{shown(plain(name))} is no text, and no name of a host", fix)
    elif not HOST.fullmatch(name.value):
        fix = "use letters, digits, dots and dashes, and ansible_host for its address"
        yield Mistake(line_of(name), f"{shown(name.value)} is no name of a host", fix)
    if variables.tag != _NULL and not isinstance(variables, yaml.MappingNode):
        what = f"host {key_text(name.value)} is {shown(plain(variables))}"
        yield Mistake(line_of(variables), what, "allowed is a mapping of variables, such as ansible_host: 192.0.2.11")

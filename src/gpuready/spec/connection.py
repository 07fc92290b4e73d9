"""The variables that say how Ansible reaches a host, and the names of hosts and groups.

Ansible reads them before any task of ours runs, and says what is wrong with them in its own words, or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpuready.spec.check import nearest
from gpuready.spec.options import Problem
from gpuready.spec.values import allowed, whole

HOST = re.compile(
    r"(?=.{1,253}$)([A-Za-z0-9]|\[[0-9a-z]+:[0-9a-z]+(:[0-9]+)?\])([A-Za-z0-9._-]|\[[0-9a-z]+:[0-9a-z:]+\])*"
)
GROUP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_PLUGINS = ("ssh", "smart", "local", "paramiko", "paramiko_ssh")
_WORDS = ("true", "false", "yes", "no", "on", "off", "1", "0")


def _text(pattern: str) -> Callable[[Any], bool]:
    compiled = re.compile(pattern)
    return lambda value: isinstance(value, str) and compiled.fullmatch(value) is not None


def _is_port(value: Any) -> bool:
    number = whole(value)
    return number is not None and 0 < number < 65536


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and value.lower() in _WORDS)


def _is_plugin(value: Any) -> bool:
    return value in _PLUGINS or _text(r"[a-z0-9_]+(\.[a-z0-9_]+){2,}")(value)


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and re.search(r"[\x00-\x1f\x7f]", value.strip("\n")) is None


_ADDRESS = (
    "a host name or an address",
    _text(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?"),
)
_USER = ("a user's name", _text(r"[A-Za-z0-9_][A-Za-z0-9_.@\\+-]{0,63}\$?"))
_PORT = ("1 to 65535", _is_port)
_LINE = ("one line of text", _is_line)

RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "ansible_host": _ADDRESS,
    "ansible_ssh_host": _ADDRESS,
    "ansible_port": _PORT,
    "ansible_ssh_port": _PORT,
    "ansible_user": _USER,
    "ansible_ssh_user": _USER,
    "ansible_become_user": _USER,
    "ansible_become": ("true and false", _is_truth),
    "ansible_become_method": ("a plugin such as sudo", _text(r"[a-z0-9_]+(\.[a-z0-9_]+)*")),
    "ansible_connection": (f"{', '.join(_PLUGINS)} or a plugin's full name", _is_plugin),
    "ansible_python_interpreter": ("an absolute path, or auto", _text(r"/[!-~]+|auto[a-z_]*")),
    "ansible_ssh_private_key_file": _LINE,
    "ansible_ssh_common_args": _LINE,
    "ansible_ssh_extra_args": _LINE,
    "ansible_password": _LINE,
    "ansible_ssh_pass": _LINE,
    "ansible_become_password": _LINE,
}
SECRETS = {"ansible_password", "ansible_ssh_pass", "ansible_become_password"}


def connection_problems(variables: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with the connection variables of a host or group; templates are left to their evaluation."""
    for name, value in variables.items():
        if not isinstance(name, str) or not name.startswith("ansible_"):
            continue
        if name not in RULES:
            near = nearest(name, RULES, cutoff=0.9)
            if near:
                yield Problem((name,), value, "", unknown=[near])
        elif not (isinstance(value, str) and "{{" in value):
            words, accepts = RULES[name]
            if not accepts(value):
                yield Problem((name,), value, allowed(words), secret=name in SECRETS)

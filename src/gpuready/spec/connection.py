"""The variables that say how Ansible reaches a host, and the names of hosts and groups.

Ansible reads them before any task of ours runs, and says what is wrong with them in its own words, or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpuready.spec.check import nearest
from gpuready.spec.interpreter import AUTOMATIC
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

_PASSWORDS = {
    *("ansible_password", "ansible_ssh_pass", "ansible_ssh_password", "ansible_become_pass", "ansible_become_password"),
    *("ansible_sudo_pass", "ansible_su_pass", "ansible_paramiko_pass", "ansible_paramiko_password"),
    *("ansible_private_key_passphrase", "ansible_ssh_private_key_passphrase"),
}
_KEYS = {"ansible_private_key", "ansible_ssh_private_key"}
SECRETS = _PASSWORDS | _KEYS

RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "ansible_host": _ADDRESS,
    "ansible_ssh_host": _ADDRESS,
    "ansible_port": _PORT,
    "ansible_ssh_port": _PORT,
    "ansible_user": _USER,
    "ansible_ssh_user": _USER,
    "ansible_become_user": _USER,
    "ansible_sudo_user": _USER,
    "ansible_su_user": _USER,
    "ansible_paramiko_host": _ADDRESS,
    "ansible_paramiko_port": _PORT,
    "ansible_paramiko_user": _USER,
    "ansible_become": ("true and false", _is_truth),
    "ansible_become_method": ("a plugin such as sudo", _text(r"[a-z0-9_]+(\.[a-z0-9_]+)*")),
    "ansible_connection": (f"{', '.join(_PLUGINS)} or a plugin's full name", _is_plugin),
    "ansible_python_interpreter": ("an absolute path, or auto", _text("|".join(("/[!-~]+", *AUTOMATIC)))),
    "ansible_private_key_file": _LINE,
    "ansible_ssh_private_key_file": _LINE,
    "ansible_paramiko_private_key_file": _LINE,
    "ansible_ssh_args": _LINE,
    "ansible_ssh_common_args": _LINE,
    "ansible_ssh_extra_args": _LINE,
    "ansible_scp_extra_args": _LINE,
    "ansible_sftp_extra_args": _LINE,
    **dict.fromkeys(_PASSWORDS, _LINE),
    **dict.fromkeys(_KEYS, ("a text", lambda value: isinstance(value, str))),
}
UNJUDGED = {
    f"ansible_{name}"
    for name in (
        *("admin_users", "async_dir", "common_remote_group", "remote_tmp", "shell_allow_world_readable_temp"),
        *("shell_executable", "shell_type", "system_tmpdirs"),
        *("become_exe", "become_flags", "become_plugin", "su_exe", "su_flags", "su_prompt_l10n"),
        *("sudo_chdir", "sudo_exe", "sudo_flags"),
        *("local_become_strip_preamble", "local_become_success_timeout"),
        *("paramiko_host_key_checking", "paramiko_proxy_command", "paramiko_timeout"),
        *("paramiko_use_rsa_sha2_algorithms", "timeout", "pipelining", "control_path", "control_path_dir"),
        *("host_key_checking", "scp_executable", "sftp_batch_mode", "sftp_executable", "sshpass_prompt"),
        *("ssh_executable", "ssh_host_key_checking", "ssh_password_mechanism", "ssh_pipelining"),
        *("ssh_pkcs11_provider", "ssh_retries", "ssh_timeout", "ssh_transfer_method", "ssh_use_tty", "ssh_verbosity"),
    )
}
"""Names that ansible-core's plugins ssh, local, paramiko_ssh, sudo, su and sh read; Ansible judges their values."""


def connection_problems(variables: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with the connection variables of a host or group; templates are left to their evaluation."""
    for name, value in variables.items():
        if not isinstance(name, str) or not name.startswith("ansible_"):
            continue
        if name not in RULES:
            near = "" if name in UNJUDGED else nearest(name, {*RULES, *UNJUDGED}, cutoff=0.9)
            if near:
                yield Problem((name,), value, "", unknown=[near])
        elif not (isinstance(value, str) and "{{" in value):
            words, accepts = RULES[name]
            if not accepts(value):
                yield Problem((name,), value, allowed(words), secret=name in SECRETS)

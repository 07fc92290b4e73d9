"""The variables that say how Ansible reaches a host: every documented name is known, and what they declare is used."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ansible
import pytest
import yaml

from gpuready.spec.connection import RULES, SECRETS, UNJUDGED, connection_problems
from gpuready.spec.interpreter import AUTOMATIC, interpreter

ACTIONS = Path(__file__).resolve().parents[2] / "plugins" / "action"
PLUGINS = Path(ansible.__file__).parent / "plugins"
READERS = (
    *("connection/ssh", "connection/local", "connection/paramiko_ssh", "become/sudo", "become/su"),
    *("doc_fragments/shell_common", "doc_fragments/connection_pipelining"),
)


def documented() -> Iterator[str]:
    """Return the variables that the plugins' own documentation names."""
    for reader in READERS:
        source = ast.parse((PLUGINS / f"{reader}.py").read_text(encoding="utf-8"))
        for node in ast.walk(source):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DOCUMENTATION":
                options = yaml.safe_load(ast.literal_eval(node.value)).get("options") or {}
                named = [one["name"] for option in options.values() for one in option.get("vars", [])]
                yield from (name for name in named if name.startswith("ansible_"))


def test_every_documented_variable_is_known() -> None:
    names = set(documented())
    assert {"ansible_become_pass", "ansible_ssh_private_key", "ansible_scp_extra_args"} <= names
    assert names - {*RULES, *UNJUDGED} == set()
    assert list(connection_problems(dict.fromkeys(sorted(names & UNJUDGED), "x"))) == []


def test_every_documented_secret_is_never_shown() -> None:
    words = ("_pass", "_password", "_passphrase", "_private_key")
    assert {name for name in documented() if name.endswith(words)} == SECRETS
    for name in SECRETS:
        (problem,) = connection_problems({name: ["hunter2"]})
        assert problem.secret


@pytest.mark.parametrize(("name", "meant"), [("ansible_becom_pass", "ansible_become_pass"), ("ansible_prot", "")])
def test_a_misspelled_name_is_refused(name: str, meant: str) -> None:
    (problem,) = connection_problems({name: "x"})
    assert problem.unknown == [meant or "ansible_port"]


@pytest.mark.parametrize("word", AUTOMATIC)
def test_automatic_interpreters_are_the_distributions(word: str) -> None:
    assert list(connection_problems({"ansible_python_interpreter": word})) == []
    assert interpreter(word) == "/usr/bin/python3"
    assert interpreter(word, "/venv/bin/python") == "/venv/bin/python"


@pytest.mark.parametrize(
    ("declared", "used"), [(None, "/usr/bin/python3"), ("/usr/bin/python3.11", "/usr/bin/python3.11")]
)
def test_a_declared_interpreter_is_used(declared: Any, used: str) -> None:
    assert interpreter(declared) == used


def test_a_word_that_ansible_does_not_know_is_no_interpreter() -> None:
    (problem,) = connection_problems({"ansible_python_interpreter": "auto_newest"})
    assert problem.allowed == "allowed is an absolute path, or auto"


def action(name: str) -> Any:
    """Return an action without a task, whose templates are plain values and which tells the command it would run."""
    spec = importlib.util.spec_from_file_location(f"action_{name}", ACTIONS / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = object.__new__(module.ActionModule)
    made._templar = SimpleNamespace(template=lambda value: value)
    made._task = SimpleNamespace(delegate_to=None)
    made._low_level_execute_command = lambda command, in_data: {
        "rc": 0,
        "stderr": "",
        "stdout": f'{{"ran": "{command}"}}',
    }
    return made


def test_both_actions_take_the_same_interpreter() -> None:
    declared = {"ansible_python_interpreter": "auto_silent"}
    assert action("gpuready")._python(declared) == "/usr/bin/python3"
    assert action("gpuready_verify")._ask("h1", declared) == {"ran": "/usr/bin/python3 -I -"}

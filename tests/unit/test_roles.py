"""The roles' own words: what they document is what they take, and all is read; nothing is hidden or shelled out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

from gpuready.spec.docs import pages
from gpuready.spec.inventory import role_defaults, role_options, role_specs
from gpuready.spec.model import HostSpec

ROOT = Path(__file__).resolve().parents[2]
ROLES = ROOT / "roles"
NAMES = sorted(path.name for path in ROLES.iterdir() if path.is_dir())
FORBIDDEN = {"shell", "command", "raw", "script"}


def files_of(role: str) -> list[Path]:
    return [path for path in sorted((ROLES / role).rglob("*")) if path.is_file()]


def tasks_in(content: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every task, also those within blocks."""
    for task in content or []:
        yield task
        for part in ("block", "rescue", "always"):
            yield from tasks_in(task.get(part))


def tasks_of(paths: list[Path]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for path in paths:
        content = yaml.safe_load(path.read_text())
        plays = content if path.parent.name == "playbooks" or path.name == "site.yml" else [{"tasks": content}]
        for play in plays:
            found += [task for part in ("pre_tasks", "tasks", "post_tasks") for task in tasks_in(play.get(part))]
    return found


TASK_FILES = [*ROLES.glob("*/tasks/*.yml"), *ROLES.glob("*/handlers/*.yml"), *(ROOT / "playbooks").glob("*.yml")]


@pytest.mark.parametrize("role", NAMES)
def test_defaults_and_both_entry_points_name_the_same_variables(role: str) -> None:
    specs = role_specs(ROLES)[role]
    assert set(specs) >= {"main", "validate"}
    assert specs["main"]["options"] == specs["validate"]["options"]
    assert sorted(role_defaults(ROLES, role)) == sorted(specs["main"]["options"])
    assert all(name.startswith(f"{role}_") for name in specs["main"]["options"])
    assert all(spec.get("short_description") and spec.get("description") for spec in specs.values())


def every_option() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for options in role_options(ROLES).values():
        for name, option in options.items():
            yield name, option
            for key, inner in (option.get("options") or {}).items():
                yield f"{name}.{key}", inner


@pytest.mark.parametrize(("name", "option"), list(every_option()))
def test_every_option_has_a_type_and_a_description(name: str, option: Mapping[str, Any]) -> None:
    assert option["type"] in ("str", "int", "bool", "list", "dict", "raw")
    assert option["description"]


def test_a_default_in_the_specification_is_the_default() -> None:
    for role, options in role_options(ROLES).items():
        for name, option in options.items():
            if "default" in option:
                assert option["default"] == role_defaults(ROLES, role)[name], name


@pytest.mark.parametrize("role", NAMES)
def test_validate_asks_the_action_that_knows_all_rules(role: str) -> None:
    (task,) = yaml.safe_load((ROLES / role / "tasks" / "validate.yml").read_text())
    assert task["gpuready_validate"] == {"role": role}


@pytest.mark.parametrize("role", NAMES)
def test_every_variable_is_read(role: str) -> None:
    """A public one by role, planner or carrier, the gateway's there without their prefix; `__role_x` by the role."""
    read = "\n".join(path.read_text() for path in files_of(role) if path.parent.name not in ("meta", "defaults"))
    plan = "\n".join(path.read_text() for path in [*(ROOT / "templates").rglob("*.j2")])
    plan += "\n".join(path.read_text() for path in (ROOT / "src/gpuready/planning").glob("*.py"))
    plan += (ROOT / "plugins/action/gpuready.py").read_text()
    for name in role_defaults(ROLES, role):
        short = name.removeprefix(f"{role}_")
        in_plan = re.search(rf"\b{short if role == 'gateway' else name}\b", plan)
        assert re.search(rf"\b{name}\b", read) or in_plan, name
    internal = set(re.findall(rf"\b__{role}_\w+", read))
    for name in internal:
        assert len(re.findall(rf"\b{name}\b", read)) > 1, f"{name} is set and never read"


@pytest.mark.parametrize("task", tasks_of(TASK_FILES), ids=lambda task: str(task.get("name"))[:50])
def test_no_task_hides_a_failure_or_runs_a_shell(task: Mapping[str, Any]) -> None:
    assert not task.get("ignore_errors")
    assert task.get("failed_when") is not False
    modules = {str(key).rpartition(".")[2] for key in task}
    assert not modules & FORBIDDEN


def test_the_reference_is_what_the_definitions_make() -> None:
    for name, text in pages(ROLES).items():
        found = (ROOT / "docs" / "reference" / name).read_text()
        assert found == text, f"docs/reference/{name} is old: run `gpuready spec docs`"


def test_the_reference_names_every_variable() -> None:
    made = pages(ROLES)
    for name, _ in every_option():
        assert f"`{name.replace('.', '[].')}`" in made["roles.md"]
    for name in HostSpec.model_fields:
        assert f"| `{name}` |" in made["variables.md"]
    p99 = "| `gpuready_deployments[].workload.prompt_tokens.p99` | number | required | 1 to 100000000 |"
    assert p99 in made["variables.md"]
    assert "| `gateway_port` | number | `8080` | 1 to 18099 | Port of the API. |" in made["roles.md"]


@pytest.mark.parametrize(
    ("mirrors", "left"),
    [
        ({}, ["https://pypi.nvidia.com", "https://download.pytorch.org/whl/cu128"]),
        (
            {"https://pypi.nvidia.com": "https://mirror/nv"},
            ["https://mirror/nv", "https://download.pytorch.org/whl/cu128"],
        ),
        ({"https://pypi.nvidia.com": "", "https://download.pytorch.org/whl/cu128": ""}, []),
    ],
)
def test_an_engines_own_indexes_come_by_their_mirrors(mirrors: dict[str, str], left: list[str]) -> None:
    loader = DataLoader()
    role = loader.load_from_file(str(ROLES / "engines/vars/main.yml"), trusted_as_template=True)
    engine = {"index": ["https://pypi.nvidia.com", "https://download.pytorch.org/whl/cu128"]}
    known = {**role, "__engines_engine": engine, "engines_index_mirrors": mirrors}
    assert Templar(loader, variables=known).template(role["__engines_index"]) == left

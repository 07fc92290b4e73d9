"""The audit in tests/verify as a suite: it shares nothing with what it audits, and its dependencies are real."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SUITE = Path(__file__).resolve().parents[1] / "verify"
MODULES = sorted(SUITE.rglob("*.py"))


def declared_in(path: Path) -> dict[str, list[str]]:
    """Return each test of a file with those that it depends on."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = [mark for mark in node.decorator_list if isinstance(mark, ast.Call)]
            named = [mark for mark in marks if ast.unparse(mark.func) == "pytest.mark.depends_on"]
            found[node.name] = [ast.literal_eval(name) for mark in named for name in mark.args]
    return found


ALL = {name: needed for path in MODULES for name, needed in declared_in(path).items()}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_nothing_of_gpuready_is_used(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not [name for name in names if name.split(".")[0] == "gpuready"]


@pytest.mark.parametrize("path", sorted((SUITE / "probe").glob("*.py")), ids=lambda path: path.name)
def test_the_probe_is_read_by_the_oldest_python_of_a_server(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 10))


@pytest.mark.parametrize("name", ALL)
def test_a_test_depends_on_tests_that_exist_and_not_on_itself(name: str) -> None:
    seen: set[str] = set()
    waiting = list(ALL[name])
    while waiting:
        needed = waiting.pop()
        assert needed in ALL
        assert needed != name
        if needed not in seen:
            seen.add(needed)
            waiting += ALL[needed]

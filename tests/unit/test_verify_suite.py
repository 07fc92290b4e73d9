"""The audit in tests/verify as a suite: it shares nothing with what it audits, and its dependencies are real."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.unit.verify_suite import ROOT_TEST, SUITE, declared, dependents


@pytest.mark.parametrize("path", sorted(SUITE.rglob("*.py")), ids=lambda path: path.name)
def test_nothing_of_gpuready_is_used(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not [name for name in names if name.split(".")[0] == "gpuready"]


@pytest.mark.parametrize("path", sorted((SUITE / "probe").glob("*.py")), ids=lambda path: path.name)
def test_the_probe_is_read_by_the_oldest_python_of_a_server(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 10))


@pytest.mark.parametrize("name", declared())
def test_a_test_depends_on_tests_that_exist_and_not_on_itself(name: str) -> None:
    tests = declared()
    assert tests[name] <= tests.keys()
    assert name not in dependents(name)


def test_everything_depends_on_an_answer() -> None:
    assert dependents(ROOT_TEST) == declared().keys() - {ROOT_TEST}

"""Reads the audit in tests/verify without running it."""

from __future__ import annotations

import ast
from pathlib import Path

SUITE = Path(__file__).resolve().parents[1] / "verify"
ROOT_TEST = "test_the_server_is_finished"


def declared() -> dict[str, set[str]]:
    """Return each test with those that it names with `depends_on`."""
    found = {}
    for path in sorted(SUITE.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = [mark for mark in node.decorator_list if isinstance(mark, ast.Call)]
                named = [mark for mark in marks if ast.unparse(mark.func) == "pytest.mark.depends_on"]
                found[node.name] = {str(ast.literal_eval(name)) for mark in named for name in mark.args}
    return found


def dependents(name: str) -> set[str]:
    """Return every test that says nothing where this one failed, directly or by way of others."""
    tests = declared()
    if name == ROOT_TEST:
        return set(tests) - {name}
    found: set[str] = set()
    while more := {test for test, needed in tests.items() if needed & {name, *found}} - found:
        found |= more
    return found

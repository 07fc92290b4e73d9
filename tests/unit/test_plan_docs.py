"""The worked examples of docs are those that the planner makes now, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gpuready.cli import asked, main, plan_compare, plan_docs
from gpuready.cli.screen import Screen

DOCS = plan_docs.CHECKOUT / "docs"


def test_examples_are_as_the_planner_makes_them() -> None:
    result, _ = main.run(["plan", "docs", "--check"])
    changed = [change.header for change in result.diff]
    assert changed == [], "run gpuready plan docs"


def test_every_picture_is_shown_and_there() -> None:
    shown = set(re.findall(r"\]\(planner/([^)]+\.svg)\)", plan_docs.PAGE.read_text()))
    assert shown == {path.name for path in plan_docs.FOLDER.glob("*.svg")}
    for path in plan_docs.FOLDER.glob("*.svg"):
        ElementTree.parse(path)  # noqa: S314 - our own


def test_lines_of_the_pages_fit_a_terminal() -> None:
    blocks = re.findall(r"```\n(.*?)\n```", plan_docs.PAGE.read_text(), re.DOTALL)
    assert blocks
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 80


@pytest.mark.parametrize("page", ["README.md", "docs/planner.md", "docs/planner-examples.md"])
def test_links_lead_somewhere(page: str) -> None:
    path = plan_docs.CHECKOUT / page
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    assert links
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_commands_of_the_pages_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what the pages tell a reader to type; one rung of each ladder of cards is enough here."""
    ladders = plan_compare._ladders
    monkeypatch.setattr(plan_compare, "_ladders", lambda: ([ladder[0]] for ladder in ladders()))
    monkeypatch.setattr(asked, "ENGINES", ("vllm",))
    lines = []
    for page in (DOCS / "planner.md", plan_docs.CHECKOUT / "README.md"):
        lines += re.findall(r"^    gpuready (plan (?:make|compare|recommend) .*)$", page.read_text(), re.MULTILINE)
    assert len(lines) >= 6
    for line in dict.fromkeys(lines):
        result, _ = main.run(line.split(), screen=Screen())
        assert result.failures == [], line


def test_an_example_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "examples.yaml").write_text("examples: [{name: x, title: x, text: x, words: --model x --gpu y}]")
    monkeypatch.setattr(plan_docs, "FOLDER", tmp_path)
    result, _ = main.run(["plan", "docs", "--check"])
    assert [one.code for one in result.failures] == ["plan.unknown_model", "plan.unknown_card"]
    assert int(result.exit) == 4

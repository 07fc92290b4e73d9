"""The page that says how well the planner predicts: it is the one that the recorded runs make."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gpuready.planning.accuracy import backtest
from gpuready.rendering import accuracy

COMMAND = (
    ".venv/bin/gpuready plan backtest tests/unit/data/measured_runs.json "
    "--plot docs/planner-accuracy.svg --report docs/planner-accuracy.md"
)
ROOT = Path(__file__).resolve().parents[2]
RUNS = json.loads((ROOT / "tests" / "unit" / "data" / "measured_runs.json").read_text())


def test_a_page_says_what_a_backtest_found() -> None:
    result = backtest.run(RUNS)
    page = accuracy.page(result)
    assert f"{len(RUNS)} runs whose engines printed" in page
    assert f"{result['summary']['judged']} of them can be judged" in page
    for row in result["records"]:
        told = re.search(rf"^\| {row['id']} \|.*$", page, re.MULTILINE)
        assert (told is not None) == row["judged"]
        if told:
            assert f"{row['predicted']['kv_tokens']:,}" in told[0]
    for one in result["summary"]["classes"]:
        assert f"| {accuracy.PARTS[one['part']]} | {accuracy.FAMILIES[one['family']]} | {one['judged']} |" in page


def test_every_table_has_as_many_cells_in_each_line() -> None:
    page = accuracy.page(backtest.run(RUNS))
    for block in page.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) <= 1


def test_the_page_in_docs_is_that_of_this_planner() -> None:
    result, docs = backtest.run(RUNS), ROOT / "docs"
    assert (docs / "planner-accuracy.md").read_text() == accuracy.page(result), f"write it anew: {COMMAND}"
    assert (docs / "planner-accuracy.svg").read_text() == accuracy.picture(result["records"]), f"anew: {COMMAND}"

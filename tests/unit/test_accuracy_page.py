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
            by_gib = row["judged_by"] == "kv_cache"
            shown = f"{row['predicted']['kv_cache_gib']:.2f} GiB" if by_gib else f"{row['predicted']['kv_tokens']:,} t"
            assert f" {shown}" in told[0]
    for one in result["summary"]["classes"]:
        assert f"| {accuracy.PARTS[one['part']]} | {accuracy.FAMILIES[one['family']]} | {one['judged']} |" in page


def test_a_run_whose_tokens_follow_from_a_length_that_is_not_said_is_told_in_gib_and_is_no_mark() -> None:
    result = backtest.run([one for one in RUNS if one["id"] == "gt197"])
    (row,) = result["records"]
    assert row["judged_by"] == "kv_cache"
    assert row["observed"]["kv_tokens"] == 150_000
    assert "its tokens follow from a length that is not said" in accuracy.page(result)
    assert backtest.points(result["records"]) == {}
    (version,) = result["summary"]["versions"]
    assert version["bytes_per_token"] == {"rows": 0, "exact": 0}


def test_every_table_has_as_many_cells_in_each_line() -> None:
    page = accuracy.page(backtest.run(RUNS))
    for block in page.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) <= 1


def test_the_page_in_docs_is_that_of_this_planner() -> None:
    result, docs = backtest.run(RUNS), ROOT / "docs"
    assert (docs / "planner-accuracy.md").read_text() == accuracy.page(result), f"write it anew: {COMMAND}"
    assert (docs / "planner-accuracy.svg").read_text() == accuracy.picture(result["records"]), f"anew: {COMMAND}"

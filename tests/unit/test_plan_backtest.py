"""`gpuready plan backtest`: what it reads, prints and writes. What it finds: test_backtest.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuready.cli import main
from gpuready.cli.screen import Screen
from gpuready.outcome import Exit

RUNS = Path(__file__).parent / "data" / "measured_runs.json"


def test_machines_get_records_and_summary_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", "backtest", str(RUNS), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"records", "summary"}
    given = json.loads(RUNS.read_text())
    assert [one["id"] for one in found["records"]] == [one["id"] for one in given]
    assert set(found["records"][0]) >= {"id", "predicted", "band", "error", "judged", "reason"}


def test_people_get_tables_that_fit() -> None:
    result, _ = main.run(["plan", "backtest", str(RUNS)], screen=Screen())
    lines = result.page.splitlines()
    told = result.data["summary"]
    assert lines[0] == f"{told['judged']} of {told['rows']} runs can be judged"
    assert max(map(len, lines)) <= 80
    heads = [line.split()[0] for line in lines if line.startswith("runs ")]
    assert heads == ["runs", "runs"]
    for reason in told["not_judged"]:
        assert " ".join(reason.split()) in " ".join(result.page.split())


def test_runs_may_stand_under_a_key_and_unknown_ones_are_answered(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text('{"records": [{"id": "x"}, {}]}')
    result, _ = main.run(["plan", "backtest", str(path)], screen=Screen())
    assert [(one["id"], one["judged"]) for one in result.data["records"]] == [("x", False), (None, False)]
    assert all(one["reason"] for one in result.data["records"])


def test_a_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "p.svg"
    result, _ = main.run(["plan", "backtest", str(RUNS), "--plot", str(path)], screen=Screen())
    assert result.page.endswith(f"\n{path} is written.")
    assert path.read_text().count('class="mark') > 2


def test_a_page_is_written(tmp_path: Path) -> None:
    path = tmp_path / "p.md"
    result, _ = main.run(["plan", "backtest", str(RUNS), "--report", str(path)], screen=Screen())
    assert result.page.endswith(f"\n{path} is written.")
    assert path.read_text().startswith("# How well the planner predicts\n")


@pytest.mark.parametrize("text", ["{}", '{"records": 5}', "[1]", '"x"', "null", ""])
def test_a_file_without_runs_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runs.json"
    path.write_text(text)
    result, _ = main.run(["plan", "backtest", str(path)], screen=Screen())
    assert result.exit == Exit.REFUSED
    assert [one.sentence() for one in result.failures] == [
        f"{path} holds no list of runs; give a JSON list of objects with id, engine, engine_version, model, gpu, "
        "observed ... (docs/planner-accuracy.md)."
    ]


def test_every_entry_is_answered_by_its_own_id(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    entries = [{"id": 7}, 5, None, [], {"id": " "}, {"id": "seven", "engine": "vllm"}, {"id": {"a": 1}}]
    path.write_text(json.dumps(entries))
    result, _ = main.run(["plan", "backtest", str(path), "--json"], screen=Screen())
    assert [one["id"] for one in result.data["records"]] == [7, None, None, None, None, "seven", None]
    assert result.data["records"][1]["reason"] == "the record is not an object"
    assert result.data["records"][0]["reason"] == "the record has no engine; known are vllm, sglang, tensorrt-llm"


@pytest.mark.parametrize(
    ("path", "text", "sentence"),
    [
        ("", "", "no file is named; name one; - is standard input."),
        ("number.json", f"[{'9' * 5000}]", "number.json is not JSON: a number has 5000 digits."),
        ("x" * 5000, None, f"{'x' * 40}... (5000 characters) cannot be read: File name too long."),
    ],
)
def test_what_cannot_be_read_is_one_short_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, text: str | None, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if path and text is not None:
        Path(path).write_text(text)
    result, _ = main.run(["plan", "backtest", path], screen=Screen())
    assert result.exit == Exit.REFUSED
    assert [one.sentence() for one in result.failures] == [sentence]

"""What a run leaves: one JSON document, the rows, and a page that stands alone and repeats no text as HTML."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gpuready.benchmark import page, report
from gpuready.benchmark.load import ClientLoad, LevelRun
from gpuready.benchmark.measures import Problem, Row
from gpuready.benchmark.report import Folder, Measured, level_page, read_rows
from gpuready.benchmark.settings import Settings
from gpuready.outcome import Refusal
from gpuready.rendering import plots
from gpuready.rendering.plots import Plot, Point, Series, nice_ticks, number, svg

HOSTILE = """</title><script>alert("1")</script><img src='http://evil.example/x'> & "quoted" {{ 7*7 }}"""
MOMENT = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)
VOID = {"meta", "br", "img", "link", "hr", "input"}


def rows(level: int, count: int, failed: int = 0) -> list[Row]:
    """Requests of 2 s each, `level` at a time; the first text after 0.25 s times the level, then every 0.1 s."""
    found = []
    for index in range(count):
        sent = 2.0 * (index // level)
        chunks = [round(sent + 0.25 * level + 0.1 * step, 6) for step in range(5)]
        one = Row(index, sent, sent + 2.0, chunks, 0, 100, 10, 0, "length", index >= level)
        if index < failed:
            one.problem = Problem("http_429", f"slow down {HOSTILE}")
        found.append(one)
    return found


def measured(model: str = "standin/model", note: str = "", failed: int = 0, **more: Any) -> Measured:
    asked = Settings("http://h:8080", seed=1, levels=(1, 2), requests=24, output_tokens=10, note=note, **more)
    server = {"url": asked.url, "max_model_len": 4096, "owned_by": "x", "version": None}
    workload = {
        "prompt_tokens_wanted": 512,
        "output_tokens_wanted": 10,
        "words_per_prompt": 380,
        "tokens_per_word": 1.3,
        "template_tokens": 20.0,
        "calibrated": True,
        "ignore_eos": True,
        "temperature": 0,
        "warmup_output_tokens": 10,
    }
    result = Measured(asked, model, server, workload, MOMENT, MOMENT)
    for level in (1, 2):
        run = LevelRun(level, 24, rows(level, 24, failed), 2.0 * (24 // level), ClientLoad(0.1, [0.5] * 100))
        result.levels.append(level_page(run, MOMENT, 10, {"requests": level, "failed": 0}))
        result.rows[level] = run.rows
    return result


class Outline(HTMLParser):
    """Reads a page strictly: every element that opens also closes, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_document_is_json_with_a_schema_and_no_secret() -> None:
    document = measured(api_key="sk-secret").as_dict()
    text = json.dumps(document, allow_nan=False)
    assert "sk-secret" not in text
    assert json.loads(text) == document
    assert (document["schema"], document["schema_version"]) == ("gpuready.benchmark", 1)
    assert document["started_at"] == "2026-11-30T12:00:00Z"
    assert document["arguments"]["seed"] == 1
    assert set(document["client"]) == {"gpuready", "aiohttp", "python", "system"}
    first, second = document["levels"]
    assert (first["ttft_ms"]["p50"], second["ttft_ms"]["p50"]) == (250.0, 500.0)
    assert first["itl_ms"]["p99"] is None
    assert first["itl_ms"]["missing"] == {"p99": "96 samples, p99 needs 100"}
    # Ten tokens every 2 s in each place.
    assert first["throughput"]["steady"]["output_tokens_per_second"] == 5.0
    assert second["throughput"]["steady"]["output_tokens_per_second"] == 10.0
    assert (first["connections"], second["connections"]) == ({"reused": 23, "new": 1}, {"reused": 22, "new": 2})


def test_bursts_are_noted() -> None:
    found = measured()
    found.levels[0]["tokens"]["chunks_together_share"] = 0.11
    (note,) = found.as_dict()["notes"]
    assert note.startswith("At concurrency 1 over 10 % of the chunks came together with the one before: ")


def test_a_busy_client_is_noted() -> None:
    found = measured()
    found.levels[1]["client"]["busy"] = True
    (note,) = found.as_dict()["notes"]
    assert note.startswith("At concurrency 2 this client was busy (over 80 % of a core")


def test_the_page_holds_the_numbers_and_says_what_is_unknown() -> None:
    text = Outline(page.html(measured().as_dict())).text
    for words in ("Benchmark of standin/model", "10.0", "tokens/s", "250", "500", "n = 96", "24 of 24"):
        assert words in text
    assert "unknown (the gateway does not tell it)" in text


def test_the_page_stands_alone() -> None:
    text = page.html(measured(model=HOSTILE, note=HOSTILE, failed=3).as_dict())
    outline = Outline(text)
    assert outline.links == []
    assert "script" not in outline.tags
    assert not re.search(r"""(?i)(?:src|href)\s*=\s*["']?https?:|url\(|@import""", text)
    # The only addresses within tags are SVG's namespace.
    assert set(re.findall(r'<[^>]*"(https?://[^"]*)"', text)) == {"http://www.w3.org/2000/svg"}


def test_a_hostile_name_is_text() -> None:
    text = page.html(measured(model=HOSTILE, note=HOSTILE, failed=3).as_dict())
    outline = Outline(text)
    assert "img" not in outline.tags
    # In the title, the heading, the settings, the note and the reason of the failures, whole and not evaluated.
    assert outline.text.count(HOSTILE) >= 5
    assert "49" not in re.findall(r"quoted.{0,8}", outline.text)


def test_plots_are_well_formed_and_hold_every_known_point() -> None:
    text = page.html(measured().as_dict())
    found = [ElementTree.fromstring(one) for one in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]  # noqa: S314
    assert len(found) == 4
    space = "{http://www.w3.org/2000/svg}"
    titles = [one.findtext(f"{space}text") for one in found]
    assert titles == [
        "Output throughput",
        "Time to first token",
        "Inter-token latency",
        "What more load costs each user",
    ]
    labels = [[mark.text for mark in one.iter(f"{space}title")] for one in found]
    assert labels[0] == ["concurrency 1: 5.00 tokens/s", "concurrency 2: 10.0 tokens/s"]
    assert labels[1] == [
        "concurrency 1: 250 ms p50",
        "concurrency 2: 500 ms p50",
        "concurrency 1: 250 ms p95",
        "concurrency 2: 500 ms p95",
    ]
    legend = [one.text for one in found[1].iter(f"{space}text") if one.get("class") == "legend"]
    assert legend == ["p50", "p95", "p99: too few samples"]


def test_the_first_number_says_where_it_is_not_known() -> None:
    found = measured()
    values = [(card["value"], card["unit"]) for card in page.cards(found.levels)]
    # Nine tokens after the first in 1.75 s, or in 1.5 s at concurrency 2.
    assert values[1:] == [("250 \u2013 500", "ms"), ("194 \u2013 167", "ms"), ("0", "of 48")]
    assert page.cards(found.levels)[0] == {"value": "10.0", "unit": "tokens/s", "what": "most output, at concurrency 2"}
    found.levels[1]["throughput"]["steady"]["output_tokens_per_second"] = None
    assert page.cards(found.levels)[0]["what"] == "most output, at concurrency 1; unknown at 2"


def test_a_page_of_failures_alone_says_so() -> None:
    text = Outline(page.html(measured(failed=24).as_dict())).text
    assert text.count("no value is known, see the table") == 4
    assert "48 of 48 requests failed (http_429)" in text
    assert "Concurrency 1: no request succeeded." in text


def test_the_simulated_server_is_named_first() -> None:
    outline = Outline(page.html(measured(model="gpuready-sim/tiny").as_dict()))
    assert "Its numbers say that the path works, and nothing about a GPU." in outline.text
    assert "simulated" not in Outline(page.html(measured().as_dict())).text


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [
        (0, [0, 1]),
        (1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (569, [0, 200, 400, 600]),
        (0.03, [0, 0.01, 0.02, 0.03]),
        (100, [0, 20, 40, 60, 80, 100]),
        (12345, [0, 2500, 5000, 7500, 10000, 12500]),
    ],
)
def test_ticks_are_round_and_reach_the_highest_value(highest: float, ticks: list[float]) -> None:
    assert nice_ticks(highest) == ticks


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.0, "1.00"), (15.25, "15.2"), (569.4, "569"), (12345.6, "12\u2009346")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_line_is_torn_where_a_value_is_unknown() -> None:
    points = [Point(1, 1.0), Point(2, 2.0), Point(4, None), Point(8, 3.0), Point(16, 4.0)]
    text = svg(Plot("t", "x", "y", [Series("s", points)], [1, 2, 4, 8, 16]))
    assert text.count("<polyline") == 2
    assert text.count("<circle") == 4
    lone = svg(Plot("t", "x", "y", [Series("s", [Point(3, 0.0)])], [3]))
    assert (lone.count("<polyline"), lone.count("<circle")) == (0, 1)


def test_texts_in_a_plot_are_escaped() -> None:
    hostile = '<a href="x">&'
    text = svg(Plot(hostile, hostile, hostile, [Series(hostile, [Point(1, 1.0, hostile)], annotate=True)] * 2, [1]))
    found = ElementTree.fromstring(text)  # noqa: S314
    assert {one.tag.rpartition("}")[2] for one in found.iter()} == {"svg", "text", "line", "circle", "title"}
    assert found.get("aria-label") == hostile
    assert [one.text for one in found.iter() if one.text == hostile] == [hostile] * 9


def test_doublings_are_even_steps() -> None:
    axes = plots._Axes(Plot("t", "x", "y", [], [1, 2, 4]), [Point(1, 1.0)])
    assert axes.x(2) - axes.x(1) == pytest.approx(axes.x(4) - axes.x(2))
    assert axes.y(0) - axes.y(1.0) == plots.HEIGHT - plots.TOP - plots.BOTTOM


def test_the_folder_holds_everything_and_its_rows_give_the_same_numbers(tmp_path: Path) -> None:
    folder, found = Folder(tmp_path / "new" / "run"), measured(model="half a pair \ud800", failed=2)
    folder.write(found, page.html(found.as_dict()))
    assert sorted(path.name for path in folder.path.iterdir()) == ["report.html", "requests.jsonl", "result.json"]
    document = json.loads((folder.path / "result.json").read_text())
    again = list(read_rows(folder.path / "requests.jsonl"))
    for level in document["levels"]:
        mine = [row for concurrency, row in again if concurrency == level["concurrency"]]
        run = LevelRun(level["concurrency"], 24, mine, level["first_idle_seconds"])
        assert {**level_page(run, MOMENT, 10, level["warmup"]), "client": level["client"]} == level


def test_a_folder_that_holds_a_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(Refusal, match=r"holds a result already \(result.json\); name another folder"):
        Folder(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refusal, match="cannot be written: Not a directory"):
        Folder(tmp_path / "file" / "run")


def test_an_empty_folder_is_not_left_behind(tmp_path: Path) -> None:
    Folder(tmp_path / "run").remove_if_empty()
    assert not (tmp_path / "run").exists()


def test_insecure_is_noted() -> None:
    found = measured()
    found.settings = replace(found.settings, url="https://h", insecure=True)
    assert report.observations(found) == ["The server's certificate was not checked (--insecure)."]

"""A plan as a terminal, an SVG file and an HTML page show it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.unit.planning_options import DEVICE, option

from gpuready.cli import plan_page as terminal
from gpuready.cli.screen import Screen
from gpuready.planning import explain
from gpuready.planning.explain import Explanation, rules, steps
from gpuready.planning.explain.rules import Rule
from gpuready.planning.explain.steps import Step
from gpuready.planning.memory.run import Range
from gpuready.planning.wish import Place
from gpuready.rendering import accuracy, plan_page, plots
from gpuready.rendering.plots import Plot, Point, Series

HOSTILE = '<script>alert("1")</script>\033[31m\u202e'


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Explanation:
    monkeypatch.setattr(steps, "steps", lambda _: (Step("request", "One more request: 0.1 GiB.", True),))
    monkeypatch.setattr(rules, "compare", lambda *_: (Rule("INT4 on T4", None, "the card is no T4"),))
    return explain.explain(option())


def shared() -> explain.Bar:
    small = {"weights": Range.exact(5.0), "kv": Range.exact(10.0)}
    own = option(place=Place(DEVICE, 1, shared_gib=30.0), estimate=small)
    return explain.together([("chat", explain.bar(own)), ("code", explain.bar(own))], "GPU 0")


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("unicode", [True, False])
def test_no_line_is_wider_than_the_terminal_and_the_bar_fills_it(found: Explanation, width: int, unicode: bool) -> None:
    lines = terminal.page(found, Screen(width, unicode=unicode), whole=True).splitlines()
    assert max(map(len, lines)) == width
    bar = lines[lines.index("the GPU, 79.11 GiB") + 1]
    assert len(bar) == width
    assert all(line.isascii() for line in lines) or unicode


def test_without_colour_every_part_has_a_sign_of_its_own(found: Explanation) -> None:
    lines = terminal.page(found, Screen(), whole=False).splitlines()
    bar = lines[lines.index("the GPU, 79.11 GiB") + 1]
    assert re.fullmatch(r"W{14}ANGK{56}C\.{6}", bar)
    assert "  K KV cache              55.65 GiB  70.3%   55.30 to 55.90" in lines
    assert "\033" not in "".join(lines)


def test_colour_is_added_and_changes_no_letter(found: Explanation) -> None:
    plain = terminal.page(found, Screen(unicode=True), whole=True)
    painted = terminal.page(found, Screen(unicode=True, colour=True), whole=True)
    assert "\033[32m" in painted
    bare = re.sub(r"\033\[\d+m", "", painted)
    assert re.sub(r"[\u2500-\u259f]", "#", bare) == re.sub(r"[\u2500-\u259f]", "#", plain)


def test_parts_of_a_shared_gpu_are_told_by_deployment(found: Explanation) -> None:
    lines = terminal.memory(shared(), Screen())
    assert lines[2].startswith("  chat 16.96 GiB: weights 5.00, activations 0.31,")
    assert any(line.startswith("  K KV cache              20.00 GiB") for line in lines)


def test_what_is_missing_is_named_so() -> None:
    bar = explain.bar(option(estimate={"weights": Range.exact(131.42), "kv": Range.exact(-60.0)}))
    assert any("missing" in line and "54.27 GiB" in line for line in terminal.memory(bar, Screen()))
    assert "missing 54.27 GiB" in plan_page.svg("x", [bar])


@pytest.mark.parametrize("amounts", [[1.0] * 8, [0.0, 100.0, 0.001], [55.0, 14.0, 0.3, 0.2, 6.5], [0.0, 0.0]])
def test_columns_are_divided_whole_and_nothing_that_is_there_disappears(amounts: list[float]) -> None:
    found = terminal.cells(amounts, 40)
    assert sum(found) == (40 if sum(amounts) else 0)
    assert [bool(one) for one in found] == [bool(one) for one in amounts]


def rectangles(text: str) -> list[dict[str, str]]:
    tree = ElementTree.fromstring(text)  # noqa: S314
    return [dict(one.attrib) for one in tree.iter("{http://www.w3.org/2000/svg}rect")]


def test_widths_in_the_picture_are_the_shares_of_the_card(found: Explanation) -> None:
    drawn = {one["class"]: float(one["width"]) for one in rectangles(plan_page.svg("x", found.bars))[1:8]}
    whole = sum(drawn.values())
    assert drawn["part kv"] / whole == pytest.approx(55.65 / 79.11, abs=0.001)
    assert drawn["part weights"] / whole == pytest.approx(14.99 / 79.11, abs=0.001)
    assert whole == pytest.approx(728, abs=0.5)


def test_picture_needs_nothing_else_and_follows_light_and_dark(found: Explanation) -> None:
    text = plan_page.svg(found.title, [*found.bars, shared()])
    ElementTree.fromstring(text)  # noqa: S314
    assert "prefers-color-scheme: dark" in text
    assert set(re.findall(r"https?://[^\"<\s]*", text)) == {"http://www.w3.org/2000/svg"}
    assert {"chat", "code"} <= set(re.findall(r">(\w+)</text>", text))


def test_a_long_title_goes_on_in_a_second_line_and_a_narrow_deployment_keeps_its_name(found: Explanation) -> None:
    title = "meta-llama/Llama-3.1-405B-Instruct in 4 bits (wna16) on 8 x H100 SXM5 80GB (TP4, 2 replicas), vllm 0.19.1"
    small = [replace(part, gib=0.2, owner="moderate") for part in found.bars[0].parts[:1]]
    bar = replace(found.bars[0], parts=(*(replace(part, owner="chat") for part in found.bars[0].parts), *small))
    tree = ElementTree.fromstring(plan_page.svg(title, [bar]))  # noqa: S314
    texts = [(one.get("class"), one.text) for one in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert " ".join(text or "" for kind, text in texts if kind == "title") == title
    assert ("label", "moderate") in texts


def test_page_says_everything_and_needs_nothing_else(found: Explanation) -> None:
    text = plan_page.html("Plan of chat", [found], found.bars)
    for words in (found.limit, *found.basis, *(step.says for step in found.steps), "the card is no T4", "455,904"):
        assert words.replace("'", "&#39;") in text
    assert set(re.findall(r"https?://[^\"<\s]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "<script" not in text


def test_hostile_names_are_only_text(found: Explanation) -> None:
    hostile = replace(found, title=HOSTILE, name=HOSTILE, reasons=(HOSTILE,), limit=HOSTILE)
    page = plan_page.html(HOSTILE, [hostile, hostile], found.bars)
    assert "<script" not in page
    ElementTree.fromstring(plan_page.svg(HOSTILE.replace("\033", ""), found.bars))  # noqa: S314
    text = terminal.page(hostile, Screen(unicode=True), whole=True)
    assert "\033" not in text
    assert "\u202e" not in text


def test_observed_and_predicted_stand_on_the_line_where_they_are_the_same() -> None:
    points = [Point(100.0, 100.0, "a"), Point(2000.0, 1000.0, "b"), Point(50.0, None, "unknown")]
    text = plots.svg(Plot("t", "x", "y", [Series("s", points, joined=False)], equal=True))
    tree = ElementTree.fromstring(text)  # noqa: S314
    space = "{http://www.w3.org/2000/svg}"
    assert not list(tree.iter(f"{space}polyline"))
    truth = next(one for one in tree.iter(f"{space}line") if one.get("class") == "truth")
    marks = [(float(one.get("cx", "")), float(one.get("cy", ""))) for one in tree.iter(f"{space}circle")]
    assert len(marks) == 2

    def on_the_line(x: float) -> float:
        x1, y1, x2, y2 = (float(truth.get(name, "")) for name in ("x1", "y1", "x2", "y2"))
        return y1 + (y2 - y1) * (x - x1) / (x2 - x1)

    assert marks[0][1] == pytest.approx(on_the_line(marks[0][0]), abs=0.1)
    ticks = [one.text for one in tree.iter(f"{space}text") if one.get("class") == "tick"]
    assert ticks == ["100", "1k", "10k"] * 2
    # Twice too high in x lies below the line: y grows downwards.
    assert marks[1][1] > on_the_line(marks[1][0]) + 5


def test_sentences_of_a_screen_keep_their_indents() -> None:
    lines = Screen(40).paragraph("word " * 20, "  - ", "    ")
    assert lines[0].startswith("  - word")
    assert all(line.startswith("    word") and len(line) <= 40 for line in lines[1:])


def test_tables_fit_and_only_texts_are_cut() -> None:
    rows = [["a-very-long-name-of-a-model-that-does-not-fit-anywhere", "vllm 0.19.1", "1,234,567", "0.12"]]
    lines = Screen(60).table(["model", "engine", "tokens", "price"], rows, left=2)
    assert max(map(len, lines)) <= 60
    assert lines[1].endswith("1,234,567   0.12")
    assert "~" in lines[1]


def test_a_pipe_gets_no_colour_and_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        encoding = "utf-8"

        def __init__(self, terminal: bool) -> None:
            self.isatty = lambda: terminal

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    streams: list[Any] = [Stream(False), Stream(True)]
    assert Screen.of(streams[0]) == Screen(80, colour=False, unicode=True)
    assert Screen.of(streams[1]) == Screen(100, colour=True, unicode=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Screen.of(streams[1]).colour
    streams[1].encoding = "ANSI_X3.4-1968"
    assert not Screen.of(streams[1]).unicode


def on_half(name: str) -> Explanation:
    small = {"weights": Range.exact(5.0), "kv": Range.exact(10.0)}
    made = option(place=Place(DEVICE, 1, shared_gib=30.0), estimate=small)
    return replace(explain.explain(made), name=name)


def test_deployments_that_share_a_gpu_stand_in_one_bar_and_others_in_theirs(found: Explanation) -> None:
    alone = replace(found, name="alone")
    bars = explain.of_host([(on_half("chat"), [0]), (alone, [1]), (on_half("code"), [0])])
    assert [bar.title for bar in bars] == ["GPU 0, shared, 79.11 GiB", "alone: the GPU, 79.11 GiB"]
    assert bars[0].gib("weights") == 10.0
    assert bars[0].gib("others") == 0
    for bar in bars:
        assert round(sum(part.gib for part in bar.parts), 2) == bar.total_gib
    # Alone on its share for now, it keeps a bar in which the rest is others'.
    (lone,) = explain.of_host([(on_half("chat"), [0])])
    assert lone.gib("others") == 49.11


def test_a_host_shows_its_gpus_first_and_then_each_deployment(found: Explanation) -> None:
    both = [on_half("chat"), on_half("code")]
    bars = explain.of_host([(one, [0]) for one in both])
    lines = terminal.host_page(bars, both, Screen(), whole=False).splitlines()
    assert lines[0] == "GPU 0, shared, 79.11 GiB"
    assert [line.split(":")[0] for line in lines if line.startswith(("chat:", "code:"))] == ["chat", "code"]
    assert max(map(len, lines)) <= 80


def test_measured_runs_become_marks_and_unknown_ones_do_not() -> None:
    def answer(name: str, engine: str, observed: float | None, judged: bool = True) -> dict[str, Any]:
        seen = {"kv_tokens": observed} if judged else None
        by = "kv_tokens" if observed else None
        row = {"id": name, "engine": engine, "judged": judged, "judged_by": by}
        return {**row, "predicted": {"kv_tokens": 110}, "observed": seen}

    rows = [answer("a", "vllm", 100.0), answer("b", "sglang", None), answer("c", "tensorrt_llm", 110.0)]
    text = accuracy.picture([*rows, answer("d", "vllm", None, judged=False)])
    assert "a: 110 predicted, 100 observed (+10.0%)" in text
    tree = ElementTree.fromstring(text)  # noqa: S314
    legends = [one.text for one in tree.iter("{http://www.w3.org/2000/svg}text") if one.get("class") == "legend"]
    assert legends == ["vLLM (1)", "TensorRT-LLM (1)"]
    assert "no value is known" in accuracy.picture([])

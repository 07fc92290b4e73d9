"""How well the planner predicts: a page, and predicted against observed as a picture with one mark for each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpuready.planning.backtest import HEAD, points, table
from gpuready.rendering.plots import Plot, Point, Series, standalone, svg

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}


def picture(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a backtest's rows as an SVG file that needs nothing else: tokens in the KV cache."""
    found = points(rows)
    series = [
        Series(f"{name} ({len(found[engine])})", _marks(found[engine]), number, joined=False)
        for number, (engine, name) in enumerate(ENGINES.items(), 1)
        if engine in found
    ]
    title = "Tokens in the KV cache: predicted against observed"
    return standalone(svg(Plot(title, "observed, as the engine printed it", "predicted", series, equal=True)))


def _marks(cloud: Sequence[tuple[float, float, str]]) -> list[Point]:
    return [
        Point(seen, predicted, f"{run}: {predicted:,.0f} predicted, {seen:,.0f} observed ({predicted / seen - 1:+.1%})")
        for seen, predicted, run in cloud
    ]


FAMILIES = {
    "dense_16bit": "dense, 16 bits",
    "dense_other": "dense, quantized or 32 bits",
    "moe": "mixture of experts",
    "vision": "with images",
    "hybrid": "hybrid (sliding windows, recurrent layers)",
}
PARTS = {
    "vllm 0.19.0": "vLLM 0.19.0",
    "vllm, other versions": "vLLM, other versions",
    "sglang": "SGLang",
    "tensorrt_llm": "TensorRT-LLM",
}
_HEAD = """\
# How well the planner predicts

<!-- Made by `gpuready plan docs` from tests/unit/data/measured_runs.json; change that, or the planner. -->

{rows} runs whose engines printed what they did with the memory of their GPUs, from public logs, issues and documents,
each with its source in [measured_runs.json](../tests/unit/data/measured_runs.json). {judged} of them can be judged:
they name an engine, a version that resolves to one set of constants, a model whose configuration is known, and a card
or its memory; all else may be missing and is then the engine's default. Your own runs are judged by

    gpuready plan backtest RUNS.json --plot accuracy.svg

in the same layout, unknown fields null. Errors are without their sign: the median, and what nine of ten runs stay
below. The KV cache is compared by its tokens, or by its GiB where the tokens were not printed. A band is where nine of
ten measurements are expected; its width is half of it, as a part of the prediction.

![Tokens in the KV cache: predicted against observed](planner/accuracy.svg)
"""


def page(result: Mapping[str, Any]) -> str:
    """Return the page of a backtest, as Markdown."""
    summary = result["summary"]
    left_out = summary["leave_one_source_out"]
    reasons = [[reason, count] for reason, count in summary["not_judged"].items()]
    texts = [
        _HEAD.format(rows=summary["rows"], judged=summary["judged"]),
        "## Errors\n\n" + _classes(summary["classes"]),
        "## On sources that the constants were not fitted to\n\n"
        "Each run is judged with constants that were fitted to all runs but those of its own source; one without a "
        "named source is a source of its own. A constant that no other source shows keeps its value.\n\n"
        + _classes(left_out["by_source"]),
        "The same with whole repositories left out, so that the many logs of one campaign do not help one another:\n\n"
        + _classes(left_out["by_repository"]),
        "## By version\n\n" + _versions(summary["versions"]),
        "## Every run that was judged\n\n" + _runs(result["records"]),
        "## Why runs were not judged\n\n" + _table(["reason", "runs"], reasons),
    ]
    return "\n".join(texts)


def _classes(classes: Sequence[Mapping[str, Any]]) -> str:
    rows = [[PARTS[part], FAMILIES[family], *figures] for part, family, *figures in table(classes)]
    return _table(HEAD, rows)


def _versions(versions: Sequence[Mapping[str, Any]]) -> str:
    head = ["engine and version", "runs", "judged", "weights", "KV cache", "in the band", "bytes per token exact"]
    rows = [
        [
            f"{one['engine']} {one['version']}",
            one["rows"],
            one["judged"],
            _percent(one["weights"]["median_percent"]),
            _percent(one["kv"]["median_percent"]),
            _percent(one["band"]["inside_percent"]),
            f"{one['bytes_per_token']['exact']} of {one['bytes_per_token']['rows']}",
        ]
        for one in versions
        if one["judged"]
    ]
    return _table(head, rows)


def _runs(answers: Sequence[Mapping[str, Any]]) -> str:
    head = ["run", "engine", "KV tokens predicted", "observed", "off by", "band", "weights off by", "note"]
    rows = []
    for one in (answer for answer in answers if answer["judged"]):
        seen, (low, high) = one["observed"]["kv_tokens"], one["band"]["kv_tokens"]
        rows.append(
            [
                one["id"],
                f"{one['engine']} {one['engine_version']}",
                f"{one['predicted']['kv_tokens']:,}",
                f"{seen:,.0f}" if seen else "-",
                _percent(None if one["error"]["kv_tokens"] is None else 100 * one["error"]["kv_tokens"], "+"),
                f"{low:,} to {high:,}",
                _percent(None if one["error"]["weights"] is None else 100 * one["error"]["weights"], "+"),
                "starts wrongly told" if one["error"]["fits_right"] is False else "",
            ]
        )
    return _table(head, rows)


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.2f} %"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines)

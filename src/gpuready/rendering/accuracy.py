"""Predicted against observed, as a picture: one mark for each measured run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpuready.rendering.plots import Plot, Point, Series, standalone, svg

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}


def points(records: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Return by engine what was observed (x) and predicted (y): tokens in the KV cache; what is not known is left out.

    `records` are the runs as they were given, `answers` the backtest's, with the same ids.
    """
    found: dict[str, list[Point]] = {engine: [] for engine in ENGINES}
    by_id = {answer["id"]: answer for answer in answers}
    for record in records:
        answer = by_id.get(record.get("id"), {})
        observed = (record.get("observed") or {}).get("kv_tokens")
        predicted = (answer.get("predicted") or {}).get("kv_tokens")
        engine = str(record.get("engine")).replace("-", "_")
        if not observed or not predicted or engine not in found:
            continue
        off = predicted / observed - 1
        label = (
            f"{record['id']}: {record.get('model')} on {record.get('gpu')}, {engine} "
            f"{record.get('engine_version')}: {predicted:,.0f} predicted, {observed:,.0f} observed ({off:+.1%})"
        )
        found[engine].append(Point(float(observed), float(predicted), label))
    return found


def picture(records: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> str:
    """Return the picture as an SVG file that needs nothing else."""
    found = points(records, answers)
    series = [
        Series(f"{ENGINES[engine]} ({len(cloud)})", cloud, number, joined=False)
        for number, (engine, cloud) in enumerate(found.items(), 1)
        if cloud
    ]
    plot = Plot(
        "Tokens in the KV cache: predicted against observed",
        "observed, as the engine printed it",
        "predicted",
        series,
        equal=True,
    )
    return standalone(svg(plot))

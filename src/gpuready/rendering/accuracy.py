"""How well the planner predicts: a page, and predicted against observed as a picture with one mark for each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpuready.planning.accuracy.backtest import HEAD, points, table
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

<!-- Made by gpuready plan backtest tests/unit/data/measured_runs.json --plot docs/planner-accuracy.svg --report
docs/planner-accuracy.md; change the runs or the planner. -->

{rows} runs whose engines printed what they did with the memory of their GPUs, from public logs, issues and documents,
each with its source in [measured_runs.json](../tests/unit/data/measured_runs.json). {judged} of them can be judged:
they name an engine, a version that resolves to one set of constants, a model whose configuration is known, and a card
or its memory; all else may be missing and is then the engine's default.

Errors are without their sign: the median, and what nine of ten runs stay below. The KV cache is compared by its tokens,
or by its GiB where the tokens were not printed, or where they follow from a length that the run does not say. A band is
where nine of ten measurements are expected; its width is half of it, as a part of the prediction. A card that shares
its memory with the host (GB10) has a band as wide as what the host may use, where the run does not say what was free.
SGLang and TensorRT-LLM start with whatever cache there is; whether a start was told right says of them only that
something is left for it.

![Tokens in the KV cache: predicted against observed](planner-accuracy.svg)
"""


_RECORDS = """\
## Your own runs

`gpuready plan backtest RUNS.json` judges them in the same way, `--json` with the prediction, band and error of each.
The file is a JSON list of objects; what is not known is null or left out:

| field | what it holds |
| --- | --- |
| `id`, `source`, `date` | a name of your own, where it is from, and the day: a build of a month is placed by it |
| `engine`, `engine_version` | vllm, sglang or tensorrt-llm; 0.19.1, 0.8.x, 0.8-0.9, 0.21+, or nightly 2026-08-14 |
| `model`, `quantization`, `dtype`, `kv_cache_dtype` | the model's id, and its formats |
| `gpu`, `gpu_count`, `gpu_total_gib`, `gpu_free_at_init_gib` | the card; CUDA's own figures win over it |
| `tp`, `pp`, `dp`, `ep`, `dcp` | how the GPUs divide the model |
| `max_model_len`, `max_num_seqs`, `max_num_batched_tokens`, `block_size`, `enforce_eager` | settings |
| `chunked_prefill_size`, `cuda_graph_max_bs` | of SGLang |
| `gpu_memory_utilization`, `mem_fraction_static`, `free_gpu_memory_fraction` | of vLLM, SGLang and TensorRT-LLM |
| `observed` | GiB of one GPU, as printed: `weights_gib`, `activation_peak_gib`, `non_torch_gib`, `cuda_graph_gib`, \
`kv_cache_gib`, `kv_tokens`, `kv_needed_gib`; of SGLang also `avail_mem_before_load_gb`, `avail_mem_after_load_gb`, \
`k_size_gb`, `v_size_gb` |
| `outcome` | ok, fail_len (one request does not fit) or fail_no_kv (nothing is left for a KV cache) |
"""


def page(result: Mapping[str, Any]) -> str:
    """Return the page of a backtest, as Markdown."""
    summary = result["summary"]
    left_out = summary["leave_one_source_out"]
    reasons = [[reason.split(";")[0], count] for reason, count in summary["not_judged"].items()]
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
        _RECORDS,
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
    head = [
        "run",
        "engine",
        "model",
        "card",
        "KV cache predicted",
        "observed",
        "off by",
        "band",
        "weights off by",
        "note",
    ]
    rows = [
        [
            str(one["id"]),
            f"{one['engine']} {one['engine_version']}",
            one["model"],
            one["gpu"],
            *_cache(one),
            _percent(None if one["error"]["weights"] is None else 100 * one["error"]["weights"], "+"),
            _note(one),
        ]
        for one in answers
        if one["judged"]
    ]
    return _table(head, rows)


def _cache(one: Mapping[str, Any]) -> list[str]:
    """Return the KV cache as predicted and as observed, the error and the band, in what the run is judged by."""
    figure = one["judged_by"] or "kv_tokens"
    name, unit, form = ("kv_cache_gib", "GiB", ".2f") if figure == "kv_cache" else ("kv_tokens", "tokens", ",.0f")
    predicted, seen, error = one["predicted"][name], one["observed"][figure], one["error"][figure]
    low, high = one["band"][name]
    return [
        f"{max(0, predicted):{form}} {unit}",
        f"{seen:{form}}" if one["judged_by"] else "-",
        _percent(None if error is None or not one["judged_by"] else 100 * error, "+"),
        f"{max(0, low):{form}} to {max(0, high):{form}}",
    ]


def _note(one: Mapping[str, Any]) -> str:
    """Return what else is to be said of a run."""
    right, starts = one["error"]["fits_right"], one["predicted"]["fits"]
    notes = []
    if right is False:
        notes.append("starts wrongly told")
    elif right and not starts:
        notes.append("did not start, as predicted")
    if one["judged_by"] == "kv_cache" and one["observed"]["kv_tokens"]:
        notes.append("its tokens follow from a length that is not said")
    return "; ".join(notes)


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.2f} %"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines)

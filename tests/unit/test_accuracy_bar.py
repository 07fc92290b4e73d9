"""What the planner must reach on the recorded runs, and on sources that its constants were not fitted to."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuready.planning.accuracy import backtest

RUNS = json.loads((Path(__file__).parent / "data" / "measured_runs.json").read_text())
RESULT = backtest.run(RUNS)
OUTCOMES = {record["id"]: record["outcome"] for record in RUNS}
JUDGED = [row for row in RESULT["records"] if row["judged"]]
DENSE = [row for row in JUDGED if row["family"].startswith("dense") and row["engine"] == "vllm"]
DENSE_16BIT = [row for row in DENSE if row["family"] == "dense_16bit"]
OTHERS = [row for row in JUDGED if row not in DENSE]
NEWEST_CAMPAIGN = "0.19.0"


def errors(rows: Sequence[dict[str, Any]], *figures: str) -> list[float]:
    """Return in percent, without sign, each row's error of the first of the figures that was observed."""
    found = []
    for row in rows:
        seen = next((row["error"][figure] for figure in figures if row["error"][figure] is not None), None)
        if seen is not None:
            found.append(abs(seen) * 100)
    return sorted(found)


def kv_errors(rows: Sequence[dict[str, Any]]) -> list[float]:
    return errors(rows, "kv_tokens", "kv_cache")


def nine_of_ten(values: Sequence[float]) -> float:
    return values[math.ceil(0.9 * len(values)) - 1]


def inside(rows: Sequence[dict[str, Any]], most: float) -> float:
    """Return the part of the rows whose true value lies in a band of at most +- `most` percent."""
    bands = [row["band"] for row in rows if row["band"]["inside"] is not None]
    narrow = [band for band in bands if band["inside"] and (band["half_width_percent"] or 0) <= most]
    return len(narrow) / len(bands)


def test_enough_is_judged_to_say_something() -> None:
    assert len(JUDGED) >= 70
    assert {row["engine"] for row in JUDGED} == {"vllm", "sglang", "tensorrt_llm"}
    assert len(DENSE_16BIT) >= 30
    assert len(OTHERS) >= 25


def test_bytes_of_a_token_are_exact_for_dense_models() -> None:
    figures = [one["bytes_per_token"] for one in RESULT["summary"]["classes"] if one["family"].startswith("dense")]
    assert sum(figure["rows"] for figure in figures) >= 30
    assert [figure["exact"] for figure in figures] == [figure["rows"] for figure in figures]


def test_weights() -> None:
    assert statistics.median(errors(JUDGED, "weights")) <= 1
    assert nine_of_ten(errors(DENSE, "weights")) <= 1


@pytest.mark.parametrize("campaign", [True, False])
def test_kv_cache_of_dense_models_in_16_bits(campaign: bool) -> None:
    rows = [row for row in DENSE_16BIT if (row["engine_version"] == NEWEST_CAMPAIGN) is campaign]
    assert statistics.median(kv_errors(rows)) <= 1


def test_kv_cache_of_nine_of_ten_dense_models_in_16_bits() -> None:
    assert nine_of_ten(kv_errors(DENSE_16BIT)) <= 3


def test_kv_cache_of_other_models_and_engines() -> None:
    assert statistics.median(kv_errors(OTHERS)) <= 5


def test_nine_of_ten_true_values_lie_in_narrow_bands_of_dense_models() -> None:
    assert inside(DENSE, 5) >= 0.9


def test_nine_of_ten_true_values_lie_in_narrow_bands_of_other_models_and_engines() -> None:
    assert inside(OTHERS, 15) >= 0.9


def test_every_start_and_every_failure_is_told_right() -> None:
    assert [row["id"] for row in JUDGED if row["error"]["fits_right"] is False] == []
    assert {OUTCOMES[row["id"]] for row in JUDGED} >= {"ok", "ok_memory_then_failed", "fail_no_kv"}


@pytest.mark.parametrize("by", ["by_source", "by_repository"])
def test_sources_that_were_left_out_are_predicted_as_well(by: str) -> None:
    classes = RESULT["summary"]["leave_one_source_out"][by]
    dense = [one for one in classes if one["part"].startswith("vllm") and one["family"] == "dense_16bit"]
    assert len(dense) == 2
    assert all(one["kv"]["median_percent"] <= 1 for one in dense)

"""Every claim has its evidence, and its figures are those that the planner computes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuready import catalog
from gpuready.planning import claims
from gpuready.rendering.claims import evidence, page

ROOT = Path(__file__).resolve().parents[2]
PAGE = catalog.load("claims")
CLAIMS: dict[str, dict[str, Any]] = {claim["id"]: claim for claim in PAGE["claims"]}
FUNCTIONS = {
    name: function
    for name, function in inspect.getmembers(claims, inspect.isfunction)
    if function.__module__ == claims.__name__ and not name.startswith("_")
}

# What has to be true of the figures for the verdict to be right.
FOLLOWS: dict[str, Callable[[dict[str, float]], bool]] = {
    "oom-70b-on-one-card": lambda f: f["weights_gib"] > f["card_gib"] and f["fp8_kv_gib"] < 5,
    "fragmentation-20-to-40-percent": lambda f: max(f.values()) < 5,
    "usable-50-to-60-of-80": lambda f: f["used_percent"] > 80,
    "granularity-2-mib": lambda f: f["taken_mib"] < 2,
    "kv-of-7b": lambda f: f["llama_2_7b_gb"] < 2 and f["qwen_2_5_7b_gb"] < 2,
    "kv-of-70b-at-32k": lambda f: f["request_gb"] < 30 < f["without_groups_gb"],
    "kv-of-tens-of-requests": lambda f: f["ten_requests_gb"] > 100,
    "kv-of-70b-batch-8": lambda f: f["eight_requests_gb"] > 2 * 30,
    "quantization-shrinks-kv": lambda f: f["kv_bytes_per_token"] == f["kv_bytes_per_token_awq"],
    "one-block-per-sequence": lambda f: f["tokens"] == 15,
    "tensorrt-pool-30-to-10": lambda f: f["percent"] < 10,
    "prefix-sharing-saves-half": lambda f: f["short_percent"] < 50 < f["long_percent"],
    "flash-attention": lambda f: 7.5 < f["compute_capability"] <= 8.0,
    "engines-for-t4": lambda f: f["vllm"] == 0 and f["sglang"] > 0 and f["tensorrt_llm"] > 0,
    "schemes-by-card": lambda f: f["a100_engines"] == f["h100_engines"] == 3,
    "mig-seven": lambda f: f["most"] == 7,
    "two-halves": lambda f: f["kv_7b_gib"] > 10 and f["kv_13b_gib"] > 5,
    "v100s-figures": lambda f: f["tflops"] < 17,
    "thirteen-on-v100s": lambda f: 0 < f["kv_gib"] < 8,
    "nvlink": lambda f: f["h100_nvlink_gb_s"] == 900,
    "uneven-cards": lambda f: f["weights_gib"] == pytest.approx(131.4 / 4, rel=0.01),
    "fp8-halves": lambda f: 50 < f["fp8_percent"] < f["fp8_8b_percent"] < 60,
    "weights-of-70b": lambda f: f["weights_gb"] == pytest.approx(140, rel=0.01),
    "usable-of-640": lambda f: f["used_gib"] > 450,
    "ten-trillion-tokens": lambda f: f["times"] > 100,
    "speed-of-405b": lambda f: f["bound_per_second"] > 50,
    "defaults-fail": lambda f: 0 < f["lost_gib"] < f["kv_1024_gib"],
    "requests-on-a100-40gb": lambda f: f["paged"] >= 200 and f["reserved_at_4096"] < 120,
    "requests-on-t4": lambda f: f["paged"] >= 60,
    "kv-at-most-half": lambda f: f["share_percent"] > 50 and f["lost_thousand"] > 0,
    "seven-on-a100-40gb": lambda f: 13 < f["weights_gb"] < 14 and f["kv_gb"] > 13 and f["free_gb"] < 10,
    "four-bits-double-concurrency": lambda f: 1 < f["times"] < 2 and f["weights_gb"] < 5,
    "four-bits-save-75": lambda f: f["saved_7b_percent"] < f["saved_70b_percent"] < 75,
    "batched-tokens": lambda f: 0 < f["percent_of_kv"] < 5,
    "several-models": lambda f: f["kv_13b_gib"] > 0,
    "thresholds": lambda f: max(f.values()) < 30,
    "ten-requests-lose-20gb": lambda f: 10 * f["mib"] < 20 * 1024,
    "waste-per-month": lambda f: f["measured_high_yuan"] < 20000 and f["quarter_low_yuan"] == 20000,
    "prices": lambda f: all(value > 0 for value in f.values()),
    "discounts": lambda f: f["t4_year_yuan"] == 720 and f["h100_machine_year_yuan"] == 68000,
    "slice-price": lambda f: f["card_high_yuan"] < f["slice_high_yuan"],
    "twentieth-of-a100": lambda f: f["slice_gib"] > 4 and f["weights_gib"] * 2**30 > 4e9,
}


def test_the_page_is_what_the_catalog_and_the_planner_make() -> None:
    found = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")

    assert found == page(), "docs/claims.md is old: run `gpuready spec docs`"


def test_every_claim_is_complete_and_every_function_is_used() -> None:
    assert len(CLAIMS) == len(PAGE["claims"])
    for claim in CLAIMS.values():
        assert {*claim} <= {"id", "topic", "claim", "verdict", "function", "evidence"}
        assert claim["verdict"] in PAGE["verdicts"]
        assert claim["topic"] in PAGE["topics"]
    assert {claim["function"] for claim in CLAIMS.values() if "function" in claim} == {*FUNCTIONS}
    assert {*FOLLOWS} == {name for name, claim in CLAIMS.items() if "function" in claim}


@pytest.mark.parametrize("name", FOLLOWS)
def test_the_figures_stand_on_the_page_and_bear_the_verdict(name: str) -> None:
    claim = CLAIMS[name]
    figures = FUNCTIONS[claim["function"]]()
    section = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8").split(f"### {name}\n")[1].split("\n###")[0]

    assert FOLLOWS[name](figures), figures
    shown = re.findall(r"\{(\w+):([^}]+)\}", claim["evidence"])
    assert shown
    for figure, form in shown:
        assert format(figures[figure], form) in section
    assert evidence(claim) in section
    assert "{" not in section


@pytest.mark.parametrize(
    ("function", "figure", "value"),
    [
        # 32 layers x 32 heads x 128 x 2 x 2 bytes x 2,048 tokens, and 28 layers x 4 heads.
        ("kv_of_7b", "llama_2_7b_gb", 32 * 32 * 128 * 4 * 2048 / 1e9),
        ("kv_of_7b", "qwen_2_5_7b_gb", 28 * 4 * 128 * 4 * 2048 / 1e9),
        ("kv_of_70b", "request_gb", 80 * 8 * 128 * 4 * 32768 / 1e9),
        ("kv_of_70b", "without_groups_gb", 80 * 64 * 128 * 4 * 32768 / 1e9),
        ("block_waste", "mib", 15 * 131072 / 2**20),
        ("fragmentation_at_failure", "first_percent", 402 / 19243.6 * 100),
        ("shared_prefix", "short_percent", 512 * 63 / (64 * 1536) * 100),
        ("v100s_arithmetic", "tflops", 16.353),
        ("ten_trillion_tokens", "wanted_per_second", 115740740.7),
        ("weights_of_70b", "weights_gb", 70553706496 * 2 / 1e9),
        ("cost_of_waste", "measured_high_yuan", 120000 * 402 / 19243.6),
        ("smallest_slice_of_a100", "slice_gib", 4.75),
    ],
)
def test_figures_that_arithmetic_decides(function: str, figure: str, value: float) -> None:
    assert FUNCTIONS[function]()[figure] == pytest.approx(value, rel=1e-4)

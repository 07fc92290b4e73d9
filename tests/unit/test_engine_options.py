"""Options that only some releases of an engine take, as their parsers and argument classes have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.planning_options import option

from gpuready.planning.memory.run import Run
from gpuready.planning.options import Served, options_of


def written(run: Run) -> dict[str, Any]:
    """Return all options of a deployment that runs so, by name."""
    made = option(run=run)
    made = replace(made, wish=replace(made.wish, engine=run.engine, version=run.version))
    place = {"model_path": "/data/llama", "engine_folder": "/opt/gpuready/engines/x-1-0"}
    served = Served({"model": "llama"}, made, run, {}, "some", {}, {}, frozenset(), place)
    groups = options_of(served, {})
    return {one["name"]: one["value"] for group in groups.values() for one in group}


def tensorrt_llm(version: str, **more: Any) -> dict[str, Any]:
    return written(Run("tensorrt_llm", version, max_model_len=4096, max_num_seqs=8, **more))


def test_tensorrt_llm_is_asked_for_its_statistics_and_for_nothing_that_1_0_refuses() -> None:
    """Its argument class forbids what it does not know; `return_perf_metrics` came later (llmapi/llm_args.py)."""
    found = tensorrt_llm("1.0.0", block_size=64)
    assert found["enable_iter_perf_stats"] is True
    assert not {"return_perf_metrics", "kv_cache_config.tokens_per_block"} & found.keys()
    assert tensorrt_llm("1.1.0", block_size=64)["kv_cache_config.tokens_per_block"] == 64


def test_a_kv_cache_of_given_bytes_is_told_in_tokens_where_the_engine_counts_so() -> None:
    gib = 2**30
    assert tensorrt_llm("1.0.0", kv_bytes=gib)["kv_cache_config.max_tokens"] == gib // 131072
    later = tensorrt_llm("1.2.0", kv_bytes=gib)
    assert later["kv_cache_config.max_gpu_total_bytes"] == gib
    assert "kv_cache_config.max_tokens" not in later
    two = written(Run("sglang", "0.5.23", max_model_len=4096, max_num_seqs=8, kv_bytes=gib, tp=2))
    assert two["max-total-tokens"] == 2 * gib // 131072


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.5.10", {"disable-cuda-graph": True}),
        ("0.5.23", {"cuda-graph-backend-decode": "disabled", "cuda-graph-backend-prefill": "disabled"}),
    ],
)
def test_cuda_graphs_of_sglang_are_given_up_by_words_that_its_file_may_hold(
    version: str, words: dict[str, Any]
) -> None:
    found = written(Run("sglang", version, max_model_len=4096, max_num_seqs=8, enforce_eager=True))
    assert {name: value for name, value in found.items() if "cuda-graph" in name} == words

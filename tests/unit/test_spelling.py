"""A run's settings as the engines spell them."""

from __future__ import annotations

from dataclasses import replace

from gpuready.planning.explain import spelling
from gpuready.planning.memory.run import Run

RUN = Run("vllm", "0.19.1", tp=2, max_model_len=17664, max_num_seqs=64, memory_fraction=0.9)


def test_defaults_and_splits_over_one_gpu_are_not_said() -> None:
    assert spelling.decided(spelling.settings(RUN)) == {
        "engine": "vllm",
        "version": "0.19.1",
        "tp": 2,
        "max_model_len": 17664,
        "max_num_seqs": 64,
        "memory_fraction": 0.9,
    }
    # One request at once is a limit, not a default.
    assert spelling.decided({"max_num_seqs": 1, "pp": 1, "prefix_caching": False}) == {"max_num_seqs": 1}


def test_each_engine_has_its_own_words() -> None:
    assert spelling.flags(RUN) == (
        "--tensor-parallel-size 2",
        "--max-model-len 17664",
        "--max-num-seqs 64",
        "--gpu-memory-utilization 0.9",
    )
    assert spelling.flags(replace(RUN, engine="sglang", version="0.5.10")) == (
        "--tp-size 2",
        "--context-length 17664",
        "--max-running-requests 64",
        "--mem-fraction-static 0.9",
    )
    assert spelling.flags(replace(RUN, engine="tensorrt_llm", version="1.1.0")) == (
        "tp_size: 2",
        "max_seq_len: 17664",
        "max_batch_size: 64",
        "kv_cache_config.free_gpu_memory_fraction: 0.9",
    )


def test_switches_have_no_value_and_are_said_where_they_change_something() -> None:
    on = Run("vllm", "0.19.1", ep=8, enforce_eager=True, prefix_caching=True)
    assert spelling.flags(on) == ("--enable-expert-parallel", "--enforce-eager", "--enable-prefix-caching")
    assert spelling.flags(Run("vllm", "0.19.1", prefix_caching=False)) == ("--no-enable-prefix-caching",)
    assert spelling.flags(Run("sglang", "0.5.10", prefix_caching=True)) == ()
    assert spelling.flags(Run("sglang", "0.5.10", prefix_caching=False)) == ("--disable-radix-cache",)
    assert spelling.flags(Run("sglang", "0.5.10", enforce_eager=True)) == ("--disable-cuda-graph",)
    off = Run("tensorrt_llm", "1.1.0", prefix_caching=False)
    assert spelling.flags(off) == ("kv_cache_config.enable_block_reuse: false",)


def test_two_settings_of_one_flag_are_said_once() -> None:
    run = Run("vllm", "0.19.1", max_num_batched_tokens=8192, chunked_prefill_size=8192)
    assert spelling.flags(run) == ("--max-num-batched-tokens 8192",)

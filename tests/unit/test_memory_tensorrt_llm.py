"""TensorRT-LLM's arithmetic against start-up logs that are public, and against its own rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuready.planning.memory import tensorrt_llm
from gpuready.planning.memory.estimate import Unresolved, estimate, request_gib
from gpuready.planning.memory.run import GIB, Device, Estimate, Run
from gpuready.planning.model import known

LLAMA = known.facts("meta-llama/Llama-3.1-8B-Instruct")
H100 = Device("h100-80gb-sxm", 79.19, 9.0)
GB10 = Device("gb10", 119.70, 12.1, unified=True)
VERSION = "1.1.0"


def estimated(device: Device, model: str = "meta-llama/Llama-3.1-8B-Instruct", **run: object) -> Estimate:
    return estimate(known.facts(model), device, replace(Run("tensorrt_llm", VERSION), **run))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "run", "bytes_per_token"),
    [
        ("openai/gpt-oss-120b", Run("tensorrt_llm", VERSION), 73_728),  # sliding layers like full ones
        ("meta-llama/Llama-3.1-8B-Instruct", Run("tensorrt_llm", VERSION, kv_dtype="fp8"), 65_536),
        ("meta-llama/Llama-3.1-8B-Instruct", Run("tensorrt_llm", VERSION, kv_dtype="nvfp4"), 36_864),
        ("meta-llama/Llama-3.1-8B-Instruct", Run("tensorrt_llm", VERSION, tp=4), 32_768),
        ("Qwen/Qwen3-235B-A22B-FP8", Run("tensorrt_llm", VERSION, tp=8), 48_128),
        ("moonshotai/Kimi-K2-Instruct", Run("tensorrt_llm", VERSION, tp=8, kv_dtype="fp8"), 35_136),
        ("meta-llama/Llama-3.1-8B-Instruct", Run("tensorrt_llm", VERSION, tp=4, dp=4, attention_dp=True), 131_072),
    ],
)
def test_bytes_of_one_token_on_a_gpu(model: str, run: Run, bytes_per_token: float) -> None:
    assert tensorrt_llm.token_bytes(known.facts(model), run) == bytes_per_token


# Tokens of whole blocks from the KV cache's own GiB, as the logs of TensorRT-LLM issues 4275 and 6294 print both.
@pytest.mark.parametrize(
    ("model", "gib", "kv_dtype", "tokens"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 16.05, "fp8", 263_008),
        ("meta-llama/Llama-3.1-8B-Instruct", 52.51, "fp8", 860_320),
        ("moonshotai/Kimi-K2-Instruct", 166.02, "fp8", 5_073_376),
        ("openai/gpt-oss-120b", 5.955, None, 86_720),
    ],
)
def test_tokens_of_a_given_cache(model: str, gib: float, kv_dtype: str | None, tokens: int) -> None:
    size = tensorrt_llm.token_bytes(known.facts(model), Run("tensorrt_llm", VERSION, kv_dtype=kv_dtype))
    found = int(gib * GIB // size) // 32 * 32
    # The GiB are printed with two decimals.
    assert found == pytest.approx(tokens, abs=0.005 * GIB / size + 32)


def test_the_fraction_is_of_what_the_trial_run_leaves() -> None:
    # gpt-oss-120b on GB10: 63.52 GiB of weights, peak 113.65 of 119.70 with 0.56 of the trial's own cache: 5.95 GiB.
    found = estimated(GB10, "openai/gpt-oss-120b", max_num_seqs=64, max_num_batched_tokens=8192)
    assert found.weights.value == pytest.approx(63.52, rel=0.01)
    assert found.kv.value == pytest.approx(5.95, rel=0.05)
    assert found.kv_tokens.low < 86_720 < found.kv_tokens.high
    free = found.total_gib - sum(
        part.value for part in (found.weights, found.activation, found.non_torch, found.outside)
    )
    assert found.kv.value == pytest.approx(0.9 * free)
    assert found.free_gib == pytest.approx(0.1 * free)


def test_what_the_engine_sets_by_itself_is_filled_in() -> None:
    run = estimated(H100).run
    assert (run.memory_fraction, run.max_num_seqs, run.max_num_batched_tokens, run.block_size, run.max_model_len) == (
        0.9,
        2048,
        8192,
        32,
        131_072,
    )


def test_a_given_cache_is_taken_where_there_is_room_for_it() -> None:
    assert estimated(H100, kv_bytes=10 * GIB).kv.value == 10
    assert estimated(H100, kv_bytes=100 * GIB).kv.value == estimated(H100).kv.value


def test_weights_larger_than_the_card_are_refused_with_what_to_do() -> None:
    found = estimated(H100, "meta-llama/Llama-3.1-70B-Instruct")
    assert not found.fits
    assert found.kv.value < 0
    assert "of the 79.19 GiB of h100-80gb-sxm; use more GPUs than 1" in found.refusal


def test_a_request_longer_than_the_cache_is_refused_only_where_it_was_asked_for() -> None:
    small = replace(H100, total_gib=24.0)
    assert estimated(small).fits
    assert estimated(small, max_model_len=131_072).refusal.startswith("one request of 131,072 tokens needs more")


def test_versions_before_the_pytorch_backend_are_refused() -> None:
    with pytest.raises(Unresolved, match=r"tensorrt_llm 0\.20\.0 is older than what is known"):
        estimate(LLAMA, H100, Run("tensorrt_llm", "0.20.0"))


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_more_memory_never_holds_fewer_tokens_and_parts_add_up(tp: int) -> None:
    tokens = []
    for total in (22.0, 44.4, 79.2, 139.8, 178.0):
        found = estimated(Device("card", total, 9.0), tp=tp)
        parts = (found.weights, found.activation, found.non_torch, found.kv, found.outside)
        assert sum(part.value for part in parts) + found.free_gib == pytest.approx(total)
        tokens.append(found.kv_tokens.value)
    assert tokens == sorted(tokens)
    assert tokens[0] < tokens[-1]


def test_requests_take_whole_blocks() -> None:
    run = Run("tensorrt_llm", VERSION)
    assert request_gib(LLAMA, run, 1) == request_gib(LLAMA, run, 32) == 32 * 131_072 / GIB
    assert request_gib(LLAMA, run, 33) == 64 * 131_072 / GIB

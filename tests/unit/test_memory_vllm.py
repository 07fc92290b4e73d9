"""vLLM's memory against what it reported itself: start-up logs that are public, and the arithmetic that decides alone.

Figures of version 0.19.0 on H100 are from the logs behind llm-d-incubation/llm-d-planner PR 205; the others are named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from gpuready.planning.memory import device as devices
from gpuready.planning.memory.estimate import estimate, request_gib
from gpuready.planning.memory.run import GIB, Device, Draft, Estimate, Lora, Run
from gpuready.planning.model import known

H100 = Device("h100-80gb-sxm", 79.19, 9.0)
CAMPAIGN = Run(
    "vllm", "0.19.0", max_model_len=8192, max_num_seqs=1024, max_num_batched_tokens=8192, memory_fraction=0.95
)
"""As all runs of that campaign were started, but for what a test changes."""


def campaign(name: str, **changes: object) -> Estimate:
    return estimate(known.facts(name), H100, replace(CAMPAIGN, **changes))  # type: ignore[arg-type]


def near(seen: float, part: float) -> object:
    return pytest.approx(seen, rel=part)


# name, changes, weights, activation, non-torch, KV GiB, tokens
DENSE = [
    ("meta-llama/Llama-3.1-8B-Instruct", {}, 14.99, 1.89, 0.25, 58.11, 476_016),
    ("meta-llama/Llama-3.1-8B-Instruct", {"kv_dtype": "fp8"}, 14.99, 1.89, 0.25, 58.11, 952_032),
    ("meta-llama/Llama-3.1-8B-Instruct", {"tp": 2}, 7.51, 1.89, 2.07, 63.76, 1_044_688),
    ("meta-llama/Llama-3.1-8B-Instruct", {"tp": 4}, 3.77, 1.89, 2.13, 67.44, 2_209_792),
    ("meta-llama/Llama-3.1-8B-Instruct", {"dtype": "float32"}, 29.98, 2.21, 0.25, 42.80, 175_296),
    ("meta-llama/Llama-3.1-8B-Instruct", {"quantization": "fp8"}, 8.49, 1.89, 0.25, 64.61, 529_248),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", {}, 5.38, 1.89, 0.25, 67.71, 554_704),
    ("Qwen/Qwen2.5-7B-Instruct", {}, 14.25, 2.21, 0.24, 58.53, 1_096_000),
    ("Qwen/Qwen2.5-7B-Instruct", {"tp": 2}, 7.12, 2.21, 2.06, 63.84, 2_390_592),
    ("Qwen/Qwen2.5-7B-Instruct", {"tp": 4}, 3.55, 2.21, 2.13, 67.34, 5_043_280),
    ("RedHatAI/Llama-3.3-70B-Instruct-fp8-dynamic", {"tp": 2}, 33.88, 1.96, 2.10, 37.28, 244_304),
    ("RedHatAI/Llama-3.3-70B-Instruct-fp8-dynamic", {"tp": 4}, 16.96, 1.97, 2.21, 54.09, 708_992),
    ("codellama/CodeLlama-7b-hf", {}, 12.56, 0.77, 0.25, 61.66, 126_256),
    ("microsoft/phi-4", {}, 27.39, 1.52, 0.25, 46.08, 241_568),
]
OTHERS = [
    ("mistralai/Mixtral-8x7B-Instruct-v0.1", {"tp": 2}, 43.51, 1.21, 2.07, 28.44, 465_936),
    ("deepseek-ai/DeepSeek-V2-Lite-Chat", {}, 29.43, 1.93, 0.26, 43.61, 1_505_552),
    ("moonshotai/Kimi-VL-A3B-Instruct", {}, 30.74, 2.92, 0.25, 41.32, 1_426_368),
    ("moonshotai/Kimi-VL-A3B-Instruct", {"tp": 2}, 15.53, 2.85, 2.07, 54.78, 1_890_896),
    ("Qwen/Qwen3-30B-A3B", {}, 56.88, 2.68, 0.27, 15.41, 168_288),
    ("google/gemma-3-27b-it", {}, 51.45, 3.99, 0.26, 19.53, 36_560),
    ("google/gemma-3-12b-it", {}, 23.31, 3.94, 0.25, 47.72, 130_304),
    ("google/gemma-3-4b-it", {}, 8.58, 3.89, 0.25, 62.51, 468_144),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", {"tp": 4}, 53.12, 3.19, 2.13, 16.75, 365_968),
    ("openai/gpt-oss-20b", {}, 13.64, 2.87, 0.25, 58.47, 1_277_184),
    ("openai/gpt-oss-20b", {"tp": 2}, 7.01, 2.87, 2.07, 63.28, 2_764_768),
]


@dataclass(frozen=True)
class Bar:
    """How near a prediction must come to a log: parts, and GiB of the activation peak."""

    weights: float
    activation_gib: float
    tokens: float


@pytest.mark.parametrize(
    ("golden", "bar"),
    [*((one, Bar(0.01, 0.02, 0.004)) for one in DENSE), *((one, Bar(0.015, 0.12, 0.04)) for one in OTHERS)],
)
def test_models_as_their_logs_say(
    golden: tuple[str, dict[str, object], float, float, float, float, int], bar: Bar
) -> None:
    name, changes, weights, activation, non_torch, kv_gib, tokens = golden
    found = campaign(name, **changes)
    assert found.weights.value == near(weights, bar.weights)
    assert found.activation.value == pytest.approx(activation, abs=bar.activation_gib)
    assert found.non_torch.value == pytest.approx(non_torch, abs=0.15)
    assert found.kv.value == near(kv_gib, bar.tokens)
    assert found.kv_tokens.value == near(tokens, bar.tokens)
    assert found.kv_tokens.low <= tokens <= found.kv_tokens.high
    assert found.fits


@pytest.mark.parametrize(
    ("name", "changes", "gib", "tokens"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", {}, 58.11, 476_016),
        ("meta-llama/Llama-3.1-8B-Instruct", {"kv_dtype": "fp8"}, 58.11, 952_032),
        ("meta-llama/Llama-3.1-8B-Instruct", {"dtype": "float32"}, 42.80, 175_296),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", {}, 43.61, 1_505_552),
        ("moonshotai/Kimi-VL-A3B-Instruct", {}, 41.32, 1_426_368),
        ("moonshotai/Kimi-VL-A3B-Instruct", {"tp": 2}, 54.78, 1_890_896),
        ("google/gemma-2-2b-it", {}, 66.47, 670_160),
        ("google/gemma-3-27b-it", {}, 19.53, 36_560),
        ("google/gemma-3-12b-it", {}, 47.72, 130_304),
        ("google/gemma-3-4b-it", {}, 62.51, 468_144),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", {"tp": 4}, 16.75, 365_968),
        ("openai/gpt-oss-20b", {"tp": 2}, 63.28, 2_764_768),
    ],
)
def test_tokens_of_a_given_cache_are_exact(name: str, changes: dict[str, object], gib: float, tokens: int) -> None:
    # The log rounds GiB to two decimals, which leaves that many tokens open.
    found = [campaign(name, kv_bytes=int((gib + half) * GIB), **changes).kv_tokens.value for half in (-0.005, 0.005)]
    assert found[0] <= tokens <= found[1]


def test_the_blocks_of_a_log_are_its_tokens() -> None:
    found = campaign("meta-llama/Llama-3.1-8B-Instruct", kv_bytes=29_751 * 16 * 131_072)
    assert (found.blocks, found.kv_tokens.value, found.bytes_per_token) == (29_751, 476_016, 131_072)


def test_key_value_heads_fewer_than_gpus_are_held_more_than_once() -> None:
    # 8 L40S, vLLM 0.10.2: 48,128 bytes per token on every GPU, 238,208 tokens in 10.65 GiB.
    model = known.facts("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "fp8")
    run = Run("vllm", "0.10.2", tp=8, ep=8, max_model_len=32_768, max_num_batched_tokens=2048, memory_fraction=0.9)
    found = estimate(model, Device("l40s-48gb", 44.42, 8.9, free_gib=43.93, nvlink=False), run)
    assert found.bytes_per_token == 48_128
    assert found.weights.value == near(27.72, 0.01)
    assert found.activation.value == pytest.approx(1.40, abs=0.02)
    assert found.kv_tokens.value == near(238_208, 0.01)
    assert any("held more than once" in note for note in found.notes)


def test_a_latent_cache_is_divided_by_dcp_alone() -> None:
    # Kimi-K2-Thinking on 8 H200: 715,072 tokens in 46.80 GiB, 5,721,088 with decode context parallelism over all 8.
    model = known.facts("moonshotai/Kimi-K2-Thinking", "int4")
    run = Run("vllm", "0.11.2", tp=8, max_model_len=131_072, kv_bytes=715_072 * 70_272)
    card = Device("h200-141gb-sxm", 139.8, 9.0)
    whole, divided = estimate(model, card, run), estimate(model, card, replace(run, dcp=8))
    assert whole.bytes_per_token == 70_272
    assert (whole.kv_tokens.value, divided.kv_tokens.value) == (715_072, 8 * 715_072)
    assert any("holds the whole latent KV cache" in note for note in whole.notes)


@pytest.mark.parametrize(
    ("name", "version", "tp", "tokens", "gib"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "0.10.2", 1, 131_072, 16.00),
        ("Qwen/Qwen3-8B", "0.19.0", 1, 40_960, 5.625),
        # Chunked layers have groups of their own only since 0.14.
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "0.10.2", 8, 1_048_576, 24.00),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "0.8.5", 2, 81_536, 81_536 * 98_304 / GIB),
    ],
)
def test_what_one_request_needs(name: str, version: str, tp: int, tokens: int, gib: float) -> None:
    run = Run("vllm", version, tp=tp, max_model_len=tokens)
    assert request_gib(known.facts(name), run, tokens) == pytest.approx(gib, abs=1e-9)


def test_a_sliding_window_keeps_its_window_and_the_tokens_in_flight() -> None:
    model = known.facts("google/gemma-3-12b-it")
    run = replace(CAMPAIGN, max_model_len=131_072)
    page = 16 * 2 * 8 * 256 * 2
    # One group of 8 full layers, and 5 of 8 sliding ones: window 1,024 less one, 8,192 in flight, one block more.
    assert request_gib(model, run, 131_072) * GIB == (8192 + 5 * (576 + 1)) * 8 * page
    twice = replace(run, version="0.31.0")
    assert request_gib(model, twice, 131_072) * GIB == (8192 + 5 * (1088 + 1)) * 8 * page


def test_tokens_are_printed_by_requests_since_0_21() -> None:
    model = known.facts("google/gemma-3-12b-it")
    run = replace(CAMPAIGN, max_model_len=131_072, kv_bytes=40 << 30)
    before, after = (estimate(model, H100, replace(run, version=one)) for one in ("0.20.2", "0.21.0"))
    assert before.blocks == after.blocks
    assert before.kv_tokens.value == before.blocks // 6 * 16
    assert after.kv_tokens.value == int(after.blocks / (8192 + 5 * 577) * 131_072)


def test_recurrent_states_lengthen_the_blocks() -> None:
    # Qwen3-Next-80B on 2 H200, vLLM 0.10.2: 7,162 blocks of 544 tokens in 4 groups, 973,760 tokens in 44.59 GiB.
    model = known.facts("Qwen/Qwen3-Next-80B-A3B-Instruct")
    run = Run("vllm", "0.10.2", tp=2, max_model_len=262_144, kv_bytes=7_162 * 12 * 544 * 1024)
    found = estimate(model, Device("h200-141gb-sxm", 139.81, 9.0), run)
    assert (found.block_tokens, found.blocks, found.kv_tokens.value) == (544, 7_162, 973_760)
    assert found.run.prefix_caching is False


@pytest.mark.parametrize(("tp", "dp", "requests"), [(8, 1, 20.43), (1, 8, 156.9 / 8)])
def test_a_compressed_cache_holds_as_many_requests_as_reported(tp: int, dp: int, requests: float) -> None:
    # DeepSeek-V4-Flash on 8 B200, vLLM 0.25.0: 20.43 requests of 1,048,576 tokens with TP 8, 156.9 on all with DP 8.
    run = Run(
        "vllm",
        "0.25.0",
        tp=tp,
        dp=dp,
        ep=8,
        kv_dtype="fp8",
        max_model_len=1_048_576,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        memory_fraction=0.95,
    )
    card = devices.device("b200")
    assert card is not None
    found = estimate(known.facts("deepseek-ai/DeepSeek-V4-Flash-0731"), card, run)
    assert found.kv_tokens.value / 1_048_576 == near(requests, 0.05)
    # A block has pages of 22 layers, of 21 layers' indexers and of 20 layers that compress 128 tokens to one vector.
    assert found.bytes_per_token == (22 * 37_440 + 21 * 8_640 + 20 * 1_728) / 256


@pytest.mark.parametrize(
    ("version", "name", "second"),
    [
        ("0.21.0", "Qwen/Qwen3-8B", False),
        ("0.22.0", "Qwen/Qwen3-8B", True),
        ("0.23.0", "Qwen/Qwen3-8B-FP8", False),
        ("0.24.0", "Qwen/Qwen3-8B-FP8", True),
        ("0.24.0", "microsoft/phi-4", False),
        ("0.25.0", "microsoft/phi-4", True),
        ("0.28.0", "Qwen/Qwen3-30B-A3B", False),
        ("0.29.0", "Qwen/Qwen3-30B-A3B", True),
    ],
)
def test_the_second_model_runner_samples_without_copies_of_the_logits(version: str, name: str, second: bool) -> None:
    model = known.facts(name)
    found = campaign(name, version=version, max_num_batched_tokens=1024)
    logits = 1024 * model.vocabulary * 2 / GIB
    assert (found.activation.value < 3 * logits) is second


def test_the_fullest_pipeline_stage_decides() -> None:
    # The first stage has the embedding and 8 layers; the last one also samples, and has room for fewer blocks.
    found = campaign("meta-llama/Llama-3.1-8B-Instruct", pp=4)
    assert found.kv_tokens.value == near(2_257_264, 0.004)
    assert found.weights.value == near(4.26, 0.01)
    assert found.bytes_per_token == 32_768
    assert any("4 pipeline stages" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "quantization", "version", "card", "changes", "activation", "kv_gib"),
    [
        # Start-up logs in the documents of llm-d (0.11), in issues (0.9.2, 0.10.2).
        ("Qwen/Qwen3-0.6B", None, "0.11.0", ("h100-80gb-sxm", 79.18, 9.0), {"memory_fraction": 0.9}, 5.56, 64.45),
        (
            "meta-llama/Llama-3.1-8B-Instruct",
            None,
            "0.11.0",
            ("h100-80gb-sxm", 79.18, 9.0),
            {"memory_fraction": 0.9},
            4.76,
            51.38,
        ),
        (
            "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic",
            None,
            "0.11.0",
            ("h100-80gb-sxm", 79.18, 9.0),
            {"memory_fraction": 0.9, "tp": 2},
            4.84,
            32.0,
        ),
        (
            "openai/gpt-oss-20b",
            None,
            "0.11.0",
            ("h100-80gb-sxm", 79.18, 9.0),
            {"memory_fraction": 0.9},
            7.38,
            50.28,
        ),
        ("Qwen/Qwen3-8B", None, "0.9.2", ("a100-40gb-sxm", 39.39, 8.0), {"max_num_batched_tokens": 2048}, None, 18.69),
        (
            "Qwen/Qwen3-8B-FP8",
            "fp8",
            "0.10.2",
            ("rtx-4090", 23.53, 8.9),
            {"memory_fraction": 0.8, "max_model_len": 1024},
            1.40,
            8.598,
        ),
        (
            "llava-hf/llava-v1.6-mistral-7b-hf",
            None,
            "0.10.2",
            ("h100-80gb-sxm", 79.19, 9.0),
            {"max_num_batched_tokens": 16_384, "max_model_len": 4096},
            1.97,
            55.15,
        ),
    ],
)
def test_older_releases_sort_the_whole_vocabulary(
    name: str,
    quantization: str | None,
    version: str,
    card: tuple[str, float, float],
    changes: dict[str, object],
    activation: float | None,
    kv_gib: float,
) -> None:
    run = replace(Run("vllm", version, max_model_len=16_000), **changes)  # type: ignore[arg-type]
    found = estimate(known.facts(name, quantization), Device(*card), run)
    if activation is not None:
        assert found.activation.value == pytest.approx(activation, abs=0.06)
    assert found.kv.value == near(kv_gib, 0.015)
    assert found.kv.low <= kv_gib <= found.kv.high


def test_weights_that_leave_nothing_are_refused_with_the_arithmetic() -> None:
    # vLLM 0.10.1 on one H100: 65.97 GiB of weights, -2.14 GiB for the KV cache.
    found = estimate(known.facts("openai/gpt-oss-120b"), H100, Run("vllm", "0.10.1"))
    assert found.weights.value == near(65.97, 0.01)
    assert found.kv.value == pytest.approx(-2.14, abs=0.1)
    assert (found.fits, found.surely_fits, found.kv_tokens.value) == (False, False, 0)
    assert "GiB are missing before the first token of KV cache" in found.refusal
    assert "use more GPUs (now 1), a smaller format" in found.refusal


def test_a_length_that_does_not_fit_is_refused_with_the_longest_that_does() -> None:
    model = known.facts("Qwen/Qwen3-8B")
    run = Run("vllm", "0.19.0", max_model_len=40_960, kv_bytes=int(4.5 * GIB))
    found = estimate(model, Device("24 GB class", 23.5, 8.6), run)
    assert not found.fits
    assert "needs 5.62 GiB of KV cache and 4.50 are left; set max_model_len to 32,768 or less" in found.refusal
    assert estimate(model, Device("24 GB class", 23.5, 8.6), replace(run, max_model_len=32_768)).fits


def test_a_cache_of_more_than_is_left_is_refused() -> None:
    found = campaign("meta-llama/Llama-3.1-8B-Instruct", kv_bytes=70 << 30)
    assert not found.fits
    assert "the KV cache is set to 70.00 GiB and 60." in found.refusal
    assert "beside the weights (14.99)" in found.refusal


def test_a_fraction_of_more_than_is_free_is_refused() -> None:
    found = estimate(known.facts("Qwen/Qwen3-0.6B"), replace(H100, free_gib=40.0), CAMPAIGN)
    assert not found.fits
    assert "asks for 75.23 of 79.19 GiB" in found.refusal
    assert "40.00 GiB are free when vLLM starts; set it to 0.5 or less" in found.refusal


def test_graphs_are_counted_since_0_20() -> None:
    model = known.facts("meta-llama/Llama-3.1-8B-Instruct")
    before, after = (estimate(model, H100, replace(CAMPAIGN, version=one)) for one in ("0.19.1", "0.20.0"))
    assert (before.graphs_counted, after.graphs_counted) == (False, True)
    assert after.kv.value == pytest.approx(before.kv.value - after.graphs.value, abs=0.1)
    assert any("on top of gpu_memory_utilization" in note for note in before.notes)
    eager = estimate(model, H100, replace(CAMPAIGN, version="0.20.0", enforce_eager=True))
    assert eager.graphs.value == 0
    assert eager.kv.value == pytest.approx(before.kv.value, abs=0.1)


def test_drafts_take_weights_and_cache() -> None:
    model = known.facts("meta-llama/Llama-3.1-8B-Instruct")
    alone = estimate(model, H100, CAMPAIGN)
    drafted = estimate(model, H100, replace(CAMPAIGN, draft=Draft(3, weight_bytes=1 << 30, kv_bytes_per_token=4096)))
    assert drafted.weights.value == pytest.approx(alone.weights.value + 1, abs=0.01)
    assert drafted.bytes_per_token == 131_072 + 4096


def test_adapters_have_slots_of_their_own() -> None:
    model = known.facts("meta-llama/Llama-3.1-8B-Instruct")
    alone, served = (estimate(model, H100, replace(CAMPAIGN, lora=one)) for one in (None, Lora(4, 16)))
    # Rank 16 on all linear layers of Llama-3.1-8B: 41,943,040 parameters of 2 bytes, as PEFT counts them.
    assert served.weights.value - alone.weights.value == pytest.approx(4 * 41_943_040 * 2 / GIB, rel=0.01)


def test_a_model_that_embeds_samples_nothing() -> None:
    model = known.facts("Qwen/Qwen3-8B")
    chats, embeds = (estimate(model, H100, replace(CAMPAIGN, task=one)) for one in ("generate", "embed"))
    assert embeds.activation.value < chats.activation.value - 1
    assert embeds.kv_tokens.value > chats.kv_tokens.value


@pytest.mark.parametrize(
    ("card", "version", "tokens", "requests"),
    [
        ("h100-80gb-sxm", "0.19.0", 8192, 1024),
        ("a100-80gb-sxm", "0.19.0", 2048, 256),
        ("a100-80gb-sxm", "0.8.5", 8192, 1024),
        ("l40s", "0.8.x", 2048, 1024),
        ("l40s", "0.8.4", 2048, 256),
        ("l40s", "0.19.0", 2048, 256),
        ("b200", "0.19.0", 8192, 1024),
        ("b200", "0.28.0", 16_384, 1024),
        ("h100-80gb-sxm:3g.40gb", "0.19.0", 2048, 256),
        ("t4", "0.8.5", 8192, 256),
    ],
)
def test_the_engines_own_batches_by_card_and_release(card: str, version: str, tokens: int, requests: int) -> None:
    found = devices.device(card)
    assert found is not None
    filled = estimate(known.facts("Qwen/Qwen3-0.6B"), found, Run("vllm", version, max_model_len=8192)).run
    assert (filled.max_num_batched_tokens, filled.max_num_seqs) == (tokens, requests)
    assert filled.memory_fraction == (0.92 if version == "0.28.0" else 0.90)


def test_a_version_that_is_a_range_starts_with_the_defaults_of_its_first_release() -> None:
    # L40S, 0.8.x: 158,656 tokens with everything at its default, which was 1,024 requests until 0.8.3.
    card = devices.device("l40s")
    assert card is not None
    found = estimate(known.facts("meta-llama/Llama-3.1-8B-Instruct"), card, Run("vllm", "0.8.x", max_model_len=32_768))
    assert found.kv_tokens.value == near(158_656, 0.03)
    assert found.kv_tokens.low <= 158_656 <= found.kv_tokens.high


def test_an_encoder_has_no_cache() -> None:
    card = devices.device("l40s")
    assert card is not None
    found = estimate(known.facts("BAAI/bge-m3"), card, Run("vllm", "0.19.1", task="embed"))
    assert (found.kv.value, found.kv_tokens.value, found.request_gib, found.fits) == (0, 0, 0, True)
    assert found.free_gib > 40


def test_experts_are_divided_over_data_parallel_gpus_too() -> None:
    model = known.facts("Qwen/Qwen3-30B-A3B")
    alone, both, spread = (
        estimate(model, H100, replace(CAMPAIGN, **split))  # type: ignore[arg-type]
        for split in ({}, {"dp": 2}, {"dp": 2, "ep": 2})
    )
    experts = 128 * 3 * 768 * 2048 * 48 * 2 / GIB
    assert alone.weights.value - both.weights.value == pytest.approx(experts / 2, abs=0.05)
    assert both.weights.value == pytest.approx(spread.weights.value, abs=0.05)
    assert both.bytes_per_token == alone.bytes_per_token


def test_a_feed_forward_part_without_gate_is_narrower() -> None:
    # Falcon-7B: 8,192 tokens x 18,176 wide, in and out of the activation; with a gate there would be half as much more.
    model = known.facts("tiiuae/falcon-7b")
    found = campaign("tiiuae/falcon-7b", max_num_seqs=1)
    assert model.intermediate == 18_176
    assert found.activation.value == pytest.approx(
        (2 * 8192 * 18_176 + 3.75 * 8192 * 4544) * 2 / GIB + 1 / 32, abs=0.01
    )


def test_graphs_on_amd_come_on_top_until_they_are_estimated_there() -> None:
    model = known.facts("meta-llama/Llama-3.1-8B-Instruct")
    card = Device("mi300x", 191.98, 9.4, vendor="amd")
    assert not estimate(model, card, replace(CAMPAIGN, version="0.25.0")).graphs_counted
    assert estimate(model, card, replace(CAMPAIGN, version="0.26.0")).graphs_counted

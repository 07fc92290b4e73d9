"""SGLang's arithmetic against start-up logs that are public, and against its own rules."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gpuready.planning.memory import sglang
from gpuready.planning.memory.estimate import estimate, request_gib
from gpuready.planning.memory.run import Device, Draft, Estimate, Run
from gpuready.planning.memory.sglang_settings import settings
from gpuready.planning.memory.versions import resolve
from gpuready.planning.model import known
from gpuready.planning.model.facts import AttentionGroup, Component, ModelFacts

LLAMA = known.facts("meta-llama/Llama-3.1-8B-Instruct")
H100 = Device("h100-80gb-sxm", 79.19, 9.0, board_mib=81559)
L40S = Device("l40s-48gb", 44.42, 8.9, board_mib=46068)
H200 = Device("h200-141gb-sxm", 139.81, 9.0, board_mib=143771)
B200 = Device("b200-180gb-sxm", 178.0, 10.0, board_mib=183359)
CARD_24GB = Device("rtx-4090", 23.53, 8.9, board_mib=24564)


def fraction(device: Device, run: Run, model: ModelFacts = LLAMA) -> float:
    return round(settings(model, device, run, resolve("sglang", run.version).values).fraction, 4)


def estimated(device: Device, version: str, model: ModelFacts = LLAMA, **run: object) -> Estimate:
    return estimate(model, device, replace(Run("sglang", version), **run))  # type: ignore[arg-type]


# Start-up logs: public, the first two rows of them in sgl-project/sglang PR 4760 and 13023.
@pytest.mark.parametrize(
    ("device", "version", "given", "model", "tokens", "within"),
    [
        (H100, "0.4.4", {}, "meta-llama/Llama-3.1-8B-Instruct", 442_750, 0.003),
        (L40S, "0.5.5", {}, "meta-llama/Llama-3.1-8B-Instruct", 183_133, 0.01),
        (
            replace(H100, free_gib=78.81),
            "0.4.1",
            {"memory_fraction": 0.88},
            "meta-llama/Llama-3.1-8B-Instruct",
            444_500,
            0.0005,
        ),
        (replace(H100, free_gib=78.47), "0.5.19", {"memory_fraction": 0.9}, "Qwen/Qwen3-32B", 39_078, 0.01),
        (H100, "0.5.19", {"memory_fraction": 0.9}, "Qwen/Qwen3-32B", 39_078, 0.02),
    ],
)
def test_tokens_are_those_of_the_log(
    device: Device, version: str, given: dict[str, float], model: str, tokens: int, within: float
) -> None:
    found = estimated(device, version, known.facts(model), **given)
    assert found.kv_tokens.value == pytest.approx(tokens, rel=within)


def test_the_kv_cache_is_what_the_fraction_leaves_of_what_was_free() -> None:
    # The log's own figures: 78.81 before the load, 63.72 after it, mem_fraction_static 0.88: K 27.13 and V 27.13.
    found = estimated(replace(H100, free_gib=78.81), "0.4.1", memory_fraction=0.88)
    assert found.weights.value == pytest.approx(78.81 - 63.72, abs=0.03)
    assert found.kv.value == pytest.approx(54.26, abs=0.03)
    assert found.bytes_per_token == 131_072


@pytest.mark.parametrize(
    ("device", "run", "expected"),
    [
        (H100, Run("sglang", "0.4.1"), 0.88),
        (H100, Run("sglang", "0.4.1", tp=2), 0.87),
        (H100, Run("sglang", "0.4.1", tp=4), 0.85),
        (H100, Run("sglang", "0.4.1", tp=8), 0.81),
        (H200, Run("sglang", "0.4.6"), 0.9074),
        (H200, Run("sglang", "0.4.6.post2"), 0.8718),
        (H200, Run("sglang", "0.4.7", draft=Draft(4)), 0.8576),
        (H100, Run("sglang", "0.4.7", draft=Draft(4)), 0.836),
        (B200, Run("sglang", "0.4.7"), 0.79),
        (CARD_24GB, Run("sglang", "0.4.9"), 0.879),
        (H100, Run("sglang", "0.4.9"), 0.874),
        (H100, Run("sglang", "0.5.2", tp=8, dp=8, attention_dp=True), 0.78),
        (L40S, Run("sglang", "0.5.5"), 0.851),
        (H100, Run("sglang", "0.5.5"), 0.835),
        (H100, Run("sglang", "0.5.5", draft=Draft(4)), 0.81),
        (H100, Run("sglang", "0.5.10"), 0.83),
        (H100, Run("sglang", "0.5.10", enforce_eager=True), 0.841),
        (H100, Run("sglang", "0.5.10", pp=2), 0.834),
        (CARD_24GB, Run("sglang", "0.5.19"), 0.833),
        (CARD_24GB, Run("sglang", "0.5.20"), 0.704),
        (B200, Run("sglang", "0.5.20"), 0.854),
        (H100, Run("sglang", "0.5.20", tp=8, dp=8, attention_dp=True), 0.586),
    ],
)
def test_the_default_fraction_is_that_of_the_version_and_the_card(device: Device, run: Run, expected: float) -> None:
    assert fraction(device, run) == expected


def test_an_image_encoder_lowers_the_default_by_its_size() -> None:
    seeing = replace(LLAMA, vision=True, vision_layers=27, vision_hidden=1152)
    rules = [("0.4.1", 0.88 * 0.95), ("0.4.5", 0.88 * 0.90), ("0.4.9.post3", 0.874 * 0.95 * 0.9576)]
    for version, expected in rules:
        assert fraction(H100, Run("sglang", version), seeing) == pytest.approx(expected, abs=0.0002)
    # Up to 0.4.8 even a fraction that was given.
    assert fraction(H100, Run("sglang", "0.4.1", memory_fraction=0.8), seeing) == 0.76
    assert fraction(H100, Run("sglang", "0.5.5", memory_fraction=0.8), seeing) == 0.8


def test_a_card_whose_board_figure_is_unknown_is_taken_for_a_little_more_than_cuda_says() -> None:
    assert fraction(replace(L40S, board_mib=None), Run("sglang", "0.5.5")) == 0.851
    assert fraction(Device("h100-80gb-sxm:3g.40gb", 39.5, 9.0), Run("sglang", "0.5.5")) == 0.831


@pytest.mark.parametrize(
    ("model", "run", "bytes_per_token"),
    [
        ("Qwen/Qwen3-235B-A22B-FP8", Run("sglang", "0.5.5", tp=4), 48_128),
        ("Qwen/Qwen3-235B-A22B-FP8", Run("sglang", "0.5.5", tp=8), 48_128),  # 4 KV heads, of which every GPU holds one
        ("deepseek-ai/DeepSeek-R1", Run("sglang", "0.5.5", tp=8), 70_272),
        ("deepseek-ai/DeepSeek-R1", Run("sglang", "0.5.5", tp=1), 70_272),
        ("deepseek-ai/DeepSeek-V3.2", Run("sglang", "0.5.5", tp=8), 70_272 + 61 * 132),
        ("meta-llama/Llama-3.1-8B-Instruct", Run("sglang", "0.5.5", kv_dtype="fp8_e4m3"), 65_536),
        ("meta-llama/Llama-3.1-8B-Instruct", Run("sglang", "0.5.5", tp=8), 16_384),
        ("meta-llama/Llama-3.1-8B-Instruct", Run("sglang", "0.5.5", tp=8, dp=8, attention_dp=True), 131_072),
        ("openai/gpt-oss-120b", Run("sglang", "0.5.5"), 73_728),
        ("openai/gpt-oss-120b", Run("sglang", "0.5.8"), 73_728 / 2 * 1.8),
    ],
)
def test_bytes_of_one_token_on_a_gpu(model: str, run: Run, bytes_per_token: float) -> None:
    constants = resolve("sglang", run.version)
    assert sglang.cell(known.facts(model), run, constants).per_token(0.8) == pytest.approx(bytes_per_token)


def test_sliding_layers_have_a_pool_of_their_own_since_0_5_8() -> None:
    # MiMo-V2-Flash: 375,360 and 300,288 tokens, sgl-project/sglang PR 18039.
    model, constants = known.facts("openai/gpt-oss-120b"), resolve("sglang", "0.5.9")
    run = Run("sglang", "0.5.9", block_size=64)
    size = sglang.cell(model, run, constants)
    held = sglang.pools(375_360 * size.per_token(0.8) / 2**30, model, run, constants)
    assert (held.tokens, held.sliding_tokens) == (375_360, 300_288)
    assert request_gib(model, replace(run, version="0.5.5"), 100_000) > 1.9 * request_gib(model, run, 100_000)


RECURRENT = ModelFacts(
    architecture="Hybrid",
    model_type="hybrid",
    task="generate",
    layers=4,
    hidden=1024,
    heads=8,
    intermediate=4096,
    vocabulary=1000,
    context_tokens=4096,
    dtype="bfloat16",
    groups=(
        AttentionGroup("recurrent", 3, conv_elements=1 << 18, state_elements=1 << 20),
        AttentionGroup("full", 1, 8, 128, 128),
    ),
    order=(0, 0, 0, 1),
    components=(Component("mlp", 1 << 30, 1 << 31),),
    weights_from="config",
)


def test_states_of_recurrent_layers_are_set_aside_before_the_tokens() -> None:
    # Since 0.5.4 they take 0.9 parts of 1.9; a state here is 3 x (2^18 x 2 + 2^20 x 4) bytes, a token 4096.
    held = sglang.pools(19.0, RECURRENT, Run("sglang", "0.5.5"), resolve("sglang", "0.5.5"))
    assert held.recurrent_slots == 9 * 2**30 // (3 * (2**19 + 2**22))
    assert held.tokens == (19 * 2**30 - held.recurrent_slots * 3 * (2**19 + 2**22)) // 4096
    # Before, as many as requests may run.
    held = sglang.pools(19.0, RECURRENT, Run("sglang", "0.5.3"), resolve("sglang", "0.5.3"))
    assert held.recurrent_slots == 512


def test_pages_are_whole() -> None:
    found = estimated(H100, "0.5.5", block_size=64)
    assert found.kv_tokens.value % 64 == 0
    assert found.blocks * 64 == found.kv_tokens.value


def test_requests_at_once_follow_from_the_tokens_for_each_context() -> None:
    assert sglang.max_running_requests(444_500, LLAMA, Run("sglang", "0.4.1")) == 2048
    assert sglang.max_running_requests(1_000_000, LLAMA, Run("sglang", "0.4.1", max_model_len=131_072)) == 3906
    assert sglang.max_running_requests(4_000_000, LLAMA, Run("sglang", "0.4.1", max_model_len=2048)) == 4096
    assert sglang.max_running_requests(1_000, LLAMA, Run("sglang", "0.4.1")) == 500


def test_a_draft_model_is_weighed_before_the_kv_cache_since_0_5_14() -> None:
    draft = Draft(4, weight_bytes=2 * 2**30)
    before = estimated(H100, "0.5.13", memory_fraction=0.8, draft=draft)
    after = estimated(H100, "0.5.14", memory_fraction=0.8, draft=draft)
    assert after.weights.value - before.weights.value == pytest.approx(2)


def test_a_draft_models_kv_shares_the_tokens_since_0_5_11() -> None:
    draft = Draft(4, kv_bytes_per_token=4096)
    before = sglang.cell(LLAMA, Run("sglang", "0.5.10", draft=draft), resolve("sglang", "0.5.10"))
    after = sglang.cell(LLAMA, Run("sglang", "0.5.11", draft=draft), resolve("sglang", "0.5.11"))
    assert (before.full, after.full) == (131_072, 135_168)


def test_weights_that_fill_the_fraction_are_refused_with_the_fraction_that_would_do() -> None:
    card = Device("card", 17.0, 8.9, free_gib=16.5, board_mib=17500)
    found = estimated(card, "0.5.5", memory_fraction=0.8)
    assert not found.fits
    assert found.kv.value < 0
    told = re.search(r"raise it above (0\.\d{3})", found.refusal)
    assert told
    assert estimated(card, "0.5.5", memory_fraction=float(told[1]) - 0.001).kv_tokens.value == 0
    assert estimated(card, "0.5.5", memory_fraction=float(told[1]) + 0.001).kv_tokens.value > 0


def test_weights_larger_than_the_card_are_refused_with_what_to_do() -> None:
    found = estimated(H100, "0.5.5", known.facts("meta-llama/Llama-3.1-70B-Instruct"))
    assert not found.fits
    assert "use more GPUs than 1, a larger card or a smaller format" in found.refusal


def test_a_request_longer_than_the_cache_is_refused_only_where_it_was_asked_for() -> None:
    assert estimated(CARD_24GB, "0.4.9").fits
    found = estimated(CARD_24GB, "0.4.9", max_model_len=131_072)
    assert not found.fits
    assert found.refusal.startswith("one request of 131,072 tokens needs more than the")


MEMORY = [Device("card", total, 9.0) for total in (18.0, 23.5, 31.4, 44.4, 60.0, 79.2, 139.8, 178.0)]


@pytest.mark.parametrize("version", ["0.4.1", "0.4.6", "0.4.8", "0.5.5", "0.5.10", "0.5.20"])
def test_more_memory_never_holds_fewer_tokens(version: str) -> None:
    tokens = [estimated(device, version, memory_fraction=0.85).kv_tokens.value for device in MEMORY]
    assert tokens == sorted(tokens)
    assert tokens[-1] > tokens[0] > -1


@pytest.mark.parametrize("version", ["0.4.1", "0.4.8", "0.5.5", "0.5.10", "0.5.20"])
@pytest.mark.parametrize("device", MEMORY, ids=lambda device: str(device.total_gib))
def test_the_parts_add_up_to_the_card(version: str, device: Device) -> None:
    found = estimated(device, version)
    parts = (found.weights, found.activation, found.non_torch, found.kv, found.outside)
    rounding = found.bytes_per_token / 2**30
    assert sum(part.value for part in parts) + found.free_gib == pytest.approx(device.total_gib, abs=2 * rounding)


def test_a_longer_length_never_takes_less() -> None:
    lengths = [
        estimated(H100, "0.5.5", block_size=64, max_model_len=tokens).request_gib for tokens in (1, 64, 65, 9000)
    ]
    assert lengths == sorted(lengths)
    assert lengths[0] == lengths[1] < lengths[2]


def test_a_compressed_cache_is_said_to_be_counted_otherwise() -> None:
    found = estimated(H200, "0.5.20", known.facts("deepseek-ai/DeepSeek-V4-Flash"), tp=8)
    assert any("compressed cache is counted vector by vector" in note for note in found.notes)
    assert not any("compressed" in note for note in estimated(H200, "0.5.20").notes)


def test_encoders_have_a_cache_of_all_their_layers() -> None:
    # 24 layers, 16 heads of 64 for keys and for values; the checkpoint is in 32 bits and runs in 16.
    found = estimated(H100, "0.5.10", known.facts("BAAI/bge-m3"), task="embed")
    assert found.bytes_per_token == 24 * 16 * 128 * 2
    assert found.fits

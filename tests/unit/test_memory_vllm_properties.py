"""What must hold for every model, card and release: monotony, sums that add up, and answers for whatever is known."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from gpuready import catalog
from gpuready.planning.memory.estimate import estimate, request_gib
from gpuready.planning.memory.run import GIB, Device, Lora, Run
from gpuready.planning.model import known

NAMES = [
    "meta-llama/Llama-3.1-8B-Instruct",
    "google/gemma-3-12b-it",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "openai/gpt-oss-20b",
]
VERSIONS = ["0.8.5", "0.9.2", "0.11.0", "0.17.0", "0.19.1", "0.21.0", "0.28.0", "0.33.0"]
CASES = list(itertools.product(NAMES, VERSIONS))
CARDS = [
    Device("t4", 14.7, 7.5),
    Device("l40s-48gb", 44.42, 8.9, nvlink=False),
    Device("h100-80gb-sxm", 79.19, 9.0),
    Device("b200-180gb-sxm", 178.3, 10.0),
]


@pytest.mark.parametrize(("name", "version"), CASES)
def test_parts_add_up_to_the_card(name: str, version: str) -> None:
    model = known.facts(name)
    for card, tp, pp in itertools.product(CARDS, (1, 2, 8), (1, 2)):
        found = estimate(model, card, Run("vllm", version, tp=tp, pp=pp, max_model_len=8192))
        parts = found.weights.value + found.activation.value + found.non_torch.value + found.kv.value
        if found.graphs_counted:
            parts += found.graphs.value
        assert parts == pytest.approx(found.budget_gib, abs=1e-6)
        assert found.budget_gib + found.outside.value + found.free_gib == pytest.approx(card.total_gib, abs=1e-6)
        for figure in (found.weights, found.activation, found.non_torch, found.graphs, found.kv, found.kv_tokens):
            assert figure.low <= figure.value <= figure.high
        assert found.surely_fits <= found.fits
        assert bool(found.refusal) is not found.fits


@pytest.mark.parametrize(("name", "version"), CASES)
def test_more_memory_never_holds_fewer_tokens(name: str, version: str) -> None:
    model = known.facts(name)
    run = Run("vllm", version, tp=4, max_model_len=32_768, max_num_seqs=64, max_num_batched_tokens=4096)
    held = [estimate(model, Device("card", gib / 4, 9.0), run).kv_tokens for gib in range(24 * 4, 200 * 4, 37)]
    assert all(less.value <= more.value for less, more in itertools.pairwise(held))
    assert all(less.low <= more.low and less.high <= more.high for less, more in itertools.pairwise(held))


@pytest.mark.parametrize(("name", "version"), CASES)
def test_a_longer_length_never_allows_more_requests(name: str, version: str) -> None:
    model = known.facts(name)
    run = Run("vllm", version, tp=4, max_num_seqs=64, max_num_batched_tokens=4096)
    lengths = [1, 15, 16, 17, 1000, 4096, 5000, 20_000, 131_072]
    needed = [request_gib(model, run, length) for length in lengths]
    assert needed == sorted(needed)
    kv = 20.0
    requests = [math.floor(kv / one) for one in needed]
    assert requests == sorted(requests, reverse=True)


def test_every_public_model_is_answered() -> None:
    for entry in catalog.load("models")["models"]:
        model = known.facts(entry["id"])
        for version in VERSIONS:
            for run in (Run("vllm", version), Run("vllm", version, tp=8, ep=8, kv_dtype="fp8", lora=Lora(2, 8))):
                found = estimate(model, CARDS[2], run)
                assert math.isfinite(found.kv.value), entry["id"]
                assert found.weights.value > 0, entry["id"]
                assert found.fits or found.refusal, entry["id"]


def test_a_cache_in_eight_bits_holds_twice_the_tokens_in_the_same_bytes() -> None:
    model = known.facts(NAMES[0])
    run = Run("vllm", "0.19.0", kv_bytes=20 << 30, max_model_len=4096)
    plain, half = estimate(model, CARDS[2], run), estimate(model, CARDS[2], replace(run, kv_dtype="fp8"))
    assert half.kv_tokens.value == 2 * plain.kv_tokens.value
    assert half.kv.value == plain.kv.value == 20
    parts = (plain.weights, plain.activation, plain.non_torch, plain.kv)
    assert plain.budget_gib == pytest.approx(sum(part.value for part in parts))


def test_what_is_left_of_the_length_search_is_the_longest_that_fits() -> None:
    model = known.facts(NAMES[1])
    run = Run("vllm", "0.31.0", kv_bytes=4 << 30, max_model_len=131_072)
    refused = estimate(model, CARDS[2], run)
    longest = int(refused.refusal.split("set max_model_len to ")[1].split(" or less")[0].replace(",", ""))
    assert estimate(model, CARDS[2], replace(run, max_model_len=longest)).fits
    assert not estimate(model, CARDS[2], replace(run, max_model_len=longest + 1)).fits
    assert request_gib(model, run, longest) * GIB <= 4 << 30


@pytest.mark.parametrize(("engine", "version"), [("vllm", "0.8.5"), ("vllm", "0.19.1"), ("sglang", "0.5.10")])
def test_checkpoints_in_32_bits_run_in_16_unless_it_is_said(engine: str, version: str) -> None:
    model, card = known.facts("allenai/OLMo-2-0325-32B"), Device("h200-141gb-sxm", 139.8, 9.0)
    assert model.dtype == "float32"
    run = Run(engine, version, max_model_len=4096)
    usual, half, said = (estimate(model, card, replace(run, dtype=dtype)) for dtype in (None, "half", "float32"))
    assert (usual.weights, usual.bytes_per_token) == (half.weights, half.bytes_per_token)
    assert said.weights.value == pytest.approx(2 * usual.weights.value, rel=0.01)
    assert said.bytes_per_token == 2 * usual.bytes_per_token == 64 * 8 * 128 * 2 * 4
    assert request_gib(model, replace(run, dtype="float"), 4096) == said.request_gib == 2 * usual.request_gib

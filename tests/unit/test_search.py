"""How the planner runs one deployment: the way it finds, what it refuses, and that its figures never contradict."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from gpuready.outcome import Refusal
from gpuready.planning import search
from gpuready.planning.memory.device import device
from gpuready.planning.memory.estimate import estimate, request_gib
from gpuready.planning.memory.run import Draft, Lora, Run
from gpuready.planning.model import known
from gpuready.planning.search import nearest, sizing
from gpuready.planning.search.candidates import LOSSY_KV, splits
from gpuready.planning.wish import Lengths, Option, Place, Wish, Workload

LLAMA_8B = "meta-llama/Llama-3.1-8B-Instruct"
LLAMA_70B = "meta-llama/Llama-3.3-70B-Instruct"
DEEPSEEK = "deepseek-ai/DeepSeek-V3"


def wish(model: str = LLAMA_8B, concurrency: int = 64, **change: Any) -> Wish:
    load = Workload(Lengths(800, 16000), Lengths(300, 1500), concurrency)
    made = Wish("chat", model, known.facts(model), "vllm", "0.19.1", load)
    return replace(made, **change)


def place(card: str = "h100-80gb-sxm", count: int = 1, **change: Any) -> Place:
    found = device(card)
    assert found is not None
    return replace(Place(found, count), **change)


def refusal(asked: Wish, at: Place) -> str:
    with pytest.raises(Refusal) as caught:
        search.best(asked, at)
    (failure,) = caught.value.failures
    return failure.sentence()


def test_a_small_model_is_served_whole_and_every_setting_has_its_reason() -> None:
    found = search.best(wish(), place())
    assert found.binding == "wanted"
    assert (found.concurrency, found.replicas, found.lossy) == (64, 1, ())
    # 16,000 and 1,500 rounded up to 256; 64 and a quarter more.
    assert (found.run.max_model_len, found.run.max_num_seqs, found.run.max_num_batched_tokens) == (17664, 80, 8192)
    for setting in ("max_model_len 17,664", "max_num_seqs 80", "max_num_batched_tokens 8,192", "memory_fraction 0.9"):
        assert any(reason.startswith(setting) for reason in found.reasons)


def test_smallest_replica_that_serves_everything_comes_first() -> None:
    few, many = search.best(wish(), place(count=8)), search.best(wish(concurrency=2000), place(count=8))
    assert (few.run.tp, few.replicas, few.run.max_num_seqs) == (1, 8, 16)
    assert many.run.tp > 1
    assert many.concurrency == 2000
    assert "would not serve them all" in many.reasons[0]


def test_what_cannot_be_served_whole_is_served_as_far_as_it_goes() -> None:
    found = search.best(wish(concurrency=2000), place())
    assert found.binding == "kv"
    assert found.concurrency == found.run.max_num_seqs == found.possible
    # Many more than of the longest, which is what a guess by the worst case would allow.
    assert found.concurrency > 5 * found.estimate.kv.value / found.estimate.request_gib


def test_a_tensor_parallel_group_stays_among_the_gpus_that_nvlink_joins() -> None:
    free = search.best(wish(LLAMA_70B), place("a100-80gb-pcie", 4))
    bridged = search.best(wish(LLAMA_70B), place("a100-80gb-pcie", 4, island=2))
    assert (free.run.tp, free.run.pp) == (4, 1)
    assert (bridged.run.tp, bridged.run.pp) == (2, 2)
    assert "2 GPUs that NVLink joins" in bridged.reasons[0]


def test_heads_that_do_not_divide_are_split_into_stages() -> None:
    found = search.best(wish(LLAMA_70B, 16), place(count=3))
    assert (found.run.tp, found.run.pp, found.replicas) == (1, 3, 1)


def test_slices_are_replicas_of_one_each() -> None:
    found = search.best(wish(), place("h100-80gb-sxm:3g.40gb", 2))
    assert (found.run.tp, found.replicas, found.estimate.total_gib) == (1, 2, 39.5)


def test_nothing_is_lost_unless_it_is_allowed_and_needed() -> None:
    assert not search.options(wish(LLAMA_70B, 8), place())
    lossy = search.best(wish(LLAMA_70B, 8, allow_lossy=True), place())
    assert (lossy.run.quantization, lossy.run.kv_dtype) == ("fp8", "fp8")
    assert lossy.lossy == ("weights in FP8, made while loading", LOSSY_KV)
    assert any("without it" in reason for reason in lossy.reasons)
    assert search.best(wish(LLAMA_8B, 8, allow_lossy=True), place()).lossy == ()


def test_an_older_engine_that_computes_prompts_whole_is_not_said_to_split_them() -> None:
    load = Workload(Lengths(3000, 3000), Lengths(1000, 1000), 8)
    old = search.best(wish(version="0.8.5.post1", workload=load), place("v100s-32gb"))
    assert old.estimate.whole_prompts
    assert any(reason.startswith("no chunked prefill: its older engine (V0)") for reason in old.reasons)
    assert "max_num_batched_tokens 4,096: vLLM 0.8.5.post1's own, the longest request and 2,048 at least" in old.reasons
    assert any(reason.startswith("chunked prefill: ") for reason in search.best(wish(), place()).reasons)


def test_card_without_bfloat16_computes_in_float16() -> None:
    found = search.best(wish("Qwen/Qwen2.5-3B-Instruct", 4), place("t4"))
    assert found.run.dtype == "float16"
    assert any("float16" in reason for reason in found.reasons)


def test_latent_attention_is_told_how_to_divide_its_cache() -> None:
    found = search.best(wish(DEEPSEEK), place("h200-141gb-sxm", 8))
    (advice,) = [reason for reason in found.reasons if "decode-context-parallel-size 8" in reason]
    tokens = [int(word.replace(",", "")) for word in advice.split() if word.replace(",", "").isdigit()]
    assert tokens[-2] == pytest.approx(8 * tokens[-1], rel=0.001)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"max_model_len": 900_000},
            "max_model_len = 900000 is refused: " + LLAMA_8B + " has a context of 131072; set",
        ),
        ({"memory_fraction": 0.999}, "asks for 79.11 of 79.19 GiB on h100-80gb-sxm"),
        ({"memory_fraction": 0.1}, "memory_fraction = 0.1 does not fit: 79.19 GiB - weights 14.99"),
        ({"kv_bytes": 80 << 30}, "kv_bytes = 85899345920 does not fit"),
        ({"max_num_seqs": 200_000}, "max_num_seqs = 200000 does not fit"),
        ({"max_num_seqs": 300, "max_num_batched_tokens": 256}, "vLLM takes no fewer than max_num_seqs, which is 300"),
        ({"dtype": "float4"}, "known are"),
        ({"kv_dtype": "fp7"}, "known are auto"),
        ({"tp": 3}, "tp = 3 cannot be split over 1 x H100"),
    ],
)
def test_what_was_set_and_cannot_be_is_refused_with_the_arithmetic(settings: dict[str, Any], words: str) -> None:
    assert words in refusal(wish(settings=settings), place())


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        ("memory_fraction", 0.999, {}),
        ("memory_fraction", 0.1, {}),
        ("kv_bytes", 80 << 30, {}),
        ("kv_bytes", 1 << 20, {}),
        ("max_num_seqs", 200_000, {}),
        ("max_model_len", 120_000, {"memory_fraction": 0.3}),
    ],
)
def test_the_value_that_a_refusal_names_works(name: str, value: float, others: dict[str, Any]) -> None:
    asked = wish(settings={name: value, **others})
    said = refusal(asked, place())
    named = float(said.rstrip(".").rpartition(" ")[2])
    assert ("at most" if named < value else "at least") in said
    right = named if name == "memory_fraction" else int(named)
    assert search.options(replace(asked, settings={**others, name: right}), place())


def test_what_was_set_wins() -> None:
    set_ = {"max_num_seqs": 7, "max_model_len": 5000, "max_num_batched_tokens": 1024, "memory_fraction": 0.5}
    found = search.best(wish(settings=set_), place())
    assert {name: getattr(found.run, name) for name in set_} == set_
    assert (found.binding, found.concurrency) == ("max_num_seqs", 7)
    assert any(reason.startswith("memory_fraction 0.5, as it was set") for reason in found.reasons)


def test_headroom_that_was_set_is_left() -> None:
    found = search.best(wish(headroom_gib=10.0), place())
    assert 10.0 <= sizing.spare(found.estimate) < 10.1
    assert found.estimate.free_gib >= 10.0


def test_lengths_beyond_the_models_context_are_refused() -> None:
    load = Workload(Lengths(1, 200_000), Lengths(1, 1500), 1)
    assert "prompt and output p99 are 201500 tokens together" in refusal(wish(workload=load), place())


def test_a_refusal_names_what_works_and_it_does() -> None:
    said = refusal(wish(LLAMA_70B), place())
    assert "weights 131.4" in said
    assert "give it 2 GPUs, or set allow_lossy: true (weights in FP8, made while loading)" in said
    assert search.options(wish(LLAMA_70B), place(count=2))
    smaller = nearest.quantized(known.facts(LLAMA_70B), "fp8", 8)
    assert search.options(replace(wish(LLAMA_70B), model=smaller), place())


def test_shorter_requests_are_named_where_they_would_fit() -> None:
    asked = wish(settings={"kv_dtype": "auto"}, workload=Workload(Lengths(800, 100_000), Lengths(300, 1500), 4))
    said = refusal(asked, place("l40s-48gb:", 1, shared_gib=26.0))
    tokens = int(said.partition("set max_model_len to ")[2].split(" ")[0].replace(",", ""))
    shorter = replace(asked, settings={**asked.settings, "max_model_len": tokens})
    assert search.options(shorter, place("l40s-48gb", 1, shared_gib=26.0))
    longer = replace(asked, settings={**asked.settings, "max_model_len": tokens + 256})
    assert not search.options(longer, place("l40s-48gb", 1, shared_gib=26.0))


def test_a_slice_that_is_too_small_names_the_next_that_is_not() -> None:
    assert "give it a slice 1g.20gb" in refusal(wish(), place("h100-80gb-sxm:1g.10gb"))
    assert search.options(wish(), place("h100-80gb-sxm:1g.20gb"))


def test_engines_and_versions_that_are_not_known_are_refused() -> None:
    assert "vllm 9.9.9 is no release that is known" in refusal(wish(version="9.9.9"), place())
    assert "exllama 0.19.1 cannot be planned" in refusal(wish(engine="exllama"), place())


def test_a_card_on_which_the_engine_does_not_run_is_refused_with_one_that_does() -> None:
    said = refusal(wish(engine="sglang", version="0.5.10"), place("t4"))
    assert "SGLang 0.5.10 on NVIDIA T4 16GB" in said
    assert "vLLM" in said


@pytest.mark.parametrize("engine", ["sglang", "tensorrt_llm"])
def test_other_engines_are_searched_by_their_own_arithmetic(engine: str) -> None:
    version = {"sglang": "0.5.10", "tensorrt_llm": "1.2.0"}[engine]
    found = search.best(wish(engine=engine, version=version), place(count=2))
    assert (found.concurrency, found.run.tp, found.replicas) == (64, 1, 2)
    assert sizing.spare(found.estimate) >= 0


def test_a_fraction_is_raised_where_the_engines_own_does_not_do() -> None:
    own = search.best(wish(engine="sglang", version="0.5.10", concurrency=8), place())
    more = search.best(wish(engine="sglang", version="0.5.10", concurrency=2000), place())
    assert (own.run.memory_fraction or 0) < (more.run.memory_fraction or 0)
    assert sizing.spare(more.estimate) >= sizing.headroom_gib(more.wish, more.place)


def test_drafts_and_adapters_reach_the_run() -> None:
    found = search.best(wish(draft=Draft(3, 2 << 30, 4096.0), lora=Lora(4, 16)), place())
    plain = search.best(wish(), place())
    assert (found.run.draft, found.run.lora) == (Draft(3, 2 << 30, 4096.0), Lora(4, 16))
    # A slot of rank 16 for Llama-3.1-8B has 41,943,040 parameters.
    slots = 4 * 41_943_040 * 2 / 2**30
    assert found.estimate.weights.value == pytest.approx(plain.estimate.weights.value + 2 + slots, abs=0.01)


def test_the_same_wish_has_the_same_answer() -> None:
    assert search.options(wish(concurrency=300), place(count=4)) == search.options(
        wish(concurrency=300), place(count=4)
    )


# What must always hold -----------------------------------------------------------------------------------------------


def _total(option: Option) -> float:
    """Return the sum of everything that a GPU's memory is divided into."""
    found = option.estimate
    graphs = found.graphs.value if found.graphs_counted else 0.0
    parts = (found.outside, found.weights, found.activation, found.non_torch)
    return sum(part.value for part in parts) + graphs + found.kv.value + found.free_gib


CARDS = (
    "t4",
    "l40s-48gb",
    "a100-40gb-sxm",
    "a100-80gb-sxm",
    "h100-80gb-sxm",
    "h200-141gb-sxm",
    "h100-80gb-sxm:3g.40gb",
)
MODELS = (LLAMA_8B, "Qwen/Qwen2.5-7B-Instruct", "google/gemma-3-12b-it", "deepseek-ai/DeepSeek-V2-Lite-Chat")


def random_case(dice: random.Random) -> tuple[Wish, Place]:
    prompt, output = dice.randrange(1, 3000), dice.randrange(1, 1000)
    lengths = Lengths(prompt, prompt * dice.choice([1, 4])), Lengths(output, output * dice.choice([1, 4]))
    asked = wish(
        dice.choice(MODELS),
        workload=Workload(*lengths, dice.choice([1, 10, 100, 1000]), dice.choice([0.1, 0.01])),
        allow_lossy=dice.random() < 0.3,
        version=dice.choice(["0.11.0", "0.19.1", "0.33.0"]),
    )
    card = dice.choice(CARDS)
    return asked, place(card, 1 if ":" in card else dice.choice([1, 2, 4]))


@pytest.mark.parametrize("seed", range(40))
def test_memory_adds_up_and_is_never_more_than_there_is(seed: int) -> None:
    asked, at = random_case(random.Random(seed))  # noqa: S311 - to draw examples
    for option in search.options(asked, at):
        assert _total(option) == pytest.approx(at.device.total_gib, abs=0.01)
        assert sizing.spare(option.estimate) >= min(sizing.headroom_gib(asked, at), option.estimate.free_gib) - 1e-6
        assert option.run.tp * option.run.pp * option.replicas == at.count
        assert 1 <= option.concurrency <= min(option.possible, asked.workload.concurrency)
        assert (option.binding == "wanted") == (option.concurrency == asked.workload.concurrency)
        # It is what an engine started with these settings would come to.
        assert estimate(asked.model, at.device, option.run).kv == option.estimate.kv


@pytest.mark.parametrize("seed", range(25))
def test_more_memory_never_serves_fewer_and_longer_requests_never_more(seed: int) -> None:
    asked, at = random_case(random.Random(seed))  # noqa: S311 - to draw examples

    def served(one: Wish, where: Place) -> int:
        found = search.options(one, where)
        return found[0].concurrency if found else 0

    by_memory = [
        served(asked, replace(at, device=replace(at.device, total_gib=at.device.total_gib + more)))
        for more in (0.0, 0.3, 1.0, 5.0)
    ]
    assert by_memory == sorted(by_memory)
    by_length = [served(times(asked, factor), at) for factor in (1, 2, 4)]
    assert by_length == sorted(by_length, reverse=True)


def times(asked: Wish, factor: int) -> Wish:
    """Return the wish with requests so many times as long."""
    load = asked.workload
    prompt, output = (Lengths(one.p50 * factor, one.p99 * factor) for one in (load.prompt, load.output))
    return replace(asked, workload=replace(load, prompt=prompt, output=output))


@pytest.mark.parametrize("model", MODELS)
def test_more_memory_never_plans_fewer_tokens(model: str) -> None:
    run = Run("vllm", "0.19.1", max_model_len=8192, max_num_seqs=64, max_num_batched_tokens=2048, memory_fraction=0.9)
    card = place().device
    tokens = [
        estimate(known.facts(model), replace(card, total_gib=30 + step), run).kv_tokens.value for step in range(60)
    ]
    assert tokens == sorted(tokens)


def test_settings_are_counted_in_what_requests_hold() -> None:
    run = Run("vllm", "0.19.1", max_model_len=8192, max_num_batched_tokens=2048)
    small = replace(run, kv_dtype="fp8")
    model = known.facts(LLAMA_8B)
    assert request_gib(model, small, 4096) == pytest.approx(request_gib(model, run, 4096) / 2)


def test_a_split_is_found_for_every_number_of_gpus() -> None:
    run = Run("vllm", "0.19.1", max_model_len=4096)
    ways, objections = splits(wish(), place(count=8), run)
    assert ways == [(1, 1), (2, 1), (4, 1), (8, 1)]
    assert not objections


def test_tasks_without_an_answer_are_as_long_as_their_prompts() -> None:
    load = Workload(Lengths(100, 500), Lengths(300, 1500), 64)
    found = search.best(wish(task="embed", workload=load), place())
    assert found.run.max_model_len == 512
    assert any(reason.startswith("max_model_len 512: prompt p99 is 500 tokens, rounded") for reason in found.reasons)
    assert not any("chunked prefill" in reason for reason in found.reasons)
    encoder = search.best(wish("BAAI/bge-m3", 64, task="embed", workload=load), place("t4"))
    assert (encoder.binding, encoder.concurrency, encoder.estimate.bytes_per_token) == ("wanted", 64, 0)


def test_where_prompts_are_not_cut_a_batch_holds_the_longest_one() -> None:
    load = Workload(Lengths(100, 5000), Lengths(300, 1500), 4)
    encoder = search.best(wish("BAAI/bge-m3", task="embed", workload=load), place("t4"))
    assert encoder.run.max_num_batched_tokens == encoder.run.max_model_len == 5120
    # The engine before V1, which vLLM 0.8.5 takes on this card.
    old = search.best(wish("Qwen/Qwen2.5-3B-Instruct", version="0.8.5", workload=load), place("v100s-32gb"))
    assert (old.run.max_num_batched_tokens or 0) >= (old.run.max_model_len or 0) == 6656


@pytest.mark.parametrize("setting", [{"memory_fraction": 0.9}, {"kv_bytes": 40 << 30}])
def test_what_is_set_stays_within_a_part_of_a_shared_gpu(setting: dict[str, Any]) -> None:
    (name,) = setting
    said = refusal(wish(settings=setting), place(shared_gib=30))
    assert said.startswith(f"{name} = ")
    most = float(said.rpartition("set at most ")[2].rstrip("."))
    found = search.best(wish(settings={name: type(setting[name])(most)}), place(shared_gib=30)).estimate
    assert found.total_gib - sizing.spare(found) <= 30
    over = {name: type(setting[name])(most + (0.002 if name == "memory_fraction" else 2 << 20))}
    assert not search.options(wish(settings=over), place(shared_gib=30))


def test_a_bound_of_bytes_is_written_in_full() -> None:
    assert "; set at least 2147483648." in refusal(wish(settings={"kv_bytes": 1, "max_model_len": 16384}), place())


def test_batched_tokens_limit_requests_too() -> None:
    load = Workload(Lengths(1, 1), Lengths(1, 1), 100_000)
    found = search.best(wish(workload=load), place())
    assert (found.binding, found.concurrency) == ("max_num_batched_tokens", 8192)


def test_without_graphs_where_they_cost_more_than_half_of_the_kv_cache() -> None:
    load = Workload(Lengths(8000, 8000), Lengths(200, 800), 64)
    small = wish("microsoft/Phi-4-mini-instruct", workload=load, version="0.9.2", allow_lossy=True)
    small = replace(small, settings={"max_num_seqs": 256})
    without = search.best(small, place("rtx-2080-ti"))
    assert without.run.enforce_eager
    assert any(one.startswith("no CUDA graphs (enforce_eager)") for one in without.reasons)
    graphs = search.best(replace(small, settings={"max_num_seqs": 256, "enforce_eager": False}), place("rtx-2080-ti"))
    assert without.concurrency >= 2 * graphs.concurrency
    assert not search.best(small, place("rtx-3090")).run.enforce_eager


def test_a_length_that_half_of_the_requests_exceed_is_refused() -> None:
    # 800 and 300.
    said = refusal(wish(settings={"max_model_len": 1099}), place())
    assert said.startswith(
        "max_model_len = 1099 is refused: half of the requests are longer, prompt and output p50 are"
    )
    assert search.options(wish(settings={"max_model_len": 1100}), place())


def test_an_encoder_generates_nothing() -> None:
    load = Workload(Lengths(500, 2000), Lengths(1, 1), 8)
    said = refusal(wish("BAAI/bge-m3"), place())
    assert said.startswith("task = generate is refused for BAAI/bge-m3: ")
    assert search.options(wish("BAAI/bge-m3", task="embed", workload=load), place())


@pytest.mark.parametrize(
    ("model", "card", "engine", "version", "lengths"),
    [
        # The cache of one is wide enough in its band for one, the other's is not.
        ("tiiuae/Falcon3-10B-Instruct", "a10", "sglang", "0.4.9", (100, 1000, 1, 1)),
        # Graphs leave little.
        ("tiiuae/falcon-7b-instruct", "rtx-5080", "vllm", "0.33.0", (100, 200, 200, 200)),
        ("microsoft/Phi-4-mini-instruct", "rtx-2080-ti", "vllm", "0.9.2", (8000, 8000, 200, 800)),
    ],
)
def test_longer_requests_are_not_more_where_hardly_anything_fits(
    model: str, card: str, engine: str, version: str, lengths: tuple[int, int, int, int]
) -> None:
    served = []
    for factor in (1, 1.5, 2):
        prompt = Lengths(int(lengths[0] * factor), int(lengths[1] * factor))
        load = Workload(prompt, Lengths(*lengths[2:]), 300)
        asked = replace(wish(model, workload=load), engine=engine, version=version)
        served.append(search.best(replace(asked, allow_lossy=True), place(card)).concurrency)
    assert served == sorted(served, reverse=True)


@pytest.mark.parametrize(
    ("model", "at", "concurrency"),
    [
        # sglang 39713: the KV cache takes nearly all of a large card, and the worker dies capturing graphs.
        ("Qwen/Qwen3-0.6B", place(), 2000),
        # sglang 5893: what is left for graphs does not grow with the card.
        (DEEPSEEK, place("h200-141gb-sxm", 8), 64),
    ],
)
def test_graphs_have_room_beside_a_kv_cache_on_a_large_card(model: str, at: Place, concurrency: int) -> None:
    asked = wish(model, engine="sglang", version="0.5.10", concurrency=concurrency)
    found = search.best(asked, at).estimate
    assert found.graphs.high > 5
    assert found.outside.high >= found.graphs.high
    # Even by the worst of all bands the headroom is left; fractions are whole thousandths.
    assert sizing.spare(found) >= sizing.headroom_gib(asked, at) - 0.001 * found.total_gib

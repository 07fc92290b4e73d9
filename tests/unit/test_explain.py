"""What is said of an option of the planner."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.planning_options import DEVICE, ESTIMATE, MODEL, RUN, option

from gpuready.planning import explain
from gpuready.planning.explain import rules, steps
from gpuready.planning.memory.run import Device, Range, Run
from gpuready.planning.model.facts import ModelFacts, Quantization
from gpuready.planning.wish import Option, Place


@pytest.fixture(autouse=True)
def arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer every question with figures that show what was asked."""

    def estimate(model: ModelFacts, device: Device, run: Run) -> Any:
        weights = ESTIMATE.weights.value / run.tp / (2 if run.quantization else 1)
        kv = ESTIMATE.kv.value + ESTIMATE.weights.value - weights
        tokens = kv / ESTIMATE.kv.value * ESTIMATE.kv_tokens.value * run.tp * (2 if run.kv_dtype == "fp8" else 1)
        return replace(
            ESTIMATE, run=run, weights=Range.exact(weights), kv=Range.exact(kv), kv_tokens=Range.exact(round(tokens))
        )

    for place in (steps, rules):
        monkeypatch.setattr(place, "estimate", estimate)

    def request_gib(model: ModelFacts, run: Run, tokens: int) -> float:
        return tokens * 131072 / 1024**3 / run.tp / (2 if run.kv_dtype == "fp8" else 1)

    # 55.65 GiB hold 240 requests.
    fit = 55.65 / 240 * 1024**3 / 131072
    monkeypatch.setattr(steps, "request_gib", request_gib)
    monkeypatch.setattr(steps, "requests_that_fit", lambda workload, longest, pool, hold: round(pool / hold(fit)))


@pytest.mark.parametrize("counted", [True, False])
def test_parts_add_up_to_the_card(counted: bool) -> None:
    for weights, kv, outside in itertools.product((0.005, 14.996, 60.0), (0.0, 3.335, 55.654), (0.9, 1.404)):
        change = {"weights": Range.exact(weights), "kv": Range.exact(kv), "outside": Range.exact(outside)}
        bar = explain.bar(option(estimate={**change, "graphs_counted": counted}))
        assert round(sum(part.gib for part in bar.parts), 2) == bar.total_gib == 79.11


def test_graphs_that_the_engine_does_not_count_are_taken_out_of_what_it_does_not_count() -> None:
    bar = explain.bar(option())
    assert (bar.gib("graphs"), bar.gib("outside")) == (0.9, 0.5)
    bar = explain.bar(option(estimate={"graphs_counted": True}))
    assert (bar.gib("graphs"), bar.gib("outside")) == (0.9, 1.4)


def test_a_kv_cache_below_nothing_is_shown_as_what_is_missing() -> None:
    bar = explain.bar(option(estimate={"weights": Range.exact(131.42), "kv": Range.exact(-60.0)}))
    assert bar.gib("kv") == 0
    assert bar.gib("headroom") == round(79.11 - 131.42 - 0.31 - 0.25 - 0.9 - 0.5, 2)


def test_a_shared_gpu_holds_the_memory_of_others() -> None:
    bar = explain.bar(option(place=Place(DEVICE, 1, shared_gib=75.0)))
    assert bar.gib("others") == 4.11


def test_deployments_of_one_gpu_stand_in_one_bar() -> None:
    small = {"weights": Range.exact(5.0), "kv": Range.exact(10.0)}
    both = [(name, explain.bar(option(place=Place(DEVICE, 1, shared_gib=30.0), estimate=small))) for name in "ab"]
    bar = explain.together(both, "GPU 0")
    assert bar.gib("weights") == 10.0
    assert [part.owner for part in bar.parts if part.name == "kv"] == ["a", "b"]
    assert bar.gib("headroom") == round(79.11 - 2 * (5 + 10 + 0.31 + 0.25 + 0.9 + 0.5), 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "Nothing limits it: all 64 wanted requests at once are served, and the KV cache would hold 240."),
        (
            {"binding": "kv", "concurrency": 40},
            "The KV cache limits it: 40 of 64 wanted requests at once are served, "
            "and in 1% of the busiest time at most it is too small.",
        ),
        (
            {"binding": "max_num_seqs", "concurrency": 32},
            "max_num_seqs limits it: 32 of 64 wanted requests at once are served, though the KV cache would hold 240.",
        ),
        (
            {"binding": "length", "concurrency": 1},
            "The longest request limits it: 1 of 64 wanted requests at once are served, "
            "because one request may take 17,664 tokens.",
        ),
        (
            {"binding": "weights", "concurrency": 2},
            "The weights limit it: 2 of 64 wanted requests at once are served, "
            "because 14.99 of 79.11 GiB are taken before the first request.",
        ),
        (
            {"binding": "host_ram", "concurrency": 2},
            "The host's memory limits it: 2 of 64 wanted requests at once are served.",
        ),
    ],
)
def test_what_limits_it_is_one_sentence(change: dict[str, Any], words: str) -> None:
    assert explain.explain(option(**change)).limit == words


def said(found: Option) -> dict[str, str]:
    return {step.name: step.says for step in steps.steps(found)}


def test_each_step_says_what_it_would_cost_or_win() -> None:
    assert said(option()) == {
        "request": "One more request of 1,100 tokens at once: 0.134 GiB of the KV cache of each GPU; "
        "the cache has room for 176 more.",
        "length": "Twice the length, 35,328 tokens: the KV cache stays as it is; "
        "one such request takes 2.16 GiB of it.",
        "max_num_seqs": "max_num_seqs halved to 32: the KV cache stays as it is.",
        "kv_dtype": "KV cache in 8 bits (may change answers): KV cache +0.00 GiB on each GPU, "
        "+455,904 tokens (+100.0%); it holds 480 requests instead of 240.",
        "quantization": "Weights in FP8, made while loading (may change answers): KV cache +7.50 GiB on each GPU, "
        "+61,406 tokens (+13.5%); it holds 272 requests instead of 240.",
        "gpus": "Each replica over 2 GPUs instead of 1, 1 GPU more: KV cache +7.50 GiB on each GPU, "
        "+578,715 tokens (+126.9%); it holds 545 requests instead of 240.",
        "replica": "One more replica, 1 GPU more: the KV caches hold 480 requests instead of 240.",
    }


def test_steps_that_mean_nothing_are_left_out_and_impossible_ones_say_why() -> None:
    full = option(possible=64, run=replace(RUN, kv_dtype="fp8", quantization="fp8", max_model_len=131072))
    assert set(said(full)) == {"request", "length", "max_num_seqs", "gpus", "replica"}
    assert said(full)["request"].endswith("the cache has no room for it.")
    assert said(full)["length"] == "Twice the length, 262,144 tokens: the model's context ends at 131,072."
    slice_ = option(place=Place(replace(DEVICE, name="h100-80gb-sxm:3g.40gb"), 1))
    assert not {"gpus", "replica"} & set(said(slice_))


def test_a_step_that_does_not_fit_says_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = replace(ESTIMATE, fits=False, refusal="One request of 35,328 tokens needs 4.31 GiB, 2.00 are left.")
    monkeypatch.setattr(steps, "estimate", lambda model, device, run: refused)
    length = next(step for step in steps.steps(option()) if step.name == "length")
    assert not length.possible
    assert length.says.endswith("does not fit: One request of 35,328 tokens needs 4.31 GiB, 2.00 are left.")


def test_a_model_that_keeps_nothing_of_a_request_has_no_steps_and_says_so() -> None:
    found = explain.explain(option(estimate={"bytes_per_token": 0.0}))
    assert found.steps == ()
    assert found.limit.endswith("all 64 wanted requests at once are served, and nothing is kept of a request.")


def test_a_step_that_the_card_cannot_do_says_why() -> None:
    v100s = option(place=Place(Device("v100s-32gb", 31.74, 7.0), 1), run=replace(RUN, version="0.8.5.post1"))
    step = next(step for step in steps.steps(v100s) if step.name == "kv_dtype")
    assert not step.possible
    assert step.says.startswith("KV cache in 8 bits (may change answers): ")


def test_rules_of_thumb_are_told_beside_the_figures() -> None:
    told = {rule.rule: rule for rule in rules.compare(option(), 6.51)}
    share = told["KV cache at most 40 to 50 % of the card"]
    assert share.holds is False
    # 55.65 of 79.11 GiB; at 50 % it would hold 324,048 tokens.
    assert share.says == (
        "the KV cache has 70.3% of the card; the engine keeps its working memory beside it, "
        "so the rule would only give up 131,855 tokens"
    )
    free = told["leave 10 GB free"]
    # 10 GB are 9.313 GiB; 2.803 GiB more of 55.65 are 22,965 tokens.
    assert free.says == "6.51 GiB are nobody's; to leave 10 GB would take 22,964 tokens from the KV cache"
    assert told["FP8 on Hopper"].says == (
        "the weights are not quantized; FP8 would free 7.50 GiB on each GPU, 61,406 tokens more"
    )
    assert told["INT4 on T4"].holds is None
    a100 = option(place=Place(Device("a100-40gb-sxm", 39.39, 8.0), 1))
    assert {rule.rule: rule.holds for rule in rules.compare(a100, 1.0)}["FP8 on Hopper"] is None


def test_what_other_deployments_of_a_gpu_have_is_not_told_as_free() -> None:
    # The deployment takes 72.60 of its part of 74.60 GiB; 4.51 are the others'.
    shared = explain.explain(option(place=Place(DEVICE, 1, shared_gib=74.6)))
    free = next(rule for rule in shared.rules if rule.rule == "leave 10 GB free")
    assert (free.holds, shared.bars[0].gib("others"), shared.bars[0].gib("headroom")) == (False, 4.51, 2.0)
    assert free.says.startswith("2.00 GiB of its part are nobody's; to leave 10 GB would take ")


def test_ten_gb_that_not_even_the_kv_cache_has_are_told_so() -> None:
    small = option(estimate={"kv": Range.exact(7.0)})
    free = {rule.rule: rule.says for rule in rules.compare(small, 0.93)}["leave 10 GB free"]
    assert free == "0.93 GiB are nobody's; to leave 10 GB would take more than the whole KV cache"


def test_a_kv_cache_of_given_bytes_is_no_guess() -> None:
    given = explain.explain(option(run=replace(RUN, kv_bytes=10 * 2**30)))
    assert given.basis[1].endswith("; the KV cache's bytes are a setting, its tokens follow from them.")


@pytest.mark.parametrize(
    ("run", "quantization", "told"),
    [
        (RUN, None, "Instruct on"),
        (replace(RUN, quantization="fp8"), None, "Instruct in fp8, made while loading, on"),
        (RUN, Quantization("awq", 4), "Instruct in 4 bits (awq) on"),
    ],
)
def test_the_title_says_what_the_weights_are_in(run: Run, quantization: Quantization | None, told: str) -> None:
    one = option(run=run)
    model = replace(one.wish.model, quantization=quantization)
    assert told in explain.title(replace(one, wish=replace(one.wish, model=model)))


def test_an_explanation_is_plain_data_and_back() -> None:
    found = explain.explain(option())
    assert explain.read(json.loads(json.dumps(found.as_dict()))) == found


def test_the_sentences_hold_the_sum_of_the_card() -> None:
    lines = explain.explain(option()).sentences()
    assert lines[0] == "meta-llama/Llama-3.1-8B-Instruct on 1 x H100 SXM5 80GB, vllm 0.19.1"
    assert lines[1] == (
        "the GPU, 79.11 GiB: weights 14.99 + activations 0.31 + outside PyTorch 0.25 + CUDA graphs 0.90 + "
        "KV cache 55.65 + context 0.50 + headroom 6.51 = 79.11 GiB"
    )
    assert lines[2] == "KV cache: 455,904 tokens (453,000 to 458,000), 131,072 bytes for one token on each GPU"


def test_a_layout_over_gpus_is_named() -> None:
    many = option(place=Place(DEVICE, 8), run=replace(RUN, tp=2, pp=2), replicas=2)
    assert explain.title(many).endswith("on 8 x H100 SXM5 80GB (TP2 PP2, 2 replicas), vllm 0.19.1")
    assert explain.bar(many).title == "the fullest of 8 GPUs, 79.11 GiB"
    assert MODEL.family == "dense"

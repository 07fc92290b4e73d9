"""The planner against published start-up logs, and what it refuses."""

from __future__ import annotations

import datetime
import math
from typing import Any

import pytest

from gpuready import catalog
from gpuready.outcome import Refusal
from gpuready.planning.flags import split
from gpuready.planning.measured import compare
from gpuready.planning.memory.budget import budget
from gpuready.planning.model.config import UnknownModel, read_facts
from gpuready.planning.model.facts import ModelFacts
from gpuready.planning.placement import place
from gpuready.planning.plan import effective_stack, make_plan

LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
LLAMA_70B = {**LLAMA_8B, "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64} | {
    "intermediate_size": 28672
}


def test_parameters_of_llama_8b_are_those_of_its_safetensors_headers() -> None:
    # 8030261248 parameters of two bytes: the total of meta-llama/Llama-3.1-8B-Instruct's headers, 14.9575 GiB.
    assert read_facts(LLAMA_8B, None).weight_bytes == 8030261248 * 2


# Start-up logs of vLLM 0.19.0 on H100 80GB (79.19 GiB), utilization 0.95, 1024 sequences, 8192 batched tokens:
# github.com/jgchn/llm-d-planner at d3121e0, accuracy/results/v0.19.0/logs/meta-llama-llama-3*tp{1,2,4}*8192*.log
@pytest.mark.parametrize(
    ("gpus", "weights", "activation", "non_torch", "kv_gib", "kv_tokens"),
    [
        (1, 14.99, 1.89, 0.25, 58.11, 476016),
        (2, 7.51, 1.89, 2.07, 63.76, 1044688),
        (4, 3.77, 1.89, 2.13, 67.44, 2209792),
    ],
)
def test_budget_is_what_vllm_reported(
    gpus: int, weights: float, activation: float, non_torch: float, kv_gib: float, kv_tokens: int
) -> None:
    found = budget(read_facts(LLAMA_8B, None), 79.19, gpus, 1024, 8192, utilization=0.95)
    assert found.weights_gib == pytest.approx(weights, abs=0.05)
    assert found.activation_gib == pytest.approx(activation, abs=0.05)
    assert found.non_torch_gib == pytest.approx(non_torch, abs=0.07)
    assert found.kv_gib == pytest.approx(kv_gib, abs=0.15)
    assert found.kv_tokens == pytest.approx(kv_tokens, rel=0.005)


def test_kv_heads_fewer_than_gpus_are_replicated() -> None:
    model = read_facts({**LLAMA_8B, "num_key_value_heads": 2}, None)
    two = budget(model, 79.19, 2, 256, 8192)
    eight = budget(model, 79.19, 8, 256, 8192)
    # Eight GPUs hold no more heads apart than two: only the weights' share makes room.
    assert eight.kv_tokens / two.kv_tokens == pytest.approx(eight.kv_gib / two.kv_gib, rel=0.01)


def test_headers_win_over_the_configuration() -> None:
    model = read_facts(LLAMA_8B, 5 * 1024**3)
    assert (model.weight_bytes, model.weights_from) == (5 * 1024**3, "headers")


def test_text_part_of_a_composite_configuration_is_read() -> None:
    assert read_facts({"model_type": "llava", "text_config": LLAMA_8B}, None).layers == 32


@pytest.mark.parametrize(
    ("change", "words"),
    [({"num_hidden_layers": None}, "num_hidden_layers"), ({"torch_dtype": "float4"}, "dtype 'float4'")],
)
def test_a_model_that_cannot_be_sized_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnknownModel, match=words):
        read_facts({**LLAMA_8B, **change}, None)


def deployment(**change: Any) -> dict[str, Any]:
    return {
        "name": "chat",
        "model": "llama",
        "model_path": "/data/llama",
        "engine": "vllm",
        "gpus": 1,
        "workload": {
            "prompt_tokens": {"p50": 800, "p99": 16000},
            "output_tokens": {"p50": 300, "p99": 1500},
            "concurrency": 64,
        },
        "flags": {},
        **change,
    }


def spec(*deployments: dict[str, Any], **change: Any) -> dict[str, Any]:
    return {
        "gpuready_gpu_model": "h100-80gb-sxm",
        "gpuready_gpu_count": 8,
        "gpuready_stack": "cu128",
        "gpuready_deployments": list(deployments),
        "gpuready_simulated": False,
        **change,
    }


FACTS: dict[str, Any] = {"python": "3.12", "gpus": [{}] * 8}


def plan(declared: dict[str, Any], config: dict[str, Any] = LLAMA_8B, facts: dict[str, Any] = FACTS) -> dict[str, Any]:
    models: dict[str, ModelFacts] = {one["model"]: read_facts(config, None) for one in declared["gpuready_deployments"]}
    stack = effective_stack(declared, {})
    assert stack is not None
    return make_plan("h1", declared, stack, facts, models, {})


def refusal(declared: dict[str, Any], config: dict[str, Any] = LLAMA_8B, facts: dict[str, Any] = FACTS) -> list[str]:
    with pytest.raises(Refusal) as caught:
        plan(declared, config, facts)
    return [failure.sentence() for failure in caught.value.failures]


def test_settings_follow_from_the_workload() -> None:
    settings = plan(spec(deployment()))["deployments"][0]["settings"]
    # 16000 + 1500 tokens, rounded up to 256.
    assert settings["max_model_len"] == 17664
    assert settings["max_num_seqs"] == 64
    assert settings["tensor_parallel_size"] == 1


def test_fewer_requests_at_once_than_wanted_are_said() -> None:
    workload = {**deployment()["workload"], "concurrency": 2000}
    planned = plan(spec(deployment(workload=workload)))["deployments"][0]
    assert planned["settings"]["max_num_seqs"] < 2000
    assert "2000 wanted" in planned["explain"][-1]


def test_a_model_too_large_is_refused_with_the_arithmetic() -> None:
    (sentence,) = refusal(spec(deployment()), LLAMA_70B)
    assert "deployment chat does not fit" in sentence
    assert "weights 131.42" in sentence  # 70553706496 parameters of two bytes
    assert "give it more than 1 GPU" in sentence


def test_more_gpus_than_there_are() -> None:
    (sentence,) = refusal(spec(deployment(gpus=8), deployment(name="second", model="other", gpus=4)))
    assert "deployments ask for 12 GPUs (chat 8, second 4)" in sentence
    assert "gpuready_gpu_count is 8" in sentence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": [0, 9]}, "there is no GPU 9; the server has GPUs 0 to 7"),
        ({"gpus": [1, 1]}, "a GPU is named twice"),
        ({"gpus": {"mig": "3g.40gb", "count": 1}}, "MIG slices are not served yet"),
        ({"engine": "sglang"}, "engine = 'sglang' is not in stack cu128; stack cu128 has vllm"),
        ({"flags": {"port": 1}}, "flags.port is set by gpuready itself"),
        ({"gpus": 3}, "32 attention heads cannot be split over 3 GPUs; allowed are 1, 2, 4, 8, 16"),
    ],
)
def test_refusals_name_value_and_remedy(change: dict[str, Any], words: str) -> None:
    assert any(words in sentence for sentence in refusal(spec(deployment(**change))))


@pytest.mark.parametrize(
    ("value", "shown", "why"),
    [
        (datetime.date(2026, 11, 30), "2026-11-30", "2026-11-30 is a date"),
        (math.nan, "nan", "nan is not finite"),
        ({"a": [1, -math.inf]}, "{'a': [1, -inf]}", "-inf is not finite"),
        (b"x", "b'x'", "b'x' is a binary value"),
        ({1: "a"}, "{1: 'a'}", "its key 1 is no text"),
        (2**64, "18446744073709551616", "a number has more than 64 bits"),
    ],
)
def test_a_flags_value_that_its_file_cannot_hold_is_refused(value: Any, shown: str, why: str) -> None:
    (sentence,) = refusal(spec(deployment(flags={"x": value})))
    allowed = "allowed are texts, finite numbers, true, false, null, and lists and mappings of these"
    assert sentence == f"host h1, deployment chat, flags.x = {shown} is refused: {why}, {allowed}; correct it."


def test_a_flags_value_that_its_file_can_hold_is_kept() -> None:
    value = {"a": [None, True, 1.5, {"b": "x"}], "c": -1}
    assert split("here", {"x": value}) == ({}, {"x": value}, [])


def test_flag_that_does_not_fit_is_refused_with_the_limit() -> None:
    (sentence,) = refusal(spec(deployment(flags={"max-model-len": 900000})))
    assert "flags.max-model-len = 900000 does not fit" in sentence
    assert "set at most " in sentence


def test_context_longer_than_the_model_has() -> None:
    workload = {**deployment()["workload"], "prompt_tokens": {"p50": 1, "p99": 200000}}
    sentences = refusal(spec(deployment(workload=workload)))
    assert any("has a context of 131072" in sentence for sentence in sentences)


def test_a_stand_ins_own_bytes_stand_beside_the_plan_of_the_card() -> None:
    declared = spec(deployment(), gpuready_stack="cpu", gpuready_simulated=True)
    planned = plan(declared, facts={"python": "3.13", "gpus": [{}] * 8})["deployments"][0]
    # 32 layers, keys and values, 8 heads of 128 elements of 2 bytes.
    assert planned["stand_in"] == {"kv_bytes": 64 * 1024**2, "bytes_per_token": 131072}
    assert planned["settings"]["kv_cache_memory_bytes"] == 64 * 1024**2
    found = compare(planned, {"blocks": 4, "block_tokens": 128})
    assert found is not None
    assert (found.planned.kv_tokens, found.within) == (512, True)
    assert found.card is not None
    assert found.card.kv_tokens > 400_000


def test_a_plan_of_a_real_engine_is_compared_with_the_card() -> None:
    planned = plan(spec(deployment()))["deployments"][0]
    assert planned["stand_in"] is None
    found = compare(planned, {"kv_tokens": 400_000})
    assert found is not None
    assert found.card is None
    assert found.planned.kv_tokens > 400_000


def test_simulation_stack_on_a_real_server() -> None:
    (sentence,) = refusal(spec(deployment(), gpuready_stack="cpu"))
    assert "is for simulated servers only" in sentence


def test_python_without_a_lock_is_refused_by_name() -> None:
    (sentence,) = refusal(spec(deployment()), facts={**FACTS, "python": "3.14"})
    assert "no lock for the server's Python 3.14" in sentence


def test_all_refusals_come_at_once() -> None:
    sentences = refusal(spec(deployment(gpus=[9], engine="sglang"), gpuready_stack="cpu"))
    assert len(sentences) == 3


def test_placement_is_sticky() -> None:
    declared = spec(deployment(name="a", gpus=2), deployment(name="b", gpus=2))
    placement, _ = place("h1", declared, {"b": [{"index": 0, "gpus": [0, 1], "port": 18100}]})
    assert placement["b"] == {"gpus": [0, 1], "port": 18100}
    assert placement["a"] == {"gpus": [2, 3], "port": 18101}


def test_named_gpus_go_before_counted_ones() -> None:
    declared = spec(deployment(name="a", gpus=2), deployment(name="b", gpus=[0, 1]))
    placement, failures = place("h1", declared, {})
    assert not failures
    assert (placement["a"]["gpus"], placement["b"]["gpus"]) == ([2, 3], [0, 1])


def test_the_same_gpu_for_two_deployments() -> None:
    declared = spec(deployment(name="a", gpus=[0, 1]), deployment(name="b", gpus=[1, 2]))
    _, failures = place("h1", declared, {})
    assert "GPU 1 is taken by another deployment" in failures[0].sentence()


@pytest.mark.parametrize("name", catalog.load("stacks")["stacks"])
def test_workers_of_every_engine_meet_on_loopback(name: str) -> None:
    for engine in catalog.load("stacks")["stacks"][name]["engines"].values():
        assert engine["environment"]["GLOO_SOCKET_IFNAME"] == "lo"
        assert engine["environment"]["VLLM_HOST_IP"] == "127.0.0.1"

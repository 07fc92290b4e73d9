"""The planner against published start-up logs, and what it refuses."""

from __future__ import annotations

import datetime
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.planning_options import LLAMA_8B

from gpuready.outcome import Refusal
from gpuready.planning import explain
from gpuready.planning.accuracy.measured import compare
from gpuready.planning.flags import split
from gpuready.planning.model import known
from gpuready.planning.model.config import UnknownModel, read_facts
from gpuready.planning.model.facts import ModelFacts
from gpuready.planning.plan import effective_stack, inputs_digest, make_plan

LLAMA_70B = {**LLAMA_8B, "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64} | {
    "intermediate_size": 28672
}


def test_parameters_of_llama_8b_are_those_of_its_safetensors_headers() -> None:
    # 8030261248 parameters of two bytes: the total of meta-llama/Llama-3.1-8B-Instruct's headers, 14.9575 GiB.
    assert read_facts(LLAMA_8B, None).weight_bytes == 8030261248 * 2


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
    # 16000 + 1500 tokens, rounded up to 256; 64 requests and a quarter more.
    assert settings["max_model_len"] == 17664
    assert settings["max_num_seqs"] == 80
    assert (settings["tensor_parallel_size"], settings["pipeline_parallel_size"]) == (1, 1)
    assert 0.9 < settings["gpu_memory_utilization"] < 1
    assert "kv_cache_memory_bytes" not in settings


def test_fewer_requests_at_once_than_wanted_are_said() -> None:
    workload = {**deployment()["workload"], "concurrency": 2000}
    planned = plan(spec(deployment(workload=workload)))["deployments"][0]
    assert planned["settings"]["max_num_seqs"] < 2000
    assert any("of 2000 wanted requests at once are served" in line for line in planned["explain"])


def test_a_plan_says_where_the_memory_goes_as_plain_data() -> None:
    made = plan(spec(deployment()))
    assert json.loads(json.dumps(made)) == made
    assert made["schema"] == 3
    memory = made["deployments"][0]["memory"]
    assert memory["kv"]["low"] < memory["kv"]["value"] < memory["kv"]["high"]
    parts = sum(memory[part]["value"] for part in ("outside", "weights", "activation", "non_torch", "kv"))
    assert parts + memory["free_gib"] == pytest.approx(memory["total_gib"], abs=0.01)
    told = explain.read(made["deployments"][0]["explanation"])
    assert told.figure("kv_tokens").value == int(memory["kv_tokens"]["value"])


def test_gpus_beyond_what_one_replica_needs_are_more_replicas() -> None:
    (planned,) = plan(spec(deployment(gpus=4)))["deployments"]
    assert planned["settings"]["tensor_parallel_size"] == 1
    assert [(one["index"], one["gpus"], one["port"]) for one in planned["replicas"]] == [
        (0, [0], 18100),
        (1, [1], 18101),
        (2, [2], 18102),
        (3, [3], 18103),
    ]


def test_what_an_operator_sets_is_planned_with() -> None:
    flags = {"tensor-parallel-size": 2, "max_num_seqs": 7, "kv-cache-dtype": "fp8", "enforce-eager": True, "seed": 1}
    (planned,) = plan(spec(deployment(gpus=4, flags=flags)))["deployments"]
    assert planned["settings"]["tensor_parallel_size"] == 2
    assert planned["settings"]["max_num_seqs"] == 7
    assert [one["gpus"] for one in planned["replicas"]] == [[0, 1], [2, 3]]
    written = {one["name"]: one["value"] for group in planned["options"].values() for one in group}
    assert written["enable-prefix-caching"] is True
    assert (written["kv-cache-dtype"], written["enforce-eager"], written["seed"]) == ("fp8", True, 1)
    assert (written["tensor-parallel-size"], written["max-num-seqs"]) == (2, 7)
    assert planned["memory"]["graphs"]["value"] == 0


def test_a_model_too_large_is_refused_with_the_arithmetic() -> None:
    (sentence,) = refusal(spec(deployment()), LLAMA_70B)
    assert "deployment chat: llama does not fit on 1 x H100 SXM5 80GB" in sentence
    assert "weights 131.4" in sentence  # 70553706496 parameters of two bytes
    assert "give it 2 GPUs" in sentence


def test_more_gpus_than_there_are() -> None:
    (sentence,) = refusal(spec(deployment(gpus=8), deployment(name="second", model="other", gpus=4)))
    assert "deployments ask for 12 GPUs (chat 8, second 4)" in sentence
    assert "gpuready_gpu_count is 8" in sentence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": [0, 9]}, "there is no GPU 9; the server has GPUs 0 to 7"),
        ({"gpus": [1, 1]}, "a GPU is named twice"),
        ({"gpus": {"shared": 9}}, "there is no GPU 9; the server has GPUs 0 to 7"),
        ({"gpus": {"mig": "3g.30gb", "count": 1}}, "gpus.mig = '3g.30gb': NVIDIA H100 SXM5 80GB has no MIG profile"),
        ({"gpus": {"mig": "3g.40gb", "count": 17}}, "slices of at least 9 GPUs (chat 17 x 3g.40gb): 8 of 8 GPUs are"),
        ({"engine": "other"}, "engine = 'other' is not in stack cu128; stack cu128 has vllm, sglang, tensorrt_llm"),
        ({"flags": {"port": 1}}, "flags.port is set by gpuready itself"),
        ({"gpus": 3, "flags": {"tensor-parallel-size": 3}}, "its 32 attention heads do not divide by 3; tp 2 fits"),
        ({"gpus": 4, "flags": {"tensor-parallel-size": 3}}, "set them so that their product divides 4"),
        ({"draft": {"tokens": 3, "model": None, "model_path": None}}, "brings no layers that draft"),
        ({"flags": {"gpu-memory-utilization": 0.999}}, "flags.gpu-memory-utilization = 0.999 does not fit"),
        ({"flags": {"quantization": "awq"}}, "take a checkpoint in awq, or leave the weights in 16 bits"),
        ({"flags": {"enforce-eager": "perhaps"}}, "allowed is true or false"),
        ({"flags": {"dtype": 16}}, "flags.dtype = 16 is refused: allowed is a name of letters and digits"),
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
    (sentence,) = refusal(spec(deployment(flags={"hf-overrides": value})))
    allowed = "allowed are texts, finite numbers, true, false, null, and lists and mappings of these"
    assert (
        sentence == f"host h1, deployment chat, flags.hf-overrides = {shown} is refused: {why}, {allowed}; correct it."
    )


def test_a_flags_value_that_its_file_can_hold_is_kept() -> None:
    value = {"a": [None, True, 1.5, {"b": "x"}], "c": -1}
    assert split("here", {"hf-overrides": value}, "vllm", "0.19.1") == ({}, {"hf-overrides": value}, [], [])


def test_flag_that_does_not_fit_is_refused_with_the_limit() -> None:
    (sentence,) = refusal(spec(deployment(flags={"max-model-len": 900000})))
    assert "flags.max-model-len = 900000 is refused: llama has a context of 131072; set at most 131072" in sentence
    (sentence,) = refusal(spec(deployment(flags={"max-model-len": 120000, "gpu-memory-utilization": 0.3})))
    assert "flags.max-model-len = 120000 does not fit: 79.19 GiB - weights 14.99" in sentence
    assert "set at most " in sentence


def test_context_that_an_operator_stretches_is_taken() -> None:
    flags = {"max-model-len": 262144, "hf-overrides": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}}
    (planned,) = plan(spec(deployment(flags=flags)))["deployments"]
    assert planned["settings"]["max_model_len"] == 262144


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


def test_a_stand_in_of_an_encoder_has_no_tokens_to_tell() -> None:
    encoder = known.find("BAAI/bge-m3")
    assert encoder is not None
    lengths = {"p50": 100, "p99": 500}
    workload = {**deployment()["workload"], "prompt_tokens": lengths, "output_tokens": {"p50": 1, "p99": 1}}
    declared = spec(deployment(workload=workload, task="embed"), gpuready_stack="cpu", gpuready_simulated=True)
    facts = {"python": "3.13", "gpus": [{}] * 8}
    planned = plan(declared, {**encoder.config}, facts)["deployments"][0]
    assert any("64 MiB of KV cache of its own, " in sentence for sentence in planned["explain"])


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
    sentences = refusal(spec(deployment(gpus=[9], engine="tensorrt_llm"), gpuready_stack="cpu"))
    assert len(sentences) == 3


# What deployments ask for beside their model --------------------------------------------------------------------------


def test_a_draft_model_is_counted_with() -> None:
    draft = {"tokens": 3, "model": "small", "model_path": "/data/small"}
    small = {**LLAMA_8B, "num_hidden_layers": 2}
    declared = {**spec(deployment(draft=draft)), "gpuready_accept_advisories": ["CVE-2026-54234"]}
    models = {"llama": read_facts(LLAMA_8B, None), "small": read_facts(small, None)}
    stack = effective_stack(declared, {})
    assert stack is not None
    (planned,) = make_plan("h1", declared, stack, FACTS, models, {})["deployments"]
    (plain,) = plan(spec(deployment()))["deployments"]
    more = models["small"].weight_bytes / 2**30
    assert planned["memory"]["weights"]["value"] == pytest.approx(plain["memory"]["weights"]["value"] + more, abs=0.05)
    (drafting,) = (one for one in planned["options"]["features"] if one["name"] == "speculative-config")
    assert json.loads(drafting["value"]) == {"model": "/data/small", "num_speculative_tokens": 3}


def test_the_hosts_memory_bounds_what_is_put_there() -> None:
    facts = {**FACTS, "ram_bytes": 100 << 30}
    (sentence,) = refusal(spec(deployment(kv_offload_gib=60.0)), facts=facts)
    assert "kv_offload_gib = 60 is more than the host has for it: 50.0 GiB of its memory" in sentence
    both = spec(deployment(kv_offload_gib=30.0), deployment(name="b", model="other", kv_offload_gib=30.0))
    (sentence,) = refusal(both, facts=facts)
    assert "deployment b: kv_offload_gib = 30 is more than the host has for it: 20.0 GiB" in sentence
    assert sentence.endswith("set at most 20.")


def test_slices_are_planned_by_their_own_memory() -> None:
    (planned,) = plan(spec(deployment(gpus={"mig": "3g.40gb", "count": 2})))["deployments"]
    assert planned["memory"]["total_gib"] == 39.5
    assert [(one["mig"], one["gpus"]) for one in planned["replicas"]] == [("3g.40gb", []), ("3g.40gb", [])]


def test_deployments_on_one_gpu_have_parts_of_it_and_an_order() -> None:
    shared = {"gpus": {"shared": 2}}
    made = plan(spec(deployment(name="a", gpus=1), deployment(**shared), deployment(name="b", model="other", **shared)))
    by_name = {one["name"]: one for one in made["deployments"]}
    assert [one["name"] for one in made["deployments"]] == ["a", "b", "chat"]
    assert by_name["a"]["replicas"][0]["gpus"] == [0]
    parts = [by_name[name]["replicas"][0] for name in ("b", "chat")]
    assert [part["gpus"] for part in parts] == [[2], [2]]
    assert [by_name[name].get("start_after") for name in ("a", "b", "chat")] == [None, [], ["b"]]
    # Both say the same division, so that neither starts beside what was divided otherwise.
    assert parts[0]["shares"] == parts[1]["shares"]
    assert sum(parts[0]["shares"].values()) <= 79.19
    for name in ("b", "chat"):
        assert by_name[name]["settings"]["kv_cache_memory_bytes"] % (1 << 26) == 0
        assert by_name[name]["settings"]["gpu_memory_utilization"] < 0.6


def test_parts_that_do_not_fit_together_are_refused_with_the_sum() -> None:
    names = ("a", "b", "c", "d", "e")
    many = [deployment(name=name, model=name, gpus={"shared": 0}) for name in names]
    (sentence,) = refusal(spec(*many))
    assert sentence.startswith("host h1, GPU 0, shared by a and b and c and d and e: 5 deployments do not fit together")
    assert "GiB are missing: give a a GPU of its own" in sentence


def test_a_whole_claim_on_a_shared_gpu_is_refused() -> None:
    (sentence,) = refusal(spec(deployment(gpus=[0]), deployment(name="b", model="other", gpus={"shared": 0})))
    assert "deployment chat, gpus = [0]: GPU 0 is shared by others" in sentence


def test_a_newer_planners_form_of_a_model_is_no_other_model() -> None:
    declared = spec(deployment())
    model = read_facts(LLAMA_8B, None)
    stack = effective_stack(declared, {})
    assert stack is not None
    digests = {
        inputs_digest(declared, stack, FACTS, {"llama": one}, [])
        for one in (model, replace(model, rotary_elements=7), replace(model, assumptions=("x",)))
    }
    assert len(digests) == 1
    other = replace(model, dtype="float16")
    assert inputs_digest(declared, stack, FACTS, {"llama": other}, []) not in digests


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_workers_of_every_engine_meet_on_loopback(engine: str) -> None:
    (planned,) = plan(spec(deployment(engine=engine)))["deployments"]
    found = {one["name"]: one["value"] for one in planned["environment"]}
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert found.get("VLLM_HOST_IP") == ("127.0.0.1" if engine == "vllm" else None)

"""Options made by hand: what the search would answer, with figures that are easy to check by eye."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpuready.planning.memory.run import Device, Estimate, Range, Run
from gpuready.planning.model.facts import AttentionGroup, Component, ModelFacts
from gpuready.planning.wish import Lengths, Option, Place, Wish, Workload

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
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
"""A config.json."""
MODEL = ModelFacts(
    architecture="LlamaForCausalLM",
    model_type="llama",
    task="generate",
    layers=32,
    hidden=4096,
    heads=32,
    intermediate=14336,
    vocabulary=128256,
    context_tokens=131072,
    dtype="bfloat16",
    groups=(AttentionGroup("full", 32, 8, 128, 128),),
    order=(0,) * 32,
    components=(Component("attention", 8_030_261_248, 16_060_522_496),),
    weights_from="headers",
)
DEVICE = Device("h100-80gb-sxm", 79.11, 9.0)
RUN = Run("vllm", "0.19.1", max_model_len=17664, max_num_seqs=64, max_num_batched_tokens=8192, memory_fraction=0.9)
ESTIMATE = Estimate(
    run=RUN,
    constants="vllm 0.17 to 0.20",
    total_gib=79.11,
    budget_gib=71.2,
    outside=Range(1.404, 1.2, 1.6),
    weights=Range(14.991, 14.99, 15.0),
    activation=Range(0.309, 0.25, 0.36),
    non_torch=Range(0.25, 0.24, 0.27),
    graphs=Range(0.9, 0.7, 1.1),
    graphs_counted=False,
    kv=Range(55.65, 55.3, 55.9),
    kv_tokens=Range(455_904.0, 453_000.0, 458_000.0),
    bytes_per_token=131072.0,
    block_tokens=16,
    blocks=28494,
    request_gib=2.156,
    fits=True,
    surely_fits=True,
    refusal="",
    free_gib=6.5,
)


def option(**change: Any) -> Option:
    """Return an option; `estimate` and `wish` take mappings of what is to differ."""
    workload = Workload(Lengths(800, 16000), Lengths(300, 1500), 64)
    wish = Wish("chat", "meta-llama/Llama-3.1-8B-Instruct", MODEL, "vllm", "0.19.1", workload)
    wish = replace(wish, **change.pop("wish", {}))
    found = replace(ESTIMATE, **change.pop("estimate", {}))
    made = Option(
        wish=wish,
        place=Place(DEVICE, 1),
        run=RUN,
        replicas=1,
        estimate=found,
        concurrency=64,
        possible=240,
        binding="wanted",
        reasons=("max_model_len 17,664: prompt and output p99, rounded up to 256",),
    )
    return replace(made, **change)

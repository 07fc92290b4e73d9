"""Patterns of quantized checkpoints: which modules they cover, and that none takes long."""

from __future__ import annotations

import random
import re

import pytest

from gpuready.planning.model.config import UnknownModel, read_facts
from gpuready.planning.model.patterns import Names, TooMuch

# Patterns of published checkpoints: Kimi-K2.5, DeepSeek-V3.1-NVFP4, gpt-oss, Qwen3-FP8 and RedHatAI's.
PUBLISHED = [
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*\.mlp\.gate$",
    "re:^lm_head$",
    "re:model[.]layers[.][0-3][.].*",
    r"re:.*layers\.\d+\.mlp\.experts\.\d+\.up_proj",
    "re:(?:language_model[.])?model.layers.*.router",
]
NAMES = [
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.12.self_attn.kv_b_proj",
    "model.layers.3.mlp.gate",
    "model.layers.3.mlp.gate_proj",
    "model.layers.41.mlp.experts.0.gate_proj",
    "model.layers.41.mlp.experts.0.up_proj",
    "model.layers.41.mlp.shared_experts.down_proj",
    "model.layers.7.mlp.router",
    "language_model.model.layers.7.mlp.router",
    "visual.blocks.3.attn.qkv",
]


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_an_expression_covers_what_re_matches(pattern: str) -> None:
    names = Names([pattern])
    assert not names.not_understood
    assert [name for name in NAMES if names.cover(name)] == [name for name in NAMES if re.match(pattern[3:], name)]


@pytest.mark.parametrize(
    ("pattern", "covered"),
    [
        ("lm_head", ["lm_head"]),
        ("mlp.gate", ["model.layers.3.mlp.gate"]),
        ("visual", ["visual.blocks.3.attn.qkv"]),
        ("model.layers.12.self_attn*", ["model.layers.12.self_attn.kv_b_proj"]),
        ("model.layers.*.mlp.router", ["model.layers.7.mlp.router"]),
        ("*router", ["model.layers.7.mlp.router", "language_model.model.layers.7.mlp.router"]),
        ("model.layers.*.self_attn", ["model.layers.0.self_attn.q_proj", "model.layers.12.self_attn.kv_b_proj"]),
        ("model.layers.1", []),
    ],
)
def test_plain_names_and_asterisks(pattern: str, covered: list[str]) -> None:
    names = Names([pattern])
    assert [name for name in NAMES if names.cover(name)] == covered


@pytest.mark.parametrize(
    "pattern", ["re:(a+)+$", r"re:(\w+\.?)+!", "re:(?!.*experts).*", r"re:(.)\1", "re:a{1,99}", "re:(", "re:[z-a]"]
)
def test_what_is_not_understood_is_said(pattern: str) -> None:
    assert Names([pattern]).not_understood == [pattern]


def test_random_expressions_agree_with_re() -> None:
    chance = random.Random(7)  # noqa: S311 - repeatable, not secret
    pieces = [
        "model",
        "layers",
        r"\.",
        ".",
        ".*",
        "a",
        "a*",
        "b+",
        "[ab]",
        "[^a]",
        r"\d",
        r"\d+",
        "(a|b)",
        "(ab|b.)",
        "x?",
    ]
    alphabet = "abx.0model1layers"
    for _ in range(3000):
        pattern = "".join(chance.choice(pieces) for _ in range(chance.randint(1, 6)))
        pattern += chance.choice(("", "", "$"))
        name = "".join(chance.choice(alphabet) for _ in range(chance.randint(1, 12)))
        names = Names([f"re:{pattern}"])
        assert not names.not_understood, pattern
        assert names.cover(name) == bool(re.match(pattern, name)), (pattern, name)


def test_many_intricate_patterns_are_refused() -> None:
    names = Names([f"re:{'.*a' * 20}{index}$" for index in range(1000)])
    with pytest.raises(TooMuch):
        [names.cover(f"{index}.{'a' * 60}") for index in range(1000)]


def test_a_pattern_that_is_not_understood_is_an_assumption_and_too_many_are_refused() -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 40,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "intermediate_size": 4096,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    fp8 = {"quant_method": "fp8", "modules_to_not_convert": ["re:(a+)+$", "lm_head"]}
    model = read_facts({**config, "quantization_config": fp8})
    assert any("'re:(a+)+$' in quantization_config is not understood" in said for said in model.assumptions)
    many = {"quant_method": "fp8", "modules_to_not_convert": [f"*{'a*' * 60}{index}" for index in range(50_000)]}
    with pytest.raises(UnknownModel, match="so many patterns in quantization_config that they cannot be matched"):
        read_facts({**config, "quantization_config": many})

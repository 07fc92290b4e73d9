"""A config.json that is broken, hostile or of an unknown kind: one sentence, and nothing else."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from gpuready import catalog
from gpuready.planning.model import known
from gpuready.planning.model.config import Headers, UnknownModel, read_facts
from gpuready.planning.model.facts import ModelFacts
from gpuready.planning.model.headers import summary

CONFIGS = {entry["id"]: entry["config"] for entry in catalog.load("models")["models"]}
ONE_OF_EACH = [
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-VL-7B-Instruct",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Qwen/Qwen3.5-35B-A3B",
    "nvidia/Qwen3.6-27B-NVFP4",
    "deepseek-ai/DeepSeek-V3.2",
    "deepseek-ai/DeepSeek-V4-Flash",
    "moonshotai/Kimi-K2.5",
    "google/gemma-3-27b-it",
    "google/gemma-4-E4B-it",
    "openai/gpt-oss-20b",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "mistralai/Mixtral-8x7B-v0.1",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
    "XiaomiMiMo/MiMo-V2-Flash",
    "THUDM/chatglm3-6b",
    "tiiuae/falcon-40b",
    "openai-community/gpt2",
    "facebook/opt-125m",
    "BAAI/bge-reranker-v2-m3",
    "llava-hf/llava-v1.6-mistral-7b-hf",
]
DEEP: Any = {}
for _ in range(50_000):
    DEEP = {"text_config": DEEP}
NASTY: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    10**9,
    10**400,
    -(10**400),
    0.5,
    4096.0,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "4096",
    "x" * 100_000,
    "\x1b[31m\n{}",
    [],
    [[]],
    [None],
    [True, -1, "a"],
    list(range(20_000)),
    {},
    {"a": 1},
    DEEP,
]


def outcome(config: Any, headers: Any = None) -> ModelFacts | str:
    """Read a configuration; return the facts, or the sentence with which it is refused."""
    try:
        model = read_facts(config, headers)
    except UnknownModel as refusal:
        said = str(refusal)
        assert 10 < len(said) < 500, said[:500]
        assert said.isprintable(), said
        return said
    assert model.weight_bytes > 0
    assert model.layers == len(model.order) == sum(group.layers for group in model.groups)
    assert all(one.bytes >= 0 and one.elements >= 0 for one in model.components)
    assert all(said.isprintable() and len(said) < 500 for said in model.assumptions)
    return model


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to every value of a configuration."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key in value:
            found += places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 3)):
            found += places(value[index], (*path, index))
    return found


def put(config: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        config = config[key]
    config[path[-1]] = value


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_nasty_value_somewhere(name: str) -> None:
    """One value of a real configuration of each kind, replaced by something else that JSON can hold."""
    chance = random.Random(name)  # noqa: S311 - repeatable, not secret
    ways = places(CONFIGS[name])
    refused = 0
    for _ in range(120):
        config = copy.deepcopy(CONFIGS[name])
        put(config, chance.choice(ways), chance.choice(NASTY))
        refused += isinstance(outcome(config), str)
    assert refused > 5


@pytest.mark.parametrize("seed", range(8))
def test_many_changes_at_once(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - repeatable, not secret
    keys = sorted({key for config in CONFIGS.values() for key in (*config, *config.get("text_config", {}))})
    for _ in range(150):
        config = copy.deepcopy(CONFIGS[chance.choice(ONE_OF_EACH)])
        for _ in range(chance.randint(1, 8)):
            action = chance.random()
            if action < 0.4:
                config[chance.choice(keys)] = chance.choice(NASTY)
            elif action < 0.6:
                config[chance.choice(keys)] = chance.randint(0, 300)
            elif action < 0.8 and config:
                config.pop(chance.choice(sorted(config)))
            else:
                config.update(copy.deepcopy(CONFIGS[chance.choice(ONE_OF_EACH)]))
        outcome(config, chance.choice((None, None, 10**9, 1)))


def test_a_configuration_that_contains_itself() -> None:
    config: dict[str, Any] = dict(CONFIGS["meta-llama/Llama-3.1-8B-Instruct"])
    config["text_config"] = config
    config["vision_config"] = config
    config["quantization_config"] = config
    assert outcome(config) == "config.json nests its language model more than 2 times"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers = 1000000, which is not a whole number from 1 to 1024"),
        ({"num_hidden_layers": True}, "num_hidden_layers = true, which is not a whole number from 1 to 1024"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers = '32', which is not a whole number from 1 to 1024"),
        ({"hidden_size": float("nan")}, "hidden_size = nan, which is not a whole number from 1 to 16777216"),
        ({"hidden_size": -4096}, "hidden_size = -4096, which is not a whole number"),
        ({"hidden_size": 10**400}, "hidden_size = a number of more than 18 digits, which is not a whole number"),
        ({"hidden_size": [4096]}, "hidden_size = a list of 1, which is not a whole number"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"num_key_value_heads": 64}, "num_key_value_heads = 64, and only 32 attention heads"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1, which is neither true nor false"),
        ({"torch_dtype": "int3"}, "config.json has the dtype 'int3', known are float32, float16, bfloat16"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types = a list of 3, and num_hidden_layers is 32"),
        ({"layer_types": ["warp"] * 32}, "with 'warp' in it; known are"),
        ({"text_config": 7}, "text_config = 7, which is not an object"),
        ({"quantization_config": {"quant_method": "zip"}}, "quant_method = 'zip'; known are fp8, fbgemm_fp8"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "no quantization_config.config_groups"),
        ({"model_type": "lama"}, "model_type = 'lama', which is none of the"),
        ({"model_type": "lama"}, "the nearest are llama,"),
    ],
)
def test_the_sentence_names_the_key_and_what_is_allowed(change: dict[str, Any], words: str) -> None:
    said = outcome({**CONFIGS["meta-llama/Llama-3.1-8B-Instruct"], "architectures": [], **change})
    assert isinstance(said, str)
    assert words in said


@pytest.mark.parametrize("config", [[], None, "llama", 7, {}, {"architectures": [None]}, {"model_type": 5}, DEEP])
def test_what_is_no_configuration_at_all(config: Any) -> None:
    assert isinstance(outcome(config), str)


def test_an_architecture_that_is_known_by_its_name_alone_is_read() -> None:
    config = dict(CONFIGS["meta-llama/Llama-3.1-8B-Instruct"])
    config["model_type"] = "my-own-llama"
    assert isinstance(outcome(config), ModelFacts)
    config["architectures"] = ["MyOwnForCausalLM"]
    said = outcome(config)
    assert isinstance(said, str)
    assert "'my-own-llama'" in said


@pytest.mark.parametrize("headers", [0, -5, True, 10**30])
def test_a_total_of_headers_that_is_none(headers: int) -> None:
    said = outcome(CONFIGS["meta-llama/Llama-3.1-8B-Instruct"], headers)
    assert isinstance(said, str)
    assert "which is not a size" in said


def test_more_kinds_of_tensors_than_a_model_has_are_summed_up() -> None:
    tensors = {f"t{index}x": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]} for index in range(20_000)}
    kinds = summary(tensors, {})
    assert len(kinds) <= 4097
    assert Headers.of(kinds).bytes == 40_000


def test_a_configuration_survives_json() -> None:
    """What is refused or read does not depend on the objects that hold it."""
    for name in ONE_OF_EACH:
        assert read_facts(json.loads(json.dumps(CONFIGS[name]))) == read_facts(CONFIGS[name])


def test_the_same_name_gives_the_same_facts_twice() -> None:
    assert known.facts("Qwen/Qwen3-8B-AWQ") == known.facts("Qwen/Qwen3-8B-AWQ")

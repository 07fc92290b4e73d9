"""Public models found by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gpuready import catalog
from gpuready.planning.model import known
from gpuready.planning.model.config import UnknownModel, read_facts

ENTRIES = catalog.load("models")["models"]


@pytest.mark.parametrize(
    ("name", "found", "form"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", None),
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B", None),
        ("Qwen3-8B", "Qwen/Qwen3-8B", None),
        ("unsloth/Qwen3-8B", "Qwen/Qwen3-8B", None),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "meta-llama/Meta-Llama-3.1-8B-Instruct", ("wna16", 4)),
        (
            "neuralmagic/Meta-Llama-3.1-70B-Instruct-quantized.w8a8",
            "meta-llama/Meta-Llama-3.1-70B-Instruct",
            ("int8", 8),
        ),
        ("redhatai/Llama-3.3-70B-Instruct-fp8-dynamic", "meta-llama/Llama-3.3-70B-Instruct", ("fp8", 8)),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B-Instruct", ("awq", 4)),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct", ("gptq", 4)),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "Qwen/Qwen2.5-7B-Instruct", ("gptq", 8)),
        ("unsloth/phi-4-bnb-4bit", "microsoft/phi-4", ("bitsandbytes", 4)),
        ("unsloth/phi-4 bnb-4bit", "microsoft/phi-4", ("bitsandbytes", 4)),
        ("someone/Qwen3-8B-NVFP4", "Qwen/Qwen3-8B", ("nvfp4", 4)),
        ("Qwen/Qwen3-235B-A22B-FP8", "Qwen/Qwen3-235B-A22B-FP8", ("fp8", 8)),
        ("nvidia/Qwen3.5-122B-A10B-NVFP4", "nvidia/Qwen3.5-122B-A10B-NVFP4", ("nvfp4", 4)),
        ("Qwen3.5-122B-A10B NVFP4 (resharded)", "nvidia/Qwen3.5-122B-A10B-NVFP4", ("nvfp4", 4)),
        ("deepseek-ai/DeepSeek-V4-Flash-0731", "deepseek-ai/DeepSeek-V4-Flash", ("fp8", 8)),
        ("Llama-3.1-8B class", "meta-llama/Llama-3.1-8B", None),
        ("Qwen3-4B fp16", "Qwen/Qwen3-4B", None),
        ("somebody/Qwen2.5-7B-Instruct-medical-v2", "Qwen/Qwen2.5-7B-Instruct", None),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "meta-llama/Llama-3.1-8B", None),
        ("somebody/Hermes-3-Llama-3.1-8B-AWQ", "meta-llama/Llama-3.1-8B", ("awq", 4)),
        ("somebody/Qwen3-8B-4bit", "Qwen/Qwen3-8B", ("wna16", 4)),
        ("somebody/Qwen3-8B-8bit", "Qwen/Qwen3-8B", ("wna16", 8)),
        ("somebody/Qwen3-8B-AWQ-8bit", "Qwen/Qwen3-8B", ("wna16", 8)),
        ("somebody/Qwen3-8B-bnb-8bit", "Qwen/Qwen3-8B", ("bitsandbytes", 8)),
        ("somebody/Qwen3-8B-NVFP4-W4A4", "Qwen/Qwen3-8B", ("nvfp4", 4)),
        ("somebody/gpt-oss-20b-BF16", "openai/gpt-oss-20b", None),
        ("somebody/DeepSeek-R1-bf16", "deepseek-ai/DeepSeek-R1", None),
    ],
)
def test_a_model_is_found_by_name(name: str, found: str, form: tuple[str, int] | None) -> None:
    model = known.find(name)
    assert model is not None
    assert model.id == found
    read = known.facts(name).quantization
    assert (None if read is None else (read.method, read.weight_bits)) == form


def test_what_is_concluded_from_a_name_is_said() -> None:
    said = known.facts("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16").assumptions
    assert any("having the sizes of meta-llama/Meta-Llama-3.1-8B-Instruct" in one for one in said)
    assert any("4 bit weights in groups of 128, embeddings and head in 16 bits" in one for one in said)


@pytest.mark.parametrize(
    ("word", "bits"), [("awq", 4), ("nvfp4", 4), ("fp8", None), ("bitsandbytes", None), (None, None)]
)
def test_a_format_that_engines_make_while_loading_is_not_the_checkpoint_s(word: str | None, bits: int | None) -> None:
    read = known.facts("Qwen/Qwen3-8B", word).quantization
    assert (read.weight_bits if read is not None else None) == bits


@pytest.mark.parametrize("word", [*known.FORMATS, "GPTQ-Int4", "fp8-dynamic", "bitsandbytes"])
def test_a_format_that_is_asked_for_is_a_checkpoint_in_it(word: str) -> None:
    model = known.find("Qwen/Qwen3-8B")
    assert model is not None
    made = known.sizes(known.in_format(model, word))
    if word == "bf16":
        assert made == known.facts("Qwen/Qwen3-8B")
        return
    assert made.quantization is not None
    assert made.weight_bytes < 0.6 * known.facts("Qwen/Qwen3-8B").weight_bytes
    assert any(one.startswith("a checkpoint made the usual way: ") for one in made.assumptions)


def test_a_format_that_is_asked_for_takes_the_place_of_the_published_one() -> None:
    model = known.find("deepseek-ai/DeepSeek-V3")
    assert model is not None
    assert known.in_format(model, "fp8") is model
    assert known.sizes(known.in_format(model, "awq")).quantization == known.facts("Qwen/Qwen3-8B", "awq").quantization
    assert known.sizes(known.in_format(model, "bf16")).quantization is None


@pytest.mark.parametrize("word", ["nonsense", "gguf", "awq-nonsense", "q4_k_m", "", "static"])
def test_a_format_that_nobody_knows_is_refused(word: str) -> None:
    model = known.find("Qwen/Qwen3-8B")
    assert model is not None
    with pytest.raises(UnknownModel, match=r"no format is known as .*; known are awq, gptq, fp8, "):
        known.in_format(model, word)


def test_a_checkpoint_s_own_format_stays() -> None:
    read = known.facts("openai/gpt-oss-20b", "mxfp4").quantization
    assert read is not None
    assert read.method == "mxfp4"


@pytest.mark.parametrize(
    "word",
    ["GGUF", "mlx-4bit", "exl2", "4.0bpw", "AQLM", "hqq", "GPTQ-Int3", "AWQ-3bit", "2bit", "W2A16", "q4_0", "fp32"],
)
def test_nothing_is_concluded_from_a_format_whose_size_is_not_known(word: str) -> None:
    assert known.find(f"somebody/Qwen3-8B-{word}") is None
    assert known.find("Qwen/Qwen3-8B", word) is None


def test_a_size_that_the_catalog_lacks_is_no_other_size() -> None:
    ids = {entry["id"].lower() for entry in ENTRIES}
    sized = [(id_, found) for id_ in sorted(ids) for found in re.findall(r"(?<=-)\d+(?:\.\d+)?b(?=-|$)", id_)]
    assert len(sized) > 100
    for id_, size in sized:
        for other in ("0.7b", "9.3b", "77b", "1234b"):
            name = id_.replace(size, other)
            assert name in ids or known.find(name) is None, name


OTHERS = [
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    "somebody/Qwen3-8B-eagle3",
    "somebody/Qwen3-8B-lora",
    "somebody/Llama-3.1-8B-Vision-378",
    "somebody/Qwen3-8B-1M",
    "somebody/Qwen2.5-7B-upscaled-to-9B",
]


@pytest.mark.parametrize("name", ["", "/", "nobody/has-made-this-7B", "Qwen3-8B-GGUF", "4bit", "x" * 300, *OTHERS])
def test_a_model_that_nobody_knows(name: str) -> None:
    assert known.find(name) is None
    with pytest.raises(UnknownModel, match=r"the catalog has no model .*; give its config\.json instead"):
        known.facts(name)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: str(entry["id"]))
def test_every_entry_is_read_and_has_a_public_source(entry: dict[str, object]) -> None:
    assert set(entry) <= {"id", "source", "base", "config", "weight_bytes", "assumptions"}
    assert str(entry["source"]).startswith(("github.com/", "https://huggingface.co/"))
    config = entry["config"]
    assert isinstance(config, dict)
    model = read_facts(config)
    assert model.weight_bytes > 0
    assert sum(group.layers for group in model.groups) == model.layers == len(model.order)
    assert sum(one.bytes * one.count for one in model.tensors) <= model.weight_bytes


def test_ids_are_unique_and_bases_exist() -> None:
    ids = [entry["id"] for entry in ENTRIES]
    assert len(ids) == len(set(ids))
    assert {entry["base"] for entry in ENTRIES if "base" in entry} <= set(ids)


def test_the_catalog_is_one_model_a_line() -> None:
    text = Path(catalog.__file__).with_name("models.json").read_text(encoding="utf-8")
    lines = text.splitlines()[1:-1]
    assert [json.loads(line.rstrip(","))["id"] for line in lines] == [entry["id"] for entry in ENTRIES]

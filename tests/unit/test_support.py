"""What runs on which card, against a written table; and every refusal by its words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpuready import catalog
from gpuready.planning.memory.device import cards, device
from gpuready.planning.memory.run import Device, Run
from gpuready.planning.memory.versions import parse
from gpuready.planning.model import known
from gpuready.planning.model.facts import ModelFacts, Quantization
from gpuready.planning.support import Objection, choices, flag, newest, objections
from gpuready.planning.support.capability import engines

CARDS = ("v100s", "t4", "a100-80gb", "l40s", "h100", "b200")
VERSIONS = {"vllm": "0.19.1", "sglang": "0.5.10.post1", "tensorrt_llm": "1.0.0"}
BITS = {"fp8": 8, "int8": 8, "awq": 4, "gptq": 4, "wna16": 4, "mxfp4": 4, "nvfp4": 4, "bitsandbytes": 4}

# y: runs; w: the weights alone are in the format; -: refused. Columns are CARDS; V100S runs vLLM 0.8.5.post1.
TABLE = {
    ("vllm", "bfloat16"): "--yyyy",
    ("vllm", "float16"): "yyyyyy",
    ("vllm", "fp8"): "-wwyyy",
    ("vllm", "fp8_w8a8"): "---yyy",
    ("vllm", "int8"): "-yyyy-",
    ("vllm", "awq"): "-yyyyy",
    ("vllm", "gptq"): "yyyyyy",
    ("vllm", "wna16"): "-yyyyy",
    ("vllm", "mxfp4"): "--wwwy",
    ("vllm", "nvfp4"): "-wwwwy",
    ("vllm", "bitsandbytes"): "yyyyyy",
    ("vllm", "kv fp8"): "--yyyy",
    ("sglang", "bfloat16"): "--yyyy",
    ("sglang", "float16"): "--yyyy",
    ("sglang", "fp8"): "--wyyy",
    ("sglang", "fp8_w8a8"): "---yyy",
    ("sglang", "int8"): "--yyy-",
    ("sglang", "awq"): "--yyyy",
    ("sglang", "gptq"): "--yyyy",
    ("sglang", "wna16"): "--yyyy",
    ("sglang", "mxfp4"): "--wwwy",
    ("sglang", "nvfp4"): "-----y",
    ("sglang", "bitsandbytes"): "--yyyy",
    ("sglang", "kv fp8"): "--yyyy",
    ("tensorrt_llm", "bfloat16"): "--yyyy",
    ("tensorrt_llm", "float16"): "--yyyy",
    ("tensorrt_llm", "fp8"): "---yyy",
    ("tensorrt_llm", "fp8_w8a8"): "------",
    ("tensorrt_llm", "int8"): "------",
    ("tensorrt_llm", "awq"): "--yyy-",
    ("tensorrt_llm", "gptq"): "--yyy-",
    ("tensorrt_llm", "wna16"): "------",
    ("tensorrt_llm", "mxfp4"): "----wy",
    ("tensorrt_llm", "nvfp4"): "-----y",
    ("tensorrt_llm", "bitsandbytes"): "------",
    ("tensorrt_llm", "kv fp8"): "--yyyy",
}


def the(name: str, mig: str | None = None) -> Device:
    found = device(name, mig)
    assert found is not None
    return found


def llama(**changes: Any) -> ModelFacts:
    return replace(known.facts("meta-llama/Llama-3.1-8B-Instruct"), **changes)


def quantized(method: str, bits: int, group: int = 0) -> ModelFacts:
    return llama(quantization=Quantization(method, bits, group_size=group))


def said(model: ModelFacts, card: Device, run: Run, **server: str) -> list[str]:
    return [one.sentence for one in objections(model, card, run, **server)]


def only(model: ModelFacts, card: Device, run: Run, **server: str) -> Objection:
    (found,) = objections(model, card, run, **server)
    return found


@pytest.mark.parametrize(("engine", "what"), TABLE)
@pytest.mark.parametrize("name", CARDS)
def test_the_matrix_of_cards_engines_and_formats(engine: str, what: str, name: str) -> None:
    card = the(name)
    version = "0.8.5.post1" if engine == "vllm" and name == "v100s" else VERSIONS[engine]
    run, model = Run(engine, version), llama()
    if what in ("bfloat16", "float16"):
        run = replace(run, dtype=what)
    elif what == "kv fp8":
        run = replace(run, kv_dtype="fp8")
    elif what == "fp8_w8a8":
        run = replace(run, quantization=what)
    else:
        model = quantized(what, BITS[what])
    refused = objections(model, card, run)
    weights_alone = any("computes in 16 bits" in note for note in choices(model, card, engine, version).notes)

    expected = TABLE[engine, what][CARDS.index(name)]
    assert bool(refused) == (expected == "-"), refused
    if not refused:
        assert weights_alone == (expected == "w")


def test_the_table_holds_every_format_of_the_catalog() -> None:
    for engine, page in engines().items():
        assert {what for one, what in TABLE if one == engine} >= {*page["formats"]} - {"gguf"}
        assert {one for rule in page["formats"].values() for one in rule["instead"]} <= {*page["formats"]}
        assert {*page["made_while_loading"]} <= {*page["formats"]}
        assert {*page["formats"]} == {*catalog.load("engine_support")["format_names"]}
        assert page["kv_dtypes"]["fp8"]


@pytest.mark.parametrize(
    ("card", "run", "sentence"),
    [
        (
            "t4",
            Run("vllm", "0.19.1", dtype="bfloat16"),
            "bfloat16 on NVIDIA T4 16GB with vLLM 0.19.1: bfloat16 begins with compute capability 8.0, this card has "
            "7.5; "
            "set dtype float16",
        ),
        (
            "v100s",
            Run("vllm", "0.8.5.post1", dtype="bf16"),
            "bfloat16 on NVIDIA V100S PCIe 32GB with vLLM 0.8.5.post1: bfloat16 begins with compute capability 8.0, "
            "this "
            "card has 7.0; set dtype float16",
        ),
        (
            "v100s",
            Run("vllm", "0.19.1"),
            "vLLM 0.19.1 on NVIDIA V100S PCIe 32GB: from 0.10 on only Triton is left for attention on compute "
            "capability "
            "7.0, which has no tensor cores there and is reported to hang, and from 0.20 on the wheels hold no "
            "kernels for "
            "it; vLLM 0.8.5.post1 runs on it",
        ),
        (
            "t4",
            Run("sglang", "0.5.10.post1"),
            "SGLang 0.5.10.post1 on NVIDIA T4 16GB: the wheels of its kernels hold none below compute capability 8.0, "
            "though its code would accept 7.5; vLLM 0.33.0 runs on it",
        ),
        (
            "v100s",
            Run("sglang", "0.5.23"),
            "SGLang 0.5.23 on NVIDIA V100S PCIe 32GB: the wheels of its kernels hold none below compute capability "
            "8.0, "
            "though its code would accept 7.5; vLLM 0.8.5.post1 runs on it",
        ),
        (
            "t4",
            Run("tensorrt_llm", "1.0.0"),
            "TensorRT-LLM 1.0.0 on NVIDIA T4 16GB: NVIDIA supports it from Ampere on, compute capability 8.0; vLLM "
            "0.33.0 "
            "runs on it",
        ),
        (
            "v100s",
            Run("tensorrt_llm", "1.2.1"),
            "TensorRT-LLM 1.2.1 on NVIDIA V100S PCIe 32GB: NVIDIA supports it from Ampere on, compute capability "
            "8.0; vLLM "
            "0.8.5.post1 runs on it",
        ),
        (
            "b200",
            Run("vllm", "0.8.5"),
            "vLLM 0.8.5 on NVIDIA B200 SXM 180GB: its wheels hold kernels for Blackwell from 0.10 on (CUDA 12.8); vLLM "
            "0.33.0 runs on it",
        ),
        (
            "mi300x",
            Run("vllm", "0.19.1"),
            "vLLM 0.19.1 on AMD Instinct MI300X 192GB: gpuready serves NVIDIA cards alone; take another card",
        ),
        (
            "a100-80gb",
            Run("vllm", "0.19.1", quantization="w8a8_fp8"),
            "fp8_w8a8 on NVIDIA A100 SXM4 80GB with vLLM 0.19.1: FP8 arithmetic begins with compute capability 8.9; "
            "this "
            "card has 8.0; fp8 (weights alone: W8A16, Marlin) or int8 runs there",
        ),
        (
            "a100-80gb",
            Run("tensorrt_llm", "1.0.0", quantization="fp8"),
            "fp8 on NVIDIA A100 SXM4 80GB with TensorRT-LLM 1.0.0: FP8 begins with compute capability 8.9; this card "
            "has "
            "8.0; awq or gptq runs there",
        ),
        (
            "t4",
            Run("vllm", "0.13.0", quantization="fp8"),
            "fp8 on NVIDIA T4 16GB with vLLM 0.13.0: FP8 arithmetic begins with compute capability 8.9, weights alone "
            "(Marlin) with 7.5 from 0.14 on and with 8.0 before; this card has 7.5; int8 or awq runs there",
        ),
        (
            "t4",
            Run("vllm", "0.19.1", kv_dtype="fp8"),
            "a KV cache in fp8 on NVIDIA T4 16GB with vLLM 0.19.1: an FP8 KV cache begins with compute capability "
            "8.0; this "
            "card has 7.5; leave it in 16 bits (auto)",
        ),
        (
            "h100",
            Run("vllm", "0.19.1", kv_dtype="nvfp4"),
            "a KV cache in nvfp4 on NVIDIA H100 SXM5 80GB with vLLM 0.19.1: an NVFP4 KV cache came with 0.20 for "
            "Blackwell's "
            "data centre cards, and for other cards from 8.0 on with 0.33; this card has 9.0; fp8 runs there",
        ),
        (
            "h100",
            Run("sglang", "0.5.10.post1", kv_dtype="int3"),
            "a KV cache in int3 on NVIDIA H100 SXM5 80GB with SGLang 0.5.10.post1: known are auto, fp8_e4m3, fp8_e5m2, "
            "nvfp4, fp4_e2m1; leave it in 16 bits (auto)",
        ),
        (
            "h100",
            Run("vllm", "0.19.1", quantization="fp3"),
            "quantization 'fp3' with vLLM 0.19.1: no format has this name; known are fp8, fp8_w8a8, int8, awq, gptq, "
            "wna16, "
            "mxfp4, nvfp4, bitsandbytes, gguf",
        ),
        (
            "h100",
            Run("vllm", "0.19.1", quantization="awq"),
            "awq on NVIDIA H100 SXM5 80GB with vLLM 0.19.1: it is not made while loading, only fp8 and bitsandbytes "
            "are; "
            "take a checkpoint in awq, or leave the weights in 16 bits",
        ),
        (
            "h100",
            Run("tensorrt_llm", "1.0.0", quantization="fp8"),
            "fp8 on NVIDIA H100 SXM5 80GB with TensorRT-LLM 1.0.0: nothing is made while loading; take a checkpoint "
            "in fp8, "
            "or leave the weights in 16 bits",
        ),
        (
            "h100",
            Run("vllm", "0.28.0", quantization="bitsandbytes"),
            "bitsandbytes on NVIDIA H100 SXM5 80GB with vLLM 0.28.0: bitsandbytes begins with compute capability 7.0 "
            "and is "
            "left out from 0.28 on; this card has 9.0; awq or gptq runs there",
        ),
        (
            "h100",
            Run("vllm", "0.19.1", dtype="float8"),
            "float8 on NVIDIA H100 SXM5 80GB with vLLM 0.19.1: known are bfloat16, float16, float32; set dtype "
            "bfloat16",
        ),
        (
            "h100",
            Run("vllm", "0.19.1", tp=3),
            "tp 3 for llama with vLLM 0.19.1: its 32 attention heads do not divide by 3; tp 2 fits",
        ),
        (
            "h100",
            Run("sglang", "0.5.10.post1", tp=12),
            "tp 12 for llama with SGLang 0.5.10.post1: its 32 attention heads do not divide by 12; tp 8 fits",
        ),
        (
            "h100",
            Run("vllm", "0.19.1", pp=64),
            "pp 64 for llama with vLLM 0.19.1: it has 32 layers; pp 32 is the most",
        ),
        (
            "h100",
            Run("vllm", "0.19.1", tp=4, dcp=3),
            "dcp 3 for llama with vLLM 0.19.1: it has to divide tp 4; leave it at 1",
        ),
        ("h100", Run("vllm", "0.19.1", ep=2), "ep 2 for llama with vLLM 0.19.1: it has no experts; leave it at 1"),
    ],
)
def test_what_does_not_run_is_refused_with_reason_and_nearest(card: str, run: Run, sentence: str) -> None:
    assert said(llama(), the(card), run) == [sentence]


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    sentence = "engine 'llama.cpp': there is no such engine; known are vllm, sglang, tensorrt_llm"
    assert said(llama(), the("h100"), Run("llama.cpp", "1")) == [sentence]


def test_checkpoints_that_the_card_does_not_run() -> None:
    nvfp4 = quantized("nvfp4", 4)
    awq = quantized("awq", 4, 128)

    assert said(nvfp4, the("h100"), Run("sglang", "0.5.10.post1")) == [
        "nvfp4 on NVIDIA H100 SXM5 80GB with SGLang 0.5.10.post1: NVFP4 is for Blackwell alone, from compute "
        "capability 10.0 "
        "on; this card has 9.0; fp8 or awq runs there"
    ]
    assert said(nvfp4, the("l40s"), Run("tensorrt_llm", "1.0.0")) == [
        "nvfp4 on NVIDIA L40S 48GB with TensorRT-LLM 1.0.0: NVFP4 is for Blackwell alone, from compute capability "
        "10.0 on; "
        "this card has 8.9; fp8 or awq runs there"
    ]
    assert said(quantized("int8", 8), the("b200"), Run("vllm", "0.33.0")) == [
        "int8 on NVIDIA B200 SXM 180GB with vLLM 0.33.0: INT8 arithmetic (W8A8) is there from compute capability 7.5 "
        "up to "
        "9.0; this card has 10.0; fp8 or gptq runs there"
    ]
    assert said(quantized("wna16", 4, 128), the("v100s"), Run("vllm", "0.8.5.post1")) == [
        "wna16 on NVIDIA V100S PCIe 32GB with vLLM 0.8.5.post1: compressed-tensors' 4 and 8 bit weights begin with "
        "compute "
        "capability 8.0, from 0.12 on with 7.5; this card has 7.0; gptq runs there"
    ]
    assert said(awq, the("h100"), Run("vllm", "0.19.1", quantization="fp8")) == [
        "fp8 on NVIDIA H100 SXM5 80GB with vLLM 0.19.1: the checkpoint is awq already; leave it awq"
    ]
    assert said(awq, the("h100"), Run("vllm", "0.19.1", quantization="awq_marlin")) == []


def test_changes_that_are_named_make_the_run_possible() -> None:
    for card, run in [
        ("t4", Run("vllm", "0.19.1", dtype="bfloat16")),
        ("a100-80gb", Run("vllm", "0.19.1", quantization="w8a8_fp8")),
        ("h100", Run("vllm", "0.19.1", tp=3)),
        ("t4", Run("vllm", "0.19.1", kv_dtype="fp8")),
        ("h100", Run("vllm", "0.19.1", kv_dtype="nvfp4")),
        ("h100", Run("vllm", "0.19.1", tp=4, dcp=3)),
    ]:
        found = only(llama(), the(card), run)
        assert found.change
        assert said(llama(), the(card), replace(run, **found.change)) == []


def test_slices_are_not_joined() -> None:
    found = only(llama(), the("h100", "3g.40gb"), Run("vllm", "0.19.1", tp=2))

    assert found.sentence == (
        "one deployment over 2 MIG slices of NVIDIA H100 SXM5 80GB (3g.40gb): slices have no peer-to-peer and NCCL "
        "does not "
        "join them; give it one larger slice, or replicas of one slice each"
    )
    assert said(llama(), the("h100", "3g.40gb"), Run("vllm", "0.19.1")) == []


def test_kv_heads_divide_or_repeat_and_experts_may_be_spread_whole() -> None:
    odd = llama(heads=32, groups=tuple(replace(one, kv_heads=6) for one in llama().groups))
    narrow = llama(intermediate=14336 + 8)

    assert said(odd, the("h100"), Run("vllm", "0.19.1", tp=4)) == [
        "tp 4 for llama with vLLM 0.19.1: its 6 KV heads neither divide by 4 nor repeat in it; tp 2 fits"
    ]
    assert said(llama(), the("h100"), Run("vllm", "0.19.1", tp=16)) == []
    assert said(narrow, the("h100"), Run("vllm", "0.19.1", tp=16)) == [
        "tp 16 for llama with vLLM 0.19.1: its feed-forward width 14344 does not divide by 16; tp 8 fits"
    ]
    assert said(odd, the("h100"), Run("sglang", "0.5.10.post1", tp=4, dp=4, attention_dp=True)) == []


def test_groups_of_a_quantization_are_not_cut() -> None:
    model = replace(quantized("gptq", 4, 128), heads=64, intermediate=29568)

    assert said(model, the("h100"), Run("vllm", "0.19.1", tp=8)) == [
        "tp 8 for llama with vLLM 0.19.1: 3696 weights of a row on each GPU do not divide by the quantization's "
        "groups of "
        "128; tp 1 fits"
    ]


def test_an_architecture_that_a_release_does_not_know() -> None:
    run = Run("vllm", "0.8.5.post1")
    oss = llama(architecture="GptOssForCausalLM")

    assert said(oss, the("h100"), run) == [
        "GptOssForCausalLM with vLLM 0.8.5.post1: its registry of models does not hold this architecture; vLLM "
        "0.10.2 has it"
    ]
    assert said(oss, the("h100"), Run("vllm", "0.19.1")) == []
    assert said(llama(architecture="ChatGLMModel"), the("h100"), Run("tensorrt_llm", "1.0.0")) == [
        "ChatGLMModel with TensorRT-LLM 1.0.0: its registry of models does not hold this architecture; vLLM and "
        "SGLang have it"
    ]
    assert said(llama(architecture="BaichuanForCausalLM"), the("h100"), Run("vllm", "0.33.0")) == [
        "BaichuanForCausalLM with vLLM 0.33.0: its registry of models does not hold this architecture; vLLM 0.24.0 "
        "had it"
    ]
    assert said(llama(architecture="NobodyForCausalLM"), the("h100"), run) == [
        "NobodyForCausalLM with vLLM 0.8.5.post1: its registry of models does not hold this architecture; no engine "
        "has it"
    ]


def test_between_two_releases_that_were_read_the_later_counts_too() -> None:
    name = next(one for one in catalog.load("engine_models")["engines"]["vllm"] if one["release"] == "0.10.2")["added"][
        0
    ]
    model = llama(architecture=name)

    assert said(model, the("h100"), Run("vllm", "0.10.0")) == []
    assert said(model, the("h100"), Run("vllm", "0.9.2")) != []


def test_driver_and_cuda() -> None:
    run = Run("vllm", "0.33.0")

    assert said(llama(), the("h100"), run, driver="580.95.05", cuda="13.0") == []
    assert said(llama(), the("h100"), Run("vllm", "0.19.1"), driver="535.54.03", cuda="13.0") == []
    assert said(llama(), the("h100"), run, driver="570.124.06") == [
        "driver 570.124.06: CUDA 13, which vLLM 0.33.0 needs, begins with 580.65.06; install 580.65.06 or newer"
    ]
    assert said(llama(), the("h100"), run, cuda="12.8") == [
        "vLLM 0.33.0 on CUDA 12.8: its wheels are made for CUDA 13; a release before 0.20.0 is made for it"
    ]
    assert said(llama(), the("b200"), Run("vllm", "0.19.1"), driver="550.54.14") == [
        "driver 550.54.14: the NVIDIA B200 SXM 180GB begins with 570.133.20; install 570.133.20 or newer"
    ]
    assert said(llama(), the("h100", "3g.40gb"), Run("vllm", "0.19.1"), driver="525.60.13") == [
        "driver 525.60.13: MIG on the NVIDIA H100 SXM5 80GB begins with 525.85.12; install 525.85.12 or newer"
    ]
    assert said(llama(), the("v100s"), Run("vllm", "0.8.5.post1"), driver="590.44.01") == [
        "driver 590.44.01: branch 580 is the last that knows the NVIDIA V100S PCIe 32GB; install branch 580"
    ]


def test_choices_on_cards_with_and_without_bfloat16() -> None:
    model = llama()
    t4, v100s = choices(model, the("t4"), "vllm", "0.19.1"), choices(model, the("v100s"), "vllm", "0.8.5.post1")
    h100 = choices(model, the("h100"), "vllm", "0.19.1")

    assert (h100.dtype, h100.kv_dtypes, h100.quantizations) == ("bfloat16", ("auto", "fp8"), ("fp8", "bitsandbytes"))
    assert (h100.attention_backend, h100.notes) == ("FLASH_ATTN", ())
    assert (t4.dtype, t4.kv_dtypes, t4.attention_backend) == ("float16", ("auto",), "FLASHINFER")
    assert t4.notes[0].startswith("NVIDIA T4 16GB has no bfloat16: vLLM computes in float16")
    assert "the host needs nvcc of CUDA 12, ninja and g++" in t4.notes[1]
    assert (v100s.dtype, v100s.quantizations, v100s.attention_backend) == ("float16", ("bitsandbytes",), "XFORMERS")
    assert v100s.notes[-1].startswith("vLLM 0.8.5.post1 is the last line that serves this card well")
    assert choices(model, the("t4"), "vllm", "0.33.0").attention_backend == "TRITON_ATTN"
    assert choices(quantized("awq", 4), the("h100"), "vllm", "0.19.1").quantizations == ()
    assert choices(model, the("h100"), "sglang", "0.5.10.post1").attention_backend == "fa3"
    assert choices(model, the("b200"), "sglang", "0.5.10.post1").attention_backend == "trtllm_mha"


def test_models_that_are_not_stable_in_float16() -> None:
    gemma = llama(model_type="gemma3", architecture="Gemma3ForConditionalGeneration")
    found = choices(gemma, the("t4"), "vllm", "0.19.1")

    assert found.dtype == "float32"
    assert found.notes[0] == (
        "vLLM refuses gemma3 in float16 for its numerical instability: on NVIDIA T4 16GB it computes in float32, "
        "which takes "
        "twice the memory"
    )
    assert choices(gemma, the("h100"), "vllm", "0.19.1").dtype == "bfloat16"
    assert said(gemma, the("h100"), Run("vllm", "0.19.1", dtype="half")) == [
        "float16 on NVIDIA H100 SXM5 80GB with vLLM 0.19.1: it refuses gemma3 in float16 for its numerical "
        "instability; set "
        "dtype bfloat16"
    ]


@pytest.mark.parametrize("engine", VERSIONS)
@pytest.mark.parametrize("name", cards())
def test_what_is_chosen_is_never_objected_to(engine: str, name: str) -> None:
    card = the(name)
    version = newest(engine, card)
    if version is None:
        assert objections(llama(), card, Run(engine, VERSIONS[engine]))
        return
    found = choices(llama(), card, engine, version)

    for kv in found.kv_dtypes:
        for made in (None, *found.quantizations):
            run = Run(engine, version, dtype=found.dtype, kv_dtype=kv, quantization=made)
            assert objections(llama(), card, run) == []
    assert found.attention_backend


def test_flags_by_release() -> None:
    assert flag("vllm", "0.19.1", "kv_bytes") == "kv-cache-memory-bytes"
    assert flag("vllm", "0.9.2", "kv_bytes") is None
    assert flag("sglang", "0.5.10.post1", "graph_max_batch") == "cuda-graph-max-bs"
    assert flag("sglang", "0.5.23", "graph_max_batch") == "cuda-graph-max-bs-decode"
    assert flag("tensorrt_llm", "1.0.0", "max_num_seqs") == "max_batch_size"
    assert flag("vllm", "0.19.1", "no such setting") is None


def test_releases_of_the_catalog_are_in_order_and_readable() -> None:
    for engine, pages in catalog.load("engine_models")["engines"].items():
        read = [parse(one["release"]) for one in pages]
        assert None not in read
        assert read == sorted(read)  # type: ignore[type-var]
        assert parse(engines()[engine]["newest"])

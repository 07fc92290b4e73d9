"""What is read of public models, against what their publishers, engines and start-up logs say."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.unit.planning_options import LLAMA_8B

from gpuready.planning.model import known
from gpuready.planning.model.config import Headers, UnknownModel, read_facts
from gpuready.planning.model.facts import ModelFacts
from gpuready.planning.model.headers import summary

GIB = 1024**3


def split(model: ModelFacts, name: str, how: str) -> int:
    return sum(one.elements for one in model.components if (one.name, one.split) == (name, how))


# Exact counts. Their sum over two bytes is the total of the safetensors headers where that was published
# (github.com/jgchn/llm-d-planner, accuracy/results/v0.19.0/results_predicted.csv), or the count on the model's page.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("meta-llama/Llama-3.1-70B-Instruct", 70_553_706_496),
        ("meta-llama/Llama-3.1-405B-Instruct", 405_853_388_800),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-72B-Instruct", 72_706_203_648),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen/Qwen3-235B-A22B", 235_093_634_560),
        ("Qwen/Qwen1.5-MoE-A2.7B-Chat", 14_315_784_192),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 46_702_792_704),
        ("deepseek-ai/DeepSeek-V2-Lite", 15_706_484_224),
        ("deepseek-ai/DeepSeek-V3", 671_026_419_200),
        ("moonshotai/Kimi-K2-Instruct", 1_026_408_232_448),
        ("openai/gpt-oss-20b", 20_914_757_184),
        ("openai/gpt-oss-120b", 116_829_156_672),
        ("google/gemma-2-9b-it", 9_241_705_984),
        ("google/gemma-3-1b-it", 999_885_952),
        ("google/gemma-3-4b-it", 4_300_079_472),
        ("google/gemma-3-12b-it", 12_187_325_040),
        ("google/gemma-3-27b-it", 27_432_406_640),
        ("microsoft/phi-4", 14_659_507_200),
        ("microsoft/phi-2", 2_779_683_840),
        ("THUDM/chatglm3-6b", 6_243_584_000),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656),
        ("Qwen/Qwen2.5-VL-3B-Instruct", 3_754_622_976),
        ("Qwen/Qwen2-VL-2B-Instruct", 2_208_985_600),
        ("Qwen/Qwen3-VL-8B-Instruct", 8_767_123_696),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 108_641_793_536),
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", 24_011_361_280),
        # The page counts 567,754,752 with the pooler, which no engine loads.
        ("BAAI/bge-m3", 567_754_752 - 1024 * 1025),
        ("openai-community/gpt2", 124_439_808),
    ],
)
def test_parameters(name: str, parameters: int) -> None:
    assert known.facts(name).parameters == parameters


# "Model loading took ... GiB" of vLLM 0.19.0 and others on one GPU (published start-up logs, llm-d-planner PR 205,
# vllm-project issues): the checkpoint and the tables of sines; allocators round some of the matrices up.
@pytest.mark.parametrize(
    ("name", "gib", "within"),
    [
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", 67.72, 0.001),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", 8.49, 0.001),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", 5.38, 0.01),
        ("RedHatAI/Qwen2.5-7B-Instruct-quantized.w8a8", 8.14, 0.005),
        ("Qwen/Qwen3-8B-FP8", 8.80, 0.001),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", 5.29, 0.02),
        ("unsloth/phi-4-bnb-4bit", 8.63, 0.02),
        ("google/gemma-3-4b-it", 8.58, 0.002),
        ("google/gemma-3-27b-it", 51.45, 0.002),
        ("google/gemma-4-26B-A4B", 48.5, 0.001),
        ("ibm-granite/granite-vision-3.3-2b", 5.54, 0.003),
        ("llava-hf/llava-v1.6-mistral-7b-hf", 14.08, 0.002),
        ("moonshotai/Kimi-VL-A3B-Instruct", 30.74, 0.006),
        ("codellama/CodeLlama-7b-hf", 12.56, 0.001),
    ],
)
def test_weights_are_what_an_engine_loaded(name: str, gib: float, within: float) -> None:
    model = known.facts(name)
    assert (model.weight_bytes + 2 * model.rotary_elements) / GIB == pytest.approx(gib, rel=within)


def test_a_checkpoint_of_mixed_formats_is_counted_layer_by_layer() -> None:
    # openai/gpt-oss-20b: 13,761,264,768 bytes in its safetensors headers; the experts alone have 4 bits.
    model = known.facts("openai/gpt-oss-20b")
    assert model.weight_bytes == pytest.approx(13_761_264_768, rel=1e-4)
    assert model.quantization is not None
    assert (model.quantization.method, model.quantization.weight_bits) == ("mxfp4", 4)
    kinds = {one.name: one.bytes / one.elements for one in model.components}
    assert kinds["experts"] == pytest.approx(0.53, abs=0.01)
    assert kinds["attention"] == kinds["embedding"] == 2


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("meta-llama/Meta-Llama-3-8B", 131_072),
        ("meta-llama/Llama-3.3-70B-Instruct", 327_680),
        ("meta-llama/Llama-3.1-405B", 516_096),
        ("meta-llama/Llama-2-7b-hf", 524_288),
        ("Qwen/Qwen2.5-7B-Instruct", 57_344),
        ("Qwen/Qwen2.5-14B-Instruct", 196_608),
        ("Qwen/Qwen2.5-72B-Instruct", 327_680),
        ("Qwen/Qwen3-8B", 147_456),
        ("Qwen/Qwen3-14B", 163_840),
        ("Qwen/Qwen3-30B-A3B", 98_304),
        ("Qwen/Qwen3-235B-A22B", 192_512),
        ("deepseek-ai/DeepSeek-R1", 70_272),
        ("moonshotai/Kimi-K2-Thinking", 70_272),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", 31_104),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 131_072),
        ("microsoft/phi-4", 204_800),
        ("openai/gpt-oss-20b", 49_152),
        ("openai/gpt-oss-120b", 73_728),
        ("THUDM/chatglm3-6b", 28_672),
        ("tiiuae/falcon-7b", 8_192),
        ("CohereForAI/c4ai-command-r-v01", 1_310_720),
        ("Qwen/Qwen3.5-27B", 65_536),
        ("BAAI/bge-reranker-v2-m3", 0),
    ],
)
def test_bytes_per_token(name: str, per_token: int) -> None:
    assert known.facts(name).kv_bytes_per_token() == per_token


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("google/gemma-3-27b-it", [("sliding", 52, 1024), ("full", 10, 0)]),
        ("google/gemma-3-4b-it", [("sliding", 29, 1024), ("full", 5, 0)]),
        ("google/gemma-2-2b-it", [("sliding", 13, 4096), ("full", 13, 0)]),
        ("openai/gpt-oss-120b", [("sliding", 18, 128), ("full", 18, 0)]),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", [("chunked", 36, 8192), ("full", 12, 0)]),
        ("XiaomiMiMo/MiMo-V2-Flash", [("full", 9, 0), ("sliding", 39, 128)]),
        ("LGAI-EXAONE/EXAONE-4.0-32B", [("sliding", 48, 4096), ("full", 16, 0)]),
        ("mistralai/Mistral-7B-Instruct-v0.1", [("full", 32, 0)]),
        ("Qwen/Qwen2.5-7B-Instruct", [("full", 28, 0)]),
        ("microsoft/Phi-3.5-mini-instruct", [("full", 32, 0)]),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", [("recurrent", 36, 0), ("full", 12, 0)]),
        ("google/gemma-4-E4B-it", [("sliding", 20, 512), ("full", 4, 0), ("none", 18, 0)]),
    ],
)
def test_groups_of_layers(name: str, groups: list[tuple[str, int, int]]) -> None:
    model = known.facts(name)
    assert [(one.kind, one.layers, one.window) for one in model.groups] == groups
    assert len(model.order) == model.layers == sum(layers for _, layers, _ in groups)
    assert [model.order.count(index) for index in range(len(groups))] == [layers for _, layers, _ in groups]


def test_recurrent_layers_keep_the_states_that_vllm_allocates() -> None:
    # vllm/model_executor/layers/mamba/mamba_utils.py: (2 x 16 x 128 + 48 x 128) x 3 and 48 x 128 x 128 in float32.
    (group,) = (one for one in known.facts("Qwen/Qwen3.5-27B").groups if one.kind == "recurrent")
    assert (group.conv_elements, group.state_elements, group.state_bytes_per_element) == (30_720, 786_432, 4)
    # Nemotron 3 Nano: (64 x 64 + 2 x 8 x 128) x 3 and 64 x 64 x 128.
    nano = known.facts("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    (group,) = (one for one in nano.groups if one.kind == "recurrent")
    assert (group.conv_elements, group.state_elements) == (18_432, 524_288)
    assert [(one.kind, one.layers) for one in nano.groups] == [("recurrent", 23), ("none", 23), ("full", 6)]


def test_a_sparse_indexer_keeps_its_keys_beside_the_latent_vector() -> None:
    (group,) = known.facts("deepseek-ai/DeepSeek-V3.2").groups
    assert (group.kind, group.latent, group.indexer) == ("latent", 576, 132)


def test_components_say_how_they_are_split() -> None:
    model = read_facts(LLAMA_8B)
    assert split(model, "embedding", "vocabulary") == split(model, "head", "vocabulary") == 128256 * 4096
    assert split(model, "kv", "kv_heads") == 32 * 2 * 1024 * 4096
    assert split(model, "attention", "tensor") == 32 * 2 * 4096 * 4096
    assert split(model, "mlp", "tensor") == 32 * 3 * 4096 * 14336
    assert split(model, "norms", "whole") == 65 * 4096
    latent = known.facts("deepseek-ai/DeepSeek-V3")
    assert split(latent, "experts", "experts") == 58 * 256 * 3 * 7168 * 2048
    assert split(latent, "attention", "whole") == 61 * 7168 * (512 + 64 + 1536)
    assert latent.experts is not None
    assert (latent.experts.count, latent.experts.active, latent.experts.layers) == (256, 8, 58)
    assert latent.draft_layers == 1
    assert sum(one.elements for one in latent.draft_components) == pytest.approx(11.6e9, rel=0.01)


def test_tensors_are_fused_as_engines_keep_them() -> None:
    sizes = {(one.bytes, one.kv_bytes): one.count for one in read_facts(LLAMA_8B).tensors}
    assert sizes[(4096 + 2 * 1024) * 4096 * 2, 2 * 1024 * 4096 * 2] == 32  # queries, keys and values in one
    assert sizes[2 * 14336 * 4096 * 2, 0] == 32  # gate and up


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "generate"),
        ("THUDM/chatglm3-6b", "generate"),
        ("google/gemma-3-4b-it", "generate"),
        ("BAAI/bge-m3", "embed"),
        ("BAAI/bge-reranker-v2-m3", "rerank"),
    ],
)
def test_task(name: str, task: str) -> None:
    assert known.facts(name).task == task


def test_a_classifier_has_a_head_of_its_classes() -> None:
    three = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}
    model = read_facts({**LLAMA_8B, **three})
    assert (model.task, split(model, "head", "whole")) == ("classify", 3 * 4096)


@pytest.mark.parametrize(
    ("change", "context"),
    [
        ({}, 131072),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "max_position_embeddings": 16384}, 65536),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
    ],
)
def test_context_as_vllm_derives_it(change: dict[str, object], context: int) -> None:
    assert read_facts({**LLAMA_8B, **change}).context_tokens == context


def test_what_a_nested_configuration_leaves_out_is_filled_in_and_said() -> None:
    part = {"model_type": "llama", "vocab_size": 32064}
    model = read_facts({"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": part})
    assert (model.layers, model.hidden, model.vocabulary) == (32, 4096, 32064)
    assert any("num_hidden_layers" in said and "class defaults" in said for said in model.assumptions)
    with pytest.raises(UnknownModel, match=r"config\.json has no max_position_embeddings"):
        read_facts(part)


def test_an_encoder_that_cannot_be_counted_is_said_and_is_the_rest_of_the_headers() -> None:
    config = {**LLAMA_8B, "model_type": "llava", "vision_config": {"model_type": "something_new"}}
    assert any("encoder" in said for said in read_facts(config).assumptions)
    model = read_facts(config, 8_030_261_248 * 2 + 1_000_000)
    assert {one.name: one.bytes for one in model.components}["vision"] == 1_000_000
    assert model.weight_bytes == 8_030_261_248 * 2 + 1_000_000


def test_a_total_of_headers_is_spread_over_the_components() -> None:
    model = read_facts(LLAMA_8B, 8_030_261_248)
    assert (model.weight_bytes, model.weights_from) == (8_030_261_248, "headers")
    computed = read_facts(LLAMA_8B)
    halves = zip(model.components, computed.components, strict=True)
    assert all(one.bytes == pytest.approx(other.bytes / 2, rel=1e-6) for one, other in halves)


# Names as the checkpoints have them, with the shapes of one layer.
LLAMA_TENSORS = {
    "model.embed_tokens.weight": (128256, 4096),
    "lm_head.weight": (128256, 4096),
    "model.norm.weight": (4096,),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(32)
        for name, shape in (
            ("self_attn.q_proj", (4096, 4096)),
            ("self_attn.k_proj", (1024, 4096)),
            ("self_attn.v_proj", (1024, 4096)),
            ("self_attn.o_proj", (4096, 4096)),
            ("mlp.gate_proj", (14336, 4096)),
            ("mlp.up_proj", (14336, 4096)),
            ("mlp.down_proj", (4096, 14336)),
            ("input_layernorm", (4096,)),
            ("post_attention_layernorm", (4096,)),
        )
    },
}


def entries(shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16", size: int = 2) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for name, shape in shapes.items():
        count = 1
        for one in shape:
            count *= one
        found[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [0, count * size]}
    return found


def test_headers_give_the_same_components_as_the_configuration() -> None:
    model = read_facts(LLAMA_8B, Headers.of(summary(entries(LLAMA_TENSORS), LLAMA_8B)))
    assert model.weights_from == "headers"
    parts = {(one.name, one.split, one.place): (one.elements, one.bytes) for one in model.components}
    computed = {(one.name, one.split, one.place): (one.elements, one.bytes) for one in read_facts(LLAMA_8B).components}
    last = computed.pop(("norms", "whole", "last"))
    norms = computed["norms", "whole", "layers"]
    computed["norms", "whole", "layers"] = (norms[0] + last[0], norms[1] + last[1])
    assert parts == computed


def test_headers_leave_out_what_engines_do_not_load() -> None:
    more = {
        "model.layers.32.eh_proj.weight": (4096, 8192),
        "mtp.fc.weight": (4096, 8192),
        "model.layers.0.self_attn.rotary_emb.inv_freq": (64,),
    }
    kinds = summary(entries({**LLAMA_TENSORS, **more}), LLAMA_8B)
    assert read_facts(LLAMA_8B, Headers.of(kinds)).parameters == 8_030_261_248
    tied = read_facts({**LLAMA_8B, "tie_word_embeddings": True}, Headers.of(kinds))
    assert tied.parameters == 8_030_261_248 - 128256 * 4096


def test_a_fused_projection_is_divided_by_its_heads() -> None:
    fused = {"transformer.h.0.attn.qkv.weight": (6144, 4096)}
    model = read_facts(LLAMA_8B, Headers.of(summary(entries(fused), LLAMA_8B)))
    assert split(model, "kv", "kv_heads") == 2048 * 4096
    assert split(model, "attention", "tensor") == 4096 * 4096


def test_packed_tensors_hold_several_weights_and_scales_none() -> None:
    quantized = {**LLAMA_8B, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    packed = entries({"model.layers.0.mlp.up_proj.qweight": (4096, 14336 // 8)}, "I32", 4)
    packed |= entries({"model.layers.0.mlp.up_proj.scales": (32, 14336)}, "F16", 2)
    model = read_facts(quantized, Headers.of(summary(packed, quantized)))
    (mlp,) = (one for one in model.components if one.name == "mlp")
    assert mlp.elements == 4096 * 14336
    assert mlp.bytes == 4096 * 14336 // 2 + 32 * 14336 * 2


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("model.layers.0.mlp.experts.7.down_proj.weight", "experts"),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", "shared_experts"),
        ("model.layers.0.mlp.shared_expert_gate.weight", "router"),
        ("model.layers.0.mlp.gate.e_score_correction_bias", "router"),
        ("model.layers.0.block_sparse_moe.gate.weight", "router"),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "attention"),
        ("model.layers.0.self_attn.q_norm.weight", "norms"),
        ("model.layers.0.linear_attn.in_proj_qkv.weight", "recurrent"),
        ("backbone.layers.0.mixer.conv1d.weight", "recurrent"),
        ("visual.blocks.3.attn.qkv.weight", "vision"),
        ("vision_tower.vision_model.encoder.layers.3.mlp.fc1.weight", "vision"),
        ("embeddings.word_embeddings.weight", "embedding"),
        ("encoder.layer.0.attention.output.LayerNorm.weight", "norms"),
        ("transformer.h.0.mlp.c_fc.weight", "mlp"),
        ("transformer.h.0.attn.c_proj.weight", "attention"),
    ],
)
def test_tensors_are_told_apart_by_their_names(name: str, component: str) -> None:
    model = read_facts(LLAMA_8B, Headers.of(summary(entries({name: (8, 8)}), LLAMA_8B)))
    assert [one.name for one in model.components] == [component]

"""How the models of each family are built, as far as their config.json leaves it unsaid.

Read in the model classes of vLLM (vllm/model_executor/models) and transformers (src/transformers/models), whose class
defaults hold wherever a config.json lacks the key.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpuready.planning.model.fields import UnknownModel, shown


@dataclass(frozen=True)
class Family:
    """What the layers of one model type are made of; the defaults are those of Llama."""

    qkv_bias: bool = False
    output_bias: bool | None = None
    """None: as `attention_bias` says, which is about queries, keys and values too."""
    mlp_bias: bool = False
    gated: bool = True
    """Feed-forward with a gate: three matrices, not two."""
    layer_norms: int = 2
    """Norms as wide as the model, per layer."""
    norm_bias: bool = False
    qk_norm: str = ""
    """Norms on queries and keys: `head` (one head wide), `full` (all heads wide)."""
    final_norm: bool = True
    embedding_norm: bool = False
    tied: bool = False
    """The head is the embedding, where config.json does not say."""
    head: str = "plain"
    """plain, bias, or none: a model that generates nothing."""
    extra_positions: int = -1
    """Rows of a learned position table beyond the context length; -1: there is none."""
    rotary: bool = True
    token_types: bool = False
    window: str = "none"
    """Which layers a `sliding_window` concerns without `layer_types`: all, upper (those from max_window_layers on, and
    only with use_sliding_window), others (all but every n-th, n from `pattern`), none."""
    pattern: int = 0
    attention: str = "grouped"
    """grouped (multi-head to multi-query), latent, or compressed (latent, several tokens in one)."""
    recurrent: str = ""
    """Layers that are not attention: mamba1, mamba2, delta, kimi_delta, convolution, lightning."""
    shared_gate: bool = False
    """A gate of one row decides how much the shared expert counts."""
    routing_bias: bool = False
    expert_bias: bool = False
    sinks: bool = False
    """One learned number per head in the softmax."""
    body: str = "model.layers"
    mixer: str = "self_attn"
    feed: str = "mlp"
    shared: str = "shared_experts"
    """How the checkpoint names the layers and the parts of one."""
    keeps_nothing: bool = False
    """Looks at all tokens at once and keeps none of them: no KV cache."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What holds where config.json lacks it."""
    nested: Mapping[str, Any] = field(default_factory=dict)
    """What holds beside that where the model is a part of another, whose config.json says only what differs from it."""


_LLAMA = Family(
    nested={
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    }
)
_MISTRAL = {**_LLAMA.nested, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN3 = Family(qk_norm="head", window="upper", defaults={"head_dim": 128})
_MLA = Family(attention="latent", routing_bias=True, defaults={"kv_lora_rank": 512, "qk_rope_head_dim": 64})
_DELTA = Family(
    qk_norm="head",
    recurrent="delta",
    shared_gate=True,
    shared="shared_expert",
    defaults={"attn_output_gate": True, "head_dim": 256},
)
_GEMMA = {"head_dim": 256}
_GEMMA3 = Family(
    tied=True,
    layer_norms=4,
    qk_norm="head",
    window="others",
    pattern=6,
    defaults={"head_dim": 256, "sliding_window": 4096, "max_position_embeddings": 131072, "vocab_size": 262208},
    nested={
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
)
_OLD = Family(qkv_bias=True, output_bias=True, mlp_bias=True, gated=False, norm_bias=True, rotary=False)
_ENCODER = Family(
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    gated=False,
    norm_bias=True,
    rotary=False,
    final_norm=False,
    embedding_norm=True,
    head="none",
    extra_positions=0,
    token_types=True,
    keeps_nothing=True,
)

FAMILIES: Mapping[str, Family] = {
    # Llama and what is built like it.
    "llama": _LLAMA,
    "mistral": Family(window="all", nested=_MISTRAL),
    "ministral": Family(window="all"),
    "ministral3": _LLAMA,
    "yi": _LLAMA,
    "aquila": _LLAMA,
    "xverse": _LLAMA,
    "solar": _LLAMA,
    "internlm": Family(),
    "internlm2": _LLAMA,
    "internlm3": _LLAMA,
    "baichuan": Family(defaults={"vocab_size": 64000}),
    "deepseek": _LLAMA,
    "granite": _LLAMA,
    "granitemoe": _LLAMA,
    "granitemoeshared": _LLAMA,
    "smollm3": Family(tied=True),
    "seed_oss": Family(qkv_bias=True, output_bias=False),
    "mimo": Family(qkv_bias=True, output_bias=False, window="upper"),
    "telechat2": Family(output_bias=True, mlp_bias=False),
    "exaone": Family(),
    "exaone4": Family(qk_norm="head", window="others", pattern=4),
    "minicpm": Family(tied=True),
    "orion": Family(norm_bias=True),
    "ernie4_5": Family(tied=True),
    "ernie4_5_moe": Family(tied=True, routing_bias=True),
    "arcee": Family(gated=False),
    "apertus": Family(gated=False, qk_norm="head"),
    "nemotron": Family(gated=False, norm_bias=True),
    "nemotron-nas": _LLAMA,
    "hunyuan_v1_dense": Family(qk_norm="head", tied=True),
    "hunyuan_v1_moe": Family(qk_norm="head", tied=True),
    # Phi.
    "phi": Family(
        qkv_bias=True, output_bias=True, mlp_bias=True, gated=False, norm_bias=True, layer_norms=1, head="bias"
    ),
    "phi3": Family(window="all"),
    "phi3small": Family(qkv_bias=True, output_bias=True, mlp_bias=True, norm_bias=True, tied=True),
    "phi4mm": Family(window="all", tied=True),
    "phimoe": Family(norm_bias=True, window="all", head="bias", qkv_bias=True, output_bias=True),
    # Qwen.
    "qwen": Family(qkv_bias=True, output_bias=False),
    "qwen2": Family(qkv_bias=True, output_bias=False, window="upper"),
    "qwen2_moe": Family(qkv_bias=True, output_bias=False, window="upper", shared_gate=True, shared="shared_expert"),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_next": _DELTA,
    "qwen3_5": _DELTA,
    "qwen3_5_moe": _DELTA,
    # Gemma.
    "gemma": Family(tied=True, defaults=_GEMMA),
    "gemma2": Family(tied=True, layer_norms=4, window="others", pattern=2, defaults={**_GEMMA, "sliding_window": 4096}),
    "gemma3": _GEMMA3,
    "gemma4": Family(tied=True, layer_norms=4, qk_norm="head", window="others", pattern=6, defaults=_GEMMA),
    # Latent attention.
    "deepseek_v2": Family(attention="latent", defaults=_MLA.defaults),
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA,
    "kimi_k2": _MLA,
    "glm_moe_dsa": _MLA,
    "glm4_moe_lite": _MLA,
    "deepseek_v4": Family(attention="compressed", routing_bias=True),
    "kimi_linear": Family(
        attention="latent", recurrent="kimi_delta", routing_bias=True, defaults={"qk_rope_head_dim": 64}
    ),
    # Mixtures of experts.
    "mixtral": Family(window="all", feed="block_sparse_moe"),
    "dbrx": Family(tied=False),
    "olmoe": Family(qk_norm="full"),
    "llama4": Family(feed="feed_forward", shared="shared_expert"),
    "gpt_oss": Family(
        qkv_bias=True,
        output_bias=True,
        window="others",
        pattern=2,
        sinks=True,
        expert_bias=True,
        defaults={"head_dim": 64, "sliding_window": 128},
    ),
    "glm4_moe": Family(qk_norm="", output_bias=False, routing_bias=True, defaults={"head_dim": 128}),
    "minimax_m2": Family(qk_norm="full", routing_bias=True),
    "mimo_v2_flash": Family(output_bias=False, routing_bias=True),
    "dots1": Family(qk_norm="head", routing_bias=True),
    "bailing_moe": Family(),
    # GLM.
    "chatglm": Family(qkv_bias=True, output_bias=False),
    "glm": Family(qkv_bias=True, output_bias=False),
    "glm4": Family(qkv_bias=True, output_bias=False, layer_norms=4),
    # Cohere, OLMo, StarCoder, StableLM.
    "cohere": Family(layer_norms=1, tied=True),
    "cohere2": Family(layer_norms=1, tied=True, window="others", pattern=4),
    "olmo": Family(layer_norms=0, final_norm=False),
    "olmo2": Family(qk_norm="full"),
    "olmo3": Family(qk_norm="full", window="others", pattern=4),
    "starcoder2": Family(
        qkv_bias=True, output_bias=True, mlp_bias=True, gated=False, norm_bias=True, tied=True, window="all"
    ),
    "stablelm": Family(norm_bias=True),
    # The first generation.
    "gpt2": replace(_OLD, tied=True, extra_positions=0),
    "gpt_bigcode": replace(_OLD, tied=True, extra_positions=0),
    "gptj": Family(output_bias=False, mlp_bias=True, gated=False, norm_bias=True, layer_norms=1, head="bias"),
    "gpt_neox": Family(qkv_bias=True, output_bias=True, mlp_bias=True, gated=False, norm_bias=True),
    "bloom": replace(_OLD, tied=True, embedding_norm=True),
    "mpt": Family(gated=False, tied=True, rotary=False),
    "opt": replace(_OLD, tied=True, extra_positions=2),
    "falcon": Family(gated=False, norm_bias=True, tied=True),
    # State-space and hybrid models.
    "mamba": Family(recurrent="mamba1", tied=True, layer_norms=1, rotary=False),
    "falcon_mamba": Family(recurrent="mamba1", layer_norms=1, rotary=False),
    "mamba2": Family(recurrent="mamba2", tied=True, layer_norms=1, rotary=False),
    "jamba": Family(recurrent="mamba1", rotary=False),
    "bamba": Family(recurrent="mamba2"),
    "granitemoehybrid": Family(recurrent="mamba2", tied=True),
    "nemotron_h": Family(
        recurrent="mamba2",
        layer_norms=1,
        gated=False,
        rotary=False,
        routing_bias=True,
        body="backbone.layers",
        mixer="mixer",
        feed="mixer",
    ),
    "falcon_h1": Family(recurrent="mamba2"),
    "lfm2": Family(recurrent="convolution", qk_norm="head", tied=True),
    "lfm2_moe": Family(recurrent="convolution", qk_norm="head", tied=True, routing_bias=True),
    "minimax": Family(recurrent="lightning"),
    # Encoders.
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "xlm-roberta": _ENCODER,
    "distilbert": replace(_ENCODER, token_types=False),
    "nomic_bert": Family(
        norm_bias=True, final_norm=False, embedding_norm=True, head="none", token_types=True, keeps_nothing=True
    ),
    "new": Family(
        qkv_bias=True,
        output_bias=True,
        norm_bias=True,
        final_norm=False,
        embedding_norm=True,
        head="none",
        keeps_nothing=True,
    ),
    "modernbert": Family(
        embedding_norm=True, head="none", keeps_nothing=True, defaults={"max_position_embeddings": 8192}
    ),
}
"""By `model_type`, without the ending `_text` of a composite model's language part."""

SAME: Mapping[str, str] = {
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
    "gemma3n": "gemma4",
    "glm4v": "glm4",
    "glm4v_moe": "glm4_moe",
    "kimi_k25": "kimi_k2",
    "internlm": "llama",
    "llava_llama": "llama",
    "llava": "llama",
    "llava_next": "llama",
    "idefics3": "llama",
    "smolvlm": "llama",
    "mistral3": "mistral",
    "pixtral": "mistral",
    "phi3_v": "phi3",
    "paligemma": "gemma",
    "minimax_text_01": "minimax",
    "minimax_m1": "minimax",
    "mimo_v2": "mimo_v2_flash",
    "phi-msft": "phi",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_omni": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_omni_moe": "qwen3_moe",
    "bailing_moe_v2": "bailing_moe",
    "ernie4_5_moe_vl": "ernie4_5_moe",
    "camembert": "xlm-roberta",
    "xlm-roberta-flash": "xlm-roberta",
    "codegen": "gptj",
    "deepseek_ref": "deepseek_v4",
}
"""Other model types that are built as a family above."""

BY_ARCHITECTURE: Mapping[str, str] = {
    "Llama": "llama",
    "Mistral": "mistral",
    "Mistral3": "mistral",
    "Mixtral": "mixtral",
    "Qwen2": "qwen2",
    "Qwen2Moe": "qwen2_moe",
    "Qwen2VL": "qwen2",
    "Qwen2_5_VL": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3Moe": "qwen3_moe",
    "Qwen3VL": "qwen3",
    "Qwen3VLMoe": "qwen3_moe",
    "Qwen3Next": "qwen3_next",
    "Qwen3_5": "qwen3_5",
    "Qwen3_5Moe": "qwen3_5_moe",
    "QWenLMHead": "qwen",
    "Gemma": "gemma",
    "Gemma2": "gemma2",
    "Gemma3": "gemma3",
    "Gemma4": "gemma4",
    "DeepseekV2": "deepseek_v2",
    "DeepseekV3": "deepseek_v3",
    "DeepseekV32": "deepseek_v32",
    "DeepseekV4": "deepseek_v4",
    "GlmMoeDsa": "glm_moe_dsa",
    "Glm4Moe": "glm4_moe",
    "ChatGLM": "chatglm",
    "Glm": "glm",
    "Glm4": "glm4",
    "GptOss": "gpt_oss",
    "Phi": "phi",
    "Phi3": "phi3",
    "Cohere": "cohere",
    "Cohere2": "cohere2",
    "Falcon": "falcon",
    "RW": "falcon",
    "InternLM2": "internlm2",
    "MiniMaxM2": "minimax_m2",
    "NemotronH": "nemotron_h",
    "MiMoV2Flash": "mimo_v2_flash",
    "Llama4": "llama4",
    "GPT2LMHead": "gpt2",
    "GPTBigCode": "gpt_bigcode",
    "GPTJ": "gptj",
    "GPTNeoX": "gpt_neox",
    "Bloom": "bloom",
    "MPT": "mpt",
    "Mpt": "mpt",
    "OPT": "opt",
    "Baichuan": "baichuan",
    "BaiChuan": "baichuan",
    "Granite": "granite",
    "Starcoder2": "starcoder2",
    "StableLm": "stablelm",
    "Olmo": "olmo",
    "Olmo2": "olmo2",
    "Bert": "bert",
    "Roberta": "roberta",
    "XLMRoberta": "xlm-roberta",
    "ModernBert": "modernbert",
}
"""For a config.json without a known `model_type`: by the first part of the architecture's name."""

_ENDINGS = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMaskedLM",
    "ForRewardModel",
    "Model",
)


def family_of(model_type: str, architecture: str) -> tuple[str, Family]:
    """Return how a model is built, and under which name that stands here.

    Raises:
        UnknownModel: when neither name is known; it says the nearest one.
    """
    plain = model_type.removesuffix("_text")
    stem = next((architecture.removesuffix(end) for end in _ENDINGS if architecture.endswith(end)), architecture)
    for name in (plain, SAME.get(plain, ""), BY_ARCHITECTURE.get(stem, "")):
        if name in FAMILIES:
            return name, FAMILIES[name]
    if not model_type and not architecture:
        return "llama", FAMILIES["llama"]
    return _unknown(model_type, architecture)


def _unknown(model_type: str, architecture: str) -> tuple[str, Family]:
    key, value = ("model_type", model_type) if model_type else ("architectures", architecture)
    wanted, known = value.removesuffix("_text").lower(), sorted({*FAMILIES, *SAME})
    near = ", ".join(difflib.get_close_matches(wanted[:64], known, 3, 0.0))
    what = f"config.json has {key} = {shown(value)}, which is none of the {len(known)} that can be sized"
    raise UnknownModel(f"{what}; the nearest are {near}")

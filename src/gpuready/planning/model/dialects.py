"""Model types whose config.json says usual things in words of its own: told here in the usual ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gpuready.planning.model.families import Family
from gpuready.planning.model.fields import Fields

_Said = tuple[Mapping[str, Any], Family]


def _chatglm(fields: Fields, family: Family) -> _Said:
    """ChatGLM2/3 and GLM-4: transformers' THUDM/chatglm3-6b, configuration_chatglm.py."""
    heads = fields.number("num_attention_heads")
    grouped = fields.flag("multi_query_attention")
    said: dict[str, Any] = {"num_key_value_heads": fields.optional("multi_query_group_num") if grouped else heads}
    if "num_key_value_heads" in fields and "multi_query_attention" not in fields:
        said = {}
    if "padded_vocab_size" in fields:
        said["vocab_size"] = fields.number("padded_vocab_size")
    biased = fields.flag("add_bias_linear")
    qkv = biased or fields.flag("add_qkv_bias", default=family.qkv_bias)
    return said, replace(family, qkv_bias=qkv, output_bias=biased, mlp_bias=biased)


def _falcon(fields: Fields, family: Family) -> _Said:
    """Falcon: the old decoder has one KV head or all, the new one groups (transformers, FalconConfig)."""
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    new = fields.flag("new_decoder_architecture")
    if new:
        kv_heads = fields.optional("num_key_value_heads") or heads
    elif "multi_query" in fields or "num_key_value_heads" not in fields:
        kv_heads = 1 if fields.flag("multi_query", default=True) else heads
    else:
        kv_heads = fields.number("num_key_value_heads")
    norms = fields.optional("num_ln_in_parallel_attn") or (2 if new else 1)
    if not fields.flag("parallel_attn", default=True):
        norms = 2
    biased, alibi = fields.flag("bias"), fields.flag("alibi")
    said = {
        "num_key_value_heads": kv_heads,
        "intermediate_size": fields.optional("intermediate_size") or 4 * hidden,
        "max_position_embeddings": fields.optional("max_position_embeddings") or 2048,
    }
    kind = replace(family, qkv_bias=biased, output_bias=biased, mlp_bias=biased, layer_norms=norms, rotary=not alibi)
    return said, kind


def _wide(fields: Fields, family: Family) -> _Said:
    """Read the first generation: feed-forward four times as wide as the model, unless it says otherwise."""
    said: dict[str, Any] = {
        "intermediate_size": fields.optional("intermediate_size") or 4 * fields.number("hidden_size")
    }
    if fields.flag("multi_query"):
        said["num_key_value_heads"] = 1
    if "max_position_embeddings" not in fields:
        said["max_position_embeddings"] = 2048
        fields.assume("config.json says no context length, taken as 2048 tokens")
    return said, family


def _nested(fields: Fields, family: Family) -> _Said:
    """MPT and DBRX: sizes of attention and feed-forward in objects of their own."""
    said: dict[str, Any] = {}
    attention, feed = fields.below("attn_config"), fields.below("ffn_config")
    if attention is not None:
        kv_heads = attention.optional("kv_n_heads")
        if kv_heads is None and attention.text("attn_type") == "multiquery_attention":
            kv_heads = 1
        if kv_heads is not None:
            said["num_key_value_heads"] = kv_heads
    if feed is not None and "moe_num_experts" in feed:
        said["num_experts"] = feed.number("moe_num_experts")
        said["num_experts_per_tok"] = feed.number("moe_top_k")
        said["intermediate_size"] = feed.number("ffn_hidden_size")
    elif "intermediate_size" not in fields:
        said["intermediate_size"] = (fields.optional("expansion_ratio") or 4) * fields.number("hidden_size")
    return said, family


def _opt(fields: Fields, family: Family) -> _Said:
    biased = fields.flag("enable_bias", default=True)
    after = not fields.flag("do_layer_norm_before", default=True)
    return {}, replace(family, qkv_bias=biased, output_bias=biased, mlp_bias=biased, final_norm=not after)


def _qwen1(fields: Fields, family: Family) -> _Said:
    """Read the first Qwen, which counts both halves of the gated part in `intermediate_size`."""
    return {"intermediate_size": max(1, fields.number("intermediate_size") // 2)}, family


def _biased(fields: Fields, family: Family) -> _Said:
    """Families with one switch for the biases of all linear layers."""
    if not fields.flag("bias", "use_bias", default=True):
        return {}, replace(family, qkv_bias=False, output_bias=False, mlp_bias=False)
    if fields.flag("bias", "use_bias"):
        return {}, replace(family, qkv_bias=True, output_bias=True, mlp_bias=family.mlp_bias or "use_bias" in fields)
    return {}, family


def _stablelm(fields: Fields, family: Family) -> _Said:
    norms = 1 if fields.flag("use_parallel_residual") else 2
    biased = fields.flag("use_qkv_bias")
    norm = "full" if fields.flag("qk_layernorm") else ""
    return {}, replace(family, qkv_bias=biased, output_bias=False, layer_norms=norms, qk_norm=norm)


def _query_norm(kind: str) -> Callable[[Fields, Family], _Said]:
    """Families that say by `use_qk_norm` whether queries and keys have norms of this kind."""

    def told(fields: Fields, family: Family) -> _Said:
        chosen = kind if fields.flag("use_qk_norm", default=bool(family.qk_norm)) else ""
        return {}, replace(family, qk_norm=chosen)

    return told


def _nomic(fields: Fields, family: Family) -> _Said:
    """Nomic's BERT: gated only with a GLU activation, biases and token types by their own keys."""
    gated = fields.text("activation_function") in ("swiglu", "geglu", "glu")
    biased = fields.flag("qkv_proj_bias")
    feed = fields.flag("mlp_fc1_bias")
    types = bool(fields.optional("type_vocab_size", least=0))
    return {}, replace(family, gated=gated, qkv_bias=biased, output_bias=biased, mlp_bias=feed, token_types=types)


def _distilbert(fields: Fields, family: Family) -> _Said:
    return {"intermediate_size": fields.optional("hidden_dim") or 4 * fields.number("hidden_size")}, family


_DIALECTS: Mapping[str, Callable[[Fields, Family], _Said]] = {
    "chatglm": _chatglm,
    "falcon": _falcon,
    "gpt2": _wide,
    "gpt_bigcode": _wide,
    "gptj": _wide,
    "bloom": _wide,
    "mpt": _nested,
    "dbrx": _nested,
    "opt": _opt,
    "qwen": _qwen1,
    "starcoder2": _biased,
    "ernie4_5": _biased,
    "ernie4_5_moe": _biased,
    "internlm2": _biased,
    "llama": _biased,
    "stablelm": _stablelm,
    "cohere": _query_norm("full"),
    "glm4_moe": _query_norm("head"),
    "minimax_m2": _query_norm("full"),
    "hunyuan_v1_moe": _query_norm("head"),
    "hunyuan_v1_dense": _query_norm("head"),
    "bailing_moe": _query_norm("head"),
    "nomic_bert": _nomic,
    "distilbert": _distilbert,
}


def usual(fields: Fields, name: str, family: Family) -> tuple[Fields, Family]:
    """Return the same model in the usual words: keys under their usual names, switches as the family's traits."""
    nested = family.nested if fields.raw("nested") is True else {}
    missing = {key: value for key, value in {**nested, **family.defaults}.items() if key not in fields}
    if missing:
        fields = fields.under(missing)
    filled = ", ".join(key for key in nested if key in missing)
    if filled:
        fields.assume(f"{filled} filled in from the class defaults of {name}, which its config.json leaves out")
    told = _DIALECTS.get(name)
    if told is None:
        return fields, family
    said, kind = told(fields, family)
    return fields.under(said), kind

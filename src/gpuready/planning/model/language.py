"""The weights of a language model, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuready.planning.model import recurrent
from gpuready.planning.model.families import Family
from gpuready.planning.model.fields import Fields
from gpuready.planning.model.layers import Layer
from gpuready.planning.model.modules import Module, linear, vector


def modules(
    fields: Fields, name: str, family: Family, layers: Sequence[Layer], context: int, tied: bool
) -> list[Module]:
    """Return all modules: embeddings, layers and head."""
    found = _embeddings(fields, family, context)
    for index, layer in enumerate(layers):
        prefix = f"{family.body}.{index}"
        found += _mixer(fields, family, layer, f"{prefix}")
        found += _feed(fields, name, family, layer, prefix)
        found += _norms(fields, name, family, layer, prefix)
    return found + _ends(fields, family, tied)


def _norm(family: Family, name: str, width: int) -> Module:
    return vector(name, width * (2 if family.norm_bias else 1))


def _embeddings(fields: Fields, family: Family, context: int) -> list[Module]:
    hidden, vocabulary = fields.number("hidden_size"), fields.number("vocab_size")
    wide = fields.optional("word_embed_proj_dim", "embedding_size") or hidden
    found = [
        Module("model.embed_tokens", "embedding", vocabulary, wide, split="vocabulary", place="first", linear=False)
    ]
    if wide != hidden:
        found.append(replace(linear("model.project_in", "other", wide, hidden, split="whole"), place="first"))
        found.append(replace(linear("model.project_out", "other", hidden, wide, split="whole"), place="last"))
    if family.extra_positions >= 0:
        rows = context + family.extra_positions
        found.append(Module("model.positions", "embedding", rows, hidden, split="whole", place="first", linear=False))
    types = (fields.optional("type_vocab_size", least=0) or 0) if family.token_types else 0
    if types:
        found.append(Module("model.types", "embedding", types, hidden, split="whole", place="first", linear=False))
    if family.embedding_norm:
        found.append(replace(_norm(family, "model.embeddings_norm", hidden), place="first"))
    deep = fields.optional("hidden_size_per_layer_input", least=0) or 0
    if deep:
        layers, rows = fields.number("num_hidden_layers"), fields.optional("vocab_size_per_layer_input") or vocabulary
        table = Module(
            "model.embed_tokens_per_layer",
            "embedding",
            rows,
            layers * deep,
            split="vocabulary",
            place="first",
            linear=False,
        )
        found += [
            table,
            replace(linear("model.per_layer_model_projection", "other", hidden, layers * deep), place="first"),
        ]
        found.append(replace(vector("model.per_layer_projection_norm", deep), place="first"))
    return found


def _ends(fields: Fields, family: Family, tied: bool) -> list[Module]:
    """Return what follows the layers: the last norm and the head."""
    hidden, vocabulary = fields.number("hidden_size"), fields.number("vocab_size")
    found = [replace(_norm(family, "model.norm", hidden), place="last")] if family.final_norm else []
    if family.head == "none":
        return found
    labels = _labels(fields)
    if labels:
        score = Module("score", "head", labels, hidden, split="whole", place="last", linear=False)
        return [*found, score]
    if not tied:
        bias = vocabulary if family.head == "bias" else 0
        found.append(
            Module("lm_head", "head", vocabulary, hidden, bias, split="vocabulary", place="last", linear=False)
        )
    return found


def _labels(fields: Fields) -> int:
    """Return how many classes a classifier tells apart, 0 for a model that generates."""
    architecture = (fields.texts("architectures") or ("",))[0]
    if not architecture.endswith(("ForSequenceClassification", "ForTokenClassification", "ForRewardModel")):
        return 0
    names = fields.raw("id2label")
    return fields.optional("num_labels") or (len(names) if isinstance(names, dict) and names else 2)


def _mixer(fields: Fields, family: Family, layer: Layer, prefix: str) -> list[Module]:
    """Return what mixes the tokens of one layer."""
    if layer.mixer == "none":
        return []
    if layer.mixer == "recurrent":
        part = {"delta": "linear_attn", "kimi_delta": "self_attn", "convolution": "conv"}.get(family.recurrent, "mamba")
        part = family.mixer if family.mixer == "mixer" else part
        return recurrent.modules(fields, family.recurrent, f"{prefix}.{part}")
    if layer.mixer == "latent":
        return _latent(fields, f"{prefix}.{family.mixer}")
    if layer.mixer == "compressed":
        return _compressed(fields, layer, f"{prefix}.{family.mixer}")
    return _grouped(fields, family, layer, f"{prefix}.{family.mixer}")


def _grouped(fields: Fields, family: Family, layer: Layer, prefix: str) -> list[Module]:
    hidden, keeps = fields.number("hidden_size"), layer.keeps
    head_dim, v_dim, kv_heads = keeps.head_dim, keeps.v_head_dim, keeps.kv_heads
    said = fields.flag("attention_bias", "qkv_bias", default=family.qkv_bias)
    biased = family.qkv_bias or said
    out_biased = said if family.output_bias is None else family.output_bias and (family.qkv_bias or said)
    queries = layer.query_heads * head_dim
    gate = 2 if fields.flag("attn_output_gate") else 1
    found = [linear(f"{prefix}.q_proj", "attention", hidden, gate * queries, biased)]
    if not layer.shares:
        found.append(linear(f"{prefix}.k_proj", "kv", hidden, kv_heads * head_dim, biased, split="kv_heads"))
        found.append(linear(f"{prefix}.v_proj", "kv", hidden, kv_heads * v_dim, biased, split="kv_heads"))
    found.append(linear(f"{prefix}.o_proj", "attention", layer.query_heads * v_dim, hidden, out_biased))
    if family.qk_norm:
        wide = {"head": (head_dim, head_dim), "full": (queries, kv_heads * head_dim)}[family.qk_norm]
        found.append(vector(f"{prefix}.q_norm", wide[0]))
        if not layer.shares:
            found.append(vector(f"{prefix}.k_norm", wide[1]))
    if family.sinks or (keeps.kind == "sliding" and fields.flag("add_swa_attention_sink_bias")):
        found.append(vector(f"{prefix}.sinks", layer.query_heads, "other", "tensor"))
    return found


def _latent(fields: Fields, prefix: str) -> list[Module]:
    """Multi-head latent attention: vllm/model_executor/models/deepseek_v2.py, DeepseekV2MLAAttention."""
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    rank, rope = fields.number("kv_lora_rank"), fields.number("qk_rope_head_dim", least=0)
    nope, v_dim = fields.number("qk_nope_head_dim"), fields.number("v_head_dim")
    q_rank = fields.optional("q_lora_rank", least=0)
    found = [
        linear(f"{prefix}.kv_a_proj_with_mqa", "attention", hidden, rank + rope, split="whole"),
        vector(f"{prefix}.kv_a_layernorm", rank),
        linear(f"{prefix}.kv_b_proj", "attention", rank, heads * (nope + v_dim)),
        linear(f"{prefix}.o_proj", "attention", heads * v_dim, hidden),
    ]
    if q_rank:
        found += [
            linear(f"{prefix}.q_a_proj", "attention", hidden, q_rank, split="whole"),
            vector(f"{prefix}.q_a_layernorm", q_rank),
            linear(f"{prefix}.q_b_proj", "attention", q_rank, heads * (nope + rope)),
        ]
    else:
        found.append(linear(f"{prefix}.q_proj", "attention", hidden, heads * (nope + rope)))
    dim, index_heads = fields.optional("index_head_dim"), fields.optional("index_n_heads")
    if dim and index_heads and q_rank:
        # Every GPU holds the whole indexer.
        found += [
            linear(f"{prefix}.indexer.wq_b", "attention", q_rank, index_heads * dim, split="whole"),
            linear(f"{prefix}.indexer.wk", "attention", hidden, dim, split="whole"),
            Module(f"{prefix}.indexer.weights_proj", "attention", index_heads, hidden, split="whole", linear=False),
            vector(f"{prefix}.indexer.k_norm", 2 * dim),
        ]
    return found


def _compressed(fields: Fields, layer: Layer, prefix: str) -> list[Module]:
    """Return the attention of DeepSeek-V4: vllm/models/deepseek_v4/attention.py and compressor.py."""
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    dim, q_rank = fields.number("head_dim"), fields.number("q_lora_rank")
    groups, o_rank = fields.number("o_groups"), fields.number("o_lora_rank")
    found = [
        linear(f"{prefix}.wq_a", "attention", hidden, q_rank, split="whole"),
        linear(f"{prefix}.wkv", "attention", hidden, dim, split="whole"),
        linear(f"{prefix}.wq_b", "attention", q_rank, heads * dim),
        linear(f"{prefix}.wo_a", "attention", heads * dim // groups, groups * o_rank),
        linear(f"{prefix}.wo_b", "attention", groups * o_rank, hidden),
        vector(f"{prefix}.norms", q_rank + dim),
        vector(f"{prefix}.attn_sink", heads, "other", "tensor"),
    ]
    ratio = layer.keeps.compression
    if ratio > 1:
        found += _compressor(f"{prefix}.compressor", hidden, dim, ratio)
    if ratio == 4:
        index_heads, index_dim = fields.number("index_n_heads"), fields.number("index_head_dim")
        found.append(linear(f"{prefix}.indexer.wq_b", "attention", q_rank, index_heads * index_dim, split="whole"))
        found.append(
            Module(f"{prefix}.indexer.weights_proj", "attention", index_heads, hidden, split="whole", linear=False)
        )
        found += _compressor(f"{prefix}.indexer.compressor", hidden, index_dim, ratio)
    return found


def _compressor(prefix: str, hidden: int, dim: int, ratio: int) -> list[Module]:
    wide = dim * (2 if ratio == 4 else 1)
    return [
        Module(f"{prefix}.wkv_wgate", "attention", 2 * wide, hidden, split="whole", linear=False),
        vector(f"{prefix}.ape", ratio * wide + dim),
    ]


def _feed(fields: Fields, name: str, family: Family, layer: Layer, prefix: str) -> list[Module]:
    """Return the feed-forward part of one layer."""
    found = []
    if layer.feed in ("dense", "both"):
        found += _dense(fields, name, family, layer, prefix)
    if layer.feed in ("experts", "both"):
        found += _experts(fields, name, family, prefix)
    return found


def _matrices(
    prefix: str,
    component: str,
    hidden: int,
    inter: int,
    gated: bool,
    bias: bool,
    copies: int = 1,
    split: str = "tensor",
) -> list[Module]:
    """Return the two or three matrices of a feed-forward part."""
    names = ("gate_proj", "up_proj") if gated else ("up_proj",)
    found = [linear(f"{prefix}.{one}", component, hidden, inter, bias, copies, split) for one in names]
    return [*found, linear(f"{prefix}.down_proj", component, inter, hidden, bias, copies, split)]


def dense_width(fields: Fields, name: str) -> int:
    """Return the width of a dense feed-forward part."""
    if name == "llama4":
        return fields.optional("intermediate_size_mlp") or fields.number("intermediate_size")
    if name == "granitemoehybrid":
        return fields.number("shared_intermediate_size", "intermediate_size")
    return fields.number("dense_intermediate_size", "intermediate_size")


def _dense(fields: Fields, name: str, family: Family, layer: Layer, prefix: str) -> list[Module]:
    hidden = fields.number("hidden_size")
    inter = dense_width(fields, name) * (2 if layer.double_feed else 1)
    biased = family.mlp_bias or fields.flag("mlp_bias")
    return _matrices(f"{prefix}.{family.feed}", "mlp", hidden, inter, family.gated, biased)


def expert_width(fields: Fields) -> int:
    """Return the width of one expert."""
    return fields.number("moe_intermediate_size", "intermediate_size")


def shared_width(fields: Fields, name: str) -> int:
    """Return the width of all shared experts of a layer together; 0 where there is none."""
    own = fields.optional(
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size", least=0
    )
    count = fields.optional(
        "n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts", least=0
    )
    if own is not None:
        return own * (count if count and name == "nemotron_h" else 1)
    if name == "llama4":
        return fields.number("intermediate_size")
    return (count or 0) * expert_width(fields)


def _experts(fields: Fields, name: str, family: Family, prefix: str) -> list[Module]:
    hidden, count = fields.number("hidden_size"), fields.number("num_experts")
    latent = fields.optional("moe_latent_size") or hidden
    body = prefix if name == "gemma4" else f"{prefix}.{family.feed}"
    found = _matrices(
        f"{body}.experts.0", "experts", latent, expert_width(fields), family.gated, family.expert_bias, count, "experts"
    )
    router = count if family.routing_bias or family.expert_bias else 0
    found.append(Module(f"{body}.gate", "router", count, hidden, router, split="whole", linear=False))
    if latent != hidden:
        found.append(linear(f"{body}.fc1_latent_proj", "other", hidden, latent, split="whole"))
        found.append(linear(f"{body}.fc2_latent_proj", "other", latent, hidden, split="whole"))
    shared = shared_width(fields, name)
    if shared:
        found += _matrices(f"{body}.{family.shared}", "shared_experts", hidden, shared, family.gated, False)
        if family.shared_gate:
            found.append(Module(f"{body}.shared_expert_gate", "router", 1, hidden, split="whole", linear=False))
    return found


def _norms(fields: Fields, name: str, family: Family, layer: Layer, prefix: str) -> list[Module]:
    hidden = fields.number("hidden_size")
    found = []
    if family.layer_norms:
        found.append(_norm(family, f"{prefix}.norms", family.layer_norms * hidden))
    if name == "deepseek_v4":
        # Hyper-connections, in 32 bits.
        streams = fields.optional("hc_mult", most=64) or 1
        found.append(vector(f"{prefix}.hc", 4 * streams * (2 + streams) * streams * hidden))
    if name == "gemma4":
        if layer.feed == "both":
            found.append(vector(f"{prefix}.expert_norms", 4 * hidden + fields.number("num_experts")))
        found.append(vector(f"{prefix}.layer_scalar", 1))
        deep = fields.optional("hidden_size_per_layer_input", least=0) or 0
        if deep:
            found.append(linear(f"{prefix}.per_layer_input_gate", "other", hidden, deep, split="whole"))
            found.append(linear(f"{prefix}.per_layer_projection", "other", deep, hidden, split="whole"))
            found.append(vector(f"{prefix}.post_per_layer_input_norm", hidden))
    return found


def draft(fields: Fields, name: str, family: Family, layers: Sequence[Layer], count: int) -> list[Module]:
    """Return the layers that draft tokens (multi-token prediction): one like the last, and what joins two inputs.

    The embedding and the head are those of the model itself.
    """
    attending = next((layer for layer in reversed(layers) if layer.mixer in ("grouped", "latent", "compressed")), None)
    if not count or attending is None:
        return []
    hidden = fields.number("hidden_size")
    found: list[Module] = []
    for index in range(len(layers), len(layers) + count):
        prefix = f"{family.body}.{index}"
        found += _mixer(fields, family, attending, prefix) + _feed(fields, name, family, attending, prefix)
        found += _norms(fields, name, family, attending, prefix)
        found.append(linear(f"{prefix}.eh_proj", "draft", 2 * hidden, hidden, split="whole"))
        found.append(vector(f"{prefix}.draft_norms", 3 * hidden))
    return [replace(module, component="draft") for module in found]

"""What each layer of a model is: what mixes tokens, what it keeps of them, and what feeds forward."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuready.planning.model.facts import AttentionGroup
from gpuready.planning.model.families import Family
from gpuready.planning.model.fields import Fields
from gpuready.planning.model.recurrent import state

MOST_LAYERS = 1024
MOST_TOKENS = 1 << 30
_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "full": "full",
    "global": "full",
    "deepseek_sparse_attention": "full",
    "sliding_attention": "sliding",
    "sliding": "sliding",
    "local": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "conv": "recurrent",
    "moe": "experts",
    "mlp": "dense",
}
_LETTERS = {"M": "recurrent", "*": "full", "E": "experts", "-": "dense"}


@dataclass(frozen=True)
class Layer:
    """One layer."""

    keeps: AttentionGroup
    mixer: str
    """grouped, latent, compressed, recurrent, both (attention beside a recurrent part), or none."""
    feed: str
    """dense, experts, both or none."""
    shares: bool = False
    """Reads the KV of an earlier layer and keeps none of its own."""
    query_heads: int = 0
    double_feed: bool = False


def read_layers(fields: Fields, name: str, family: Family, context: int) -> list[Layer]:
    """Return the layers of a model from the first to the last.

    Raises:
        UnknownModel: when the sizes of their heads or states are missing or contradict each other.
    """
    count = _count(fields)
    kinds = _kinds(fields, family, count)
    window = fields.optional("sliding_window", "sliding_window_size", "window_size", most=MOST_TOKENS) or 0
    chunk = fields.optional("attention_chunk_size", most=MOST_TOKENS) or 0
    shared = fields.optional("num_kv_shared_layers", least=0, most=count) or 0
    if "recurrent" in kinds and not family.recurrent:
        raise fields.refuse("layer_types", f"and {name} has no layers that keep a state")
    layers = []
    for index, kind in enumerate(kinds):
        feed = kind if kind in ("dense", "experts") else _feed(fields, index)
        if kind in ("dense", "experts"):
            layers.append(Layer(AttentionGroup("none", 1), "none", kind))
            continue
        if name in ("mamba", "falcon_mamba", "mamba2"):
            feed = "none"
        if name == "nemotron_h":
            feed = "none"
        if kind == "recurrent":
            layers.append(Layer(state(fields, family.recurrent), "recurrent", feed))
            continue
        if family.attention == "compressed":
            layers.append(_compressed(fields, index, window, feed))
            continue
        layers.append(_attending(fields, family, kind, window if kind == "sliding" else chunk, context, feed))
        if index >= count - shared:
            last = layers[-1]
            wide = fields.flag("use_double_wide_mlp")
            layers[-1] = replace(last, keeps=AttentionGroup("none", 1), shares=True, double_feed=wide)
    return layers


def _count(fields: Fields) -> int:
    blocks = fields.texts("layers_block_type", MOST_LAYERS)
    if blocks and "num_hidden_layers" not in fields:
        return len(blocks)
    return fields.number("num_hidden_layers", most=MOST_LAYERS)


def _kinds(fields: Fields, family: Family, count: int) -> list[str]:
    """Return the kind of each layer: full, sliding, chunked, recurrent, or dense and experts where it only feeds."""
    pattern = fields.text("hybrid_override_pattern")
    if pattern:
        if len(pattern) != count or set(pattern) - set(_LETTERS):
            raise fields.refuse("hybrid_override_pattern", f"which is not {count} of the letters {' '.join(_LETTERS)}")
        return [_LETTERS[letter] for letter in pattern]
    types = fields.texts("layer_types", MOST_LAYERS) or fields.texts("layers_block_type", MOST_LAYERS)
    if types:
        if len(types) < count:
            raise fields.refuse("layer_types", f"and num_hidden_layers is {count}")
        unknown = [one for one in types if one not in _KINDS]
        if unknown:
            raise fields.refuse("layer_types", f"with {unknown[0]!r} in it; known are {', '.join(_KINDS)}")
        return [_KINDS[one] for one in types[:count]]
    return [_kind(fields, family, index, count) for index in range(count)]


def _kind(fields: Fields, family: Family, index: int, count: int) -> str:
    """Return the kind of one layer where config.json has no list of all."""
    if family.recurrent and not _attends(fields, index):
        return "recurrent"
    mixed = fields.numbers("hybrid_layer_pattern", most=1)
    if mixed and index < len(mixed):
        return "sliding" if mixed[index] else "full"
    if "attention_chunk_size" in fields and "hybrid_layer_pattern" not in fields:
        rotated = fields.numbers("no_rope_layers", most=1)
        step = fields.optional("no_rope_layer_interval") or 4
        chunked = rotated[index] if rotated and index < len(rotated) else (index + 1) % step
        return "chunked" if chunked else "full"
    if not fields.optional("sliding_window", "sliding_window_size", most=MOST_TOKENS):
        return "full"
    if family.window == "all":
        return "sliding"
    if family.window == "upper":
        upper = index >= (fields.optional("max_window_layers", least=0) or 0)
        return "sliding" if fields.flag("use_sliding_window") and upper else "full"
    if family.window == "others":
        letters = fields.raw("sliding_window_pattern")
        if isinstance(letters, str) and letters and len(letters) <= MOST_LAYERS:
            last = index == count - 1
            return "full" if last or letters[index % len(letters)] == "G" else "sliding"
        every = fields.optional("sliding_window_pattern", "_sliding_window_pattern") or family.pattern
        return "sliding" if (index + 1) % every else "full"
    return "full"


def _attends(fields: Fields, index: int) -> bool:
    """Say whether a layer of a hybrid model is attention, by the keys of its family."""
    chosen = fields.numbers("attn_layer_indices") or fields.numbers("full_attn_idxs")
    if chosen is not None:
        return index in chosen
    linear = fields.below("linear_attn_config")
    if linear is not None:
        # Counted from 1.
        return index + 1 in (linear.numbers("full_attn_layers") or ())
    kinds = fields.numbers("attn_type_list", most=1)
    if kinds is not None:
        return index < len(kinds) and kinds[index] == 1
    period = fields.optional("attn_layer_period")
    if period:
        return index % period == (fields.optional("attn_layer_offset", least=0) or 0)
    every = fields.optional("full_attention_interval")
    return bool(every) and (index + 1) % (every or 1) == 0


def _feed(fields: Fields, index: int) -> str:
    """Say whether a layer feeds forward through experts, one dense part, or both."""
    count = fields.optional("num_experts", least=0) or 0
    if count == 0 or fields.raw("enable_moe_block") is False:
        return "dense"
    if fields.raw("enable_moe_block") is True or "parallel_attn_mlp_res" in fields:
        return "both"
    return "experts" if _sparse(fields, index) else "dense"


def _sparse(fields: Fields, index: int) -> bool:
    chosen = fields.numbers("moe_layers")
    if chosen is not None:
        return index in chosen
    if isinstance(fields.raw("moe_layer_freq"), (list, tuple)):
        every = fields.numbers("moe_layer_freq", most=1) or ()
        return index < len(every) and every[index] == 1
    if index in (fields.numbers("mlp_only_layers") or ()):
        return False
    first = (
        fields.optional(
            "first_k_dense_replace", "moe_layer_num_skipped", "moe_layer_start_index", "num_dense_layers", least=0
        )
        or 0
    )
    last = fields.optional("moe_layer_end_index", least=-1)
    if index < first or (last is not None and 0 <= last < index):
        return False
    period = fields.optional("expert_layer_period")
    if period:
        return index % period == (fields.optional("expert_layer_offset", least=0) or 0)
    step = fields.optional("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
    if step:
        return (index + 1) % step == 0
    return index % (fields.optional("moe_layer_freq") or 1) == 0


def _attending(fields: Fields, family: Family, kind: str, window: int, context: int, feed: str) -> Layer:
    """Return a layer with attention."""
    heads = fields.number("num_attention_heads")
    if kind == "sliding" and (not window or window >= context):
        kind = "full"
    if kind == "chunked" and (not window or window >= context):
        kind = "full"
    if family.attention == "latent":
        latent = fields.number("kv_lora_rank") + fields.number("qk_rope_head_dim", least=0)
        return Layer(AttentionGroup("latent", 1, latent=latent, indexer=_indexer_bytes(fields)), "latent", feed)
    own = "swa_" if kind == "sliding" and "swa_num_key_value_heads" in fields else ""
    queries = fields.optional(f"{own}num_attention_heads") or heads
    kv_heads = fields.optional(f"{own}num_key_value_heads") or queries
    head_dim = fields.optional(f"{own}head_dim") or max(1, fields.number("hidden_size") // heads)
    if kind == "full" and "global_head_dim" in fields:
        head_dim = fields.number("global_head_dim")
    if kind == "full" and fields.flag("attention_k_eq_v"):
        kv_heads = fields.optional("num_global_key_value_heads") or kv_heads
    v_dim = fields.optional(f"{own}v_head_dim") or head_dim
    if kv_heads > queries:
        raise fields.refuse("num_key_value_heads", f"and only {queries} attention heads")
    if family.keeps_nothing:
        kind = "none"
    keeps = AttentionGroup(kind, 1, kv_heads, head_dim, v_dim, window if kind in ("sliding", "chunked") else 0)
    return Layer(keeps, "grouped", feed, query_heads=queries)


def _compressed(fields: Fields, index: int, window: int, feed: str) -> Layer:
    """Return a layer of DeepSeek-V4: the last tokens one by one, older ones several to a vector.

    vllm/models/deepseek_v4/attention.py: a ratio below 2 keeps the window alone; at a ratio of 4 an indexer chooses.
    """
    ratios = fields.numbers("compress_ratios", longest=2 * MOST_LAYERS) or ()
    ratio = ratios[index] if index < len(ratios) else 0
    latent = fields.number("head_dim")
    if ratio <= 1:
        return Layer(AttentionGroup("sliding", 1, latent=latent, window=window), "compressed", feed)
    indexer = _indexer_bytes(fields) // ratio if ratio == 4 else 0
    keeps = AttentionGroup("latent", 1, latent=latent, indexer=indexer, compression=ratio, window=window)
    return Layer(keeps, "compressed", feed)


def _indexer_bytes(fields: Fields) -> int:
    """Bytes per token of a sparse indexer's keys: 8 bits each, and one 32 bit scale per 128 of them.

    vllm/model_executor/models/deepseek_v2.py, Indexer: k_cache.
    """
    dim = fields.optional("index_head_dim")
    return dim + -(-dim // 128) * 4 if dim else 0

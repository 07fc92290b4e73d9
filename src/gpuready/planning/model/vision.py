"""The encoder of images that a composite model brings beside its language model.

Counted only where the classes of transformers and vLLM leave no doubt; elsewhere the total of the headers decides, and
without one the estimate says that the encoder is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuready.planning.model.fields import Fields, Missing
from gpuready.planning.model.modules import Module, linear, vector


def modules(outer: Fields, hidden: int) -> list[Module] | None:
    """Return the encoder and what projects its output to the `hidden` width of the language model.

    None where its sizes cannot be told; an empty list where there is no encoder.
    """
    inside = outer.below("vision_config")
    if inside is None:
        return []
    name = inside.text("model_type") or outer.text("model_type")
    counter = _TOWERS.get(name) or _TOWERS.get(outer.text("model_type"))
    try:
        return counter(outer, inside, hidden) if counter is not None else None
    except Missing:
        return None


def tower(outer: Fields) -> tuple[int, int]:
    """Return the layers and the width of the encoder, by their usual names alone; 0 where they are not said so."""
    inside = outer.below("vision_config")
    if inside is None:
        return 0, 0
    layers = inside.optional("num_hidden_layers", "vt_num_hidden_layers")
    return layers or 0, inside.optional("hidden_size", "vt_hidden_size") or 0


_GEMMA_TOKENS = 256
"""Of an image: transformers, Gemma3Config.mm_tokens_per_image."""


def pixels_per_token(outer: Fields) -> int:
    """Return the elements of an image that become one token: a patch, or several merged; 0 where it is not said."""
    inside = outer.below("vision_config")
    if inside is None or not _plain(inside, "patch_size"):
        return 0
    channels = _plain(inside, "num_channels") or _plain(inside, "in_channels") or 3
    whole, tokens = _plain(inside, "image_size"), _plain(outer, "mm_tokens_per_image")
    if outer.text("model_type") == "gemma3":
        tokens = tokens or _GEMMA_TOKENS
    if whole and tokens:
        return channels * whole * whole // tokens
    patch, frames = _plain(inside, "patch_size"), _plain(inside, "temporal_patch_size") or 1
    merged = _plain(inside, "spatial_merge_size") or _plain(outer, "spatial_merge_size") or 1
    return channels * (patch * merged) ** 2 * frames


def _plain(fields: Fields, key: str, most: int = 1 << 12) -> int:
    """Return a small whole number, 0 where there is another thing: newer encoders have lists in its place."""
    value = fields.raw(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most else 0


def _layer(
    prefix: str, width: int, inter: int, attention_bias: bool, mlp_bias: bool, gated: bool, norms: int
) -> list[Module]:
    found = [linear(f"{prefix}.attn.{one}", "vision", width, width, attention_bias) for one in ("q", "k", "v", "proj")]
    names = ("gate_proj", "up_proj") if gated else ("fc1",)
    found += [linear(f"{prefix}.mlp.{one}", "vision", width, inter, mlp_bias) for one in names]
    return [
        *found,
        linear(f"{prefix}.mlp.fc2", "vision", inter, width, mlp_bias),
        vector(f"{prefix}.norms", norms, "vision"),
    ]


def _siglip(inside: Fields, prefix: str = "vision_tower") -> list[Module]:
    """SigLIP and CLIP encoders with learned positions: transformers, modeling_siglip.py."""
    width, inter = inside.number("hidden_size"), inside.number("intermediate_size")
    patch, image = inside.number("patch_size", most=1024), inside.number("image_size", most=1 << 16)
    channels = inside.optional("num_channels", most=64) or 3
    clip = inside.text("model_type") == "clip_vision_model"
    positions = (image // patch) ** 2 + clip
    found = [
        vector(f"{prefix}.patch", width * channels * patch * patch + (0 if clip else width), "vision"),
        vector(f"{prefix}.positions", (positions + clip) * width, "vision"),
        vector(f"{prefix}.norm", 2 * width * (2 if clip else 1), "vision"),
    ]
    for index in range(inside.number("num_hidden_layers", most=256)):
        found += _layer(f"{prefix}.layers.{index}", width, inter, True, True, False, 4 * width)
    return found


def _gemma3(_: Fields, inside: Fields, hidden: int) -> list[Module]:
    width = inside.number("hidden_size")
    projector = vector("multi_modal_projector", width * hidden + width, "vision")
    return [*_siglip(inside), projector]


def _llava(outer: Fields, inside: Fields, hidden: int) -> list[Module] | None:
    """LLaVA: two linear layers from the encoder's width; LLaVA-NeXT has one vector for line ends beside them."""
    if inside.text("model_type") not in ("clip_vision_model", "siglip_vision_model"):
        return None
    width = inside.number("hidden_size")
    levels = outer.raw("vision_feature_layer")
    wide = width * (len(levels) if isinstance(levels, (list, tuple)) and 0 < len(levels) <= 64 else 1)
    biased = outer.flag("multimodal_projector_bias", default=True)
    found = [
        *_siglip(inside),
        linear("multi_modal_projector.linear_1", "vision", wide, hidden, biased),
        linear("multi_modal_projector.linear_2", "vision", hidden, hidden, biased),
    ]
    if outer.text("model_type") == "llava_next":
        found.append(vector("image_newline", hidden, "vision"))
    return found


def _pixtral(outer: Fields, inside: Fields, hidden: int) -> list[Module]:
    """Pixtral's encoder; Mistral 3 merges neighbouring patches before it projects them."""
    width, inter = inside.optional("hidden_size") or 1024, inside.optional("intermediate_size") or 4096
    patch = inside.optional("patch_size", most=1024) or 16
    found = [
        vector("vision_tower.patch", width * 3 * patch * patch, "vision"),
        vector("vision_tower.norm", width, "vision"),
    ]
    for index in range(inside.optional("num_hidden_layers", most=256) or 24):
        found += _layer(f"vision_tower.layers.{index}", width, inter, False, False, True, 2 * width)
    biased = outer.flag("multimodal_projector_bias", default=outer.text("model_type") == "llava")
    if outer.text("model_type") == "mistral3":
        merge = outer.optional("spatial_merge_size", most=64) or 2
        found += [
            linear("multi_modal_projector.patch_merger", "vision", width * merge * merge, width),
            vector("multi_modal_projector.norm", width, "vision"),
        ]
    return [
        *found,
        linear("multi_modal_projector.linear_1", "vision", width, hidden, biased),
        linear("multi_modal_projector.linear_2", "vision", hidden, hidden, biased),
    ]


def _patch(inside: Fields, width: int, bias: bool) -> Module:
    patch, frames = inside.optional("patch_size", most=1024) or 14, inside.optional("temporal_patch_size", most=64) or 2
    channels = inside.optional("in_channels", "in_chans", most=64) or 3
    return vector("visual.patch_embed", width * channels * frames * patch * patch + (width if bias else 0), "vision")


def _merger(name: str, wide: int, out: int, norm: int) -> list[Module]:
    return [
        vector(f"{name}.norm", norm, "vision"),
        linear(f"{name}.0", "vision", wide, wide, True),
        linear(f"{name}.2", "vision", wide, out, True),
    ]


def _qwen2(_: Fields, inside: Fields, hidden: int) -> list[Module]:
    """Qwen2-VL: vllm/model_executor/models/qwen2_vl.py."""
    width = inside.optional("embed_dim") or 1280
    merge = inside.optional("spatial_merge_size", most=64) or 2
    found = [_patch(inside, width, False)]
    for index in range(inside.optional("depth", most=256) or 32):
        found += _layer(f"visual.blocks.{index}", width, 4 * width, True, True, False, 4 * width)
    return [*found, *_merger("visual.merger", width * merge * merge, hidden, 2 * width)]


def _qwen25(_: Fields, inside: Fields, hidden: int) -> list[Module]:
    """Qwen2.5-VL: vllm/model_executor/models/qwen2_5_vl.py."""
    width, inter = inside.optional("hidden_size") or 1280, inside.optional("intermediate_size") or 3420
    merge = inside.optional("spatial_merge_size", most=64) or 2
    found = [_patch(inside, width, False)]
    for index in range(inside.optional("depth", most=256) or 32):
        found += _layer(f"visual.blocks.{index}", width, inter, True, True, True, 2 * width)
    return [
        *found,
        *_merger("visual.merger", width * merge * merge, inside.optional("out_hidden_size") or hidden, width),
    ]


def _qwen3(_: Fields, inside: Fields, hidden: int) -> list[Module]:
    """Qwen3-VL and Qwen3.5, with a merger for every level of deepstack: vllm/model_executor/models/qwen3_vl.py."""
    width, inter = inside.number("hidden_size"), inside.number("intermediate_size")
    wide = width * (inside.optional("spatial_merge_size", most=64) or 2) ** 2
    out = inside.optional("out_hidden_size") or hidden
    found = [
        _patch(inside, width, True),
        vector("visual.pos_embed", inside.number("num_position_embeddings") * width, "vision"),
    ]
    for index in range(inside.number("depth", most=256)):
        found += _layer(f"visual.blocks.{index}", width, inter, True, True, False, 4 * width)
    found += _merger("visual.merger", wide, out, 2 * width)
    for index in range(len(inside.numbers("deepstack_visual_indexes", longest=256) or ())):
        found += _merger(f"visual.deepstack_merger_list.{index}", wide, out, 2 * wide)
    return found


def _moonvit(_: Fields, inside: Fields, hidden: int) -> list[Module]:
    """MoonViT of Kimi-VL and Kimi-K2.5: vllm/model_executor/models/moonvit.py."""
    width = inside.optional("hidden_size", "vt_hidden_size") or 1152
    inter = inside.optional("intermediate_size", "vt_intermediate_size") or 4304
    patch = inside.optional("patch_size", most=1024) or 14
    rows = (inside.optional("init_pos_emb_height") or 64) * (inside.optional("init_pos_emb_width") or 64)
    wide = width * 4
    found = [
        vector("vision_tower.patch_embed", width * 3 * patch * patch + width + rows * width, "vision"),
        vector("vision_tower.norm", 2 * width, "vision"),
    ]
    for index in range(inside.optional("num_hidden_layers", "vt_num_hidden_layers", most=256) or 27):
        found += _layer(f"vision_tower.blocks.{index}", width, inter, True, True, False, 4 * width)
    return [
        *found,
        vector("multi_modal_projector.pre_norm", 2 * width, "vision"),
        linear("multi_modal_projector.linear_1", "vision", wide, wide, True, split="whole"),
        linear("multi_modal_projector.linear_2", "vision", wide, hidden, True, split="whole"),
    ]


def _gemma4(_: Fields, inside: Fields, hidden: int) -> list[Module]:
    """Gemma 4: gated layers with four norms, norms on queries and keys, positions for both axes."""
    width, inter = inside.number("hidden_size"), inside.number("intermediate_size")
    head, patch = inside.optional("head_dim") or 72, inside.optional("patch_size", most=1024) or 16
    found = [
        linear("vision_tower.patch", "vision", 3 * patch * patch, width),
        vector("vision_tower.positions", 2 * (inside.optional("position_embedding_size") or 10240) * width, "vision"),
        linear("embed_vision.projection", "vision", width, hidden, split="whole"),
    ]
    if inside.flag("standardize"):
        found.append(vector("vision_tower.standard", 2 * width, "vision"))
    for index in range(inside.number("num_hidden_layers", most=256)):
        found += _layer(f"vision_tower.layers.{index}", width, inter, False, False, True, 4 * width + 2 * head)
    return found


def _llama4(_: Fields, inside: Fields, hidden: int) -> list[Module]:
    """Llama 4, whose patches are merged four to one: vllm/model_executor/models/mllama4.py."""
    width, inter = inside.number("hidden_size"), inside.number("intermediate_size")
    patch, image = inside.optional("patch_size", most=1024) or 14, inside.number("image_size", most=1 << 16)
    middle, out = inside.optional("projector_input_dim") or 4096, inside.number("vision_output_dim")
    found = [
        linear("vision_model.patch_embedding.linear", "vision", 3 * patch * patch, width),
        vector("vision_model.positions", ((image // patch) ** 2 + 2) * width + 4 * width, "vision"),
        linear("vision_model.vision_adapter.mlp.fc1", "vision", 4 * width, middle),
        linear("vision_model.vision_adapter.mlp.fc2", "vision", middle, out),
        linear("multi_modal_projector.linear_1", "vision", out, hidden),
    ]
    for index in range(inside.optional("num_hidden_layers", most=256) or 34):
        found += _layer(f"vision_model.model.layers.{index}", width, inter, True, True, False, 4 * width)
    return found


_TOWERS: Mapping[str, Callable[[Fields, Fields, int], list[Module] | None]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_vision": _gemma4,
    "llava": _llava,
    "llava_next": _llava,
    "pixtral": _pixtral,
    "mistral3": _pixtral,
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen25,
    "qwen2_5_vl_vision": _qwen25,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
    "qwen3_5": _qwen3,
    "qwen3_5_moe": _qwen3,
    "moonvit": _moonvit,
    "kimi_vl": _moonvit,
    "kimi_k25": _moonvit,
    "llama4": _llama4,
    "llama4_vision_model": _llama4,
}

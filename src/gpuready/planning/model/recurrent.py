"""Layers that keep one state per request: state-space models and linear attention.

State shapes as vllm/model_executor/layers/mamba/mamba_utils.py, MambaStateShapeCalculator, has them, for one GPU and
without speculative tokens.
"""

from __future__ import annotations

from gpuready.planning.model.facts import AttentionGroup
from gpuready.planning.model.fields import Fields, UnknownModel, shown
from gpuready.planning.model.modules import Module, linear, vector

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _state_bytes(fields: Fields) -> int:
    """Bytes of one element of the state: what config.json asks for, else those of the model's own type."""
    wanted = fields.text("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    if wanted and wanted not in _ELEMENT_BYTES:
        raise UnknownModel(f"config.json has the state dtype {shown(wanted)}, known are {', '.join(_ELEMENT_BYTES)}")
    # A type of the model itself that is not known is refused where the model's is read.
    return _ELEMENT_BYTES.get(wanted or fields.text("dtype", "torch_dtype").removeprefix("torch."), 2)


def _inner(fields: Fields) -> int:
    """Return the width inside a Mamba layer."""
    own = fields.optional("mamba_d_ssm")
    if own:
        return own
    heads, dim = fields.optional("mamba_num_heads", "mamba_n_heads"), fields.optional("mamba_head_dim", "mamba_d_head")
    if heads and dim:
        return heads * dim
    expand = fields.optional("mamba_expand", "expand") or 2
    return expand * fields.number("hidden_size")


def _mamba2(fields: Fields) -> tuple[int, int, int, int, int, int]:
    """Return width, heads, head width, groups, state width and kernel of a Mamba-2 layer."""
    inner = _inner(fields)
    heads = fields.number("mamba_num_heads", "mamba_n_heads", "num_heads")
    dim = fields.optional("mamba_head_dim", "mamba_d_head") or max(1, inner // heads)
    groups = fields.optional("mamba_n_groups", "n_groups", "mamba_ngroups") or 1
    wide = fields.number("ssm_state_size", "mamba_d_state", "state_size")
    return inner, heads, dim, groups, wide, fields.optional("conv_kernel", "mamba_d_conv") or 4


def _delta(fields: Fields) -> tuple[int, int, int, int, int]:
    """Return width of all keys, width of all values, value heads, width of one value head and kernel."""
    value_heads = fields.number("linear_num_value_heads")
    key_dim = fields.number("linear_num_key_heads") * fields.number("linear_key_head_dim")
    value_dim = fields.number("linear_value_head_dim")
    kernel = fields.optional("linear_conv_kernel_dim") or 4
    return key_dim, value_heads * value_dim, value_heads, value_dim, kernel


def state(fields: Fields, kind: str) -> AttentionGroup:
    """Return what one recurrent layer keeps of a request."""
    size = _state_bytes(fields)
    if kind == "mamba1":
        inner = _inner(fields)
        wide, kernel = fields.number("state_size", "mamba_d_state"), fields.optional("conv_kernel", "mamba_d_conv") or 4
        conv, states = inner * (kernel - 1), inner * wide
    elif kind == "mamba2":
        inner, heads, dim, groups, wide, kernel = _mamba2(fields)
        conv, states = (inner + 2 * groups * wide) * (kernel - 1), heads * dim * wide
    elif kind == "delta":
        keys, values, heads, dim, kernel = _delta(fields)
        conv = (2 * keys + values) * (kernel - 1)
        states = heads * dim * fields.number("linear_key_head_dim")
    elif kind == "kimi_delta":
        inside = fields.below("linear_attn_config") or fields
        heads, dim = inside.number("num_heads"), inside.number("head_dim")
        conv, states = 3 * heads * dim * ((inside.optional("short_conv_kernel_size") or 4) - 1), heads * dim * dim
        size = 4
    elif kind == "convolution":
        conv, states = fields.number("conv_dim", "hidden_size") * ((fields.optional("conv_L_cache") or 3) - 1), 0
    else:
        dim = fields.optional("head_dim") or fields.number("hidden_size") // fields.number("num_attention_heads")
        conv, states, size = 0, fields.number("num_attention_heads") * dim * dim, 4
    return AttentionGroup("recurrent", 1, conv_elements=conv, state_elements=states, state_bytes_per_element=size)


def modules(fields: Fields, kind: str, prefix: str) -> list[Module]:
    """Return the weights of one recurrent layer."""
    return {
        "mamba1": _mamba1_modules,
        "mamba2": _mamba2_modules,
        "delta": _delta_modules,
        "kimi_delta": _kimi_modules,
        "convolution": _convolution_modules,
        "lightning": _lightning_modules,
    }[kind](fields, prefix)


def _plain(name: str, elements: int) -> Module:
    return vector(name, elements, "recurrent", "tensor")


def _mamba1_modules(fields: Fields, prefix: str) -> list[Module]:
    hidden, inner = fields.number("hidden_size"), _inner(fields)
    wide, kernel = fields.number("state_size", "mamba_d_state"), fields.optional("conv_kernel", "mamba_d_conv") or 4
    rank = fields.raw("time_step_rank") or fields.raw("mamba_dt_rank")
    low = -(-hidden // 16) if rank in (None, "auto") else fields.number("time_step_rank", "mamba_dt_rank")
    biased = fields.flag("use_bias", "mamba_proj_bias")
    found = [
        linear(f"{prefix}.in_proj", "recurrent", hidden, 2 * inner, biased),
        linear(f"{prefix}.x_proj", "recurrent", inner, low + 2 * wide),
        linear(f"{prefix}.dt_proj", "recurrent", low, inner, True),
        linear(f"{prefix}.out_proj", "recurrent", inner, hidden, biased),
        _plain(
            f"{prefix}.conv1d", inner * kernel + inner * fields.flag("use_conv_bias", "mamba_conv_bias", default=True)
        ),
        _plain(f"{prefix}.A_log", inner * wide + inner),
    ]
    if "mamba_dt_rank" in fields:
        found.append(vector(f"{prefix}.layernorms", low + 2 * wide))
    return found


def _mamba2_modules(fields: Fields, prefix: str) -> list[Module]:
    hidden = fields.number("hidden_size")
    inner, heads, _, groups, wide, kernel = _mamba2(fields)
    mixed = inner + 2 * groups * wide
    biased = fields.flag("use_bias", "mamba_proj_bias")
    conv_bias = fields.flag("use_conv_bias", "mamba_conv_bias", default=True)
    return [
        linear(f"{prefix}.in_proj", "recurrent", hidden, inner + mixed + heads, biased),
        linear(f"{prefix}.out_proj", "recurrent", inner, hidden, biased),
        _plain(f"{prefix}.conv1d", mixed * (kernel + conv_bias)),
        _plain(f"{prefix}.A_log", 3 * heads + inner * fields.flag("mamba_rms_norm", default=True)),
    ]


def _delta_modules(fields: Fields, prefix: str) -> list[Module]:
    hidden = fields.number("hidden_size")
    keys, values, heads, dim, kernel = _delta(fields)
    return [
        linear(f"{prefix}.in_proj_qkv", "recurrent", hidden, 2 * keys + values),
        linear(f"{prefix}.in_proj_z", "recurrent", hidden, values),
        linear(f"{prefix}.in_proj_b", "recurrent", hidden, heads),
        linear(f"{prefix}.in_proj_a", "recurrent", hidden, heads),
        linear(f"{prefix}.out_proj", "recurrent", values, hidden),
        _plain(f"{prefix}.conv1d", (2 * keys + values) * kernel),
        _plain(f"{prefix}.A_log", 2 * heads),
        vector(f"{prefix}.norm", dim),
    ]


def _kimi_modules(fields: Fields, prefix: str) -> list[Module]:
    hidden, inside = fields.number("hidden_size"), fields.below("linear_attn_config") or fields
    heads, dim = inside.number("num_heads"), inside.number("head_dim")
    wide, kernel = heads * dim, inside.optional("short_conv_kernel_size") or 4
    found = [linear(f"{prefix}.{one}_proj", "recurrent", hidden, wide) for one in "qkv"]
    found += [
        linear(f"{prefix}.f_a_proj", "recurrent", hidden, dim, split="whole"),
        linear(f"{prefix}.f_b_proj", "recurrent", dim, wide),
        linear(f"{prefix}.b_proj", "recurrent", hidden, heads),
        linear(f"{prefix}.o_proj", "recurrent", wide, hidden),
        _plain(f"{prefix}.conv1d", 3 * wide * kernel + heads + wide),
        vector(f"{prefix}.o_norm", dim),
    ]
    if inside.flag("use_full_rank_gate"):
        return [*found, linear(f"{prefix}.g_proj", "recurrent", hidden, wide)]
    found.append(linear(f"{prefix}.g_a_proj", "recurrent", hidden, dim, split="whole"))
    return [*found, linear(f"{prefix}.g_b_proj", "recurrent", dim, wide)]


def _convolution_modules(fields: Fields, prefix: str) -> list[Module]:
    hidden, wide = fields.number("hidden_size"), fields.number("conv_dim", "hidden_size")
    biased = fields.flag("conv_bias")
    return [
        linear(f"{prefix}.in_proj", "recurrent", hidden, 3 * wide, biased),
        linear(f"{prefix}.out_proj", "recurrent", wide, hidden, biased),
        _plain(f"{prefix}.conv", wide * ((fields.optional("conv_L_cache") or 3) + biased)),
    ]


def _lightning_modules(fields: Fields, prefix: str) -> list[Module]:
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    wide = heads * (fields.optional("head_dim") or hidden // heads)
    return [
        linear(f"{prefix}.qkv_proj", "recurrent", hidden, 3 * wide),
        linear(f"{prefix}.output_gate", "recurrent", hidden, wide),
        linear(f"{prefix}.out_proj", "recurrent", wide, hidden),
        vector(f"{prefix}.norm", wide),
    ]

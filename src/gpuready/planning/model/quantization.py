"""How a checkpoint keeps its linear layers: bits, scales and zero points, and what stays in 16 bits.

Layouts as compressed-tensors, AutoGPTQ/GPTQModel, AutoAWQ, bitsandbytes, NVIDIA's ModelOpt and the fp8 and mxfp4
checkpoints write them, and vllm/model_executor/layers/quantization reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpuready.planning.model import patterns
from gpuready.planning.model.facts import Quantization
from gpuready.planning.model.fields import Fields, UnknownModel, shown
from gpuready.planning.model.modules import Module

KNOWN = (
    "fp8",
    "fbgemm_fp8",
    "compressed-tensors",
    "gptq",
    "awq",
    "auto-round",
    "bitsandbytes",
    "mxfp4",
    "modelopt",
    "quark",
)

_TOO_MUCH = "config.json has so many patterns in quantization_config that they cannot be matched"


@dataclass(frozen=True)
class Scheme:
    """How the weights of one linear layer are kept."""

    method: str
    bits: int
    activation_bits: int = 16
    group: int = 0
    """Weights of one row that share a scale; 0: all of them."""
    block: tuple[int, int] = (0, 0)
    """Rows and columns that share a scale; (0, 0): none do."""
    per_tensor: bool = False
    scale_bytes: float = 2
    zero_bits: float = 0
    """Of one zero point; there are as many as scales."""
    input_bytes: int = 0
    """Per input element, e.g. its place in an order by activation."""
    extra_bytes: int = 0
    """Per matrix: global scales, shapes."""

    def bytes_of(self, outputs: int, inputs: int) -> int:
        """Return the bytes of one matrix with its scales and zero points."""
        if self.block != (0, 0):
            scales = -(-outputs // self.block[0]) * -(-inputs // self.block[1])
        elif self.per_tensor:
            scales = 1
        else:
            scales = outputs * (-(-inputs // self.group) if self.group else 1)
        values = outputs * inputs * self.bits / 8 + scales * (self.scale_bytes + self.zero_bits / 8)
        return round(values) + inputs * self.input_bytes + self.extra_bytes


Rule = tuple["patterns.Names | None", "Scheme | None"]
"""Names of modules, None for all, and how they are kept, None for 16 bits."""


class Quantized:
    """The formats of one checkpoint."""

    def __init__(self, facts: Quantization, rules: Sequence[Rule], experts_only: bool = False) -> None:
        self.facts = facts
        self._rules = tuple(rules)
        self._experts_only = experts_only
        self._experts: Scheme | None = None

    def with_experts(self, dtype: str) -> Quantized:
        """Return the same formats with the experts in a type of their own: DeepSeek-V4's `expert_dtype`."""
        if dtype == "fp4":
            self._experts = Scheme("mxfp4", 4, group=32, scale_bytes=1)
        return self

    def scheme(self, module: Module) -> Scheme | None:
        """Return how a module is kept, None for the model's own type."""
        if not module.linear or (self._experts_only and module.component != "experts"):
            return None
        if self._experts is not None and module.component == "experts":
            return self._experts
        try:
            for names, scheme in self._rules:
                if names is None or any(names.cover(name) for name in _spellings(module.name)):
                    return scheme
        except patterns.TooMuch:
            raise UnknownModel(_TOO_MUCH) from None
        return None


def _spellings(name: str) -> tuple[str, ...]:
    """Return how a module may be called where its model is a part of another."""
    tail = name.removeprefix("model.")
    return (name, f"language_model.{name}", f"model.language_model.{tail}") if tail != name else (name,)


def _names(fields: Fields, wanted: Sequence[str]) -> patterns.Names:
    try:
        found = patterns.Names(wanted)
    except patterns.TooMuch:
        raise UnknownModel(_TOO_MUCH) from None
    for one in found.not_understood[:1]:
        fields.assume(f"the pattern {shown(one)} in quantization_config is not understood, taken as matching nothing")
    return found


def _ignored(fields: Fields, *keys: str) -> tuple[str, ...]:
    for key in keys:
        found = fields.texts(key)
        if found:
            return found
    return ()


def read(fields: Fields) -> Quantized | None:
    """Return how the checkpoint is quantized, None where it is not.

    Raises:
        UnknownModel: when the method is not known.
    """
    inside = fields.below("quantization_config") or fields.below("compression_config")
    if inside is None or not any(True for _ in inside):
        return None
    nested = inside.below("quantization")
    if nested is not None:
        inside = nested
    method = inside.text("quant_method", "quant_algo").lower().replace("_", "-")
    if not method and inside.raw("config_groups") is not None:
        method = "compressed-tensors"
    reader = next((read for names, read in _READERS if any(method.startswith(name) for name in names)), None)
    if reader is None:
        raise UnknownModel(
            f"config.json has quantization_config.quant_method = {shown(method)}; known are {', '.join(KNOWN)}"
        )
    return reader(inside).with_experts(fields.text("expert_dtype"))


def _made(
    fields: Fields,
    scheme: Scheme,
    ignored: Sequence[str],
    kv_dtype: str | None = None,
    experts_only: bool = False,
    rules: Sequence[Rule] = (),
) -> Quantized:
    facts = Quantization(scheme.method, scheme.bits, scheme.activation_bits, scheme.group, tuple(ignored), kv_dtype)
    kept: list[Rule] = [(_names(fields, ignored), None)] if ignored else []
    return Quantized(facts, [*kept, *(rules or [(None, scheme)])], experts_only)


def _fp8(fields: Fields) -> Quantized:
    ignored = _ignored(fields, "modules_to_not_convert", "ignored_layers", "ignore")
    block = fields.numbers("weight_block_size", least=1, longest=2)
    if block is not None and len(block) == 2:
        scheme = Scheme("fp8", 8, 8, block=(block[0], block[1]), scale_bytes=4)
    elif fields.text("quant_method").lower() == "fbgemm_fp8":
        scheme = Scheme("fp8", 8, 8, scale_bytes=4)
    else:
        scheme = Scheme("fp8", 8, 8, per_tensor=True, scale_bytes=8)
    return _made(fields, scheme, ignored)


def _gptq(fields: Fields) -> Quantized:
    bits = fields.number("bits", most=8)
    group = fields.optional("group_size", least=-1) or -1
    scheme = Scheme("gptq", bits, group=max(0, group), zero_bits=bits, input_bytes=4)
    return _made(fields, scheme, _ignored(fields, "modules_to_not_convert", "modules_in_block_to_exclude"))


def _awq(fields: Fields) -> Quantized:
    bits = fields.number("bits", "w_bit", most=8)
    group = fields.optional("group_size", "q_group_size", least=-1) or -1
    scheme = Scheme("awq", bits, group=max(0, group), zero_bits=bits)
    return _made(fields, scheme, _ignored(fields, "modules_to_not_convert"))


def _auto_round(fields: Fields) -> Quantized:
    bits, group = fields.number("bits", most=8), fields.optional("group_size", least=-1) or -1
    scheme = Scheme("gptq", bits, group=max(0, group), zero_bits=bits, input_bytes=4)
    kept = []
    extra = fields.below("extra_config")
    for name in extra or ():
        rule = extra.below(name) if extra and isinstance(extra.raw(name), Mapping) else None
        if rule is not None and (rule.optional("bits", most=64) or bits) >= 16:
            kept.append(name)
    return _made(fields, scheme, kept)


def _bitsandbytes(fields: Fields) -> Quantized:
    skipped = _ignored(fields, "llm_int8_skip_modules")
    if fields.flag("load_in_8bit"):
        return _made(fields, Scheme("bitsandbytes", 8, 8, scale_bytes=4), skipped)
    # One scale per 64 weights: 32 bits, or 8 bits with a 32 bit scale for 256 of them.
    scale = 1 + 4 / 256 if fields.flag("bnb_4bit_use_double_quant") else 4
    return _made(fields, Scheme("bitsandbytes", 4, group=64, scale_bytes=scale), skipped)


def _mxfp4(fields: Fields) -> Quantized:
    scheme = Scheme("mxfp4", 4, group=32, scale_bytes=1)
    return _made(fields, scheme, _ignored(fields, "modules_to_not_convert"), experts_only=True)


def _kv_dtype(fields: Fields) -> str | None:
    said = fields.text("kv_cache_quant_algo")
    scheme = fields.below("kv_cache_scheme")
    bits = scheme.optional("num_bits") if scheme is not None else None
    return "fp8" if said.upper() == "FP8" or bits == 8 else None


_MODELOPT = {
    "fp8": Scheme("fp8", 8, 8, per_tensor=True, scale_bytes=8),
    "fp8_pb_wo": Scheme("fp8", 8, 8, block=(128, 128), scale_bytes=4),
    "fp8_per_channel_per_token": Scheme("fp8", 8, 8, scale_bytes=4),
    "nvfp4": Scheme("nvfp4", 4, 4, group=16, scale_bytes=1, extra_bytes=8),
    "nvfp4_awq": Scheme("nvfp4", 4, 4, group=16, scale_bytes=1, extra_bytes=8),
    "w4a16_nvfp4": Scheme("nvfp4", 4, 16, group=16, scale_bytes=1, extra_bytes=4),
    "mxfp8": Scheme("fp8", 8, 8, group=32, scale_bytes=1),
    "w4a8_awq": Scheme("awq", 4, 8, group=128, scale_bytes=2),
    "int4_awq": Scheme("awq", 4, group=128, scale_bytes=2),
}


def _modelopt(fields: Fields) -> Quantized:
    ignored = _ignored(fields, "ignore", "exclude_modules", "exclude")
    algorithm = fields.text("quant_algo").lower() or "nvfp4"
    if algorithm == "mixed_precision":
        return _modelopt_mixed(fields, ignored)
    if algorithm not in _MODELOPT:
        raise UnknownModel(
            f"config.json has quantization_config.quant_algo = {shown(algorithm)}; known are {', '.join(_MODELOPT)}"
        )
    return _made(fields, _MODELOPT[algorithm], ignored, _kv_dtype(fields))


def _modelopt_mixed(fields: Fields, ignored: Sequence[str]) -> Quantized:
    """Read a format for each layer, from an object of names and formats."""
    layers = fields.below("quantized_layers")
    if layers is None:
        raise UnknownModel("config.json mixes formats and has no quantization_config.quantized_layers")
    names: dict[Scheme, list[str]] = {}
    for name in layers:
        one = layers.below(name)
        scheme = _MODELOPT.get(one.text("quant_algo").lower()) if one is not None else None
        if scheme is None:
            known = ", ".join(_MODELOPT)
            raise UnknownModel(f"config.json has no known quant_algo for {shown(name)}; known are {known}")
        names.setdefault(scheme, []).append(name)
    if not names:
        raise UnknownModel("config.json has an empty quantization_config.quantized_layers")
    main = max(names, key=lambda scheme: len(names[scheme]))
    rules: list[Rule] = [(_names(fields, wanted), scheme) for scheme, wanted in names.items()]
    return _made(fields, main, ignored, _kv_dtype(fields), rules=rules)


def _compressed(fields: Fields) -> Quantized:
    """Read compressed-tensors: groups of targets, each with the form of its weights."""
    groups = fields.below("config_groups")
    if groups is None:
        raise UnknownModel("config.json quantizes by compressed-tensors and has no quantization_config.config_groups")
    rules: list[Rule] = []
    everything: list[Rule] = []
    schemes: list[Scheme] = []
    for name in groups:
        group = groups.below(name)
        weights = group.below("weights") if group is not None else None
        if group is None or weights is None:
            continue
        scheme = _compressed_scheme(fields, group, weights)
        schemes.append(scheme)
        for target in group.texts("targets") or ("Linear",):
            if target in ("Linear", "LinearBase", "FusedMoE"):
                everything.append((None, scheme))
            else:
                rules.append((_names(fields, [target]), scheme))
    if not schemes:
        raise UnknownModel("config.json has quantization_config.config_groups without weights")
    ignored = _ignored(fields, "ignore")
    return _made(fields, schemes[0], ignored, _kv_dtype(fields), rules=[*rules, *everything])


def _compressed_scheme(fields: Fields, group: Fields, weights: Fields) -> Scheme:
    bits = weights.number("num_bits", most=16)
    float_type = weights.text("type", default="int") == "float"
    inputs = group.below("input_activations")
    activation = (inputs.optional("num_bits", most=16) or 16) if inputs is not None else 16
    form = group.text("format") or fields.text("format")
    size = weights.optional("group_size", least=-1) or 0
    strategy = weights.text("strategy") or ("group" if size > 0 else "channel")
    if bits == 4 and float_type:
        if size == 32 or "mxfp4" in form:
            return Scheme("mxfp4", 4, activation, group=32, scale_bytes=1)
        return Scheme("nvfp4", 4, activation, group=size if size > 0 else 16, scale_bytes=1, extra_bytes=8)
    packed = not float_type and form in ("pack-quantized", "marlin-24")
    zero = 0 if weights.flag("symmetric", default=True) else bits if packed else 8
    ordered = weights.text("actorder") in ("group", "dynamic")
    method = "fp8" if float_type else "wna16" if packed or activation == 16 else "int8"
    block = weights.numbers("block_structure", least=1, longest=2)
    return Scheme(
        method,
        bits,
        activation,
        group=max(0, size) if strategy in ("group", "tensor_group") else 0,
        block=(block[0], block[1]) if strategy == "block" and block and len(block) == 2 else (0, 0),
        per_tensor=strategy == "tensor",
        zero_bits=zero,
        input_bytes=4 if ordered else 0,
        extra_bytes=16 if packed else 0,
    )


def _quark(fields: Fields) -> Quantized:
    """AMD's Quark: one global form of the weights."""
    weights = fields.below("global_quant_config")
    inside = weights.below("weight") if weights is not None else None
    if inside is None:
        raise UnknownModel("config.json quantizes by quark and has no quantization_config.global_quant_config.weight")
    kind = inside.text("dtype").lower()
    if kind.startswith("fp8"):
        scheme = Scheme("fp8", 8, 8, per_tensor=inside.text("qscheme") == "per_tensor", scale_bytes=4)
    elif kind in ("fp4", "mxfp4"):
        scheme = Scheme("mxfp4", 4, 4, group=32, scale_bytes=1)
    elif kind == "int8":
        scheme = Scheme("int8", 8, 8, scale_bytes=4)
    else:
        raise UnknownModel(f"config.json has a Quark format {shown(kind)}; known are fp8_e4m3, fp4, int8")
    return _made(fields, scheme, _ignored(fields, "exclude"))


_READERS: tuple[tuple[tuple[str, ...], Callable[[Fields], Quantized]], ...] = (
    (("fp8", "fbgemm-fp8"), _fp8),
    (("compressed-tensors",), _compressed),
    (("gptq",), _gptq),
    (("awq",), _awq),
    (("auto-round", "intel/auto-round"), _auto_round),
    (("bitsandbytes",), _bitsandbytes),
    (("mxfp4", "gpt-oss-mxfp4"), _mxfp4),
    (("modelopt", "nvfp4"), _modelopt),
    (("quark",), _quark),
)

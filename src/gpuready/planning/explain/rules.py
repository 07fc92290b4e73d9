"""The rules of thumb that operators are told, beside the figures of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuready.planning.memory.estimate import Unresolved, estimate
from gpuready.planning.memory.run import GIB
from gpuready.planning.wish import Option

KV_SHARE = 0.5
"""The rule's upper end: 40 to 50 % of the card."""
FREE_GB = 10


@dataclass(frozen=True)
class Rule:
    """One rule of thumb; `holds`: whether the plan keeps it, None where it does not apply."""

    rule: str
    holds: bool | None
    says: str


def compare(option: Option, headroom_gib: float) -> tuple[Rule, ...]:
    """Return every rule with what the plan's figures say of it; `headroom_gib` of a GPU are nobody's."""
    return (
        _weights_first(option),
        _kv_share(option),
        _free(option, headroom_gib),
        _fp8_on_hopper(option),
        _int4_on_t4(option),
    )


def _weights_first(option: Option) -> Rule:
    found = option.estimate
    says = (
        f"the weights take {found.weights.value:.2f} of {found.total_gib:.2f} GiB "
        f"({found.weights.value / found.total_gib:.0%}), all else is divided after them"
    )
    return Rule("weights first", True, says)


def _kv_share(option: Option) -> Rule:
    found = option.estimate
    share = found.kv.value / found.total_gib
    says = f"the KV cache has {share:.1%} of the card"
    if share > KV_SHARE:
        lost = int(found.kv_tokens.value * (1 - KV_SHARE / share))
        says += f"; the engine keeps its working memory beside it, so the rule would only give up {lost:,} tokens"
    return Rule("KV cache at most 40 to 50 % of the card", share <= KV_SHARE, says)


def _free(option: Option, headroom_gib: float) -> Rule:
    found = option.estimate
    part = " of its part" if option.place.shared_gib is not None else ""
    says = f"{headroom_gib:.2f} GiB{part} are nobody's"
    missing = FREE_GB * 1e9 / GIB - headroom_gib
    if missing >= found.kv.value > 0:
        says += f"; to leave {FREE_GB} GB would take more than the whole KV cache"
    elif missing > 0 and found.kv.value > 0:
        lost = int(found.kv_tokens.value * missing / found.kv.value)
        says += f"; to leave {FREE_GB} GB would take {lost:,} tokens from the KV cache"
    return Rule(f"leave {FREE_GB} GB free", missing <= 0, says)


def _fp8_on_hopper(option: Option) -> Rule:
    rule = "FP8 on Hopper"
    if not 9.0 <= option.place.device.compute < 10.0:
        return Rule(rule, None, "the card is no Hopper")
    method = option.run.quantization or (option.wish.model.quantization and option.wish.model.quantization.method)
    if method:
        return Rule(rule, method == "fp8", f"the weights are {method}")
    try:
        after = estimate(option.wish.model, option.place.device, replace(option.run, quantization="fp8"))
    except Unresolved:
        return Rule(rule, False, "the weights are not quantized; what FP8 would win is not known for this version")
    won = option.estimate.weights.value - after.weights.value
    tokens = int(after.kv_tokens.value - option.estimate.kv_tokens.value)
    more = f"{tokens:,} tokens more" if tokens else "for the others: the KV cache has its bytes by a setting"
    return Rule(rule, False, f"the weights are not quantized; FP8 would free {won:.2f} GiB on each GPU, {more}")


def _int4_on_t4(option: Option) -> Rule:
    rule = "INT4 on T4"
    if not option.place.device.name.startswith("t4"):
        return Rule(rule, None, "the card is no T4")
    quantization = option.wish.model.quantization
    bits = quantization.weight_bits if quantization else 16
    share = option.estimate.weights.value / option.estimate.total_gib
    return Rule(rule, bits == 4, f"the weights have {bits} bits and take {share:.0%} of the card")

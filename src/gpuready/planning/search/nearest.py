"""Says why a wish does not run, and finds the nearest that does: another value, more GPUs, a smaller format."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from gpuready.outcome import Failure
from gpuready.planning import support
from gpuready.planning.memory import device as cards
from gpuready.planning.memory.device import shown
from gpuready.planning.memory.run import GIB, Estimate, Run
from gpuready.planning.model.facts import Component, ModelFacts, Quantization
from gpuready.planning.search import sizing
from gpuready.planning.search.candidates import length
from gpuready.planning.wish import Option, Place, Wish

Try = Callable[[Wish, Place], Option | None]
"""Says how a wish would run on a place if it had to serve one request at a time."""
MOST_GPUS = 16
_FORMATS = {"fp8": (8, "FP8"), "int8": (8, "INT8"), "awq": (4, "AWQ, 4 bits"), "gptq": (4, "GPTQ, 4 bits")}
_SCALE_BITS = {8: 0.0, 4: 20 / 128}
"""Per weight, for a 16 bit scale and a 4 bit zero point of every 128."""
_UNITS: dict[str, float] = {
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "memory_fraction": 0.001,
    "kv_bytes": 1 << 20,
}
"""In what steps the nearest value of a setting is looked for."""


def failures(wish: Wish, place: Place, refused: Iterable[Estimate], attempt: Try) -> list[Failure]:
    """Return why nothing runs: the setting that is to blame, else the memory, with what would."""
    closest = max(refused, key=_closeness)
    for name in wish.settings:
        without = replace(wish, settings={key: value for key, value in wish.settings.items() if key != name})
        if good := attempt(without, place):
            return [_setting(wish, place, name, closest, good, attempt)]
    return [replace(memory(wish, place, [closest]), fix=_instead(wish, place, attempt))]


def memory(wish: Wish, place: Place, refused: Iterable[Estimate]) -> Failure:
    """Return where the memory goes of the way that comes nearest, without what would do instead."""
    what = f"{wish.model_id} does not fit on {where(place)}"
    return Failure("plan.memory", what, _arithmetic(max(refused, key=_closeness)))


def where(place: Place) -> str:
    """Return a place for people."""
    part = f", of which {place.shared_gib:.2f} GiB are its own" if place.shared_gib is not None else ""
    return f"{place.count} x {shown(place.device.name)}{part}"


def _closeness(found: Estimate) -> float:
    return min(found.kv.value - found.request_gib, sizing.spare(found))


def _arithmetic(found: Estimate) -> str:
    """Return where the memory goes of the way that came nearest, as a sum that ends with the KV cache."""
    if found.run.kv_bytes is not None and found.refusal:
        return found.refusal
    gpus, kv = found.run.tp * found.run.pp, found.kv.value
    graphs = found.graphs.value if found.graphs_counted else 0.0
    buffers = found.outside.value + found.non_torch.value + graphs
    nobody = found.total_gib - found.weights.value - found.activation.value - buffers - kv
    place = f"on each of {gpus} GPUs " if gpus > 1 else ""
    total = (
        f"{place}{found.total_gib:.2f} GiB - weights {found.weights.value:.2f} - activations "
        f"{found.activation.value:.2f} - context, buffers and graphs {buffers:.2f} - "
        f"left to nobody {nobody:.2f} = {kv:.2f} GiB for the KV cache"
    )
    if kv > 0 and kv < found.request_gib:
        return f"{total}, and one request of {found.run.max_model_len} tokens takes {found.request_gib:.2f}"
    return total


# What was set --------------------------------------------------------------------------------------------------------


def _setting(wish: Wish, place: Place, name: str, closest: Estimate, good: Option, attempt: Try) -> Failure:
    value = wish.settings[name]
    nearest = _nearest_value(wish, place, name, good, attempt)
    why = _arithmetic(closest)
    if name == "memory_fraction" and closest.refusal and closest.kv.value > closest.request_gib:
        why = closest.refusal.partition("; set")[0]
    return Failure("plan.setting", f"{name} = {value} does not fit", why, f"set {nearest}" if nearest else "remove it")


def _nearest_value(wish: Wish, place: Place, name: str, good: Option, attempt: Try) -> str:
    """Return the value nearest to what was set that runs, as `at most 5`; empty where it is no quantity.

    `good` runs without the setting, so its own value does, and the limit lies between both.
    """
    unit = _UNITS.get(name)
    if unit is None:
        return ""
    own = int(good.estimate.kv.value * GIB) if name == "kv_bytes" else getattr(good.run, name)
    wrong, right = round(float(wish.settings[name]) / unit), round(float(own) / unit)
    step = 1 if wrong > right else -1
    while abs(wrong - right) > 1:
        middle = (wrong + right) // 2
        tried = {**wish.settings, name: middle if unit == 1 else round(middle * unit, 3)}
        if attempt(replace(wish, settings=tried), place):
            right = middle
        else:
            wrong = middle
    value = right * int(unit) if unit >= 1 else round(right * unit, 3)
    return f"at {'most' if step > 0 else 'least'} {value}"


def _last(works: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the largest number up to `high` that works, where all below it work; None where none does."""
    if high < low or not works(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if works(middle) else (low, middle - 1)
    return low


# What else would do --------------------------------------------------------------------------------------------------


def _instead(wish: Wish, place: Place, attempt: Try) -> str:
    ways = [
        *_larger(wish, place, attempt),
        *_smaller_format(wish, place, attempt),
        *_shorter(wish, place, attempt),
    ]
    if not ways:
        return "take a larger card, or a smaller model"
    return f"{', or '.join(ways)}"


def _larger(wish: Wish, place: Place, attempt: Try) -> list[str]:
    """Return the smallest larger place that works: the whole GPU, a larger slice, or more GPUs."""
    card, _, profile = place.device.name.partition(":")
    if place.shared_gib is not None:
        return ["give it the whole GPU"] if attempt(wish, replace(place, shared_gib=None)) else []
    if profile:
        larger = sorted(cards.profiles(card).items(), key=lambda one: float(one[1]["memory_mib"]))
        for name, _ in larger:
            slice_ = cards.device(card, name)
            if slice_ and slice_.total_gib > place.device.total_gib and attempt(wish, replace(place, device=slice_)):
                return [f"give it a slice {name}"]
        return []
    one = replace(wish, settings={key: value for key, value in wish.settings.items() if key not in ("tp", "pp")})
    for count in range(place.count + 1, MOST_GPUS + 1):
        if attempt(one, replace(place, count=count, island=0 if place.island < 2 else place.island)):
            return [f"give it {count} GPUs"]
    return []


def _smaller_format(wish: Wish, place: Place, attempt: Try) -> list[str]:
    """Return the gentlest formats of the weights that work: made while loading, and as a checkpoint."""
    if wish.model.quantization or wish.settings.get("quantization"):
        return []
    found = []
    if not wish.allow_lossy and (made := attempt(replace(wish, allow_lossy=True), place)):
        found.append(f"set allow_lossy: true ({' and '.join(made.lossy)})")
    for method, (bits, title) in _FORMATS.items():
        smaller = quantized(wish.model, method, bits)
        run = Run(wish.engine, wish.version)
        if any(one.code == "quantization" for one in support.objections(smaller, place.device, run)):
            continue
        if attempt(replace(wish, model=smaller), place):
            return [*found, f"take a checkpoint in {title}"]
    return found


def _shorter(wish: Wish, place: Place, attempt: Try) -> list[str]:
    """Return the greatest length of a request that works, where most requests are not longer."""
    load = wish.workload
    median = load.prompt.p50 + load.output.p50

    def works(tokens: int) -> bool:
        return attempt(replace(wish, settings={**wish.settings, "max_model_len": tokens}), place) is not None

    step = 256
    most = _last(lambda count: works(count * step), max(1, -(-median // step)), length(wish) // step)
    return [f"set max_model_len to {most * step:,} at most"] if most else []


def quantized(model: ModelFacts, method: str, bits: int) -> ModelFacts:
    """Return the facts of a checkpoint of the model in which every linear layer that can be is in so many bits."""

    def small(part: Component) -> Component:
        return replace(part, bytes=int(part.elements * (bits + _SCALE_BITS[bits]) / 8)) if part.quantizable else part

    made = Quantization(method, bits, group_size=128 if bits == 4 else 0)
    return replace(model, components=tuple(map(small, model.components)), quantization=made)

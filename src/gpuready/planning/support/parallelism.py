"""How a model may be split over GPUs, and what driver and CUDA its engine needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpuready import catalog
from gpuready.planning.memory.device import cards
from gpuready.planning.support.capability import Asked, Objection, OnCard, within

_HEADED = ("full", "sliding", "chunked")


def split(asked: Asked) -> Iterator[Objection]:
    """Object to a split that leaves parts of unequal size, or none, or that the hardware cannot join."""
    run, model, what = asked.run, asked.model, f"{asked.model.model_type or 'the model'} with {asked.engine}"
    if ":" in asked.device.name and run.tp * run.pp * run.dcp > 1:
        yield Objection(
            "mig",
            f"one deployment over {run.tp * run.pp} MIG slices of {asked.card}",
            "slices have no peer-to-peer and NCCL does not join them",
            "give it one larger slice, or replicas of one slice each",
            {"tp": 1, "pp": 1, "dcp": 1},
        )
    ways = 1 if run.attention_dp else run.tp
    why = _unequal(asked, ways)
    if why:
        fitting = max(one for one in range(1, ways) if not _unequal(asked, one))
        yield Objection("tp", f"tp {run.tp} for {what}", why, f"tp {fitting} fits", {"tp": fitting})
    if run.pp > model.layers:
        said = f"it has {model.layers} layers"
        yield Objection("pp", f"pp {run.pp} for {what}", said, f"pp {model.layers} is the most", {"pp": model.layers})
    if run.dcp > 1 and run.tp % run.dcp:
        said = f"it has to divide tp {run.tp}"
        yield Objection("dcp", f"dcp {run.dcp} for {what}", said, "leave it at 1", {"dcp": 1})
    if run.ep > 1 and (model.experts is None or run.ep > model.experts.count):
        said = f"it has {model.experts.count if model.experts else 'no'} experts"
        yield Objection("ep", f"ep {run.ep} for {what}", said, "leave it at 1", {"ep": 1})


def host(asked: OnCard, driver: str | None, cuda: str | None, made_for: str | None = None) -> Iterator[Objection]:
    """Object to a driver that is too old for engine or card, or too new for the card, and to another CUDA.

    `made_for` is the CUDA that the engine's wheels are made for, where they are not those of PyPI.
    """
    built = asked.first([{**rule, "compute": (0,)} for rule in asked.page["cuda"]])
    needed = made_for or (str(built["version"]) if built else "")
    if cuda and needed and _numbers(cuda)[0] < _numbers(needed)[0]:
        older = [rule for rule in asked.page["cuda"] if _numbers(rule["version"])[0] <= _numbers(cuda)[0]]
        nearest = f"a release before {older[-1]['before']} is" if older else "take a stack with it"
        why = f"its wheels are made for CUDA {_numbers(needed)[0]}"
        yield Objection(
            "cuda", f"{asked.engine} on CUDA {cuda[:20]}", why, f"{nearest} made for it" if older else nearest
        )
    if not driver or not _numbers(driver):
        return
    for floor, of in _floors(asked, needed):
        if _numbers(driver) < _numbers(floor):
            yield Objection("driver", f"driver {driver[:20]}", f"{of} begins with {floor}", f"install {floor} or newer")
    for rule in catalog.load("engine_support")["last_drivers"]:
        if within(asked.device.compute, rule) and _numbers(driver)[0] > rule["branch"]:
            why = f"branch {rule['branch']} is the last that knows the {asked.card}"
            yield Objection("driver", f"driver {driver[:20]}", why, f"install branch {rule['branch']}")


def _unequal(asked: Asked, ways: int) -> str:
    model = asked.model
    heads = {group.kv_heads for group in model.groups if group.kind in _HEADED}
    if ways > 1 and model.heads % ways:
        return f"its {model.heads} attention heads do not divide by {ways}"
    for count in sorted(heads):
        if count and count % ways and ways % count:
            return f"its {count} KV heads neither divide by {ways} nor repeat in it"
    if ways > 1 and not (asked.run.ep > 1 and model.experts) and model.intermediate % ways:
        return f"its feed-forward width {model.intermediate} does not divide by {ways}"
    group = model.quantization.group_size if model.quantization else 0
    if ways > 1 and group and model.quantization and model.quantization.method in ("awq", "gptq", "wna16"):
        part = model.intermediate // ways
        if part % group:
            return f"{part} weights of a row on each GPU do not divide by the quantization's groups of {group}"
    return ""


def _floors(asked: OnCard, cuda: str) -> Iterator[tuple[str, str]]:
    floors: dict[str, Any] = catalog.load("engine_support")["cuda_drivers"]
    key, _, profile = asked.device.name.partition(":")
    card = cards().get(key, {})
    if cuda.partition(".")[0] in floors:
        yield floors[cuda.partition(".")[0]], f"CUDA {cuda.partition('.')[0]}, which {asked.engine} needs,"
    if "driver_min" in card:
        yield card["driver_min"], f"the {card['title']}"
    if profile and "mig" in card:
        yield catalog.load("gpus")["mig"][card["mig"]]["driver_min"], f"MIG on the {card['title']}"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())

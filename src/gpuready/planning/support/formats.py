"""What a model may be computed and kept in on a card: its type, its weights' format, its KV cache's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuready import catalog
from gpuready.planning.memory.versions import parse
from gpuready.planning.support.capability import Asked, Objection, engines, first, newest, release_of, within

_SPELLED = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
_PLAIN = ("auto", "float16", "bfloat16", "float32")


def dtype(asked: Asked) -> Iterator[Objection]:
    """Object to a type that the card does not compute in, or in which the engine refuses the model."""
    wanted = _SPELLED.get(asked.run.dtype or "auto", asked.run.dtype or "auto")
    if wanted == "auto":
        return
    known = _types()
    nearest, _ = computed_in(asked)
    what = f"{wanted[:40]} on {asked.card} with {asked.engine}"
    if wanted not in known:
        why = f"known are {', '.join(known)}"
    elif not within(asked.device.compute, known[wanted]):
        why = f"{known[wanted]['needs']}, this card has {asked.device.compute}"
    elif wanted == "float16" and _unstable(asked):
        why = f"it refuses {asked.model.model_type} in float16 for its numerical instability"
    else:
        return
    yield Objection("dtype", what, why, f"set dtype {nearest}", {"dtype": nearest})


def computed_in(asked: Asked) -> tuple[str, list[str]]:
    """Return the type that a model computes in on a card, with a note where it is not its own."""
    known = _types()
    own = asked.model.dtype if asked.model.dtype in known else "bfloat16"
    there = within(asked.device.compute, known["bfloat16"])
    best = own if within(asked.device.compute, known[own]) else str(known[own]["nearest"])
    if best == "float16" and _unstable(asked):
        return ("bfloat16", []) if there else ("float32", [asked.note("unstable")])
    return best, [asked.note("cast", dtype=best)] if best != own else []


def quantization(asked: Asked) -> Iterator[Objection]:
    """Object to a format of the weights, the checkpoint's own or one to be made while loading."""
    own = asked.model.quantization.method if asked.model.quantization else None
    text = asked.run.quantization
    wanted = named(text) if text else None
    formats, made = asked.page["formats"], asked.page["made_while_loading"]
    if text and wanted is None and own is None:
        what = f"quantization {text[:40]!r} with {asked.engine}"
        yield Objection("quantization", what, "no format has this name", f"known are {', '.join(formats)}")
        return
    method = wanted or own
    if method is None or method not in formats:
        return
    what = f"{method} on {asked.card} with {asked.engine}"
    if asked.first(formats[method]["rules"]) is None:
        why = f"{formats[method]['needs']}; this card has {asked.device.compute}"
        nearest, change = _instead(asked, method, checkpoint=own is not None)
        yield Objection("quantization", what, why, nearest, change)
    elif wanted and own and wanted.partition("_")[0] != own:
        why = f"the checkpoint is {own} already"
        yield Objection("quantization", what, why, f"leave it {own}", {"quantization": None})
    elif wanted and not own and wanted.partition("_")[0] not in made:
        why = (
            f"it is not made while loading, only {' and '.join(made)} are" if made else "nothing is made while loading"
        )
        nearest = f"take a checkpoint in {method}, or leave the weights in 16 bits"
        yield Objection("quantization", what, why, nearest, {"quantization": None})


def named(text: str) -> str | None:
    """Return a format by any of its names."""
    names: Mapping[str, list[str]] = catalog.load("engine_support")["format_names"]
    word = text.casefold().replace("-", "_")
    return next((name for name, others in names.items() if word == name or word in others), None)


def weight_only(asked: Asked) -> str | None:
    """Return the checkpoint's format where the card keeps its weights in it and computes in 16 bits."""
    method = asked.model.quantization.method if asked.model.quantization else ""
    rule = asked.first(asked.page["formats"].get(method, {}).get("rules", ()))
    return method.upper() if rule and rule.get("how") == "weight_only" else None


def kv_dtype(asked: Asked) -> Iterator[Objection]:
    """Object to a type of the KV cache."""
    wanted = asked.run.kv_dtype
    if wanted is None or _SPELLED.get(wanted, wanted) in _PLAIN:
        return
    kinds = asked.page["kv_dtypes"]
    named_so = [one for name, one in kinds.items() if wanted == name or wanted in one["names"]]
    what = f"a KV cache in {wanted[:40]} on {asked.card} with {asked.engine}"
    nearest, change = "leave it in 16 bits (auto)", None
    if not named_so:
        names = ", ".join(name for one in kinds.values() for name in one["names"])
        yield Objection("kv_dtype", what, f"known are auto, {names}", nearest, {"kv_dtype": change})
    elif asked.first(named_so[0]["rules"]) is None:
        if asked.first(kinds["fp8"]["rules"]):
            change = kinds["fp8"]["names"][0]
            nearest = f"{change} runs there"
        why = f"{named_so[0]['needs']}; this card has {asked.device.compute}"
        yield Objection("kv_dtype", what, why, nearest, {"kv_dtype": change})


def _types() -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = catalog.load("engine_support")["dtypes"]
    return found


def _unstable(asked: Asked) -> bool:
    rule = asked.page.get("no_float16")
    return rule is not None and asked.first([rule]) is not None and asked.model.model_type in rule["model_types"]


def _instead(asked: Asked, method: str, checkpoint: bool) -> tuple[str, dict[str, Any]]:
    """Return the nearest to a format that does not run: other formats here, then later releases, then other engines."""
    page, compute = asked.page, asked.device.compute
    likely = {
        one: rule for one in page["formats"][method]["instead"] if (rule := asked.first(page["formats"][one]["rules"]))
    }
    if likely:
        shown = [
            f"{one} (weights alone: W8A16, Marlin)" if rule.get("how") == "weight_only" and one == "fp8" else one
            for one, rule in list(likely.items())[:2]
        ]
        made = [one for one in likely if one in page["made_while_loading"]]
        change = {"quantization": made[0]} if made and not checkpoint else {}
        return f"{' or '.join(shown)} runs there", change
    starts = [rule["first"] for rule in page["formats"][method]["rules"] if "first" in rule and within(compute, rule)]
    later = [one for one in starts if (parse(one) or ()) > asked.release]
    if later:
        return f"{page['title']} {later[0]} and newer run it there", {}
    for engine, other in engines().items():
        ready = newest(engine, asked.device)
        rules = other["formats"][method]["rules"]
        if engine != asked.run.engine and ready and first(rules, release_of(ready, other), compute):
            return f"{other['title']} {ready} runs it there", {}
    return "take a 16 bit checkpoint", {}

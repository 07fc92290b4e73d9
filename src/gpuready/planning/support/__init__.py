"""What an engine's release runs on a card, and the nearest that is possible where a wish is not.

Every rule is data with its source: catalog/engine_support.yaml, engine_models.yaml and gpus.yaml.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuready import catalog
from gpuready.planning.memory.run import Device, Run
from gpuready.planning.memory.versions import Version, parse
from gpuready.planning.model.facts import ModelFacts
from gpuready.planning.support import formats, parallelism
from gpuready.planning.support.capability import Asked, Objection, OnCard, engines, first, newest, release_of, within

__all__ = ["Choices", "Objection", "choices", "flag", "last_driver", "newest", "objections", "on_card"]


@dataclass(frozen=True)
class Choices:
    """What a search may choose from; each list has the engine's own default first."""

    dtype: str
    """What the model computes in on this card: its own type, or the nearest that the card has."""
    kv_dtypes: tuple[str, ...]
    """auto: the type that the model computes in."""
    quantizations: tuple[str, ...]
    """Formats that the engine can make of 16 bit weights while it loads; none where they are quantized already."""
    attention_backend: str | None
    """What the engine chooses by itself on this card; None: not known."""
    notes: tuple[str, ...] = ()
    """What the operator should know of what runs, in sentences."""


def objections(
    model: ModelFacts, device: Device, run: Run, *, driver: str | None = None, cuda: str | None = None
) -> list[Objection]:
    """Return everything of a run that the card, the engine's release, the driver or the stack's CUDA does not allow.

    `driver` and `cuda` are those of the server (580.95.05, 12.8); None: not asked. Where the engine does not run on the
    card at all, that is the only objection.
    """
    page = engines().get(run.engine)
    if page is None:
        why = "there is no such engine"
        return [Objection("engine", f"engine {run.engine[:40]!r}", why, f"known are {', '.join(engines())}")]
    asked = Asked(page, device, run, model)
    return list(_card(asked)) or [
        *_architecture(asked),
        *formats.dtype(asked),
        *formats.quantization(asked),
        *formats.kv_dtype(asked),
        *parallelism.split(asked),
        *parallelism.host(asked, driver, cuda),
    ]


def choices(model: ModelFacts, device: Device, engine: str, version: str) -> Choices:
    """Return what a search may choose for a model on a card.

    Raises:
        KeyError: when there is no such engine.
    """
    page = engines()[engine]
    asked = Asked(page, device, Run(engine, version), model)
    dtype, notes = formats.computed_in(asked)
    latent = any(group.kind == "latent" for group in model.groups)
    backend = asked.first(page["attention_latent" if latent else "attention"])
    if backend and "note" in backend:
        notes.append(asked.note(backend["note"]))
    method = formats.weight_only(asked)
    if method:
        notes.append(asked.note("weight_only", format=method))
    card = asked.first(page["cards"])
    if card and "best" in card:
        notes.append(asked.note("old", version=card["best"]))
    made = () if model.quantization else page["made_while_loading"]
    return Choices(
        dtype,
        ("auto", *(kind["names"][0] for kind in page["kv_dtypes"].values() if asked.first(kind["rules"]))),
        tuple(one for one in made if asked.first(page["formats"][one]["rules"])),
        str(backend["name"]) if backend else None,
        tuple(notes),
    )


def flag(engine: str, version: str, setting: str) -> str | None:
    """Return how a release spells a setting, given by its name in `Run`; None where it has none for it.

    Raises:
        KeyError: when there is no such engine.
    """
    page = engines()[engine]
    rule = first(page["flags"].get(setting, ()), release_of(version, page), None)
    return str(rule["name"]) if rule else None


def on_card(device: Device, run: Run, *, cuda: str | None = None, made_for: str | None = None) -> list[Objection]:
    """Return why an engine's release does not run on a card, or not with a server's CUDA, whatever the model.

    `cuda` is the server's (12.8); `made_for` the CUDA of the wheels, where they are not those of PyPI.
    """
    asked = OnCard(engines()[run.engine], device, run)
    return list(_card(asked)) or list(parallelism.host(asked, None, cuda, made_for))


def last_driver(device: Device | None) -> int | None:
    """Return the last driver branch that knows a card; None where every newer one does, or the card is unknown."""
    rules = catalog.load("engine_support")["last_drivers"] if device else []
    found = [int(rule["branch"]) for rule in rules if device and within(device.compute, rule)]
    return min(found, default=None)


def _card(asked: OnCard) -> Iterator[Objection]:
    what = f"{asked.engine} on {asked.card}"
    if asked.device.vendor != "nvidia":
        yield Objection("card", what, "gpuready serves NVIDIA cards alone", "take another card")
    elif asked.first(asked.page["cards"]) is None:
        said = asked.first(asked.page["card_needs"]) or {"needs": "no release of it is known to run there"}
        own = newest(asked.run.engine, asked.device)
        other = said.get("engine", "vllm")
        ready = own or newest(other, asked.device)
        title = asked.page["title"] if own else engines()[other]["title"]
        yield Objection("card", what, said["needs"], f"{title} {ready} runs on it" if ready else "take another card")


def _architecture(asked: Asked) -> Iterator[Objection]:
    engine, name = asked.run.engine, asked.model.architecture
    if not name or _holds(engine, asked.release, name):
        return
    title = asked.page["title"]
    here = [text for text, release in _reads(engine) if _holds(engine, release, name)]
    later = [text for text in here if (parse(text) or ()) > asked.release]
    others = [
        page["title"] for key, page in engines().items() if key != engine and _holds(key, release_of("", page), name)
    ]
    if here:
        nearest = f"{title} {later[0]} has it" if later else f"{title} {here[-1]} had it"
    else:
        nearest = f"{' and '.join(others)} {'has' if len(others) == 1 else 'have'} it" if others else "no engine has it"
    why = "its registry of models does not hold this architecture"
    yield Objection("architecture", f"{name[:80]} with {asked.engine}", why, nearest)


def _holds(engine: str, release: Version, architecture: str) -> bool:
    """Return whether a release has an architecture; between two that were read, what the later one has counts too."""
    reads, name = _registry(engine), architecture.casefold()
    known = [held for read, held in reads if read <= release][-1:]
    if not any(read[:3] == release[:3] for read, _ in reads):
        known += [held for read, held in reads if read > release][:1]
    return any(name in held for held in known)


def _reads(engine: str) -> list[tuple[str, Version]]:
    pages = catalog.load("engine_models")["engines"][engine]
    return [(one["release"], release_of(one["release"], engines()[engine])) for one in pages]


@functools.cache
def _registry(engine: str) -> tuple[tuple[Version, frozenset[str]], ...]:
    pages = catalog.load("engine_models")["engines"][engine]
    found = []
    held: frozenset[str] = frozenset()
    for (_, release), one in zip(_reads(engine), pages, strict=True):
        held = (held | _names(one, "added")) - _names(one, "removed")
        found.append((release, held))
    return tuple(found)


def _names(page: Mapping[str, list[str]], key: str) -> frozenset[str]:
    return frozenset(name.casefold() for name in page.get(key, ()))

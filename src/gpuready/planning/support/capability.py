"""The rules of catalog/engine_support.yaml, and what is asked of them: one model, one card, one engine's release."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuready import catalog
from gpuready.planning.memory.device import cards
from gpuready.planning.memory.run import Device, Run
from gpuready.planning.memory.versions import Version, parse
from gpuready.planning.model.facts import ModelFacts

_NUMBER = re.compile(r"\d+(?:\.\d+){1,3}(?:\.?(?:rc|post|dev|a|b)\d+)?")

Rule = Mapping[str, Any]


@dataclass(frozen=True)
class Objection:
    """Something asked for that does not run."""

    code: str
    """engine, card, dtype, quantization, kv_dtype, architecture, tp, pp, ep, dcp, mig, driver or cuda."""
    what: str
    """What is asked for, with card and engine."""
    why: str
    nearest: str
    """What would run instead; empty where nothing like it does."""
    change: Mapping[str, Any] = field(default_factory=dict)
    """The nearest as fields of `Run`, where it is a matter of those alone."""

    @property
    def sentence(self) -> str:
        """Return all of it as one sentence."""
        return f"{self.what}: {self.why}" + (f"; {self.nearest}" if self.nearest else "")


@dataclass(frozen=True)
class OnCard:
    """One release of an engine on one card."""

    page: Mapping[str, Any]
    """What the catalog says of the engine."""
    device: Device
    run: Run

    @property
    def release(self) -> Version:
        """Return the release, the newest that was read where the text names none."""
        return release_of(self.run.version, self.page)

    @property
    def engine(self) -> str:
        """Return engine and release for people."""
        return f"{self.page['title']} {self.run.version[:40]}"

    @property
    def card(self) -> str:
        """Return the card for people, with its profile where it is a slice."""
        key, _, profile = self.device.name.partition(":")
        title = str(cards()[key]["title"]) if key in cards() else key
        return f"{title} ({profile})" if profile else title

    def first(self, rules: Iterable[Rule]) -> Rule | None:
        """Return the first of the rules that holds for this release on this card."""
        return first(rules, self.release, self.device.compute)


@dataclass(frozen=True)
class Asked(OnCard):
    """One model on one card with one release of an engine."""

    model: ModelFacts

    def note(self, name: str, **values: str) -> str:
        """Return one of the catalog's sentences with its gaps filled."""
        said = {"title": self.page["title"], "card": self.card, "model_type": self.model.model_type}
        return str(catalog.load("engine_support")["notes"][name]).format(**{**said, **values})


def engines() -> Mapping[str, Mapping[str, Any]]:
    """Return what the catalog says of each engine, by name."""
    found: Mapping[str, Mapping[str, Any]] = catalog.load("engine_support")["engines"]
    return found


def release_of(text: str, page: Mapping[str, Any]) -> Version:
    """Return the release that a text begins with (0.19.1, 0.8-0.9, 0.21+, 0.8.x); the newest where it names none."""
    match = _NUMBER.search(text)
    found = parse(match[0]) if match else None
    newest = parse(page["newest"])
    assert newest is not None  # noqa: S101 - our own file
    return found if found and found[0] < 1000 else newest


def first(rules: Iterable[Rule], release: Version, compute: float | None) -> Rule | None:
    """Return the first rule that holds for a release and a compute capability; None as capability: any."""
    for rule in rules:
        since, before = parse(rule.get("first", "")), parse(rule.get("before", ""))
        here = (since is None or release >= since) and (before is None or release < before)
        if here and (compute is None or within(compute, rule)):
            return rule
    return None


def within(compute: float, rule: Rule) -> bool:
    """Return whether a rule holds for a compute capability."""
    ends = rule.get("compute", (0,))
    return bool(compute >= ends[0] and (len(ends) == 1 or compute < ends[1]))


def newest(engine: str, device: Device) -> str | None:
    """Return the newest release of an engine that serves a card well; None where none runs on it."""
    page = engines().get(engine)
    rules = [rule for rule in page["cards"] if within(device.compute, rule)] if page else []
    if page is None or not rules or device.vendor != "nvidia":
        return None
    return str(rules[-1].get("best", page["newest"]))

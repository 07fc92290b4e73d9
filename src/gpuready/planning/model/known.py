"""Public models that the catalog knows by name, so that a plan needs no download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuready import catalog
from gpuready.planning.model.config import UnknownModel, read_facts
from gpuready.planning.model.facts import ModelFacts


@dataclass(frozen=True)
class Known:
    """What the catalog says of one model."""

    id: str
    config: Mapping[str, Any]
    weight_bytes: int | None
    """Bytes in the safetensors headers, where they were read; None: to be computed from the configuration."""
    source: str
    assumptions: tuple[str, ...] = ()


def _known(entry: Mapping[str, Any], *assumptions: str) -> Known:
    said = (*entry.get("assumptions", ()), *assumptions)
    return Known(entry["id"], entry["config"], entry.get("weight_bytes"), entry["source"], said)


def find(name: str, quantization: str | None = None) -> Known | None:  # noqa: ARG001
    """Return a model of the catalog by its id; None where there is none of that name."""
    models = catalog.load("models")["models"]
    for entry in models:
        if entry["id"] == name:
            return _known(entry)
    for entry in models:
        if entry["id"].lower() == name.lower():
            return _known(entry)
    return None


def facts(name: str, quantization: str | None = None) -> ModelFacts:
    """Return the sizes of a model of the catalog.

    Raises:
        UnknownModel: when the catalog has no model of that name.
    """
    known = find(name, quantization)
    if known is None:
        raise UnknownModel(f"the catalog has no model {name!r}")
    return read_facts(known.config, known.weight_bytes)

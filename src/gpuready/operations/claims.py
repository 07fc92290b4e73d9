"""What only one replica can hold: a port, a GPU; or one part of a GPU that several deployments divide among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuready.serving.files import as_json


@dataclass(frozen=True, order=True)
class Claim:
    """One thing that a replica needs for itself."""

    kind: str
    """GPU or port."""
    number: int
    division: str = ""
    """How a shared GPU is divided; empty where nobody else may hold it."""


def divided(deployments: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return deployments in which every replica on a shared GPU knows how that is divided: `division: {name: GiB}`."""
    gib = {
        (part["gpus"][0], one["name"]): part["shared_gib"]
        for one in deployments
        for part in one["replicas"]
        if part.get("shared_gib")
    }
    found = []
    for one in deployments:
        parts = [dict(part) for part in one["replicas"]]
        for part in parts:
            if part.get("shared_gib"):
                part["division"] = {name: size for (gpu, name), size in gib.items() if gpu == part["gpus"][0]}
        found.append({**one, "replicas": parts})
    return found


def of_part(part: Mapping[str, Any], gpus: Iterable[int] | None = None) -> set[Claim]:
    """Return what a replica's part of the plan claims, on the GPUs that are its own by now."""
    division = as_json(part["division"]) if part.get("division") else ""
    held = {Claim("GPU", gpu, division) for gpu in (part["gpus"] if gpus is None else gpus)}
    return held | {Claim("port", part["port"])}


def clash(wanted: set[Claim], held: set[Claim]) -> set[Claim]:
    """Return what of the wanted cannot be had beside what another replica holds.

    Two meet on a GPU only under one and the same division of it: under two different ones their parts may be more than
    there is.
    """
    return {one for one in wanted if any(_meet(one, other) for other in held)}


def _meet(one: Claim, other: Claim) -> bool:
    is_same = (one.kind, one.number) == (other.kind, other.number)
    return is_same and not (one.division and one.division == other.division)


def named(claims: set[Claim]) -> str:
    """Name claims in a sentence."""
    return " and ".join(f"its {one.kind} {one.number}" for one in sorted(claims))

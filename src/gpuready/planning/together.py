"""Finds how all deployments of a host run beside each other: on whole GPUs, on parts of shared ones, on MIG slices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuready import catalog
from gpuready.outcome import Failure, Refusal
from gpuready.planning import search, sharing
from gpuready.planning.deployment import named
from gpuready.planning.memory import device as cards
from gpuready.planning.memory.run import GIB, Device
from gpuready.planning.placement import Claim
from gpuready.planning.topology import Topology
from gpuready.planning.wish import Option, Place, Wish


def options(
    host: str,
    wishes: Mapping[str, Wish],
    claims: Mapping[str, Claim],
    card: Device,
    lie: Topology,
    facts: Mapping[str, Any],
) -> tuple[dict[str, Option], list[Failure]]:
    """Return the best way to run every wish, by its name and in the order of the wishes, and what is refused.

    The host's memory for KV that no longer fits on GPUs is given out in the order of the wishes.
    """
    found: dict[str, Option] = {}
    failures = _too_many_slices(host, wishes, claims, card, len(lie.nodes))
    left = _host_gib(facts)
    card = replace(card, nvlink=lie.widest > 1) if len(lie.nodes) > 1 else card
    for name, wish in wishes.items():
        claim = claims[name]
        if claim.shared is not None:
            continue
        at = _place(claim, card, lie, left)
        where = f"host {host}, deployment {name}"
        if at is None:
            said = cards.refusal(card.name, claim.profile)
            failures.append(Failure("plan.mig_profile", f"{where}, gpus.mig = {claim.profile!r}: {said}"))
            continue
        try:
            found[name] = search.best(wish, at)
        except Refusal as refusal:
            failures += named(where, wish, refusal.failures)
            continue
        if left is not None:
            left -= wish.kv_offload_gib * found[name].replicas
    shared, refused = _shared(host, wishes, claims, card)
    found |= shared
    return {name: found[name] for name in wishes if name in found}, failures + refused


def _place(claim: Claim, card: Device, lie: Topology, host_gib: float | None) -> Place | None:
    if claim.profile:
        slice_ = cards.device(card.name, claim.profile)
        return Place(slice_, claim.count, host_gib=host_gib) if slice_ else None
    return Place(card, claim.count, island=lie.widest, host_gib=host_gib)


def _host_gib(facts: Mapping[str, Any]) -> float | None:
    """Return the host's memory that KV caches may have in all; None where it is not known."""
    ram = facts.get("ram_bytes")
    return None if ram is None else float(catalog.load("planning")["host_part"]["part"]) * ram / GIB


def _shared(
    host: str, wishes: Mapping[str, Wish], claims: Mapping[str, Claim], card: Device
) -> tuple[dict[str, Option], list[Failure]]:
    """Return how deployments run that share GPUs, and what is refused."""
    groups: dict[int, list[Wish]] = {}
    for name, wish in wishes.items():
        gpu = claims[name].shared
        if gpu is not None:
            groups.setdefault(gpu, []).append(wish)
    found: dict[str, Option] = {}
    failures: list[Failure] = []
    for gpu, group in groups.items():
        options, refused = sharing.divide(group, card)
        found |= {option.wish.name: option for option in options}
        for name, said in refused.items():
            names = " and ".join(wish.name for wish in group)
            where = f"host {host}, deployment {name}" if name else f"host {host}, GPU {gpu}, shared by {names}"
            failures += named(where, next((wish for wish in group if wish.name == name), group[0]), said)
    return found, failures


def start_key(option: Option) -> tuple[float, str]:
    """Return a key by which deployments are sorted to start: all that have GPUs alone, then the largest part first."""
    part = option.place.shared_gib
    return (-math.inf, "") if part is None else (-part, option.wish.name)


def start_after(options: Mapping[str, Option], claims: Mapping[str, Claim]) -> dict[str, list[str]]:
    """Return for every deployment on a shared GPU those that start before it, the largest part first."""
    return {
        name: [
            other for other in _beside(name, options, claims) if start_key(options[other]) < start_key(options[name])
        ]
        for name in options
        if claims[name].shared is not None
    }


def noted(
    name: str, parts: Sequence[Mapping[str, Any]], options: Mapping[str, Option], claims: Mapping[str, Claim]
) -> list[dict[str, Any]]:
    """Return a deployment's replicas with how their GPU is divided among all that share it, or their MIG profile."""
    claim = claims[name]
    if claim.shared is not None:
        shares = {other: options[other].place.shared_gib for other in _beside(name, options, claims)}
        return [{**part, "shares": shares} for part in parts]
    return [{**part, "mig": claim.profile} if claim.profile else dict(part) for part in parts]


def _beside(name: str, options: Mapping[str, Option], claims: Mapping[str, Claim]) -> list[str]:
    """Return all deployments on the shared GPU of one, itself too, in the order in which they start."""
    group = [other for other in options if claims[other].shared == claims[name].shared]
    return sorted(group, key=lambda other: start_key(options[other]))


def _too_many_slices(
    host: str, wishes: Mapping[str, Wish], claims: Mapping[str, Claim], card: Device, count: int
) -> list[Failure]:
    """Check that the slices could be cut from the GPUs that no other deployment has."""
    profiles = cards.profiles(card.name)
    wanted = [
        replace(claims[name], profile=slice_.name.partition(":")[2])
        for name in wishes
        if claims[name].profile and (slice_ := cards.device(card.name, claims[name].profile))
    ]
    if not wanted:
        return []
    whole = max(profiles.values(), key=lambda one: one["size"])
    parts = {
        kind: sum(claim.count * profiles[claim.profile][kind] for claim in wanted) / whole[kind]
        for kind in ("size", "slices")
    }
    by_profile = [claim.count / profiles[claim.profile]["count"] for claim in wanted]
    needed = max(-(-part // 1) for part in (*parts.values(), *by_profile))
    shared = {claim.shared for claim in claims.values() if claim.shared is not None}
    free = count - sum(claim.count for claim in claims.values() if claim.whole) - len(shared)
    if needed <= free:
        return []
    listed = ", ".join(f"{claim.name} {claim.count} x {claim.profile}" for claim in wanted)
    what = f"host {host}: deployments ask for slices of at least {needed:.0f} GPUs ({listed})"
    why = f"{free} of {count} GPUs are left for slices"
    return [Failure("plan.too_many_slices", what, why, "lower count, or move a deployment to another server")]

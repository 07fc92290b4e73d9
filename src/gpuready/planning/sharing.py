"""Divides one GPU among deployments that share it, and says in which order they start.

Fixed costs come first: context, weights, activations, CUDA graphs and headroom of each. What is left is KV cache, and
each gets of it in proportion to what its workload needs. Every engine is given its KV cache in bytes, because a
fraction of the card would count what the others hold; the one with the largest part starts first, while most is free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuready.outcome import Failure, Refusal
from gpuready.planning import search
from gpuready.planning.memory.run import Device
from gpuready.planning.search import sizing
from gpuready.planning.wish import Option, Place, Wish

_CENT = 100


@dataclass(frozen=True)
class Need:
    """What one deployment needs of a shared GPU, in GiB."""

    wish: Wish
    fixed: float
    """All but the KV cache, with headroom, at most."""
    least: float
    """KV cache for one request of the greatest length."""
    wanted: float
    """KV cache for all requests that are wanted at once."""


def divide(wishes: Sequence[Wish], device: Device) -> tuple[list[Option], dict[str, list[Failure]]]:
    """Return how every wish runs on its part of one GPU, in the order in which they start, and what is refused.

    What is refused stands under the wish's name; under an empty name where only all together do not fit.
    """
    needs: list[Need] = []
    failures: dict[str, list[Failure]] = {}
    for wish in wishes:
        try:
            needs.append(need(wish, device))
        except Refusal as refusal:
            failures[wish.name] = list(refusal.failures)
    if failures:
        return [], failures
    left = device.total_gib - sum(one.fixed + one.least for one in needs)
    if left < 0:
        return [], {"": [_too_much(needs, device, -left)]}
    beyond = [one.wanted - one.least for one in needs]
    options = []
    for one, more in zip(needs, beyond, strict=True):
        share = more / sum(beyond) if sum(beyond) else 1 / len(needs)
        part = math.floor((one.fixed + one.least + left * share) * _CENT) / _CENT
        try:
            options.append(search.best(one.wish, Place(device, 1, shared_gib=part)))
        except Refusal as refusal:
            failures[one.wish.name] = list(refusal.failures)
    if failures:
        return [], failures
    return sorted(options, key=lambda option: (-(option.place.shared_gib or 0.0), option.wish.name)), {}


def need(wish: Wish, device: Device) -> Need:
    """Return what a wish needs of a GPU that it shares.

    Raises:
        Refusal: where it does not run on that GPU even alone.
    """
    alone = search.best(wish, Place(device, 1))
    load = sizing.Sizer(wish, alone.place).load(alone.run)
    fixed = sizing.taken(alone.estimate)
    wanted = load.quantile(wish.workload.concurrency, wish.workload.preemption)
    # Engines keep a block for themselves, and explicit KV bytes are rounded down to a step.
    step = sizing.KV_STEP_GIB
    least = math.ceil(alone.estimate.request_gib * 1.01 / step) * step + step
    rule = replace(alone.place, shared_gib=fixed + max(least, wanted))
    return Need(wish, fixed + sizing.headroom_gib(wish, rule), least, max(least, wanted))


def _too_much(needs: Sequence[Need], device: Device, missing: float) -> Failure:
    listed = ", ".join(f"{one.wish.name} {one.fixed + one.least:.2f}" for one in needs)
    what = f"{len(needs)} deployments do not fit together on one GPU"
    why = (
        f"with one request of the greatest length each they need {listed} = "
        f"{sum(one.fixed + one.least for one in needs):.2f} GiB, and {device.name} has {device.total_gib:.2f}"
    )
    largest = max(needs, key=lambda one: one.fixed + one.least).wish.name
    return Failure("plan.shared_memory", what, why, f"{missing:.2f} GiB are missing: give {largest} a GPU of its own")

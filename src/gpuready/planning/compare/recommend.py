"""Ranks what could serve a workload: card, engine, quantization, and whole GPUs, MIG slices or a shared GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuready.planning.compare import Row


@dataclass(frozen=True)
class Ranking:
    """What is recommended, best first, and what was left out."""

    rows: tuple[Row, ...]
    too_dear: int
    """Ways that would do, above the budget."""
    unpriced: int
    """Ways that would do, without a known price; with a budget they are left out."""
    impossible: tuple[Row, ...]
    """Ways that do not run, each with its refusal."""
    too_small: tuple[Row, ...]
    """Ways that run and serve fewer requests than wanted, most first."""


def rank(rows: Sequence[Row], wanted: int, budget: float | None) -> Ranking:
    """Order the rows that serve everything, the cheapest first; of one price, what changes no answers first.

    A row without a known price stands behind all that have one, the one with the least memory first: unknown is not
    free. Of one card, shape, engine and quantization only the first is kept, so that eight GPUs are not recommended
    where two do.
    """
    runs = [one for one in rows if one.requests is not None]
    enough = [one for one in runs if (one.requests or 0) >= wanted]
    kept = enough
    too_dear = unpriced = 0
    if budget is not None:
        kept = [one for one in enough if one.price and one.price.high <= budget]
        unpriced = sum(1 for one in enough if one.price is None)
        too_dear = len(enough) - len(kept) - unpriced
    best: dict[tuple[str, ...], Row] = {}
    for one in sorted(kept, key=_order):
        best.setdefault((one.model, one.card, one.shape, one.engine, one.quantization), one)
    small = sorted((one for one in runs if one not in enough), key=lambda one: (-(one.requests or 0), _order(one)))
    return Ranking(
        tuple(sorted(best.values(), key=_order)),
        too_dear,
        unpriced,
        tuple(one for one in rows if one.requests is None),
        tuple(small),
    )


def _order(one: Row) -> tuple[bool, float, bool, int, int, str, str]:
    return (
        one.price is None,
        one.price.high if one.price else one.memory_gib,
        bool(one.lossy),
        one.count,
        -(one.possible or 0),
        one.card,
        one.engine,
    )

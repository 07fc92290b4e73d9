"""Fits the measured constants to recorded runs, and to all but one source's, to see what they are worth on others.

A constant of the catalog that names what it is seen by (`fit`: `by` a figure, `on` these kinds of runs alone) is moved
until one run's figure would be exact; the median over all runs is its value. The figures are close to linear in the
constants, so one step tells it for every run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuready.planning.accuracy.records import Case
from gpuready.planning.memory.estimate import ENGINES
from gpuready.planning.memory.run import Estimate
from gpuready.planning.memory.versions import ConstantSet

_STEP = 0.01
_LEAST_SLOPE = 1e-6


def _free_before_load(case: Case) -> float | None:
    seen = case.observed
    if "avail_mem_before_load_gb" in seen:
        return seen["avail_mem_before_load_gb"]
    if "avail_mem_after_load_gb" in seen and "weights_gib" in seen:
        return seen["avail_mem_after_load_gb"] + seen["weights_gib"]
    return None


FIGURES: Mapping[str, tuple[Callable[[Estimate], float], Callable[[Case], float | None]]] = {
    "weights": (lambda estimate: estimate.weights.value, lambda case: case.observed.get("weights_gib")),
    "activation": (lambda estimate: estimate.activation.value, lambda case: case.observed.get("activation_peak_gib")),
    "non_torch": (lambda estimate: estimate.non_torch.value, lambda case: case.observed.get("non_torch_gib")),
    "graphs": (lambda estimate: estimate.graphs.value, lambda case: case.observed.get("cuda_graph_gib")),
    "kv_cache": (lambda estimate: estimate.kv.value, lambda case: case.observed.get("kv_cache_gib")),
    "free_before_load": (
        lambda estimate: estimate.total_gib - estimate.outside.value + estimate.graphs.value,
        _free_before_load,
    ),
}
"""What a constant may be seen by: what is predicted, and what was observed of it."""


@dataclass(frozen=True)
class Wanted:
    """What one constant would have to be for one run's figure to be exact."""

    constant: str
    """Its place in the catalog, e.g. "sglang 0.4.0 context_gib.one"."""
    entry: Mapping[str, Any]
    case: Case
    value: float


def constants(values: Mapping[str, Any], *path: str) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Return the constants of a set that are fitted, with their places."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            if "fit" in value:
                yield (*path, key), value
            else:
                yield from constants(value, *path, key)


def wanted(cases: Iterable[Case]) -> list[Wanted]:
    """Return what every run would make of every constant that it depends on."""
    found = []
    moved: dict[tuple[int, int], ConstantSet] = {}
    for case in cases:
        engine = ENGINES[case.engine]
        as_they_are: dict[bool, Estimate] = {}
        for path, entry in constants(case.constants.values):
            rule = entry["fit"]
            predicted, seen = FIGURES[rule["by"]]
            figure = seen(case) if case.family in rule.get("on", (case.family,)) else None
            if figure is None:
                continue
            # What a record says was free would hide the constant that stands for it.
            hidden = rule["by"] == "free_before_load"
            device = replace(case.device, free_gib=None) if hidden else case.device
            place = (id(case.constants), id(entry))
            if place not in moved:
                moved[place] = with_constants(case.constants, [(entry, {**entry, "value": entry["value"] + _STEP})])
            if hidden not in as_they_are:
                as_they_are[hidden] = engine.estimate(case.model, device, case.run, case.constants)
            base = as_they_are[hidden]
            other = engine.estimate(case.model, device, case.run, moved[place])
            slope = (predicted(other) - predicted(base)) / _STEP
            if abs(slope) > _LEAST_SLOPE:
                name = f"{case.engine} {'.'.join(path)}"
                found.append(Wanted(name, entry, case, entry["value"] + (figure - predicted(base)) / slope))
    return found


Changes = tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...]
"""Constants, each with the one that takes its place."""


def fitted(wishes: Sequence[Wanted]) -> Changes:
    """Return every constant with the one that the runs make of it: the median of what each would make of it."""
    return tuple(
        (group[0].entry, _as(group[0].entry, statistics.median(w.value for w in group))) for group in _by(wishes)
    )


def fitted_without_each(wishes: Sequence[Wanted], source: Callable[[Case], str]) -> Callable[[str], Changes]:
    """Return what gives, for the name of a source, what `fitted` makes of the wishes of all other sources."""
    groups = []
    for group in _by(wishes):
        ordered = sorted(group, key=lambda wish: wish.value)
        places: dict[str, list[int]] = {}
        for index, wish in enumerate(ordered):
            places.setdefault(source(wish.case), []).append(index)
        groups.append((group[0].entry, [wish.value for wish in ordered], places))

    def without(name: str) -> Changes:
        left = [(entry, values, places.get(name, [])) for entry, values, places in groups]
        return tuple((entry, _as(entry, _median(values, out))) for entry, values, out in left if len(out) < len(values))

    return without


def _median(values: Sequence[float], out: Sequence[int]) -> float:
    """Return the median of ordered values without those at the ordered places `out`, of which some remain."""

    def at(rank: int) -> float:
        for place in out:
            if place > rank:
                break
            rank += 1
        return values[rank]

    count = len(values) - len(out)
    return (at((count - 1) // 2) + at(count // 2)) / 2


def _by(wishes: Sequence[Wanted]) -> Iterable[list[Wanted]]:
    """Return the wishes of each constant."""
    by_entry: dict[int, list[Wanted]] = {}
    for wish in wishes:
        by_entry.setdefault(id(wish.entry), []).append(wish)
    return by_entry.values()


def _as(entry: Mapping[str, Any], value: float) -> Mapping[str, Any]:
    return {**entry, "value": value}


def with_constants(held: ConstantSet, changes: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> ConstantSet:
    """Return a set in which constants are replaced by others."""

    def changed(value: Any) -> Any:
        for entry, other in changes:
            if value is entry:
                return other
        return {key: changed(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value

    return replace(held, values=changed(held.values))

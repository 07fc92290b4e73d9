"""Compares what the planner predicts with what engines reported: recorded runs in, errors and bands out.

Every record is answered. One that cannot be predicted is not judged, and its reason says in a sentence what is missing.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuready.planning.accuracy import calibration
from gpuready.planning.accuracy.records import ENGINES as ENGINE_NAMES
from gpuready.planning.accuracy.records import Case, NotJudged, identity, read, text
from gpuready.planning.memory.estimate import ENGINES
from gpuready.planning.memory.run import GIB, Estimate, Range
from gpuready.planning.memory.versions import ConstantSet

FAMILIES = ("dense_16bit", "dense_other", "moe", "vision", "hybrid")
"""Kinds of runs with an accuracy of their own; dense models in 16 bits, and those quantized or in 32, apart."""
PARTS = ("vllm 0.19.0", "vllm, other versions", "sglang", "tensorrt_llm")
FIGURES = ("weights", "activation_peak", "kv_cache", "kv_tokens", "bytes_per_token", "request")
_PRINTED_GIB = 0.005
"""Engines print GiB with two decimals."""
_BETWEEN_GPUS = 0.005
"""By how much the KV caches of one run's GPUs may differ, as a part."""
_SHORTER = 2
"""How many times shorter than the model's a length is taken that a record does not say, at the most."""
_DIGITS = 5


@dataclass(frozen=True)
class Judgement:
    """What was predicted of one run, beside what was observed."""

    case: Case
    estimate: Estimate
    observed: Mapping[str, float]
    """By the names of `FIGURES`; GiB, tokens, bytes."""
    predicted: Mapping[str, float]

    def error(self, figure: str) -> float | None:
        """Return by which part the prediction is too high; None where nothing was observed."""
        seen = self.observed.get(figure)
        return self.predicted[figure] / seen - 1 if seen is not None and seen > 0 else None

    @functools.cached_property
    def kv(self) -> str:
        """Return by which figure the KV cache is judged: tokens, else GiB; empty where neither was observed.

        Tokens that follow from a length which the record does not say are judged only where no GiB were printed.
        """
        figures = ("kv_cache", "kv_tokens") if _follows_from_unsaid_length(self.case) else ("kv_tokens", "kv_cache")
        return next((figure for figure in figures if self.observed.get(figure, 0) > 0), "")

    @property
    def band(self) -> tuple[float, float]:
        """Return the band of the figure by which the KV cache is judged, of the tokens where none was observed."""
        band = self.estimate.kv if self.kv == "kv_cache" else self.estimate.kv_tokens
        return band.low, band.high

    @property
    def width(self) -> float | None:
        """Return half of the band's width as a part of the prediction; None where no KV cache is expected."""
        value = self.predicted["kv_cache" if self.kv == "kv_cache" else "kv_tokens"]
        return (self.band[1] - self.band[0]) / 2 / value if value > 0 else None

    @property
    def inside(self) -> bool | None:
        """Return whether what was observed lies in the band, to the precision to which engines print it."""
        if not self.kv:
            return None
        slack = _PRINTED_GIB if self.kv == "kv_cache" else self.estimate.block_tokens
        return self.band[0] - slack <= self.observed[self.kv] <= self.band[1] + slack

    @property
    def bytes_exact(self) -> bool | None:
        """Return whether the bytes per token are those observed, to the precision to which engines print GiB.

        The GPUs of one run differ by a little, and the GiB are printed by one, the tokens counted on the one that holds
        the fewest. None with pipeline stages, which hold layers of their own, and where the tokens cannot be compared.
        """
        error = self.error("bytes_per_token")
        if error is None or self.case.run.pp > 1 or self.kv != "kv_tokens":
            return None
        printed = 2 * _PRINTED_GIB if "k_size_gb" in self.case.observed else _PRINTED_GIB
        precision = printed / self.observed["kv_cache"] + self.estimate.block_tokens / self.observed["kv_tokens"]
        return abs(error) <= max(precision, _BETWEEN_GPUS if self.case.run.tp > 1 else 0)

    @property
    def fits(self) -> bool:
        """Return whether the engine is expected to start.

        vLLM refuses a length that does not fit, where the record says which; SGLang and TensorRT-LLM start with any
        cache and refuse requests.
        """
        if self.case.engine == "vllm" and self.case.run.max_model_len is not None:
            return self.estimate.fits
        return self.estimate.kv_tokens.value > 0

    @property
    def fits_right(self) -> bool | None:
        """Return whether that is what happened; None where the record does not say."""
        outcome = self.case.outcome
        if outcome.startswith("ok"):
            return self.fits
        return not self.fits if outcome.startswith("fail") else None


def run(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return predictions, bands and errors of every record, and their summary.

    `records`: in the layout of the project's recorded runs (docs/planner-accuracy.md); anything else is answered too.
    """
    rows, judged = [], []
    for record in records:
        try:
            one = judge(read(record))
        except NotJudged as refusal:
            rows.append(_refused(record, str(refusal)))
            continue
        except (ArithmeticError, LookupError, TypeError, ValueError) as failure:
            # One record that the arithmetic was not made for must not hide the others.
            rows.append(_refused(record, f"the arithmetic failed on this record: {failure!r}"))
            continue
        judged.append(one)
        rows.append({**_row(one), "id": identity(record)})
    return {"records": rows, "summary": _summary(rows, judged)}


def judge(case: Case, constants: ConstantSet | None = None) -> Judgement:
    """Return what is predicted of one case, with its own constants or with others."""
    constants = constants or case.constants
    estimate = ENGINES[case.engine].estimate(case.model, case.device, case.run, constants)
    if _follows_from_unsaid_length(case):
        # The length may have been shorter than the model's.
        shorter = replace(case.run, max_model_len=max(1, case.model.context_tokens // _SHORTER))
        other = ENGINES[case.engine].estimate(case.model, case.device, shorter, constants).kv_tokens
        low, high = min(estimate.kv_tokens.low, other.low), max(estimate.kv_tokens.high, other.high)
        estimate = replace(estimate, kv_tokens=Range(estimate.kv_tokens.value, low, high))
    tokens = estimate.kv_tokens.value
    per_token = estimate.kv.value * GIB / tokens if tokens > 0 else estimate.bytes_per_token
    predicted = {
        "weights": estimate.weights.value,
        "activation_peak": estimate.activation.value,
        "kv_cache": estimate.kv.value,
        "kv_tokens": tokens,
        "bytes_per_token": per_token,
        "request": estimate.request_gib,
    }
    return Judgement(case, estimate, observed(case), predicted)


def _follows_from_unsaid_length(case: Case) -> bool:
    """Return whether the tokens that the engine prints follow from a length that the record does not say."""
    return case.engine == "vllm" and case.family == "hybrid" and case.run.max_model_len is None


def observed(case: Case) -> dict[str, float]:
    """Return what the engine reported, by the names of `FIGURES`; SGLang prints K and V, and what was free, apart."""
    seen = case.observed
    found = {
        "weights": seen.get("weights_gib"),
        "activation_peak": seen.get("activation_peak_gib"),
        "kv_cache": seen.get("kv_cache_gib"),
        "kv_tokens": seen.get("kv_tokens"),
        "request": seen.get("kv_needed_gib"),
    }
    if found["weights"] is None and {"avail_mem_before_load_gb", "avail_mem_after_load_gb"} <= set(seen):
        found["weights"] = seen["avail_mem_before_load_gb"] - seen["avail_mem_after_load_gb"]
    if found["kv_cache"] is None and {"k_size_gb", "v_size_gb"} <= set(seen):
        found["kv_cache"] = seen["k_size_gb"] + seen["v_size_gb"]
    if (found["kv_cache"] or 0) > 0 and (found["kv_tokens"] or 0) > 0:
        found["bytes_per_token"] = (found["kv_cache"] or 0) * GIB / (found["kv_tokens"] or 1)
    return {figure: value for figure, value in found.items() if value is not None}


def _refused(record: Any, reason: str) -> dict[str, Any]:
    empty = {"weights_gib": None, "activation_peak_gib": None, "kv_cache_gib": None, "kv_tokens": None, "fits": None}
    known = record if isinstance(record, Mapping) else {}
    engine = text(known, "engine")
    return {
        "id": identity(record),
        "engine": ENGINE_NAMES.get(engine.lower(), engine) or None,
        "engine_version": text(known, "engine_version") or None,
        "model": text(known, "model") or None,
        "gpu": text(known, "gpu") or None,
        "family": None,
        "predicted": empty,
        "band": None,
        "error": None,
        "observed": None,
        "judged": False,
        "judged_by": None,
        "reason": reason,
    }


def _row(one: Judgement) -> dict[str, Any]:
    estimate, case = one.estimate, one.case
    return {
        "id": case.id,
        "engine": case.engine,
        "engine_version": case.version,
        "model": case.name,
        "gpu": case.device.name,
        "family": case.family,
        "predicted": {
            "weights_gib": round(estimate.weights.value, 3),
            "activation_peak_gib": round(estimate.activation.value, 3),
            "kv_cache_gib": round(estimate.kv.value, 3),
            "kv_tokens": int(estimate.kv_tokens.value),
            "fits": one.fits,
        },
        "band": {
            "kv_cache_gib": [round(estimate.kv.low, 3), round(estimate.kv.high, 3)],
            "kv_tokens": [int(estimate.kv_tokens.low), int(estimate.kv_tokens.high)],
            "half_width_percent": _percent(one.width),
            "inside": one.inside,
        },
        "error": {figure: _rounded(one.error(figure)) for figure in FIGURES} | {"fits_right": one.fits_right},
        "observed": {figure: _rounded(one.observed.get(figure)) for figure in FIGURES},
        "judged": True,
        "judged_by": one.kv or None,
        "reason": _reason(one),
    }


def _reason(one: Judgement) -> str:
    """Return what was compared, with what the record does not say and the constants that were used."""
    names = {"weights": "weights", "kv_tokens": "KV tokens", "kv_cache": "KV GiB"}
    compared = [names[figure] for figure in ("weights", one.kv) if figure and one.error(figure) is not None]
    if one.fits_right is not None:
        compared.append("whether it starts")
    told = f"compared: {', '.join(compared)}" if compared else "nothing was observed that could be compared"
    return "; ".join([f"{told}, with the constants of {one.estimate.constants}", *one.case.assumed])


def _summary(rows: Sequence[Mapping[str, Any]], judged: Sequence[Judgement]) -> dict[str, Any]:
    versions = sorted({(row["engine"] or "", row["engine_version"] or "") for row in rows})
    told = []
    for engine, version in versions:
        among = [row for row in rows if (row["engine"] or "", row["engine_version"] or "") == (engine, version)]
        ours = [one for one in judged if (one.case.engine, one.case.version) == (engine, version)]
        told.append({"engine": engine or None, "version": version or None, "rows": len(among), **_statistics(ours)})
    wishes = calibration.wanted(one.case for one in judged)
    reasons = [row["reason"] for row in rows if not row["judged"]]
    return {
        "rows": len(rows),
        "judged": len(judged),
        "not_judged": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "versions": told,
        "classes": _classes(judged),
        "leave_one_source_out": {
            "by_source": _classes(_left_out(judged, wishes, lambda case: case.source)),
            "by_repository": _classes(_left_out(judged, wishes, lambda case: case.repository)),
        },
    }


def _classes(judged: Sequence[Judgement]) -> list[dict[str, Any]]:
    """Return the errors of each kind of runs: vLLM 0.19.0 and its other versions apart."""
    groups = [
        (part, family, [one for one in judged if one.case.part == part and one.case.family == family])
        for part in PARTS
        for family in FAMILIES
    ]
    return [{"part": part, "family": family, **_statistics(ones)} for part, family, ones in groups if ones]


def _left_out(
    judged: Sequence[Judgement], wishes: Sequence[calibration.Wanted], source: Callable[[Case], str]
) -> list[Judgement]:
    """Return every case judged with constants that were fitted without its source."""
    by_source: dict[str, list[Case]] = {}
    for one in judged:
        by_source.setdefault(source(one.case), []).append(one.case)
    changes_without = calibration.fitted_without_each(wishes, source)
    found: list[Judgement] = []
    sets: dict[tuple[int, tuple[tuple[int, float], ...]], ConstantSet] = {}
    for name in sorted(by_source):
        changes = changes_without(name)
        for case in by_source[name]:
            # Most sources leave a median as it is, so most runs have one of few sets.
            key = (id(case.constants), tuple((id(entry), other["value"]) for entry, other in changes))
            if key not in sets:
                sets[key] = calibration.with_constants(case.constants, changes)
            found.append(judge(case, sets[key]))
    return found


def _statistics(ones: Sequence[Judgement]) -> dict[str, Any]:
    """Return medians and ninth tenths of the errors, how often the band holds, and whether starts were told."""
    kv = [abs(error) for one in ones if one.kv and (error := one.error(one.kv)) is not None]
    widths = [one.width for one in ones if one.kv and one.width is not None]
    inside = [one.inside for one in ones if one.inside is not None]
    exact = [one.bytes_exact for one in ones if one.bytes_exact is not None]
    right = [(one.case.id, one.fits_right) for one in ones if one.fits_right is not None]
    return {
        "judged": len(ones),
        "weights": _spread([abs(error) for one in ones if (error := one.error("weights")) is not None]),
        "activation_peak": _spread([abs(error) for one in ones if (error := one.error("activation_peak")) is not None]),
        "kv": _spread(kv),
        "bytes_per_token": {"rows": len(exact), "exact": sum(exact)},
        "band": {
            "rows": len(inside),
            "inside_percent": _percent(sum(inside) / len(inside)) if inside else None,
            "widest_percent": _percent(max(widths)) if widths else None,
        },
        "fits": {
            "right": sum(1 for _, told in right if told),
            "wrong": sum(1 for _, told in right if not told),
            "wrong_ids": [identity for identity, told in right if not told],
        },
    }


def _spread(errors: Sequence[float]) -> dict[str, Any]:
    """Return how many errors there are, their median and the error that nine of ten stay below, in percent."""
    ordered = sorted(errors)
    if not ordered:
        return {"rows": 0, "median_percent": None, "p90_percent": None}
    ninth = ordered[max(0, math.ceil(0.9 * len(ordered)) - 1)]
    return {
        "rows": len(ordered),
        "median_percent": _percent(statistics.median(ordered)),
        "p90_percent": _percent(ninth),
    }


def _percent(part: float | None) -> float | None:
    return None if part is None else round(part * 100, 2)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


HEAD = (
    "runs",
    "kind",
    "judged",
    "weights",
    "9 of 10",
    "KV cache",
    "9 of 10",
    "in the band",
    "widest band",
    "starts told right",
)
"""What the columns of `table` hold; errors are medians, and what nine of ten runs stay below."""


def table(classes: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the errors of each kind of runs, from the summary's `classes`, as texts; `HEAD` names the columns."""

    def shown(value: float | None, sign: str = "") -> str:
        return "-" if value is None else f"{sign}{value:.2f} %"

    return [
        (
            one["part"],
            one["family"],
            str(one["judged"]),
            shown(one["weights"]["median_percent"]),
            shown(one["weights"]["p90_percent"]),
            shown(one["kv"]["median_percent"]),
            shown(one["kv"]["p90_percent"]),
            shown(one["band"]["inside_percent"]),
            shown(one["band"]["widest_percent"], "±"),
            f"{one['fits']['right']} of {one['fits']['right'] + one['fits']['wrong']}",
        )
        for one in classes
    ]


def points(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float, str]]]:
    """Return by engine what was observed and predicted, with the run's id: tokens of the KV cache, both above 0.

    Only of runs that are judged by them: where tokens follow from a length that nobody said, they say nothing.
    """
    found: dict[str, list[tuple[float, float, str]]] = {}
    for row in rows:
        seen = row["observed"]["kv_tokens"] if row["judged_by"] == "kv_tokens" else None
        predicted = row["predicted"]["kv_tokens"]
        if seen and predicted:
            found.setdefault(row["engine"], []).append((seen, predicted, str(row["id"])))
    return found

"""What the benchmark's numbers mean: formulas over the rows of a level, without a clock or a network.

The definitions are the field's, as in vLLM's `vllm bench serve` (vllm/benchmarks/serve.py and
vllm/benchmarks/lib/endpoint_request_func.py); where one differs, its docstring says so. Times are seconds of one
monotonic clock, names that end in `_ms` are milliseconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PERCENTILES = (50, 90, 95, 99)
PERCENTILE_METHOD = (
    "linear interpolation between the two nearest sorted samples (type 7 of Hyndman and Fan 1996, NumPy's default); "
    "p needs at least 100 / (100 - p) samples, or it would be little else than the maximum"
)
MIN_WINDOW_SECONDS = 1.0


@dataclass(frozen=True)
class Problem:
    """Why a request gave no measurement. `kind` is for counting, `message` for people."""

    kind: str
    message: str


@dataclass
class Row:
    """One measured request, as it is written to requests.jsonl: enough to compute every number of its level again."""

    index: int
    sent: float
    """When it was handed to the HTTP client, so that waiting for a connection is the server's answer time too."""
    ended: float
    """When its last chunk with a choice came, `usage` and `[DONE]` not counted; of a failed one, the moment of that."""
    chunks: list[float] = field(default_factory=list)
    """When each chunk with generated text came: content or reasoning, never an empty or role-only delta."""
    reasoning_chunks: int = 0
    prompt_tokens: int | None = None
    """From the server's `usage`; None where it said nothing. Never counted from chunks."""
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the server took from its prefix cache, where it says so."""
    finish_reason: str | None = None
    reused_connection: bool | None = None
    problem: Problem | None = None

    @property
    def ttft(self) -> float | None:
        """Time to first token, s: first chunk with text minus send; `vllm bench serve` takes any first chunk."""
        return self.chunks[0] - self.sent if self.chunks else None

    @property
    def e2el(self) -> float:
        """End-to-end latency, s: end of the answer minus send."""
        return self.ended - self.sent

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies, s: the times between chunks with text. A chunk may hold several tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.chunks)]

    @property
    def tpot(self) -> float | None:
        """Time per output token, s: (end-to-end - TTFT) / (output tokens - 1), for more than one token only."""
        if self.ttft is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, page: dict[str, Any]) -> Row:
        """Read a row of requests.jsonl."""
        known = {name: page[name] for name in cls.__dataclass_fields__ if name in page}
        if known.get("problem"):
            known["problem"] = Problem(**known["problem"])
        return cls(**known)


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """Return a percentile of sorted samples by PERCENTILE_METHOD; None where there are too few for it."""
    if len(ordered) * (100 - percent) < 100:
        return None
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    if low + 1 >= len(ordered):
        return ordered[low]
    return ordered[low] + (ordered[low + 1] - ordered[low]) * (place - low)


def summary(samples: Iterable[float], scale: float = 1.0) -> dict[str, Any]:
    """Return count, mean, extremes and percentiles; what cannot be said is None, and `missing` says why."""
    ordered = sorted(sample * scale for sample in samples)
    page: dict[str, Any] = {"samples": len(ordered), "mean": None, "min": None, "max": None}
    if ordered:
        page |= {
            "mean": round(math.fsum(ordered) / len(ordered), 4),
            "min": round(ordered[0], 4),
            "max": round(ordered[-1], 4),
        }
    missing = {}
    for percent in PERCENTILES:
        value = percentile(ordered, percent)
        page[f"p{percent}"] = None if value is None else round(value, 4)
        if value is None:
            needed = math.ceil(100 / (100 - percent))
            missing[f"p{percent}"] = f"{len(ordered)} samples, p{percent} needs {needed}"
    return page | {"missing": missing}


@dataclass(frozen=True)
class Window:
    """The steady part of a level: from the moment when all its requests are in flight until one place stays empty."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Return its length; an empty window has none."""
        return max(0.0, self.end - self.start)

    def share(self, begin: float, end: float) -> float:
        """Return which part of a time span lies in the window, 0 to 1."""
        if end <= begin:
            return 1.0 if self.start <= begin <= self.end else 0.0
        return max(0.0, min(end, self.end) - max(begin, self.start)) / (end - begin)


def steady_window(concurrency: int, rows: Sequence[Row], first_idle: float) -> Window | None:
    """Return the window from the last of the first `concurrency` sends to `first_idle`; None where it never began."""
    sent = sorted(row.sent for row in rows)
    return Window(sent[concurrency - 1], first_idle) if len(sent) >= concurrency else None


def tokens_in(window: Window, row: Row) -> float:
    """Return the output tokens that came within the window: the request's, spread evenly over its chunks."""
    if not row.chunks or not row.output_tokens:
        return 0.0
    inside = sum(window.start <= chunk <= window.end for chunk in row.chunks)
    return row.output_tokens * inside / len(row.chunks)


def _rates(good: Sequence[Row], span: Window, known: bool) -> dict[str, float | None]:
    """Return requests (each by the part of its time in the span) and output tokens, per second of the span."""
    requests = math.fsum(span.share(row.sent, row.ended) for row in good)
    tokens = math.fsum(tokens_in(span, row) for row in good)
    return {
        "seconds": round(span.seconds, 4),
        "requests_per_second": round(requests / span.seconds, 4),
        "output_tokens_per_second": round(tokens / span.seconds, 3) if known else None,
    }


_NO_RATES: dict[str, float | None] = {
    "seconds": None,
    "requests_per_second": None,
    "output_tokens_per_second": None,
}


def throughput(
    concurrency: int, rows: Sequence[Row], first_idle: float | None, interrupted: bool
) -> dict[str, dict[str, Any]]:
    """Return the rates of successful requests: `steady` over the window, `whole` from first send to last end.

    `whole` is how `vllm bench serve` counts; it holds the tail, in which fewer requests are in flight. A rate that
    cannot be known is None, and `why` says so.
    """
    good = [row for row in rows if row.problem is None]
    known = all(row.output_tokens is not None for row in good)
    why = "" if known else "the server did not report the usage of every request"
    if not good:
        nothing = {**_NO_RATES, "why": "no request succeeded"}
        return {"steady": nothing, "whole": dict(nothing)}
    span = Window(min(row.sent for row in rows), max(row.ended for row in rows))
    whole = _rates(good, span, known) if span.seconds > 0 else dict(_NO_RATES)
    window = None if first_idle is None else steady_window(concurrency, rows, first_idle)
    if interrupted or window is None:
        steady = {**_NO_RATES, "why": "the level was interrupted"}
    elif window.seconds < MIN_WINDOW_SECONDS:
        steady = {
            **_NO_RATES,
            "seconds": round(window.seconds, 4),
            "why": f"all {concurrency} requests were in flight for only {window.seconds:.2f} s; at least "
            f"{MIN_WINDOW_SECONDS:g} s is needed, so ask for more requests or more output tokens",
        }
    else:
        steady = {**_rates(good, window, known), "why": why}
    return {"steady": steady, "whole": {**whole, "why": why}}


def errors(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the failed requests by kind, the most frequent first, each with the first message of its kind."""
    counted: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.problem:
            entry = counted.setdefault(
                row.problem.kind, {"kind": row.problem.kind, "count": 0, "first": row.problem.message}
            )
            entry["count"] += 1
    return sorted(counted.values(), key=lambda entry: (-entry["count"], entry["kind"]))


def latencies(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return the latency summaries of the successful rows; failed ones are never mixed in."""
    good = [row for row in rows if row.problem is None]
    return {
        "ttft_ms": summary((row.ttft for row in good if row.ttft is not None), 1000),
        "itl_ms": summary((gap for row in good for gap in row.gaps), 1000),
        "tpot_ms": summary((row.tpot for row in good if row.tpot is not None), 1000),
        "e2el_ms": summary((row.e2el for row in good), 1000),
    }


def _together(rows: Sequence[Row]) -> float | None:
    """Return the share of gaps that are none: the chunk came in the same piece of the stream as the one before it."""
    gaps = [gap for row in rows for gap in row.gaps]
    return round(sum(gap == 0 for gap in gaps) / len(gaps), 4) if gaps else None


def tokens(rows: Sequence[Row], wanted_output: int) -> dict[str, Any]:
    """Return what the server says about tokens, over the successful rows; what it does not say is None, not 0."""
    good = [row for row in rows if row.problem is None]
    outputs = [row.output_tokens for row in good if row.output_tokens is not None]
    prompts = [row.prompt_tokens for row in good if row.prompt_tokens is not None]
    cached = [row.cached_tokens for row in good if row.cached_tokens is not None]
    chunks = sum(len(row.chunks) for row in good if row.output_tokens is not None)
    return {
        "requests_without_usage": len(good) - len(outputs),
        "output_total": sum(outputs) if outputs and len(outputs) == len(good) else None,
        "output_as_asked": sum(count == wanted_output for count in outputs) if outputs else None,
        "output_min": min(outputs, default=None),
        "output_max": max(outputs, default=None),
        "prompt_mean": round(math.fsum(prompts) / len(prompts), 2) if prompts else None,
        "prompt_min": min(prompts, default=None),
        "prompt_max": max(prompts, default=None),
        "cached_share": round(sum(cached) / sum(prompts), 4) if cached and len(cached) == len(prompts) else None,
        "chunks": sum(len(row.chunks) for row in good),
        "chunks_together_share": _together(good),
        "reasoning_chunks": sum(row.reasoning_chunks for row in good),
        "tokens_per_chunk": round(sum(outputs) / chunks, 3) if chunks else None,
    }

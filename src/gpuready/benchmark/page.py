"""The result as one HTML page that needs nothing else: no network, no script. It is made from the document alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from gpuready.rendering.page import environment
from gpuready.rendering.plots import Plot, Point, Series, number, svg

UNKNOWN = "unknown"
_SHOWN_PERCENTILES = (("p50", 1), ("p95", 2), ("p99", 3))
LATENCIES = (
    ("ttft_ms", "Time to first token"),
    ("itl_ms", "Inter-token latency"),
    ("tpot_ms", "Time per output token"),
    ("e2el_ms", "End to end"),
)


def html(document: Mapping[str, Any]) -> str:
    """Return the page of a document. Every text in it is escaped: a model's name is the server's, not ours."""
    pages = environment("gpuready.benchmark")
    pages.filters |= {"number": _number, "duration": _duration}
    return pages.get_template("page.html.j2").render(
        document=document,
        levels=document["levels"],
        latencies=LATENCIES,
        cards=cards(document["levels"]),
        # What plots() returns is built of escaped texts.
        plots=[Markup(svg(plot)) for plot in plots(document["levels"])],  # noqa: S704
        settings=_settings(document),
    )


def cards(levels: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the few numbers that stand first, each with what it is."""
    found = []
    rates = [(rate, level["concurrency"]) for level in levels if (rate := _rate(level)) is not None]
    if rates:
        best, where = max(rates)
        unknown = ", ".join(str(level["concurrency"]) for level in levels if _rate(level) is None)
        what = f"most output, at concurrency {where}" + (f"; {UNKNOWN} at {unknown}" if unknown else "")
        found.append({"value": number(best), "unit": "tokens/s", "what": what})
    for name, what in (("ttft_ms", "to the first token"), ("tpot_ms", "for each token after it")):
        known = [(level[name]["p50"], level["concurrency"]) for level in levels if level[name]["p50"] is not None]
        if known:
            first, last = known[0], known[-1]
            spread = number(first[0]) + (f" \u2013 {number(last[0])}" if len(known) > 1 else "")
            where = f"{first[1]}" + (f" and {last[1]}" if len(known) > 1 else "")
            found.append({"value": spread, "unit": "ms", "what": f"{what} (p50), at concurrency {where}"})
    failed = sum(level["requests"]["failed"] for level in levels)
    ended = failed + sum(level["requests"]["succeeded"] for level in levels)
    found.append({"value": str(failed), "unit": f"of {ended}", "what": "requests failed"})
    return found


def plots(levels: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Return the plots of a document's levels."""
    marks = [level["concurrency"] for level in levels]
    return [
        Plot(
            "Output throughput",
            "concurrency (requests in flight)",
            "tokens/s, all requests together",
            [Series("tokens/s", _over(levels, _rate, "tokens/s"))],
            marks,
        ),
        _latency_plot("Time to first token", "ttft_ms", levels, marks),
        _latency_plot("Inter-token latency", "itl_ms", levels, marks),
        Plot(
            "What more load costs each user",
            "tokens/s of one request (p50)",
            "tokens/s, all requests together",
            [Series("concurrency", _trade(levels), annotate=True)],
        ),
    ]


def _latency_plot(title: str, name: str, levels: Sequence[Mapping[str, Any]], marks: Sequence[int]) -> Plot:
    series = []
    for percentile, colour in _SHOWN_PERCENTILES:

        def pick(level: Mapping[str, Any], percentile: str = percentile) -> float | None:
            value: float | None = level[name][percentile]
            return value

        points = _over(levels, pick, f"ms {percentile}")
        known = any(point.y is not None for point in points)
        series.append(Series(percentile if known else f"{percentile}: too few samples", points, colour))
    return Plot(title, "concurrency (requests in flight)", "ms", series, marks)


def _rate(level: Mapping[str, Any]) -> float | None:
    value: float | None = level["throughput"]["steady"]["output_tokens_per_second"]
    return value


def _over(
    levels: Sequence[Mapping[str, Any]], pick: Callable[[Mapping[str, Any]], float | None], unit: str
) -> list[Point]:
    found = []
    for level in levels:
        value, at = pick(level), level["concurrency"]
        found.append(Point(at, value, "" if value is None else f"concurrency {at}: {number(value)} {unit}"))
    return found


def _trade(levels: Sequence[Mapping[str, Any]]) -> list[Point]:
    found = []
    for level in levels:
        total, pace = _rate(level), level["tpot_ms"]["p50"]
        if total is not None and pace:
            mine, at = 1000 / pace, level["concurrency"]
            label = f"{at} in flight: {number(mine)} tokens/s each, {number(total)} together"
            found.append(Point(mine, total, label))
    return found


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else number(value)


def _duration(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{number(seconds)} s"


def _settings(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a reader needs to measure the same again."""
    asked, work, server, client = (document[name] for name in ("arguments", "workload", "server", "client"))
    rows = [
        ("Server", server["url"]),
        ("Engine's version", server["version"] or f"{UNKNOWN} (the gateway does not tell it)"),
        ("Model", document["model"]),
        ("Longest context", f"{server['max_model_len']} tokens" if server["max_model_len"] else UNKNOWN),
        ("Began, ended (UTC)", f"{document['started_at']}, {document['ended_at'] or UNKNOWN}"),
        ("Concurrency", ", ".join(map(str, asked["concurrency"]))),
        ("Requests of a level", str(asked["requests"] or "20, or 5 times the level where that is more")),
        ("Asked for", f"{work['prompt_tokens_wanted']} prompt tokens, {work['output_tokens_wanted']} output tokens"),
        ("Fixed length of answers", "ignore_eos" if work["ignore_eos"] else "no: the server refused ignore_eos"),
        ("Prompts", f"{work['words_per_prompt']} random words each, unique, from seed {asked['seed']}"),
        ("Time-out", f"{asked['timeout_seconds']:g} s for a whole request"),
        ("Measured with", f"gpuready {client['gpuready']}, aiohttp {client['aiohttp']}, Python {client['python']}"),
        ("Measured from", client["system"]),
    ]
    return rows + ([("Note", asked["note"])] if asked["note"] else [])

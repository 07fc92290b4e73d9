"""The benchmark's definitions, against values worked out by hand."""

from __future__ import annotations

import pytest

from gpuready.benchmark import measures
from gpuready.benchmark.measures import Problem, Row, Window


def row(sent: float = 0.0, chunks: tuple[float, ...] = (), ended: float = 0.0, **more: object) -> Row:
    return Row(index=0, sent=sent, ended=ended, chunks=list(chunks), **more)  # type: ignore[arg-type]


def test_times_of_one_request() -> None:
    # Sent at 10; chunks 0.5, 0.6 and 0.9 s later; the last, without text, at 11.1; nine tokens in three chunks.
    one = row(10.0, (10.5, 10.6, 10.9), 11.1, output_tokens=9)
    assert one.ttft == pytest.approx(0.5)
    assert one.gaps == pytest.approx([0.1, 0.3])
    assert one.e2el == pytest.approx(1.1)
    # (1.1 - 0.5) / (9 - 1)
    assert one.tpot == pytest.approx(0.075)


@pytest.mark.parametrize("output_tokens", [None, 0, 1])
def test_time_per_output_token_needs_more_than_one_known_token(output_tokens: int | None) -> None:
    assert row(0, (1.0, 2.0), 3.0, output_tokens=output_tokens).tpot is None


def test_no_text_is_no_time_to_first_token() -> None:
    assert row(0, (), 3.0, output_tokens=5).ttft is None
    assert row(0, (), 3.0, output_tokens=5).tpot is None


def test_percentiles_interpolate_between_the_nearest_samples() -> None:
    ordered = [float(value) for value in range(1, 101)]
    # (n - 1) * p: places 49.5, 89.1, 94.05 and 98.01 of the samples 1 to 100.
    assert measures.percentile(ordered, 50) == pytest.approx(50.5)
    assert measures.percentile(ordered, 90) == pytest.approx(90.1)
    assert measures.percentile(ordered, 95) == pytest.approx(95.05)
    assert measures.percentile(ordered, 99) == pytest.approx(99.01)


@pytest.mark.parametrize(("percent", "needed"), [(50, 2), (90, 10), (95, 20), (99, 100)])
def test_a_percentile_of_too_few_samples_is_unknown_and_says_why(percent: int, needed: int) -> None:
    few = measures.summary([1.0] * (needed - 1))
    assert few[f"p{percent}"] is None
    assert few["missing"][f"p{percent}"] == f"{needed - 1} samples, p{percent} needs {needed}"
    enough = measures.summary([1.0] * needed)
    assert enough[f"p{percent}"] == 1.0
    assert f"p{percent}" not in enough["missing"]


def test_summary_of_nothing_is_unknown_not_zero() -> None:
    page = measures.summary([])
    assert page["samples"] == 0
    assert [page[key] for key in ("mean", "min", "max", "p50", "p99")] == [None] * 5


def test_summary_scales_and_orders() -> None:
    page = measures.summary([0.003, 0.001, 0.002], 1000)
    assert (page["samples"], page["mean"], page["min"], page["max"], page["p50"]) == (3, 2.0, 1.0, 3.0, 2.0)


def test_failed_requests_are_counted_by_kind_and_kept_out_of_latencies() -> None:
    rows = [
        row(0, (1.0, 2.0), 3.0, output_tokens=2),
        row(0, (50.0,), 99.0, problem=Problem("cut", "first")),
        row(0, (), 99.0, problem=Problem("cut", "second")),
        row(0, (), 99.0, problem=Problem("http_429", "slow down")),
    ]
    assert measures.errors(rows) == [
        {"kind": "cut", "count": 2, "first": "first"},
        {"kind": "http_429", "count": 1, "first": "slow down"},
    ]
    found = measures.latencies(rows)
    assert found["e2el_ms"]["max"] == 3000.0
    assert found["ttft_ms"]["samples"] == 1
    assert found["itl_ms"]["samples"] == 1


def test_the_window_is_from_the_last_first_send_to_the_first_idle_place() -> None:
    rows = [row(0.0, (), 4.0), row(0.1, (), 5.0), row(4.0, (), 8.0)]
    assert measures.steady_window(2, rows, 5.0) == Window(0.1, 5.0)
    assert measures.steady_window(4, rows, 5.0) is None


def test_steady_rates_by_hand() -> None:
    # Two places, three requests of 4 s and 8 tokens in four chunks; the window is 0 to 4 (the second place then idles).
    rows = [
        row(0.0, (1.0, 2.0, 3.0, 4.0), 4.0, output_tokens=8),
        row(0.0, (1.0, 2.0, 3.0, 4.0), 4.0, output_tokens=8),
        row(4.0, (5.0, 6.0, 7.0, 8.0), 8.0, output_tokens=8),
    ]
    found = measures.throughput(2, rows, 4.0, interrupted=False)
    # Two requests and 16 tokens in 4 s; the third belongs to the tail.
    assert found["steady"] == {"seconds": 4.0, "requests_per_second": 0.5, "output_tokens_per_second": 4.0, "why": ""}
    assert found["whole"] == {"seconds": 8.0, "requests_per_second": 0.375, "output_tokens_per_second": 3.0, "why": ""}


def test_a_request_counts_by_its_part_in_the_window() -> None:
    # The window is 0 to 3: the second request (2 to 6) lies in it for a quarter, with one of its four chunks.
    rows = [
        row(0.0, (1.0, 2.0), 2.0, output_tokens=2),
        row(0.0, (1.0, 2.0), 3.0, output_tokens=2),
        row(2.0, (2.5, 4.0, 5.0, 6.0), 6.0, output_tokens=4),
    ]
    steady = measures.throughput(2, rows, 3.0, interrupted=False)["steady"]
    assert steady["requests_per_second"] == pytest.approx((1 + 1 + 0.25) / 3, abs=1e-4)
    assert steady["output_tokens_per_second"] == pytest.approx((2 + 2 + 1) / 3, abs=1e-3)


def test_without_usage_the_token_rate_is_unknown() -> None:
    rows = [row(0.0, (1.0,), 2.0, output_tokens=3), row(2.0, (3.0,), 4.0)]
    found = measures.throughput(1, rows, 4.0, interrupted=False)
    for span in found.values():
        assert span["output_tokens_per_second"] is None
        assert span["why"] == "the server did not report the usage of every request"
        assert span["requests_per_second"] == 0.5


def test_too_short_a_window_gives_no_rate() -> None:
    steady = measures.throughput(1, [row(0.0, (0.1,), 0.4, output_tokens=3)], 0.4, interrupted=False)["steady"]
    assert steady["output_tokens_per_second"] is None
    assert steady["requests_per_second"] is None
    assert "in flight for only 0.40 s; at least 1 s is needed" in steady["why"]


def test_an_interrupted_level_and_one_without_success_give_no_rate() -> None:
    good = [row(0.0, (1.0,), 2.0, output_tokens=3)]
    assert measures.throughput(1, good, None, interrupted=True)["steady"]["why"] == "the level was interrupted"
    bad = [row(0.0, (), 2.0, problem=Problem("cut", ""))]
    for span in measures.throughput(1, bad, 2.0, interrupted=False).values():
        assert span == {
            "seconds": None,
            "requests_per_second": None,
            "output_tokens_per_second": None,
            "why": "no request succeeded",
        }


def test_tokens_come_from_usage_alone() -> None:
    rows = [
        row(0, (1, 2), 3, output_tokens=6, prompt_tokens=10, cached_tokens=0),
        row(0, (1, 2, 3), 3, output_tokens=4, prompt_tokens=30, cached_tokens=10, reasoning_chunks=2),
    ]
    found = measures.tokens(rows, 4)
    assert (found["output_total"], found["output_as_asked"], found["output_min"], found["output_max"]) == (10, 1, 4, 6)
    assert (found["prompt_mean"], found["prompt_min"], found["prompt_max"]) == (20.0, 10, 30)
    assert (found["tokens_per_chunk"], found["cached_share"], found["reasoning_chunks"]) == (2.0, 0.25, 2)
    assert found["requests_without_usage"] == 0
    assert found["chunks_together_share"] == 0.0


def test_chunks_that_come_together_are_counted() -> None:
    # Of four gaps one is none.
    rows = [row(0, (1, 2, 2, 3), 3), row(0, (1, 2), 3), row(0, (1, 1, 1), 3, problem=Problem("cut", ""))]
    assert measures.tokens(rows, 4)["chunks_together_share"] == 0.25
    assert measures.tokens([row(0, (1,), 3)], 4)["chunks_together_share"] is None


def test_tokens_without_usage_are_unknown_not_zero() -> None:
    found = measures.tokens([row(0, (1, 2), 3), row(0, (1, 2), 3, output_tokens=4)], 4)
    assert found["requests_without_usage"] == 1
    assert found["output_total"] is None
    assert found["prompt_mean"] is None
    assert found["cached_share"] is None
    # Of the one request that has both.
    assert found["tokens_per_chunk"] == 2.0
    assert measures.tokens([row(0, (1, 2), 3)], 4)["tokens_per_chunk"] is None


def test_rows_are_the_same_after_writing_and_reading() -> None:
    one = row(0.25, (0.5, 0.75), 1.5, output_tokens=9, problem=Problem("cut", "why"))
    assert Row.from_dict(one.as_dict()) == one

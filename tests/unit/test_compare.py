"""Several ways side by side, what they cost, and in which order they are recommended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.planning_options import DEVICE, option

from gpuready.cli import plan_table
from gpuready.cli.screen import Screen
from gpuready.planning.compare import Answer, Candidate, Rates, Row, compare
from gpuready.planning.compare.cost import Price, per_million
from gpuready.planning.compare.recommend import rank
from gpuready.planning.memory.run import Device
from gpuready.planning.wish import Place, Wish

T4 = Device("t4", 14.7, 7.5)
WISH = option().wish


def ask(_: Wish, place: Place) -> Answer:
    if place.device is T4:
        return None, "deployment chat does not fit: weights 14.99 of 14.70 GiB."
    return option(place=place, replicas=place.count), ""


def price(place: Place) -> Price | None:
    return Price(1000.0 * place.count, 1500.0 * place.count, "CNY", "list") if place.device is DEVICE else None


def rows(*places: Place, rates: Rates | None = None) -> list[Row]:
    return compare([Candidate(WISH, place) for place in places], ask, price, rates or {})


def test_a_row_says_what_runs_and_what_not() -> None:
    good, bad = rows(Place(DEVICE, 2), Place(T4, 1))
    assert (good.requests, good.possible, good.refusal) == (64, 240, "")
    # 455,904 tokens in each of two replicas.
    assert good.kv_tokens == 911_808
    assert good.memory_gib == 158.22
    assert (bad.requests, bad.kv_tokens, bad.cost_per_million) == (None, None, None)
    assert bad.refusal == "deployment chat does not fit: weights 14.99 of 14.70 GiB."


@pytest.mark.parametrize(
    ("place", "shape", "where"),
    [
        (Place(DEVICE, 2), "whole", "2 x H100 SXM5 80GB"),
        (Place(replace(DEVICE, name="h100-80gb-sxm:3g.40gb"), 1), "mig", "3g.40gb of H100 SXM5 80GB"),
        (Place(replace(DEVICE, name="h100-80gb-sxm:1g.10gb"), 3), "mig", "3 x 1g.10gb of H100 SXM5 80GB"),
        (Place(DEVICE, 1, shared_gib=79.11 / 3), "shared", "1/3 of H100 SXM5 80GB"),
    ],
)
def test_a_place_is_whole_or_a_slice_or_shared(place: Place, shape: str, where: str) -> None:
    (found,) = rows(place)
    assert (found.shape, found.where) == (shape, where)


def test_a_million_tokens_cost_what_a_month_costs_over_what_it_makes() -> None:
    # 1000 tokens/s for 30 days are 2592 million.
    assert per_million(Price(2592.0, 5184.0, "CNY"), 1000.0) == Price(1.0, 2.0, "CNY")
    (found,) = rows(Place(DEVICE, 1), rates={None: 500.0})
    assert found.cost_per_million is not None
    assert found.cost_per_million.low == pytest.approx(1000 / (500 * 2.592))


def test_a_rate_of_the_card_wins_and_without_a_rate_no_cost_is_said() -> None:
    (found,) = rows(Place(DEVICE, 1), rates={("h100-80gb-sxm", 1): 100.0, None: 500.0})
    assert found.tokens_per_second == 100.0
    (found,) = rows(Place(DEVICE, 1), rates={("t4", 1): 100.0})
    assert (found.tokens_per_second, found.cost_per_million) == (None, None)


def test_a_rate_of_a_card_says_nothing_of_a_slice_a_part_or_another_number() -> None:
    slice_ = replace(DEVICE, name="h100-80gb-sxm:3g.40gb")
    places = (Place(DEVICE, 1), Place(slice_, 1), Place(DEVICE, 1, shared_gib=20.0), Place(DEVICE, 8))
    found = rows(*places, rates={("h100-80gb-sxm", 1): 2400.0, ("h100-80gb-sxm:3g.40gb", 1): 900.0})
    assert [one.tokens_per_second for one in found] == [2400.0, 900.0, None, None]
    assert [one.cost_per_million is not None for one in found] == [True, False, False, False]


def test_without_a_price_no_cost_is_said() -> None:
    (found,) = rows(Place(replace(DEVICE, name="b200-180gb-sxm"), 1), rates={None: 1.0})
    assert (found.price, found.cost_per_million) == (None, None)


# ------------------------------------------------------------------------------------------------ ranking


def a_row(**change: Any) -> Row:
    (one,) = rows(Place(DEVICE, 1))
    return replace(one, **change)


def yuan(amount: float) -> Price:
    return Price(amount, amount, "CNY")


def test_the_cheapest_that_serves_everything_is_first_and_unknown_is_not_free() -> None:
    dear, cheap = a_row(card="a", price=yuan(900)), a_row(card="b", price=yuan(500))
    unpriced, small = a_row(card="c", price=None), a_row(card="d", price=yuan(1), requests=63)
    found = rank([dear, unpriced, cheap, small], 64, None)
    assert [one.card for one in found.rows] == ["b", "a", "c"]
    assert found.too_small == (small,)


def test_of_one_price_what_changes_no_answers_is_first() -> None:
    lossy, exact = a_row(card="a", price=yuan(5), lossy=("kv_dtype fp8",)), a_row(card="b", price=yuan(5))
    assert [one.card for one in rank([lossy, exact], 64, None).rows] == ["b", "a"]


def test_without_prices_the_least_memory_is_first() -> None:
    big, small = a_row(card="a", price=None, memory_gib=80.0), a_row(card="b", price=None, memory_gib=40.0)
    assert [one.card for one in rank([big, small], 64, None).rows] == ["b", "a"]


def test_of_one_card_and_shape_only_the_cheapest_is_kept() -> None:
    two, eight = a_row(count=2, price=yuan(2)), a_row(count=8, price=yuan(8))
    found = rank([eight, two, a_row(shape="mig", price=yuan(9))], 64, None)
    assert [(one.shape, one.count) for one in found.rows] == [("whole", 2), ("mig", 1)]


def test_a_budget_leaves_out_what_is_dearer_or_unpriced_and_counts_both() -> None:
    ways = [
        a_row(card="a", price=Price(400, 600, "CNY")),
        a_row(card="b", price=yuan(500)),
        a_row(card="c", price=None),
    ]
    found = rank(ways, 64, 550)
    assert [one.card for one in found.rows] == ["b"]
    assert (found.too_dear, found.unpriced) == (1, 1)


# -------------------------------------------------------------------------------------------------- table


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (900.0, 900.0, "900"),
        (2800.0, 2800.0, "2800"),
        (80000.0, 120000.0, "80-120k"),
        (12500.0, 12500.0, "12.5k"),
        (0.347, 0.52, "0.347-0.52"),
    ],
)
def test_amounts_are_short(low: float, high: float, text: str) -> None:
    assert plan_table.amount(Price(low, high, "CNY")) == text


def test_an_unknown_amount_is_said_so() -> None:
    assert plan_table.amount(None) == "unknown"


@pytest.mark.parametrize(
    ("count", "text"), [(850, "850"), (371_990, "372k"), (999_600, "1000k"), (1_043_840, "1.04M"), (None, "unknown")]
)
def test_tokens_are_short(count: int | None, text: str) -> None:
    assert plan_table.tokens(count) == text


def test_a_table_fits_and_says_once_what_is_the_same() -> None:
    other = Device("rtx-pro-6000-96gb", 94.97, 12.0)
    found = rows(Place(DEVICE, 1), Place(other, 8), rates={None: 1000.0})
    lines = plan_table.table(found, 64, Screen())
    assert " ".join(lines[:2]) == (
        "model meta-llama/Llama-3.1-8B-Instruct, engine vllm 0.19.1, weights as published, 64 of 64 requests at once"
    )
    assert max(map(len, lines)) <= 80
    assert lines[2].split() == ["card", "possible", "tokens", "a", "month", "a", "million"]
    assert lines[3].split()[-4:] == ["240", "456k", "1000-1500", "0.386-0.579"]
    assert lines[4].split()[-2:] == ["unknown", "unknown"]
    few = plan_table.table([replace(found[0], requests=32), found[1]], 64, Screen())
    assert few[1].split()[:4] == ["card", "of", "64", "possible"]


def test_what_may_change_answers_is_marked_and_explained() -> None:
    found = [a_row(lossy=("an 8 bit KV cache",), quantization="fp8"), a_row()]
    lines = [*plan_table.table(found, 64, Screen()), *plan_table.notes(found, Screen())]
    assert any("fp8*" in line for line in lines)
    assert "* may change answers: an 8 bit KV cache." in lines
    assert "a month, a million output tokens: CNY, list, not an offer." in lines
    shared = replace(a_row(), price=Price(1, 1, "CNY", "list, not an offer, 1 of 8 GPUs that are let together"))
    assert " ".join(plan_table.notes([shared], Screen())).endswith("is priced by its share.")


def test_what_does_not_run_says_why() -> None:
    lines = plan_table.refusals(rows(Place(DEVICE, 1), Place(T4, 1)), Screen(120))
    assert lines == [
        "  - 1 x T4 16GB, vllm 0.19.1, as published: deployment chat does not fit: weights 14.99 of 14.70 GiB."
    ]

"""Prices as they were read: by term, by share, and none where none is known."""

from __future__ import annotations

import pytest

from gpuready import catalog
from gpuready.planning.compare.cost import per_million
from gpuready.planning.compare.prices import price, terms
from gpuready.planning.memory.device import device
from gpuready.planning.wish import Place


def place(name: str, count: int = 1, mig: str | None = None, shared: float | None = None) -> Place:
    found = device(name, mig)
    assert found is not None
    return Place(found, count, shared)


@pytest.mark.parametrize(
    ("where", "term", "low", "high"),
    [
        (place("t4"), "month", 900, 900),
        (place("t4", 4), "year", 2880, 2880),
        (place("v100s"), "quarter", 1425, 1425),
        (place("a100-40gb"), "month", 2800, 2800),
        (place("a100-40gb-pcie"), "year", 2240, 2240),
        (place("a100-80gb", 8), "month", 25000, 40000),
        (place("a100-80gb", 2), "month", 6250, 10000),
        (place("h100", 8), "month", 80000, 120000),
        (place("h100", 8), "quarter", 76000, 114000),
        (place("h100", 8), "year", 68000, 102000),
        (place("h100", 16), "month", 160000, 240000),
        (place("h100", 2, "3g.40gb"), "month", 24000, 36000),
        (place("a100-40gb", 1, "3g.20gb"), "month", 1400, 1400),
        (place("t4", 1, None, 7.28), "month", 450, 450),
    ],
)
def test_price_by_card_count_and_term(where: Place, term: str, low: float, high: float) -> None:
    found = price(where, term)

    assert found is not None
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.currency == "CNY"
    assert "not an offer" in found.note


def test_a_price_says_of_what_kind_it_is() -> None:
    notes = {
        name: found.note
        for name, where in {
            "list": place("t4"),
            "share": place("h100", 1),
            "estimate": place("a100-80gb", 8),
            "slice": place("a100-40gb", 1, "3g.20gb"),
            "shared": place("t4", 1, None, 7.28),
        }.items()
        if (found := price(where))
    }

    assert notes == {
        "list": "a list price as read on 2026-11-30, not an offer",
        "share": "a list price as read on 2026-11-30, not an offer, 1 of 8 GPUs that are let together",
        "estimate": "an estimate as read on 2026-11-30, not an offer",
        "slice": "a list price as read on 2026-11-30, not an offer, 4 of 8 parts of the card",
        "shared": "a list price as read on 2026-11-30, not an offer, 7.3 of 14.6 GiB of a shared GPU",
    }


def test_unknown_is_not_free_and_a_term_is_one_of_three() -> None:
    assert price(place("b200")) is None
    assert price(place("rtx 4090")) is None
    assert terms() == ("month", "quarter", "year")
    with pytest.raises(ValueError, match="there is no term 'decade'; known are month, quarter, year"):
        price(place("t4"), "decade")


def test_cost_of_a_million_tokens() -> None:
    found = price(place("t4"))
    assert found is not None

    # 900 yuan for 30 days of 86,400 seconds at 500 tokens a second: 1,296 million tokens.
    assert per_million(found, 500).low == pytest.approx(900 / 1296)


def test_every_priced_card_is_in_the_catalog() -> None:
    page = catalog.load("prices")

    assert page["offer"] is False
    for one in page["prices"]:
        assert {*one["cards"]} <= {*catalog.load("gpus")["cards"]}
        assert 0 < one["low"] <= one["high"]

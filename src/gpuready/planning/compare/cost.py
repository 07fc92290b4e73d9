"""What a place costs a month, and what a million tokens cost at a rate that is known or declared."""

from __future__ import annotations

from dataclasses import dataclass

SECONDS_OF_MONTH = 30 * 24 * 3600


@dataclass(frozen=True)
class Price:
    """An amount between two ends, which are the same where one figure is known."""

    low: float
    high: float
    currency: str
    note: str = ""
    """Of what kind it is: a list price, an estimate."""

    def scaled(self, factor: float) -> Price:
        """Return the price of a part or a multiple."""
        return Price(self.low * factor, self.high * factor, self.currency, self.note)

    def text(self) -> str:
        """Return it for people."""
        ends = [f"{end:,.0f}" if end >= 100 else f"{end:.2f}" for end in dict.fromkeys((self.low, self.high))]
        return f"{' to '.join(ends)} {self.currency}"


def per_million(price: Price, tokens_per_second: float) -> Price:
    """Return what a million tokens cost when that many are made every second of a month of 30 days."""
    return price.scaled(1e6 / (tokens_per_second * SECONDS_OF_MONTH))

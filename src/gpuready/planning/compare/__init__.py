"""Several ways to serve one workload, side by side: what each serves, and what it costs where a price is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from gpuready.planning.compare.cost import Price, per_million
from gpuready.planning.memory.device import shown
from gpuready.planning.wish import Option, Place, Wish

Answer = tuple[Option | None, str]
"""The best option, or None and why there is none."""
Ask = Callable[[Wish, Place], Answer]
Prices = Callable[[Place], Price | None]
Rates = Mapping[tuple[str, int] | None, float]
"""Output tokens per second of so many cards or slices of one key together; None: of every place that has none."""


@dataclass(frozen=True)
class Candidate:
    """One way that is looked at."""

    wish: Wish
    place: Place
    quantization: str = ""
    """What the weights are in, as it was asked for; empty: as published."""


@dataclass(frozen=True)
class Row:
    """What one candidate came to; figures are None where it does not run, or is not known."""

    model: str
    card: str
    """Key of the catalog; a slice's with its profile behind a colon."""
    count: int
    shape: str
    """whole, mig or shared."""
    memory_gib: float
    """Memory of the place, of all its GPUs together."""
    part: float
    """Of a shared GPU: the part of its memory; 1 for all others."""
    engine: str
    version: str
    quantization: str
    requests: int | None
    """Requests at once that are served, of those wanted."""
    possible: int | None
    """Requests at once that the KV cache would hold."""
    kv_tokens: int | None
    """Tokens in the KV cache of all replicas together."""
    price: Price | None
    tokens_per_second: float | None
    cost_per_million: Price | None
    """Of output tokens, at that rate all month."""
    lossy: tuple[str, ...]
    refusal: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @property
    def where(self) -> str:
        """Return count and card for people; of a shared GPU its part."""
        if self.shape == "shared":
            part = Fraction(self.part).limit_denominator(20)
            return f"{part} of {shown(self.card)}"
        if self.shape == "mig" and self.count == 1:
            return shown(self.card)
        return f"{self.count} x {shown(self.card)}"

    @property
    def weights(self) -> str:
        """Return what the weights are in, for people."""
        return self.quantization or "as published"


def shape(place: Place) -> str:
    """Return whether a place is made of whole GPUs, MIG slices, or a part of a GPU that others share."""
    if place.shared_gib is not None:
        return "shared"
    return "mig" if ":" in place.device.name else "whole"


def _rate(place: Place, rates: Rates) -> float | None:
    """Return the rate of a place: one of a whole card says nothing of its slices, of a part, or of eight cards."""
    own = rates.get((place.device.name, place.count)) if place.shared_gib is None else None
    return own if own is not None else rates.get(None)


def row(candidate: Candidate, ask: Ask, prices: Prices, rates: Rates) -> Row:
    """Return what a candidate comes to."""
    wish, place = candidate.wish, candidate.place
    found, refusal = ask(wish, place)
    price = prices(place)
    rate = _rate(place, rates) if found else None
    own = wish.model.quantization.method if wish.model.quantization else ""
    made = (found.run.quantization if found else "") or ""
    return Row(
        model=wish.model_id,
        card=place.device.name,
        count=place.count,
        shape=shape(place),
        part=place.shared_gib / place.device.total_gib if place.shared_gib is not None else 1.0,
        memory_gib=round((place.shared_gib or place.device.total_gib) * place.count, 2),
        engine=wish.engine,
        version=wish.version,
        quantization=made or candidate.quantization or own,
        requests=found.concurrency if found else None,
        possible=found.possible if found else None,
        kv_tokens=int(found.estimate.kv_tokens.value) * found.replicas if found else None,
        price=price,
        tokens_per_second=rate,
        cost_per_million=per_million(price, rate) if price and rate else None,
        lossy=found.lossy if found else (),
        refusal=refusal,
    )


def impossible(model: str, place: Place, engine: str, version: str, quantization: str, refusal: str) -> Row:
    """Return the row of a candidate that cannot even be asked for."""
    return Row(
        model=model,
        card=place.device.name,
        count=place.count,
        shape=shape(place),
        part=1.0,
        memory_gib=round(place.device.total_gib * place.count, 2),
        engine=engine,
        version=version,
        quantization=quantization,
        requests=None,
        possible=None,
        kv_tokens=None,
        price=None,
        tokens_per_second=None,
        cost_per_million=None,
        lossy=(),
        refusal=refusal,
    )


def compare(candidates: Iterable[Candidate | Row], ask: Ask, prices: Prices, rates: Rates) -> list[Row]:
    """Return a row for each candidate, in their order; one that is impossible is a row already."""
    return [one if isinstance(one, Row) else row(one, ask, prices, rates) for one in candidates]

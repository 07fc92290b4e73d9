"""What a place costs a month, by catalog/prices.yaml: prices as they were read, never an offer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuready import catalog
from gpuready.planning.compare.cost import Price
from gpuready.planning.memory.device import profiles
from gpuready.planning.wish import Place


def price(place: Place, term: str = "month") -> Price | None:
    """Return what a place costs a month when a month, a quarter or a year is paid for; None where no price is known.

    Of a GPU that others share, the place's part of its memory is counted; of a machine that is let whole, the GPUs'
    part; of a slice without a price of its own, its part of the card's memory. The note says which.

    Raises:
        ValueError: when there is no such term.
    """
    page = catalog.load("prices")
    if term not in page["terms"]:
        raise ValueError(f"there is no term {term[:40]!r}; known are {', '.join(page['terms'])}")
    key, _, profile = place.device.name.partition(":")
    entries = [one for one in page["prices"] if key in one["cards"]]
    own = [one for one in entries if bool(one.get("mig")) == bool(profile)]
    if not own and not entries:
        return None
    entry = (own or entries)[0]
    factor = {**page["terms"], **entry.get("terms", {})}[term]
    parts = [_kind(page, entry)]
    share = place.count / entry["gpus"]
    if entry["gpus"] > 1 and place.count % entry["gpus"]:
        parts.append(f"{place.count} of {entry['gpus']} GPUs that are let together")
    if profile and not entry.get("mig"):
        slots = max(one["size"] for one in profiles(key).values())
        share *= profiles(key)[profile]["size"] / slots
        parts.append(f"{profiles(key)[profile]['size']} of {slots} parts of the card")
    if place.shared_gib is not None:
        share *= place.shared_gib / place.device.total_gib
        parts.append(f"{place.shared_gib:.1f} of {place.device.total_gib:.1f} GiB of a shared GPU")
    return Price(entry["low"], entry["high"], page["currency"], ", ".join(parts)).scaled(share * factor)


def terms() -> tuple[str, ...]:
    """Return the terms for which a price may be asked."""
    return tuple(catalog.load("prices")["terms"])


def _kind(page: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    kind = "an estimate" if entry.get("estimated") else "a list price"
    return f"{kind} as read on {page['read']}, not an offer"

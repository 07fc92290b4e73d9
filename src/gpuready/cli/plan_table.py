"""Rows of a comparison as a table that fits a terminal; a column in which all rows are the same is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpuready.cli.screen import Screen
from gpuready.planning.compare import Row
from gpuready.planning.compare.cost import Price

UNKNOWN = "unknown"
_TEXTS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("model", lambda row: row.model),
    ("card", lambda row: row.where),
    ("engine", lambda row: f"{row.engine} {row.version}"),
    ("weights", lambda row: row.weights),
)


def amount(price: Price | None) -> str:
    """Return an amount in as few letters as it needs: 2800, 80-120k, 1.3-1.9."""
    if price is None:
        return UNKNOWN
    thousands = price.low >= 10_000
    ends = [end / 1000 if thousands else end for end in dict.fromkeys((price.low, price.high))]
    return "-".join(f"{end:.3g}" if end < 1000 else f"{end:.0f}" for end in ends) + ("k" if thousands else "")


def tokens(count: int | None) -> str:
    """Return a number of tokens in few letters: 850, 372k, 1.04M."""
    if count is None:
        return UNKNOWN
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}" if count < 999.5 * size else f"{count / size:.0f}{letter}"
    return str(count)


def table(rows: Sequence[Row], wanted: int, screen: Screen, numbered: bool = False) -> list[str]:
    """Return the rows that run as a table, and what is the same for all of them above it."""
    same, texts = [], []
    for name, text in _TEXTS:
        if name != "card" and len({text(row) for row in rows}) == 1:
            same.append(f"{name} {text(rows[0])}")
        else:
            texts.append((name, text))
    figures: list[tuple[str, Callable[[Row], str]]] = [
        (f"of {wanted}", lambda row: f"{row.requests:,}"),
        ("possible", lambda row: f"{row.possible:,}"),
        ("tokens", lambda row: tokens(row.kv_tokens)),
        ("a month", lambda row: amount(row.price)),
    ]
    if all(row.requests == wanted for row in rows):
        same.append(f"{wanted} of {wanted} requests at once")
        del figures[0]
    if any(row.cost_per_million for row in rows):
        figures.append(("a million", lambda row: amount(row.cost_per_million)))
    head = [*([""] if numbered else []), *(name for name, _ in texts), *(name for name, _ in figures)]
    cells = []
    for number, row in enumerate(rows, 1):
        first = [f"{number}."] if numbered else []
        said = [text(row) + ("*" if name == "weights" and row.lossy else "") for name, text in texts]
        cells.append([*first, *said, *(text(row) for _, text in figures)])
    return [*screen.paragraph(", ".join(same)), *screen.table(head, cells, left=len(texts) + numbered)]


def notes(rows: Sequence[Row], screen: Screen) -> list[str]:
    """Return what the table's columns mean, as far as they need it."""
    said = ["possible: requests at once that the KV cache would hold; tokens: in the KV cache of all replicas."]
    priced = [row.price for row in rows if row.price]
    if priced:
        kinds = sorted({price.note.partition(", ")[0] for price in priced} - {""})
        said.append(f"a month, a million output tokens: {priced[0].currency}, {' or '.join(kinds)}, not an offer.")
    if any(", not an offer, " in price.note for price in priced):
        said.append("What is a part of a card, or of a machine that is let whole, is priced by its share.")
    lossy = sorted({one for row in rows for one in row.lossy})
    said += [f"* may change answers: {', '.join(lossy)}."] if lossy else []
    return [line for one in said for line in screen.paragraph(one)]


def refusals(rows: Sequence[Row], screen: Screen) -> list[str]:
    """Return why rows do not run, one sentence each."""
    return [
        line
        for row in rows
        if row.requests is None
        for line in screen.paragraph(
            f"{row.where}, {row.engine} {row.version}".rstrip() + f", {row.weights}: {row.refusal}", "  - "
        )
    ]

"""Rows of a comparison as a table that fits a terminal; a column in which all rows are the same is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpuready.cli.screen import Screen
from gpuready.planning.compare import Row
from gpuready.planning.cost import Price

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


def table(rows: Sequence[Row], wanted: int, screen: Screen, numbered: bool = False) -> list[str]:
    """Return the rows that run as a table, and what is the same for all of them above it."""
    same, texts = [], []
    for name, text in _TEXTS:
        if name != "card" and len({text(row) for row in rows}) == 1 and rows:
            same.append(f"{name} {text(rows[0])}")
        else:
            texts.append((name, text))
    costs = any(row.cost_per_million for row in rows)
    head = [*(["", *(name for name, _ in texts)] if numbered else [name for name, _ in texts])]
    head += [f"of {wanted}", "possible", "KV tokens", "a month", *(["a million"] if costs else [])]
    cells = []
    for number, row in enumerate(rows, 1):
        cells.append(
            [
                *([f"{number}."] if numbered else []),
                *(text(row) + ("*" if name == "weights" and row.lossy else "") for name, text in texts),
                f"{row.requests:,}",
                f"{row.possible:,}",
                f"{row.kv_tokens:,}",
                amount(row.price),
                *([amount(row.cost_per_million)] if costs else []),
            ]
        )
    lines = screen.paragraph(", ".join(same)) if same else []
    return [*lines, *screen.table(head, cells, left=len(texts) + numbered)]


def notes(rows: Sequence[Row], screen: Screen) -> list[str]:
    """Return what the table's columns mean, as far as they need it."""
    currency = next((row.price.currency for row in rows if row.price), "")
    said = [f"a month, a million output tokens: {currency}, not an offer; unknown is not free."] if currency else []
    kinds = sorted({row.price.note for row in rows if row.price and row.price.note})
    said += [f"Prices: {'; '.join(kinds)}."] if kinds else []
    lossy = sorted({one for row in rows for one in row.lossy})
    said += [f"* may change answers: {', '.join(lossy)}."] if lossy else []
    return [line for one in said for line in screen.paragraph(one)]


def refusals(rows: Sequence[Row], screen: Screen) -> list[str]:
    """Return why rows do not run, one sentence each."""
    return [
        line
        for row in rows
        if row.requests is None
        for line in screen.paragraph(f"{row.where}, {row.engine} {row.version}, {row.weights}: {row.refusal}", "  - ")
    ]

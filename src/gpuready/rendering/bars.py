"""The memory of GPUs as stacked bars, in SVG; colours come from figure.css."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from html import escape

from gpuready.planning.explain import PARTS, Bar, Part

WIDTH, EDGE = 760, 16
BAR_HEIGHT, LEGEND_ROW, TITLE_ROW = 38, 20, 20
LETTER = 6.9
"""Width of a letter of the figure's font, about."""
TITLE_LETTER = 9.0
BETWEEN_OWNERS = 8


def svg(heading: str, bars: Sequence[Bar]) -> str:
    """Return one SVG element: each bar with its title, and below it what its parts are."""
    columns = int((WIDTH - 2 * EDGE) / TITLE_LETTER)
    lines = textwrap.wrap(heading, columns, max_lines=3, placeholder="\u2026") or [""]
    parts = [
        f'<text class="title" x="{EDGE}" y="{26 + TITLE_ROW * row}">{escape(line)}</text>'
        for row, line in enumerate(lines)
    ]
    y = 52.0 + TITLE_ROW * (len(lines) - 1)
    for bar in bars:
        drawn, height = _bar(bar, y)
        parts.append(drawn)
        y += height + 22
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" role="img" '
        f'aria-label="{escape(heading)}">{"".join(parts)}</svg>'
    )


def _bar(bar: Bar, y: float) -> tuple[str, float]:
    """Return a bar from y on, and its height."""
    shared = any(part.owner for part in bar.parts)
    drawn = [f'<text class="label" x="{EDGE}" y="{y + 12:.0f}">{escape(bar.title)}</text>']
    top = y + (36 if shared else 20)
    whole = sum(max(0.0, part.gib) for part in bar.parts) or 1.0
    x, wide = float(EDGE), WIDTH - 2 * EDGE
    spans: dict[str, tuple[float, float]] = {}
    for part in bar.parts:
        width = wide * max(0.0, part.gib) / whole
        drawn.append(_segment(part, x, top, width))
        if part.owner:
            spans[part.owner] = (spans.get(part.owner, (x, 0.0))[0], x + width)
        x += width
    drawn.append(_owners(spans, top - 5))
    legend, height = _legend(bar, top + BAR_HEIGHT + 16)
    return "".join([*drawn, legend]), top - y + BAR_HEIGHT + 16 + height


def _segment(part: Part, x: float, top: float, width: float) -> str:
    if width < 0.05:
        return ""
    said = f"{part.owner + ': ' if part.owner else ''}{part.title} {part.gib:.2f} GiB"
    text = f"{part.gib:.2f}"
    inside = ""
    if width > LETTER * len(text) + 6:
        middle = f'x="{x + width / 2:.1f}" y="{top + BAR_HEIGHT / 2 + 4:.0f}" text-anchor="middle"'
        inside = f'<text class="inside {part.name}" {middle}>{text}</text>'
    return (
        f'<rect class="part {part.name}" x="{x:.1f}" y="{top:.0f}" width="{width:.1f}" height="{BAR_HEIGHT}">'
        f"<title>{escape(said)}</title></rect>{inside}"
    )


def _owners(spans: Mapping[str, tuple[float, float]], y: float) -> str:
    """Return a bracket over the parts of each deployment, with its name: over the middle, where there is room."""
    drawn, left, right = [], float(EDGE), float(WIDTH - EDGE)
    for name, (start, end) in spans.items():
        shown = _shortened(name, right - left, LETTER)
        width = LETTER * len(shown)
        x = max(left, min((start + end - width) / 2, right - width))
        left = x + width + BETWEEN_OWNERS
        drawn.append(
            f'<path class="owner" d="M{start + 1:.1f} {y:.0f}v-4H{end - 1:.1f}v4"/>'
            f'<text class="label" x="{x + width / 2:.1f}" y="{y - 8:.0f}" text-anchor="middle">{escape(shown)}</text>'
        )
    return "".join(drawn)


def _legend(bar: Bar, y: float) -> tuple[str, float]:
    """Return what the parts are, in two columns, and the height of it."""
    kinds = [name for name in PARTS if bar.gib(name) or name == "headroom"]
    rows = -(-len(kinds) // 2)
    drawn = []
    for number, name in enumerate(kinds):
        column, row = divmod(number, rows)
        x, line = EDGE + column * (WIDTH - 2 * EDGE) / 2, y + row * LEGEND_ROW
        gib = bar.gib(name)
        title = "missing" if name == "headroom" and gib < 0 else PARTS[name]
        said = f"{title} {abs(gib):.2f} GiB, {abs(gib) / bar.total_gib:.1%}{_band(bar, name)}"
        drawn.append(
            f'<rect class="part {name}" x="{x:.0f}" y="{line - 10:.0f}" width="12" height="12"/>'
            f'<text class="legend" x="{x + 20:.0f}" y="{line:.0f}">{escape(said)}</text>'
        )
    return "".join(drawn), rows * LEGEND_ROW


def _band(bar: Bar, name: str) -> str:
    low, high = (sum(getattr(part, end) for part in bar.parts if part.name == name) for end in ("low", "high"))
    return f" ({low:.2f} to {high:.2f})" if name != "headroom" and round(high - low, 2) > 0 else ""


def _shortened(text: str, width: float, letter: float) -> str:
    most = max(1, int(width / letter))
    return text if len(text) <= most else f"{text[: most - 1]}\u2026"

"""Plots as SVG text: axes, units, legend; colours come from the page, so that they follow its light or dark theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

WIDTH, HEIGHT = 560, 330
LEFT, RIGHT, TOP, BOTTOM = 66, 20, 66, 52
MARK = 4.5


@dataclass(frozen=True)
class Point:
    """One value of a series; `y` is None where it is not known. `label` is what a pointer on it shows."""

    x: float
    y: float | None
    label: str = ""


@dataclass(frozen=True)
class Series:
    """One line, drawn in the page's colour `s<colour>`; marks differ too, so that colour is not all."""

    name: str
    points: Sequence[Point]
    colour: int = 1
    annotate: bool = False
    """Write each point's label beside it."""
    joined: bool = True
    """Draw a line through the points; without one they are a cloud."""


@dataclass(frozen=True)
class Plot:
    """One plot; `levels` makes x a scale on which each doubling is one step.

    `equal` makes both scales the same powers of ten, with the line on which x and y are the same.
    """

    title: str
    x_title: str
    y_title: str
    series: Sequence[Series]
    levels: Sequence[int] = ()
    equal: bool = False


def nice_ticks(highest: float, wanted: int = 5) -> list[float]:
    """Return ticks from 0 to at least `highest`, by 1, 2, 2.5 or 5 times a power of ten."""
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    count = math.ceil(highest / step - 1e-9)
    return [round(step * number, 10) for number in range(count + 1)]


def number(value: float) -> str:
    """Return a number as people read it: three significant digits, thousands apart by a thin space."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}".replace(",", "\u2009")


def standalone(figure: str) -> str:
    """Return an SVG element as a file of its own: in the style of our pages, on a paper of its own."""
    style = resources.files(__package__).joinpath("figure.css").read_text(encoding="utf-8")
    head, rest = figure.split(">", 1)
    return f'{head}><style>{style}</style><rect class="paper" width="100%" height="100%"/>{rest}\n'


def svg(plot: Plot) -> str:
    """Return a plot as one SVG element."""
    known = [point for series in plot.series for point in series.points if point.y is not None]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(plot.title)}">'
        f'<text class="title" x="{LEFT}" y="20">{escape(plot.title)}</text>'
    )
    if not known:
        middle = f'x="{WIDTH / 2:g}" y="{HEIGHT / 2:g}" text-anchor="middle"'
        return f'{head}<text class="label" {middle}>no value is known, see the table</text></svg>'
    axes = _EqualAxes(plot, known) if plot.equal else _Axes(plot, known)
    lines = "".join(_line(series, axes) for series in plot.series)
    return f"{head}{_legend(plot)}{axes.draw()}{lines}</svg>"


class _Axes:
    """Where a value stands."""

    def __init__(self, plot: Plot, known: Sequence[Point]) -> None:
        self.plot = plot
        self.y_ticks = nice_ticks(max(point.y or 0.0 for point in known))
        if plot.levels:
            self.x_ticks = [float(level) for level in plot.levels]
            low, high = math.log2(self.x_ticks[0]), math.log2(self.x_ticks[-1])
            # A little room, so that the first mark does not stand on the axis.
            self._low, self._high = low - 0.25, high + 0.25
        else:
            self.x_ticks = nice_ticks(max(point.x for point in known))
            self._low, self._high = 0.0, self.x_ticks[-1]

    def x(self, value: float) -> float:
        place = math.log2(value) if self.plot.levels else value
        return LEFT + (WIDTH - LEFT - RIGHT) * (place - self._low) / (self._high - self._low)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.y_ticks[-1]

    def tick(self, value: float) -> str:
        return f"{value:,.10f}".rstrip("0").rstrip(".").replace(",", "\u2009")

    def draw(self) -> str:
        parts = []
        for tick in self.y_ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
            parts.append(
                f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{self.tick(tick)}</text>'
            )
        bottom = HEIGHT - BOTTOM
        for tick in self.x_ticks:
            x = self.x(tick)
            parts.append(f'<line class="axis" x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}"/>')
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{self.tick(tick)}</text>'
            )
        parts.append(f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}"/>')
        parts.append(
            f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - 8}" '
            f'text-anchor="middle">{escape(self.plot.x_title)}</text>'
        )
        height = (TOP + bottom) / 2
        parts.append(
            f'<text class="label" x="14" y="{height:.1f}" text-anchor="middle" '
            f'transform="rotate(-90 14 {height:.1f})">{escape(self.plot.y_title)}</text>'
        )
        return "".join(parts)


class _EqualAxes(_Axes):
    """Both scales in the same powers of ten."""

    def __init__(self, plot: Plot, known: Sequence[Point]) -> None:
        self.plot = plot
        values = [value for point in known for value in (point.x, point.y or 0.0) if value > 0] or [1.0]
        self._low = float(math.floor(math.log10(min(values))))
        self._high = max(self._low + 1, math.ceil(math.log10(max(values))))
        self.x_ticks = self.y_ticks = [10.0**power for power in range(int(self._low), int(self._high) + 1)]

    def _share(self, value: float) -> float:
        place = math.log10(value) if value > 0 else self._low
        return (place - self._low) / (self._high - self._low)

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * self._share(value)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * self._share(value)

    def tick(self, value: float) -> str:
        """Return it in as few letters as it needs: 10k, 1M."""
        for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if value >= size:
                return f"{value / size:g}{letter}"
        return f"{value:g}"

    def draw(self) -> str:
        low, high = self.x_ticks[0], self.x_ticks[-1]
        ends = f'x1="{self.x(low):.1f}" y1="{self.y(low):.1f}" x2="{self.x(high):.1f}" y2="{self.y(high):.1f}"'
        return f'{super().draw()}<line class="truth" {ends}/>'


def _legend(plot: Plot) -> str:
    """Return the legend, left out where a single series says what its axis says."""
    if len(plot.series) < 2:
        return ""
    parts, x = [], float(LEFT)
    for series in plot.series:
        if series.joined:
            parts.append(f'<line class="line s{series.colour}" x1="{x:.1f}" y1="41" x2="{x + 22:.1f}" y2="41"/>')
        parts.append(_mark(series.colour, x + 11, 41.0, ""))
        parts.append(f'<text class="legend" x="{x + 28:.1f}" y="45">{escape(series.name)}</text>')
        x += 28 + 7.0 * len(series.name) + 24
    return "".join(parts)


def _line(series: Series, axes: _Axes) -> str:
    """Return the line through the known points, torn where one is not known, and a mark for each."""
    parts: list[str] = []
    piece: list[str] = []
    for point in [*series.points, Point(0.0, None)]:
        if point.y is not None:
            piece.append(f"{axes.x(point.x):.1f},{axes.y(point.y):.1f}")
            continue
        if series.joined and len(piece) > 1:
            parts.append(f'<polyline class="line s{series.colour}" points="{" ".join(piece)}"/>')
        piece = []
    for point in series.points:
        if point.y is None:
            continue
        x, y = axes.x(point.x), axes.y(point.y)
        parts.append(_mark(series.colour, x, y, point.label))
        if series.annotate:
            parts.append(_note(x, y, point.label.partition(":")[0]))
    return "".join(parts)


def _note(x: float, y: float, text: str) -> str:
    # Such a line falls to the right, so above on the right and below on the left there is room.
    if x > WIDTH - RIGHT - 70:
        return f'<text class="tick" x="{x - 9:.1f}" y="{y + 16:.1f}" text-anchor="end">{escape(text)}</text>'
    return f'<text class="tick" x="{x + 9:.1f}" y="{y - 6:.1f}">{escape(text)}</text>'


def _mark(colour: int, x: float, y: float, label: str) -> str:
    """Return a circle, a square or a diamond, by colour."""
    inside = f"<title>{escape(label)}</title>" if label else ""
    kind = f'class="mark s{colour}"'
    if colour == 1:
        return f'<circle {kind} cx="{x:.1f}" cy="{y:.1f}" r="{MARK}">{inside}</circle>'
    size = MARK * 1.8
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if colour == 3 else ""
    corner = f'x="{x - size / 2:.1f}" y="{y - size / 2:.1f}" width="{size:.1f}" height="{size:.1f}"'
    return f"<rect {kind} {corner}{turn}>{inside}</rect>"

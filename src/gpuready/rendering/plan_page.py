"""A plan as pictures: an SVG file of its bars, and an HTML page of everything that explains it."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from gpuready import __version__
from gpuready.planning.explain import Bar, Explanation, Figure, count
from gpuready.rendering import bars
from gpuready.rendering.page import environment
from gpuready.rendering.plots import standalone


def svg(heading: str, shown: Sequence[Bar]) -> str:
    """Return the bars as an SVG file that needs nothing else."""
    return standalone(bars.svg(heading, shown))


def html(heading: str, explanations: Sequence[Explanation]) -> str:
    """Return the page of one or several deployments."""
    pages = environment("gpuready.rendering")
    pages.filters |= {"figure": Figure.text, "count": count, "bars": _bars}
    return pages.get_template("plan.html.j2").render(heading=heading, explanations=explanations, version=__version__)


def _bars(found: Explanation) -> Markup:
    # What svg() returns is built of escaped texts.
    return Markup(bars.svg(found.title, found.bars))  # noqa: S704

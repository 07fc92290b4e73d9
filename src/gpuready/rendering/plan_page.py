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


def html(heading: str, explanations: Sequence[Explanation], shown: Sequence[Bar]) -> str:
    """Return the page of one or several deployments, with the bars of their GPUs."""
    pages = environment("gpuready.rendering")
    pages.filters |= {"figure": Figure.text, "count": count}
    # What svg() returns is built of escaped texts.
    drawn = Markup(bars.svg(heading, shown))  # noqa: S704
    return pages.get_template("plan.html.j2").render(
        heading=heading, explanations=explanations, bars=drawn, version=__version__
    )

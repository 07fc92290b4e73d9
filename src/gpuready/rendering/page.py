"""HTML pages that need nothing else: no network, no script. Every page of ours has this one style, light and dark."""

from __future__ import annotations

import jinja2


def environment(package: str) -> jinja2.Environment:
    """Return what renders a package's page templates; they may include `figure.css` and `page.css`.

    Every text is escaped: names of models and cards are not ours.
    """
    return jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader(package, "."), jinja2.PackageLoader("gpuready.rendering", ".")]
        ),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

"""Renders the files of a plan. A template sees spec, plan and server, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from gpuready.outcome import Failure, Refusal

ENGINE_TEMPLATES = {"vllm": {"serve.yaml": "serving/vllm/serve.yaml.j2"}}
GATEWAY_TEMPLATES = {
    "haproxy.cfg": "gateway/haproxy.cfg.j2",
    "models.json": "gateway/models.json.j2",
    "models.map": "gateway/models.map.j2",
}


class Renderer:
    """Finds templates in the folders given, the operator's before ours, and renders them strictly."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader([str(folder) for folder in folders]),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,  # noqa: S701 - the files are YAML and HAProxy's, not HTML
        )
        self._environment.filters["yaml"] = _yaml_scalar

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """Render one template.

        Raises:
            Refusal: naming the template and line that is wrong.
        """
        try:
            return self._environment.get_template(template).render(values)
        except jinja2.TemplateNotFound as error:
            raise Refusal(Failure("render.missing", f"template {error.name} was not found")) from error
        except Exception as error:  # whatever an operator's template does wrong is said as a refusal
            line = getattr(error, "lineno", None)
            where = f"template {template}" + (f", line {line}" if line else "")
            raise Refusal(
                Failure("render.template", f"{where} is wrong", str(error), "correct it; it sees spec, plan, server")
            ) from error


def _yaml_scalar(value: Any) -> str:
    """Write a value as YAML: JSON is YAML, and leaves no room for a surprise."""
    return json.dumps(value)


def render_host(
    renderer: Renderer, spec: Mapping[str, Any], plan: Mapping[str, Any], server: Mapping[str, Any]
) -> dict[str, Any]:
    """Render all files of one host: `{releases: {deployment: {name: text}}, gateway: {name: text}}`."""
    releases = {}
    for deployment in plan["deployments"]:
        values = {"spec": spec, "plan": deployment, "server": server}
        templates = ENGINE_TEMPLATES[deployment["engine"]]
        releases[deployment["name"]] = {name: renderer.render(path, values) for name, path in templates.items()}
    return {"releases": releases, "gateway": render_gateway(renderer, spec, plan, server)}


def render_gateway(
    renderer: Renderer, spec: Mapping[str, Any], plan: Mapping[str, Any], server: Mapping[str, Any]
) -> dict[str, str]:
    """Render the gateway's files: `{name: text}`."""
    values = {"spec": spec, "plan": plan, "server": server}
    files = {name: renderer.render(path, values) for name, path in GATEWAY_TEMPLATES.items()}
    # HAProxy reads a pattern from a file as it stands; in its configuration it would have to be quoted.
    for rule in (rule for one in plan["deployments"] for rule in one["refused_requests"]):
        files |= {name: f"{pattern}\n" for name, pattern in rule["files"].items()}
    return files

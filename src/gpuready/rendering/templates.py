"""Renders the files of a plan. A template sees spec, plan and server, and nothing else."""

from __future__ import annotations

import re
import traceback
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml

from gpuready.outcome import Failure, Refusal
from gpuready.rendering import values as written

RELEASE_FILES = ("serve.yaml", "environment", "unit.conf")
ENGINE_TEMPLATES = {
    engine: {name: f"serving/{engine}/{name}.j2" for name in RELEASE_FILES}
    for engine in ("vllm", "sglang", "tensorrt_llm")
}
GATEWAY_TEMPLATES = {
    "haproxy.cfg": "gateway/haproxy.cfg.j2",
    "models.json": "gateway/models.json.j2",
    "models.map": "gateway/models.map.j2",
}
FILTERS = ("yaml", "options", "nested", "variables", "mount_units", "comment")
"""Functions of `gpuready.rendering.values` that a template can use."""
SHIPPED = "shipped"
"""Prefix of our own templates, which an operator's extends: `{% extends "shipped/serving/vllm/serve.yaml.j2" %}`."""


class Renderer:
    """Finds templates in the folders given, the operator's before ours, and renders them strictly.

    A template of the same name in an earlier folder replaces ours, or extends it by its name with the prefix `shipped/`
    and has other blocks.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [str(folder) for folder in folders]
        ours = jinja2.PrefixLoader({SHIPPED: jinja2.FileSystemLoader(self._folders[-1:])})
        self._environment = jinja2.Environment(
            loader=jinja2.ChoiceLoader([ours, jinja2.FileSystemLoader(self._folders)]),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,  # noqa: S701 - the files are YAML and HAProxy's, not HTML
        )
        for name in FILTERS:
            self._environment.filters[name] = getattr(written, name)

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """Render one template.

        Raises:
            Refusal: naming the file and line that is wrong.
        """
        try:
            return self._environment.get_template(template).render(values)
        except jinja2.TemplateNotFound as error:
            what = f"template {error.name} was not found"
            why = "" if error.name == template else f"{template} asks for it"
            raise Refusal(Failure("render.missing", what, why, f"looked in {', '.join(self._folders)}")) from error
        except Exception as error:  # whatever an operator's template does wrong is said as a refusal
            raise self.refusal(template, self._place(error), str(error)) from error

    def refusal(self, template: str, place: str, why: str) -> Refusal:
        """Return the refusal of what a template does wrong; `place` is the file and line, where they are known."""
        where = f"template {template}" + (f" ({place})" if place else "")
        return Refusal(Failure("render.template", f"{where} is wrong", why, "correct it; it sees spec, plan, server"))

    def file_of(self, template: str) -> str:
        """Return the file that a template's name leads to."""
        return self._environment.get_template(template).filename or template

    def _place(self, error: Exception) -> str:
        """Return the file and line of a template at which an error arose; jinja leaves them in the traceback."""
        if isinstance(error, jinja2.TemplateSyntaxError):
            return f"{error.filename or error.name}, line {error.lineno}"
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if any(Path(frame.filename).is_relative_to(folder) for folder in self._folders)
        ]
        return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def render_host(
    renderer: Renderer, spec: Mapping[str, Any], plan: Mapping[str, Any], server: Mapping[str, Any]
) -> dict[str, Any]:
    """Render all files of one host: `{releases: {deployment: {name: text}}, gateway: {name: text}}`."""
    releases = {one["name"]: render_release(renderer, spec, one, server) for one in plan["deployments"]}
    return {"releases": releases, "gateway": render_gateway(renderer, spec, plan, server)}


def render_release(
    renderer: Renderer, spec: Mapping[str, Any], deployment: Mapping[str, Any], server: Mapping[str, Any]
) -> dict[str, str]:
    """Render the files of one deployment's release: `{name: text}`.

    Raises:
        Refusal: naming the template, its file and the line that is wrong.
    """
    values = {"spec": spec, "plan": deployment, "server": server}
    templates = ENGINE_TEMPLATES[deployment["engine"]]
    files = {name: renderer.render(path, values) for name, path in templates.items()}
    for name, wrong in (("serve.yaml", wrong_yaml), ("environment", wrong_variables)):
        said = wrong(files[name])
        if said:
            raise renderer.refusal(templates[name], renderer.file_of(templates[name]), said)
    return files


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


def wrong_yaml(text: str) -> str:
    """Return what is wrong with an engine's file; empty where it is one mapping that has every key once."""
    try:
        found = yaml.load(text, _EveryKeyOnce)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        return f"what it makes is not YAML{line}: {error.problem or error.context}"
    except yaml.YAMLError as error:
        return f"what it makes is not YAML: {error}"
    if not isinstance(found, dict):
        return "what it makes is no mapping of options to values"
    strange = [key for key in found if not isinstance(key, str)]
    return f"what it makes has the key {strange[0]!r}, which is no text: quote it" if strange else ""


def wrong_variables(text: str) -> str:
    """Return what is wrong with a file of variables; empty where every line is one, once, or a comment."""
    seen = set()
    for number, line in enumerate(text.splitlines(), 1):
        name = line.strip().partition("=")[0]
        if not name or name.startswith("#"):
            continue
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "=" not in line:
            return f"what it makes is no variable, line {number}: {line.strip()!r} has not the form NAME=value"
        if name in seen:
            return f"what it makes has {name} twice, line {number}"
        seen.add(name)
    return ""


class _EveryKeyOnce(yaml.SafeLoader):
    """Refuses a key that stands twice, of which the engines would take the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return a mapping."""
        seen: set[Any] = set()
        for key, _ in node.value:
            name = getattr(key, "value", None)
            if isinstance(name, str) and name in seen:
                raise yaml.MarkedYAMLError(problem=f"{name} stands twice", problem_mark=key.start_mark)
            seen.add(name if isinstance(name, str) else id(key))
        return super().construct_mapping(node, deep)

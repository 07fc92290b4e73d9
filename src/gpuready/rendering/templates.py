"""Renders the files of a plan. A template sees spec, plan and server, and nothing else."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml
from jinja2 import nodes

from gpuready.outcome import Failure, Refusal
from gpuready.planning.flags import OWN, SECRET, spelled, table
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
            text = self._environment.get_template(template).render(values)
            self._refuse_lost(template)
            return text
        except Refusal:
            raise
        except jinja2.TemplateNotFound as error:
            what = f"template {error.name} was not found"
            why = "" if error.name == template else f"{template} asks for it"
            raise Refusal(Failure("render.missing", what, why, f"looked in {', '.join(self._folders)}")) from error
        except RecursionError as error:
            why = f"it extends or includes itself without end; ours is {SHIPPED}/{template}"
            raise self.refusal(template, self._place(error), why) from error
        except Exception as error:  # whatever an operator's template does wrong is said as a refusal
            raise self.refusal(template, self._place(error), str(error)) from error

    def refusal(self, template: str, place: str, why: str) -> Refusal:
        """Return the refusal of what a template does wrong; `place` is the file and line, where they are known."""
        where = f"template {template}" + (f" ({place})" if place else "")
        return Refusal(Failure("render.template", f"{where} is wrong", why, "correct it; it sees spec, plan, server"))

    def _refuse_lost(self, template: str) -> None:
        """Refuse what a template that extends another one says in vain: jinja drops it without a word."""
        tree, parent = self._read(template)
        known = self._blocks(parent)
        for node in tree.body if parent else ():
            why = ""
            if isinstance(node, nodes.Block) and node.name not in known:
                near = difflib.get_close_matches(node.name, known, n=1)
                meant = f"did you mean {near[0]}?" if near else f"its blocks are {', '.join(sorted(known))}"
                why = f"{parent} has no block {node.name}; {meant}"
            elif isinstance(node, nodes.Output) and any(_says(one) for one in node.nodes):
                why = f"what stands outside of its blocks is lost, for it extends {parent}"
            if why:
                raise self.refusal(template, f"{self.file_of(template)}, line {node.lineno}", why)

    def _read(self, template: str) -> tuple[nodes.Template, str]:
        """Return a template's syntax tree, and the name of the one that it extends; empty where it extends none."""
        source = self._environment.loader.get_source(self._environment, template)[0] if self._environment.loader else ""
        tree = self._environment.parse(source)
        named = [one.template.value for one in tree.find_all(nodes.Extends) if isinstance(one.template, nodes.Const)]
        return tree, str(named[0]) if named else ""

    def _blocks(self, template: str) -> set[str]:
        """Return the names of the blocks of a template and of those that it extends."""
        if not template:
            return set()
        tree, parent = self._read(template)
        return {one.name for one in tree.find_all(nodes.Block)} | self._blocks(parent)

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
    if said := wrong_own(yaml.safe_load(files["serve.yaml"]), deployment):
        raise renderer.refusal(templates["serve.yaml"], renderer.file_of(templates["serve.yaml"]), said)
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


_FREE = "shutdown-timeout"
"""What a template may have otherwise of what gpuready sets itself: the time to stop, beside that of the unit."""


def wrong_own(found: Mapping[str, Any], deployment: Mapping[str, Any]) -> str:
    """Return which of the options that gpuready sets itself, or that no file may hold, a file has otherwise."""
    engine = deployment["engine"]
    release = table(engine, deployment["engine_version"])
    planned = {
        release.canonical(one["name"]): one["value"] for group in deployment["options"].values() for one in group
    }
    written: dict[str, Any] = {}
    for name, value in found.items():
        canonical = release.canonical(spelled(name, engine))
        if canonical in written:
            return f"what it makes has {canonical} twice, in two spellings"
        written[canonical] = value
    if secret := sorted(SECRET & written.keys()):
        return f"what it makes has {secret[0]}, a secret, and rendered files are no place for one"
    for name in sorted({release.canonical(one) for one in OWN[engine]} - {_FREE}):
        if written.get(name) != planned.get(name):
            value = f"{planned[name]!r}" if name in planned else "not set"
            return f"what it makes has another {name} than gpuready's own, which is {value}"
    return ""


def _says(node: nodes.Expr) -> bool:
    """Say whether a part of a template writes more than blank lines and comments."""
    if not isinstance(node, nodes.TemplateData):
        return True
    return any(line.strip() and not line.strip().startswith("#") for line in node.data.splitlines())


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

"""The page of known vulnerabilities: what each release of a stack has, and what stands against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuready import catalog
from gpuready.planning import advisories

_HEAD = """\
# Known vulnerabilities of the engines, and what stands against them

<!-- Made by `gpuready spec docs` from src/gpuready/catalog/advisories.yaml; a change belongs there. -->

Public databases were read on {read_on}; what was published later is not here. An advisory that concerns a deployment
and has nothing against it is refused before anything is changed, until its id stands in `gpuready_accept_advisories`.
An accepted one loses what stood against it by refusing requests: that is how structured output by regular expression,
say, is had all the same.

"""


def page() -> str:
    """Return the page as Markdown."""
    found = catalog.load("advisories")
    lines = ["## What holds on every server", "", "| control | what it is | the test that shows it |", "|---|---|---|"]
    lines += [f"| {name} | {one['what']} | `{one['shown_by']}` |" for name, one in found["controls"].items()]
    lines += ["", "## Requests that the gateway refuses", "", "| rule | what a client reads |", "|---|---|"]
    lines += [f"| {name} | {one['says']} |" for name, one in found["requests"].items()]
    lines += ["", "## By release", ""]
    return _HEAD.format(read_on=found["read_on"]) + "\n".join([*lines, *_releases()]) + "\n"


def _releases() -> Iterator[str]:
    titles = catalog.load("engine_support")["engines"]
    stacks = catalog.load("stacks")["stacks"]
    releases: dict[tuple[str, str], list[str]] = {}
    for stack, entry in stacks.items():
        for engine, data in entry["engines"].items():
            releases.setdefault((engine, data["version"]), []).append(stack)
    for (engine, version), of in releases.items():
        yield f"### {titles[engine]['title']} {version} ({'stack' if len(of) == 1 else 'stacks'} {', '.join(of)})"
        yield ""
        known = advisories.of_release(engine, version)
        if not known:
            yield "None is known."
        else:
            yield "| id | severity | what | concerns | what stands against it |"
            yield "|---|---|---|---|---|"
            yield from (_row(one) for one in known)
        yield ""


def _row(one: Mapping[str, Any]) -> str:
    ids = f"[{one['id']}]({_address(one)})"
    controls = [*one.get("controls", []), *(f"requests refused: {name}" for name in one.get("requests", []))]
    against = ", ".join(controls) or ("told only" if one["severity"] == "low" else "nothing: has to be accepted")
    return f"| {ids} | {one['severity']} | {one['what']} | {_concerned(one.get('when', {}))} | {against} |"


def _address(one: Mapping[str, Any]) -> str:
    if "source" in one:
        return str(one["source"])
    return f"https://github.com/advisories/{one.get('alias', one['id'])}"


def _concerned(when: Mapping[str, Any]) -> str:
    parts = [f"flag {name}" for name in when.get("flags", [])]
    parts += [f"{name} = {text}" for name, text in when.get("says", {}).items()]
    parts += ["models that take images"] if when.get("images") else []
    parts += [f"task {name}" for name in when.get("tasks", [])]
    return ", ".join(parts) or "all"

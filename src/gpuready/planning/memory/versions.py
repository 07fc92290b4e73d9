"""Which set of constants holds for an engine's version, given as a release, a range of releases or a build's date."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpuready import catalog
from gpuready.planning.memory.run import Range

_RELEASE = re.compile(r"v?(\d+(?:\.\d+){1,3})(?:\.?(rc|post|dev|a|b)(\d+))?(?:\.dev\d+)?(?:\+[\w.]+)?$")
_DAY = re.compile(
    r"(?:(?:nightly|dev|main|master)[ @:(-]*)?(20\d\d)-?(\d\d)(?:-?(\d\d))?\)?(?: (?:nightly|main|master))?$"
)
_NAMES = re.compile(r"(?:vllm|sglang|tensorrt[-_ ]?llm|trt[-_]?llm)[\s:=@/-]*")
_BUILD = re.compile(r"-\d+-g[0-9a-f]{6,40}$|-(?:cu|cuda|rocm|py)\d[\w.-]*$|-(?=(?:rc|post|dev|a|b)\d)")
"""What git and images add to a release, and a hyphen before its stage."""
_ABOUT = re.compile(r"(\d+)\.(\d+)-ish$")
_LAST = 1 << 20

Version = tuple[int, ...]


class Unresolved(ValueError):
    """An engine or a version for which there is no set of constants; the message says which there are."""


@dataclass(frozen=True)
class ConstantSet:
    """The constants and rules of one engine that hold for a span of releases."""

    engine: str
    name: str
    """E.g. "vllm 0.17.0 to 0.20.2"."""
    values: Mapping[str, Any]

    def range(self, *keys: str) -> Range:
        """Return a measured constant with its range."""
        found: Any = self.values
        for key in keys:
            found = found[key]
        return Range(found["value"], found["low"], found["high"])


def parse(text: str) -> Version | None:
    """Return a release in the order of releases; None where it is none; 0.5rc1 comes before 0.5, 0.5.post1 after."""
    match = _RELEASE.match(text.strip())
    if match is None:
        return None
    numbers = [int(part) for part in match[1].split(".")]
    numbers += [0] * (4 - len(numbers))
    stage = {"dev": -4, "a": -3, "b": -2, "rc": -1, "post": 1}.get(match[2] or "", 0)
    return (*numbers, stage, int(match[3] or 0))


@functools.lru_cache(maxsize=512)
def resolve(engine: str, text: str) -> ConstantSet:
    """Return the one set of constants that holds for all of what `text` names.

    `text`: a release (0.19.1), a series (0.8.x), a range (0.8-0.9), everything from a release on (0.21+), a series or
    one of its neighbours (0.13-ish), or a build of the main branch by its day or month (nightly 2026-08-14); the
    engine's name before it, and what git and images add to it (0.19.0-cu126), say nothing.

    Raises:
        Unresolved: when the engine is not known, the text names no version, or more than one set holds for it.
    """
    sets = _sets(engine)
    text = _BUILD.sub("", _NAMES.sub("", text.strip().lower(), count=1))
    shown = f"{engine} {text[:40]}"
    day = _DAY.match(text)
    span, until = None, ""
    if day:
        first, until = (f"{day[1]}-{day[2]}-{day[3] or end}" for end in ("01", "31"))
        older = [made for _, released, made in sets if released <= first]
        holding = [made for _, released, made in sets if released <= until]
    else:
        span = _releases(text, _newest(engine))
        if span is None:
            raise Unresolved(f"{shown} is no release that is known; the constants hold for {_told(sets)}")
        older = [made for release, _, made in sets if release <= span[0]]
        holding = [made for release, _, made in sets if release <= span[1]]
    if not older:
        raise Unresolved(f"{shown} is older than what is known; the constants hold for {_told(sets)}")
    if holding[-1] is not older[-1]:
        names = f"{older[-1].name} and {holding[-1].name}"
        raise Unresolved(f"{shown} lies in more than one set of constants ({names}); name one release")
    return _with_defaults(older[-1], span[0] if span else None, until)


def _with_defaults(held: ConstantSet, named: Version | None, day: str) -> ConstantSet:
    """Return a set with the engine's defaults of one release: the one that is named first, or the newest on a day."""
    values: dict[str, Any] = {}
    for entry in catalog.load("engine_memory")["engines"][held.engine].get("defaults", ()):
        first = parse(entry["first"])
        if (entry["released"] <= day) if named is None else (first is not None and first <= named):
            values.update(entry)
    return replace(held, values={**held.values, **values}) if values else held


def _told(sets: tuple[tuple[Version, str, ConstantSet], ...]) -> str:
    return f"{sets[0][2].name} and so on to {sets[-1][2].name}" if len(sets) > 1 else sets[0][2].name


def _newest(engine: str) -> Version:
    newest = parse(catalog.load("engine_memory")["engines"][engine]["newest"])
    assert newest is not None  # noqa: S101 - our own file
    return newest


@functools.cache
def _sets(engine: str) -> tuple[tuple[Version, str, ConstantSet], ...]:
    """Return the sets of an engine from the oldest on, each with its first release and the day of it."""
    engines = catalog.load("engine_memory")["engines"]
    if engine not in engines:
        raise Unresolved(f"there is no engine {engine[:40]!r}; known are {', '.join(engines)}")
    entries = engines[engine]["sets"]
    found = []
    values: dict[str, Any] = {}
    for index, entry in enumerate(entries):
        values = {**values, **entry}
        last = f"before {entries[index + 1]['first']}" if index + 1 < len(entries) else engines[engine]["newest"]
        name = f"{engine} {entry['first']}" + ("" if last == entry["first"] else f" to {last}")
        first = parse(entry["first"])
        assert first is not None  # noqa: S101 - our own file
        found.append((first, entry.get("released", ""), ConstantSet(engine, name, values)))
    return tuple(found)


def _releases(text: str, newest: Version) -> tuple[Version, Version] | None:
    """Return the first and the last release that the text names; None where it names none, or only newer ones."""
    text = text.strip().removeprefix("v")
    if about := _ABOUT.match(text):
        major, minor = int(about[1]), int(about[2])
        span = _releases(f"{major}.{max(0, minor - 1)}-{major}.{minor + 1}", newest)
    elif text.endswith("+") or text.startswith((">=", "\u2265")):
        first = parse(text.strip(">=\u2265+ "))
        span = (first, newest) if first else None
    elif "-" in text:
        parts = [_releases(part, newest) for part in text.split("-", 1)]
        span = (parts[0][0], parts[1][1]) if parts[0] and parts[1] and parts[0][0] <= parts[1][0] else None
    else:
        number = text.removesuffix(".x")
        first = parse(number)
        series = number != text or number.count(".") == 1
        span = (first, _end(number, first) if series else first) if first else None
    return span if span and span[0] <= newest else None


def _end(text: str, first: Version) -> Version:
    """Return an upper end of the releases that begin with the numbers of `text`."""
    given = text.count(".") + 1
    return (*first[:given], *(_LAST,) * (len(first) - given))

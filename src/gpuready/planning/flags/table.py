"""Which flags and variables a release of an engine reads: the pages of catalog/engine_flags, made from its sources."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuready import catalog
from gpuready.planning.memory.versions import Version, parse
from gpuready.planning.support.capability import engines, release_of


@dataclass(frozen=True)
class Known:
    """A flag of one release."""

    name: str
    """The one name that all its spellings have here."""
    kind: str
    """switch, bool, int, size, float, text, json, json or text, or list of int, float, text."""
    choices: tuple[Any, ...] = ()
    """All that it takes; empty: not limited, or only known when the engine runs."""
    off: bool = False
    """`no-` before its name says false."""
    deprecated: bool = False
    line_only: bool = False
    """The engine takes it on the command line, and not from its file."""


@dataclass(frozen=True)
class Table:
    """Everything that one release of one engine reads."""

    title: str
    """Name and version, as in sentences."""
    complete: bool
    """What is not here does not exist."""
    flags: Mapping[str, Known]
    """By every spelling."""
    variables: frozenset[str]
    lists: bool
    """Its file may hold lists."""
    page: Mapping[str, Any]

    def flag(self, name: str) -> Known | None:
        """Return the flag of a name, also of one with `no-` before it."""
        found = self.flags.get(name)
        if found is None and name.startswith("no-"):
            positive = self.flags.get(name.removeprefix("no-"))
            return positive if positive and positive.off else None
        return found

    def canonical(self, name: str) -> str:
        """Return the one name of all spellings of a flag; an unknown one as it is, without `no-`."""
        known = self.flag(name)
        return known.name if known else name.removeprefix("no-")

    def near(self, name: str) -> str:
        """Return the flag that is spelled most like a name; empty where none is like it."""
        return _near(name.lower().removeprefix("no-"), self.flags)

    def near_variable(self, name: str) -> str:
        """Return the variable that is spelled most like a name; empty where none is like it."""
        return _near(name, self.variables)

    def elsewhere(self, name: str) -> str:
        """Return which releases have a flag that this one has not, as words; empty where none does."""
        periods = [one for spelled, one in _periods(self.page, name)]
        return _when(self.page["releases"], [(one["first"], one.get("before")) for one in periods])

    def variable_elsewhere(self, name: str) -> str:
        """Return which releases read a variable that this one does not, as words; empty where none does."""
        period = self.page["variables"].get(name)
        return _when(self.page["releases"], [(period[0], period[1] if len(period) > 1 else None)]) if period else ""


@functools.lru_cache(maxsize=32)
def table(engine: str, version: str) -> Table:
    """Return what a release reads. Between two releases that were read, it is what either of them does.

    Raises:
        KeyError: when there is no such engine.
    """
    page = catalog.load(f"engine_flags/{engine}")
    release = release_of(version, engines()[engine])
    reads = _reads(page["releases"], release)
    flags: dict[str, Known] = {}
    for read in reads:
        for name, periods in page["flags"].items():
            known = _at(name, periods, read)
            for spelling in (name, *(known[1] if known else ())):
                if known:
                    flags.setdefault(spelling, known[0])
    variables = {name for read in reads for name, period in page["variables"].items() if _within(period, read)}
    title = f"{engines()[engine]['title']} {version}"
    return Table(
        title,
        "written" not in page,
        flags,
        frozenset(variables),
        release >= (parse(page.get("lists_from", "")) or ()),
        page,
    )


def _reads(releases: Sequence[str], release: Version) -> list[Version]:
    """Return the releases that speak for one: itself, or the ones before and after it."""
    known = sorted(found for one in releases if (found := parse(one)))
    before = [one for one in known if one <= release][-1:] or known[:1]
    after = [] if before == [release] else [one for one in known if one > release][:1]
    return [*before, *after] if before[0] <= release else before


def _at(name: str, periods: Sequence[Mapping[str, Any]], release: Version) -> tuple[Known, Sequence[str]] | None:
    choices: list[Any] = []
    for one in periods:
        choices = list(one["choices"]) if "choices" in one else choices
        choices = [value for value in choices if value not in one.get("removed", ())] + list(one.get("added", ()))
        if _within((one["first"], *([one["before"]] if "before" in one else [])), release):
            said = {key: bool(one.get(key)) for key in ("off", "deprecated", "line_only")}
            limited = "choices" in one or "added" in one or "removed" in one or one is not periods[0]
            return Known(name, one["kind"], tuple(choices) if limited else (), **said), one.get("also", ())
    return None


def _within(period: Sequence[str], release: Version) -> bool:
    first = parse(period[0])
    before = parse(period[1]) if len(period) > 1 else None
    return bool(first and release >= first and (before is None or release < before))


def _periods(page: Mapping[str, Any], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for known, periods in page["flags"].items():
        for one in periods:
            if name.removeprefix("no-") in (known, *one.get("also", ())):
                yield known, one


def _when(releases: Sequence[str], periods: Sequence[tuple[str, str | None]]) -> str:
    """Return in words when something is there; releases are those that were read, in their order."""
    if not periods:
        return ""
    first, before = periods[0][0], periods[-1][1]
    since = "" if first == releases[0] else f"from {first} on"
    if before is None:
        return since
    last = releases[releases.index(before) - 1]
    return f"{since} up to {last}".strip() if since != f"from {last} on" else f"in {last} alone"


def _near(name: str, known: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.75)), "")

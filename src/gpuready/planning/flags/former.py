"""Flags that an engine's release has under another name, or no longer: what was written, in its words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuready import catalog
from gpuready.planning.flags.table import Table


@dataclass(frozen=True)
class Former:
    """What takes the place of a flag."""

    flags: Mapping[str, Any] | None
    """The same in the release's words; None: nothing says the same."""
    use: str = ""
    """What to do instead."""


def former(engine: str, name: str, value: Any, release: Table) -> Former | None:
    """Return what says in a release what a former flag said; None where it has it, or nothing is known of it."""
    known = release.flag(name)
    if known is not None and not known.line_only:
        return None
    rule = catalog.load("engine_flags/former")["flags"][engine].get(name.removeprefix("no-"))
    if rule is None:
        return None
    if "use" in rule:
        return Former(None, str(rule["use"]))
    said = _said(rule, value, negative=name.startswith("no-"))
    if said is None:
        allowed = ", ".join(map(str, rule.get("values", ("true", "false"))))
        return Former(None, f"its values were {allowed}")
    # What takes its place may have come later, or be gone as well.
    return Former(said) if all(release.flag(one.partition(".")[0]) or release.flag(one) for one in said) else None


def _said(rule: Mapping[str, Any], value: Any, negative: bool) -> Mapping[str, Any] | None:
    """Return the flags that say what a former one said; None where its value says nothing that is known."""
    if "to" in rule:
        return {rule["to"]: value}
    if "under" in rule:
        name, _, part = rule["under"].partition(".")
        return {name: {part: value}}
    if "switch" in rule:
        wanted = (value is True) != negative
        return dict(rule["switch"]) if wanted else {} if isinstance(value, bool) else None
    found = rule["values"].get(value)
    return None if found is None else dict(found)

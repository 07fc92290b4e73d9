"""Engine flags that an operator sets: they win over the plan, are said in the release's words, or are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gpuready.outcome import Failure
from gpuready.planning.flags.former import former
from gpuready.planning.flags.owned import OWN, SECRET
from gpuready.planning.flags.settings import SETTINGS, Setting, says_nothing, setting, settings_of
from gpuready.planning.flags.table import Table, table
from gpuready.planning.flags.values import as_meant, choice_refusal, refusal, shown, strange

__all__ = ["OWN", "SECRET", "SETTINGS", "Setting", "Split", "settings_of", "spelled", "split", "table"]


class Split(NamedTuple):
    """What an operator set under flags."""

    settings: dict[str, Any]
    """What the planner counts with, by the names of `Run`'s fields."""
    rest: dict[str, Any]
    """All else, by the flag."""
    failures: list[Failure]
    notes: list[str]
    """Flags that the release has under another name, in sentences."""


def spelled(name: str, engine: str) -> str:
    """Return a flag in the engine's spelling: with dashes before its first dot, and TensorRT-LLM's with none at all."""
    first, dot, below = name.lstrip("-").partition(".")
    if engine == "tensorrt_llm":
        return f"{first}{dot}{below}".replace("-", "_")
    return first.replace("_", "-") + dot + below


def split(where: str, flags: Mapping[str, Any], engine: str, version: str) -> Split:
    """Split flags into settings and the rest, and say what is refused; `where` names host and deployment."""
    release = table(engine, version)
    found = Split({}, {}, [], [])
    written: dict[str, str] = {}
    owned = {release.canonical(name): (name, known) for name, known in settings_of(engine, version).items()}
    for key, value in _named(flags, engine):
        name, value = _whole(spelled(key, engine), value, engine, release)
        told = None if release.canonical(name) in owned else former(engine, name, value, release)
        if told is not None and told.flags is None:
            what = f"{where}, flags.{key}: {release.title} {_lacks(release, name)}"
            found.failures.append(Failure("plan.flag_former", what, "", told.use))
            continue
        if told is not None and told.flags is not None:
            found.notes.append(_told(key, told.flags, release))
        for one, its in told.flags.items() if told and told.flags is not None else ((name, value),):
            canonical = release.canonical(one)
            if canonical in written and _joined(found.rest.get(one), its) is None:
                what = f"{where}, flags.{key} and flags.{written[canonical]} are the same flag"
                refused: Failure | None = Failure("plan.flag_twice", what, "", "keep one of them")
            else:
                what = f"{where}, flags.{key}"
                refused = _refused(what, one, its, engine, release, owned) or _taken(
                    found, what, one, its, owned, release
                )
            found.failures.extend([refused] if refused else [])
            written[canonical] = key
    return found


def _named(flags: Mapping[str, Any], engine: str, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield flags by name; what TensorRT-LLM has nested by its dotted name, however it is written."""
    for key, value in flags.items():
        nested = engine == "tensorrt_llm" and isinstance(value, Mapping) and value
        if nested and all(isinstance(one, str) for one in value):
            yield from _named(value, engine, f"{above}{key}.")
        else:
            yield above + key, value


def _whole(name: str, value: Any, engine: str, release: Table) -> tuple[str, Any]:
    """Return a part of a mapping, named with dots, as the mapping that it is a part of.

    vLLM's reader takes the word behind such a name for its value, and finds none where that is true or false; all that
    is judged by a whole flag, such as its advisories, would not see the part.
    """
    first, *parts = name.split(".")
    whole = release.flag(first)
    if engine == "tensorrt_llm" or not all(parts) or whole is None or refusal(whole, {}):
        return name, value
    for part in reversed(parts):
        value = {part: value}
    return first, value


def _joined(there: Any, more: Any) -> dict[str, Any] | None:
    """Return two parts of a mapping as one; None where they are none, or both set the same."""
    if not isinstance(there, Mapping) or not isinstance(more, Mapping):
        return None
    found = dict(there)
    for key, value in more.items():
        both = _joined(found[key], value) if key in found else value
        if both is None and key in found:
            return None
        found[key] = both
    return found


def _taken(
    found: Split, what: str, name: str, value: Any, owned: Mapping[str, tuple[str, Setting]], release: Table
) -> Failure | None:
    """Keep a flag as a setting that the planner counts with, or as it is; return why its value is refused."""
    what = f"{what} = {shown(value)} is refused"
    flag = release.flag(name)
    usual, known = owned.get(release.canonical(name), (name, None))
    if known is not None and value is None:
        return None  # as where it does not stand at all
    if known is None or says_nothing(known, value):
        # A nested one may not be known here.
        said = refusal(flag, value) if flag is not None else ""
        if isinstance(value, list) and not release.lists:
            said = "its reader takes no list from the file"
        joined = _joined(found.rest.get(name), value)
        found.rest[name] = as_meant(flag, value) if joined is None else joined
        return Failure("plan.flag", what, said, "correct it") if said else None
    taken, refused = setting(what, known, f"no-{usual}" if name.startswith("no-") else usual, value)
    if refused is None and flag is not None and (said := choice_refusal(flag, value)):
        refused = Failure("plan.flag", what, said, "correct it")
    if refused is None:
        found.settings.update(taken)
    return refused


def _refused(what: str, name: str, value: Any, engine: str, release: Table, owned: Mapping[str, Any]) -> Failure | None:
    """Return why a flag cannot be set at all, or why its value cannot stand in the engine's file."""
    own = OWN[engine]
    canonical = release.canonical(name)
    if name in SECRET or canonical in SECRET:
        why = "is a secret, and rendered files are no place for one"
        return Failure("plan.flag_secret", f"{what} {why}", "", "remove it; engines listen on loopback only")
    first, *parts = name.split(".")
    if any(one in own for one in (name, canonical, first)):
        instead = next(own[one] for one in (name, canonical, first) if one in own)
        return Failure("plan.flag", f"{what} is set by gpuready itself", "", instead)
    # Only TensorRT-LLM's file is nested.
    whole = release.flag(first) if engine == "tensorrt_llm" and all(parts) else None
    known = release.flag(name) or whole
    near = "" if release.flag(name) else release.near(name)
    if known is None or (whole and near.startswith(f"{whole.name}.")):
        if not release.complete and not near and all((first, *parts)):
            return _unfit(what, value)
        said = f"{what}: {release.title} {_lacks(release, name)}"
        return Failure("plan.flag", said, "", f"did you mean {near}?" if near else "remove it")
    if known.line_only and known.name not in owned:
        why = f"{release.title} takes it on its command line alone, not from its file"
        return Failure("plan.flag", f"{what} is refused", why, "remove it")
    parts = [one for one in owned if one.startswith(f"{canonical}.")]
    if parts and not value:
        why = f"the plan sets parts of it ({', '.join(parts)})"
        return Failure("plan.flag", f"{what} = {shown(value)} is refused", why, "name the parts that you want instead")
    # A setting that the planner counts with has a range of its own.
    return None if canonical in owned else _unfit(what, value)


def _unfit(what: str, value: Any) -> Failure | None:
    said = next(strange(value), None)
    if said is None and any(isinstance(one, str) and one.startswith("-") for one in _texts(value)):
        return Failure(
            "plan.flag", f"{what} = {shown(value)} is refused", "its reader takes it for a flag", "correct it"
        )
    if said is None:
        return None
    allowed = "allowed are texts, finite numbers, true, false, null, and lists and mappings of these"
    return Failure("plan.flag", f"{what} = {shown(value)} is refused", f"{said}, {allowed}", "correct it")


def _texts(value: Any) -> Iterator[Any]:
    """Yield what becomes a word of its own on the engine's command line; a number may be negative."""
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, str) and not one.lstrip("-").replace(".", "", 1).isdigit():
            yield one


def _lacks(release: Table, name: str) -> str:
    """Return in words that a release has no such flag, and which does."""
    when = release.elsewhere(name)
    return f"has no such flag, which is there {when}" if when else "has no such flag"


def _told(key: str, flags: Mapping[str, Any], release: Table) -> str:
    said = " and ".join(f"{name} {shown(value)}" for name, value in flags.items()) or "its own default"
    return f"flags.{key} is {said} in {release.title}"

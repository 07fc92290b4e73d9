"""Known vulnerabilities of an engine's release: which concern a deployment, and what stands against each.

The list is catalog/advisories.yaml. What concerns a deployment is held by controls that every server has, by requests
that the gateway refuses, or by the operator's word; else it is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuready import catalog
from gpuready.outcome import Failure
from gpuready.planning.memory.versions import parse

_DECLARED = {"speculative-config": "draft", "enable-lora": "lora", "lora-paths": "lora"}
"""Flags that a deployment has by a field of its own."""
_TOLD_ONLY = "low"
_NUMBERS = 4
"""Of a release, before its stage (rc1, post1)."""
_ESCAPED = "escaped_letters"


@dataclass(frozen=True)
class Exposure:
    """What of a deployment an advisory can be about."""

    engine: str
    version: str
    flags: Mapping[str, Any]
    """Every flag that its engine is started with, in the engine's spelling."""
    images: bool
    """The model takes images, video or sound."""
    task: str


@dataclass(frozen=True)
class Judgement:
    """The advisories that a deployment's release has, each with what stands against it."""

    answers: tuple[dict[str, str], ...] = ()
    """`{id, severity, what, answer}`; an answer is a sentence."""
    requests: tuple[str, ...] = ()
    """Rules of the catalog by which the gateway refuses requests."""
    open: tuple[dict[str, Any], ...] = field(default=())
    """Advisories that nothing stands against."""


def of_release(engine: str, version: str) -> list[dict[str, Any]]:
    """Return the advisories that concern a release, in the catalog's order."""
    release = parse(version)
    return [
        one
        for one in catalog.load("advisories")["advisories"]
        if one["engine"] == engine and (release is None or _spans(one, release))
    ]


def _spans(one: Mapping[str, Any], release: tuple[int, ...]) -> bool:
    first, before = (parse(one[key]) if key in one else None for key in ("first", "before"))
    # What a release has come with is in its candidates too; a fix may have come after them.
    return not (
        (first is not None and release[:_NUMBERS] < first[:_NUMBERS]) or (before is not None and release >= before)
    )


def judge(exposure: Exposure, accepted: Iterable[str] = ()) -> Judgement:
    """Say of every advisory of the release what stands against it."""
    ids = set(accepted)
    answers, requests, open_ones = [], dict[str, None](), []
    for one in of_release(exposure.engine, exposure.version):
        answer = _answer(one, exposure, ids)
        if answer is None:
            open_ones.append(one)
            continue
        if answer == _REFUSED_REQUESTS:
            requests |= dict.fromkeys(one["requests"])
        answers.append({"id": one["id"], "severity": one["severity"], "what": one["what"], "answer": answer})
    return Judgement(tuple(answers), tuple(requests), tuple(open_ones))


_REFUSED_REQUESTS = "the gateway refuses such requests"


def _answer(one: Mapping[str, Any], exposure: Exposure, accepted: set[str]) -> str | None:
    if unconcerned := _unconcerned(one.get("when", {}), exposure):
        return f"not concerned: {unconcerned}"
    if accepted & {one["id"], one.get("alias")}:
        return "accepted by gpuready_accept_advisories"
    if "controls" in one:
        known = catalog.load("advisories")["controls"]
        return "; ".join(known[name]["what"] for name in one["controls"])
    if "requests" in one:
        return _REFUSED_REQUESTS
    return "told only, as it is of low severity" if one["severity"] == _TOLD_ONLY else None


def _unconcerned(when: Mapping[str, Any], exposure: Exposure) -> str:
    """Return why a deployment has nothing of what an advisory needs; empty where it has, or where nothing is needed."""
    if "flags" in when and not any(_is_on(exposure.flags.get(name)) for name in when["flags"]):
        return f"{' and '.join(when['flags'])} {'is' if len(when['flags']) == 1 else 'are'} not set"
    for name, text in when.get("says", {}).items():
        if text not in str(exposure.flags.get(name, "")):
            return f"{name} does not say {text}"
    if when.get("images") and not exposure.images:
        return "the model takes no images"
    if "tasks" in when and exposure.task not in when["tasks"]:
        return f"its task is {exposure.task}"
    return ""


def _is_on(value: Any) -> bool:
    return value not in (None, False, "", [], {})


def refused_requests(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the gateway's rules by their names: `{name, says, files}`, the files each with one pattern."""
    known = catalog.load("advisories")["requests"]
    # Names of fields could else be hidden from the other rules.
    wanted = [*names, _ESCAPED] if names else []
    return [
        {
            "name": name,
            "says": known[name]["says"],
            "files": {f"refused-{name}-{number}.list": text for number, text in enumerate(known[name]["patterns"], 1)},
        }
        for name in wanted
    ]


def failures(where: str, exposure: Exposure, judgement: Judgement) -> list[Failure]:
    """Return a refusal for every advisory that nothing stands against."""
    return [
        Failure(
            "plan.advisory",
            f"{where}: nothing stands against {one['id']} of {exposure.engine} {exposure.version}",
            f"{one['what']} (severity {one['severity']})",
            _way_out(exposure, one),
        )
        for one in judgement.open
    ]


def _way_out(exposure: Exposure, one: Mapping[str, Any]) -> str:
    flags = [*one.get("when", {}).get("flags", []), *one.get("when", {}).get("says", {})]
    names = dict.fromkeys(_DECLARED.get(name, f"flags.{name}") for name in flags)
    ways = [f"take {' and '.join(names)} out"] if names else []
    ways += [f"choose a stack with {exposure.engine} {one['before']} or later"] if "before" in one else []
    return ", ".join([*ways, f"or accept it: gpuready_accept_advisories: [{one['id']}]"]).removeprefix("or ")


def unknown_ids(host: str, accepted: Iterable[str]) -> list[Failure]:
    """Return a refusal for every accepted id that the catalog does not know."""
    known = [name for one in catalog.load("advisories")["advisories"] for name in (one["id"], one.get("alias")) if name]
    found = []
    for name in accepted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            fix = f"did you mean {near[0]}?" if near else "docs/advisories.md lists those that are known"
            found.append(
                Failure("plan.advisory", f"host {host}, gpuready_accept_advisories: {name} is not known", "", fix)
            )
    return found

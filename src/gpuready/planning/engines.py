"""Which engines a host gets: from its stack, for its card and its Pythons, each with a lock."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuready import catalog
from gpuready.outcome import Failure, Refusal
from gpuready.planning import support
from gpuready.planning.memory.device import device
from gpuready.planning.memory.run import Run
from gpuready.planning.preflight import HIDDEN_FROM_ENGINES

FOLDER = "/opt/gpuready/engines"
SYSTEM_PYTHON = "/usr/bin/python3"
"""The distribution's own Python, of whichever version."""


@dataclass(frozen=True)
class Choice:
    """What an operator may say about engines beside the deployments: the knobs of the role engines."""

    everything: bool = False
    """Whether all engines of the stack that the card can run are installed, not only those that deployments name."""
    pythons: Mapping[str, str] = field(default_factory=dict)
    """Paths of Pythons by engine, e.g. `{"sglang": "/opt/python3.12/bin/python3"}`."""

    @classmethod
    def of_knobs(cls, knobs: Mapping[str, Any]) -> Choice:
        """Read the knobs, named without their prefix."""
        return cls(knobs.get("install") == "all", dict(knobs.get("pythons") or {}))


@dataclass(frozen=True)
class Python:
    """A Python on the server."""

    version: str
    """E.g. `3.12`."""
    path: str

    @property
    def package(self) -> str | None:
        """Return the distribution's package of it; None where it came another way."""
        if self.path == SYSTEM_PYTHON:
            return "python3"
        return f"python{self.version}" if self.path.startswith("/usr/bin/") else None


def folder_name(engine: str, version: str, lock_sha256: str) -> str:
    """Return the name of the folder of an engine's environment; another lock is another folder."""
    return f"{engine}-{version}-{lock_sha256[:12]}"


def folder_of(engine: str, version: str, lock_text: str) -> str:
    """Return the folder of an engine's environment on the server."""
    return f"{FOLDER}/{folder_name(engine, version, hashlib.sha256(lock_text.encode()).hexdigest())}"


def lock_name(entry: Mapping[str, Any], python: str) -> str:
    """Return the name of an engine's lock for a Python, e.g. 3.12."""
    return str(entry["lock"].format(py=python.replace(".", "")))


def stack_failures(host: str, spec: Mapping[str, Any], stack: Mapping[str, Any], card: str) -> list[Failure]:
    """Return what is refused of the stack and the deployments' engines; `card` is the catalog's key of the GPU."""
    failures = []
    name = spec["gpuready_stack"]
    if stack["simulated_only"] and not spec["gpuready_simulated"]:
        what = f"host {host}, gpuready_stack = {name!r} is for simulated servers only"
        fix = "choose another stack; gpuready_simulated: true is for machines of ./scripts/quickstart"
        failures.append(Failure("plan.simulated_only", what, "", fix))
    for deployment in spec["gpuready_deployments"]:
        where = f"host {host}, deployment {deployment['name']}, engine = {deployment['engine']!r}"
        if deployment["engine"] not in stack["engines"]:
            fix = f"stack {name} has {', '.join(stack['engines'])}"
            failures.append(Failure("plan.engine_not_in_stack", f"{where} is not in stack {name}", "", fix))
        else:
            failures += _objections(where, deployment["engine"], stack, card)
    return failures


def _objections(where: str, engine: str, stack: Mapping[str, Any], card: str) -> list[Failure]:
    found = device(card)
    assert found is not None  # noqa: S101 - a key of the catalog
    entry, run = stack["engines"][engine], Run(engine, stack["engines"][engine]["version"])
    # A simulated server's toolkit is whatever its distribution has; nothing is compiled with it.
    cuda = None if stack["simulated_only"] else stack["host"]["cuda"]["version"]
    failures = []
    for one in support.on_card(found, run, cuda=cuda, made_for=entry.get("cuda")):
        if one.code == "card":
            others = _stacks_for(engine, card)
            fix = f"choose gpuready_stack: {others[0]}, or another engine" if others else "choose another engine"
            what = f"{where}: {engine} {entry['version']} does not run on {card}"
            failures.append(Failure("plan.engine_card", what, one.why, fix))
        else:
            what = f"{where}: {one.what}"
            failures.append(Failure(f"plan.engine_{one.code}", what, one.why, "leave cuda_version to the stack"))
    return failures


def _stacks_for(engine: str, card: str) -> list[str]:
    """Return the stacks with an engine's release that runs on a card, those with a lock first."""
    found = []
    where = device(card)
    assert where is not None  # noqa: S101 - a key of the catalog
    for name, stack in catalog.load("stacks")["stacks"].items():
        entry = stack["engines"].get(engine)
        if entry and not stack["simulated_only"] and not support.on_card(where, Run(engine, entry["version"])):
            found.append((not _locks(entry), name))
    return [name for _, name in sorted(found, key=lambda one: one[0])]


def _locks(entry: Mapping[str, Any]) -> list[str]:
    """Return the Pythons for which there is a lock of an engine."""
    return [python for python in entry["pythons"] if catalog.has_lock(lock_name(entry, python))]


def choose(
    host: str,
    spec: Mapping[str, Any],
    stack: Mapping[str, Any],
    card: str,
    facts: Mapping[str, Any],
    choice: Choice,
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Return the engines of a host, and those that it could run and does not get, each with the reason.

    `facts` are the server's: `python` its own (3.13), `pythons` by version with their paths, `pythons_named` what a
    look at the operator's paths found.

    Raises:
        Refusal: where an engine that a deployment names cannot be installed.
    """
    users: dict[str, list[str]] = {}
    for deployment in spec["gpuready_deployments"]:
        users.setdefault(deployment["engine"], []).append(deployment["name"])
    engines, left_out, failures = [], [], []
    for name, entry in stack["engines"].items():
        used_by = users.get(name, [])
        if not used_by and not (choice.everything and not _objections("", name, stack, card)):
            continue
        where = f"host {host}, deployment {', '.join(used_by)}" if used_by else f"host {host}, engines_install = all"
        found = _entry(where, name, entry, facts, choice.pythons.get(name))
        if not isinstance(found, Failure):
            engines.append({**found, "used_by": used_by})
        elif used_by or name in choice.pythons:
            failures.append(found)
        else:
            left_out.append({"engine": name, "version": entry["version"], "why": found.sentence()})
    if failures:
        raise Refusal(failures)
    return sorted(engines, key=lambda one: str(one["engine"])), left_out


def _entry(
    where: str, name: str, entry: Mapping[str, Any], facts: Mapping[str, Any], named: str | None
) -> dict[str, Any] | Failure:
    """Return an engine's part of the plan, or why it cannot be installed."""
    title = f"{name} {entry['version']}"
    python = (
        _named_python(where, name, title, named, entry, facts) if named else _python(where, name, title, entry, facts)
    )
    if isinstance(python, Failure):
        return python
    lock = lock_name(entry, python.version)
    if not catalog.has_lock(lock):
        what = f"{where}: {title} has no lock in this checkout yet (catalog/locks/{lock}.txt)"
        indexes = " and ".join(entry["index"]) or "the package index"
        return Failure(
            "plan.no_lock",
            what,
            "its files stand at " + indexes,
            f"run scripts/lock {lock} on a host that reaches them, and bring the file here",
        )
    return {
        "engine": name,
        "version": entry["version"],
        "lock": lock,
        "folder": folder_of(name, entry["version"], catalog.lock_text(lock)),
        "apt": _apt(entry["apt"], python),
        "python": python.path,
        "index": list(entry["index"]),
        "download_gib": entry["download_gib"],
        "install_gib": entry["install_gib"],
        "standin": entry["standin"],
    }


def _apt(names: Iterable[str], python: Python) -> list[str]:
    """Return the packages of an engine; what belongs to a Python that the operator brought comes with it."""
    return [name.format(python=python.package) for name in names if python.package or "{python}" not in name]


def _python(where: str, name: str, title: str, entry: Mapping[str, Any], facts: Mapping[str, Any]) -> Python | Failure:
    """Return the Python for an engine: the server's own where it fits, else the newest that does."""
    there = _available(facts)
    # A lock that can be had now is preferred; where there is none at all, the plan names the one that is wanted.
    for versions in (_locks(entry), entry["pythons"]):
        for one in there:
            if one.version in versions:
                return one
    systems = [
        f"{system} ({version})"
        for system, version in catalog.load("stacks")["distribution_pythons"].items()
        if version in entry["pythons"]
    ]
    what = f"{where}: {title} has no lock for the server's Python {', '.join(one.version for one in there)}"
    fix = (
        f"use {_or(systems)}, or install a Python {_or(entry['pythons'])} on the server and name it: "
        f"engines_pythons: {{{name}: /opt/python{entry['pythons'][-1]}/bin/python3}}"
    )
    return Failure("plan.python", what, f"it runs on Python {', '.join(entry['pythons'])}", fix)


def _available(facts: Mapping[str, Any]) -> list[Python]:
    """Return the distribution's Pythons on a server: its own first, then from the newest on."""
    own = Python(facts["python"], SYSTEM_PYTHON)
    others = [Python(*one) for one in (facts.get("pythons") or {}).items() if one[0] != own.version]
    return [own, *sorted(others, key=lambda one: [int(part) for part in one.version.split(".")], reverse=True)]


def _named_python(
    where: str, name: str, title: str, path: str, entry: Mapping[str, Any], facts: Mapping[str, Any]
) -> Python | Failure:
    """Return the Python that the operator named for an engine, by what a look at the server found."""
    what = f"{where}, engines_pythons.{name} = {path!r}"
    fits = f"name one of version {_or(entry['pythons'])}"
    if path.startswith(HIDDEN_FROM_ENGINES):
        why = f"the engines' unit sees nothing below {', '.join(HIDDEN_FROM_ENGINES)}"
        return Failure("plan.python", f"{what} is hidden from the engines", why, "put it below /opt or /usr/local")
    look = (facts.get("pythons_named") or {}).get(path) or {"version": "", "problem": "it was not looked at"}
    if look["problem"]:
        return Failure("plan.python", f"{what} cannot be used on the server", look["problem"], fits)
    if look["version"] not in entry["pythons"]:
        return Failure("plan.python", f"{what} is Python {look['version']}, and {title} does not run on it", "", fits)
    return Python(look["version"], path)


def _or(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)

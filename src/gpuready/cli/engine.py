"""`gpuready engine ...`: inference engines on the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpuready.cli.verb import Call, Verb
from gpuready.operations import packages
from gpuready.operations.machine import Machine
from gpuready.outcome import Failure, Refusal, Result
from gpuready.serving import engines, locks
from gpuready.serving.packages import Source

_DEFAULT_PYTHON = "/usr/bin/python3"


def _text(given: dict[str, Any], key: str) -> str:
    value = given.get(key)
    if not isinstance(value, str) or not value.strip():
        raise Refusal(Failure("input.missing", f"Input key {key} is {value!r}", "", "give a text that is not empty"))
    return value


def _source(given: dict[str, Any]) -> Source:
    return Source(
        str(given.get("index_url") or ""),
        [str(one) for one in given.get("extra_index_urls") or []],
        [str(one) for one in given.get("find_links") or []],
    )


def _install(call: Call) -> Result:
    given = call.input
    lock = locks.parse(_text(given, "lock"), _text(given, "lock_text"))
    known = engines.catalog_entry(lock.name)
    wanted = engines.Wanted(
        engine=_text(given, "engine"),
        version=_text(given, "version"),
        lock=lock,
        tool=locks.parse("uv", _text(given, "tool_lock_text")),
        smoke=[str(one) for one in given.get("smoke") or known.get("smoke") or []],
        install_gib=float(given.get("install_gib") or known.get("install_gib") or 0),
        source=_source(given),
        python=str(given.get("python") or _DEFAULT_PYTHON),
        root=Path(given.get("root") or engines.ROOT),
    )
    return engines.install(wanted, check=call.check)


def _prepare(call: Call) -> Result:
    """Install what the engines need from the system, and say which engines are missing."""
    given = call.input
    if not isinstance(given.get("packages"), dict) or not isinstance(given.get("folders"), list):
        what = "the input of engine prepare is {packages: {names: ...}, folders: [...], python: ...}"
        raise Refusal(Failure("input.engine", what, "a part is missing", "site.yml makes it"))
    result = packages.ensure(Machine(), packages.Wanted(**given["packages"]), call.check)
    found = engines.listing(engines.ROOT / "engines", str(given.get("python") or _DEFAULT_PYTHON))
    whole = [entry["folder"] for entry in found if entry["whole"]]
    result.data["missing"] = [folder for folder in given["folders"] if folder not in whole]
    if not result.data["missing"]:
        left = engines.tidy(engines.ROOT, call.check)
        result.diff += left
        result.changed = result.changed or bool(left)
    names = ", ".join(Path(folder).name for folder in result.data["missing"])
    result.summary = f"{result.summary}; {f'missing: {names}' if names else 'every engine is whole'}"
    return result


def _list(call: Call) -> Result:
    given = call.input
    root = Path(given.get("root") or engines.ROOT)
    return Result(data={"engines": engines.listing(root / "engines", str(given.get("python") or _DEFAULT_PYTHON))})


def _wheels(call: Call) -> Result:
    lock = locks.parse(_text(call.input, "lock"), _text(call.input, "lock_text"))
    folders = [Path(str(one).removeprefix("file://")) for one in call.input.get("folders") or []]
    return Result(data={"wheels": [str(path) for path in locks.wheels_in(folders, lock)]})


VERBS: dict[str, Verb] = {
    "prepare": Verb(
        "install what engines need from the system, and say which engines are missing",
        _prepare,
        changes=True,
        takes_input=True,
    ),
    "install": Verb("build an engine's environment from its lock", _install, changes=True, takes_input=True),
    "list": Verb("say which engines are there, and whether each is whole", _list, takes_input=True),
    "wheels": Verb("say which wheels in folders a lock names by hash", _wheels, takes_input=True),
}

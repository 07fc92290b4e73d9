"""`gpuready engine ...`: inference engines on the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpuready.cli.verb import Call, Verb
from gpuready.outcome import Failure, Refusal, Result
from gpuready.planning.plan import engine_folder_name
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


def _list(call: Call) -> Result:
    given = call.input
    root = Path(given.get("root") or engines.ROOT)
    found = engines.listing(root / "engines", str(given.get("python") or _DEFAULT_PYTHON))
    whole = {Path(entry["folder"]).name for entry in found if entry["whole"]}
    missing = [
        one
        for one in given.get("wanted") or []
        if engine_folder_name(_text(one, "engine"), _text(one, "version"), _text(one, "lock_sha256")) not in whole
    ]
    return Result(data={"engines": found, "missing": missing})


def _wheels(call: Call) -> Result:
    lock = locks.parse(_text(call.input, "lock"), _text(call.input, "lock_text"))
    folders = [Path(str(one).removeprefix("file://")) for one in call.input.get("folders") or []]
    return Result(data={"wheels": [str(path) for path in locks.wheels_in(folders, lock)]})


VERBS: dict[str, Verb] = {
    "install": Verb("build an engine's environment from its lock", _install, changes=True, takes_input=True),
    "list": Verb("say which engines are there, and which of the wanted ones are missing", _list, takes_input=True),
    "wheels": Verb("say which wheels in folders a lock names by hash", _wheels, takes_input=True),
}

"""`gpuready engine ...`: inference engines on the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpuready.cli.verb import Call, Verb
from gpuready.operations import packages
from gpuready.operations.machine import Machine
from gpuready.outcome import Failure, Refusal, Result
from gpuready.planning.engines import SYSTEM_PYTHON
from gpuready.serving import engine_store, engines, locks
from gpuready.serving.files import read_json
from gpuready.serving.layout import Layout
from gpuready.serving.packages import Source


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
        python=str(given.get("python") or SYSTEM_PYTHON),
        root=Path(given.get("root") or engine_store.ROOT),
    )
    return engines.install(wanted, check=call.check)


def _prepare(call: Call) -> Result:
    """Install what the engines need from the system, say which engines are missing, and make room for these."""
    given = call.input
    if not isinstance(given.get("packages"), dict) or not isinstance(given.get("folders"), list):
        what = "the input of engine prepare is {packages: {names: ...}, folders: [...], keep: ..., left_out: [...]}"
        raise Refusal(Failure("input.engine", what, "a part is missing", "site.yml makes it"))
    result = packages.ensure(Machine(), packages.Wanted(**given["packages"]), call.check)
    folders = [str(folder) for folder in given["folders"]]
    whole = [entry["folder"] for entry in engine_store.listing(engine_store.ROOT / "engines") if entry["whole"]]
    result.data["missing"] = [folder for folder in folders if folder not in whole]
    result.data["notes"] = [f"{one['engine']} is left out: {one['why']}" for one in given.get("left_out") or []]
    if result.data["missing"]:
        going = engine_store.prunable(engine_store.ROOT, Layout(), folders, _keep(given))
        gone = engine_store.prune(going, call.check)
    else:
        gone = engine_store.tidy(engine_store.ROOT, call.check)
    result.diff += gone
    result.changed = result.changed or bool(gone)
    names = ", ".join(Path(folder).name for folder in result.data["missing"])
    result.summary = f"{result.summary}; {f'missing: {names}' if names else 'every engine is whole'}"
    return result


def _keep(given: dict[str, Any]) -> int:
    keep = given.get("keep", 1)
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise Refusal(Failure("input.engine", f"Input key keep is {keep!r}", "", "give a whole number from 0 on"))
    return keep


def _prune(call: Call) -> Result:
    given = call.input
    root = Path(given.get("root") or engine_store.ROOT)
    layout = Layout(Path(given["state_root"])) if given.get("state_root") else Layout()
    plan = read_json(layout.plan) or {}
    folders = given.get("folders") or [one["folder"] for one in plan.get("engines", [])]
    going = engine_store.prunable(root, layout, [str(one) for one in folders], _keep(given))
    result = Result(changed=bool(going), diff=engine_store.prune(going, call.check))
    names = ", ".join(Path(one["folder"]).name for one in going)
    others = [one["folder"] for one in engine_store.listing(root / "engines") if not one["ours"]]
    if others:
        result.data["notes"] = [f"not made by gpuready, and left alone: {', '.join(others)}"]
    said = "would be removed" if call.check else "removed"
    result.summary = f"Engines that nobody needs, {said}: {names}." if names else "Every engine is needed or kept."
    return result


def _list(call: Call) -> Result:
    root = Path(call.input.get("root") or engine_store.ROOT)
    return Result(data={"engines": engine_store.listing(root / "engines")})


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
    "prune": Verb(
        "remove engines that no plan, release or replica names, but the newest former ones",
        _prune,
        changes=True,
        takes_input=True,
    ),
    "list": Verb("say which engines are there, and whether each is whole", _list, takes_input=True),
    "wheels": Verb("say which wheels in folders a lock names by hash", _wheels, takes_input=True),
}

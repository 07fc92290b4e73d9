"""`gpuready model ...`: models on the server's disk."""

from __future__ import annotations

import base64
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gpuready.cli.verb import Call, Verb
from gpuready.operations import storage, storage_view
from gpuready.operations.machine import Machine
from gpuready.outcome import Change, Exit, Failure, Refusal, Result
from gpuready.serving import models


def _wanted(call: Call) -> list[dict[str, Any]]:
    wanted = call.input.get("models")
    if not isinstance(wanted, list) or not all(isinstance(one, dict) and _is_path(one.get("path")) for one in wanted):
        raise Refusal(Failure("input.missing", "Input key models is not a list of {model, path, generated}"))
    return wanted


def _is_path(given: object) -> bool:
    return isinstance(given, str) and bool(given)


def _store(call: Call) -> Path:
    store = call.input.get("store") or str(models.STORE)
    if not _is_path(store):
        raise Refusal(Failure("input.store", f"Input key store is {store!r}", "", "give the path of a folder"))
    return Path(store)


def _check(call: Call) -> Result:
    result = Result()
    _judge(call, result)
    if result.failures:
        result.exit = Exit.VERIFY_NO
        result.summary = f"{len(result.failures)} problems with models."
    else:
        count = len(call.input["models"]) - len(result.data["missing"])
        result.summary = f"{count} models are whole and readable."
    return result


def _judge(call: Call, result: Result, pending: Collection[str] = ()) -> None:
    """Add what is wrong with the models of the input; `pending` are folders that a check would have filled."""
    missing = []
    for one in _wanted(call):
        path = Path(one["path"])
        if one.get("generated") and not models.is_whole(path):
            # gpuready brings it itself: missing is a thing to do, not a failure.
            missing.append(one)
        elif one["path"] not in pending:
            result.failures += models.check(path, one.get("kind", "model"), pickle=bool(one.get("allow_pickle")))
    result.data["missing"] = missing


def _bring(call: Call) -> Result:
    """Download what has a source, then judge every model: the whole stage in one call."""
    hubs = models.Hubs(call.input.get("hubs") or {}, call.input.get("models_token"))
    seconds, full = call.input.get("seconds"), bool(call.input.get("verify"))
    result = _mounted(call)
    pending = set()
    with result.kept_by_failures(call.check):
        for one in _wanted(call):
            if not one.get("source"):
                continue
            brought = models.bring(one, hubs, seconds=seconds, full=full, check=call.check)
            result.include(brought)
            if "progress" in brought.data:
                result.exit, result.data = brought.exit, {**result.data, **brought.data}
                return result
            if brought.changed:
                result.summary = f"{result.summary} {brought.summary}".lstrip()
                pending |= {one["path"]} if call.check else set()
        _judge(call, result, pending)
    if result.failures:
        result.exit = Exit.FAILED if result.changed else Exit.VERIFY_NO
    result.summary = result.summary or f"{len(call.input['models'])} models are whole and readable."
    return result


def _mounted(call: Call) -> Result:
    """Have the store's filesystem there first; a check sees it as it will be."""
    given = call.input.get("store")
    if given is not None and not isinstance(given, dict):
        raise Refusal(Failure("input.store", f"Input key store is {given!r}", "", "give {mount: ..., disk: ...}"))
    wanted = storage.declared(given)
    result = storage.settle(Machine(), wanted, call.check)
    if wanted is not None and result.data.get("pending"):
        storage_view.see(Machine(), wanted)
    return result


def _verify(call: Call) -> Result:
    """Read every byte of the models that gpuready downloaded, and compare their hashes."""
    paths = [Path(one["path"]) for one in _wanted(call)] if call.input.get("models") else _downloaded(call)
    result = Result(data={"verified": [str(path) for path in paths]})
    for path in paths:
        result.failures += models.verify(path)
    result.exit = Exit.VERIFY_NO if result.failures else Exit.DONE
    result.summary = f"{len(paths)} models were compared by hash, {len(result.failures)} problems."
    return result


def _downloaded(call: Call) -> list[Path]:
    store = _store(call)
    return sorted(path for path in store.glob("[!.]*@*") if (path / models.MANIFEST).exists())


def _place(call: Call) -> Result:
    given = call.input
    path = Path(str(given.get("path") or ""))
    try:
        content = {str(name): base64.b64decode(data, validate=True) for name, data in given["files"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Refusal(Failure("input.files", "Input key files is not {name: base64}", str(error))) from error
    if any("/" in name or name.startswith(".") for name in content) or not path.is_absolute():
        raise Refusal(Failure("input.files", "Input names a file outside the model's folder, or path is relative"))
    revision = models.revision(content)
    if path.name.rpartition("@")[2] != revision:
        what = f"The model sent has revision {revision}, {path} asks for another one"
        raise Refusal(Failure("model.revision", what, "", "run the plan again"))
    if models.is_whole(path):
        return Result(summary=f"{path} is there.")
    before = "there, but not as it was made (content or rights)\n" if path.exists() else ""
    after = "".join(f"{name} {len(data)} bytes\n" for name, data in sorted(content.items()))
    result = Result(changed=True, diff=[Change(str(path), before, after)])
    if call.check:
        result.summary = f"{path} would be written."
        return result
    os.umask(0o022)
    models.place(content, path)
    result.summary = f"{path} was written."
    return result


def _list(call: Call) -> Result:
    store = _store(call)
    found = []
    for folder in sorted(store.glob("*@*")) if store.is_dir() else []:
        if not folder.name.startswith("."):
            name, _, revision = folder.name.rpartition("@")
            entry = {"model": name.replace("--", "/"), "revision": revision, "path": str(folder)}
            kind = "adapter" if (folder / models.ADAPTER).exists() else "model"
            # What gpuready downloaded was allowed then; whether it still is, the plan says.
            failures = models.check(folder, kind, pickle=(folder / models.MANIFEST).exists())
            found.append({**entry, "whole": not failures, "why": " ".join(one.sentence() for one in failures)})
    return Result(data={"models": found})


VERBS: dict[str, Verb] = {
    "check": Verb("say whether models are whole and readable by the engines", _check, takes_input=True),
    "bring": Verb("download the models of a plan, and judge all of them", _bring, changes=True, takes_input=True),
    "verify": Verb("compare every byte of downloaded models with their hashes", _verify),
    "place": Verb("write a small model that was sent along", _place, changes=True, takes_input=True),
    "list": Verb("say which models lie in the store", _list, takes_input=True),
}

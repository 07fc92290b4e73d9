"""`gpuready model ...`: models on the server's disk."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

from gpuready.cli.verb import Call, Verb
from gpuready.outcome import Change, Exit, Failure, Refusal, Result
from gpuready.serving import models


def _wanted(call: Call) -> list[dict[str, Any]]:
    wanted = call.input.get("models")
    if not isinstance(wanted, list) or not all(isinstance(one, dict) and one.get("path") for one in wanted):
        raise Refusal(Failure("input.missing", "Input key models is not a list of {model, path, generated}"))
    return wanted


def _check(call: Call) -> Result:
    result = Result()
    missing = []
    for one in _wanted(call):
        path = Path(one["path"])
        if one.get("generated") and not models.is_whole(path):
            # gpuready brings it itself: missing is a thing to do, not a failure.
            missing.append(one)
            continue
        result.failures += models.check(path)
    result.data["missing"] = missing
    if result.failures:
        result.exit = Exit.VERIFY_NO
        result.summary = f"{len(result.failures)} problems with models."
    else:
        result.summary = f"{len(call.input['models']) - len(missing)} models are whole and readable."
    return result


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
    store = Path(call.input.get("store") or models.STORE)
    found = []
    for folder in sorted(store.glob("*@*")) if store.is_dir() else []:
        if not folder.name.startswith("."):
            name, _, revision = folder.name.rpartition("@")
            entry = {"model": name.replace("--", "/"), "revision": revision, "path": str(folder)}
            failures = models.check(folder)
            found.append({**entry, "whole": not failures, "why": " ".join(one.sentence() for one in failures)})
    return Result(data={"models": found})


VERBS: dict[str, Verb] = {
    "check": Verb("say whether models are whole and readable by the engines", _check, takes_input=True),
    "place": Verb("write a small model that was sent along", _place, changes=True, takes_input=True),
    "list": Verb("say which models lie in the store", _list, takes_input=True),
}

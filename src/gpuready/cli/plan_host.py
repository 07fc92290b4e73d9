"""`gpuready plan make --host`: all deployments of a host together, from its variables alone; no server is asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuready.cli import asked
from gpuready.cli.reading import mapping_of
from gpuready.cli.refusing import refused
from gpuready.outcome import Failure, MachineCannot, Refusal
from gpuready.planning.model.facts import ModelFacts
from gpuready.planning.plan import effective_stack, make_plan


def plan_of(path: str) -> dict[str, Any]:
    """Return the plan of the host whose `gpuready_*` variables a file holds.

    Raises:
        Refusal: with every mistake of the declaration at once, each with its line.
    """
    try:
        from gpuready.spec import check_declaration
        from gpuready.spec.files import line_in
    except ModuleNotFoundError as error:
        what = "--host: declarations are checked on the controller only"
        raise MachineCannot(Failure("plan.controller", what, "", "run it from the checkout's .venv")) from error
    declared, host = mapping_of(path), Path(path).stem

    def locate(keys: tuple[object, ...]) -> str:
        line = line_in(Path(path), keys, host) if not path.endswith(".json") else None
        return f"{path}:{line}" if line else path

    spec, failures = check_declaration(host, declared, {}, locate)
    if failures or spec is None:
        raise Refusal(failures)
    plain = spec.model_dump(exclude={"gpuready_proxy"})
    if not plain["gpuready_deployments"]:
        raise refused("plan.no_deployments", f"{path}: gpuready_deployments is empty", "", "name what it serves")
    stack = effective_stack(plain, {})
    if stack is None:
        raise refused("plan.stack", f"{path}: gpuready_stack = {plain['gpuready_stack']!r} does not exist")
    facts = {**_pythons(stack), "gpus": [{}] * plain["gpuready_gpu_count"]}
    return make_plan(host, plain, stack, facts, _models(plain), {})


def _pythons(stack: Mapping[str, Any]) -> dict[str, Any]:
    """Return every Python that an engine of the stack runs on: which ones a server has is not known here."""
    versions = {version for engine in stack["engines"].values() for version in engine["pythons"]}
    newest = max(versions, key=lambda version: [int(part) for part in version.split(".")])
    return {"python": newest, "pythons": {version: f"/usr/bin/python{version}" for version in versions}}


def _models(spec: Mapping[str, Any]) -> dict[str, ModelFacts]:
    """Return every model's sizes: from its folder where that is here, else from the catalog."""
    models = {}
    for one in [*spec["gpuready_deployments"], *(one["draft"] for one in spec["gpuready_deployments"] if one["draft"])]:
        if one["model"] is not None:
            folder = one["model_path"] if one["model_path"] and Path(one["model_path"]).is_dir() else None
            models[one["model"]] = asked.model(one["model"], folder, None).facts
    return models

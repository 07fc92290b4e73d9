"""`gpuready gateway`: the only door to the engines."""

from __future__ import annotations

from gpuready.cli.verb import Call, Verb
from gpuready.operations import gateway, packages
from gpuready.operations.machine import Machine
from gpuready.outcome import Failure, Refusal, Result


def _apply(call: Call) -> Result:
    plan, files, unit, needed = (call.input.get(name) for name in ("plan", "files", "unit", "packages"))
    if not (isinstance(plan, dict) and isinstance(files, dict) and isinstance(unit, str) and isinstance(needed, dict)):
        what = "the input of gateway apply is {packages: {names: ...}, plan: ..., files: {name: text}, unit: text}"
        raise Refusal(Failure("input.gateway", what, "a part is missing", "site.yml makes it"))
    result = packages.ensure(Machine(), packages.Wanted(**needed), call.check)
    with result.kept_by_failures(call.check):
        applied = gateway.apply(plan, files, unit, call.check)
    result.include(applied)
    result.data, result.summary = applied.data, applied.summary
    return result


VERBS = {"apply": Verb("bring the gateway to its files and prove it", _apply, changes=True, takes_input=True)}

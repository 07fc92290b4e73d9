"""`gpuready gateway`: the only door to the engines."""

from __future__ import annotations

from gpuready.cli.verb import Call, Verb
from gpuready.operations import gateway
from gpuready.outcome import Failure, Refusal, Result


def _apply(call: Call) -> Result:
    parts = [call.input.get(name) for name in ("plan", "files", "unit")]
    if not (isinstance(parts[0], dict) and isinstance(parts[1], dict) and isinstance(parts[2], str)):
        what = "the input of gateway apply is {plan: ..., files: {name: text}, unit: text}"
        raise Refusal(Failure("input.gateway", what, "a part is missing", "site.yml makes it"))
    return gateway.apply(parts[0], parts[1], parts[2], call.check)


VERBS = {"apply": Verb("bring the gateway to its files and prove it", _apply, changes=True, takes_input=True)}

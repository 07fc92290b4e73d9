"""`gpuready agent`: the server part itself."""

from __future__ import annotations

from gpuready.cli.verb import Call, Verb
from gpuready.operations import agent
from gpuready.operations.machine import Machine
from gpuready.outcome import Result


def _install(call: Call) -> Result:
    return agent.install(Machine(), call.check)


VERBS = {
    "install": Verb(
        "install the running server part as the server's own, with its folders and the engines' user",
        _install,
        changes=True,
    )
}

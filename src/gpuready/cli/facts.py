"""`gpuready facts`: what this server is."""

from __future__ import annotations

from gpuready.cli.verb import Call, Verb
from gpuready.operations import facts
from gpuready.outcome import Result


def _show(call: Call) -> Result:
    return Result(data=facts.show(call.input))


VERBS = {"show": Verb("show what this server is, read now", _show, takes_input=True)}

"""`gpuready spec`: what an operator declares. Controller only."""

from __future__ import annotations

from gpuready.cli.verb import Call, Verb
from gpuready.outcome import Failure, MachineCannot, Result


def _spec_room() -> None:
    try:
        import gpuready.spec  # noqa: F401
    except ModuleNotFoundError as error:
        what = "gpuready spec runs on the controller only"
        raise MachineCannot(Failure("spec.controller", what, "", "run it from the checkout's .venv")) from error


def _check(call: Call) -> Result:
    _spec_room()
    from gpuready.spec.check import check_declaration

    spec, failures = check_declaration("input", call.input, {})
    if failures:
        from gpuready.outcome import Refusal

        raise Refusal(failures)
    return Result(summary="the declaration is good", data=spec.model_dump() if spec else {})


def _schema(_: Call) -> Result:
    _spec_room()
    from gpuready.spec.model import HostSpec

    return Result(data=HostSpec.model_json_schema())


VERBS = {
    "check": Verb("check a declaration", _check, takes_input=True),
    "schema": Verb("print the JSON Schema of the shared variables", _schema),
}

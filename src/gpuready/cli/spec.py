"""`gpuready spec`: what an operator declares. Controller only."""

from __future__ import annotations

from pathlib import Path

from gpuready.cli.verb import Call, Verb
from gpuready.outcome import Change, Failure, MachineCannot, Result

CHECKOUT = Path(__file__).resolve().parents[3]


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


def _docs(call: Call) -> Result:
    _spec_room()
    from gpuready.rendering import advisories, claims
    from gpuready.spec.docs import pages

    docs, result = CHECKOUT / "docs", Result()
    made = {docs / "reference" / name: text for name, text in pages(CHECKOUT / "roles").items()}
    made |= {docs / "claims.md": claims.page(), docs / "advisories.md": advisories.page()}
    for path, text in made.items():
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if before != text:
            result.changed = True
            result.diff.append(Change(str(path.relative_to(CHECKOUT)), before, text))
            if not call.check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    said = "would be written anew" if call.check else "are written anew"
    state = said if result.changed else "are as they should be"
    result.summary = f"the pages of docs/reference, docs/claims.md and docs/advisories.md {state}"
    return result


VERBS = {
    "check": Verb("check a declaration", _check, takes_input=True),
    "schema": Verb("print the JSON Schema of the shared variables", _schema),
    "docs": Verb("write docs/reference, claims.md and advisories.md from what they are made of", _docs, changes=True),
}

"""`gpuready release`: rendered deployments on this server."""

from __future__ import annotations

from gpuready.cli.verb import Call, Verb
from gpuready.operations.release import Applier
from gpuready.operations.trial import settings_of
from gpuready.outcome import Failure, Refusal, Result
from gpuready.serving.layout import Layout, split_replica
from gpuready.serving.releases import Store, replicas_on_disk


def _apply(call: Call) -> Result:
    plan, files, unit = (call.input.get(name) for name in ("plan", "files", "unit"))
    beside = call.input.get("beside", {})
    if not (isinstance(plan, dict) and isinstance(files, dict) and isinstance(unit, str) and isinstance(beside, dict)):
        form = "{plan: ..., files: {deployment: {name: text}}, unit: text, beside: {unit: text}, settings: ...}"
        what = f"the input of release apply is {form}"
        raise Refusal(Failure("input.release", what, "a part is missing", "site.yml makes it"))
    settings = settings_of(call.input.get("settings") or {})
    return Applier(Layout(), call.check, settings).apply(plan, files, unit, beside)


def _list(_: Call) -> Result:
    layout = Layout()
    data = {}
    for replica in sorted(replicas_on_disk(layout)):
        name, index = split_replica(replica)
        store = Store(layout, name)
        data[replica] = {
            "current": store.current(index),
            "releases": [{"number": number, "verified": store.verified(number)} for number in store.numbers()],
        }
    return Result(data={"replicas": data})


VERBS = {
    "apply": Verb("bring all deployments to a plan", _apply, changes=True, takes_input=True),
    "list": Verb("list the releases of every replica", _list),
}

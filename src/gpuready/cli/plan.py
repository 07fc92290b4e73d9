"""`gpuready plan`: what fits and why."""

from __future__ import annotations

from gpuready.cli.plan_backtest import OPTIONS, run_backtest
from gpuready.cli.verb import Call, Verb
from gpuready.outcome import Failure, Refusal, Result
from gpuready.serving.files import read_json
from gpuready.serving.layout import Layout


def _explain(_: Call) -> Result:
    plan = read_json(Layout().plan)
    if plan is None:
        raise Refusal(Failure("plan.none", "this server has no plan yet", "", "run site.yml for it"))
    lines = []
    for deployment in plan["deployments"]:
        lines.append(f"{deployment['name']}:")
        lines += [f"  {line}" for line in deployment["explain"]]
    return Result(summary="\n".join(lines), data={"plan": plan})


VERBS = {
    "explain": Verb("say what was planned for this server, and why", _explain),
    "backtest": Verb(
        "compare the planner with runs that were measured", run_backtest, arguments=["runs"], options=OPTIONS
    ),
}

"""`gpuready plan`: what fits on which card, how many requests it serves, and why. Needs no GPU and no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuready.cli import asked, plan_backtest, plan_page
from gpuready.cli.plan_compare import run_compare, run_recommend
from gpuready.cli.plan_docs import run_docs
from gpuready.cli.plan_host import plan_of
from gpuready.cli.plan_options import COMPARE, EXPLAIN, MAKE, RECOMMEND
from gpuready.cli.reading import object_of
from gpuready.cli.refusing import Gathered, refused
from gpuready.cli.verb import Call, Verb
from gpuready.cli.writing import write
from gpuready.operations import readback
from gpuready.outcome import Failure, MachineCannot, Refusal, Result
from gpuready.planning import search
from gpuready.planning.explain import Bar, Explanation, explain, of_host, read
from gpuready.planning.wish import Option
from gpuready.serving.files import read_json
from gpuready.serving.layout import Layout


def _planned(call: Call) -> Option:
    """Return the best way to run the one deployment that the options ask for."""
    said, gathered = call.options, Gathered()
    chosen = gathered.of(lambda: asked.model(said["model"], said["config"], said["quantization"]))
    where = gathered.of(lambda: asked.place(said["gpu"], said["gpus"], said["mig"]))
    plain = gathered.of(lambda: asked.asked(said))
    gathered.end()
    if chosen is None or where is None or plain is None:
        raise AssertionError  # end() has refused
    runs = asked.engine(said["engine"], said["version"], where, chosen.facts)
    return search.best(asked.wish("chat", chosen, runs, plain), where)


def _make(call: Call) -> Result:
    if call.options["host"]:
        _alone(call, "host", "model", "config", "gpu", "mig", "engine", "version", "workload")
        return _stored(call, plan_of(call.options["host"]), call.options["host"], whole=False)
    return _shown(call, [explain(_planned(call))], whole=False)


def _explain(call: Call) -> Result:
    said = call.options
    if said["host"]:
        _alone(call, "host", "input", "model", "config", "gpu", "mig", "engine", "version", "workload")
        return _stored(call, plan_of(said["host"]), said["host"], whole=True)
    if said["model"] or said["config"] or said["gpu"]:
        _alone(call, "input" if said["input"] else "model", *(["model", "config", "gpu"] if said["input"] else []))
        return _shown(call, [explain(_planned(call))], whole=True)
    path = said["input"] or str(Layout().plan)
    plan = object_of(path) if said["input"] else read_json(Layout().plan)
    if plan is None:
        fix = "run site.yml for it, or name what is to be planned: --model and --gpu"
        raise Refusal(Failure("plan.none", "this server has no plan yet", "", fix))
    return _with_measured(call, _stored(call, plan, path, whole=True), [] if said["input"] else plan["deployments"])


def _with_measured(call: Call, result: Result, deployments: Sequence[Mapping[str, Any]]) -> Result:
    """Add what the engines of this server say that they have."""
    said = readback.sentences(Layout(), deployments)
    if said:
        lines = [*call.screen.heading("What the engines have"), *plan_page.bullets(said, call.screen)]
        result.page = "\n".join([result.page or result.summary, "", *lines])
        result.data["measured"] = said
    return result


def _alone(call: Call, chosen: str, *others: str) -> None:
    """Refuse options that say something else than the chosen one."""
    given = [f"--{name}" for name in others if call.options.get(name)]
    if given:
        what = f"--{chosen} and {', '.join(given)} contradict each other"
        raise refused("plan.contradiction", what, "", "say one of them")


def _stored(call: Call, plan: Mapping[str, Any], path: str, whole: bool) -> Result:
    """Show a stored plan, or what `plan make --json` has printed; an older plan has its sentences alone."""
    try:
        plan = plan["data"] if isinstance(plan.get("data"), Mapping) else plan
        deployments = plan.get("deployments") or []
        if "explanations" in plan:
            return _shown(call, [read(one) for one in plan["explanations"]], whole, plan=plan)
        if deployments and all("explanation" in one for one in deployments):
            gpus = [one["replicas"][0]["gpus"] for one in deployments]
            return _shown(call, [_deployed(one) for one in deployments], whole, gpus, plan)
        lines = []
        for deployment in plan["deployments"]:
            lines += [f"{deployment['name']}:", *(f"  {line}" for line in deployment["explain"])]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        fix = "give the plan.json of a server, or what gpuready plan make --json has printed"
        raise refused("plan.not_one", f"{path} is not a plan", "", fix) from error
    return Result(summary="\n".join(lines), data={"plan": dict(plan)})


def _deployed(deployment: Mapping[str, Any]) -> Explanation:
    """Return a deployment's explanation, with what its plan says beside it: that an engine is a stand-in."""
    found = read(deployment["explanation"])
    known = found.sentences()
    return replace(found, reasons=(*found.reasons, *(line for line in deployment["explain"] if line not in known)))


def _shown(
    call: Call,
    explanations: Sequence[Explanation],
    whole: bool,
    gpus: Sequence[Sequence[Any]] = (),
    plan: Mapping[str, Any] | None = None,
) -> Result:
    """Return explanations for people and machines, and write the pictures that were asked for."""
    if len(explanations) == 1:
        heading, bars = explanations[0].title, explanations[0].bars
        page = plan_page.page(explanations[0], call.screen, whole)
    else:
        placed = [(one, gpus[at] if at < len(gpus) else ()) for at, one in enumerate(explanations)]
        heading, bars = f"{len(explanations)} deployments of a host", of_host(placed)
        page = plan_page.host_page(bars, explanations, call.screen, whole)
    written = _write_pictures(call, heading, explanations, bars)
    data: dict[str, Any] = {"explanations": [one.as_dict() for one in explanations]}
    if plan is not None and "deployments" in plan:
        data["plan"] = dict(plan)
    return Result(
        summary=" ".join(f"{one.name}: {one.title}. {one.limit}" for one in explanations),
        page="\n".join([page, *(["", *written] if written else [])]),
        data=data,
    )


def _write_pictures(call: Call, heading: str, explanations: Sequence[Explanation], bars: Sequence[Bar]) -> list[str]:
    wanted = [(kind, call.options[kind]) for kind in ("svg", "html") if call.options.get(kind)]
    if not wanted:
        return []
    try:
        from gpuready.rendering import plan_page as pictures
    except ModuleNotFoundError as error:
        what = f"--{wanted[0][0]}: pictures are made on the controller only"
        raise MachineCannot(Failure("plan.controller", what, "", "run it from the checkout's .venv")) from error
    for kind, path in wanted:
        write(path, pictures.svg(heading, bars) if kind == "svg" else pictures.html(heading, explanations, bars))
    return [f"{path} is written." for _, path in wanted]


VERBS = {
    "make": Verb(
        "plan a deployment: its settings, where every GiB goes, what it serves",
        _make,
        options=MAKE,
        more="""\
examples:
  gpuready plan make --model Qwen/Qwen2.5-7B-Instruct --gpu a100-40gb-sxm --workload 1024:512@64
  gpuready plan make --model /data/models/mine --gpu h100 --gpus 8 --context 32768 --html plan.html
  gpuready plan make --host h100-sg.yml""",
    ),
    "explain": Verb(
        "say why: limits, what one more step would cost, rules of thumb",
        _explain,
        options=EXPLAIN,
        more="Without options, on a server, it explains the plan that is stored there.",
    ),
    "compare": Verb(
        "several cards, engines, formats or models side by side",
        run_compare,
        options=COMPARE,
        more="""\
example:
  gpuready plan compare --model meta-llama/Llama-3.1-8B-Instruct --gpu l40s --gpu h100 --gpu h100:3g.40gb \\
      --engine vllm --engine sglang --rate h100=2400""",
    ),
    "recommend": Verb(
        "rank what could serve a workload, the cheapest first",
        run_recommend,
        options=RECOMMEND,
        more="""\
example:
  gpuready plan recommend --model Qwen/Qwen2.5-7B-Instruct --workload 1024:512@64 --budget 5000""",
    ),
    "backtest": Verb(
        "compare the planner with runs that were measured",
        plan_backtest.run_backtest,
        arguments=["runs"],
        options=plan_backtest.OPTIONS,
        more="RUNS is a JSON file; docs/planner-accuracy.md says what a run is.",
    ),
    "docs": Verb("make the worked examples of docs anew, with their pictures", run_docs, changes=True),
}

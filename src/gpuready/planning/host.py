"""Decides for one host: what to ask the server, what is refused, and the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuready import catalog
from gpuready.outcome import Failure, Refusal
from gpuready.planning import preflight, sources, storage, surroundings
from gpuready.planning.engines import Choice
from gpuready.planning.memory.run import GIB
from gpuready.planning.model.config import Headers, UnknownModel, read_facts
from gpuready.planning.model.facts import ModelFacts
from gpuready.planning.plan import SIMULATED_MODELS, card_key, effective_stack, make_plan

PATHS = ("/", "/opt/gpuready", "/srv/models", "/usr", "/var/cache", "/var/lib/gpuready")
GATEWAY_UNIT = "gpuready-gateway.service"
ENGINE_UNITS = "gpuready-engine@"
GATEWAY_FOLDER = "/etc/gpuready/gateway"


def needs_of(
    spec: Mapping[str, Any] | None,
    stack: Mapping[str, Any] | None,
    hubs: Mapping[str, Any] | None = None,
    engines: Mapping[str, Any] | None = None,
    store: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the input of `gpuready facts show` that answers everything preflight and planner ask.

    `hubs` says how the hubs of models are reached: `{endpoints: {hub: address}, token_hub}`; `engines` are the knobs of
    the role engines, without their prefix; `store` is the declared filesystem of the store of models, `{mount, disk}`.
    """
    deployments = spec["gpuready_deployments"] if spec else []
    packages = list(stack["host"]["cuda"]["packages"]) if stack else []
    return {
        "paths": list(PATHS),
        "targets": list(surroundings.TARGETS),
        "pythons": sorted(Choice.of_knobs(engines or {}).pythons.values()),
        "models": sources.together(one.request() for each in deployments for one in sources.asked(each)),
        "hubs": dict(hubs or {}),
        "store": dict(store or {}),
        "packages": packages,
        # The distribution's archive is added by the stage itself; other sources must be there already.
        "offered": packages if stack and stack["host"]["cuda"]["source"] == "configured" else [],
    }


def _models(
    host: str, spec: Mapping[str, Any], facts: Mapping[str, Any], generated: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, ModelFacts], list[Failure]]:
    """Return the sizes of every model, from what lies on the server or what gpuready will place there."""
    models: dict[str, ModelFacts] = {}
    failures = []
    for one in spec["gpuready_deployments"]:
        name, where = one["model"], f"host {host}, deployment {one['name']}"
        path = sources.path_of(one)
        if name.startswith(SIMULATED_MODELS):
            refused = _simulated_failures(where, spec, one, generated)
            failures += refused
            if refused:
                continue
            read = generated[name]
        elif path is None:
            what = f"{where}: model_path is not set"
            fix = (
                "name the folder on the server that holds the model's config.json and safetensors files, or set source "
                "to have it downloaded"
            )
            failures.append(Failure("plan.no_model_path", what, "", fix))
            continue
        else:
            read = facts["models"].get(path, {})
        failures += sources.failures(where, one, facts["models"])
        if read.get("failures") or not read.get("config"):
            continue  # said by preflight
        failures += _read(f"{where}: {name}", name, read, models)
        draft = facts["models"].get(sources.path_of(one, "draft"), {})
        if draft.get("config") and not draft.get("failures"):
            drafting = one["draft"]["model"]
            failures += _read(f"{where}, draft.model: {drafting}", drafting, draft, models)
    return models, failures


def _simulated_failures(
    where: str, spec: Mapping[str, Any], deployment: Mapping[str, Any], generated: Mapping[str, Mapping[str, Any]]
) -> list[Failure]:
    """Return why a model that gpuready makes itself is refused."""
    name = deployment["model"]
    if sources.path_of(deployment):
        key = "source" if deployment.get("source") else "model_path"
        what = f"{where}: {key} is set, and gpuready makes {name} itself"
        return [Failure("plan.simulated_path", what, "", f"remove {key}")]
    if name not in generated:
        what = f"{where}, model = {name!r}: no such simulated model"
        return [Failure("plan.no_model", what, "", f"there is {SIMULATED_MODELS}tiny-qwen2")]
    if not spec["gpuready_simulated"]:
        what = f"{where}, model = {name!r} has random weights and is for simulated servers only"
        return [Failure("plan.simulated_model", what, "", "name a real model and its model_path or source")]
    return []


def _read(what: str, name: str, read: Mapping[str, Any], models: dict[str, ModelFacts]) -> list[Failure]:
    """Add a model's sizes to `models`, or return why they are not known."""
    try:
        models[name] = read_facts(
            read["config"], Headers.of(read["kinds"]) if read.get("kinds") else read["weight_bytes"]
        )
    except UnknownModel as error:
        fix = "see that it is the config.json of a language model, or choose another model"
        return [Failure("plan.unknown_model", f"{what} cannot be planned", str(error), fix)]
    return []


def slice_failures(host: str, spec: Mapping[str, Any]) -> list[Failure]:
    """Refuse to serve on MIG slices, which nothing sets up yet; they are planned all the same."""
    fix = "see the plan with playbooks/plan.yml; to serve it, name whole GPUs: 4 or [0, 1, 2, 3]"
    return [
        Failure(
            "plan.mig",
            f"host {host}, deployment {one['name']}, gpus = {one['gpus']}: MIG slices are planned but not served yet",
            "",
            fix,
        )
        for one in spec["gpuready_deployments"]
        if isinstance(one["gpus"], Mapping) and "mig" in one["gpus"]
    ]


def engine_ports(plan: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Return every replica's port by its name in a sentence, with the units that may listen there."""
    ports = {}
    for one in plan["deployments"]:
        for part in one["replicas"]:
            replica = f", replica {part['index']}" if len(one["replicas"]) > 1 else ""
            ports[f"deployment {one['name']}{replica}"] = (part["port"], ENGINE_UNITS)
    return ports


def _disk_needs(plan: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, float]:
    """Return what will be written below each path, in GiB, for what is not there yet."""
    needs: dict[str, float] = dict.fromkeys(PATHS, 0.0)
    cuda = plan["host"]["cuda"]
    if any(facts["packages"].get(name) is None for name in cuda["packages"]):
        needs["/usr"] += cuda["install_gib"]
        needs["/var/cache"] += cuda["download_gib"]
    for engine in plan["engines"]:
        if engine["folder"] not in facts["engines"]:
            needs["/opt/gpuready"] += engine["install_gib"] + engine["download_gib"]
    needs[sources.STORE] += sum(one.get("missing_bytes", 0) for one in facts["models"].values()) / GIB
    return {path: max(0.0, gib - facts["begun"].get(path, 0) / GIB) for path, gib in needs.items()}


def _archive_failures(host: str, name: str, stack: Mapping[str, Any], facts: Mapping[str, Any]) -> list[Failure]:
    """Check that the distribution's own archive holds the CUDA version, where that is the source."""
    cuda, system = stack["host"]["cuda"], facts["os"]
    if cuda["source"] != "debian":
        return []
    held = catalog.load("stacks")["cuda_archives"].get(system["id"], {}).get(system["version"])
    if held == cuda["version"]:
        return []
    what = f"host {host}, gpuready_stack = {name!r} takes CUDA {cuda['version']} from Debian's own archive"
    why = f"the archive of {system['id']} {system['version']} holds {held or 'no known version'}"
    fix = (
        "add NVIDIA's CUDA repository to the server, set cuda_source: configured and cuda_packages to NVIDIA's names "
        f"(cuda-toolkit-{cuda['version'].replace('.', '-')}), or use Debian 13"
    )
    return [Failure("preflight.cuda_source", what, why, fix)]


def decide(
    host: str,
    spec: Mapping[str, Any],
    gateway: Mapping[str, Any],
    facts: Mapping[str, Any],
    generated: Mapping[str, Mapping[str, Any]],
    cuda: Mapping[str, Any] | None = None,
    serve: bool = True,
    engines: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any] | None, list[Failure]]:
    """Return the plan of one host and everything that is refused about it; the plan is None when it cannot be made.

    `gateway` are the gateway's knobs, `generated` what is known of models that gpuready makes itself, `cuda` what the
    operator set of the stack's CUDA part, `engines` the knobs of the role engines. Without `serve` the plan is only to
    be looked at.
    """
    cards = catalog.load("gpus")["cards"]
    failures = preflight.system_failures(host, facts)
    failures += storage.host_failures(host, facts)
    facts = storage.without_unseen(facts)
    brings = bool(generated) or any(one.get("missing_bytes") for one in facts["models"].values())
    failures += surroundings.target_failures(host, facts, places_models=brings)
    failures += preflight.simulation_failures(host, spec["gpuready_simulated"], facts)
    known_card = any(spec["gpuready_gpu_model"] in (key, *card["aliases"]) for key, card in cards.items())
    if known_card:
        key = card_key(spec["gpuready_gpu_model"])
        failures += preflight.gpu_failures(host, key, spec["gpuready_gpu_count"], facts)
    failures += preflight.expectation_failures(host, spec["gpuready_expect"], facts)
    failures += preflight.port_failures(host, {"gateway_port": (gateway["port"], GATEWAY_UNIT)}, facts)
    failures += preflight.model_failures(host, spec["gpuready_deployments"], facts)
    failures += preflight.repository_failures(host, facts)
    failures += slice_failures(host, spec) if serve else []
    models, refused = _models(host, spec, facts, generated)
    failures += refused
    stack = effective_stack(spec, cuda or {})
    plan = None
    if stack is not None and known_card:
        failures += _archive_failures(host, spec["gpuready_stack"], stack, facts)
        failures += preflight.driver_failures(host, key, spec["gpuready_stack"], stack, facts)
        failures += preflight.candidate_failures(host, stack["host"]["cuda"], facts)
        try:
            revisions = {name: str(one["revision"]) for name, one in generated.items()}
            plan = make_plan(host, spec, stack, facts, models, revisions, Choice.of_knobs(engines or {}))
            plan["gateway"] = {
                **gateway,
                "folder": GATEWAY_FOLDER,
                "body_limit_bytes": gateway["body_limit_kib"] * 1024,
                # Headers share the buffer with the body.
                "buffer_bytes": gateway["body_limit_kib"] * 1024 + 16384,
            }
            failures += preflight.port_failures(host, engine_ports(plan), facts)
            failures += preflight.stand_in_failures(host, plan["engines"], facts)
        except Refusal as refusal:
            failures += refusal.failures
    needs = _disk_needs(plan, facts) if plan else dict.fromkeys(PATHS, 0.0)
    failures += preflight.disk_failures(host, needs, facts)
    return plan, failures


def keep_or_renew(plan: dict[str, Any], stored: Mapping[str, Any] | None, renew: bool) -> tuple[dict[str, Any], str]:
    """Return the plan to use and a note for the operator.

    While its inputs are the same the stored plan stays, so a newer planner changes no running deployment by itself;
    `renew` takes the new one.
    """
    if stored is None or stored.get("inputs") != plan["inputs"] or stored.get("schema") != plan["schema"] or renew:
        return plan, ""
    if stored["deployments"] == plan["deployments"]:
        return plan, ""
    names = [new["name"] for new in plan["deployments"] if new not in stored["deployments"]]
    note = f"this version would plan {', '.join(names)} otherwise; take its plan with -e gpuready_replan=true"
    return {**plan, "deployments": list(stored["deployments"])}, note

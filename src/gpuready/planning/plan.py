"""Makes the plan of one host: all deployments together, every refusal at once.

The plan is plain data. Roles read it as the fact `gpuready_plan`, templates as `plan`; nobody plans again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpuready import __version__, catalog
from gpuready.outcome import Failure, Refusal
from gpuready.planning import advisories, cures, placement, sources, together, topology
from gpuready.planning.deployment import plan_deployment, wish_of
from gpuready.planning.engines import Choice, choose, stack_failures
from gpuready.planning.memory.device import device
from gpuready.planning.model.facts import ModelFacts
from gpuready.planning.wish import Wish

MODELS_FOLDER = sources.STORE
SIMULATED_MODELS = sources.SIMULATED_MODELS
SCHEMA = 3
"""Of the plan's form; a stored plan of another form is replaced by a new one."""


def card_key(name: str) -> str:
    """Return the catalog key of a GPU given by key or alias."""
    for key, card in catalog.load("gpus")["cards"].items():
        if name == key or name in card["aliases"]:
            return str(key)
    raise KeyError(name)


def inputs_digest(
    spec: Mapping[str, Any],
    stack: Mapping[str, Any],
    facts: Mapping[str, Any],
    models: Mapping[str, ModelFacts],
    engines: Sequence[Mapping[str, Any]],
) -> str:
    """Return a digest of everything that the plan follows from."""
    seen = {
        "spec": {key: value for key, value in spec.items() if key != "gpuready_replan"},
        "stack": stack,
        "engines": [one["folder"] for one in engines if one["used_by"]],
        "gpus": [one.get("numa_node") for one in facts["gpus"]],
        "models": {name: _sizes(model) for name, model in sorted(models.items())},
    }
    taken = {one["name"]: record for one in spec["gpuready_deployments"] if (record := cures.recorded(one, facts))}
    seen |= {"cures": taken} if taken else {}
    return hashlib.sha256(json.dumps(seen, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _sizes(model: ModelFacts) -> tuple[Any, ...]:
    """Return what tells a model from another one, without what only a newer planner knows of it."""
    method = model.quantization.method if model.quantization else ""
    shape = (model.layers, model.hidden, model.heads, model.vocabulary, model.context_tokens, model.dtype)
    return (model.architecture, model.weight_bytes, *shape, method)


def _host(spec: Mapping[str, Any], stack: Mapping[str, Any]) -> dict[str, Any]:
    key = card_key(spec["gpuready_gpu_model"])
    card = catalog.load("gpus")["cards"][key]
    return {
        "stack": spec["gpuready_stack"],
        "simulated": spec["gpuready_simulated"],
        "gpu_model": key,
        "gpu_count": spec["gpuready_gpu_count"],
        "cuda": {"sm": f"sm_{card['compute'].replace('.', '')}", **stack["host"]["cuda"]},
    }


def model_folder(deployment: Mapping[str, Any], revision: str) -> str:
    """Return where a deployment's model lies: the operator's path, or our store; `revision` is a generated model's."""
    return sources.path_of(deployment) or sources.folder(deployment["model"], revision)


def effective_stack(spec: Mapping[str, Any], cuda: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the declared stack with what the operator set of its CUDA part; None when there is no such stack."""
    stack = catalog.load("stacks")["stacks"].get(spec["gpuready_stack"])
    if stack is None:
        return None
    chosen = {**stack["host"]["cuda"], **cuda}
    # NVIDIA's packages put each version beside the others, the distribution's own is a part of it.
    chosen["home"] = f"/usr/local/cuda-{chosen['version']}" if chosen["source"] == "configured" else "/usr"
    return {**stack, "name": spec["gpuready_stack"], "host": {**stack["host"], "cuda": chosen}}


def make_plan(
    host: str,
    spec: Mapping[str, Any],
    stack: Mapping[str, Any],
    facts: Mapping[str, Any],
    models: Mapping[str, ModelFacts],
    revisions: Mapping[str, str],
    choice: Choice = Choice(),  # noqa: B008 - it cannot be changed
) -> dict[str, Any]:
    """Plan one host.

    `spec` is a checked declaration as plain data, `stack` its stack, `facts` what `gpuready facts show` said,
    `models` sizes by model id, also of models that draft, `revisions` the revision of each model that gpuready itself
    places, `choice` what the operator says about engines beside the deployments.

    Raises:
        Refusal: with every reason at once; nothing was changed.
    """
    key = card_key(spec["gpuready_gpu_model"])
    failures = stack_failures(host, spec, stack, key) + advisories.unknown_ids(
        host, spec.get("gpuready_accept_advisories", ())
    )
    claims, refused = placement.claims(host, spec)
    failures += refused
    if failures:
        raise Refusal(failures)
    engines, left_out = choose(host, spec, stack, key, facts, choice)
    card = device(key)
    assert card is not None  # noqa: S101 - a key of the catalog
    lie = topology.of_facts(facts, spec["gpuready_gpu_count"], joined=card.nvlink)
    known = [one for one in spec["gpuready_deployments"] if one["model"] in models]  # others: said by who reads models
    wishes, refused = _wishes(host, known, stack, models)
    wishes = {one["name"]: cures.taken(wishes[one["name"]], cures.recorded(one, facts)) for one in known}
    failures += refused
    options, refused = together.options(host, wishes, claims, card, lie, facts)
    failures += refused
    if failures:
        raise Refusal(failures)
    shapes = {name: (one.run.tp * one.run.pp, one.replicas) for name, one in options.items()}
    placed = placement.place({name: claims[name] for name in options}, shapes, lie, facts.get("placement", {}))
    after = together.start_after(options, claims)
    deployments = []
    # Those on shared GPUs come last, in the order in which they start.
    for declared in sorted(known, key=lambda one: together.start_key(options[one["name"]])):
        replicas = together.noted(declared["name"], placed[declared["name"]], options, claims)
        where = f"host {host}, deployment {declared['name']}"
        place = _installed(declared, engines, revisions, after)
        planned, refused = plan_deployment(where, declared, options[declared["name"]], stack, replicas, place)
        failures += refused
        stood, refused = _advisories(where, planned, models[declared["model"]], spec)
        failures += refused
        deployments.append({**planned, **stood})
    if failures:
        raise Refusal(failures)
    places = sources.in_plan(known, deployments)
    made = _as_stored(spec, stack, facts, models, engines, deployments, places)
    # Beside the deployments, so that a release is not another one because a declaration is.
    declarations = {one["name"]: cures.declaration(one) for one in known}
    cured = sorted(name for name, wish in wishes.items() if cures.changes(wish))
    return {**made, "engines_left_out": left_out, "declarations": declarations, "cured": cured}


def _advisories(
    where: str, planned: Mapping[str, Any], model: ModelFacts, spec: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Failure]]:
    """Return what stands against each known vulnerability of a deployment's engine, and those that nothing does."""
    flags = {one["name"]: one["value"] for group in planned["options"].values() for one in group}
    exposure = advisories.Exposure(planned["engine"], planned["engine_version"], flags, model.vision, planned["task"])
    judgement = advisories.judge(exposure, spec.get("gpuready_accept_advisories", ()))
    stood = {
        "advisories": list(judgement.answers),
        "refused_requests": advisories.refused_requests(judgement.requests),
    }
    return stood, advisories.failures(where, exposure, judgement)


def _as_stored(
    spec: Mapping[str, Any],
    stack: Mapping[str, Any],
    facts: Mapping[str, Any],
    models: Mapping[str, ModelFacts],
    engines: Sequence[Mapping[str, Any]],
    deployments: Sequence[Mapping[str, Any]],
    places: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the plan as it is stored and sent."""
    plan = {
        "schema": SCHEMA,
        "planner": __version__,
        "inputs": inputs_digest(spec, stack, facts, models, engines),
        "host": _host(spec, stack),
        "engines": engines,
        "models": places,
        "deployments": deployments,
    }
    # What is compared with a stored plan must not differ by tuples and lists.
    stored: dict[str, Any] = json.loads(json.dumps(plan))
    return stored


def _installed(
    declared: Mapping[str, Any],
    engines: Sequence[Mapping[str, Any]],
    revisions: Mapping[str, str],
    after: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Return what a deployment's part of the plan says of the server: folders, who starts before it."""
    name = declared["name"]
    engine = next(one for one in engines if one["engine"] == declared["engine"])
    return {
        "model_path": model_folder(declared, revisions.get(declared["model"], "")),
        "engine_folder": engine["folder"],
        "adapters": sources.adapters(declared),
        **({"start_after": after[name]} if name in after else {}),
    }


def _wishes(
    host: str,
    deployments: Sequence[Mapping[str, Any]],
    stack: Mapping[str, Any],
    models: Mapping[str, ModelFacts],
) -> tuple[dict[str, Wish], list[Failure]]:
    """Return what every deployment asks for, by its name."""
    found = {}
    failures: list[Failure] = []
    for one in deployments:
        drafting = models.get((one.get("draft") or {}).get("model") or "")
        version = stack["engines"][one["engine"]]["version"]
        where = f"host {host}, deployment {one['name']}"
        wish, refused = wish_of(where, one, models[one["model"]], version, drafting)
        found[one["name"]] = wish
        failures += refused
    return found, failures

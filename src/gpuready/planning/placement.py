"""Which deployment gets which GPUs and which loopback ports. Placement is sticky."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpuready.outcome import Failure

FIRST_PORT = 18100
"""Engines listen on loopback from here on, one port per replica."""


def _ask(host: str, deployment: Mapping[str, Any], count: int, failures: list[Failure]) -> list[int] | int:
    """Return the GPUs that a deployment names, or how many it wants; note what cannot be."""
    gpus = deployment["gpus"]
    where = f"host {host}, deployment {deployment['name']}, gpus = {gpus}"
    if isinstance(gpus, Mapping) and "shared" in gpus:
        what = f"{where}: parts of a GPU are not served yet"
        failures.append(Failure("plan.shared", what, "", "name whole GPUs: 4 or [0, 1, 2, 3]"))
        return 0
    if isinstance(gpus, Mapping):
        failures.append(
            Failure(
                "plan.mig",
                f"{where}: MIG slices are not served yet",
                "",
                "name whole GPUs: 4 or [0, 1, 2, 3]",
            )
        )
        return 0
    if isinstance(gpus, int):
        return gpus
    wrong = [index for index in gpus if index >= count]
    if wrong:
        what = f"{where}: there is no GPU {wrong[0]}"
        failures.append(Failure("plan.no_such_gpu", what, "", f"the server has GPUs 0 to {count - 1}"))
    if len(set(gpus)) != len(gpus):
        failures.append(Failure("plan.gpu_twice", f"{where}: a GPU is named twice", "", "name each once"))
    return [index for index in gpus if index < count]


def place(
    host: str, spec: Mapping[str, Any], former: Mapping[str, Sequence[Mapping[str, Any]]]
) -> tuple[dict[str, dict[str, Any]], list[Failure]]:
    """Give every deployment its GPUs and port: `{name: {gpus: [0, 1], port: 18100}}`, and what is refused.

    `former` are the replicas on the server now, `{name: [{index, gpus, port}]}`; what still fits stays where it is.
    """
    count = spec["gpuready_gpu_count"]
    deployments = spec["gpuready_deployments"]
    failures: list[Failure] = []
    asks = {one["name"]: _ask(host, one, count, failures) for one in deployments}
    sizes = {name: ask if isinstance(ask, int) else len(ask) for name, ask in asks.items()}
    if sum(sizes.values()) > count:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        what = f"host {host}: deployments ask for {sum(sizes.values())} GPUs ({listed})"
        why = f"gpuready_gpu_count is {count}"
        failures.append(
            Failure("plan.too_many_gpus", what, why, "lower gpus of a deployment or move one to another server")
        )
    free = set(range(count))
    placement: dict[str, dict[str, Any]] = {}
    for name, ask in asks.items():
        if isinstance(ask, list):
            clash = set(ask) - free
            if clash:
                what = f"host {host}, deployment {name}, gpus = {ask}: GPU {min(clash)} is taken by another deployment"
                failures.append(Failure("plan.gpu_taken", what, "", f"free are {sorted(free)}"))
            free -= set(ask)
            placement[name] = {"gpus": ask}
    for name, ask in asks.items():
        held = [gpu for part in former.get(name, []) for gpu in part["gpus"]]
        if isinstance(ask, int) and len(held) == ask and set(held) <= free:
            placement[name] = {"gpus": sorted(held)}
            free -= set(held)
    for name, ask in asks.items():
        if name not in placement and isinstance(ask, int):
            placement[name] = {"gpus": sorted(free)[:ask]}
            free -= set(placement[name]["gpus"])
    _give_ports(placement, former)
    return placement, failures


def _give_ports(placement: dict[str, dict[str, Any]], former: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    kept = {name: former[name][0]["port"] for name in placement if former.get(name)}
    taken = set(kept.values())
    port = FIRST_PORT
    for name, place_ in placement.items():
        if name in kept:
            place_["port"] = kept[name]
            continue
        while port in taken:
            port += 1
        taken.add(port)
        place_["port"] = port

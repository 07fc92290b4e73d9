"""Which replica gets which GPUs and which loopback port. Placement is sticky: what still fits stays where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuready.outcome import Failure
from gpuready.planning.topology import Topology

FIRST_PORT = 18100
"""Engines listen on loopback from here on, one port per replica."""

Former = Mapping[str, Sequence[Mapping[str, Any]]]
"""The replicas on the server now, `{deployment: [{index, gpus, port}]}`."""


@dataclass(frozen=True)
class Claim:
    """What a deployment declares as its GPUs."""

    name: str
    count: int
    """GPUs or slices, for all its replicas together; 0 where it has a part of one."""
    named: tuple[int, ...] = ()
    """The very GPUs, where they are named."""
    shared: int | None = None
    """The GPU of which it has a part."""
    profile: str = ""
    """MIG profile, where it claims slices."""

    @property
    def whole(self) -> bool:
        """Say whether it claims whole GPUs."""
        return self.shared is None and not self.profile


def claims(host: str, spec: Mapping[str, Any]) -> tuple[dict[str, Claim], list[Failure]]:
    """Return what every deployment claims, and what cannot be had."""
    count, failures = spec["gpuready_gpu_count"], []
    found = {}
    for one in spec["gpuready_deployments"]:
        claim = _claim(one)
        failures += _wrong(f"host {host}, deployment {one['name']}, gpus = {one['gpus']}", claim, count)
        found[claim.name] = claim
    shared = {claim.shared for claim in found.values() if claim.shared is not None}
    sizes = {name: claim.count for name, claim in found.items() if claim.whole}
    if sum(sizes.values()) + len(shared) > count:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        listed += f", shared {len(shared)}" if shared else ""
        what = f"host {host}: deployments ask for {sum(sizes.values()) + len(shared)} GPUs ({listed})"
        fix = "lower gpus of a deployment or move one to another server"
        failures.append(Failure("plan.too_many_gpus", what, f"gpuready_gpu_count is {count}", fix))
    taken = dict.fromkeys(sorted(shared), "shared")
    for claim in found.values():
        clash = [gpu for gpu in claim.named if gpu in taken]
        if clash:
            free = sorted(set(range(count)) - set(taken))
            gpus = list(claim.named)
            by = "shared by others" if taken[clash[0]] == "shared" else "taken by another deployment"
            what = f"host {host}, deployment {claim.name}, gpus = {gpus}: GPU {clash[0]} is {by}"
            failures.append(Failure("plan.gpu_taken", what, "", f"free are {free}"))
        taken |= dict.fromkeys(claim.named, claim.name)
    return found, failures


def _claim(deployment: Mapping[str, Any]) -> Claim:
    gpus, name = deployment["gpus"], deployment["name"]
    if isinstance(gpus, Mapping):
        if "shared" in gpus:
            return Claim(name, 0, shared=gpus["shared"])
        return Claim(name, gpus["count"], profile=gpus["mig"])
    if isinstance(gpus, int):
        return Claim(name, gpus)
    return Claim(name, len(gpus), named=tuple(gpus))


def _wrong(where: str, claim: Claim, count: int) -> list[Failure]:
    named = claim.named if claim.shared is None else (claim.shared,)
    failures = []
    if beyond := [index for index in named if index >= count]:
        what = f"{where}: there is no GPU {beyond[0]}"
        failures.append(Failure("plan.no_such_gpu", what, "", f"the server has GPUs 0 to {count - 1}"))
    if len(set(named)) != len(named):
        failures.append(Failure("plan.gpu_twice", f"{where}: a GPU is named twice", "", "name each once"))
    return failures


def place(
    found: Mapping[str, Claim], shapes: Mapping[str, tuple[int, int]], topology: Topology, former: Former
) -> dict[str, list[dict[str, Any]]]:
    """Give every replica its GPUs and its port: `{name: [{index, gpus, port, numa_node}]}`.

    `shapes` are the GPUs of one replica and the number of replicas of every deployment. Replicas keep the GPUs and
    the port that they have now where these are still theirs to have; others stay within a NUMA node and among the GPUs
    that NVLink joins, where there is room. A slice has no GPU yet: MIG decides that.
    """
    free = set(range(len(topology.nodes)))
    free -= {claim.shared for claim in found.values() if claim.shared is not None}
    free -= {gpu for claim in found.values() for gpu in claim.named}
    placed: dict[str, list[list[int]]] = {}
    for name, claim in found.items():
        size, replicas = shapes[name]
        if claim.shared is not None:
            placed[name] = [[claim.shared]]
        elif claim.profile:
            placed[name] = [[] for _ in range(replicas)]
        elif claim.named:
            placed[name] = _kept_first(former.get(name, ()), set(claim.named), size, replicas, topology)
    counted = [name for name in found if name not in placed]
    # Who stays is settled before anybody new chooses, and who needs most GPUs at once chooses first.
    staying = {name: _kept(former.get(name, ()), free, *shapes[name]) for name in counted}
    for kept in staying.values():
        free -= {gpu for gpus in kept.values() for gpu in gpus}
    for name in sorted(counted, key=lambda one: -shapes[one][0]):
        placed[name] = _filled(staying[name], free, *shapes[name], topology)
        free -= {gpu for gpus in placed[name] for gpu in gpus}
    return _with_ports({name: placed[name] for name in found}, topology, former)


def _kept(former: Sequence[Mapping[str, Any]], free: set[int], size: int, replicas: int) -> dict[int, list[int]]:
    """Return the GPUs of the replicas that can stay where they are, by index."""
    kept: dict[int, list[int]] = {}
    left = set(free)
    for part in former:
        gpus = sorted(part["gpus"])
        if len(gpus) == size and part["index"] < replicas and set(gpus) <= left:
            kept[part["index"]] = gpus
            left -= set(gpus)
    return kept


def _filled(
    kept: Mapping[int, list[int]], free: set[int], size: int, replicas: int, topology: Topology
) -> list[list[int]]:
    left, found = set(free), dict(kept)
    for index in range(replicas):
        if index not in found:
            found[index] = _near(left, size, topology)
            left -= set(found[index])
    return [found[index] for index in range(replicas)]


def _kept_first(
    former: Sequence[Mapping[str, Any]], named: set[int], size: int, replicas: int, topology: Topology
) -> list[list[int]]:
    kept = _kept(former, named, size, replicas)
    return _filled(kept, named - {gpu for gpus in kept.values() for gpu in gpus}, size, replicas, topology)


def _near(free: set[int], size: int, topology: Topology) -> list[int]:
    """Return so many free GPUs that lie as near to each other as there are: the smallest group with enough of them."""
    groups: list[dict[Any, list[int]]] = [{}, {}, {}]
    for gpu in sorted(free):
        island, node = topology.islands[gpu], topology.nodes[gpu]
        groups[0].setdefault((island, node), []).append(gpu)
        groups[1].setdefault(island, []).append(gpu)
        groups[2].setdefault(node, []).append(gpu)
    for kind in groups:
        enough = [gpus for gpus in kind.values() if len(gpus) >= size]
        if enough:
            return min(enough, key=lambda gpus: (len(gpus), gpus))[:size]
    return sorted(free)[:size]


def _with_ports(
    placed: Mapping[str, list[list[int]]], topology: Topology, former: Former
) -> dict[str, list[dict[str, Any]]]:
    held = {(name, part["index"]): part["port"] for name in placed for part in former.get(name, ())}
    taken = {port for (name, index), port in held.items() if index < len(placed[name])}
    port = FIRST_PORT
    found: dict[str, list[dict[str, Any]]] = {}
    for name, replicas in placed.items():
        found[name] = []
        for index, gpus in enumerate(replicas):
            own = held.get((name, index))
            if own is None:
                while port in taken:
                    port += 1
                taken.add(port)
                own = port
            node = topology.node_of(gpus) if gpus else None
            found[name].append({"index": index, "gpus": gpus, "port": own, "numa_node": node})
    return found

"""How the GPUs of a server lie: on which NUMA node each is, and which reach each other by NVLink."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Topology:
    """One entry for each GPU, in the order of their indices."""

    nodes: tuple[int | None, ...]
    """NUMA nodes; None: the firmware does not tell."""
    islands: tuple[int | None, ...]
    """GPUs with the same number reach each other by NVLink; None: it reaches none, or the driver does not tell."""

    @property
    def widest(self) -> int:
        """Return how many GPUs the largest island has; 0 where there is none."""
        known = [one for one in self.islands if one is not None]
        return max((known.count(one) for one in known), default=0)

    def node_of(self, gpus: list[int]) -> int | None:
        """Return the NUMA node on which all of these GPUs are; None where they are on several, or it is not known."""
        found = {self.nodes[gpu] for gpu in gpus}
        return found.pop() if len(found) == 1 else None


def of_facts(facts: Mapping[str, Any], count: int, joined: bool) -> Topology:
    """Return the topology that a server told; what it did not tell is not known.

    `joined` says whether all GPUs of such servers reach each other by NVLink, which is taken where no driver tells.
    """
    found = list(facts.get("gpus") or [])[:count]
    nodes = [one.get("numa_node") for one in found]
    nodes += [None] * (count - len(nodes))
    told = list((facts.get("nvml") or {}).get("gpus") or [])[:count]
    peers = [one.get("nvlink_peers") for one in told]
    if len(told) != count or any(one is None for one in peers):
        islands: list[int | None] = [0 if joined and count > 1 else None] * count
    else:
        islands = _islands([str(one.get("pci_address")) for one in told], [list(one) for one in peers])
    return Topology(tuple(nodes), tuple(islands))


def _islands(addresses: list[str], peers: list[list[str]]) -> list[int | None]:
    """Return the island of each GPU from what is at the other end of its links: GPUs, or switches."""
    group = list(range(len(addresses)))
    by_name: dict[str, int] = {address: index for index, address in enumerate(addresses)}
    linked = [False] * len(addresses)
    switch: int | None = None
    for index, ends in enumerate(peers):
        for end in ends:
            other = by_name.get(end)
            if other is None:
                switch = other = index if switch is None else switch
            linked[index] = linked[other] = True
            low, high = sorted((group[index], group[other]))
            group = [low if one == high else one for one in group]
    return [one if linked[index] and group.count(one) > 1 else None for index, one in enumerate(group)]

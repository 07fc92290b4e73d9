"""Works out what is at the other end of each NVLink of a server."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from sim.hardware.model import Nvlinks, Server
from sim.hardware.refusal import RefusalError

NVSWITCH_CLASS = 0x068000
UNSEEN = "ffff:ff:00.0"
"""The address of an NVSwitch that is no PCI device of the server; NCCL, too, writes all ones for it."""


@dataclass(frozen=True)
class Link:
    """The other end of one NVLink."""

    remote: str
    """`gpu` or `switch`."""
    address: str


def connect(server: Server, file: Path) -> list[list[Link]]:
    """Return the links of each GPU in order; none where nothing is connected. Refuses ends that do not meet."""
    wanted = server.nvlink
    if wanted is None:
        return [[] for _ in server.gpus]
    where = f"{file}: nvlink"
    ways = [key for key in ("switches", "mesh", "links") if getattr(wanted, key) is not None]
    if len(ways) != 1:
        raise RefusalError(f"{where}: give one of switches, mesh and links, not {' and '.join(ways) or 'none'}")
    if server.gpu.nvlink is None:
        raise RefusalError(f"{where}: a {server.gpu.name} has no NVLink")
    if wanted.fabric is not None and wanted.switches is None:
        raise RefusalError(f"{where}.fabric: there is no fabric without switches")
    if wanted.switches is not None:
        links = [_to_switches(server, wanted.switches, where)] * len(server.gpus)
    elif wanted.mesh is not None:
        links = _mesh(server, wanted.mesh)
    else:
        links = _listed(server, wanted, where)
    for index, ends in enumerate(links):
        if len(ends) > server.gpu.nvlink.links:
            raise RefusalError(
                f"{where}: GPU {index} has {len(ends)} links, a {server.gpu.name} has {server.gpu.nvlink.links}"
            )
    return links


def _to_switches(server: Server, switches: dict[str, int], where: str) -> list[Link]:
    known = _nvswitches(server)
    for address in switches:
        if address not in known:
            raise RefusalError(f"{where}.switches: {address} is no NVSwitch among devices")
    return [Link("switch", address) for address, count in switches.items() for _ in range(count)]


def _mesh(server: Server, count: int) -> list[list[Link]]:
    return [
        [Link("gpu", other.address) for other in server.gpus if other is not place for _ in range(count)]
        for place in server.gpus
    ]


def _listed(server: Server, wanted: Nvlinks, where: str) -> list[list[Link]]:
    count, switches = len(server.gpus), _nvswitches(server)
    links: list[list[Link]] = [[] for _ in server.gpus]
    pairs: Counter[tuple[int, int]] = Counter()
    for index, ends in (wanted.links or {}).items():
        if not 0 <= index < count:
            raise RefusalError(f"{where}.links.{index}: there is no GPU {index}, only 0 to {count - 1}")
        for end in ends:
            key = f"{where}.links.{index}"
            if isinstance(end, str) and end not in switches:
                raise RefusalError(f"{key}: {end} is no NVSwitch among devices")
            if isinstance(end, int) and (end == index or not 0 <= end < count):
                problem = "links to itself" if end == index else f"links to GPU {end}, there are only 0 to {count - 1}"
                raise RefusalError(f"{key}: GPU {index} {problem}")
            if isinstance(end, int):
                pairs[index, end] += 1
                links[index].append(Link("gpu", server.gpus[end].address))
            else:
                links[index].append(Link("switch", end))
    for (one, other), times in pairs.items():
        if pairs[other, one] != times:
            raise RefusalError(
                f"{where}.links.{one}: {times} links go to GPU {other}, and {pairs[other, one]} come back from there"
            )
    return links


def _nvswitches(server: Server) -> set[str]:
    return {UNSEEN} | {
        device.address for device in server.devices if device.vendor == 0x10DE and device.class_code == NVSWITCH_CLASS
    }

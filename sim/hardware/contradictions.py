"""Refuses descriptions whose values are each allowed, but not together."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from sim.hardware.links import connect
from sim.hardware.model import Gpu, Mig, Server
from sim.hardware.refusal import RefusalError

MIB = 1 << 20


def check_gpu(gpu: Gpu, file: Path, inside: str = "") -> None:
    """Refuse a GPU that contradicts itself."""

    def refuse(key: str, problem: str) -> None:
        raise RefusalError(f"{file}: {inside}{key}: {problem}")

    memory = gpu.memory
    if (memory.reserved_bytes or 0) + memory.used_bytes > memory.total_bytes:
        refuse("memory", f"reserved and used are more than the total of {memory.total_bytes} bytes")
    if memory.bar1_used_bytes is not None and memory.bar1_used_bytes > (memory.bar1_bytes or 0):
        refuse("memory.bar1_used_bytes", f"{memory.bar1_used_bytes} is more than bar1_bytes")
    for clock in ("graphics", "sm", "memory", "video"):
        now, highest = getattr(gpu.clocks_mhz, clock), getattr(gpu.clocks_mhz, f"{clock}_max")
        if now is not None and highest is not None and now > highest:
            refuse(f"clocks_mhz.{clock}", f"{now} is above {clock}_max, {highest}")
    power = gpu.power_milliwatts
    if power.limit is not None and not (power.limit_min or 0) <= power.limit <= (power.limit_max or power.limit):
        refuse("power_milliwatts.limit", f"{power.limit} is outside {power.limit_min} to {power.limit_max}")
    if gpu.pci.generation is not None and gpu.pci.generation > gpu.pci.generation_max:
        refuse("pci.generation", f"{gpu.pci.generation} is above generation_max, {gpu.pci.generation_max}")
    if gpu.pci.width > gpu.pci.width_max:
        refuse("pci.width", f"{gpu.pci.width} is above width_max, {gpu.pci.width_max}")
    heat = gpu.temperature_celsius
    if heat.slowdown is not None and heat.shutdown is not None and heat.slowdown > heat.shutdown:
        refuse("temperature_celsius.slowdown", f"{heat.slowdown} is above shutdown, {heat.shutdown}")
    if gpu.mig is not None:
        _check_mig(gpu.mig, memory.total_bytes // MIB, f"{file}: {inside}mig")


def _check_mig(mig: Mig, total_mib: int, where: str) -> None:
    table = mig.table
    for key in ("profile", "id"):
        counted = Counter(getattr(profile, key) for profile in table.profiles.values())
        value, times = counted.most_common(1)[0]
        if times > 1:
            raise RefusalError(f"{where}: two profiles have the {key} {value}")
    for name, profile in table.profiles.items():
        if profile.max * profile.memory_mib > total_mib:
            raise RefusalError(
                f"{where}: {profile.max} x {name} has {profile.max * profile.memory_mib} MiB, the card has {total_mib}"
            )
        for start in profile.starts:
            if start + profile.size > table.slots:
                raise RefusalError(
                    f"{where}: {name} at {start} with size {profile.size} goes beyond the {table.slots} slots"
                )


def check_server(server: Server, file: Path) -> None:
    """Refuse a server that contradicts itself."""
    places = {f"gpus[{index}]": place.address for index, place in enumerate(server.gpus)}
    places |= {f"devices[{index}]": device.address for index, device in enumerate(server.devices)}
    seen: dict[str, str] = {}
    for key, address in places.items():
        if address in seen:
            raise RefusalError(f"{file}: {key}.address: {address} is the address of {seen[address]} already")
        seen[address] = key
    for index, place in enumerate(server.gpus):
        if server.numa and place.numa_node is not None and place.numa_node not in server.numa:
            nodes = ", ".join(map(str, server.numa))
            raise RefusalError(f"{file}: gpus[{index}].numa_node: {place.numa_node} is none of numa, {nodes}")
    _check_shared(server, file)
    if server.nvlink is not None:
        connect(server, file)


def _check_shared(server: Server, file: Path) -> None:
    """Refuse a PCIe switch below two roots, a root on two NUMA nodes, and a number that is given twice."""
    for outer, inner in (("root", "switch"), ("numa_node", "root")):
        known: dict[int, int | None] = {}
        for index, place in enumerate(server.gpus):
            part, whole = getattr(place, inner), getattr(place, outer)
            if part is not None and known.setdefault(part, whole) != whole:
                raise RefusalError(f"{file}: gpus[{index}].{outer}: {inner} {part} is of {outer} {known[part]} already")
    for key in ("minor", "module"):
        values = Counter(value for place in server.gpus if (value := getattr(place, key)) is not None)
        for value, times in values.items():
            if times > 1:
                raise RefusalError(f"{file}: two of gpus have the {key} {value}")

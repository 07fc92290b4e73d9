"""Refuses descriptions whose values are each allowed, but not together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from sim.hardware.links import connect
from sim.hardware.model import Gpu, Mig, Part, Server
from sim.hardware.refusal import RefusalError

MIB = 1 << 20
Refuse = Callable[[str, str], None]
WITH_MIG = ("ampere", "hopper", "blackwell")
BEFORE_AMPERE = ("volta", "turing")
CPUS = 8192
"""As many as a kernel of Debian counts at most (CONFIG_NR_CPUS)."""


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
    _check_power(gpu, refuse)
    if gpu.pci.generation is not None and gpu.pci.generation > gpu.pci.generation_max:
        refuse("pci.generation", f"{gpu.pci.generation} is above generation_max, {gpu.pci.generation_max}")
    if gpu.pci.width > gpu.pci.width_max:
        refuse("pci.width", f"{gpu.pci.width} is above width_max, {gpu.pci.width_max}")
    _check_heat(gpu, refuse)
    _check_generation(gpu, refuse)
    if gpu.mig is not None:
        _check_mig(gpu.mig, memory.total_bytes // MIB, f"{file}: {inside}mig")


def _check_power(gpu: Gpu, refuse: Refuse) -> None:
    power = gpu.power_milliwatts
    if power.limit is not None and not (power.limit_min or 0) <= power.limit <= (power.limit_max or power.limit):
        refuse("power_milliwatts.limit", f"{power.limit} is outside {power.limit_min} to {power.limit_max}")
    ascending = (("limit_min", "limit_max"), ("idle", "limit"), ("idle", "limit_max"))
    _check_ascending(power, "power_milliwatts", ascending, refuse)


def _check_heat(gpu: Gpu, refuse: Refuse) -> None:
    ascending = (("slowdown", "shutdown"), ("gpu_max", "shutdown"), ("gpu", "shutdown"), ("memory", "memory_max"))
    _check_ascending(gpu.temperature_celsius, "temperature_celsius", ascending, refuse)


def _check_ascending(part: Part, where: str, pairs: Iterable[tuple[str, str]], refuse: Refuse) -> None:
    """Refuse a value that is above the one that it cannot be above."""
    for low, high in pairs:
        one, other = getattr(part, low), getattr(part, high)
        if one is not None and other is not None and one > other:
            refuse(f"{where}.{low}", f"{one} is above {high}, {other}")


def _check_generation(gpu: Gpu, refuse: Refuse) -> None:
    """Refuse what cards of that architecture do not have."""
    belongs = _architecture(gpu.compute_capability)
    if gpu.architecture != belongs:
        refuse("compute_capability", f"{gpu.compute_capability} is {belongs}, the architecture is {gpu.architecture}")
    if gpu.mig is not None and gpu.architecture not in WITH_MIG:
        refuse("mig", f"no {gpu.architecture} card has MIG, cards of {', '.join(WITH_MIG)} do")
    remaps = gpu.architecture not in BEFORE_AMPERE
    if gpu.bad_memory == ("retired_pages" if remaps else "remapped_rows"):
        refuse("bad_memory", f"{gpu.architecture} cards have {'remapped_rows' if remaps else 'retired_pages'}")


def _architecture(capability: str) -> str:
    """Return whose compute capability it is (NVIDIA, developer.nvidia.com/cuda-gpus)."""
    major, minor = (int(part) for part in capability.split("."))
    if major == 7:
        return "turing" if minor == 5 else "volta"
    if major == 8:
        return "ada" if minor == 9 else "ampere"
    return {9: "hopper", 10: "blackwell", 11: "blackwell", 12: "blackwell"}.get(major, "of no card that is known")


def _check_mig(mig: Mig, total_mib: int, where: str) -> None:
    table = mig.table
    most = max(profile.max for profile in table.profiles.values())
    if mig.max_devices < most:
        raise RefusalError(f"{where}.max_devices: {mig.max_devices} is less than the {most} instances of a profile")
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
        if profile.slices != int(profile.profile[0]):
            raise RefusalError(f"{where}: {name} has {profile.slices} slices and is called {profile.profile}")
        if len(set(profile.starts)) < len(profile.starts) or profile.max > len(profile.starts):
            raise RefusalError(f"{where}: {profile.max} x {name} need as many starts that differ, not {profile.starts}")
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
    slots = Counter(place.address.rpartition(".")[0] for place in server.gpus)
    for slot, times in slots.items():
        if times > 1:
            raise RefusalError(f"{file}: gpus: {times} GPUs are at {slot}, which is one device to NVML")
    for index, place in enumerate(server.gpus):
        if server.numa and place.numa_node is not None and place.numa_node not in server.numa:
            nodes = ", ".join(map(str, server.numa))
            raise RefusalError(f"{file}: gpus[{index}].numa_node: {place.numa_node} is none of numa, {nodes}")
    _check_processors(server, file)
    _check_shared(server, file)
    if server.nvlink is not None:
        connect(server, file)


def _check_processors(server: Server, file: Path) -> None:
    """Refuse CPUs that no machine has, and one that is of two nodes."""
    owners: dict[int, int] = {}
    for node, text in server.numa.items():
        for part in text.split(","):
            first, _, last = part.partition("-")
            span = range(int(first), int(last or first) + 1)
            if not span or span[-1] >= CPUS:
                raise RefusalError(f"{file}: numa[{node}]: {part} are no CPUs; they count up, and end before {CPUS}")
            for cpu in span:
                if owners.setdefault(cpu, node) != node:
                    raise RefusalError(f"{file}: numa[{node}]: CPU {cpu} is of node {owners[cpu]} already")


def _check_shared(server: Server, file: Path) -> None:
    """Refuse a PCIe switch below two roots, a root on two NUMA nodes, and a number that is given twice."""
    for outer, inner in (("root", "switch"), ("numa_node", "root")):
        known: dict[int, int | None] = {}
        for index, place in enumerate(server.gpus):
            part, whole = getattr(place, inner), getattr(place, outer)
            if part is not None and known.setdefault(part, whole) != whole:
                raise RefusalError(f"{file}: gpus[{index}].{outer}: {inner} {part} is of {outer} {known[part]} already")
    minors = (index if place.minor is None else place.minor for index, place in enumerate(server.gpus))
    # Only a board with NVSwitches numbers its modules: cards that are apart all say 1.
    board = server.gpus if server.nvlink is not None and server.nvlink.switches else []
    modules = (place.module for place in board if place.module is not None)
    for key, values in (("minor", Counter(minors)), ("module", Counter(modules))):
        for value, times in values.items():
            if times > 1:
                raise RefusalError(f"{file}: two of gpus have the {key} {value}")

"""Compiles a described server to the state file, format 2 of sim/nvml/state_standin.h."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.hardware import words
from sim.hardware.links import connect
from sim.hardware.model import Gpu, GpuPlace, MigTable, Server
from sim.hardware.state_file import FORMAT, identity


def render_state(server: Server, machine: str) -> str:
    """Return the state file."""
    driver = server.gpu.driver
    major, minor = driver.cuda.split(".")
    lines = [
        FORMAT,
        f"# Simulated hardware of {machine}: {server.description}",
        "",
        "[system]",
        f"driver_version = {driver.version}",
        f"nvml_version = {driver.nvml}",
        f"cuda_driver_version = {1000 * int(major) + 10 * int(minor)}",
    ]
    common = _lines(_card(server.gpu) | _nvlink(server))
    profiles = [] if server.gpu.mig is None else _profiles(server.gpu.mig.table)
    for index, links in enumerate(connect(server, Path())):
        lines += ["", f"[gpu {index}]", *_lines(_place(server, index, machine)), *common]
        lines += [f"nvlink = {number} {link.remote} {link.address}" for number, link in enumerate(links)]
        lines += profiles
    return "\n".join(lines) + "\n"


def _lines(values: Mapping[str, Any]) -> list[str]:
    """Return one line for each value that is known."""
    return [
        f"{key} = {int(value) if isinstance(value, bool) else value}"
        for key, value in values.items()
        if value is not None
    ]


def _place(server: Server, index: int, machine: str) -> dict[str, Any]:
    """Return what tells one GPU of a server from the others."""
    place: GpuPlace = server.gpus[index]
    uuid, serial = identity(machine, index)
    return {
        "uuid": uuid,
        "serial": serial,
        "pci_address": place.address,
        "minor": index if place.minor is None else place.minor,
        "module_id": place.module,
        "numa_node": place.numa_node,
        "cpu_affinity": None if place.numa_node is None else server.numa.get(place.numa_node),
        "pcie_root": place.root,
        "pcie_switch": place.switch,
        **_fabric(server),
    }


def _fabric(server: Server) -> dict[str, Any]:
    fabric = None if server.nvlink is None else server.nvlink.fabric
    if fabric is None:
        return {}
    return {
        "fabric_state": words.FABRIC_STATES[fabric.state],
        "fabric_status": 0,
        "fabric_clique": fabric.clique,
        "fabric_health": fabric.health_mask,
        "fabric_cluster": fabric.cluster,
    }


def _card(gpu: Gpu) -> dict[str, Any]:
    """Return what all GPUs of one kind share, idle and healthy."""
    major, minor = gpu.compute_capability.split(".")
    return {
        "name": gpu.name,
        "vbios_version": gpu.vbios,
        "board_part_number": gpu.board_part_number,
        "pci_device_id": f"0x{gpu.pci.device:04x}10de",
        "pci_subsystem_id": f"0x{gpu.pci.subsystem_device:04x}{gpu.pci.subsystem_vendor:04x}",
        "compute_capability_major": major,
        "compute_capability_minor": minor,
        "brand": None if gpu.brand is None else words.BRANDS[gpu.brand],
        "architecture": words.ARCHITECTURES[gpu.architecture],
        "cores": gpu.cores,
        "memory_bus_bits": gpu.memory.bus_bits,
        "memory_total_bytes": gpu.memory.total_bytes,
        "memory_reserved_bytes": gpu.memory.reserved_bytes,
        "memory_used_bytes": gpu.memory.used_bytes,
        "bar1_total_bytes": gpu.memory.bar1_bytes,
        "bar1_used_bytes": gpu.memory.bar1_used_bytes,
        "compute_mode": words.COMPUTE_MODES[gpu.compute_mode],
        "persistence_mode": gpu.persistence_mode,
        "pcie_generation": gpu.pci.generation,
        "pcie_generation_max": gpu.pci.generation_max,
        "pcie_width": gpu.pci.width,
        "pcie_width_max": gpu.pci.width_max,
        "pcie_replays": 0,
        "pcie_peer_to_peer": gpu.pcie_peer_to_peer,
        **_activity(gpu),
        **_health(gpu),
        **_mig(gpu),
    }


def _activity(gpu: Gpu) -> dict[str, Any]:
    clocks, power, temperature = gpu.clocks_mhz, gpu.power_milliwatts, gpu.temperature_celsius
    return {
        **{f"clock_{key}": value for key, value in clocks.model_dump().items()},
        "performance_state": gpu.performance_state,
        "throttle_reasons": 1,  # idle
        "power_milliwatts": power.idle,
        "power_limit_milliwatts": power.limit,
        "power_limit_default_milliwatts": power.limit,
        "power_limit_min_milliwatts": power.limit_min,
        "power_limit_max_milliwatts": power.limit_max,
        "energy_millijoules": 0,
        "temperature_celsius": temperature.gpu,
        "temperature_memory_celsius": temperature.memory,
        "temperature_slowdown_celsius": temperature.slowdown,
        "temperature_shutdown_celsius": temperature.shutdown,
        "temperature_max_celsius": temperature.gpu_max,
        "temperature_memory_max_celsius": temperature.memory_max,
        "fan_percent": gpu.fan_percent,
        **{f"utilization_{part}_percent": 0 for part in ("gpu", "memory", "encoder", "decoder")},
    }


def _health(gpu: Gpu) -> dict[str, Any]:
    health: dict[str, Any] = {"ecc_current": gpu.ecc, "ecc_pending": gpu.ecc}
    if gpu.ecc is not None:
        kinds = ("volatile_corrected", "volatile_uncorrected", "aggregate_corrected", "aggregate_uncorrected")
        health |= {f"ecc_{kind}": 0 for kind in kinds}
    if gpu.bad_memory == "remapped_rows":
        health |= dict.fromkeys(("remapped_correctable", "remapped_uncorrectable", "remap_pending", "remap_failure"), 0)
    if gpu.bad_memory == "retired_pages":
        health |= dict.fromkeys(("retired_single_bit", "retired_double_bit", "retirement_pending"), 0)
    return health | {"recovery_action": 0 if gpu.recovery_action else None}


def _nvlink(server: Server) -> dict[str, Any]:
    """Return what links have in common; a card whose links lead nowhere has none for NVML."""
    gpu = server.gpu
    if gpu.nvlink is None or server.nvlink is None:
        return {}
    errors = dict.fromkeys(("nvlink_replay_errors", "nvlink_recovery_errors", "nvlink_crc_errors"), 0)
    return {"nvlink_version": gpu.nvlink.version, "nvlink_mbps": gpu.nvlink.mbps, **errors}


def _mig(gpu: Gpu) -> dict[str, Any]:
    if gpu.mig is None:
        return {}
    return {
        "mig_current": 0,
        "mig_pending": 0,
        "mig_needs_reset": gpu.mig.needs_reset,
        "mig_mode_persists": gpu.mig.mode_persists,
        "mig_slots": gpu.mig.table.slots,
        "mig_mirrored": gpu.mig.mirrored,
        "mig_max_devices": gpu.mig.max_devices,
    }


def _profiles(table: MigTable) -> list[str]:
    lines = []
    for name, one in table.profiles.items():
        numbers = (
            words.MIG_PROFILES[one.profile], one.id, one.slices, one.max, one.multiprocessors, one.copy_engines,
            one.decoders, one.encoders, one.jpegs, one.ofas, one.memory_mib, one.size, ",".join(map(str, one.starts)),
        )  # fmt: skip
        lines.append(f"profile = {' '.join(map(str, numbers))} {name}")
    return lines

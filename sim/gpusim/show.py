"""Shows the hardware of a simulated server: as one object, and as lines that a person reads."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from sim.gpusim.places import Place, read
from sim.hardware.state_file import Section, State, as_number
from sim.machine.common import REFUSED, SimError

MIB = 1 << 20
INIT_ERRORS = {9: "the driver is not loaded", 18: "driver and library are of different versions"}
EVENT_TYPES = {1: "corrected memory error", 2: "uncorrected memory error", 8: "XID", 0x100: "MIG configuration"}
THROTTLING = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x100: "display clocks",
}
HEALTH = {
    "lost": "has fallen off the bus",
    "reset_stuck": "cannot be reset",
    "remap_pending": "row remapping pending",
    "remap_failure": "row remapping failed",
    "retirement_pending": "page retirement pending",
}
FABRIC = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}


def describe(place: Place, only: int | None) -> dict[str, Any]:
    """Return what there is: server, GPUs, faults and events."""
    state = read(place)
    if only is not None and only >= len(state.gpus):
        raise SimError(f"there is no GPU {only}", f"{place.title} has {len(state.gpus)}, counted from 0", REFUSED)
    system = state.effective("system")
    chosen = range(len(state.gpus)) if only is None else [only]
    return {
        "server": place.title,
        "driver_version": system.get("driver_version"),
        "cuda_driver_version": system.number("cuda_driver_version"),
        "init_error": system.number("init_error") or 0,
        "gpus": [_gpu(place, index, state.effective(f"gpu {index}")) for index in chosen],
        "faults": [_fault(fault) for fault in state.faults if only is None or fault.title.split()[2] == str(only)],
        "events": [event for event in _events(state) if only is None or event["gpu"] == only],
    }


def _gpu(place: Place, index: int, gpu: Section) -> dict[str, Any]:
    now = int(time.time())
    processes = [one for value in gpu.all("process") if (one := _process(place, value, now))]
    reserved, used = gpu.number("memory_reserved_bytes") or 0, gpu.number("memory_used_bytes") or 0
    left = (gpu.number("memory_total_bytes") or 0) - reserved - used
    for one in processes:
        # What grows ends where the memory does, as in the library.
        one["bytes"] = min(one["bytes"], left)
        left -= one["bytes"]
    links = [value.split() for value in gpu.all("nvlink")]
    return {
        "index": index,
        **{key: gpu.get(key) for key in ("name", "uuid", "pci_address")},
        "memory_total_bytes": gpu.number("memory_total_bytes"),
        "memory_used_bytes": reserved + used + sum(one["bytes"] for one in processes),
        **{key: gpu.number(key) for key in NUMBERS},
        "mig": _mig(gpu),
        "processes": processes,
        "held_by_module": gpu.get("held_by_module"),
        "nvlinks": [{"link": as_number(number), "to": f"{remote} {address}"} for number, remote, address in links],
        "nvlinks_down": sorted(as_number(value) for value in gpu.all("nvlink_down")),
        "health": [text for key, text in HEALTH.items() if gpu.number(key) == 1],
    }


NUMBERS = (
    "temperature_celsius",
    "power_milliwatts",
    "power_limit_milliwatts",
    "utilization_gpu_percent",
    "throttle_reasons",
    "ecc_volatile_corrected",
    "ecc_volatile_uncorrected",
    "pcie_generation",
    "pcie_width",
    "fabric_state",
    "recovery_action",
)


def _process(place: Place, value: str, now: int) -> dict[str, Any] | None:
    pid, used, kind, instance, compute, *growth = value.split()
    name = place.process_name(as_number(pid))
    if name is None:
        return None
    size = as_number(used)
    if growth:
        size += as_number(growth[0]) // 60 * max(0, now - as_number(growth[1]))
    return {
        "pid": as_number(pid),
        "name": name,
        "bytes": size,
        "type": kind,
        "gpu_instance": None if instance == "-" else as_number(instance),
        "compute_instance": None if compute == "-" else as_number(compute),
        "grows": bool(growth),
    }


def _mig(gpu: Section) -> dict[str, Any] | None:
    if gpu.get("mig_current") is None:
        return None
    profiles = {value.split()[0]: value.split()[-1] for value in gpu.all("profile")}
    compute: dict[str, list[int]] = {}
    for value in gpu.all("compute_instance"):
        compute.setdefault(value.split()[0], []).append(as_number(value.split()[1]))
    return {
        "current": gpu.number("mig_current"),
        "pending": gpu.number("mig_pending"),
        "instances": [
            {
                "id": as_number(number),
                "profile": profiles.get(profile, profile),
                "start": as_number(start),
                "compute": compute.get(number, []),
            }
            for number, profile, start, _serial in (value.split() for value in gpu.all("gpu_instance"))
        ],
    }


def _fault(fault: Section) -> dict[str, Any]:
    _, name, of = fault.title.split()
    lines = [f"{key} = {value}" for key, value in fault.lines if key != "until"]
    return {"fault": name, "of": of, "until": fault.get("until") or "clear", "lines": lines}


def _events(state: State) -> list[dict[str, Any]]:
    found = []
    for value in state.system.all("event"):
        number, gpu, kind, data, _gi, _ci, when = value.split()
        found.append(
            {
                "number": as_number(number),
                "gpu": as_number(gpu),
                "type": as_number(kind),
                "data": as_number(data),
                "time": as_number(when),
            }
        )
    return found


# ---- for a person ----


def lines(shown: Mapping[str, Any]) -> list[str]:
    """Return what a person reads."""
    gpus = shown["gpus"]
    cuda = shown["cuda_driver_version"] or 0
    said = [f"{shown['server']}: driver {shown['driver_version']}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"]
    error = shown["init_error"]
    if error:
        said.append(f"nvmlInit fails with {error}: {INIT_ERRORS.get(error, 'see nvmlReturn_t')}")
    said += table(
        ["GPU", "NAME", "PCI", "MEMORY MiB", "TEMP", "POWER W", "UTIL", "PCIe", "NVLINK", "FABRIC", "MIG", "STATE"],
        [_row(gpu) for gpu in gpus],
    )
    said += _block("MIG instances", [line for gpu in gpus for line in _mig_lines(gpu)])
    said += _block("Processes", [line for gpu in gpus for line in _process_lines(gpu)])
    said += _block(
        "Faults",
        [
            f"{one['fault']} ({_of(one['of'])}, until {one['until']}): {', '.join(one['lines'])}"
            for one in shown["faults"]
        ],
    )
    said += _block("Events", [_event_line(event) for event in shown["events"]])
    return said


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table whose columns are as wide as what is in them; a column without a value is left out."""
    columns = [column for column in zip(head, *rows, strict=True) if any(cell != "-" for cell in column[1:])]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]


def _block(title: str, what: Sequence[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in what)] if what else []


def _of(gpu: str) -> str:
    return gpu if gpu == "system" else f"GPU {gpu}"


def _known(value: Any, unit: int = 1) -> str:
    return "-" if value is None else str(value // unit)


def _row(gpu: Mapping[str, Any]) -> list[str]:
    links, down = len(gpu["nvlinks"]), len(gpu["nvlinks_down"])
    mig = gpu["mig"]
    return [
        str(gpu["index"]),
        gpu["name"] or "-",
        gpu["pci_address"] or "-",
        f"{gpu['memory_used_bytes'] // MIB} of {_known(gpu['memory_total_bytes'], MIB)}",
        _known(gpu["temperature_celsius"]),
        f"{_known(gpu['power_milliwatts'], 1000)} of {_known(gpu['power_limit_milliwatts'], 1000)}",
        _known(gpu["utilization_gpu_percent"]),
        "-" if gpu["pcie_width"] is None else f"{_known(gpu['pcie_generation'])} x{gpu['pcie_width']}",
        f"{links - down} of {links} up" if links else "-",
        "-" if gpu["fabric_state"] is None else FABRIC.get(gpu["fabric_state"], str(gpu["fabric_state"])),
        "-" if mig is None else _mig_word(mig),
        "; ".join(_state(gpu)) or "ok",
    ]


def _mig_word(mig: Mapping[str, Any]) -> str:
    words = {0: "off", 1: "on"}
    now, then = words[mig["current"] or 0], words[mig["pending"] or 0]
    return now if now == then else f"{now}, {then} after a reset"


def _state(gpu: Mapping[str, Any]) -> list[str]:
    reasons = gpu["throttle_reasons"] or 0
    slowed = [text for bit, text in THROTTLING.items() if reasons & bit and bit not in (0x1, 0x2)]
    said = [*gpu["health"], *(f"slowed: {text}" for text in slowed)]
    if gpu["held_by_module"]:
        said.append(f"held by {gpu['held_by_module']}")
    if gpu["ecc_volatile_uncorrected"]:
        said.append(f"{gpu['ecc_volatile_uncorrected']} uncorrected memory errors")
    if gpu["nvlinks_down"]:
        said.append(f"link {', '.join(map(str, gpu['nvlinks_down']))} down")
    return said


def _mig_lines(gpu: Mapping[str, Any]) -> list[str]:
    return [
        f"GPU {gpu['index']}: instance {one['id']}, {one['profile']}, from slot {one['start']},"
        f" compute instances {', '.join(map(str, one['compute'])) or 'none'}"
        for one in (gpu["mig"] or {"instances": []})["instances"]
    ]


def _process_lines(gpu: Mapping[str, Any]) -> list[str]:
    found = []
    for one in gpu["processes"]:
        where = "" if one["gpu_instance"] is None else f", instance {one['gpu_instance']}.{one['compute_instance']}"
        size = f"{one['bytes'] // MIB} MiB{', growing' if one['grows'] else ''}"
        found.append(f"GPU {gpu['index']}{where}: {size}, {one['type']}, process {one['pid']} {one['name']}")
    return found


def _event_line(event: Mapping[str, Any]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
    kind = EVENT_TYPES.get(event["type"], f"event of type {event['type']}")
    return f"{when}  GPU {event['gpu']}: {kind} {event['data'] or ''}".rstrip()

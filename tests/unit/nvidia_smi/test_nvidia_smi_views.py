"""Debian's own nvidia-smi, unmodified, on every described server: what each view says."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from sim.hardware import state_file
from sim.hardware.state_file import Section
from tests.unit.nvidia_smi.machine import MIB, NO_ANSWER, Machine, bus_id


def scaled(gpu: Section, key: str, unit: int, digits: int = 0) -> str:
    value = gpu.number(key)
    return NO_ANSWER if value is None else f"{value / unit:.{digits}f}" if digits else str(value // unit)


def mode(gpu: Section, key: str) -> str:
    return {None: NO_ANSWER, 0: "Disabled", 1: "Enabled"}[gpu.number(key)]


def test_the_list_names_every_gpu(machine: Machine) -> None:
    done = machine.run("-L")
    assert done.code == 0
    assert done.lines == [
        f"GPU {index}: {gpu.get('name')} (UUID: {gpu.get('uuid')})" for index, gpu in enumerate(machine.gpus())
    ]


COLUMNS: dict[str, Callable[[Section], str | None]] = {
    "name": lambda gpu: gpu.get("name"),
    "uuid": lambda gpu: gpu.get("uuid"),
    "pci.bus_id": bus_id,
    "serial": lambda gpu: gpu.get("serial") or NO_ANSWER,
    "vbios_version": lambda gpu: gpu.get("vbios_version") or NO_ANSWER,
    "memory.total": lambda gpu: scaled(gpu, "memory_total_bytes", MIB),
    "power.limit": lambda gpu: scaled(gpu, "power_limit_milliwatts", 1000, 2),
    "power.draw": lambda gpu: scaled(gpu, "power_milliwatts", 1000, 2),
    "temperature.gpu": lambda gpu: scaled(gpu, "temperature_celsius", 1),
    "temperature.memory": lambda gpu: scaled(gpu, "temperature_memory_celsius", 1).strip("[]"),
    "clocks.max.sm": lambda gpu: scaled(gpu, "clock_sm_max", 1),
    "pcie.link.gen.max": lambda gpu: scaled(gpu, "pcie_generation_max", 1),
    "pcie.link.gen.hostmax": lambda gpu: scaled(gpu, "pcie_generation_max", 1),
    "pcie.link.width.max": lambda gpu: scaled(gpu, "pcie_width_max", 1),
    "persistence_mode": lambda gpu: mode(gpu, "persistence_mode"),
    "ecc.mode.current": lambda gpu: mode(gpu, "ecc_current"),
    "mig.mode.current": lambda gpu: mode(gpu, "mig_current"),
    "compute_cap": lambda gpu: f"{gpu.get('compute_capability_major')}.{gpu.get('compute_capability_minor')}",
}


def test_the_csv_query_says_what_the_hardware_is(machine: Machine) -> None:
    rows = machine.csv("index", *COLUMNS)
    for index, (gpu, row) in enumerate(zip(machine.gpus(), rows, strict=True)):
        expected = {"index": str(index), **{name: value(gpu) for name, value in COLUMNS.items()}}
        assert dict(zip(["index", *COLUMNS], row, strict=True)) == expected


def test_reserved_memory_is_told(machine: Machine) -> None:
    """535 rounds down to MiB, 550 rounds up."""
    for gpu, (reserved,) in zip(machine.gpus(), machine.csv("memory.reserved"), strict=True):
        assert abs(int(reserved) - (gpu.number("memory_reserved_bytes") or 0) / MIB) < 1


def test_the_table_shows_driver_cuda_and_every_gpu(machine: Machine) -> None:
    done = machine.run()
    assert done.code == 0
    system = state_file.read(machine.file).system
    cuda = system.number("cuda_driver_version") or 0
    assert f"Driver Version: {system.get('driver_version')} " in done.text
    assert f"CUDA Version: {cuda // 1000}.{cuda % 1000 // 10} " in done.text
    for gpu in machine.gpus():
        assert bus_id(gpu) in done.text
        total = f"{scaled(gpu, 'memory_total_bytes', MIB)}MiB"
        assert re.search(rf"MiB / +({total}|{total[:5]}\.\.\.) ", done.text)  # 535 cuts six digits itself
    assert "No running processes found" in done.text


def test_the_full_query_says_the_same_as_text_and_as_xml(machine: Machine) -> None:
    text, tree, gpus = machine.run("-q"), machine.xml(), machine.gpus()
    assert text.code == 0
    assert tree.findtext("attached_gpus") == str(len(gpus))
    for gpu, element in zip(gpus, tree.findall("gpu"), strict=True):
        assert element.get("id") == bus_id(gpu)
        assert element.findtext("product_name") == gpu.get("name")
        assert element.findtext("uuid") == gpu.get("uuid")
        assert element.findtext("fb_memory_usage/total") == f"{scaled(gpu, 'memory_total_bytes', MIB)} MiB"
        assert f"    GPU UUID                              : {gpu.get('uuid')}" in text.lines


def links(gpu: Section, to: Section) -> int:
    """Return over how many links of NVLink two GPUs are joined, by the lines of their state."""
    ends = [line.split()[1:] for line in gpu.all("nvlink")]
    switched = [end for end in ends if end[0] == "switch"]
    if switched and any(line.split()[1] == "switch" for line in to.all("nvlink")):
        return len(switched)
    return ends.count(["gpu", str(to.get("pci_address"))])


def way(gpu: Section, to: Section) -> str:
    count = links(gpu, to)
    if count:
        return f"NV{count}"
    for key, name in (("pcie_switch", "PIX"), ("pcie_root", "PHB"), ("numa_node", "NODE")):
        if gpu.get(key) is not None and gpu.get(key) == to.get(key):
            return name
    return "SYS"


def test_the_topology_is_that_of_the_server(machine: Machine) -> None:
    done, gpus = machine.run("topo", "-m"), machine.gpus()
    assert done.code == 0, done.text
    rows = [line.split("\t") for line in done.lines if line.startswith("GPU")]
    for index, (gpu, row) in enumerate(zip(gpus, rows, strict=True)):
        expected = ["X" if other is gpu else way(gpu, other) for other in gpus]
        assert [cell.strip() for cell in row[1 : len(gpus) + 1]] == expected, index
        assert row[len(gpus) + 1] == (gpu.get("cpu_affinity") or "")


def test_peer_to_peer_is_told_for_every_pair(machine: Machine) -> None:
    done, gpus = machine.run("topo", "-p2p", "n"), machine.gpus()
    assert done.code == 0, done.text
    rows = [line.split() for line in done.lines if line.startswith(" GPU")]
    for gpu, row in zip(gpus, rows, strict=True):
        assert row[1:] == ["X" if other is gpu else "OK" if links(gpu, other) else "NS" for other in gpus]


def test_every_link_of_nvlink_is_listed_with_its_speed(machine: Machine) -> None:
    for index, gpu in enumerate(machine.gpus()):
        done = machine.run("nvlink", "-s", "-i", str(index))
        speed = f"{(gpu.number('nvlink_mbps') or 0) / 1000:g} GB/s"
        assert [line.split(": ")[1] for line in done.lines[1:]] == [speed] * len(gpu.all("nvlink"))


def test_a_link_that_is_down_is_shown_inactive(h100: Machine) -> None:
    h100.add(2, "nvlink_down", "5")
    done = h100.run("nvlink", "-s", "-i", "2")
    assert "Link 5: <inactive>" in done.text
    assert done.text.count("GB/s") == 17
    assert "NV17" in h100.run("topo", "-m").text


def test_a_process_is_shown_by_every_view(machine: Machine, holder: int) -> None:
    machine.add(0, "process", f"{holder} {2048 * MIB} compute - -")
    done = machine.run("--query-compute-apps=gpu_uuid,pid,used_memory,name", "--format=csv,noheader,nounits")
    assert done.lines == [f"{machine.gpus()[0].get('uuid')}, {holder}, 2048, {sys.executable}"]
    assert machine.csv("memory.used")[0] == [str(2048 + (machine.gpus()[0].number("memory_used_bytes") or 0) // MIB)]
    row = next(line for line in machine.run().lines if f" {holder} " in line)
    assert row.split()[:6] == ["|", "0", "N/A", "N/A", str(holder), "C"]
    assert row.split()[-2] == "2048MiB"
    assert [line.split()[:3] for line in machine.run("pmon", "-c", "1", "-i", "0").lines[2:]] == [
        ["0", str(holder), "C"]
    ]


def test_the_device_monitor_shows_the_readings(machine: Machine) -> None:
    gpu = machine.gpus()[0]
    done = machine.run("dmon", "-c", "1", "-i", "0", "-s", "p")
    assert done.code == 0
    memory = gpu.number("temperature_memory_celsius")
    power, celsius = int(scaled(gpu, "power_milliwatts", 1000)), scaled(gpu, "temperature_celsius", 1)
    assert done.lines[2].split() == ["0", str(power), celsius, "-" if memory is None else str(memory)]


def test_a_lost_gpu_is_said_to_be_lost(h100: Machine) -> None:
    h100.set(3, lost=1)
    for call in ((), ("--query-gpu=name", "--format=csv"), ("-r", "-i", "3")):
        done = h100.run(*call)
        assert (done.code, "device handle for GPU3: GPU is lost" in done.text) == (15, True)
    listed = h100.run("-L")
    assert (listed.code, listed.text.count("(UUID: GPU-")) == (15, 7)
    assert h100.run("-q", "-i", "4").code == 0


def test_a_library_that_is_not_the_driver_s_is_told(h100: Machine) -> None:
    with state_file.change(h100.file) as state:
        state.system.set("init_error", "18")
    done = h100.run()
    assert (done.code, done.lines[0]) == (18, "Failed to initialize NVML: Driver/library version mismatch")


def test_what_ails_a_gpu_is_told(h100: Machine) -> None:
    h100.set(2, remap_pending=1, remapped_uncorrectable=2, throttle_reasons=0x40, recovery_action=1)
    gpu = h100.xml().findall("gpu")[2]
    assert gpu.findtext("remapped_rows/remapped_row_pending") == "Yes"
    assert gpu.findtext("remapped_rows/remapped_row_unc") == "2"
    reasons = {reason.tag.split("_reason_")[1] for reason in gpu.iter() if reason.text == "Active"}
    assert "hw_thermal_slowdown" in reasons
    assert re.search("Reset Required +: Yes", h100.run("-q", "-i", "2").text)


def test_without_a_driver_it_says_so(program: Path, library: Path, tmp_path: Path) -> None:
    done = Machine(program, library, tmp_path / "none").run()
    assert done.code == 9
    assert "couldn't communicate with the NVIDIA driver" in done.text

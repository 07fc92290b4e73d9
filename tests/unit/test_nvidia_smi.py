"""Debian's own nvidia-smi, unmodified, on every described server: what each view says and how each command exits."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sim.hardware import describe, install, state_file
from sim.hardware.state_file import Section
from tests.unit.debian_nvidia_smi import SUITES, UnobtainableError, fetch
from tests.unit.nvidia_smi_machine import MIB, Machine
from tests.unit.standin import library_directory

PRESETS = describe.names("presets")
NO_ANSWER = "[N/A]"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library_directory(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module", params=SUITES)
def program(request: pytest.FixtureRequest) -> Path:
    try:
        return fetch(request.param)
    except UnobtainableError as reason:
        pytest.skip(f"Debian's nvidia-smi of {request.param} cannot be had: {reason}")


def machine_of(preset: str, program: Path, library: Path, place: Path) -> Machine:
    file = place / "gpus.conf"
    file.write_text(install.describe(preset, "h100-sg-01").state)
    return Machine(program, library, file)


@pytest.fixture(params=PRESETS)
def machine(request: pytest.FixtureRequest, program: Path, library: Path, tmp_path: Path) -> Machine:
    return machine_of(request.param, program, library, tmp_path)


@pytest.fixture
def h100(program: Path, library: Path, tmp_path: Path) -> Machine:
    return machine_of("h100-80gb-sxm-x8", program, library, tmp_path)


@pytest.fixture
def a100(program: Path, library: Path, tmp_path: Path) -> Machine:
    return machine_of("a100-40gb-sxm-x4", program, library, tmp_path)


@pytest.fixture
def holder() -> Iterator[int]:
    """Give the id of a process that lives as long as the test."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid


def bus_id(gpu: Section) -> str:
    domain, rest = str(gpu.get("pci_address")).split(":", 1)
    return f"{int(domain, 16):08X}:{rest.upper()}"


def scaled(gpu: Section, key: str, unit: int, digits: int = 0) -> str:
    value = gpu.number(key)
    return NO_ANSWER if value is None else f"{value / unit:.{digits}f}" if digits else str(value // unit)


def mode(gpu: Section, key: str) -> str:
    return {None: NO_ANSWER, 0: "Disabled", 1: "Enabled"}[gpu.number(key)]


# ---- views ----


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


# ---- settings ----


def test_persistence_mode_is_switched(machine: Machine) -> None:
    assert machine.run("-pm", "0", "-i", "0").code == 0
    assert machine.csv("persistence_mode")[0] == ["Disabled"]
    assert machine.run("-pm", "1", "-i", "0").code == 0
    assert machine.csv("persistence_mode")[0] == ["Enabled"]


def test_the_power_limit_is_set_within_its_range(machine: Machine) -> None:
    gpu = machine.gpus()[0]
    lowest, highest = (gpu.number(f"power_limit_{end}_milliwatts") for end in ("min", "max"))
    if lowest is None or highest is None:
        assert "is not supported" in machine.run("-pl", "200", "-i", "0").text  # the card tells no range
        return
    assert machine.run("-pl", str(lowest // 1000), "-i", "0").code == 0
    assert machine.csv("power.limit")[0] == [f"{lowest / 1000:.2f}"]
    refused = machine.run("-pl", str(highest // 1000 + 1), "-i", "0")
    assert refused.code == 2
    assert f"should be between {lowest / 1000:.2f} W and {highest / 1000:.2f} W" in refused.text


def test_ecc_waits_for_a_reset(h100: Machine) -> None:
    done = h100.run("-e", "0", "-i", "1")
    assert (done.code, "Reboot required" in done.text) == (0, True)
    assert h100.csv("ecc.mode.current", "ecc.mode.pending")[1] == ["Enabled", "Disabled"]
    assert h100.run("--gpu-reset", "-i", "1").code == 0
    assert h100.csv("ecc.mode.current")[1] == ["Disabled"]


# ---- reset ----


def test_a_reset_takes_instances_away_and_makes_pending_modes_hold(a100: Machine) -> None:
    assert a100.run("-mig", "1", "-i", "0").code == 0
    assert a100.csv("mig.mode.current", "mig.mode.pending")[0] == ["Disabled", "Enabled"]
    done = a100.run("--gpu-reset", "-i", "0")
    assert (done.code, done.lines[0]) == (0, f"GPU {bus_id(a100.gpus()[0])} was successfully reset.")
    assert a100.csv("mig.mode.current", "mig.mode.pending")[0] == ["Enabled", "Enabled"]
    assert a100.run("mig", "-cgi", "9", "-C", "-i", "0").code == 0
    assert a100.run("--gpu-reset", "-i", "0").code == 0
    assert a100.run("mig", "-lgi", "-i", "0").code == 6


def test_a_reset_without_names_is_of_all_gpus(h100: Machine) -> None:
    for index in range(8):
        h100.set(index, ecc_volatile_uncorrected=3)
    done = h100.run("-r")
    assert done.lines == [*(f"GPU {bus_id(gpu)} was successfully reset." for gpu in h100.gpus()), "All done."]
    assert h100.csv("ecc.errors.uncorrected.volatile.total") == [["0"]] * 8


def test_a_busy_gpu_is_not_reset_and_neither_are_the_others(h100: Machine, holder: int) -> None:
    h100.add(2, "process", f"{holder} {MIB} compute - -")
    h100.set(0, ecc_volatile_uncorrected=3)
    done = h100.run("-r", "-i", "0,2")
    assert done.code == 255
    assert "The following GPUs could not be reset:" in done.text
    assert f"GPU {bus_id(h100.gpus()[2])}: In use by another client" in done.text
    assert bus_id(h100.gpus()[0]) not in done.text
    assert h100.csv("ecc.errors.uncorrected.volatile.total")[0] == ["3"]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [("held_by_module", "nvidia_drm", "In use by another client"), ("reset_stuck", "1", "Unknown Error")],
)
def test_what_else_prevents_a_reset(h100: Machine, key: str, value: str, reason: str) -> None:
    h100.set(1, **{key: value})
    done = h100.run("-r", "-i", "1")
    assert done.code == 255
    assert f"GPU {bus_id(h100.gpus()[1])}: {reason}" in done.text


def test_an_ampere_nvswitch_without_its_fabric_manager_resets_all_or_none(
    program: Path, library: Path, tmp_path: Path
) -> None:
    a100 = machine_of("a100-80gb-sxm-x8", program, library, tmp_path)
    assert a100.run("-r", "-i", "0").code == 0
    for index in range(8):
        a100.set(index, fabric_state=1)
    done = a100.run("-r", "-i", "0,3")
    assert done.code == 2
    assert "NVLink connected GPUs must be reset together" in done.text
    missing = [index for index in range(8) if index not in (0, 3)]
    assert done.lines[1:] == [f"GPU {index} ({bus_id(a100.gpus()[index])})" for index in missing]
    assert a100.run("-r").code == 0


# ---- MIG ----


def enable(machine: Machine) -> None:
    """Switch MIG on at the first GPU, with the reset where the card needs one."""
    assert machine.run("-mig", "1", "-i", "0").code == 0
    if machine.csv("mig.mode.current")[0] != ["Enabled"]:
        assert machine.run("-r", "-i", "0").code == 0
    assert machine.csv("mig.mode.current")[0] == ["Enabled"]


@pytest.fixture(params=[name for name in PRESETS if describe.load_server(name).gpu.mig is not None])
def mig(request: pytest.FixtureRequest, program: Path, library: Path, tmp_path: Path) -> Machine:
    machine = machine_of(request.param, program, library, tmp_path)
    enable(machine)
    return machine


ASKED = {str(number) for number in range(10)}
"""The profiles that nvidia-smi 535 and 550 ask for, by NVML_GPU_INSTANCE_PROFILE_*; later ones they do not know."""


def profiles(machine: Machine) -> list[list[str]]:
    lines = (line.split() for line in machine.gpus()[0].all("profile"))
    return [words for words in lines if words[0] in ASKED]


def test_mig_is_refused_where_there_is_none(machine: Machine) -> None:
    if machine.gpus()[0].get("mig_current") is None:
        assert "Not Supported" in machine.run("-mig", "1", "-i", "0").text
        assert machine.csv("mig.mode.current")[0] == [NO_ANSWER]
    else:
        listed = machine.run("mig", "-lgip", "-i", "0")
        assert listed.code in (3, 6)  # of 550 and 535, "Not Supported" and "No MIG-enabled devices found."
        assert "No MIG-enabled devices found." in machine.run("mig", "-cgi", "19", "-i", "0").text


def test_the_profiles_are_those_of_the_card(mig: Machine) -> None:
    done = mig.run("mig", "-lgip", "-i", "0")
    rows = [line.strip("|").split() for line in done.lines if line.startswith("|   0  MIG")]
    assert done.code == 0
    assert {(row[2], row[3], row[4], row[5], row[7]) for row in rows} == {
        (words[13], words[1], f"{words[3]}/{words[3]}", f"{int(words[10]) / 1024:.2f}", words[4])
        for words in profiles(mig)
    }


def test_the_placements_are_those_of_the_card(mig: Machine) -> None:
    done = mig.run("mig", "-lgipp", "-i", "0")
    assert done.code == 0
    told = {line.split()[4]: line.split(": ")[1] for line in done.lines}
    assert told == {words[1]: f"{{{words[12]}}}:{words[11]}" for words in profiles(mig)}


def test_an_instance_is_made_listed_and_destroyed(mig: Machine) -> None:
    smallest = min(profiles(mig), key=lambda words: (int(words[2]), int(words[11]), int(words[0])))
    done = mig.run("mig", "-cgi", smallest[13], "-C", "-i", "0")
    assert done.code == 0, done.text
    (instance,) = mig.instances()
    number, name, place = instance.split()
    assert (name, place.split(":")[1]) == (smallest[13], smallest[11])
    device = mig.run("-L").lines[1]
    assert re.match(rf"  MIG {re.escape(name)} +Device  0: \(UUID: MIG-[0-9a-f-]{{36}}\)$", device)
    if mig.gpus()[0].get("bar1_total_bytes") is not None:  # else nvidia-smi tells nothing of the device
        (element,) = mig.xml().findall("gpu")[0].findall("mig_devices/mig_device")
        assert element.findtext("gpu_instance_id") == number
        assert element.findtext("fb_memory_usage/total") == f"{smallest[10]} MiB"
        rows = [line.split() for line in mig.run().lines if re.match(rf"\|  0 +{number}   0   0  \|", line)]
        assert [row[row.index("/") + 1] for row in rows] == [f"{smallest[10]}MiB"]
    busy = mig.run("mig", "-dgi", "-gi", number, "-i", "0")
    assert (busy.code, "In use by another client" in busy.text) == (19, True)
    assert mig.run("mig", "-dci", "-gi", number, "-i", "0").code == 0
    assert mig.run("mig", "-lci", "-i", "0").code == 6
    assert mig.run("mig", "-dgi", "-gi", number, "-i", "0").code == 0
    gone = mig.run("mig", "-lgi", "-i", "0")
    assert (gone.code, gone.text.strip()) == (6, "No GPU instances found: Not Found")


def test_compute_instances_share_a_gpu_instance(h100: Machine) -> None:
    enable(h100)
    assert h100.run("mig", "-cgi", "9", "-i", "0").code == 0
    listed = h100.run("mig", "-lcip", "-i", "0")
    rows = [line.strip("|").split() for line in listed.lines if line.startswith("|   0")]
    assert [(row[3], row[4], row[5]) for row in rows] == [
        ("1c.3g.40gb", "0", "3/3"),
        ("2c.3g.40gb", "1", "1/1"),
        ("3g.40gb", "2*", "1/1"),
    ]
    made = h100.run("mig", "-cci", "1,0", "-gi", rows[0][1], "-i", "0")
    assert made.code == 0, made.text
    full = h100.run("mig", "-cci", "0", "-gi", rows[0][1], "-i", "0")
    assert (full.code, "Insufficient Resources" in full.text) == (23, True)
    assert [line.split()[1] for line in h100.run("-L").lines[1:3]] == ["2c.3g.40gb", "1c.3g.40gb"]


def test_the_order_of_creation_decides_what_fits(a100: Machine) -> None:
    """As in NVIDIA's MIG user guide."""
    enable(a100)
    failed = a100.run("mig", "-cgi", "19,19,14,9", "-i", "0")
    assert failed.code == 23
    assert "Unable to create a GPU instance on GPU  0 using profile 9: Insufficient Resources" in failed.text
    assert a100.run("mig", "-dgi", "-i", "0").code == 0
    assert a100.run("mig", "-cgi", "9,19,14,19", "-i", "0").code == 0
    assert len(a100.instances()) == 4


def test_ampere_says_that_the_mode_is_pending_and_exits_0(a100: Machine, holder: int) -> None:
    done = a100.run("-mig", "1", "-i", "1")
    assert done.code == 0
    assert f"Warning: MIG mode is in pending enable state for GPU {bus_id(a100.gpus()[1])}" in done.text
    a100.add(0, "process", f"{holder} {MIB} compute - -")
    assert "In use by another client" in a100.run("-mig", "1", "-i", "0").text


def test_nine_at_a_time_make_exactly_seven(h100: Machine) -> None:
    enable(h100)
    with ThreadPoolExecutor(9) as pool:
        codes = list(pool.map(lambda _: h100.run("mig", "-cgi", "19", "-C", "-i", "0").code, range(9)))
    assert sorted(codes) == [0] * 7 + [23] * 2
    assert len(h100.instances()) == 7


def test_a_process_in_an_instance_is_shown_there(h100: Machine, holder: int) -> None:
    enable(h100)
    assert h100.run("mig", "-cgi", "9", "-C", "-i", "0").code == 0
    (number,) = (instance.split()[0] for instance in h100.instances())
    h100.add(0, "process", f"{holder} {512 * MIB} compute {number} 0")
    row = next(line for line in h100.run().lines if f" {holder} " in line)
    assert row.split()[1:6] == ["0", number, "0", str(holder), "C"]
    assert "512MiB / 40448MiB" in re.sub(" +", " ", h100.run().text)
    busy = h100.run("mig", "-dci", "-gi", number, "-i", "0")
    assert (busy.code, "In use by another client" in busy.text) == (19, True)

"""Debian's own nvidia-smi, unmodified: MIG on every described server that has it."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sim.hardware import describe
from tests.unit.nvidia_smi.machine import MIB, NO_ANSWER, Machine, bus_id, machine_of

PRESETS = describe.names("presets")


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
        rooms = {word for line in listed.lines for word in line.split() if re.fullmatch(r"\d+/\d+", word)}
        # 550 lists the profiles of such a GPU with room for none; 535 finds no GPU to list.
        assert all(room.startswith("0/") for room in rooms)
        assert listed.code == (0 if rooms else 6)
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

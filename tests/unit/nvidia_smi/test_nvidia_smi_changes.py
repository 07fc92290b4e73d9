"""Debian's own nvidia-smi, unmodified: what its settings and its reset change, and when they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.nvidia_smi.machine import MIB, Machine, bus_id, machine_of

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


def test_the_power_limit_of_all_gpus_is_set(h100: Machine) -> None:
    assert h100.run("-pl", "500").code == 0
    assert h100.csv("power.limit") == [["500.00"]] * 8


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

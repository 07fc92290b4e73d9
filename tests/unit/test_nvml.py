"""The real pynvml, in a process of its own, against the freshly compiled stand-in of NVIDIA's library."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
from tests.unit.standin import library_directory, python, state, with_lines

PROBE = "import dataclasses, json; from gpuready.hardware import nvml; report = nvml.probe(); "
PROBE += "print(json.dumps(report and dataclasses.asdict(report)))"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library_directory(tmp_path_factory.mktemp("library"))


@pytest.fixture
def probe(library: Path, tmp_path: Path) -> Any:
    def run(text: str | None, library: Path = library) -> Any:
        file = tmp_path / "gpus.conf"
        if text is not None:
            file.write_text(text, encoding="utf-8")
        return python(PROBE, library, file)

    return run


def test_eight_h100_as_a_real_server_shows_them(probe: Any) -> None:
    report = probe(state())

    assert report["driver_version"] == "550.163.01"
    assert report["nvml_version"] == "12.550.163.01"
    assert report["cuda_driver_version"] == [12, 4]
    assert report["problem"] is None
    assert len(report["gpus"]) == 8
    assert len({gpu["uuid"] for gpu in report["gpus"]}) == 8
    gpu = report["gpus"][0]
    uuid = gpu.pop("uuid")
    assert uuid.startswith("GPU-")
    assert len(uuid) == 40
    assert gpu == {
        "index": 0,
        "name": "NVIDIA H100 80GB HBM3",
        "pci_address": "0000:1b:00.0",
        "pci_device_id": 0x2330,
        "memory_total_bytes": 81559 * 1024**2,  # what nvidia-smi prints, in MiB
        "memory_used_bytes": 0,
        "memory_free_bytes": (81559 - 336) * 1024**2,
        "memory_reserved_bytes": 336 * 1024**2,
        "compute_capability": [9, 0],
        "mig_mode": "disabled",
        "mig_mode_pending": "disabled",
        "nvlinks_active": 18,
        "nvlink_peers": [f"0000:0{number}:00.0" for number in (5, 6, 7, 8)],  # the NVSwitches
        "processes": [],
        "problem": None,
    }


def test_eight_a100(probe: Any) -> None:
    report = probe(state("a100-80gb-sxm-x8"))

    assert {
        (gpu["name"], gpu["pci_device_id"], gpu["memory_total_bytes"], gpu["nvlinks_active"]) for gpu in report["gpus"]
    } == {("NVIDIA A100-SXM4-80GB", 0x20B2, 81920 * 1024**2, 12)}


def test_four_a100_reach_each_other_without_a_switch(probe: Any) -> None:
    gpus = probe(state("a100-40gb-sxm-x4"))["gpus"]
    addresses = {gpu["pci_address"] for gpu in gpus}

    assert [set(gpu["nvlink_peers"]) for gpu in gpus] == [addresses - {gpu["pci_address"]} for gpu in gpus]


def test_processes_are_listed_with_their_memory(probe: Any) -> None:
    ours = os.getpid()
    busy, free = probe(
        with_lines(state(), 0, f"process = {ours} 1073741824 compute - -", "process = 1 2147483648 graphics - -")
    )["gpus"][:2]

    assert busy["processes"] == [{"pid": 1, "used_bytes": 2147483648}, {"pid": ours, "used_bytes": 1073741824}]
    assert busy["memory_used_bytes"] == 3221225472
    assert busy["memory_free_bytes"] == (81559 - 336 - 3072) * 1024**2
    assert free["processes"] == []


def test_one_lost_gpu_does_not_hide_the_others(probe: Any) -> None:
    report = probe(with_lines(state(), 3, "lost = 1"))
    lost = report["gpus"].pop(3)

    assert report["problem"] is None
    assert lost["problem"] == (
        "GPU 3: handle: GPU is lost (NVML_ERROR_GPU_IS_LOST, 15),"
        " it has fallen off the bus; drain the server and reset or reboot it."
    )
    assert {key for key, value in lost.items() if value is not None} == {"index", "problem"}
    assert [gpu["memory_total_bytes"] for gpu in report["gpus"]] == [85520809984] * 7
    assert [gpu["problem"] for gpu in report["gpus"]] == [None] * 7


def test_driver_and_library_of_different_versions(probe: Any) -> None:
    report = probe(state().replace("[system]", "[system]\ninit_error = 18"))

    assert report["gpus"] == []
    assert report["driver_version"] is None
    assert report["problem"] == (
        "NVML cannot start: RM has detected an NVML/RM version mismatch (NVML_ERROR_LIB_RM_VERSION_MISMATCH, 18),"
        " the loaded kernel module and the installed library are of different driver versions; reboot the server."
    )


def test_a_library_without_a_driver_is_no_driver(probe: Any) -> None:
    assert probe(None) is None


def _real_library() -> bool:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(_real_library(), reason="this machine has NVIDIA's library")
def test_no_library_is_no_driver(probe: Any, tmp_path: Path) -> None:
    assert probe(state(), tmp_path / "nothing") is None


def test_mig_enabled_and_pending_are_told_apart(probe: Any) -> None:
    gpu = probe(state("a100-80gb-sxm-x8", mig_current="0", mig_pending="1"))["gpus"][0]

    assert (gpu["mig_mode"], gpu["mig_mode_pending"]) == ("disabled", "enabled")


def test_a_gpu_without_mig_and_nvlink_has_no_problem(probe: Any) -> None:
    lacking = ("mig_", "profile =", "nvlink =", "nvlink_")
    text = "\n".join(line for line in state().splitlines() if not line.startswith(lacking))
    gpu = probe(text)["gpus"][0]

    assert gpu["mig_mode"] == "not supported"
    assert gpu["nvlinks_active"] is None
    assert gpu["nvlink_peers"] is None
    assert gpu["problem"] is None


def test_broken_nvlinks_are_counted(probe: Any) -> None:
    assert (
        probe(with_lines(state(), 0, *(f"nvlink_down = {link}" for link in range(4))))["gpus"][0]["nvlinks_active"]
        == 14
    )


def test_an_old_driver_that_does_not_tell_reserved_memory_apart(probe: Any, tmp_path: Path) -> None:
    # R510 brought version 2 of the call; before, the symbol is missing and `used` holds what is reserved.
    old = library_directory(tmp_path / "old", "-DnvmlDeviceGetMemoryInfo_v2=notThere")
    gpu = probe(state(), old)["gpus"][0]

    assert gpu["memory_reserved_bytes"] is None
    assert gpu["memory_used_bytes"] == 336 * 1024**2
    assert gpu["memory_free_bytes"] == (81559 - 336) * 1024**2
    assert gpu["problem"] is None


def test_a_damaged_state_file_is_a_problem_and_no_crash(probe: Any) -> None:
    report = probe(state().replace("gpuready-standin 2", "gpuready-standin 3"))

    assert report["problem"].startswith("NVML cannot start: Unknown Error (NVML_ERROR_UNKNOWN, 999)")


def test_a_held_handle_sees_the_file_change(library: Path, tmp_path: Path) -> None:
    file = tmp_path / "gpus.conf"
    file.write_text(state(), encoding="utf-8")
    (tmp_path / "later.conf").write_text(state(temperature_celsius="61"), encoding="utf-8")
    shown = python(
        f"""
import json, os
from pynvml import *
nvmlInit()
gpu = nvmlDeviceGetHandleByIndex(0)
before = nvmlDeviceGetTemperature(gpu, 0)
os.replace({str(tmp_path / "later.conf")!r}, {str(file)!r})
print(json.dumps([before, nvmlDeviceGetTemperature(gpu, 0)]))
""",
        library,
        file,
    )

    assert shown == [29, 61]

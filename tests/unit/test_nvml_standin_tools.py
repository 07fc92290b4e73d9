"""pynvml, nvitop and gpustat, as they are published, on every described server: they find what its state file says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from sim.hardware import install
from sim.hardware.state_file import Section, parse
from tests.unit.nvml_asking import ask
from tests.unit.standin import library_directory, state, with_lines

PRESETS = sorted(file.stem for file in (install.HERE / "presets").glob("*.yaml"))
MIB = 1024**2

# Two GPU instances, of a middling profile and of the smallest, each with one compute instance of all its slices.
DIVIDE = """
def profiles():
    for number in range(N.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            yield N.nvmlDeviceGetGpuInstanceProfileInfo(gpu, number)
        except N.NVMLError_NotSupported:
            pass

by_slices = {}
for one in profiles():
    by_slices.setdefault(one.sliceCount, one)
sizes = sorted(by_slices)
made = []
for slices in (sizes[-2] if len(sizes) < 5 else 3, sizes[0]):
    instance = N.nvmlDeviceCreateGpuInstance(gpu, by_slices[slices].id)
    whole = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}[slices]
    N.nvmlGpuInstanceCreateComputeInstance(instance, whole)
    made.append([N.nvmlGpuInstanceGetInfo(instance).id, by_slices[slices].name.removeprefix("MIG ")])
answer(made)
"""


# Every question of pynvml that takes a handle alone, with the error of those that are not answered.
EVERYTHING = """
import inspect

def needs(function):
    parameters = inspect.signature(function).parameters.values()
    return len([one for one in parameters if one.default is one.empty])

def errors(device):
    found = {}
    for name, function in inspect.getmembers(N, inspect.isfunction):
        if name.startswith("nvmlDeviceGet") and "Handle" not in name and needs(function) == 1:
            found[name] = code(function, device)
    return found

answer([errors(N.nvmlDeviceGetHandleByIndex(index)) for index in range(N.nvmlDeviceGetCount())])
"""
# What every datacenter card answers, whatever its age.
ALWAYS = {
    "nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetSerial", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetBAR1MemoryInfo", "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetBrand", "nvmlDeviceGetPersistenceMode", "nvmlDeviceGetComputeMode", "nvmlDeviceGetPerformanceState",
    "nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetEccMode", "nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetSupportedEventTypes", "nvmlDeviceGetNumGpuCores", "nvmlDeviceGetMemoryBusWidth",
}  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library_directory(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def workers() -> Iterator[list[int]]:
    """Two processes that the tools may find by their names."""
    processes = [subprocess.Popen(["sleep", "6000"]) for _ in range(2)]
    yield [process.pid for process in processes]
    for process in processes:
        process.kill()
        process.wait()


def show(library: Path, folder: Path, *command: str) -> str:
    """Run a tool of the developers' environment, and return what it prints."""
    program = shutil.which(command[0], path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip(f"{command[0]} is not installed; ./scripts/setup --dev brings it")
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(library),
        "GPUREADY_STANDIN_STATE": str(folder / "gpus.conf"),
        "COLUMNS": "120",
        "NO_COLOR": "1",
    }
    done = subprocess.run([program, *command[1:]], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr + done.stdout
    return done.stdout


def number_of(gpu: Section, key: str) -> int:
    number = gpu.number(key)
    assert number is not None, key
    return number


@pytest.mark.parametrize("preset", PRESETS)
def test_every_question_of_pynvml_is_answered_or_not_supported(library: Path, tmp_path: Path, preset: str) -> None:
    found = ask(library, tmp_path, state(preset), EVERYTHING)

    for errors in found:
        assert set(errors.values()) == {0, pynvml.NVML_ERROR_NOT_SUPPORTED}, errors
        assert {name: errors[name] for name in ALWAYS} == dict.fromkeys(ALWAYS, 0)
        assert len(errors) > 80


@pytest.mark.parametrize("preset", PRESETS)
def test_nvitop_and_gpustat_show_every_gpu_and_a_process(
    library: Path, tmp_path: Path, workers: list[int], preset: str
) -> None:
    text = state(preset)
    last = len(parse(text).gpus) - 1
    text = with_lines(text, last, f"process = {workers[0]} {1024 * MIB} compute - -")
    (tmp_path / "gpus.conf").write_text(text, encoding="utf-8")
    nvitop, gpustat = show(library, tmp_path, "nvitop", "-1", "--no-unicode"), show(library, tmp_path, "gpustat")

    for index, gpu in enumerate(parse(text).gpus):
        used = number_of(gpu, "memory_used_bytes") // MIB + (1024 if index == last else 0)
        address = f"0000{str(gpu.get('pci_address')).upper()}"
        watts = round(number_of(gpu, "power_milliwatts") / 1000), round(number_of(gpu, "power_limit_milliwatts") / 1000)
        temperature, total = number_of(gpu, "temperature_celsius"), number_of(gpu, "memory_total_bytes") // MIB
        assert re.search(rf"\|\s+{index} .*\| {address} Off \|", nvitop), nvitop
        assert re.search(rf"\| N/A +{temperature}C +P\d +{watts[0]}W / {watts[1]}W \|", nvitop), nvitop
        assert re.search(
            rf"\[{index}\] {gpu.get('name')} +\| +{temperature}°C, +0 % \| +{used} / +{total} MB \|", gpustat
        ), gpustat
    assert re.search(rf"\|\s+{last} +{workers[0]} C +\S+ +1024MiB .* sleep 6000", nvitop), nvitop
    assert re.search(rf"\[{last}\] .*\(1024M\)", gpustat), gpustat


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if "\nprofile = " in state(preset)])
def test_nvitop_and_gpustat_show_mig_devices_and_their_processes(
    library: Path, tmp_path: Path, workers: list[int], preset: str
) -> None:
    whole = state(preset).replace("[system]\n", "[system]\nroot_only = 0\n")
    made = ask(library, tmp_path, with_lines(whole, 0, "mig_current = 1", "mig_pending = 1"), DIVIDE)
    text = (tmp_path / "gpus.conf").read_text(encoding="utf-8")
    lines = [
        f"process = {workers[number]} {(number + 1) * 1024 * MIB} compute {made[number][0]} 0" for number in (0, 1)
    ]
    (tmp_path / "gpus.conf").write_text(with_lines(text, 0, *lines), encoding="utf-8")
    nvitop, gpustat = show(library, tmp_path, "nvitop", "-1", "--no-unicode"), show(library, tmp_path, "gpustat")

    # Devices are counted by the id of their instance, which is not the order in which they were made.
    for device, (instance, name) in enumerate(sorted(made)):
        number = made.index([instance, name])
        used = (number + 1) * 1024
        assert re.search(rf"\| 0:{device} +{re.escape(name)} @ GI/CI: *{instance}/0 \| +{used}MiB / ", nvitop), nvitop
        assert re.search(rf"\| 0:{device} +{workers[number]} C +\S+ +{used}MiB .* sleep 6000", nvitop), nvitop
    assert re.search(r"\[0\] .*°C, +\?\? % \| +3072 / ", gpustat), gpustat
    assert re.search(r"\[0\] .*\(1024M\).*\(2048M\)|\[0\] .*\(2048M\).*\(1024M\)", gpustat), gpustat

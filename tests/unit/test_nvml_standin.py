"""The stand-in of NVIDIA's library under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import ctypes
import os
import random
import re
import subprocess
from pathlib import Path

import pynvml
import pytest
from sim.hardware import install
from tests.unit.standin import library_directory, python, state

CALLS = Path(__file__).with_name("nvml_standin_calls.c")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("sanitized") / "calls"
    flags = [flag for flag in install.FLAGS if flag not in ("-shared", "-O2") and not flag.startswith("-Wl,")]
    sources = [str(source) for source in sorted(install.SOURCES.glob("*.c"))]
    subprocess.run([install.COMPILER, *flags, *SANITIZERS, "-o", str(program), str(CALLS), *sources], check=True)
    return program


def run(program: Path, *arguments: str, state_file: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GPUREADY_STANDIN_STATE": str(state_file)}
    done = subprocess.run([str(program), *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


# Which error is whose: NVIDIA's NVML API Reference Guide, device queries.
EXPECTED = {
    "before-init-count": pynvml.NVML_ERROR_UNINITIALIZED,
    "before-init-driver": pynvml.NVML_ERROR_UNINITIALIZED,
    "before-init-handle": pynvml.NVML_ERROR_UNINITIALIZED,
    "before-init-name": pynvml.NVML_ERROR_UNINITIALIZED,
    "before-init-shutdown": pynvml.NVML_ERROR_UNINITIALIZED,
    "before-init-cuda": pynvml.NVML_SUCCESS,
    "before-init-nvml": pynvml.NVML_SUCCESS,
    "init": pynvml.NVML_SUCCESS,
    "init-again": pynvml.NVML_SUCCESS,
    "shutdown-once": pynvml.NVML_SUCCESS,
    "count": pynvml.NVML_SUCCESS,
    "count-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "cuda-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "index-beyond": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "index-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "uuid-unknown": pynvml.NVML_ERROR_NOT_FOUND,
    "uuid-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "serial-unknown": pynvml.NVML_ERROR_NOT_FOUND,
    "pci-unknown": pynvml.NVML_ERROR_NOT_FOUND,
    "pci-nonsense": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "pci-too-long": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "pci-overflow": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "pci-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "index-lost": pynvml.NVML_ERROR_GPU_IS_LOST,
    "index": pynvml.NVML_SUCCESS,
    "handle-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "handle-nonsense": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "handle-inside": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "name-small": pynvml.NVML_ERROR_INSUFFICIENT_SIZE,
    "name-one-short": pynvml.NVML_ERROR_INSUFFICIENT_SIZE,
    "name-exact": pynvml.NVML_SUCCESS,
    "name-zero": pynvml.NVML_ERROR_INSUFFICIENT_SIZE,
    "name-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "uuid-small": pynvml.NVML_ERROR_INSUFFICIENT_SIZE,
    "driver-small": pynvml.NVML_ERROR_INSUFFICIENT_SIZE,
    "pci": pynvml.NVML_SUCCESS,
    "pci-out-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "capability-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "memory": pynvml.NVML_SUCCESS,
    "memory-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "memory2": pynvml.NVML_SUCCESS,
    "memory2-version": pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    "memory2-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "mig-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "load": pynvml.NVML_SUCCESS,
    "temperature-sensor": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "temperature2": pynvml.NVML_SUCCESS,
    "temperature2-version": pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    "link-17": pynvml.NVML_SUCCESS,
    "link-18": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "link-overflow": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "processes-ask": pynvml.NVML_ERROR_INSUFFICIENT_SIZE,
    "processes-there": 3,
    "processes-one-short": pynvml.NVML_ERROR_INSUFFICIENT_SIZE,
    "processes": pynvml.NVML_SUCCESS,
    "processes-first-pid": 4711,
    "processes-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "shutdown": pynvml.NVML_SUCCESS,
    "after-shutdown": pynvml.NVML_ERROR_UNINITIALIZED,
}


def test_every_wrong_call_gets_nvml_s_error_and_writes_nowhere_else(sanitized: Path, tmp_path: Path) -> None:
    processes = "\nprocess = 4711 1048576\nprocess = 4712 1048576\nprocess = 4713 1048576"
    file = tmp_path / "gpus.conf"
    text = state().replace("\n\n[gpu 1]", f"{processes}\n\n[gpu 1]").replace("\n\n[gpu 2]", "\nlost = 1\n\n[gpu 2]")
    file.write_text(text, encoding="utf-8")
    lines = run(sanitized, "errors", state_file=file).stdout.splitlines()

    assert {what: int(code) for what, code in (line.split() for line in lines)} == EXPECTED


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("gpuready-standin 1", "gpuready-standin 2"), "line 1: not `gpuready-standin 1`"),
        (("minor = 0", "minor = zero"), "line 13: minor = zero is not a number"),
        (("minor = 0", "minor = 18446744073709551616"), "line 13: minor = 18446744073709551616 is not a number"),
        (("minor = 0", "minor 0"), "line 13: neither a section nor `key = value`"),
        (("minor = 0", "major = 0"), "line 13: unknown key major"),
        (("minor = 0", f"serial = {'1' * 30}"), "line 13: serial is longer than 29 characters"),
        (("minor = 0", "process = 4711"), "line 13: a process is `process = PID BYTES`"),
        (("minor = 0", "process = 4711 85520809984"), "gpu 0: its processes use more memory than there is"),
        (("minor = 0", "memory_used_bytes = 85520809984"), "gpu 0: more memory is reserved and used than there is"),
        (("pci_address = 0000:1b:00.0", "pci_address = 1b"), "gpu 0: pci_address = 1b is no PCI address"),
        (("nvlink_links = 18", "nvlink_links = 37"), "gpu 0: nvlink_links is at most 36"),
        (("[gpu 1]", "[gpu 2]"), "line 37: the next GPU is [gpu 1]"),
        (("driver_version = 550.163.01\n", ""), "[system] needs driver_version, nvml_version and cuda_driver_version"),
        (("name = NVIDIA H100 80GB HBM3\n", ""), "gpu 0: name, uuid, pci_device_id and memory_total_bytes are needed"),
    ],
)
def test_a_damaged_state_file_is_refused_in_one_sentence(
    sanitized: Path, tmp_path: Path, change: tuple[str, str], sentence: str
) -> None:
    file = tmp_path / "gpus.conf"
    assert change[0] in state()
    file.write_text(state().replace(*change, 1), encoding="utf-8")
    done = run(sanitized, "files", str(file))

    assert done.stdout.split() == [str(pynvml.NVML_ERROR_UNKNOWN)]
    assert done.stderr == f"libnvidia-ml-standin: {file}: {sentence}.\n"


def test_no_state_file_is_a_driver_that_is_not_loaded(sanitized: Path, tmp_path: Path) -> None:
    done = run(sanitized, "files", str(tmp_path / "none"))

    assert (done.stdout.split(), done.stderr) == ([str(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)], "")


def test_no_state_file_makes_the_caller_crash(sanitized: Path, tmp_path: Path) -> None:
    """The sanitizers end the program at the first bad access, so a return code of 0 is the proof."""
    good = state().encode()
    dice = random.Random(20261130)  # noqa: S311 - repeatable, not secret
    contents = [b"", b"\0" * 4096, b"gpuready-standin 1\n" * 100_000, b"gpuready-standin 1", good * 2]
    contents += [good[: dice.randrange(len(good))] for _ in range(60)]
    for _ in range(200):
        damaged = bytearray(good)
        for _ in range(dice.randint(1, 6)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        contents.append(bytes(damaged))
    contents.append(good)
    files = []
    for number, content in enumerate(contents):
        files.append(tmp_path / f"{number}.conf")
        files[-1].write_bytes(content)
    done = run(sanitized, "files", *map(str, files))
    codes = [int(code) for code in done.stdout.split()]

    assert len(codes) == len(files)
    assert set(codes) == {pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_UNKNOWN}
    assert done.stderr.isascii()
    assert done.stderr.count("\n") == codes.count(pynvml.NVML_ERROR_UNKNOWN)
    assert codes[-1] == pynvml.NVML_SUCCESS  # a good file is good again after all the bad ones


def test_a_real_program_finds_the_sanitized_library_clean(tmp_path: Path) -> None:
    """pynvml itself, over the library with the sanitizers; libasan has to be there before Python's own memory."""
    library = library_directory(tmp_path / "library", *SANITIZERS)
    asan = subprocess.run(
        [install.COMPILER, "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    file = tmp_path / "gpus.conf"
    file.write_text(state(), encoding="utf-8")
    code = f"""
import json, os, subprocess, sys
if "LD_PRELOAD" not in os.environ:
    os.environ.update(LD_PRELOAD={asan!r}, ASAN_OPTIONS="detect_leaks=0")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
from gpuready.hardware import nvml
report = nvml.probe()
print(json.dumps([len(report.gpus), report.problem, [gpu.problem for gpu in report.gpus]]))
"""
    assert python(code, library, file) == [8, None, [None] * 8]


def test_structs_are_as_large_as_pynvml_s() -> None:
    source = (install.SOURCES / "nvml_standin.c").read_text(encoding="utf-8")
    asserted = dict(re.findall(r"_Static_assert\(sizeof\((\w+)\) == (\d+)", source))
    theirs = {
        "nvmlPciInfo_t": pynvml.nvmlPciInfo_t,
        "nvmlMemory_t": pynvml.c_nvmlMemory_t,
        "nvmlMemory_v2_t": pynvml.c_nvmlMemory_v2_t,
        "nvmlProcessInfo_t": pynvml.c_nvmlProcessInfo_v3_t,
        "nvmlTemperature_t": pynvml.c_nvmlTemperature_v1_t,
        "nvmlUtilization_t": pynvml.c_nvmlUtilization_t,
    }

    assert {name: int(size) for name, size in asserted.items()} == {
        name: ctypes.sizeof(struct) for name, struct in theirs.items()
    }


def test_only_nvml_functions_are_exported(tmp_path: Path) -> None:
    library = library_directory(tmp_path) / "libnvidia-ml.so.1"
    shown = subprocess.run(["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True)
    exported = {line.split()[2] for line in shown.stdout.splitlines()}
    called = set(re.findall(r'"(nvml\w+)"', Path(pynvml.__file__).read_text(encoding="utf-8")))

    # The unversioned names are what programs of before the versions, and C programs, ask for.
    unversioned = {"nvmlInit", "nvmlInit_v2", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"}
    unversioned |= {"nvmlDeviceGetHandleByPciBusId"}
    assert exported - called == unversioned

"""The stand-in of NVIDIA's library under the address and undefined-behaviour sanitizers, and what it exports."""

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
from tests.unit.nvml_asking import DIVIDED, alive
from tests.unit.standin import library_directory, python, state, with_lines

CALLS = Path(__file__).with_name("nvml_standin_calls.c")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
PRESETS = sorted(file.stem for file in (install.HERE / "presets").glob("*.yaml"))


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("sanitized") / "calls"
    sources = [str(source) for source in sorted(install.SOURCES.glob("*.c"))]
    # The caller finds functions by their names, as a program that loads the library does.
    flags = [*install.PROGRAM_FLAGS, *SANITIZERS, "-rdynamic", "-pthread", "-Wno-strict-prototypes"]
    subprocess.run([install.COMPILER, *flags, "-o", str(program), str(CALLS), *sources, "-ldl"], check=True)
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
    "index": pynvml.NVML_SUCCESS,
    "index-beyond": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "index-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "index-lost": pynvml.NVML_ERROR_GPU_IS_LOST,
    "uuid-unknown": pynvml.NVML_ERROR_NOT_FOUND,
    "uuid-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "serial-unknown": pynvml.NVML_ERROR_NOT_FOUND,
    "pci-unknown": pynvml.NVML_ERROR_NOT_FOUND,
    "pci-nonsense": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "pci-too-long": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "pci-overflow": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "pci-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "handle-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "handle-nonsense": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "handle-inside": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "handle-wild": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "handle-set": pynvml.NVML_ERROR_INVALID_ARGUMENT if os.geteuid() == 0 else pynvml.NVML_ERROR_NO_PERMISSION,
    "mig-beyond": pynvml.NVML_ERROR_NOT_FOUND,
    "mig-none": pynvml.NVML_ERROR_NOT_FOUND,
    "link-beyond": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "count-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "cuda-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
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
    "mig-null": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "shutdown": pynvml.NVML_SUCCESS,
    "after-shutdown": pynvml.NVML_ERROR_UNINITIALIZED,
}


def test_every_wrong_call_gets_nvml_s_error_and_writes_nowhere_else(sanitized: Path, tmp_path: Path) -> None:
    file = tmp_path / "gpus.conf"
    file.write_text(with_lines(state(), 1, "lost = 1"), encoding="utf-8")
    lines = run(sanitized, "errors", state_file=file).stdout.splitlines()

    assert {what: int(code) for what, code in (line.split() for line in lines)} == EXPECTED


def everything_at_once() -> str:
    """Return hardware with all that a state file can hold."""
    text = with_lines(
        state(), 0, *DIVIDED, f"process = {alive()} 1048576 compute 2 0", "process = 1 1048576 mps 3 1 60 1"
    )
    text = with_lines(text, 1, f"process = {alive()} 1048576 graphics - -", "nvlink_down = 3", "fan_percent = 30")
    text = with_lines(
        text, 2, "retired_single_bit = 3", "retired_double_bit = 1", "remapper_banks = 640", "pcie_peer_to_peer = 1"
    )
    text = with_lines(text, 3, "lost = 1")
    return text + "\n[fault thermal 5]\nuntil = clear\nthrottle_reasons = 0x48\nclock_sm = 300\n"


@pytest.mark.parametrize("preset", [*PRESETS, "everything"])
def test_all_of_it_is_read_clean(sanitized: Path, tmp_path: Path, preset: str) -> None:
    file = tmp_path / "gpus.conf"
    file.write_text(everything_at_once() if preset == "everything" else state(preset), encoding="utf-8")
    done = run(sanitized, "files", str(file))

    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="one thread changes the state, as root may")
def test_threads_and_children_see_whole_hardware_while_it_changes(sanitized: Path, tmp_path: Path) -> None:
    file = tmp_path / "gpus.conf"
    file.write_text(state(), encoding="utf-8")
    done = run(sanitized, "threads", state_file=file)

    assert (done.stdout, done.stderr) == ("0\n", "")


# ---- damaged files ----


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("gpuready-standin 2", "gpuready-standin 1"), "line 1: not `gpuready-standin 2`"),
        (
            ("[system]", "[system]\nserial = -"),
            "[system] serial, events_made, init_error and root_only are numbers, never -",
        ),
        (("minor = 0", "minor = zero"), "line {}: minor = zero is not a number"),
        (("minor = 0", "minor = 18446744073709551616"), "line {}: minor = 18446744073709551616 is not a number"),
        (("minor = 0", "minor = 18446744073709551615"), "line {}: minor = 18446744073709551615 is not a number"),
        (("minor = 0", "minor 0"), "line {}: neither a section nor `key = value`"),
        (("minor = 0", "major = 0"), "line {}: unknown key major"),
        (("minor = 0", f"serial = {'1' * 30}"), "line {}: serial is longer than 29 characters"),
        (
            ("minor = 0", "process = 4711"),
            "line {}: a process is `process = PID BYTES compute|graphics|mps GI CI [BYTES_PER_MINUTE SINCE]`",
        ),
        (
            ("[system]", "[system]\nevent = 1 0 8 79 - - 1099511627776"),
            "line 5: an event is `event = NUMBER GPU TYPE DATA GI CI TIME`, 64 at most",
        ),
        (("minor = 0", "process = 1 85520809984 compute - -"), "gpu 0: its processes use more memory than there is"),
        (
            ("memory_used_bytes = 0", "memory_used_bytes = 85520809984"),
            "gpu 0: more memory is reserved and used than there is",
        ),
        (("pci_address = 0000:1b:00.0", "pci_address = 1b"), "gpu 0: pci_address = 1b is no PCI address"),
        (("nvlink = 0 switch", "nvlink = 0 planet"), "line {}: the next link is `nvlink = 0 gpu|switch PCI_ADDRESS`"),
        (("[gpu 1]", "[gpu 2]"), "line {}: the next GPU is [gpu 1], before all faults"),
        (("driver_version = 550.163.01\n", ""), "[system] needs driver_version, nvml_version and cuda_driver_version"),
        (("name = NVIDIA H100 80GB HBM3\n", ""), "gpu 0: name, uuid, pci_device_id and memory_total_bytes are needed"),
    ],
)
def test_a_damaged_state_file_is_refused_in_one_sentence(
    sanitized: Path, tmp_path: Path, change: tuple[str, str], sentence: str
) -> None:
    file = tmp_path / "gpus.conf"
    assert change[0] in state()
    line = state()[: state().index(change[0])].count("\n") + 1
    file.write_text(state().replace(*change, 1), encoding="utf-8")
    done = run(sanitized, "files", str(file))

    assert done.stdout.split() == [str(pynvml.NVML_ERROR_UNKNOWN)]
    assert done.stderr == f"libnvidia-ml-standin: {file}: {sentence.format(line)}.\n"


@pytest.mark.parametrize(("line", "lacks"), [("uuid = +1", "counts"), ("throttle_reasons = |z", "has bits")])
def test_what_no_fault_can_join_is_refused(sanitized: Path, tmp_path: Path, line: str, lacks: str) -> None:
    file = tmp_path / "gpus.conf"
    file.write_text(f"{state()}\n[fault odd 5]\nuntil = clear\n{line}\n", encoding="utf-8")
    done = run(sanitized, "files", str(file))

    assert done.stdout.split() == [str(pynvml.NVML_ERROR_UNKNOWN)]
    assert done.stderr == f"libnvidia-ml-standin: {file}: fault odd: {line} is not a number that {lacks}.\n"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "line 1: not `gpuready-standin 2`"),
        (b"gpuready-standin 2\n\0", "holds a NUL byte"),
        (b"gpuready-standin 2\n" + b"# so large\n" * 200_000, "is larger than 1 MiB"),
        (b"gpuready-standin 2\n\xff\x1b[2J = 1\n", "line 2: not printable ASCII"),
        ("gpuready-standin 2\n[system]\ndriver_version = 5\u00e9".encode(), "line 3: not printable ASCII"),
        (b"gpuready-standin 2\n[system]\r[gpu 0]\n", "line 2: not printable ASCII"),
    ],
    ids=["empty", "nul", "2-MiB", "escape", "umlaut", "return"],
)
def test_what_is_no_state_file_is_refused_in_one_sentence(
    sanitized: Path, tmp_path: Path, content: bytes, sentence: str
) -> None:
    file = tmp_path / "gpus.conf"
    file.write_bytes(content)
    done = run(sanitized, "files", str(file))

    assert done.stdout.split() == [str(pynvml.NVML_ERROR_UNKNOWN)]
    assert done.stderr == f"libnvidia-ml-standin: {file}: {sentence}.\n"


def test_no_state_file_is_a_driver_that_is_not_loaded(sanitized: Path, tmp_path: Path) -> None:
    done = run(sanitized, "files", str(tmp_path / "none"))

    assert (done.stdout.split(), done.stderr) == ([str(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)], "")


def damaged_contents() -> list[bytes]:
    """Return what a crash, a bad disk or an editor may leave: cut short, with other bytes, twice."""
    good = everything_at_once().encode()
    dice = random.Random(20261130)  # noqa: S311 - repeatable, not secret
    contents = [good[:length] for length in range(0, len(good), 97)]
    for _ in range(200):
        damaged = bytearray(good)
        for _ in range(dice.randint(1, 6)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        contents.append(bytes(damaged))
    return [*contents, good * 2, b"\0" * 4096, dice.randbytes(4096), good]


def test_no_state_file_makes_the_caller_crash(sanitized: Path, tmp_path: Path) -> None:
    """The sanitizers end the program at the first bad access, so a return code of 0 is the proof."""
    files = []
    for number, content in enumerate(damaged_contents()):
        files.append(tmp_path / f"{number}.conf")
        files[-1].write_bytes(content)
    done = run(sanitized, "files", *map(str, files))
    codes = [int(code) for code in done.stdout.split()]

    assert len(codes) == len(files)
    assert set(codes) == {pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_UNKNOWN}
    assert done.stderr.isascii()
    assert done.stderr.count("\n") == codes.count(pynvml.NVML_ERROR_UNKNOWN)
    assert codes[-1] == pynvml.NVML_SUCCESS  # a good file is good again after all the bad ones


def test_a_file_that_is_damaged_under_a_running_program_is_told_of_once(tmp_path: Path) -> None:
    library = library_directory(tmp_path / "library")
    file = tmp_path / "gpus.conf"
    file.write_text(state(), encoding="utf-8")
    code = f"""
import os, pynvml as N, json
N.nvmlInit()
gpu = N.nvmlDeviceGetHandleByIndex(0)
def put(text):
    with open({str(file)!r} + ".new", "w") as new:
        new.write(text)
    os.replace(new.name, {str(file)!r})
def ask():
    try:
        return N.nvmlDeviceGetTemperature(gpu, 0)
    except N.NVMLError as error:
        return error.value
said = os.dup(2)
told = os.open({str(tmp_path / "told")!r}, os.O_CREAT | os.O_WRONLY)
os.dup2(told, 2)
before = ask()
put("nonsense")
answers = [ask(), ask()]
put({state(temperature_celsius="61")!r})
print(json.dumps([before, *answers, ask()]))
"""
    unknown = pynvml.NVML_ERROR_UNKNOWN

    assert python(code, library, file) == [29, unknown, unknown, 61]
    assert (tmp_path / "told").read_text() == f"libnvidia-ml-standin: {file}: line 1: not `gpuready-standin 2`.\n"


# ---- what a program finds ----


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


# Our names of structs that pynvml calls otherwise.
THEIRS = {
    "nvmlEventData_t": "c_nvmlEventData_t",
    "nvmlPciInfo_t": "nvmlPciInfo_t",
    "nvmlPciInfo_v2_t": "nvmlPciInfo_v2_t",
    "nvmlPciInfoExt_v1_t": "nvmlPciInfoExt_v1_t",
    "nvmlPlacement_t": "c_nvmlGpuInstancePlacement_t",
    "nvmlTemperature_t": "c_nvmlTemperature_v1_t",
    "nvmlMarginTemperature_t": "c_nvmlMarginTemperature_v1_t",
    "nvmlRowRemapperHistogramValues_t": "c_nvmlRowRemapperHistogramValues",
    "nvmlDeviceAttributes_t": "c_nvmlDeviceAttributes",
    "nvmlEccSramErrorStatus_t": "c_nvmlEccSramErrorStatus_v1_t",
}


def test_structs_are_as_large_as_pynvml_s() -> None:
    source = "".join(file.read_text(encoding="utf-8") for file in install.SOURCES.glob("*.[ch]"))
    asserted = dict(re.findall(r"_Static_assert\(sizeof\((nvml\w+)\) == (\d+), \"as in pynvml\"", source))
    theirs = {name: getattr(pynvml, THEIRS.get(name, f"c_{name}")) for name in asserted}

    assert len(asserted) > 20
    assert {name: int(size) for name, size in asserted.items()} == {
        name: ctypes.sizeof(struct) for name, struct in theirs.items()
    }


# Beside what pynvml calls: the names without a version, for which C programs and older ones ask, and nvidia-smi's own.
BESIDE = {
    "nvmlInit",
    "nvmlInit_v2",
    "nvmlInternalGetExportTable",
    "nvmlEventSetWait",
    "nvmlComputeInstanceGetInfo",
    "nvmlDeviceGetAttributes",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetGpuInstancePossiblePlacements",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetHandleByPciBusId",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetNvLinkRemotePciInfo",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetPciInfo_v2",
}


def test_all_that_pynvml_calls_is_there_and_only_nvml_is(tmp_path: Path) -> None:
    library = library_directory(tmp_path / "library") / "libnvidia-ml.so.1"
    shown = subprocess.run(["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True)
    exported = {line.split()[2] for line in shown.stdout.splitlines()}
    text = Path(pynvml.__file__).read_text(encoding="utf-8")
    called = set(re.findall(r'_nvmlGetFunctionPointer\(\s*"(nvml\w+)"', text))

    assert called - exported == set()
    assert exported - called == BESIDE


def test_what_is_not_simulated_says_so_and_before_the_start_that_it_has_not_started(tmp_path: Path) -> None:
    library = library_directory(tmp_path / "library")
    file = tmp_path / "gpus.conf"
    file.write_text(state(), encoding="utf-8")
    source = (install.SOURCES / "stubs_standin.c").read_text(encoding="utf-8")
    stubs = re.findall(r"STUB\((nvml\w+)\)", source)
    code = f"""
import json, ctypes, pynvml as N
stubs = {stubs!r}
library = ctypes.CDLL("libnvidia-ml.so.1")
before = {{getattr(library, name)() for name in stubs}}
N.nvmlInit()
print(json.dumps([len(stubs), sorted(before), sorted({{getattr(library, name)() for name in stubs}})]))
"""
    count, before, after = python(code, library, file)

    assert count > 200
    assert (before, after) == ([pynvml.NVML_ERROR_UNINITIALIZED], [pynvml.NVML_ERROR_NOT_SUPPORTED])

"""Memory and the processes that use it, in the stand-in library."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from tests.unit.nvml_asking import DIVIDED, alive, ask
from tests.unit.standin import library_directory, state, with_lines

Ask = Callable[[str, str], Any]
MIB = 1024**2
TOTAL, RESERVED = 81559 * MIB, 336 * MIB
NOWHERE = 0xFFFFFFFF  # no instance

MEMORY = """
def memory(device):
    new, old = N.nvmlDeviceGetMemoryInfo(device, version=N.nvmlMemory_v2), N.nvmlDeviceGetMemoryInfo(device)
    return [int(number) for number in (new.total, new.reserved, new.used, new.free, old.total, old.used, old.free)]
def processes(device, kind="Compute"):
    found = getattr(N, f"nvmlDeviceGet{kind}RunningProcesses")(device)
    return [[one.pid, one.usedGpuMemory, one.gpuInstanceId, one.computeInstanceId] for one in found]
"""


@pytest.fixture
def asked(tmp_path: Path) -> Ask:
    library = library_directory(tmp_path / "library")
    return lambda text, code: ask(library, tmp_path, text, MEMORY + code)


def test_version_1_folds_what_is_reserved_into_what_is_used(asked: Ask) -> None:
    used = 5 * MIB
    assert asked(with_lines(state(), 0, f"memory_used_bytes = {used}"), "answer(memory(gpu))") == [
        TOTAL, RESERVED, used, TOTAL - RESERVED - used, TOTAL, RESERVED + used, TOTAL - RESERVED - used,
    ]  # fmt: skip


def test_an_unknown_version_writes_nothing(asked: Ask) -> None:
    code = """
memory = N.c_nvmlMemory_v2_t(0x3000028, 7, 7, 7, 7)
answer([raw("nvmlDeviceGetMemoryInfo_v2", gpu, ctypes.byref(memory)), int(memory.total),
        raw("nvmlDeviceGetMemoryInfo_v2", gpu, None)])
"""
    assert asked(state(), code) == [pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH, 7, pynvml.NVML_ERROR_INVALID_ARGUMENT]


def test_each_kind_of_process_has_its_list_and_all_use_memory(asked: Ask) -> None:
    kinds = {"Compute": 3, "Graphics": 2, "MPSCompute": 1}
    names = {"Compute": "compute", "Graphics": "graphics", "MPSCompute": "mps"}
    lines = [f"process = {alive()} {size * MIB} {names[kind]} - -" for kind, size in kinds.items()]
    code = f"answer([[processes(gpu, kind) for kind in {list(kinds)!r}], memory(gpu)[2]])"
    lists, used = asked(with_lines(state(), 0, *lines), code)

    assert lists == [[[alive(), size * MIB, NOWHERE, NOWHERE]] for size in kinds.values()]
    assert used == 6 * MIB


def test_a_process_that_has_ended_is_not_there(asked: Ask) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    lines = [f"process = {alive()} {MIB} compute - -", f"process = {ended.pid} {MIB} compute - -"]

    assert asked(with_lines(state(), 0, *lines), "answer([[one[0] for one in processes(gpu)], memory(gpu)[2]])") == [
        [alive()],
        MIB,
    ]


def test_a_list_is_asked_for_in_two_steps(asked: Ask) -> None:
    lines = [f"process = {alive()} {MIB} compute - -", f"process = 1 {2 * MIB} compute - -"]
    code = """
def listing(name, room, struct, count=None):
    count = ctypes.c_uint(room)
    place = (struct * room)() if room else None
    result = raw(name, gpu, ctypes.byref(count), place)
    return [result, count.value, [one.pid for one in place or []]]
class Old(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("usedGpuMemory", ctypes.c_ulonglong)]
v3, v1 = "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses"
answer([listing(v3, 0, N.c_nvmlProcessInfo_v3_t), listing(v3, 1, N.c_nvmlProcessInfo_v3_t), listing(v3, 3,
        N.c_nvmlProcessInfo_v3_t),
        listing(v1, 2, Old), listing("nvmlDeviceGetGraphicsRunningProcesses_v2", 0, Old),
        [raw(v3, gpu, ctypes.byref(ctypes.c_uint(2)), None), raw(v3, gpu, None, None)]])
"""
    small, invalid = pynvml.NVML_ERROR_INSUFFICIENT_SIZE, pynvml.NVML_ERROR_INVALID_ARGUMENT

    assert asked(with_lines(state(), 0, *lines), code) == [
        [small, 2, []],
        [small, 2, [0]],
        [0, 2, [alive(), 1, 0]],
        [0, 2, [alive(), 1]],
        [0, 0, []],
        [invalid, invalid],
    ]


def test_the_detailed_list_takes_kind_and_version(asked: Ask) -> None:
    code = """
def detailed(version, mode):
    try:
        return [[one.pid, one.usedGpuMemory] for one in N.nvmlDeviceGetRunningProcessDetailList(gpu, version, mode)]
    except N.NVMLError as error:
        return error.value
answer([detailed(N.nvmlProcessDetailList_v1, mode) for mode in range(4)] + [detailed(0x2000018, 0)])
"""
    text = with_lines(state(), 0, f"process = {alive()} {MIB} compute - -")

    assert asked(text, code) == [
        [[alive(), MIB]],
        [],
        [],
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    ]


def test_a_growing_process_takes_what_is_free_and_no_more(asked: Ask) -> None:
    hour_ago = int(time.time()) - 3600
    steady = 10 * MIB
    slow = f"process = {alive()} {MIB} compute - - {60 * MIB} {hour_ago}"  # 1 MiB a second
    greedy = f"process = {alive()} {MIB} compute - - {2**49} {hour_ago}"
    grown = asked(with_lines(state(), 0, slow), "answer([processes(gpu)[0][1], memory(gpu)[2]])")
    full = asked(
        with_lines(state(), 0, f"process = {alive()} {steady} compute - -", greedy, greedy),
        "answer([[one[1] for one in processes(gpu)], memory(gpu)[2:4]])",
    )

    assert grown[0] == grown[1]
    assert 3601 * MIB <= grown[0] <= 3721 * MIB  # and as long as the test took
    assert full == [[steady, TOTAL - RESERVED - steady - MIB, MIB], [TOTAL - RESERVED, 0]]


# ---- MIG ----


def test_a_mig_device_has_the_memory_of_its_instance_and_what_its_processes_use(asked: Ask) -> None:
    lines = [f"process = {alive()} {100 * MIB} compute 2 0", f"process = 1 {7 * MIB} compute 3 1"]
    code = """
answer([memory(mig(0)), memory(mig(1)), memory(mig(2)), memory(gpu)[2],
        [processes(mig(index)) for index in range(3)], processes(gpu)])
"""
    large, small = 40448 * MIB, 20096 * MIB
    first, second = [alive(), 100 * MIB, 2, 0], [1, 7 * MIB, 3, 1]

    assert asked(with_lines(state(), 0, *DIVIDED, *lines), code) == [
        [large, 0, 100 * MIB, large - 100 * MIB, large, 100 * MIB, large - 100 * MIB],
        [small, 0, 7 * MIB, small - 7 * MIB, small, 7 * MIB, small - 7 * MIB],  # both share their GPU instance
        [small, 0, 7 * MIB, small - 7 * MIB, small, 7 * MIB, small - 7 * MIB],
        107 * MIB,
        [[first], [], [second]],
        [first, second],
    ]


def test_a_process_in_an_instance_does_not_grow_beyond_it(asked: Ask) -> None:
    greedy = f"process = {alive()} {MIB} compute 3 0 {2**49} {int(time.time()) - 3600}"

    assert asked(with_lines(state(), 0, *DIVIDED, greedy), "answer([memory(mig(1))[2:4], memory(mig(0))[2]])") == [
        [20096 * MIB, 0],
        0,
    ]


def test_bar1_is_divided_as_the_slots_are(asked: Ask) -> None:
    code = """
def bar1(device):
    info = N.nvmlDeviceGetBAR1MemoryInfo(device)
    return [int(info.bar1Total), int(info.bar1Used), int(info.bar1Free)]
answer([bar1(gpu), bar1(mig(0)), bar1(mig(1))])
"""
    whole, half, quarter = 131072 * MIB, 65535 * MIB, 32767 * MIB  # as nvidia-smi shows 3g and 2g of an 80 GB card

    assert asked(with_lines(state(), 0, *DIVIDED), code) == [
        [whole, MIB, whole - MIB],
        [half, 0, half],
        [quarter, 0, quarter],
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_who_is_not_root_sees_the_processes_of_mig_devices_alone(tmp_path: Path) -> None:
    library = library_directory(tmp_path / "library")
    text = with_lines(state(), 0, *DIVIDED, f"process = 1 {MIB} compute 2 0")
    code = "os.setuid(65534)\nanswer([code(N.nvmlDeviceGetComputeRunningProcesses, gpu), len(processes(mig(0)))])"
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to others
        place = Path(folder)
        place.chmod(0o755)

        assert ask(library, place, text, MEMORY + code) == [pynvml.NVML_ERROR_NO_PERMISSION, 1]

"""Which devices there are and what they are, in the stand-in library."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from tests.unit.nvml_asking import DIVIDED, ask
from tests.unit.standin import library_directory, state, with_lines

Ask = Callable[[str, str], Any]


@pytest.fixture
def asked(tmp_path: Path) -> Ask:
    library = library_directory(tmp_path / "library")
    return lambda text, code: ask(library, tmp_path, text, code)


# ---- the library ----


def test_error_strings_are_pynvml_s_where_it_has_them(asked: Ask) -> None:
    theirs = dict(pynvml.NVMLError._errcode_to_string)
    ours = asked(state(), "answer([N.nvmlErrorString(number) for number in [*range(32), 999, -1]])")

    assert {number: ours[number] for number in theirs if number < 31} == {
        number: text for number, text in theirs.items() if number < 31
    }
    assert ours[pynvml.NVML_ERROR_IN_USE] == "In use by another client"  # as nvidia-smi says it
    assert ours[pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES] == "Insufficient Resources"
    assert ours[-3:] == ["Unknown Error"] * 3
    assert len(set(ours[:31])) == 31


def test_no_gpus_are_a_reason_not_to_start_unless_they_need_not_be(asked: Ask) -> None:
    lone = state().split("\n[gpu 0]")[0]
    code = "import subprocess\n"
    code += f"open(os.environ['GPUREADY_STANDIN_STATE'], 'w').write({lone!r})\n"
    code += "N.nvmlShutdown()\nanswer([code(N.nvmlInit), code(N.nvmlInitWithFlags, 1), N.nvmlDeviceGetCount()])"

    assert asked(state(), code) == [pynvml.NVML_ERROR_NOT_FOUND, 0, 0]


def test_the_library_starts_and_ends_as_often_as_it_is_told(asked: Ask) -> None:
    code = """
N.nvmlInit()
N.nvmlShutdown()
still = code(N.nvmlDeviceGetCount)
N.nvmlShutdown()
answer([still, code(N.nvmlDeviceGetCount), raw("nvmlShutdown"), code(N.nvmlSystemGetNVMLVersion)])
"""
    assert asked(state(), code) == [0, pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_UNINITIALIZED, 0]


def test_a_process_is_known_by_the_name_it_gives_itself(asked: Ask) -> None:
    code = """
short = ctypes.create_string_buffer(4)
result = raw("nvmlSystemGetProcessName", os.getpid(), short, 4)
answer([N.nvmlSystemGetProcessName(os.getpid()), code(N.nvmlSystemGetProcessName, 2**22 + 1), result,
        short.value.decode(),
        raw("nvmlSystemGetProcessName", os.getpid(), short, 0)])
"""
    name, missing, cropped, start, no_room = asked(state(), code)

    assert name.endswith("python") or "python3" in name
    assert missing == pynvml.NVML_ERROR_NOT_FOUND
    assert (cropped, start) == (0, name[:3])
    assert no_room == pynvml.NVML_ERROR_INVALID_ARGUMENT


# ---- handles ----


def test_a_gpu_is_found_by_each_of_its_names(asked: Ask) -> None:
    code = """
gpu = N.nvmlDeviceGetHandleByIndex(3)
uuid = N.nvmlDeviceGetUUID(gpu)
def by_uuid(kind, value):
    wanted = N.c_nvmlUUID_t()
    wanted.version, wanted.type = 0x1000034, kind
    if kind == 1:
        wanted.value.str = value
    else:
        ctypes.memmove(wanted.value.bytes, value, 16)
    handle = N.c_nvmlDevice_t()
    return raw("nvmlDeviceGetHandleByUUIDV", ctypes.byref(wanted), ctypes.byref(handle)) or N.nvmlDeviceGetIndex(handle)
answer([[N.nvmlDeviceGetIndex(one) for one in (
    N.nvmlDeviceGetHandleByUUID(uuid.encode()),
    N.nvmlDeviceGetHandleBySerial(N.nvmlDeviceGetSerial(gpu).encode()),
    N.nvmlDeviceGetHandleByPciBusId(N.nvmlDeviceGetPciInfo(gpu).busId.encode()),
    N.nvmlDeviceGetHandleByPciBusId(b"0000:61:00.0"),
    N.nvmlDeviceGetHandleByPciBusId(b"61:00.0"),
)], by_uuid(1, uuid.encode()), by_uuid(2, bytes.fromhex(uuid[4:].replace("-", ""))), by_uuid(2, bytes(16)),
        by_uuid(3, bytes(16))])
"""
    assert asked(state(), code) == [[3] * 5, 3, 3, pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT]


def test_a_mig_device_is_found_by_its_uuid_and_known_by_name_and_number(asked: Ask) -> None:
    code = """
devices = [mig(index) for index in range(3)]
again = [N.nvmlDeviceGetHandleByUUID(N.nvmlDeviceGetUUID(one).encode()) for one in devices]
answer([[N.nvmlDeviceGetName(one) for one in devices], [N.nvmlDeviceGetIndex(one) for one in again],
        len({N.nvmlDeviceGetUUID(one) for one in devices}), N.nvmlDeviceGetUUID(devices[0])[:4],
        N.nvmlDeviceGetCudaComputeCapability(devices[0]), code(N.nvmlDeviceGetHandleByUUID, b"MIG-1")])
"""
    text = with_lines(state(), 0, *DIVIDED)

    assert asked(text, code) == [
        [
            "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
            "NVIDIA H100 80GB HBM3 MIG 1c.2g.20gb",
            "NVIDIA H100 80GB HBM3 MIG 1c.2g.20gb",
        ],
        [0, 1, 2],
        3,
        "MIG-",
        [9, 0],
        pynvml.NVML_ERROR_NOT_FOUND,
    ]


def test_what_only_a_whole_gpu_has_a_mig_device_has_not(asked: Ask) -> None:
    calls = [
        "nvmlDeviceGetSerial",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetPerformanceState",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetEccMode",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetSupportedEventTypes",
        "nvmlDeviceGetPersistenceMode",
    ]
    text = with_lines(state(), 0, *DIVIDED)
    codes = asked(text, f"answer([code(getattr(N, name), mig()) for name in {calls!r}])")

    assert dict(zip(calls, codes, strict=True)) == dict.fromkeys(calls, pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_a_handle_goes_stale_with_its_instance_and_the_gpu_s_own_does_not(asked: Ask) -> None:
    whole, divided = state(), with_lines(state(), 0, *DIVIDED)
    code = f"""
held, parent = mig(), gpu
def put(text):
    with open(os.environ["GPUREADY_STANDIN_STATE"] + ".new", "w") as file:
        file.write(text)
    os.replace(file.name, os.environ["GPUREADY_STANDIN_STATE"])
before = code(N.nvmlDeviceGetName, held)
put({whole!r})
gone = code(N.nvmlDeviceGetName, held)
put({divided.replace("compute_instance = 2 0 2 0 2", "compute_instance = 2 0 2 0 7")!r})
answer([before, gone, code(N.nvmlDeviceGetName, held), code(N.nvmlDeviceGetName, parent), code(N.nvmlDeviceGetName,
        mig())])
"""
    invalid = pynvml.NVML_ERROR_INVALID_ARGUMENT

    assert asked(divided, code) == [0, invalid, invalid, 0, 0]


# ---- what a GPU is ----


def test_an_h100_says_what_it_is(asked: Ask) -> None:
    code = """
answer([N.nvmlDeviceGetName(gpu), N.nvmlDeviceGetMinorNumber(gpu), N.nvmlDeviceGetNumGpuCores(gpu),
        N.nvmlDeviceGetMemoryBusWidth(gpu), N.nvmlDeviceGetBoardId(gpu), N.nvmlDeviceGetMultiGpuBoard(gpu),
        N.nvmlDeviceGetBusType(gpu), N.nvmlDeviceOnSameBoard(gpu, gpu),
        N.nvmlDeviceOnSameBoard(gpu, N.nvmlDeviceGetHandleByIndex(1)),
        N.nvmlDeviceGetBrand(gpu), N.nvmlDeviceGetArchitecture(gpu), N.nvmlDeviceGetCudaComputeCapability(gpu)])
"""
    assert asked(state(), code) == [
        "NVIDIA H100 80GB HBM3", 0, 16896, 5120, 0x1B00, 0, pynvml.NVML_BUS_TYPE_PCIE, True, False,
        pynvml.NVML_BRAND_NVIDIA, pynvml.NVML_DEVICE_ARCH_HOPPER, [9, 0],
    ]  # fmt: skip


def test_a_pci_address_is_told_in_every_version_of_the_call(asked: Ask) -> None:
    code = """
extended = N.nvmlPciInfoExt_v1_t(version=N.nvmlPciInfoExt_v1)
N.nvmlDeviceGetPciInfoExt(gpu, ctypes.byref(extended))
wrong = N.nvmlPciInfoExt_v1_t(version=0x2000040)
new = N.nvmlDeviceGetPciInfo_v3(gpu)
second, first = N.nvmlPciInfo_v2_t(), ctypes.create_string_buffer(b"x" * 40, 40)
codes = [raw("nvmlDeviceGetPciInfo_v2", gpu, ctypes.byref(second)), raw("nvmlDeviceGetPciInfo", gpu, first),
         code(N.nvmlDeviceGetPciInfoExt, gpu, ctypes.byref(wrong))]
answer([codes, new.busId, new.busIdLegacy, new.pciDeviceId, new.pciSubSystemId, second.busId, second.pciSubSystemId,
        first.raw[:16].rstrip(b"\\0").decode(), first.raw[32:].decode(), extended.busId, extended.baseClass,
        extended.subClass])
"""
    assert asked(state(), code) == [
        [0, 0, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH],
        "00000000:1B:00.0", "0000:1B:00.0", 0x233010DE, 0x16C110DE, "0000:1B:00.0", 0x16C110DE,
        "0000:1B:00.0", "x" * 8, "00000000:1B:00.0", 3, 2,
    ]  # fmt: skip


def test_the_pcie_link(asked: Ask) -> None:
    code = """
answer([N.nvmlDeviceGetCurrPcieLinkGeneration(gpu), N.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
        N.nvmlDeviceGetGpuMaxPcieLinkGeneration(gpu), N.nvmlDeviceGetCurrPcieLinkWidth(gpu),
        N.nvmlDeviceGetMaxPcieLinkWidth(gpu), N.nvmlDeviceGetPcieReplayCounter(gpu), N.nvmlDeviceGetPcieSpeed(gpu)])
"""
    assert asked(with_lines(state(), 0, "pcie_generation = 4", "pcie_replays = 12"), code) == [
        4,
        5,
        5,
        16,
        16,
        12,
        16000,
    ]


def test_the_processors_and_memory_that_are_near(asked: Ask) -> None:
    code = """
last = N.nvmlDeviceGetHandleByIndex(7)
answer([[hex(word) for word in N.nvmlDeviceGetCpuAffinity(gpu, 4)], list(N.nvmlDeviceGetMemoryAffinity(last, 1, 0)),
        [hex(word) for word in N.nvmlDeviceGetCpuAffinity(gpu, 1)], code(N.nvmlDeviceGetCpuAffinityWithinScope,
        gpu, 1, 2),
        code(N.nvmlDeviceGetCpuAffinity, gpu, 0), code(N.nvmlDeviceGetNumaNodeId, gpu)])
"""
    first = "0xffffffffffffff"  # 0 to 55

    assert asked(state(), code) == [
        [first, "0xffff000000000000", "0xffffffffff", "0x0"],  # and 112 to 167
        [2],
        [first],
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_NOT_SUPPORTED,  # the memory of these GPUs is no NUMA node
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="modes are changed by root")
def test_modes_are_set_and_seen_by_the_next_process(asked: Ask, tmp_path: Path) -> None:
    code = """
answer([code(N.nvmlDeviceSetPersistenceMode, gpu, 0), code(N.nvmlDeviceSetComputeMode, gpu, 3),
        code(N.nvmlDeviceSetComputeMode, gpu, 1), code(N.nvmlDeviceSetPersistenceMode, gpu, 2),
        N.nvmlDeviceGetPersistenceMode(gpu), N.nvmlDeviceGetComputeMode(gpu), N.nvmlDeviceGetDisplayMode(gpu),
        N.nvmlDeviceGetDisplayActive(gpu)])
"""
    invalid = pynvml.NVML_ERROR_INVALID_ARGUMENT

    assert asked(state(), code) == [0, 0, invalid, invalid, 0, 3, 0, 0]
    kept = (tmp_path / "gpus.conf").read_text()
    assert (kept.count("persistence_mode = 0\n"), kept.count("compute_mode = 3\n")) == (1, 1)
    assert asked(kept, "answer(N.nvmlDeviceGetComputeMode(gpu))") == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_who_is_not_root_changes_nothing(tmp_path: Path) -> None:
    library = library_directory(tmp_path / "library")
    code = (
        "os.setuid(65534)\nanswer([code(N.nvmlDeviceSetPersistenceMode, gpu, 0), code(N.nvmlDeviceSetEccMode, gpu, 0),"
    )
    code += " code(N.nvmlDeviceSetPowerManagementLimit, gpu, 500000), N.nvmlDeviceGetPersistenceMode(gpu)])"
    text = state()
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to others
        place = Path(folder)
        place.chmod(0o755)

        assert ask(library, place, text, code) == [pynvml.NVML_ERROR_NO_PERMISSION] * 3 + [1]
        assert (place / "gpus.conf").read_text() == text


def test_a_lost_gpu_answers_so_and_does_not_hide_the_others(asked: Ask) -> None:
    lost = with_lines(state(), 2, "lost = 1")
    code = f"""
held = N.nvmlDeviceGetHandleByIndex(2)
with open(os.environ["GPUREADY_STANDIN_STATE"] + ".new", "w") as file:
    file.write({lost!r})
os.replace(file.name, os.environ["GPUREADY_STANDIN_STATE"])
answer([N.nvmlDeviceGetCount(), code(N.nvmlDeviceGetHandleByIndex, 2), code(N.nvmlDeviceGetTemperature, held, 0),
        code(N.nvmlDeviceGetP2PStatus, gpu, held, 0), code(N.nvmlDeviceGetTemperature, gpu, 0)])
"""
    gone = pynvml.NVML_ERROR_GPU_IS_LOST

    assert asked(state(), code) == [8, gone, gone, gone, 0]

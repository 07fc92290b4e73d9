"""Clocks, power, temperatures, load, and the field values, in the stand-in library."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from tests.unit.nvml_asking import DIVIDED, ask
from tests.unit.standin import library_directory, state, with_lines

Ask = Callable[[str, str], Any]
INVALID, UNSUPPORTED = pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_NOT_SUPPORTED
UINT, LONG, INT = (
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT,
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG,
    pynvml.NVML_VALUE_TYPE_SIGNED_INT,
)


@pytest.fixture
def asked(tmp_path: Path) -> Ask:
    library = library_directory(tmp_path / "library")
    return lambda text, code: ask(library, tmp_path, text, code)


def test_clocks(asked: Ask) -> None:
    code = """
answer([[N.nvmlDeviceGetClockInfo(gpu, kind) for kind in range(4)], [N.nvmlDeviceGetMaxClockInfo(gpu,
        kind) for kind in range(4)],
        N.nvmlDeviceGetClock(gpu, 2, 0), N.nvmlDeviceGetClock(gpu, 1, 3), N.nvmlDeviceGetMaxCustomerBoostClock(gpu, 0),
        [code(N.nvmlDeviceGetClockInfo, gpu, 4), code(N.nvmlDeviceGetClock, gpu, 0, 1), code(N.nvmlDeviceGetClock,
        gpu, 0, 4),
         code(N.nvmlDeviceGetApplicationsClock, gpu, 0), code(N.nvmlDeviceGetSupportedMemoryClocks, gpu)],
        N.nvmlDeviceGetPerformanceState(gpu), N.nvmlDeviceGetPowerState(gpu)])
"""
    assert asked(state(), code) == [
        [345, 345, 2619, 765],
        [1980, 1980, 2619, 1545],
        2619,
        1980,
        1980,
        [INVALID, UNSUPPORTED, INVALID, UNSUPPORTED, UNSUPPORTED],
        0,
        0,
    ]


def test_why_clocks_are_held_down(asked: Ask) -> None:
    text = with_lines(state(), 0, "throttle_reasons = 0x48", "violation_thermal_nanoseconds = 5000000000")
    code = """
thermal = N.nvmlDeviceGetViolationStatus(gpu, 1)
answer([N.nvmlDeviceGetCurrentClocksEventReasons(gpu), N.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
        N.nvmlDeviceGetSupportedClocksEventReasons(gpu) == N.nvmlClocksEventReasonAll,
        thermal.violationTime, abs(thermal.referenceTime / 1e6 - time.time()) < 60,
        [code(N.nvmlDeviceGetViolationStatus, gpu, policy) for policy in (0, 2, 12)]])
"""
    slowed = pynvml.nvmlClocksEventReasonHwThermalSlowdown | pynvml.nvmlClocksEventReasonHwSlowdown

    assert asked(text, code) == [slowed, slowed, True, 5 * 10**9, True, [UNSUPPORTED, UNSUPPORTED, INVALID]]


def test_power(asked: Ask) -> None:
    code = """
answer([N.nvmlDeviceGetPowerUsage(gpu), N.nvmlDeviceGetPowerManagementMode(gpu),
        N.nvmlDeviceGetPowerManagementLimit(gpu),
        N.nvmlDeviceGetEnforcedPowerLimit(gpu), N.nvmlDeviceGetPowerManagementDefaultLimit(gpu),
        N.nvmlDeviceGetPowerManagementLimitConstraints(gpu), N.nvmlDeviceGetTotalEnergyConsumption(gpu)])
"""
    text = with_lines(state(), 0, "energy_millijoules = 5000000000")

    assert asked(text, code) == [68570, 1, 700000, 700000, 700000, [200000, 700000], 5 * 10**9]


@pytest.mark.skipif(os.geteuid() != 0, reason="the limit is changed by root")
def test_a_power_limit_is_set_within_its_bounds_alone(asked: Ask, tmp_path: Path) -> None:
    code = """
def second(scope, limit, version=0x200000c):
    value = N.c_nvmlPowerValue_v2_t(version, scope, limit)
    return raw("nvmlDeviceSetPowerManagementLimit_v2", gpu, ctypes.byref(value))
answer([code(N.nvmlDeviceSetPowerManagementLimit, gpu, 199999), code(N.nvmlDeviceSetPowerManagementLimit, gpu, 700001),
        code(N.nvmlDeviceSetPowerManagementLimit, gpu, 200000), N.nvmlDeviceGetEnforcedPowerLimit(gpu),
        second(0, 350000), N.nvmlDeviceGetPowerManagementLimit(gpu), second(0, 1), second(1, 350000), second(9, 350000),
        second(0, 350000, 0x100000c)])
"""
    assert asked(state(), code) == [
        INVALID, INVALID, 0, 200000, 0, 350000, INVALID, UNSUPPORTED, INVALID,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    ]  # fmt: skip
    assert "power_limit_milliwatts = 350000\n" in (tmp_path / "gpus.conf").read_text()


def test_temperatures(asked: Ask) -> None:
    code = """
answer([N.nvmlDeviceGetTemperature(gpu, 0), N.nvmlDeviceGetTemperatureV(gpu, 0), code(N.nvmlDeviceGetTemperature,
        gpu, 1),
        [N.nvmlDeviceGetTemperatureThreshold(gpu, one) for one in (0, 1, 3)],
        [code(N.nvmlDeviceGetTemperatureThreshold, gpu, one) for one in (4, 8)], N.nvmlDeviceGetMarginTemperature(gpu),
        code(N.nvmlDeviceGetFanSpeed, gpu), N.nvmlDeviceGetNumFans(gpu)])
"""
    assert asked(state(), code) == [29, 29, INVALID, [95, 89, 87], [UNSUPPORTED, INVALID], 58, UNSUPPORTED, 0]


def test_a_card_before_ada_tells_no_margin(asked: Ask) -> None:
    code = "answer([code(N.nvmlDeviceGetMarginTemperature, gpu), fields(193)[0][0]])"

    assert asked(with_lines(state(), 0, "architecture = 7"), code) == [UNSUPPORTED, UNSUPPORTED]


def test_a_card_with_a_fan_of_its_own(asked: Ask) -> None:
    code = """
answer([N.nvmlDeviceGetFanSpeed(gpu), N.nvmlDeviceGetFanSpeed_v2(gpu, 0), code(N.nvmlDeviceGetFanSpeed_v2, gpu, 1),
        N.nvmlDeviceGetNumFans(gpu)])
"""
    assert asked(with_lines(state(), 0, "fan_percent = 30"), code) == [30, 30, INVALID, 1]


def test_load_is_told_but_not_under_mig(asked: Ask) -> None:
    code = """
def load():
    rates = N.nvmlDeviceGetUtilizationRates(gpu)
    return [rates.gpu, rates.memory, N.nvmlDeviceGetEncoderUtilization(gpu)[0],
        N.nvmlDeviceGetDecoderUtilization(gpu)[0]]
try:
    answer(load())
except N.NVMLError as error:
    answer([error.value, code(N.nvmlDeviceGetEncoderUtilization, gpu), code(N.nvmlDeviceGetUtilizationRates, mig())])
"""
    busy = with_lines(
        state(), 0, "utilization_gpu_percent = 97", "utilization_memory_percent = 41", "utilization_decoder_percent = 3"
    )

    assert asked(busy, code) == [97, 41, 0, 3]
    assert asked(with_lines(busy, 0, *DIVIDED), code) == [UNSUPPORTED] * 3


# ---- field values ----


def test_field_values_carry_their_type(asked: Ask) -> None:
    wanted = {
        pynvml.NVML_FI_DEV_ECC_CURRENT: (UINT, 1),
        pynvml.NVML_FI_DEV_ECC_DBE_AGG_TOTAL: (LONG, 2**40),
        pynvml.NVML_FI_DEV_MEMORY_TEMP: (UINT, 37),
        pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION: (LONG, 0),
        pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT: (UINT, 18),
        pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_L11: (UINT, 26562),
        pynvml.NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT: (UINT, 18),
        pynvml.NVML_FI_DEV_REMAPPED_UNC: (UINT, 2),
        pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED: (UINT, 1),
        pynvml.NVML_FI_DEV_POWER_INSTANT: (UINT, 68570),
        pynvml.NVML_FI_DEV_POWER_MIN_LIMIT: (UINT, 200000),
        pynvml.NVML_FI_DEV_POWER_MAX_LIMIT: (UINT, 700000),
        pynvml.NVML_FI_DEV_POWER_REQUESTED_LIMIT: (UINT, 700000),
        pynvml.NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT: (INT, -8),  # as nvidia-smi -q of an H100 shows it
        pynvml.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT: (INT, -2),
        pynvml.NVML_FI_DEV_TEMPERATURE_GPU_MAX_TLIMIT: (INT, 0),
        pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: (UINT, 1),
    }
    text = with_lines(
        state(), 0, "ecc_aggregate_uncorrected = 1099511627776", "remapped_uncorrectable = 2", "recovery_action = 1"
    )
    code = f"""
found = N.nvmlDeviceGetFieldValues(gpu, {list(wanted)!r})
answer([[one.nvmlReturn, one.valueType, one.value.siVal if one.valueType == 5 else one.value.ullVal] for one in found]
       + [abs(found[0].timestamp / 1e6 - time.time()) < 60])
"""
    *found, recent = asked(text, code)

    assert dict(zip(wanted, found, strict=True)) == {field: [0, *value] for field, value in wanted.items()}
    assert recent


def test_a_field_of_a_link_takes_its_number_as_scope(asked: Ask) -> None:
    text = with_lines(state(), 0, "nvlink_down = 4", "nvlink_replay_errors = 9")
    code = "answer(fields((164, 0), (165, 0), (166, 0), (164, 4), (165, 4), (161, 4), (161, 0), (164, 18), (165, 18)))"

    assert asked(text, code) == [
        [0, UINT, 26562], [0, UINT, 1], [0, UINT, pynvml.NVML_NVLINK_VERSION_4_0], [0, UINT, 0], [0, UINT, 0],
        [0, LONG, 9], [0, LONG, 0], [UNSUPPORTED, UINT, 0], [UNSUPPORTED, UINT, 0],
    ]  # fmt: skip


def test_what_is_no_field_fails_alone(asked: Ask) -> None:
    code = """
room = ctypes.create_string_buffer(40)
answer([[one[0] for one in fields(60, 82, 999999)], raw("nvmlDeviceGetFieldValues", gpu, 0, None),
        raw("nvmlDeviceGetFieldValues", gpu, -1, room), code(N.nvmlDeviceGetFieldValues, mig(), [82])])
"""

    assert asked(with_lines(state(), 0, *DIVIDED), code) == [
        [UNSUPPORTED, 0, UNSUPPORTED],
        INVALID,
        INVALID,
        UNSUPPORTED,
    ]

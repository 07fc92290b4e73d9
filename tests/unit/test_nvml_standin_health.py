"""ECC, remapped rows and retired pages, in the stand-in library."""

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
ERRORS = (
    "ecc_volatile_corrected = 1",
    "ecc_volatile_uncorrected = 2",
    "ecc_aggregate_corrected = 3",
    "ecc_aggregate_uncorrected = 4",
)


@pytest.fixture
def asked(tmp_path: Path) -> Ask:
    library = library_directory(tmp_path / "library")
    return lambda text, code: ask(library, tmp_path, text, code)


def test_ecc_errors_are_in_the_memory_of_the_device(asked: Ask) -> None:
    code = """
pairs = [(error, counter) for counter in (0, 1) for error in (0, 1)]
detailed = N.nvmlDeviceGetDetailedEccErrors(gpu, 1, 1)
answer([[N.nvmlDeviceGetTotalEccErrors(gpu, *pair) for pair in pairs],
        [N.nvmlDeviceGetMemoryErrorCounter(gpu, *pair, N.NVML_MEMORY_LOCATION_DRAM) for pair in pairs],
        [N.nvmlDeviceGetMemoryErrorCounter(gpu, *pair, N.NVML_MEMORY_LOCATION_SRAM) for pair in pairs],
        [detailed.deviceMemory, detailed.l2Cache],
        [code(N.nvmlDeviceGetTotalEccErrors, gpu, 2, 0), code(N.nvmlDeviceGetTotalEccErrors, gpu, 0, 2),
         code(N.nvmlDeviceGetMemoryErrorCounter, gpu, 0, 0, 8), code(N.nvmlDeviceGetMemoryErrorCounter, gpu, 0, 0, 1)]])
"""
    assert asked(with_lines(state(), 0, *ERRORS), code) == [
        [1, 2, 3, 4],
        [1, 2, 3, 4],
        [0, 0, 0, 0],
        [4, 0],
        [INVALID, INVALID, INVALID, UNSUPPORTED],
    ]


def test_without_ecc_nothing_is_counted(asked: Ask) -> None:
    text = with_lines(state(), 0, *ERRORS, "ecc_current = 0")

    assert asked(text, "answer([N.nvmlDeviceGetEccMode(gpu), code(N.nvmlDeviceGetTotalEccErrors, gpu, 0, 0)])") == [
        [0, 1],
        UNSUPPORTED,
    ]


def test_sram_is_told_by_ampere_and_later_to_who_knows_the_version(asked: Ask) -> None:
    code = """
status, wrong = N.c_nvmlEccSramErrorStatus_v1_t(), N.c_nvmlEccSramErrorStatus_v1_t()
status.aggregateCor = status.bThresholdExceeded = 7
wrong.version = 0x2000068
answer([code(N.nvmlDeviceGetSramEccErrorStatus, gpu, ctypes.byref(status)), status.aggregateCor,
        status.bThresholdExceeded,
        code(N.nvmlDeviceGetSramEccErrorStatus, gpu, ctypes.byref(wrong))])
"""
    mismatch = pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH

    assert asked(state(), code) == [0, 0, 0, mismatch]
    assert asked(with_lines(state(), 0, "architecture = 6"), code) == [UNSUPPORTED, 7, 7, UNSUPPORTED]


@pytest.mark.skipif(os.geteuid() != 0, reason="ECC is changed by root")
def test_the_ecc_mode_waits_and_counters_are_cleared_one_kind_at_a_time(asked: Ask) -> None:
    code = """
answer([code(N.nvmlDeviceSetEccMode, gpu, 0), N.nvmlDeviceGetEccMode(gpu), code(N.nvmlDeviceSetEccMode, gpu, 2),
        code(N.nvmlDeviceClearEccErrorCounts, gpu, 0), code(N.nvmlDeviceClearEccErrorCounts, gpu, 2),
        [N.nvmlDeviceGetTotalEccErrors(gpu, error, counter) for counter in (0, 1) for error in (0, 1)]])
"""
    assert asked(with_lines(state(), 0, *ERRORS), code) == [0, [1, 0], INVALID, 0, INVALID, [0, 0, 3, 4]]


def test_remapped_rows_and_how_much_is_left_to_remap(asked: Ask) -> None:
    rows = ("remapped_correctable = 1", "remapped_uncorrectable = 2", "remap_pending = 1", "remap_failure = 1")
    code = """
left = N.nvmlDeviceGetRowRemapperHistogram(gpu)
answer([N.nvmlDeviceGetRemappedRows(gpu), [left.max, left.high, left.partial, left.low, left.none]])
"""
    assert asked(with_lines(state(), 0, *rows, "remapper_banks = 640"), code) == [[1, 2, 1, 1], [636, 3, 0, 0, 1]]


def test_rows_are_not_told_while_instances_exist(asked: Ask) -> None:
    code = "answer([code(N.nvmlDeviceGetRemappedRows, gpu), fields(142)[0][0]])"
    mode = ("mig_current = 1", "mig_pending = 1")

    assert asked(with_lines(state(), 0, *mode), code) == [0, 0]
    assert asked(with_lines(state(), 0, *DIVIDED), code) == [UNSUPPORTED, UNSUPPORTED]


def test_a_card_before_ampere_retires_pages_instead(asked: Ask) -> None:
    pages = ("retired_single_bit = 2", "retired_double_bit = 1", "retirement_pending = 1")
    none = ("remapped_correctable = -", "remapped_uncorrectable = -")
    code = """
answer([len(set(N.nvmlDeviceGetRetiredPages(gpu, 0))), len(N.nvmlDeviceGetRetiredPages(gpu, 1)),
        [page["timestamp"] for page in N.nvmlDeviceGetRetiredPages_v2(gpu, 0)],
        N.nvmlDeviceGetRetiredPagesPendingStatus(gpu),
        code(N.nvmlDeviceGetRetiredPages, gpu, 2), code(N.nvmlDeviceGetRemappedRows, gpu)])
"""
    assert asked(with_lines(state(), 0, *pages, *none), code) == [2, 1, [0, 0], 1, INVALID, UNSUPPORTED]
    assert asked(state(), "answer(code(N.nvmlDeviceGetRetiredPages, gpu, 0))") == UNSUPPORTED

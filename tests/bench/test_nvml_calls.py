"""What a call of the simulated NVML costs, from C and from pynvml.

    .venv/bin/pytest -s --long tests/bench/test_nvml_calls.py

Nothing here judges time: it says something about the machine. A read that finds the state file as it was costs little
more than the one stat by which it finds that; the floor stands in the table. From Python most of a call is ctypes,
which is told apart by calls that do nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from sim.hardware import install
from sim.machine.common import CHECKOUT
from tests.unit.standin import library_directory, python, state, with_lines

pytestmark = pytest.mark.long

REPORT = CHECKOUT / ".cache/reports/bench-nvml.json"
AIM_MICROSECONDS = 5
SOURCE = Path(__file__).with_name("nvml_calls.c")

# The same function through bare ctypes and through pynvml, beside a function of libc that does nothing.
FROM_PYTHON = """
import ctypes, json, time
import pynvml as N
N.nvmlInit()
gpu = N.nvmlDeviceGetHandleByIndex(0)
bare, libc, number = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.CDLL(None), ctypes.c_uint()
def cost(call, times=2000):
    rounds = []
    for _ in range(9):
        start = time.perf_counter_ns()
        for _ in range(times):
            call()
        rounds.append((time.perf_counter_ns() - start) / times)
    return min(rounds)
print(json.dumps({
    "ctypes alone (labs of libc)": cost(lambda: libc.labs(7)),
    "ctypes, nvmlDeviceGetTemperature": cost(lambda: bare.nvmlDeviceGetTemperature(gpu, 0, ctypes.byref(number))),
    "pynvml, nvmlDeviceGetTemperature": cost(lambda: N.nvmlDeviceGetTemperature(gpu, 0)),
    "pynvml, nvmlDeviceGetMemoryInfo": cost(lambda: N.nvmlDeviceGetMemoryInfo(gpu)),
}))
"""


def from_c(library: Path, file: Path, folder: Path) -> dict[str, float]:
    """Return nanoseconds by what was called, as a C program sees it."""
    program = folder / "nvml_calls"
    command = [
        install.COMPILER,
        *install.PROGRAM_FLAGS,
        "-Wno-strict-prototypes",
        "-o",
        str(program),
        str(SOURCE),
        "-ldl",
    ]
    subprocess.run(command, check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "GPUREADY_STANDIN_STATE": str(file)}
    done = subprocess.run([program, file], env=environment, check=True, capture_output=True, text=True)
    lines = (line.split("\t") for line in done.stdout.splitlines())
    return {what: float(nanoseconds) for nanoseconds, what in lines}


def test_what_a_call_costs(tmp_path: Path) -> None:
    library = library_directory(tmp_path / "library")
    file = tmp_path / "gpus.conf"
    mine = [f"process = {pid} 1048576 compute - -" for pid in (os.getpid(), 1)]
    file.write_text(with_lines(state(), 0, *mine), encoding="utf-8")
    costs = {"from C": from_c(library, file, tmp_path), "from Python": python(FROM_PYTHON, library, file)}
    show(costs)


def show(costs: dict[str, dict[str, float]]) -> None:
    """Print the tables, and keep them as JSON."""
    floor = costs["from C"]["stat of the state file (the floor)"]
    console = Console(width=120)
    for side, calls in costs.items():
        table = Table(title=f"A call of the simulated NVML, 8 x H100, {side}")
        for head in ("call", "microseconds", "times the floor"):
            table.add_column(head, justify="left" if head == "call" else "right")
        for what, nanoseconds in calls.items():
            table.add_row(what, f"{nanoseconds / 1000:.2f}", f"{nanoseconds / floor:.1f}")
        console.print(table)
    reads = {what: one for what, one in costs["from C"].items() if what.startswith("nvml")}
    within = sum(one < AIM_MICROSECONDS * 1000 for one in reads.values())
    console.print(
        f"{within} of {len(reads)} reads without a file change take less than {AIM_MICROSECONDS} microseconds"
    )
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(costs, indent=2) + "\n")

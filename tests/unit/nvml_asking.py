"""pynvml put to the stand-in library, in a process of its own, with a few words that the tests of every area share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.unit.standin import python

# `code` is a call's error as a number, 0 where it succeeds; `answer` is what the test gets.
BEGIN = """
import ctypes, json, os, sys, threading, time
import pynvml as N

def code(function, *words, **named):
    try:
        function(*words, **named)
    except N.NVMLError as error:
        return error.value
    return 0

def raw(name, *words):
    return N._nvmlGetFunctionPointer(name)(*words)

def fields(*wanted):
    return [[one.nvmlReturn, one.valueType, one.value.sllVal] for one in N.nvmlDeviceGetFieldValues(gpu, wanted)]

def mig(index=0):
    return N.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)

def answer(value):
    print(json.dumps(value))

N.nvmlInit()
gpu = N.nvmlDeviceGetHandleByIndex(0)
"""

# A GPU of the preset h100-80gb-sxm-x8 that is divided: 3g.40gb with one MIG device, 2g.20gb with two, one slice each.
DIVIDED = (
    "mig_current = 1",
    "mig_pending = 1",
    "gpu_instance = 2 2 4 1",
    "compute_instance = 2 0 2 0 2",
    "gpu_instance = 3 1 0 3",
    "compute_instance = 3 0 0 0 4",
    "compute_instance = 3 1 0 1 5",
)


def ask(library: Path, folder: Path, state: str, code: str) -> Any:
    """Run code against hardware in that state."""
    file = folder / "gpus.conf"
    file.write_text(state, encoding="utf-8")
    return python(BEGIN + code, library, file)


def alive() -> int:
    """Return the id of a process that lives as long as the test."""
    return os.getpid()

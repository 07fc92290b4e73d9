"""Debian's own nvidia-smi of two releases, and the servers that it is run on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sim.hardware import describe
from tests.unit.nvidia_smi.debian import SUITES, UnobtainableError, fetch
from tests.unit.nvidia_smi.machine import Machine, machine_of
from tests.unit.standin import library_directory


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library_directory(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module", params=SUITES)
def program(request: pytest.FixtureRequest) -> Path:
    try:
        return fetch(request.param)
    except UnobtainableError as reason:
        pytest.skip(f"Debian's nvidia-smi of {request.param} cannot be had: {reason}")


@pytest.fixture(params=describe.names("presets"))
def machine(request: pytest.FixtureRequest, program: Path, library: Path, tmp_path: Path) -> Machine:
    return machine_of(request.param, program, library, tmp_path)


@pytest.fixture
def h100(program: Path, library: Path, tmp_path: Path) -> Machine:
    return machine_of("h100-80gb-sxm-x8", program, library, tmp_path)


@pytest.fixture
def a100(program: Path, library: Path, tmp_path: Path) -> Machine:
    return machine_of("a100-40gb-sxm-x4", program, library, tmp_path)


@pytest.fixture
def holder() -> Iterator[int]:
    """Give the id of a process that lives as long as the test."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid

"""The proof of the CUDA toolkit on a directory with an nvcc that is played."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuready.operations import cuda
from gpuready.operations.machine import Done, Machine

WANTED = cuda.Wanted("12.4", "sm_90")


class Nvcc:
    """Compiles, and counts how often."""

    compiled = 0

    def __call__(self, argv: Sequence[str]) -> Done:
        if "--version" in argv:
            return Done(0, "Cuda compilation tools, release 12.4, V12.4.131\nBuild cuda_12.4.r12.4/1\n", "")
        self.compiled += 1
        Path(argv[argv.index("-o") + 1]).write_bytes(b"\x7fELF")
        return Done(0, "", "")


@pytest.fixture
def nvcc() -> Nvcc:
    return Nvcc()


@pytest.fixture
def machine(tmp_path: Path, nvcc: Nvcc) -> Machine:
    one = Machine(tmp_path, nvcc)
    one.write("/usr/bin/nvcc", "")
    return one


def test_what_was_proved_is_not_compiled_again(machine: Machine, nvcc: Nvcc) -> None:
    assert cuda.verify(machine, WANTED, check=False).changed
    assert not cuda.verify(machine, WANTED, check=False).changed
    assert nvcc.compiled == 1


@pytest.mark.parametrize("left", ["", '{"nvcc": "/usr', "\0\0\0\0", "[]", "null"])
def test_a_damaged_record_proves_nothing_and_is_written_anew(machine: Machine, nvcc: Nvcc, left: str) -> None:
    machine.write(cuda.RECORD, left)
    assert cuda.verify(machine, WANTED, check=False).changed
    assert nvcc.compiled == 1
    assert json.loads(machine.read(cuda.RECORD) or "")["sm"] == "sm_90"


def test_a_record_that_is_no_text_can_be_shown_and_is_written_anew(machine: Machine) -> None:
    machine.write(cuda.RECORD, "")
    machine.path(cuda.RECORD).write_bytes(b"\xff\xfe\x00")
    assert cuda.verify(machine, WANTED, check=False).data["compiled"]
    assert json.loads(machine.read(cuda.RECORD) or "")["version"] == "12.4"

"""Shared memory: at least its share of the RAM, and nothing that is larger is touched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuready.operations.machine import Done, Machine
from gpuready.operations.shared_memory import fstab_with_shm, set_shm


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "tmpfs\t/dev/shm\ttmpfs\tnosuid,nodev,size=60%\t0\t0\n"),
        ("# x\n", "# x\ntmpfs\t/dev/shm\ttmpfs\tnosuid,nodev,size=60%\t0\t0\n"),
        ("tmpfs /dev/shm tmpfs defaults 0 0\n", "tmpfs\t/dev/shm\ttmpfs\tsize=60%\t0\t0\n"),
        ("shm /dev/shm tmpfs noexec,size=4G 0 0\n", "shm\t/dev/shm\ttmpfs\tnoexec,size=60%\t0\t0\n"),
        ("tmpfs /dev/shm tmpfs nodev,size=60% 0 0\n", "tmpfs /dev/shm tmpfs nodev,size=60% 0 0\n"),
        ("tmpfs /dev/shm tmpfs nr_blocks=1k 0 0\n", "tmpfs\t/dev/shm\ttmpfs\tsize=60%\t0\t0\n"),
        ("tmpfs /dev/shm tmpfs size=80%,size=1G 0 0\n", "tmpfs\t/dev/shm\ttmpfs\tsize=60%\t0\t0\n"),
        ("tmpfs /dev/shm tmpfs size=half 0 0\n", "tmpfs\t/dev/shm\ttmpfs\tsize=60%\t0\t0\n"),
        ("#tmpfs /dev/shm tmpfs size=1G 0 0\n", None),
    ],
)
def test_fstab_keeps_its_other_options(before: str, after: str | None) -> None:
    expected = after or before + "tmpfs\t/dev/shm\ttmpfs\tnosuid,nodev,size=60%\t0\t0\n"
    assert fstab_with_shm(before, 60, 16 * 2**30) == expected


@pytest.mark.parametrize(
    "options", ["size=80%", "nosuid,size=100G", "size=10485760k", "size=1G,size=12g", "size=17179869184", "size=0",
                "nr_blocks=4m", "size=60%"]
)  # fmt: skip
def test_a_larger_size_of_the_operator_is_never_lowered(options: str) -> None:
    fstab = f"tmpfs  /dev/shm  tmpfs  {options}  0  0\n"
    assert fstab_with_shm(fstab, 60, 16 * 2**30) == fstab
    assert fstab_with_shm(fstab.strip(), 60, 16 * 2**30) == fstab.strip()


def shm_machine(tmp_path: Path, size: int) -> Machine:
    sizes = [size]

    def run(argv: Sequence[str]) -> Done:
        if argv[0] == "mount":
            sizes[0] = 1000 * 1024 * int(argv[2].rpartition("=")[2].rstrip("%")) // 100
        return Done(0, f"{sizes[0]}\n", "")

    machine = Machine(tmp_path, run)
    machine.write("/proc/meminfo", "MemTotal:       1000 kB\n")
    machine.write("/etc/fstab", "# UNCONFIGURED\n")
    return machine


def test_shm_that_is_large_enough_is_left_alone(tmp_path: Path) -> None:
    machine = shm_machine(tmp_path, 512_000)
    assert not set_shm(machine, 50, check=False).changed
    assert machine.read("/etc/fstab") == "# UNCONFIGURED\n"


@pytest.mark.parametrize(("size", "fstab"), [
    (819_200, "# UNCONFIGURED\n"),
    (819_200, "tmpfs /dev/shm tmpfs size=80% 0 0\n"),
    (716_800, "tmpfs /dev/shm tmpfs size=700k 0 0\n"),
    (819_200, "tmpfs /dev/shm tmpfs defaults 0 0\n"),
    (0, "tmpfs /dev/shm tmpfs size=0 0 0\n"),
])  # fmt: skip
def test_shm_that_is_larger_is_neither_resized_nor_written_down(tmp_path: Path, size: int, fstab: str) -> None:
    machine = shm_machine(tmp_path, size)
    machine.write("/etc/fstab", fstab)
    result = set_shm(machine, 50, check=False)
    assert (result.changed, result.diff) == (False, [])
    assert machine.read("/etc/fstab") == fstab
    assert machine.run(["findmnt"]).out == f"{size}\n"


def test_shm_that_only_the_next_boot_would_make_too_small_is_written_down_and_not_resized(tmp_path: Path) -> None:
    machine = shm_machine(tmp_path, 819_200)
    machine.write("/etc/fstab", "tmpfs /dev/shm tmpfs size=10% 0 0\n")
    result = set_shm(machine, 50, check=False)
    assert [change.header for change in result.diff] == ["/etc/fstab"]
    assert machine.read("/etc/fstab") == "tmpfs\t/dev/shm\ttmpfs\tsize=50%\t0\t0\n"
    assert machine.run(["findmnt"]).out == "819200\n"


def test_shm_that_is_smaller_than_fstab_says_is_enlarged_without_another_line(tmp_path: Path) -> None:
    machine = shm_machine(tmp_path, 102_400)
    machine.write("/etc/fstab", "tmpfs /dev/shm tmpfs size=80% 0 0\n")
    result = set_shm(machine, 50, check=False)
    assert [change.header for change in result.diff] == ["/dev/shm"]
    assert result.data["bytes"] == 512_000


def test_shm_is_enlarged_once(tmp_path: Path) -> None:
    machine = shm_machine(tmp_path, 102_400)
    assert set_shm(machine, 50, check=True).changed
    assert set_shm(machine, 50, check=False).data["bytes"] == 512_000
    assert not set_shm(machine, 50, check=False).changed

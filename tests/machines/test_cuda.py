"""The stage cuda with the distribution's real toolkit; a source that the operator has set up: test_debian12.py."""

from __future__ import annotations

import pytest
from sim.machine.machine import Machine
from tests.machines.conftest import Play, Played

pytestmark = pytest.mark.machine

CUDA = "playbooks/cuda.yml"


def changed(played: Played) -> int:
    assert played.rc == 0, played.stdout[-3000:]
    return sum(counts["changed"] for counts in played.recap.values())


def test_the_toolkit_of_the_stack_compiles_for_the_card(finished: Machine) -> None:
    assert "release 12.4" in finished.ssh(["nvcc", "--version"]).stdout
    finished.ssh("echo '__global__ void k(int *x) { x[threadIdx.x] += 1; }' > /tmp/k.cu")
    finished.ssh("cd /tmp && nvcc -cubin -arch=sm_90 -o k.cubin k.cu")
    sass = finished.ssh("cuobjdump -sass /tmp/k.cubin").stdout
    assert "code for sm_90" in sass
    assert "EXIT" in sass


def test_the_archive_is_the_servers_own_mirror(finished: Machine) -> None:
    ours = finished.ssh(["cat", "/etc/apt/sources.list.d/gpuready-debian-non-free.sources"]).stdout
    uri = next(line.split()[1] for line in ours.splitlines() if line.startswith("URIs:"))
    theirs = finished.ssh("cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -v '^#'").stdout
    assert theirs.count(uri) > 1
    assert "Components: contrib non-free\n" in ours


def test_no_driver_comes_along(finished: Machine) -> None:
    packages = finished.ssh(["dpkg-query", "-Wf", "${Package}\\n"]).stdout.split()
    assert [name for name in packages if name.startswith(("nvidia-driver", "nvidia-kernel", "nvidia-dkms"))] == []


def test_second_run_changes_nothing(finished: Machine, play: Play) -> None:
    assert changed(play(finished, CUDA)) == 0


def test_a_toolkit_of_another_version_is_refused(finished: Machine, play: Play) -> None:
    played = play(finished, CUDA, {"cuda_version": "11.8"})
    assert played.rc != 0
    said = " ".join(played.stdout.split())
    assert "takes CUDA 11.8 from Debian's own archive: the archive of debian 13 holds 12.4" in said

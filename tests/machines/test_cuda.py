"""The stage cuda: the distribution's real toolkit, and a source that the operator has set up."""

from __future__ import annotations

import pytest
from sim.machine.machine import Machine
from tests.machines.conftest import Play, Played

pytestmark = pytest.mark.machine

CUDA = "playbooks/cuda.yml"

# A stand-in with the name and the place of NVIDIA's package: it shows the way of the packages, not CUDA.
STAND_IN = r"""
set -e
mkdir -p /root/repo/tree/DEBIAN /root/repo/tree/usr/local/cuda-12.8/bin
cd /root/repo
cat > tree/DEBIAN/control <<'END'
Package: cuda-toolkit-12-8
Version: 12.8.1-1
Architecture: amd64
Maintainer: a test <test@localhost>
Description: stand-in of NVIDIA's package
END
cat > tree/usr/local/cuda-12.8/bin/nvcc <<'END'
#!/bin/sh
if [ "$1" = --version ]; then echo 'Cuda compilation tools, release 12.8, V12.8.93'; exit; fi
while [ "$1" != -o ]; do shift; done
printf '\177ELF' > "$2"
END
chmod 755 tree/usr/local/cuda-12.8/bin/nvcc
dpkg-deb --build --root-owner-group tree stand-in.deb
{
  dpkg-deb --field stand-in.deb
  echo "Filename: ./stand-in.deb"
  echo "Size: $(stat -c %s stand-in.deb)"
  echo "SHA256: $(sha256sum stand-in.deb | cut -d' ' -f1)"
} > Packages
mkdir -p /srv/stand-in-repo && cp stand-in.deb Packages /srv/stand-in-repo
echo 'deb [trusted=yes] file:/srv/stand-in-repo ./' > /etc/apt/sources.list.d/stand-in.list
"""


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


@pytest.mark.long
def test_a_source_that_the_operator_has_set_up(finished_clone: Machine, play: Play) -> None:
    wanted = {"cuda_source": "configured", "cuda_packages": ["cuda-toolkit-12-8"], "cuda_version": "12.8"}
    refused = play(finished_clone, CUDA, wanted)
    assert refused.rc != 0
    said = " ".join(refused.stdout.split())
    assert "no package source of the server offers cuda-toolkit-12-8; add NVIDIA's CUDA repository" in said
    finished_clone.ssh(STAND_IN)
    assert changed(play(finished_clone, CUDA, wanted)) > 0
    assert "cuda-12.8/bin/nvcc" in finished_clone.ssh(["cat", "/var/lib/gpuready/cuda.json"]).stdout
    assert changed(play(finished_clone, CUDA, wanted)) == 0

"""A stand-in for NVIDIA's CUDA repository: a signed apt repository with NVIDIA's package names and versions.

The compiler in it is real: CUDA 12.4's nvcc from Debian 13's archive, laid out as NVIDIA's packages do below
/usr/local/cuda-12.4. It is made by tests, for simulated machines; NVIDIA's own repository is not asked.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tempfile
from email.utils import formatdate
from pathlib import Path

from sim.machine import packages
from sim.machine.common import run
from sim.machine.machine import Machine

HOME = "usr/local/cuda-12.4"
PLACE = "/srv/standin-cuda-repository"
KEYRING = "/usr/share/keyrings/standin-cuda-archive-keyring.gpg"
SOURCE = "/etc/apt/sources.list.d/standin-cuda.sources"

# NVIDIA's meta package and the package of its compiler, with the dependencies that matter here.
CONTROL = {
    "cuda-toolkit-12-4": ("12.4.1-1", "cuda-nvcc-12-4 (>= 12.4.131)"),
    "cuda-nvcc-12-4": ("12.4.131-1", "build-essential"),
}
# From where Debian has them to where nvcc of NVIDIA's packages looks.
PROGRAMS = {
    "usr/lib/nvidia-cuda-toolkit/bin/nvcc": "bin/nvcc",
    "usr/lib/nvidia-cuda-toolkit/bin/cicc": "nvvm/bin/cicc",
    "usr/lib/nvidia-cuda-toolkit/libdevice/libdevice.10.bc": "nvvm/libdevice/libdevice.10.bc",
    **{f"usr/bin/{name}": f"bin/{name}" for name in ("cudafe++", "fatbinary", "nvlink", "ptxas", "cuobjdump")},
}
NOT_NEEDED = ("cub", "cuda", "cuda-gdb", "nv", "thrust")
"""Folders of headers that a plain kernel does not include."""
PROFILE = """\
TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
"""


def offer(machine: Machine, toolkit: Path) -> None:
    """Make the repository from a root with Debian 13's toolkit, and set it up on a machine as an operator would."""
    packages.install(packages.missing({"gpg": "gpg", "dpkg-deb": "dpkg"}))
    with tempfile.TemporaryDirectory(prefix="standin-cuda-") as folder:
        work = Path(folder)
        repository = work / "repository"
        repository.mkdir()
        for name in CONTROL:
            _package(name, work / name, repository, toolkit)
        _index(repository)
        keyring = _sign(repository, work / "gnupg")
        _place(machine, repository, keyring)


def _package(name: str, tree: Path, repository: Path, toolkit: Path) -> None:
    version, depends = CONTROL[name]
    control = tree / "DEBIAN/control"
    control.parent.mkdir(parents=True)
    control.write_text(
        f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: a test <test@localhost>\n"
        f"Depends: {depends}\nDescription: stand-in of NVIDIA's package, with Debian 13's files\n"
    )
    if name.startswith("cuda-nvcc"):
        _compiler(toolkit, tree / HOME)
    file = repository / f"{name}_{version}_standin_amd64.deb"
    run(["dpkg-deb", "-Zgzip", "-z1", "--root-owner-group", "--build", str(tree), str(file)])


def _compiler(toolkit: Path, home: Path) -> None:
    for source, target in PROGRAMS.items():
        (home / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(toolkit / source, home / target)
    (home / "bin/nvcc.profile").write_text(PROFILE)
    listed = (toolkit / "var/lib/dpkg/info/nvidia-cuda-dev:amd64.list").read_text().splitlines()
    for name in listed:
        inside = Path(name.removeprefix("/usr/include/"))
        file = toolkit / name.lstrip("/")
        if name.startswith("/usr/include/") and inside.parts[0] not in NOT_NEEDED and file.is_file():
            (home / "include" / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, home / "include" / inside)


def _sums(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _index(repository: Path) -> None:
    """Write Packages and Release of a flat repository, as NVIDIA's is."""
    stanzas = [
        f"{run(['dpkg-deb', '--field', str(deb)]).stdout}Filename: ./{deb.name}\nSize: {deb.stat().st_size}\n"
        f"SHA256: {_sums(deb)}\n"
        for deb in sorted(repository.glob("*.deb"))
    ]
    (repository / "Packages").write_text("\n".join(stanzas))
    (repository / "Packages.gz").write_bytes(gzip.compress((repository / "Packages").read_bytes()))
    files = [repository / name for name in ("Packages", "Packages.gz")]
    sums = "".join(f" {_sums(file)} {file.stat().st_size} {file.name}\n" for file in files)
    (repository / "Release").write_text(
        f"Origin: standin\nLabel: standin\nArchitectures: amd64\nDate: {formatdate(usegmt=True)}\nSHA256:\n{sums}"
    )


def _sign(repository: Path, home: Path) -> Path:
    """Sign the repository with a key made for it; return the public key."""
    home.mkdir(mode=0o700)
    gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--yes", "--pinentry-mode", "loopback"]
    env = {**os.environ, "LC_ALL": "C"}
    try:
        run([*gpg, "--passphrase", "", "--quick-gen-key", "stand-in repository", "rsa3072", "sign", "never"], env=env)
        run([*gpg, "--clearsign", "-o", str(repository / "InRelease"), str(repository / "Release")], env=env)
        keyring = home / "keyring.gpg"
        run([*gpg, "--export", "-o", str(keyring)], env=env)
    finally:
        run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False)
    return keyring


def _place(machine: Machine, repository: Path, keyring: Path) -> None:
    root = machine.root
    shutil.copytree(repository, root / PLACE.lstrip("/"))
    shutil.copy(keyring, root / KEYRING.lstrip("/"))
    (root / KEYRING.lstrip("/")).chmod(0o644)
    (root / SOURCE.lstrip("/")).write_text(f"Types: deb\nURIs: file:{PLACE}\nSuites: ./\nSigned-By: {KEYRING}\n")

"""Debian's own nvidia-smi, unmodified: fetched from non-free into .cache, never kept with the sources."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from sim.machine import sources

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE = CHECKOUT / ".cache/nvidia-smi"
SUITES = {"trixie": "550", "bookworm": "535"}
"""Debian's releases, each with the branch of NVIDIA's driver that its nvidia-smi is of."""
MIRROR = "http://deb.debian.org/debian"
SECONDS = 120


class UnobtainableError(Exception):
    """Why there is no nvidia-smi here, in one sentence."""


def fetch(suite: str) -> Path:
    """Return the program of a Debian release; download it the first time."""
    if platform.machine() != "x86_64":
        raise UnobtainableError(f"this machine is a {platform.machine()}, not an x86_64")
    program = CACHE / suite / "nvidia-smi"
    if program.exists():
        return program
    if shutil.which("apt-get") is None:
        raise UnobtainableError("this machine has no apt-get")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        root = Path(scratch)
        settings = _private_apt(root, suite)
        _run(["apt-get", "-q", "update"], settings, root)
        _run(["apt-get", "-q", "download", "nvidia-smi"], settings, root)
        _run(["dpkg-deb", "-x", str(next(root.glob("nvidia-smi_*.deb"))), "unpacked"], settings, root)
        program.parent.mkdir(exist_ok=True)
        (root / "unpacked/usr/lib/nvidia/current/nvidia-smi").replace(program)
    return program


def _private_apt(root: Path, suite: str) -> Path:
    """Make an apt that knows one release's non-free alone, and touches nothing of this machine's."""
    mirror = sources.host_mirrors().get("main", MIRROR)
    (root / "lists/partial").mkdir(parents=True)
    (root / "archives/partial").mkdir(parents=True)
    (root / "status").touch()
    (root / "sources.list").write_text(f"deb [arch=amd64 signed-by={sources.KEYRING}] {mirror} {suite} non-free\n")
    settings = root / "apt.conf"
    settings.write_text(
        sources.apt_settings()
        + f'Dir::State::Lists "{root}/lists";\n'
        + f'Dir::State::status "{root}/status";\n'
        + f'Dir::Cache "{root}";\n'
        + f'Dir::Etc::sourcelist "{root}/sources.list";\n'
        + 'Dir::Etc::sourceparts "-";\n'
        + 'APT::Architecture "amd64";\n'
        + 'APT::Sandbox::User "root";\n'
        + 'APT::Update::Error-Mode "any";\n'
        + 'Acquire::Languages "none";\n'
        + 'Acquire::Retries "1";\n'
    )
    return settings


def _run(command: list[str], settings: Path, where: Path) -> None:
    environment = {**os.environ, "APT_CONFIG": str(settings), "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(
            command, cwd=where, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UnobtainableError(f"{command[0]} {command[-1]} took more than {SECONDS} s") from None
    if done.returncode != 0:
        told = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason was told"]
        raise UnobtainableError(f"{' '.join(command)}: {told[-1]}")

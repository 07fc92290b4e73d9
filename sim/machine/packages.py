"""Programs that the builder needs outside, and the packages that bring them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from sim.machine import sources
from sim.machine.common import CANNOT, SimError, run

NEEDED = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "mkfs.btrfs": "btrfs-progs",
    "nft": "nftables",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "unshare": "util-linux",
    # The stand-in for NVIDIA's library is compiled here.
    "gcc": "gcc",
    "/usr/include/stdio.h": "libc6-dev",
    sources.KEYRING: "debian-archive-keyring",
}


def missing(more: Mapping[str, str] | None = None) -> list[str]:
    """Return the packages that are not here yet; `more` are programs that the caller needs as well."""
    search = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    return sorted(
        {
            package
            for thing, package in {**NEEDED, **(more or {})}.items()
            if not (Path(thing).exists() if thing.startswith("/") else shutil.which(thing, path=search))
        }
    )


def install(names: list[str], log: Path | None = None) -> None:
    """Install packages with apt."""
    if not names:
        return
    if shutil.which("apt-get") is None:
        raise SimError(
            f"these packages are missing and this is not a Debian or Ubuntu: {', '.join(names)}", "install them", CANNOT
        )
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update", "-q"], env=env, log=log)
    run(["apt-get", "install", "-y", "-q", "--no-install-recommends", *names], env=env, log=log)

"""What befalls a run from outside: the network, the package mirror, the disk, the package lock, the clock."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager

from sim.machine.common import run
from sim.machine.machine import Machine

LARGE = "12g"
_numbers = itertools.count()


@contextmanager
def network_cut(machine: Machine) -> Iterator[None]:
    """Let no packet to the machine or from it, as when a cable is pulled: nobody is told."""
    with _rules(
        [
            f"{hook} {{ type filter hook {hook} priority -300; ip daddr {machine.address} drop; ip saddr"
            f" {machine.address} drop; }}"
            for hook in ("input", "output", "forward")
        ]
    ):
        yield


@contextmanager
def mirror_cut(machine: Machine, after_bytes: int) -> Iterator[None]:
    """Cut the machine off from everything but us once it has received that much; its connections end at once."""
    address = machine.address
    with _rules(
        [
            f"forward {{ type filter hook forward priority -300;"
            f' ip daddr {address} quota name "cut" drop;'
            f' ip saddr {address} meta l4proto tcp quota name "cut" reject with tcp reset;'
            f' ip saddr {address} quota name "cut" reject; }}'
        ],
        f"quota cut {{ over {after_bytes} bytes }}",
    ):
        yield


@contextmanager
def _rules(chains: list[str], other: str = "") -> Iterator[None]:
    table = f"gpuready_outage_{os.getpid()}_{next(_numbers)}"
    text = "\n".join([f"table ip {table} {{", other, *(f"chain {chain}" for chain in chains), "}"])
    run(["nft", "-f", "-"], stdin=text)
    try:
        yield
    finally:
        run(["nft", "delete", "table", "ip", table])


@contextmanager
def small_disk(machine: Machine, folder: str, kib: int) -> Iterator[None]:
    """Lay a filesystem with the folder's content over the folder, with little room; it stays, and is large later."""
    lay_disk(machine, folder)
    with full_disk(machine, folder, kib):
        yield


def lay_disk(machine: Machine, folder: str) -> None:
    """Lay a large filesystem with the folder's content over the folder."""
    aside = f"/root/aside{next(_numbers)}"
    machine.ssh(
        f"mkdir {aside} && cp -a {folder}/. {aside} && mount -t tmpfs -o size={LARGE},mode=0755 tmpfs {folder}"
        f" && cp -a {aside}/. {folder}"
    )


@contextmanager
def full_disk(machine: Machine, folder: str, kib: int) -> Iterator[None]:
    """Leave little room on the filesystem that was laid over a folder, as when somebody else fills it."""
    used = f"$(df --output=used -k {folder} | tail -1)"
    machine.ssh(f"mount -o remount,size=$(( {used} + {kib} ))k {folder}")
    try:
        yield
    finally:
        machine.ssh(f"mount -o remount,size={LARGE} {folder}")


LOCKER = (
    "import fcntl, time; file = open('/var/lib/dpkg/lock-frontend', 'w'); fcntl.lockf(file, fcntl.LOCK_EX);"
    " time.sleep({seconds})"
)


def take_package_lock(machine: Machine, seconds: float) -> None:
    """Have another program of the server hold the package lock for some time."""
    words = [
        "systemd-run",
        "--quiet",
        "--unit=other-packager",
        "/usr/bin/python3",
        "-c",
        LOCKER.format(seconds=seconds),
    ]
    machine.ssh(words)
    machine.ssh("until grep -q . /proc/locks && systemctl is-active -q other-packager; do sleep 0.1; done")


def drop_package_lock(machine: Machine) -> None:
    """End the program that holds the package lock."""
    machine.ssh("systemctl stop other-packager")

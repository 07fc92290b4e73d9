"""Virtual machines for tests: `vm` (with disks that have serials), `share` (an NFS server), `play` (against the vm)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sim.machine.common import CHECKOUT
from tests.vm.machine import PROGRAMS, Disk, VirtualMachine
from tests.vm.nfs import Server

HOST = "h100-sg-01"
DISKS = (
    Disk("VIRT-0001"),
    Disk("NVME0002", "nvme"),
    Disk("SCSI0003", "scsi-hd", made_by=("mke2fs", "-q", "-t", "ext4", "-L", "theirs")),
    Disk("TINY-0004", size="1G"),
    Disk(""),
)


@pytest.fixture(scope="module")
def vm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualMachine]:
    """A booted machine with blank disks on three buses, one of which has no serial."""
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if missing or os.geteuid():
        pytest.skip(f"a virtual machine needs root here, and the packages {', '.join(missing) or 'that are there'}")
    machine = VirtualMachine(tmp_path_factory.mktemp("vm"), DISKS)
    try:
        machine.start()
        yield machine
    finally:
        machine.pull_the_plug()


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An NFS server of this machine."""
    server = Server(tmp_path_factory.mktemp("nfs"))
    yield server
    server.stop()


@pytest.fixture
def play(vm: VirtualMachine, tmp_path: Path) -> Callable[..., tuple[str, dict[str, int]]]:
    """Run a playbook on the vm as the simulated server of inventories/sim; give its output and recap."""

    def run(playbook: str, *args: str, **variables: Any) -> tuple[str, dict[str, int]]:
        inventory = tmp_path / "inventory"
        shutil.rmtree(inventory, ignore_errors=True)
        inventory.mkdir()
        for entry in (CHECKOUT / "inventories/sim").iterdir():
            if entry.name != "hosts.yml":
                (inventory / entry.name).symlink_to(entry)
        connection = {
            "ansible_host": "127.0.0.1",
            "ansible_port": vm.port,
            "ansible_user": "root",
            "ansible_ssh_common_args": " ".join(vm.ssh_options()[4:]),
            "ansible_ssh_private_key_file": str(vm.image / "key"),
        }
        groups = {HOST.rpartition("-")[0]: {"hosts": {HOST: {**connection, **variables}}}}
        (inventory / "hosts.yml").write_text(json.dumps({"all": {"children": groups}}))
        env = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
        env |= {"ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg"), "PYTHONPATH": str(CHECKOUT / "src")}
        words = [str(CHECKOUT / ".venv/bin/ansible-playbook"), "-i", str(inventory), f"playbooks/{playbook}.yml", *args]
        done = subprocess.run(
            words,
            cwd=CHECKOUT,
            env={**env, "ANSIBLE_NOCOLOR": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        line = next((one for one in done.stdout.splitlines() if one.startswith(f"{HOST} ") and " ok=" in one), "")
        counts = {key: int(count) for key, _, count in (pair.partition("=") for pair in line.split() if "=" in pair)}
        return done.stdout + done.stderr, {"rc": done.returncode, **counts}

    return run

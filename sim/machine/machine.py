"""One simulated machine: made, booted, reached over SSH, stopped, saved, destroyed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sim.machine import apt_cache, cgroups, identity, network, pool, process
from sim.machine.common import FAILED, REFUSED, Sim, SimError, read_json, run, write_atomically
from sim.machine.servers import KNOWN

NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
FREE_PLACES = range(20, 50)
SSH_SECONDS, BOOT_SECONDS, STOP_SECONDS = 90.0, 240.0, 40.0
KEEPER = (
    'for place in $PLACES; do echo $$ > "$place/cgroup.procs"; done; unset PLACES; trap : TERM; code=133;'
    ' while [ "$code" -eq 133 ]; do "$@"; code=$?; done; exit "$code"'
)
"""Holds a machine in its cgroups; with --keep-unit, nspawn ends with 133 on a reboot and wants to be run again."""


@dataclass
class Record:
    """What is kept about a machine between commands."""

    name: str
    address: str
    image: str
    suite: str
    host_keys: list[str]
    pid: int = 0
    started: int = 0


class Machine:
    """A machine of a simulation, by its name."""

    def __init__(self, sim: Sim, name: str) -> None:
        if not NAME.fullmatch(name):
            raise SimError(
                f"{name!r} cannot be a machine's name",
                "take lower-case letters, digits and dashes, a letter first",
                REFUSED,
            )
        self.sim, self.name = sim, name

    @property
    def root(self) -> Path:
        """Return the machine's root folder in the pool."""
        return self.sim.pool / "machines" / self.name

    @property
    def _file(self) -> Path:
        return self.sim.state / "machines" / f"{self.name}.json"

    @property
    def log(self) -> Path:
        """Return the log of the machine's console."""
        return self.sim.log / f"{self.name}.log"

    def exists(self) -> bool:
        """Say whether the machine has been made."""
        return bool(read_json(self._file))

    @property
    def record(self) -> Record:
        """Return what is known about the machine."""
        data = read_json(self._file)
        if not data:
            raise SimError(
                f"there is no machine {self.name}", f"make it with `./scripts/gpusim create {self.name}`", REFUSED
            )
        return Record(**data)

    @property
    def address(self) -> str:
        """Return the machine's IPv4 address."""
        return self.record.address

    def status(self) -> str:
        """Return `running`, `stopped` or `absent`."""
        if not self.exists():
            return "absent"
        record = self.record
        return "running" if process.is_same(record.pid, record.started) else "stopped"

    def create(self, image: str, suite: str, address: str = "") -> None:
        """Make the machine from an image. Hold the lock, with the pool up."""
        source = self.sim.pool / "images" / image
        if self.exists():
            raise SimError(f"the machine {self.name} exists", f"`./scripts/gpusim destroy {self.name}` first", REFUSED)
        if not pool.is_subvolume(source):
            known = ", ".join(pool.images(self.sim)) or "none"
            raise SimError(f"there is no image {image}", f"there are: {known}", REFUSED)
        address = self._allot(address)
        building = pool.scratch(self.sim, self.name)
        pool.snapshot(self.sim, source, building)
        keys = identity.give(self.sim, building, self.name, address)
        pool.delete(self.sim, self.root)
        building.rename(self.root)
        self._save(Record(self.name, address, image, suite, keys))
        identity.write_known_hosts(self.sim)

    def _allot(self, wanted: str) -> str:
        taken = {other.address: other.name for other in (machine.record for machine in machines(self.sim))}
        if wanted:
            if wanted in taken:
                raise SimError(
                    f"the address {wanted} belongs to the machine {taken[wanted]}", "give another one", REFUSED
                )
            return wanted
        if self.name in KNOWN:
            return self.sim.address(KNOWN[self.name].place)
        for place in FREE_PLACES:
            if self.sim.address(place) not in taken:
                return self.sim.address(place)
        raise SimError(
            "no address is left for another machine", "destroy one, `./scripts/gpusim list` shows them", REFUSED
        )

    def _save(self, record: Record) -> None:
        write_atomically(self._file, json.dumps(asdict(record), indent=2) + "\n")

    def start(self) -> None:
        """Boot the machine; nothing to do when it runs. The network and the pool must be up."""
        record = self.record
        if self.status() == "running":
            return
        self._after_the_end()
        network.forget(self.sim, record.address)
        apt_cache.harvest_all(self.sim)
        argv = [
            "sh",
            "-c",
            KEEPER,
            f"gpuready-sim-{self.name}",
            "systemd-nspawn",
            "--quiet",
            f"--directory={self.root}",
            "--boot",
            "--register=no",
            f"--network-bridge={self.sim.bridge}",
            # Links to the bridge are named after the machine: two simulations must not collide.
            f"--machine={'-'.join(filter(None, (self.name, self.sim.tag)))}",
            f"--hostname={self.name}",
            "--resolv-conf=off",
            "--timezone=off",
            "--link-journal=no",
            f"--bind={apt_cache.give(record.suite, self.name)}:/var/cache/apt/archives",
        ]
        # A real server's /tmp is its own; nspawn's would be a small tmpfs.
        env = {"PATH": os.environ.get("PATH", os.defpath), "SYSTEMD_NSPAWN_TMPFS_TMP": "0"}
        if cgroups.has_cgroup2():
            env["SYSTEMD_NSPAWN_UNIFIED_HIERARCHY"] = "1"
        if not cgroups.systemd_outside():
            argv.append("--keep-unit")
            env["PLACES"] = " ".join(map(str, cgroups.make(self.sim.table, self.name)))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            started = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd="/", start_new_session=True
            )
        record.pid, record.started = started.pid, process.start_time(started.pid)
        self._save(record)

    def wait_for_ssh(self, seconds: float = SSH_SECONDS) -> None:
        """Wait until a command runs over SSH."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.status() != "running":
                break
            if process.port_open(self.address, 22) and self.ssh(["true"], check=False).returncode == 0:
                return
            time.sleep(0.2)
        last = process.last_line(self.log)
        why = "does not answer over SSH" if self.status() == "running" else "ended while it booted"
        raise SimError(f"{self.name} {why}; its console's last line is: {last}", f"read {self.log}", FAILED)

    def wait_until_booted(self, seconds: float = BOOT_SECONDS) -> str:
        """Wait for the end of the boot; return systemd's word for the state, `running` when all is well."""
        self.wait_for_ssh(seconds)
        return self.ssh(["systemctl", "is-system-running", "--wait"], check=False, timeout=seconds).stdout.strip()

    def ssh_argv(self, command: Sequence[str] = ()) -> list[str]:
        """Return the ssh command line that reaches the machine as root."""
        return identity.ssh_argv(self.sim, self.address, command)

    def ssh(
        self, command: Sequence[str] | str, *, check: bool = True, timeout: float | None = 120, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command (a list is quoted; a string is shell) on the machine."""
        words = [command] if isinstance(command, str) else command
        argv = identity.ssh_argv(self.sim, self.address, words, quote=not isinstance(command, str))
        return run(argv, check=check, timeout=timeout, stdin=stdin or "")

    def boot_id(self) -> str:
        """Return the id of the machine's current boot."""
        return self.ssh(["cat", "/proc/sys/kernel/random/boot_id"]).stdout.strip()

    def reboot(self, seconds: float = SSH_SECONDS) -> None:
        """Reboot from inside and wait until the machine has another boot id and answers."""
        before = self.boot_id()
        self.ssh(["systemctl", "reboot"], check=False)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.3)
            if not process.port_open(self.address, 22):
                continue
            now = self.ssh(["cat", "/proc/sys/kernel/random/boot_id"], check=False, timeout=20)
            if now.returncode == 0 and now.stdout.strip() != before:
                return
        raise SimError(
            f"{self.name} did not come back from its reboot within {seconds:.0f} s", f"read {self.log}", FAILED
        )

    def kill(self) -> None:
        """Pull the plug: kill the processes that hold the machine, without a word to what runs inside."""
        record = self.record
        process.end(record.pid, record.started, signal.SIGKILL, STOP_SECONDS)
        self._after_the_end()

    def _after_the_end(self) -> None:
        """Leave nothing of a machine that has ended: no process, no cgroup, no link to the bridge."""
        file = self.root / "etc/machine-id"
        process.end_leaders(file.read_text() if file.exists() else "", STOP_SECONDS)
        if not cgroups.systemd_outside():
            cgroups.remove(self.sim.table, self.name)

    def stop(self) -> None:
        """Shut the machine down in order; pull the plug when that takes too long."""
        record = self.record
        if not process.end(record.pid, record.started, signal.SIGTERM, STOP_SECONDS):
            process.end(record.pid, record.started, signal.SIGKILL, STOP_SECONDS)
        if self.status() == "running":
            raise SimError(f"{self.name} (process {record.pid}) does not end", f"read {self.log}", FAILED)
        self._after_the_end()
        apt_cache.harvest(record.suite, self.name)

    def save_as_image(self, image: str) -> None:
        """Stop the machine and keep its state as a read-only image."""
        if not NAME.fullmatch(image):
            raise SimError(
                f"{image!r} cannot be an image's name", "take lower-case letters, digits and dashes", REFUSED
            )
        if pool.is_subvolume(self.sim.pool / "images" / image):
            raise SimError(f"the image {image} exists", "give another name", REFUSED)
        self.stop()
        building = pool.scratch(self.sim, image)
        pool.snapshot(self.sim, self.root, building)
        pool.keep_image(self.sim, building, image)

    def destroy(self) -> None:
        """Stop the machine and remove all that it was. Hold the lock."""
        if self.exists():
            self.stop()
            apt_cache.take_away(self.record.suite, self.name)
        pool.delete(self.sim, self.root)
        self._file.unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)
        identity.write_known_hosts(self.sim)


def machines(sim: Sim) -> list[Machine]:
    """Return the machines that have been made."""
    return [Machine(sim, file.stem) for file in sorted((sim.state / "machines").glob("[a-z]*.json"))]


def ready(sim: Sim) -> None:
    """Bring the pool and the network up. Hold the lock."""
    pool.up(sim)
    network.up(sim)
    identity.make_key(sim)

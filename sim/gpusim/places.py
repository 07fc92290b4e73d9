"""Where a simulated server's hardware is kept and its processes run: a machine, or a folder of `gpusim run`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from sim.gpusim import checking
from sim.hardware import state_file
from sim.machine import pool, process
from sim.machine.common import CANNOT, REFUSED, Sim, SimError, read_json, write_atomically
from sim.machine.machine import Machine

IDLE = "import signal; signal.pause()"
"""What a process does that only holds a GPU."""


class Place(Protocol):
    """A simulated server as the hardware verbs see it."""

    title: str
    file: Path
    """Its state file."""

    def process_name(self, pid: int) -> str | None:
        """Return the name of a process of the server; None when there is no such process."""

    def start_process(self, unit: str) -> int:
        """Start a process that does nothing, under that name, and return its id on the server."""

    def stop_process(self, unit: str) -> None:
        """End it; nothing to do is fine."""

    def started(self) -> list[str]:
        """Return the names of the processes that may still be there after the hardware has booted."""

    def log_kernel(self, line: str) -> str | None:
        """Write a line of the kernel's where one would look for it; return why not, if so."""


def _name(proc: Path, pid: int) -> str | None:
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")
        name = words[0].decode(errors="replace") or (proc / str(pid) / "comm").read_text().strip()
    except OSError:
        return None
    return re.sub(r"[^ -~]", "?", name)


class OnMachine:
    """A machine of the simulation. Its file is edited in its root folder, also while it is stopped."""

    def __init__(self, sim: Sim, name: str) -> None:
        if os.geteuid() != 0:
            raise SimError(f"the files of {name} are root's", "run this as root, e.g. with sudo", CANNOT)
        self.title = name
        self.machine = Machine(sim, name)
        _ = self.machine.record
        if not pool.is_up(sim):
            with sim.lock():
                pool.up(sim)
        self.file = self.machine.root / state_file.PATH.lstrip("/")

    def process_name(self, pid: int) -> str | None:
        """Look from outside, through the machine's first process: nothing needs to answer there."""
        leaders = process.leaders((self.machine.root / "etc/machine-id").read_text())
        return next((_name(Path(f"/proc/{leader}/root/proc"), pid) for leader in leaders), None)

    def _need_it_running(self, what: str) -> None:
        if self.machine.status() != "running":
            raise SimError(
                f"{self.title} is stopped and {what}", f"boot it with `./scripts/gpusim start {self.title}`", REFUSED
            )

    def start_process(self, unit: str) -> int:
        """Start it as a transient unit, so that systemd knows it."""
        self._need_it_running("a process needs a running machine")
        run = f"systemd-run --quiet --collect --unit={unit} /usr/bin/python3 -c {shlex.quote(IDLE)}"
        said = self.machine.ssh(f"{run} && systemctl show --property=MainPID --value {unit}").stdout
        return int(said)

    def stop_process(self, unit: str) -> None:
        """End the transient unit."""
        if self.machine.status() == "running":
            self.machine.ssh(["systemctl", "stop", unit], check=False)

    def started(self) -> list[str]:
        """Return none: a boot of the machine ends them."""
        return []

    def log_kernel(self, line: str) -> str | None:
        """Write it into the journal as the kernel's word; /dev/kmsg is the outside's and is not there."""
        if self.machine.status() != "running":
            return f"{self.title} is stopped, so its journal does not tell"
        self.machine.ssh(["systemd-cat", "--identifier=kernel", "--priority=err", "echo", line])
        return None


class InFolder:
    """A folder that `gpusim run --state` uses; its processes are this very machine's."""

    def __init__(self, folder: Path) -> None:
        self.title = str(folder)
        self.folder = folder
        self.file = folder / "gpus.conf"
        if not self.file.is_file():
            raise SimError(
                f"{folder} holds no simulated server",
                f"make one with `./scripts/gpusim run --state {shlex.quote(str(folder))} --preset PRESET -- true`",
                REFUSED,
            )

    def process_name(self, pid: int) -> str | None:
        """Return the process's name here."""
        return _name(Path("/proc"), pid)

    def _record(self, unit: str) -> Path:
        return self.folder / f"{unit}.json"

    def start_process(self, unit: str) -> int:
        """Start it in a session of its own, and note who it is."""
        self.stop_process(unit)  # one that a boot of the hardware has left over
        started = subprocess.Popen(
            [sys.executable, "-c", IDLE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        record = {"pid": started.pid, "started": process.start_time(started.pid)}
        write_atomically(self._record(unit), json.dumps(record) + "\n")
        return started.pid

    def stop_process(self, unit: str) -> None:
        """End that very process, never another one with the same id."""
        record = read_json(self._record(unit))
        process.end(int(record.get("pid", 0)), int(record.get("started", 0)), signal.SIGKILL, 5.0)
        self._record(unit).unlink(missing_ok=True)

    def started(self) -> list[str]:
        """Return those that are noted; a boot of the hardware alone ends none of them."""
        return sorted(record.stem for record in self.folder.glob("gpusim-*.json"))

    def log_kernel(self, line: str) -> str | None:
        """Say that the kernel here is not simulated."""
        return f"the kernel log is this machine's own; a server would say: {line}"


def find(name: str, folder: str) -> Place:
    """Return the place that a command line names; exactly one of both is given."""
    return InFolder(Path(folder).resolve()) if folder else OnMachine(Sim.from_environment(), name)


def read(place: Place) -> state_file.State:
    """Return the state of the hardware there."""
    if not place.file.exists():
        raise SimError(f"{place.title} has no simulated driver ({place.file} is missing)", "", REFUSED)
    refuse_damaged(place.file)
    try:
        return state_file.read(place.file)
    except state_file.StateError as problem:
        raise _damaged(place.file, str(problem)) from None


def refuse_damaged(file: Path) -> None:
    """Refuse a file that the library itself cannot read."""
    problem = checking.problem(file)
    if problem:
        raise _damaged(file, problem)


def _damaged(file: Path, problem: str) -> SimError:
    return SimError(f"{file}: {problem}", "mend it, or make the server anew", REFUSED)


@contextlib.contextmanager
def changing(place: Place) -> Iterator[state_file.State]:
    """Give the state to be edited; it lands when the library's own reader accepts it, and not at all otherwise."""
    read(place)
    try:
        with state_file.change(place.file, checking.refuse_draft) as state:
            yield state
    except state_file.StateError as problem:
        raise SimError(f"{place.file}: {problem}", "nothing was changed", REFUSED) from None

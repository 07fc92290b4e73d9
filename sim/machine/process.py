"""Processes that outlive the command that started them: known by id and start time, ended by these alone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path


def start_time(pid: int, proc: Path = Path("/proc")) -> int:
    """Return when the process was started, in clock ticks since boot; 0 when there is none or it is dead."""
    try:
        stat = (proc / str(pid) / "stat").read_text()
    except OSError:
        return 0
    # The name, in parentheses, may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def is_same(pid: int, started: int, proc: Path = Path("/proc")) -> bool:
    """Say whether the process is alive and still the one that was recorded; ids are used again."""
    if pid <= 1 or started <= 0:
        return False
    with contextlib.suppress(ChildProcessError):
        # Our own dead child would else stay as a zombie for as long as we run.
        os.waitpid(pid, os.WNOHANG)
    return start_time(pid, proc) == started


def end(pid: int, started: int, how: signal.Signals, seconds: float) -> bool:
    """Signal the recorded process with its group and wait for its end; say whether it is gone."""
    if not is_same(pid, started):
        return True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, how)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not is_same(pid, started):
            return True
        time.sleep(0.05)
    return False


def port_open(address: str, port: int, seconds: float = 1.0) -> bool:
    """Say whether something answers on the port."""
    try:
        with socket.create_connection((address, port), timeout=seconds):
            return True
    except OSError:
        return False


NOISE = "Attempted to remove disk file system under"
"""nspawn's parting words wherever /run is no tmpfs."""


def last_line(path: Path) -> str:
    """Return the last line of a machine's log that says something."""
    if not path.exists():
        return "(none)"
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if NOISE not in line]
    return next((line.rstrip(".") for line in reversed(lines) if line), "(none)")


def leaders(machine_id: str, proc: Path = Path("/proc")) -> list[int]:
    """Return the first processes of machines with that machine-id: process 1 in a namespace of their own.

    A machine outlives the nspawn that was killed; it is then known by this alone.
    """
    found = []
    for entry in proc.glob("[0-9]*"):
        try:
            status = (entry / "status").read_text()
            spaces = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
            if len(spaces) > 1 and spaces[-1] == "1":
                here = (entry / "root/etc/machine-id").read_text()
                if here.strip() == machine_id.strip():
                    found.append(int(entry.name))
        except (OSError, StopIteration):
            continue
    return found


def end_leaders(machine_id: str, seconds: float) -> None:
    """Kill what is left of a machine; with its first process, the kernel ends all others in it."""
    end_at = time.monotonic() + seconds
    while machine_id and (left := leaders(machine_id)) and time.monotonic() < end_at:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)

"""One changing command at a time on a server.

Where a controller dies, the command that it had asked for goes on by itself. The next run's command waits for it here
instead of working beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from gpuready.outcome import Busy, Failure
from gpuready.serving.files import make_folder

LOCK = Path("/run/gpuready/turn.lock")
PATIENCE_SECONDS = 3.0
"""Waited for here; whoever asked tells the operator then, and asks again."""
ASK_AGAIN_SECONDS = 3600
"""Building an engine from a far index takes long."""
_PAUSE_SECONDS = 0.2
_held: list[int] = []


def descriptors() -> tuple[int, ...]:
    """Return what a child must inherit that may outlive us and writes what the next command would write."""
    return tuple(_held)


@contextlib.contextmanager
def taken(command: str, lock: Path | None = None) -> Iterator[None]:
    """Have this server for one command alone; the kernel gives it back however the command ends.

    Raises:
        Busy: when another command keeps it.
    """
    path = lock or LOCK
    make_folder(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        _wait(path, descriptor)
        text = json.dumps({"pid": os.getpid(), "command": command})
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
        _held.append(descriptor)
        yield
    finally:
        if descriptor in _held:
            _held.remove(descriptor)
        os.close(descriptor)


def _wait(path: Path, descriptor: int) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise _busy(path) from None
            time.sleep(_PAUSE_SECONDS)
        else:
            return


def _busy(path: Path) -> Busy:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        pid, command = int(holder["pid"]), str(holder["command"])
    except (OSError, ValueError, KeyError, TypeError):
        who = "another command of gpuready"
    else:
        who = f"`{command}` (pid {pid})"
        if not Path(f"/proc/{pid}").exists():
            who = f"what `{command}` left running when it was killed ({_openers(path) or 'unknown processes'})"
    what = f"{who} is at work on this server"
    return Busy(Failure("machine.busy", what, "", "wait for its end, then run again"), ASK_AGAIN_SECONDS)


def _openers(path: Path) -> str:
    """Name the other processes that hold the file open."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            pid = entry.parts[2]
            if pid != str(os.getpid()) and entry.readlink() == path and pid not in found:
                found.append(pid)
    return ", ".join(f"pid {pid}" for pid in found)

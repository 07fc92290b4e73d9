"""Halts the server part before everything that it changes on the disk; installed on a test machine, for one boot.

While `/run/halt-at-changes` exists, a `gpuready release apply` says in `/var/halt/at` that it stands still, and goes on
once `/var/halt/on` says the same. So the test outside sees the disk between any two of its steps.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time

ARMED = pathlib.Path("/run/halt-at-changes")
PLACE = pathlib.Path("/var/halt")
KEPT = ("/var/lib/gpuready", "/etc/systemd")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.rename", "os.symlink", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.chown", "shutil.rmtree")


class Halts:
    """Counts the steps; what it does itself is none."""

    def __init__(self) -> None:
        self.count = 0
        self.busy = False

    def __call__(self, event: str, args: tuple[object, ...]) -> None:
        if self.busy or not self._changes(event, args):
            return
        self.busy = True
        try:
            self._halt(f"{event} {args[:2]}")
        finally:
            self.busy = False

    def _changes(self, event: str, args: tuple[object, ...]) -> bool:
        if event == "subprocess.Popen":
            return "systemctl" in str(args[0])
        if event == "open":
            _, _, flags = args
            return isinstance(flags, int) and bool(flags & WRITES) and self._is_kept(args)
        return event in CHANGES and self._is_kept(args)

    @staticmethod
    def _is_kept(args: tuple[object, ...]) -> bool:
        return any(str(one).startswith(KEPT) for one in args[:2])

    def _halt(self, what: str) -> None:
        self.count += 1
        said = f"{self.count} {what}"
        (PLACE / "at.new").write_text(said)
        (PLACE / "at.new").rename(PLACE / "at")
        while ARMED.exists() and self._told() != str(self.count):
            time.sleep(0.002)

    @staticmethod
    def _told() -> str:
        try:
            return (PLACE / "on").read_text()
        except FileNotFoundError:
            return ""


if ARMED.exists() and {"release", "apply"} <= set(sys.orig_argv):
    sys.addaudithook(Halts())

"""A secret of a whole run is nowhere where others could read it: command lines, output, journal, files."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.machines.test_models import declared
from tests.machines.test_models import hub as hub

if TYPE_CHECKING:
    from sim.machine.machine import Machine
    from tests.standin_model_hub import StandinHub

pytestmark = [pytest.mark.machine, pytest.mark.long]

SECRET = "hf_Tr4ceableTokenOfThisTest"  # noqa: S105 - made up
FOLDERS = "/etc /opt /root /run /srv /tmp /usr/local /var /home"
# The secret comes by a file that only root reads, so that the watcher is not what it finds.
WATCHER = """
import os, sys, time
secret = open("/root/watched").read().strip().encode()
with open("/root/seen", "w") as seen:
    while True:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for name in ("cmdline", "environ"):
                try:
                    found = secret in open(f"/proc/{pid}/{name}", "rb").read()
                except OSError:
                    continue
                if found:
                    print(name, open(f"/proc/{pid}/cmdline").read().replace(chr(0), " "), file=seen, flush=True)
        time.sleep(0.02)
"""


@contextlib.contextmanager
def watched(machine: Machine) -> Iterator[None]:
    """Watch the command lines and environments of all processes of a machine."""
    machine.ssh("umask 077; cat > /root/watched", stdin=SECRET)
    machine.ssh("cat > /root/watcher.py", stdin=WATCHER)
    machine.ssh("systemd-run --unit watcher /usr/bin/python3 /root/watcher.py")
    try:
        yield
    finally:
        machine.ssh("systemctl stop watcher")


@contextlib.contextmanager
def watched_here() -> Iterator[list[str]]:
    """Watch the command lines of the controller's processes."""
    found: list[str] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    words = path.read_bytes()
                    if SECRET.encode() in words:
                        found.append(words.replace(b"\0", b" ").decode(errors="replace"))
            time.sleep(0.02)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def test_the_watcher_sees_a_command_line(finished_clone: Machine) -> None:
    with watched(finished_clone):
        finished_clone.ssh(f"sh -c 'sleep 1; true' {SECRET}")
    assert "cmdline" in finished_clone.ssh("cat /root/seen").stdout


def test_a_token_is_in_no_command_line_output_journal_or_file(
    finished_clone: Machine, play: Callable[..., Any], hub: StandinHub
) -> None:
    machine = finished_clone
    with watched(machine), watched_here() as here:
        played = play(machine, "site.yml", {**declared(hub), "models_token": SECRET}, "-vvv", "--diff")
    assert played.rc == 0
    assert SECRET not in played.stdout
    assert machine.ssh("cat /root/seen").stdout == ""
    assert here == []
    assert machine.ssh("journalctl --no-pager | grep -F -f /root/watched", check=False).stdout == ""
    kept = machine.ssh(f"grep -rlaF -f /root/watched {FOLDERS} --exclude-dir=proc 2>/dev/null", check=False).stdout
    assert kept.split() == ["/root/watched"]

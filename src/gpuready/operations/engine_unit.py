"""The engines' unit and those beside it, placed; a new list of devices is tried first, so that it locks no GPU out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpuready.operations import devices
from gpuready.operations.machine import Done, run_program
from gpuready.operations.service import place_unit
from gpuready.outcome import Change, Failure, Refusal
from gpuready.serving import units
from gpuready.serving.layout import Layout

POLICY = ("DevicePolicy=", "DeviceAllow=")
_OPEN = """
import os, sys
for path in sys.argv[1:]:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    except OSError as error:
        print(error.errno, path)
"""
_LOCKED = ("1", "13")  # EPERM, EACCES
_SECONDS = "60"


def place(layout: Layout, unit_text: str, beside: Mapping[str, str], check: bool) -> list[Change]:
    """Write the engines' unit, and by name those that it wants, where they differ; return the differences.

    Raises:
        Refusal: where systemd does not take one, or engines could not reach their GPUs any more.
    """
    placed = [change for name, text in beside.items() if (change := place_unit(name, text, check))]
    if units.digest(layout.engine_unit) != units.digest_of(unit_text):
        if not check:
            for name in beside:
                units.systemctl("start", name)  # its modules are in /proc/devices then
        refuse_lock_out(unit_text)
    unit = place_unit(layout.engine_unit.name, unit_text, check)
    return [*placed, *([unit] if unit else [])]


def device_policy(unit_text: str) -> list[str]:
    """Return the lines of a unit that say which devices it may open."""
    return [line for line in unit_text.splitlines() if line.startswith(POLICY)]


def refuse_lock_out(
    unit_text: str,
    files: Callable[[], Sequence[Path]] = devices.files_of_gpus,
    run: Callable[[Sequence[str]], Done] = run_program,
) -> None:
    """Try a unit's list of devices in a unit that does nothing else.

    Raises:
        Refusal: where a device file of the GPUs, open to root otherwise, could not be opened under it.
    """
    policy, paths = device_policy(unit_text), list(files())
    if not policy or not paths:
        return
    outside = set(devices.locked(paths))
    tried = [str(path) for path in paths if path not in outside]
    options = [f"--property={line}" for line in (*policy, f"RuntimeMaxSec={_SECONDS}")]
    words = ["systemd-run", "--quiet", "--wait", "--pipe", "--collect", *options, "--", "/usr/bin/python3", "-I", "-c"]
    done = run([*words, _OPEN, *tried])
    if done.code != 0:
        what = "whether engines would reach their GPUs in the new unit cannot be tried"
        raise Refusal(Failure("sandbox.untried", what, done.complaint, "nothing was changed; run it again"))
    said = [line.split(" ", 1) for line in done.out.splitlines()]
    closed = [path for code, path in said if code in _LOCKED]
    if closed:
        what = f"under DevicePolicy=closed engines could not open {', '.join(closed)}"
        majors = ", ".join(str(os.major(Path(path).stat().st_rdev)) for path in closed)
        why = f"/proc/devices does not name major {majors} nvidia* or infiniband_verbs"
        fix = "set serving_restrict_devices: false; nothing was changed"
        raise Refusal(Failure("sandbox.locked_out", what, why, fix))

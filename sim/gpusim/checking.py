"""Asks the library's own reader whether a state file is one; nothing reaches a server that it would refuse."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from sim.gpusim import build
from sim.machine.common import REFUSED, SimError


def problem(file: Path) -> str | None:
    """Return the sentence that the reader says about a file, if any."""
    done = subprocess.run([build.program(), "check", str(file)], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return done.stderr.strip().removeprefix(f"gpus-standin: {file}: ").rstrip(".")


def refuse_draft(file: Path) -> None:
    """Raise what the reader says about a draft; of its lines the person knows none by number."""
    said = problem(file)
    if said:
        raise SimError(re.sub(r"\bline \d+: ", "", said), "nothing was changed", REFUSED)

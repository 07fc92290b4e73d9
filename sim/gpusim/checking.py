"""Asks the library's own reader whether a state file is one; nothing reaches a server that it would refuse."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from sim.gpusim import build
from sim.machine.common import REFUSED, SimError


def check(file: Path) -> None:
    """Raise the sentence that the reader says about a file, if any."""
    done = subprocess.run([build.program(), "check", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().removeprefix(f"gpus-standin: {file}: ").rstrip(".")
        # What is checked is a draft: of its lines the person knows none by number.
        raise SimError(re.sub(r"\bline \d+: ", "", said), "nothing was changed", REFUSED)

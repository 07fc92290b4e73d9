"""The stand-in library and its program for this very machine, compiled once and kept in the checkout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sim.hardware import install
from sim.hardware.refusal import RefusalError
from sim.machine.common import CANNOT, CHECKOUT, SimError

CACHE = CHECKOUT / ".cache/standin"


def _compiled(how: Callable[[Path], Path]) -> Path:
    try:
        return how(CACHE)
    except RefusalError as refusal:
        raise SimError(str(refusal), "", CANNOT) from None


def library() -> Path:
    """Return the NVML library."""
    return _compiled(install.compile_library)


def program() -> Path:
    """Return the program `gpus-standin`."""
    return _compiled(install.compile_program)

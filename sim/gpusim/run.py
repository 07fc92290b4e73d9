"""Runs a command on this very machine with simulated GPUs before its eyes: no root, no booted machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from sim.gpusim import build, places
from sim.hardware import install, state_file
from sim.hardware.refusal import RefusalError
from sim.machine import doctor
from sim.machine.common import CANNOT, CHECKOUT, REFUSED, SimError, write_atomically
from sim.machine.servers import H100

PYTHON = CHECKOUT / ".venv/bin/python"


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    real = doctor.real_hardware_problem()
    if real:
        raise real
    if not args.command:
        raise SimError("which command is missing", "e.g. `./scripts/gpusim run -- nvitop -1`", REFUSED)
    with _folder(args.state) as folder:
        _fill(folder, args.preset)
        return _call(args.command, environment(folder))


@contextlib.contextmanager
def _folder(name: str) -> Iterator[Path]:
    if name:
        yield Path(name).resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="gpusim-") as place:
            yield Path(place)


def _fill(folder: Path, preset: str) -> None:
    """Put a simulated server into a folder, unless there is one."""
    file = folder / "gpus.conf"
    if file.exists():
        if preset:
            raise SimError(f"{folder} holds a simulated server already", "leave out --preset", REFUSED)
        places.refuse_damaged(file)
        return
    if folder.exists() and any(folder.iterdir()):
        raise SimError(f"{folder} holds files that are not a simulated server's", "name another folder", REFUSED)
    text = compiled(preset or H100.preset, folder.name)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text)


def compiled(preset: str, name: str) -> str:
    """Return the state file of a preset, or of an operator's own file, whose changes need no root."""
    try:
        state = state_file.parse(install.describe(preset, name).state)
    except RefusalError as refusal:
        raise SimError(str(refusal), "", REFUSED) from None
    state.system.set("root_only", "0")
    return state_file.render(state)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment in which NVML is the simulated one."""
    library, smi = folder / "lib/libnvidia-ml.so.1", folder / "bin/nvidia-smi"
    for link, target in ((library, build.library()), (smi, install.FILES / "nvidia-smi-standin")):
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    others = os.environ.get("LD_LIBRARY_PATH")
    return {
        **os.environ,
        "LD_LIBRARY_PATH": f"{library.parent}:{others}" if others else str(library.parent),
        # Last: where Debian's own nvidia-smi is installed, that one is called.
        "PATH": f"{os.environ.get('PATH', os.defpath)}:{smi.parent}",
        "GPUREADY_STANDIN_PROGRAM": str(build.program()),
        state_file.PATH_VARIABLE: str(folder / "gpus.conf"),
    }


def _call(command: Sequence[str], env: dict[str, str]) -> int:
    try:
        child = subprocess.Popen(command, env=env)
    except (FileNotFoundError, PermissionError):
        raise SimError(f"there is no program {command[0]}", "install it, or give its path", REFUSED) from None
    # Ctrl-C is the command's to answer; what ends us ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    code = child.wait()
    return 128 - code if code < 0 else code


def through_environment(argv: Sequence[str]) -> None:
    """Go on as the checkout's own Python, which has what reads YAML; returns only where this is it."""
    if Path(sys.prefix).resolve() == PYTHON.parents[1].resolve():
        return
    if not PYTHON.exists():
        raise SimError("there is no .venv in this checkout", "run `./scripts/setup`", CANNOT)
    os.execv(PYTHON, [str(PYTHON), str(CHECKOUT / "scripts/gpusim"), *argv])  # noqa: S606

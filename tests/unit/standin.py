"""The stand-in hardware as the tests use it: its state file, and pynvml run against its library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from sim.hardware import install
from sim.hardware.describe import load_server
from sim.hardware.state_text import render_state

CHECKOUT = Path(__file__).resolve().parents[2]


CACHE = CHECKOUT / ".cache/standin"


def library_directory(place: Path, *flags: str) -> Path:
    """Compile the stand-in as the installer does, with more flags if given; the directory is for LD_LIBRARY_PATH."""
    place.mkdir(parents=True, exist_ok=True)
    target = place / "libnvidia-ml.so.1"
    if not flags:
        target.symlink_to(install.compile_library(CACHE))
        return place
    sources = [str(source) for source in sorted(install.SOURCES.glob("*.c"))]
    subprocess.run([install.COMPILER, *install.FLAGS, *flags, "-o", str(target), *sources], check=True)
    return place


def state(preset: str = "h100-80gb-sxm-x8", **replacements: str) -> str:
    """Return the state file of a preset; every line `KEY = ...` is replaced, or dropped when the value is empty."""
    lines = render_state(load_server(preset), "h100-sg-01").splitlines()
    for key, value in replacements.items():
        assert any(line.startswith(f"{key} = ") for line in lines), key
        new = [f"{key} = {value}"] if value else []
        lines = [part for line in lines for part in (new if line.startswith(f"{key} = ") else [line])]
    return "\n".join(lines) + "\n"


def with_lines(text: str, gpu: int, *lines: str) -> str:
    """Add lines to the section of one GPU; of a key that stands twice the later line holds."""
    sections = text.split("\n[")
    (index,) = [number for number, section in enumerate(sections) if section.startswith(f"gpu {gpu}]\n")]
    sections[index] = "\n".join([sections[index].rstrip("\n"), *lines, ""])
    return "\n[".join(sections)


def python(code: str, library: Path, state_file: Path) -> Any:
    """Run Python against the stand-in in a process of its own, and return the JSON that it prints."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(CHECKOUT / "src"),
        "LD_LIBRARY_PATH": str(library),
        "GPUREADY_STANDIN_STATE": str(state_file),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

"""Downloaded packages, kept in the checkout for the next machine; never needed, only used.

Every machine gets a folder of its own, filled with hard links, as /var/cache/apt/archives: with one shared
folder, apt in one machine would lock out apt in another.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from sim.machine.common import CHECKOUT, Sim, read_json

CACHE = CHECKOUT / ".cache/apt"


def _folder(suite: str, machine: str) -> Path:
    return CACHE / suite / "machines" / machine


def give(suite: str, machine: str) -> Path:
    """Return the machine's folder, with all packages that are known for its suite."""
    folder = _folder(suite, machine)
    (folder / "partial").mkdir(parents=True, exist_ok=True)
    for package in (CACHE / suite).glob("*.deb"):
        with contextlib.suppress(FileExistsError):
            os.link(package, folder / package.name)
    return folder


def harvest(suite: str, machine: str) -> None:
    """Keep what the machine has downloaded for others; apt puts a package there only when it is whole."""
    for package in _folder(suite, machine).glob("*.deb"):
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(package, CACHE / suite / package.name)


def harvest_all(sim: Sim) -> None:
    """Keep what all machines have downloaded so far."""
    for file in (sim.state / "machines").glob("[a-z]*.json"):
        harvest(str(read_json(file).get("suite", "")), file.stem)


def take_away(suite: str, machine: str) -> None:
    """Remove the machine's folder, after keeping its packages."""
    harvest(suite, machine)
    shutil.rmtree(_folder(suite, machine), ignore_errors=True)

"""Brings one daemon of ours to its files and unit: checked before it lands, switched in one step, reloaded.

The files lie in a folder named by their digest and `current` points to it. The unit itself records what it loaded
(`loaded`, a copy of that link, and `unit`, a copy of the unit file), so an interrupted run is finished by the next.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuready.outcome import Change, Failed, Failure, Refusal, Result
from gpuready.serving import units
from gpuready.serving.files import link, write_text

SYSTEMD = Path("/etc/systemd/system")
KEPT = 3
"""Folders of files kept: the current one and the ones before."""


@dataclass(frozen=True)
class Service:
    """One daemon as wanted."""

    unit: str
    unit_text: str
    folder: Path
    files: Mapping[str, str]
    runtime: Path
    """The unit's runtime folder, where it records what it loaded."""
    check_words: tuple[str, ...]
    """The daemon's own check of a configuration; the path of the main file is appended."""
    main_file: str

    @property
    def digest(self) -> str:
        """Name of the folder that holds these files."""
        joined = "\0".join(f"{name}\0{text}" for name, text in sorted(self.files.items()))
        return hashlib.sha256(joined.encode()).hexdigest()[:12]


def place_unit(name: str, text: str, check: bool) -> Change | None:
    """Write a unit file where it differs, checked by systemd first; return the difference."""
    path = SYSTEMD / name
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if before == text:
        return None
    if not check:
        with tempfile.TemporaryDirectory() as folder:
            staged = Path(folder) / name
            staged.write_text(text, encoding="utf-8")
            verified = subprocess.run(
                ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(staged)],
                capture_output=True,
                text=True,
                check=False,
            )
        if verified.returncode != 0:
            said = verified.stderr.strip().splitlines()
            what = f"systemd does not take {name}"
            raise Refusal(
                Failure("service.unit", what, said[-1] if said else "", "the unit on the server was not changed")
            )
        write_text(path, text)
        units.systemctl("daemon-reload")
    return Change(str(path), before, text)


def bring(service: Service, check: bool) -> Result:
    """Bring a service to its files and unit, and have it run now and at boot."""
    result = Result()
    current = service.folder / "current"
    before = {path.name: path.read_text(encoding="utf-8") for path in sorted(current.glob("*")) if path.is_file()}
    for name in sorted(before.keys() | service.files.keys()):
        if before.get(name) != service.files.get(name):
            shown = Change(f"{service.folder}/current/{name}", before.get(name, ""), service.files.get(name, ""))
            result.diff.append(shown)
    if not check:
        _stage(service)
    unit = place_unit(service.unit, service.unit_text, check)
    if unit:
        result.diff.append(unit)
    if not check and (not current.is_symlink() or current.readlink().name != service.digest):
        link(current, service.digest)
    word = _needed(service)
    if word and not check:
        _act(service, word)
        _prune(service)
    result.changed = bool(result.diff or word)
    done = {"start": "started", "restart": "restarted", "reload": "reloaded", "enable": "enabled"}
    result.summary = f"{service.unit}: {done[word] if word else 'runs as declared'}"
    return result


def _stage(service: Service) -> None:
    """Write the folder of files beside the others, once its own daemon has taken it."""
    target = service.folder / service.digest
    if target.is_dir():
        return
    building = service.folder / f".{service.digest}.new"
    if building.exists():
        shutil.rmtree(building)
    building.mkdir(parents=True)
    for name, text in service.files.items():
        write_text(building / name, text)
    words = [*service.check_words, str(building / service.main_file)]
    checked = subprocess.run(words, capture_output=True, text=True, check=False)
    if checked.returncode != 0:
        said = "; ".join(line.strip() for line in (checked.stderr + checked.stdout).splitlines()[:4])
        shutil.rmtree(building)
        what = f"{service.check_words[0]} does not take {service.main_file}"
        fix = "correct the template or the declaration; the running configuration was not touched"
        raise Refusal(Failure("service.configuration", what, said, fix))
    building.rename(target)


def _needed(service: Service) -> str:
    """Return what systemd has to do so that what runs is what is wanted; empty when nothing."""
    state = units.properties(service.unit, "ActiveState", "UnitFileState")
    if state.get("ActiveState") != "active":
        return "start"
    recorded = service.runtime / "unit"
    if not recorded.exists() or recorded.read_text(encoding="utf-8") != service.unit_text:
        return "restart"
    loaded = service.runtime / "loaded"
    if not loaded.is_symlink() or loaded.readlink().name != service.digest:
        return "reload"
    return "" if state.get("UnitFileState") == "enabled" else "enable"


def _act(service: Service, word: str) -> None:
    units.systemctl("enable", service.unit)
    if word == "enable":
        return
    if word != "reload":
        units.systemctl("reset-failed", service.unit)
    answer = units.systemctl(word, service.unit)
    active = units.properties(service.unit, "ActiveState").get("ActiveState")
    if answer.returncode != 0 or active != "active":
        what = f"{service.unit} could not {word} and is now {active}"
        said = units.last_words(service.unit)[-800:]
        raise Failed(Failure("service.not_running", what, said, f"see journalctl -u {service.unit} and run it again"))


def _prune(service: Service) -> None:
    folders = [path for path in service.folder.iterdir() if path.is_dir() and not path.is_symlink()]
    older = sorted((path for path in folders if path.name != service.digest), key=lambda path: path.stat().st_mtime)
    for path in older[: -(KEPT - 1)]:
        shutil.rmtree(path)

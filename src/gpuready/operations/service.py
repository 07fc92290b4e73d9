"""Brings one daemon of ours to its files and unit: checked before it lands, switched in one step, reloaded.

The files lie in a folder named by their digest and `current` points to it. Everything is compared by content: what lies
below `current`, and what was loaded (`loaded`, a copy of the files, and `unit`, a copy of the unit file, both in the
runtime folder). So a change by hand is put right, and an interrupted run is finished by the next.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuready.operations.machine import SEARCH_PATH, run_program
from gpuready.outcome import Change, Failed, Failure, Refusal, Result
from gpuready.serving import units
from gpuready.serving.files import link, write_text

SYSTEMD = Path("/etc/systemd/system")
KEPT = 3
"""Folders of files kept: the current one and the ones before."""
RELOAD_SECONDS = 20
PAUSE_SECONDS = 0.2
DONE = {"start": "started", "restart": "restarted", "reload": "reloaded", "enable": "enabled at boot"}


@dataclass(frozen=True)
class Service:
    """One daemon as wanted; a HAProxy in master-worker mode, whose master listens on master.sock in `runtime`."""

    unit: str
    unit_text: str
    folder: Path
    files: Mapping[str, str]
    runtime: Path
    """The unit's runtime folder, where is recorded what it loaded. systemd empties it when the unit stops."""
    check_words: tuple[str, ...]
    """The daemon's own check of a configuration; the path of the main file is appended."""
    main_file: str

    @property
    def digest(self) -> str:
        """Name of the folder that holds these files."""
        joined = "\0".join(f"{name}\0{text}" for name, text in sorted(self.files.items()))
        return hashlib.sha256(joined.encode()).hexdigest()[:12]


# ------------------------------------------------------------------------------------------------ units


def place_unit(name: str, text: str, check: bool, folder: Path | None = None) -> Change | None:
    """Write a unit file where it differs, checked by systemd first; return the difference."""
    path = (folder or SYSTEMD) / name
    before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    if before == text:
        return None
    complaints = _complaints(name, text)
    if check:
        # A program that an earlier stage would bring is not there yet.
        complaints = [line for line in complaints if "is not executable" not in line]
    if complaints:
        what = f"systemd does not take {name}"
        raise Refusal(
            Failure("service.unit", what, "; ".join(complaints[:3]), "the unit on the server was not changed")
        )
    if not check:
        write_text(path, text)
        units.systemctl("daemon-reload")
    return Change(str(path), before, text)


def _complaints(name: str, text: str) -> list[str]:
    """Return what systemd says against a unit file.

    It speaks of every unit that ours needs, too, and its exit status does not tell them apart before systemd 250
    (Ubuntu 22.04 has 249); so only the lines about our own file count.
    """
    if shutil.which("systemd-analyze", path=SEARCH_PATH) is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        staged = Path(folder) / name
        staged.write_text(text, encoding="utf-8")
        said = run_program(["systemd-analyze", "verify", "--man=no", str(staged)]).err
        return about(name, staged, said)


def about(name: str, staged: Path, said: str) -> list[str]:
    """Return the lines of systemd-analyze that speak of this unit file; a template's are about an instance of it."""
    stem, at, suffix = name.partition("@") if "@" in name else (name, "", "")
    own = re.escape(stem) + (r"@[^\s:]*" + re.escape(suffix.lstrip("@")) if at else "")
    ours = re.compile(rf"(Unit )?{own}[:\s]")
    lines = (line.strip() for line in said.splitlines())
    return [line.replace(str(staged), name) for line in lines if str(staged) in line or ours.match(line)]


# ------------------------------------------------------------------------------------------------ bring


def bring(service: Service, check: bool) -> Result:
    """Bring a service to its files and unit, and have it run now and at boot."""
    result = Result()
    current = service.folder / "current"
    before = content(current) or {}
    for name in sorted(before.keys() | service.files.keys()):
        if before.get(name) != service.files.get(name):
            shown = Change(f"{current}/{name}", before.get(name, ""), service.files.get(name, ""))
            result.diff.append(shown)
    differ = not current.is_symlink() or content(current) != service.files
    staged = service.digest
    if differ:
        staged = _stage(service, check)
    unit = place_unit(service.unit, service.unit_text, check)
    if unit:
        result.diff.append(unit)
    former = current.readlink().name if current.is_symlink() else ""
    loaded = content(service.runtime / "loaded")
    if differ and not check:
        # Whoever reloaded a change that was made by hand is running it, so what is loaded is not known any more.
        _forget_loaded(service)
        if current.is_dir() and not current.is_symlink():
            current.rename(service.folder / f".{staged}.by-hand")
        link(current, staged)
    word = _needed(service, differ)
    if word and not result.diff:
        result.diff.append(Change(service.unit, "not running as declared\n", f"{DONE[word]}\n"))
    if word and not check:
        _act(service, word, former, loaded)
    if not check:
        _prune(service)
    result.changed = bool(result.diff or differ or word)
    if check and differ and shutil.which(service.check_words[0], path=SEARCH_PATH) is None:
        result.undecided.append(f"whether {service.check_words[0]} takes {service.main_file}")
    would = "would be " if check else ""
    result.summary = f"{service.unit}: {would + DONE[word] if word else 'runs as declared'}"
    return result


def content(folder: Path) -> dict[str, str] | None:
    """Return the files of a folder; None where it is none, or holds what no folder of ours holds."""
    if not folder.is_dir():
        return None
    entries = sorted(folder.iterdir())
    if any(entry.is_symlink() or not entry.is_file() for entry in entries):
        return None
    return {entry.name: entry.read_text(encoding="utf-8", errors="replace") for entry in entries}


def _stage(service: Service, check: bool) -> str:
    """Have the daemon check the files and write them whole as a folder beside the others; return its name.

    A folder that was changed by hand is left to `_prune`: a running daemon may read it, so it is never half of two.
    """
    if check:
        if shutil.which(service.check_words[0], path=SEARCH_PATH):
            with tempfile.TemporaryDirectory() as folder:
                _write_checked(service, Path(folder) / "files")
        return service.digest
    names = [service.digest, *(f"{service.digest}-{number}" for number in range(2, 1000))]
    for name in names:
        target = service.folder / name
        if content(target) == service.files:
            return name
        if not target.exists():
            building = service.folder / f".{name}.new"
            shutil.rmtree(building, ignore_errors=True)
            _write_checked(service, building)
            building.rename(target)
            return name
    what = f"{service.folder} holds too many changed copies of {service.digest}"
    raise Failed(Failure("service.folder", what, "", "remove those that `current` does not point to"))


def _write_checked(service: Service, folder: Path) -> None:
    """Write the files to a new folder; refuse them, and leave nothing, when the daemon does not take them."""
    folder.mkdir(parents=True)
    for name, text in service.files.items():
        write_text(folder / name, text)
    checked = run_program([*service.check_words, str(folder / service.main_file)])
    if checked.code != 0:
        lines = (line.strip().replace(f"{folder}/", "") for line in (checked.err + checked.out).splitlines())
        shutil.rmtree(folder)
        what = f"{service.check_words[0]} does not take {service.main_file}"
        fix = "correct the template or the declaration; the running configuration was not touched"
        told = [line for line in lines if line and "[NOTICE]" not in line]
        said = "; ".join(([line for line in told if "[ALERT]" in line] or told)[:4])
        raise Refusal(Failure("service.configuration", what, said, fix))


def _needed(service: Service, differ: bool) -> str:
    """Return what systemd has to do so that what runs is what is wanted; empty when nothing."""
    state = units.properties(service.unit, "ActiveState", "UnitFileState", "NeedDaemonReload")
    if state.get("ActiveState") != "active":
        return "start"
    recorded = service.runtime / "unit"
    # A run may have been killed before systemd read the new unit; what was started since then is the old one.
    unread = state.get("NeedDaemonReload") == "yes"
    if unread or not recorded.exists() or recorded.read_text(encoding="utf-8") != service.unit_text:
        return "restart"
    if differ or content(service.runtime / "loaded") != service.files:
        return "reload"
    return "" if state.get("UnitFileState") == "enabled" else "enable"


def _act(service: Service, word: str, former: str, loaded: dict[str, str] | None) -> None:
    if word != "reload":
        units.systemctl("daemon-reload")
    units.systemctl("enable", service.unit)
    if word == "enable":
        return
    if word == "reload":
        _reload(service, former, loaded)
        return
    units.systemctl("reset-failed", service.unit)
    answer = units.systemctl(word, service.unit)
    active = units.properties(service.unit, "ActiveState").get("ActiveState")
    if answer.returncode != 0 or active != "active":
        what = f"{service.unit} could not {word} and is now {active}"
        said = units.last_words(service.unit)[-800:]
        raise Failed(Failure("service.not_running", what, said, f"see journalctl -u {service.unit} and run it again"))


def _prune(service: Service) -> None:
    """Remove folders that are no longer needed, and what a killed run left."""
    now = (service.folder / "current").readlink().name
    folders = [path for path in service.folder.iterdir() if path.is_dir() and not path.is_symlink()]
    others = sorted((path for path in folders if path.name != now), key=lambda path: path.stat().st_mtime)
    left = [path for path in others if path.name.startswith(".")]
    older = [path for path in others if path not in left]
    for path in left + older[: max(len(older) - (KEPT - 1), 0)]:
        shutil.rmtree(path)


# ------------------------------------------------------------------------------------------------ reload


@dataclass(frozen=True)
class Workers:
    """HAProxy's processes, as its master tells."""

    reloads: int
    """How often the master was told to reload."""
    current: frozenset[int]
    """The workers that take new connections."""
    old: frozenset[int] = frozenset()
    """Those that a reload left with the streams that they had."""


def workers_from(text: str) -> Workers | None:
    """Read the answer to `show proc` of HAProxy's master."""
    reloads: int | None = None
    by_section: dict[str, set[int]] = {"workers": set(), "old workers": set()}
    section = ""
    for line in text.splitlines():
        fields = line.split()
        if line.startswith("#"):
            section = line.lstrip("# ").strip()
        elif len(fields) >= 3 and fields[0].isdigit() and fields[2].isdigit():
            if fields[1] == "master":
                reloads = int(fields[2])
            elif fields[1] == "worker" and section in by_section:
                by_section[section].add(int(fields[0]))
    return None if reloads is None else Workers(reloads, *map(frozenset, by_section.values()))


def workers(runtime: Path) -> Workers | None:
    """Ask HAProxy's master for its workers; None while it does not answer, as in the middle of a reload."""
    said = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            asked.settimeout(3)
            asked.connect(str(runtime / "master.sock"))
            asked.sendall(b"show proc\n")
            asked.shutdown(socket.SHUT_WR)
            while part := asked.recv(4096):
                said += part
    except OSError:
        return None
    return workers_from(said.decode(errors="replace"))


def _reload(service: Service, former: str, loaded: dict[str, str] | None) -> None:
    """Reload, and record what was loaded once a new worker runs it.

    systemd takes a reload for done when the signal is sent. HAProxy's old worker goes on where the new one cannot
    start, for example because it cannot bind; then the former files become current again, as they are what runs.
    """
    before = workers(service.runtime)
    started = int(time.time())
    answer = units.systemctl("reload", service.unit)
    _forget_loaded(service)
    if answer.returncode == 0 and before is not None and _new_worker(service.runtime, before):
        _record_loaded(service.runtime, service.files)
        return
    current = service.folder / "current"
    state = "the worker that ran before serves on with its former configuration"
    if former and loaded is not None and content(service.folder / former) == loaded:
        link(current, former)
        _record_loaded(service.runtime, loaded)
        state = "the former configuration serves on and is the current one again"
    if units.properties(service.unit, "ActiveState").get("ActiveState") != "active":
        state = "it does not run any more"
    what = f"{service.unit} did not take the new configuration; {state}"
    fix = f"correct the declaration and run it again; see journalctl -u {service.unit}"
    raise Failed(Failure("service.not_reloaded", what, _alerts(service.unit, started), fix))


def _new_worker(runtime: Path, before: Workers) -> bool:
    """Wait until the master has reloaded; say whether a new worker runs."""
    end = time.monotonic() + RELOAD_SECONDS
    while time.monotonic() < end:
        now = workers(runtime)
        if now is not None and now.current - before.current:
            return True
        if now is not None and now.reloads != before.reloads:
            return False
        time.sleep(PAUSE_SECONDS)
    return False


def _alerts(unit: str, since: int) -> str:
    """Return what HAProxy said about its failure, without the log of requests."""
    said = run_program(["journalctl", f"--unit={unit}", f"--since=@{since}", "--no-pager", "--output=cat"]).out
    alerts = [line.partition(" : ")[2] or line for line in said.splitlines() if "[ALERT]" in line]
    return "; ".join(line.strip().rstrip(".") for line in alerts[:3]) or units.last_words(unit)[-800:]


def _forget_loaded(service: Service) -> None:
    shutil.rmtree(service.runtime / "loaded", ignore_errors=True)


def _record_loaded(runtime: Path, files: Mapping[str, str]) -> None:
    building = runtime / "loaded.new"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(mode=0o700)
    for name, text in files.items():
        write_text(building / name, text)
    shutil.rmtree(runtime / "loaded", ignore_errors=True)
    building.rename(runtime / "loaded")

"""Inference engines on the server: one immutable, hash-pinned virtual environment each.

An engine is built in its final folder, because a virtual environment cannot be moved; its marker file is
written last, so a folder without the right marker is never taken for an engine.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuready import catalog
from gpuready.outcome import Change, Failed, Failure, MachineCannot, Refusal, Result
from gpuready.planning.engines import folder_name
from gpuready.serving import locks, packages
from gpuready.serving.packages import Source, Workshop

ROOT = Path("/opt/gpuready")
MARKER = "gpuready-engine.json"
_GIB = 1 << 30
_SPARE_GIB = 1
_SMOKE_SECONDS = 600
_NOBODY = 65534


@dataclass(frozen=True)
class Wanted:
    """One engine that shall be on the server."""

    engine: str
    version: str
    lock: locks.Lock
    tool: locks.Lock
    smoke: list[str]
    install_gib: float
    source: Source
    python: str = "/usr/bin/python3"
    root: Path = ROOT

    @property
    def title(self) -> str:
        """Return the engine as it is named to people."""
        return f"{self.engine} {self.version}"

    @property
    def folder(self) -> Path:
        """Return the engine's folder."""
        return self.root / "engines" / folder_name(self.engine, self.version, self.lock.sha256)


def catalog_entry(lock_name: str) -> dict[str, Any]:
    """Return the catalog's entry of the engine that a lock belongs to."""
    for stack in catalog.load("stacks")["stacks"].values():
        for entry in stack["engines"].values():
            for python in entry["pythons"]:
                if entry["lock"].format(py=python.replace(".", "")) == lock_name:
                    return dict(entry)
    return {}


def python_version(python: str) -> str:
    """Return the full version of a Python on the server."""
    code = "import platform; print(platform.python_version())"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, errors="replace", check=False)
        problem = "" if done.returncode == 0 else packages.last_line(done.stderr or f"exit code {done.returncode}")
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        fix = "repair the package python3-minimal: engines are built on this Python, whichever one Ansible uses"
        raise MachineCannot(Failure("engine.python", f"{python} does not run on this server", problem, fix))
    return done.stdout.strip()


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def why_not_whole(folder: Path, marker_must: dict[str, str], python: str) -> str | None:
    """Return why the engine in a folder cannot be used; None when it is whole."""
    if not folder.is_dir():
        return "not installed"
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"half-built, {MARKER} is missing"
    except (OSError, ValueError):
        return f"damaged, {MARKER} cannot be read"
    if not isinstance(marker, dict):
        return f"damaged, {MARKER} is not an object"
    for key, value in marker_must.items():
        if marker.get(key) != value:
            return f"not what its name says, {MARKER} names {key} {marker.get(key)!r} instead of {value!r}"
    built_for = _minor(str(marker.get("python")))
    if built_for != _minor(python):
        return f"built for Python {built_for}, the server's is now {_minor(python)}"
    if not os.access(folder / "bin/python", os.X_OK):
        return "without a working bin/python"
    return None


def install(wanted: Wanted, *, check: bool) -> Result:
    """Bring one engine to the server; nothing is touched when it is whole already."""
    python = python_version(wanted.python)
    if wanted.lock.python not in (None, _minor(python)):
        raise Refusal(
            Failure(
                "engine.python",
                f"Lock {wanted.lock.name} of {wanted.title} is for Python {wanted.lock.python}",
                f"the server's {wanted.python} is {python}",
                "run the plan again, or use a system whose Python the stack names in catalog/stacks.yaml",
            )
        )
    must = {"engine": wanted.engine, "version": wanted.version, "lock_sha256": wanted.lock.sha256}
    reason = why_not_whole(wanted.folder, must, python)
    if reason is None:
        return Result(summary=f"{wanted.title} is installed in {wanted.folder}.", data={"folder": str(wanted.folder)})
    _demand_disk(wanted)
    result = Result(changed=True, data={"folder": str(wanted.folder)})
    after = f"{wanted.title} from lock {wanted.lock.name}, Python {_minor(python)}\n"
    result.diff.append(Change(str(wanted.folder), f"{reason}\n", after))
    if check:
        result.undecided.append(f"whether {wanted.title} can be built and imported on this server")
        result.summary = f"{wanted.title} would be installed in {wanted.folder}, about {wanted.install_gib} GiB."
        return result
    began = datetime.datetime.now(datetime.timezone.utc)
    os.umask(0o022)
    _make_folders(wanted)
    torch = _build(wanted, python)
    seconds = (datetime.datetime.now(datetime.timezone.utc) - began).total_seconds()
    result.summary = f"{wanted.title} was installed in {wanted.folder} in {seconds:.0f} s."
    result.data |= {"seconds": round(seconds, 1), "torch": torch}
    return result


def _demand_disk(wanted: Wanted) -> None:
    place = wanted.folder
    while not place.exists():
        place = place.parent
    # What a half-built folder holds is free again before the installation begins.
    free = (shutil.disk_usage(place).free + _size_of(wanted.folder)) / _GIB
    need = wanted.install_gib + _SPARE_GIB
    if free < need:
        raise MachineCannot(
            Failure(
                "engine.disk",
                f"{wanted.title} needs {need:.0f} GiB under {wanted.root}",
                f"{free:.1f} GiB are free there",
                "free space, or mount a larger disk there",
            )
        )


def _size_of(*folders: Path) -> int:
    """Return what folders hold on the disk, in bytes, a file with several names once; nothing when they are absent."""
    sizes: dict[int, int] = {}
    for place, _, names in (found for folder in folders for found in os.walk(folder)):
        for name in names:
            # Somebody may be at work there.
            with contextlib.suppress(FileNotFoundError):
                entry = os.lstat(Path(place, name))
                sizes[entry.st_ino] = entry.st_blocks * 512
    return sum(sizes.values())


def begun(root: Path, python: str) -> int:
    """Return what an interrupted installation has already brought, in bytes: the next one uses or replaces it."""
    half = [Path(entry["folder"]) for entry in listing(root / "engines", python) if not entry["whole"]]
    return _size_of(root / "cache", *half)


def _make_folders(wanted: Wanted) -> None:
    """Make the engines' folder; engines run as their own user, whatever umask the folder was made under."""
    engines = wanted.root / "engines"
    engines.mkdir(parents=True, exist_ok=True)
    for folder in (wanted.root, engines):
        folder.chmod(0o755)


def _build(wanted: Wanted, python: str) -> str:
    """Build the engine; return which torch it holds. What fails leaves no folder, only the download cache."""
    workshop = Workshop(wanted.root, wanted.source, wanted.python)
    workshop.open_cache()
    uv = packages.provide_uv(workshop, wanted.tool)
    remove(wanted.folder)
    try:
        local = _local_versions(wanted.lock, workshop.wheels)
        # torch's +cpu wheel brings all it needs; the CUDA libraries would be dead weight beside it.
        without = [locks.CUDA_LIBRARIES] if local.get("torch", "").endswith("+cpu") else []
        packages.make_room(wanted.python, wanted.folder, "--without-pip")
        packages.install(uv, workshop, wanted.folder, wanted.lock.text(without, local), wanted.title)
        seal(wanted.folder)
        _smoke(wanted)
        torch = _torch_of(wanted.folder)
        _mark(wanted, python, torch, wanted.lock.count(without))
    except Failed as failed:
        remove(wanted.folder)
        state = "nothing is installed, what was downloaded is kept for the next run"
        if any(re.search(r"\b(invalid|corrupt)", one.sentence(), re.IGNORECASE) for one in failed.failures):
            workshop.forget_downloads()
            state = "nothing is installed, and what was downloaded is thrown away, since it is damaged"
        raise Failed([*failed.failures, Failure("engine.state", f"{wanted.title}: {state}")]) from failed
    shutil.rmtree(workshop.cache, ignore_errors=True)
    return torch


def _local_versions(lock: locks.Lock, wheels: Path) -> dict[str, str]:
    """Return the packages of which a wheel with a local version was sent along, each with that version."""
    sent = [locks.wheel_of(path) for path in locks.wheels_in([wheels], lock)]
    return {wheel.name: wheel.version for wheel in sent if wheel and wheel.local}


def remove(folder: Path) -> None:
    """Remove an engine's folder, read-only or not; its marker goes first."""
    if not folder.exists():
        return
    folder.chmod(0o755)
    (folder / MARKER).unlink(missing_ok=True)
    for place, names, _ in os.walk(folder):
        for name in names:
            path = Path(place, name)
            if not path.is_symlink():
                path.chmod(0o755)
    shutil.rmtree(folder)


def seal(folder: Path) -> None:
    """Make an engine read-only, and readable and runnable by every user."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(place, name)
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                path.chmod(0o555 if mode & stat.S_IXUSR else 0o444)
        Path(place).chmod(0o555)


def _smoke(wanted: Wanted) -> None:
    """Import the engine as a user without rights, as its service will."""
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    command = [str(wanted.folder / "bin/python"), "-I", "-B", "-c", code, *wanted.smoke]
    with tempfile.TemporaryDirectory(dir=wanted.root, prefix=".smoke-") as home:
        quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
        settings = {"HOME": home, "TMPDIR": home, "PATH": os.environ.get("PATH", os.defpath), **quiet}
        identity: dict[str, Any] = {}
        if os.geteuid() == 0:
            os.chown(home, _NOBODY, _NOBODY)
            identity = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
        run = functools.partial(subprocess.run, env=settings, cwd=home, capture_output=True, text=True, **identity)
        try:
            done = run(command, check=False, timeout=_SMOKE_SECONDS)
            said = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
            problem = said[-1][:300] if done.returncode else None
        except subprocess.TimeoutExpired:
            problem = f"no answer in {_SMOKE_SECONDS} s"
    if problem:
        what = f"{wanted.title} was installed but cannot be imported ({', '.join(wanted.smoke)})"
        raise Failed(Failure("engine.smoke", what, problem, "see that the stack's packages (apt) are on the server"))


def tidy(root: Path, check: bool) -> list[Change]:
    """Remove what an installation that was killed after its last step has left; call it when no engine is missing."""
    left = [path for path in (Workshop(root, Source(), "").cache, *sorted(root.glob(".smoke-*"))) if path.exists()]
    if not check:
        for path in left:
            shutil.rmtree(path)
    return [Change(str(path), "left by an interrupted installation\n", "absent\n") for path in left]


def _torch_of(folder: Path) -> str:
    found = next(iter(folder.glob("lib/python3*/site-packages/torch-*.dist-info")), None)
    return found.name[len("torch-") : -len(".dist-info")] if found else ""


def _mark(wanted: Wanted, python: str, torch: str, count: int) -> None:
    """Write the marker, after everything else is on the disk for sure."""
    marker = {
        "engine": wanted.engine,
        "version": wanted.version,
        "lock": wanted.lock.name,
        "lock_sha256": wanted.lock.sha256,
        "python": python,
        "torch": torch,
        "packages": count,
        "built_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    os.sync()
    wanted.folder.chmod(0o755)
    beside = wanted.folder / f"{MARKER}.new"
    with beside.open("w", encoding="utf-8") as file:
        json.dump(marker, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    beside.chmod(0o444)
    beside.replace(wanted.folder / MARKER)
    wanted.folder.chmod(0o555)


def listing(place: Path, python: str) -> list[dict[str, Any]]:
    """Return every engine in a place, with its folder, what its marker says, and whether it is whole."""
    current = python_version(python)
    entries: list[dict[str, Any]] = []
    for folder in sorted(place.glob("[!.]*")) if place.is_dir() else []:
        reason = why_not_whole(folder, {}, current)
        marker: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            loaded = json.loads((folder / MARKER).read_text(encoding="utf-8"))
            marker = loaded if isinstance(loaded, dict) else {}
        if reason is None and folder.name != folder_name(
            str(marker.get("engine")), str(marker.get("version")), str(marker.get("lock_sha256"))
        ):
            reason = f"not what its name says, {MARKER} is another engine's"
        entries.append({**marker, "folder": str(folder), "whole": reason is None, "why": reason})
    return entries

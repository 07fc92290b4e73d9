"""Inference engines on the server: one immutable, hash-pinned virtual environment each.

An engine is built in its final folder, because a virtual environment cannot be moved; its marker file is
written last, so a folder without the right marker is never taken for an engine.
"""

from __future__ import annotations

import datetime
import functools
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuready import catalog
from gpuready.outcome import Change, Failed, Failure, MachineCannot, Refusal, Result
from gpuready.planning.engines import SYSTEM_PYTHON, folder_name, lock_name
from gpuready.serving import engine_store, locks, packages, pythons
from gpuready.serving.engine_store import ROOT
from gpuready.serving.packages import Source, Workshop

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
    python: str = SYSTEM_PYTHON
    root: Path = ROOT

    @property
    def title(self) -> str:
        """Return the engine as it is named to people."""
        return f"{self.engine} {self.version}"

    @property
    def folder(self) -> Path:
        """Return the engine's folder."""
        return self.root / "engines" / folder_name(self.engine, self.version, self.lock.sha256)


def catalog_entry(lock: str) -> dict[str, Any]:
    """Return the catalog's entry of the engine that a lock belongs to."""
    for stack in catalog.load("stacks")["stacks"].values():
        for entry in stack["engines"].values():
            for python in entry["pythons"]:
                if lock_name(entry, python) == lock:
                    return dict(entry)
    return {}


def install(wanted: Wanted, *, check: bool) -> Result:
    """Bring one engine to the server; nothing is touched when it is whole already."""
    python = pythons.version(wanted.python)
    if wanted.lock.python not in (None, pythons.minor(python)):
        raise Refusal(
            Failure(
                "engine.python",
                f"Lock {wanted.lock.name} of {wanted.title} is for Python {wanted.lock.python}",
                f"the server's {wanted.python} is {python}",
                "run the plan again, or use a system whose Python the stack names in catalog/stacks.yaml",
            )
        )
    must = {"engine": wanted.engine, "version": wanted.version, "lock_sha256": wanted.lock.sha256}
    reason = engine_store.why_not_whole(wanted.folder, must)
    if reason is None:
        return Result(summary=f"{wanted.title} is installed in {wanted.folder}.", data={"folder": str(wanted.folder)})
    _demand_disk(wanted)
    result = Result(changed=True, data={"folder": str(wanted.folder)})
    after = f"{wanted.title} from lock {wanted.lock.name}, Python {pythons.minor(python)}\n"
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
    free = (shutil.disk_usage(place).free + engine_store.size_of(wanted.folder)) / _GIB
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
    engine_store.remove(wanted.folder)
    marker = {
        "engine": wanted.engine,
        "version": wanted.version,
        "lock": wanted.lock.name,
        "lock_sha256": wanted.lock.sha256,
        "python": python,
        "python_path": wanted.python,
    }
    try:
        engine_store.begin(wanted.folder, marker)
        local = _local_versions(wanted.lock, workshop.wheels)
        # torch's +cpu wheel brings all it needs; the CUDA libraries would be dead weight beside it.
        without = [locks.CUDA_LIBRARIES] if local.get("torch", "").endswith("+cpu") else []
        packages.make_room(wanted.python, wanted.folder, "--without-pip")
        packages.install(uv, workshop, wanted.folder, wanted.lock.text(without, local), wanted.title)
        engine_store.seal(wanted.folder)
        _smoke(wanted)
        torch = _torch_of(wanted.folder)
        engine_store.finish(wanted.folder, {**marker, "torch": torch, "packages": wanted.lock.count(without)})
    except Failed as failed:
        engine_store.remove(wanted.folder)
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


def _torch_of(folder: Path) -> str:
    found = next(iter(folder.glob("lib/python3*/site-packages/torch-*.dist-info")), None)
    return found.name[len("torch-") : -len(".dist-info")] if found else ""

"""The store of releases: rendered files of one deployment, numbered, never changed once written.

`current` of a replica leads to a release that gave a token, and to nothing else: whoever starts the replica acts
on it. A release that is still to be proved is named by a trial, a file under /run that counts only while the run
that wrote it lives.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuready.serving.files import (
    as_json,
    beside,
    has_access,
    keep_names,
    link,
    make_folder,
    read_json,
    set_access,
    write_text,
)
from gpuready.serving.layout import Layout
from gpuready.serving.readiness import process_start

KEPT = 5
"""Releases kept per deployment, the current ones included."""
PROOF = "verified.json"
# Flags and environment may hold what is not for everybody: root and the engine read them, nobody else.
FOLDER_MODE = 0o750
FILE_MODE = 0o640


@dataclass(frozen=True)
class Store:
    """The releases of one deployment."""

    layout: Layout
    deployment: str

    @property
    def _folder(self) -> Path:
        return self.layout.releases(self.deployment)

    def folder(self, number: int) -> Path:
        """Return the folder of a release."""
        return self._folder / str(number)

    def numbers(self) -> list[int]:
        """Return the numbers of all whole releases, oldest first."""
        if not self._folder.is_dir():
            return []
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdigit())

    def current(self, index: int) -> int | None:
        """Return the release that a replica points to; None where it points to none."""
        path = self.layout.current(self.deployment, index)
        if not path.is_symlink():
            return None
        name = path.readlink().name
        return int(name) if name.isdigit() and (self._folder / name).is_dir() else None

    def files(self, number: int) -> dict[str, str]:
        """Return the rendered files of a release by name, the plan included."""
        return {
            path.name: path.read_text(encoding="utf-8")
            for path in sorted(self.folder(number).iterdir())
            if path.is_file() and path.name != PROOF and not path.name.startswith(".")
        }

    def digest(self, number: int) -> str:
        """Return a digest of a release's files, so that what an engine was started with can be compared."""
        joined = "\0".join(f"{name}\0{text}" for name, text in sorted(self.files(number).items()))
        return hashlib.sha256(joined.encode()).hexdigest()[:16]

    def part(self, number: int, index: int) -> dict[str, Any] | None:
        """Return what a release plans for one replica: index, gpus, port; None where it does not know it."""
        plan = read_json(self.folder(number) / "plan.json") or {}
        return next((one for one in plan.get("replicas", []) if one["index"] == index), None)

    def find(self, files: Mapping[str, str]) -> int | None:
        """Return the newest release with just these files; None where there is none."""
        for number in reversed(self.numbers()):
            if self.files(number) == dict(files):
                return number
        return None

    def add(self, files: Mapping[str, str]) -> int:
        """Write a new release, whole or not at all; return its number."""
        number = (self.numbers() or [0])[-1] + 1
        building = beside(self.folder(number))
        if building.exists():
            shutil.rmtree(building)
        gid = self.layout.engine_gid
        make_folder(self._folder)
        make_folder(building, FOLDER_MODE, gid)
        for name, text in files.items():
            write_text(building / name, text, FILE_MODE, gid)
        building.rename(self.folder(number))
        keep_names(self._folder)
        return number

    def point(self, index: int, number: int) -> None:
        """Point one replica to a release."""
        path = self.layout.current(self.deployment, index)
        make_folder(path.parent)
        link(path, f"../../../releases/{self.deployment}/{number}")

    def unpoint(self, index: int) -> None:
        """Take a replica's link away; the releases stay."""
        self.layout.current(self.deployment, index).unlink(missing_ok=True)

    def mark_verified(self, number: int, index: int, evidence: Mapping[str, object]) -> None:
        """Record that a replica answered with a real token on this release, and on which GPUs."""
        proof = read_json(self.folder(number) / PROOF) or {}
        replicas = {**proof.get("replicas", {}), str(index): dict(evidence)}
        write_text(self.folder(number) / PROOF, as_json({"replicas": replicas}), FILE_MODE, self.layout.engine_gid)

    def verified(self, number: int) -> bool:
        """Say whether this release has ever answered with a real token."""
        return read_json(self.folder(number) / PROOF) is not None

    def proof(self, number: int, index: int) -> dict[str, Any] | None:
        """Return what was recorded when this replica answered on this release; None where it never did."""
        found = (read_json(self.folder(number) / PROOF) or {}).get("replicas", {}).get(str(index))
        return found if isinstance(found, dict) else None

    def gpu_uuids(self, number: int, index: int) -> list[str] | None:
        """Return the UUIDs of the GPUs on which this replica answered; None where none were recorded."""
        return (self.proof(number, index) or {}).get("gpu_uuids") or None

    def newest_verified(self) -> int | None:
        """Return the newest release that has answered with a real token."""
        return next((number for number in reversed(self.numbers()) if self.verified(number)), None)

    def prune(self) -> None:
        """Remove the oldest releases beyond what is kept, and half-written ones; what is used or proved last stays."""
        replicas = self.layout.state / "replicas" / self.deployment
        links = replicas.glob("*/current")
        needed = {self.current(int(path.parent.name)) for path in links if path.parent.name.isdigit()}
        needed.add(self.newest_verified())
        for number in self.numbers()[:-KEPT]:
            if number not in needed:
                shutil.rmtree(self.folder(number))
        for half in self._folder.glob(".*.new"):
            shutil.rmtree(half)
        for half in (*self._folder.glob("*/.*.new"), *replicas.glob("*/.*.new")):
            half.unlink()


def begin_trial(layout: Layout, replica: str, number: int, start_seconds: float | None = None) -> None:
    """Have the next start of a replica try a release, as long as this process lives; it may take that long."""
    path = layout.trial(replica)
    make_folder(path.parent)
    pid = os.getpid()
    write_text(
        path, as_json({"release": number, "start_seconds": start_seconds, "pid": pid, "pid_start": process_start(pid)})
    )


def end_trial(layout: Layout, replica: str) -> None:
    """Have the replica start on its recorded release again."""
    layout.trial(replica).unlink(missing_ok=True)


def trial_release(layout: Layout, replica: str, *, only_live: bool) -> int | None:
    """Return the release that a replica shall try; the run that asked for it may have ended unless `only_live`."""
    trial = read_json(layout.trial(replica))
    if trial is None or not isinstance(trial.get("release"), int):
        return None
    if only_live and process_start(int(trial["pid"])) != trial["pid_start"]:
        return None
    return int(trial["release"])


def start_seconds(store: Store, index: int, number: int) -> float | None:
    """Return how long a start on a release may take, as it was found for its trial; None where it was not."""
    trial = read_json(store.layout.trial(f"{store.deployment}.{index}")) or {}
    known = trial if trial.get("release") == number else store.proof(number, index) or {}
    found = known.get("start_seconds")
    return float(found) if isinstance(found, (int, float)) else None


def replicas_on_disk(layout: Layout) -> set[str]:
    """Return all replicas that have a link or were left on trial, e.g. `{"chat.0"}`."""
    links = (layout.state / "replicas").glob("*/*/current")
    trials = layout.trial("x").parent.glob("*.*")
    on_trial = {path.name for path in trials if not path.name.startswith(".")}
    return {f"{path.parent.parent.name}.{path.parent.name}" for path in links} | on_trial


def loose(layout: Layout) -> list[tuple[Path, int, int]]:
    """Return what of the releases has another mode or group than it shall have, and both."""
    wanted = _access(layout)
    return [(path, mode, gid) for path, mode, gid in wanted if not has_access(path, mode, gid)]


def tighten(found: list[tuple[Path, int, int]]) -> None:
    """Give everything that was found its mode and group."""
    for path, mode, gid in found:
        set_access(path, mode, gid)


def _access(layout: Layout) -> Iterator[tuple[Path, int, int]]:
    gid = layout.engine_gid
    for top in (layout.state, layout.state / "releases", layout.state / "replicas"):
        if top.is_dir():
            yield top, 0o755, -1
    replicas = layout.state / "replicas"
    for folder in [*(layout.state / "releases").glob("*"), *replicas.glob("*"), *replicas.glob("*/*")]:
        if folder.is_dir() and not folder.is_symlink():
            yield folder, 0o755, -1
    for release in sorted((layout.state / "releases").glob("*/[0-9]*")):
        yield release, FOLDER_MODE, gid
        for path in sorted(release.iterdir()):
            yield path, FILE_MODE, gid
    if layout.plan.exists():
        yield layout.plan, FILE_MODE, -1

"""The store of releases: rendered files of one deployment, numbered, never changed once written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuready.serving.files import as_json, link, read_json, write_text
from gpuready.serving.layout import Layout

KEPT = 5
"""Releases kept per deployment, the current ones included."""


@dataclass(frozen=True)
class Store:
    """The releases of one deployment."""

    layout: Layout
    deployment: str

    @property
    def _folder(self) -> Path:
        return self.layout.releases(self.deployment)

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
        folder = self._folder / str(number)
        return {
            path.name: path.read_text(encoding="utf-8")
            for path in sorted(folder.iterdir())
            if path.is_file() and path.name != "verified.json"
        }

    def find(self, files: Mapping[str, str]) -> int | None:
        """Return the newest release with just these files; None where there is none."""
        for number in reversed(self.numbers()):
            if self.files(number) == dict(files):
                return number
        return None

    def add(self, files: Mapping[str, str]) -> int:
        """Write a new release, whole or not at all; return its number."""
        number = (self.numbers() or [0])[-1] + 1
        building = self._folder / f".{number}.new"
        if building.exists():
            shutil.rmtree(building)
        building.mkdir(parents=True)
        for name, text in files.items():
            write_text(building / name, text)
        building.rename(self._folder / str(number))
        return number

    def point(self, index: int, number: int) -> None:
        """Point one replica to a release."""
        path = self.layout.current(self.deployment, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        link(path, f"../../../releases/{self.deployment}/{number}")

    def unpoint(self, index: int) -> None:
        """Take a replica's link away; the releases stay."""
        self.layout.current(self.deployment, index).unlink(missing_ok=True)

    def mark_verified(self, number: int, evidence: Mapping[str, object]) -> None:
        """Record that this release answered with a real token."""
        write_text(self._folder / str(number) / "verified.json", as_json(evidence))

    def verified(self, number: int) -> bool:
        """Say whether this release has ever answered with a real token."""
        return read_json(self._folder / str(number) / "verified.json") is not None

    def prune(self, in_use: set[int]) -> None:
        """Remove the oldest releases beyond what is kept; what a replica uses stays."""
        for number in self.numbers()[:-KEPT]:
            if number not in in_use:
                shutil.rmtree(self._folder / str(number))


def replicas_on_disk(layout: Layout) -> set[str]:
    """Return all replicas that have a link, e.g. `{"chat.0"}`."""
    folder = layout.state / "replicas"
    if not folder.is_dir():
        return set()
    return {f"{path.parent.parent.name}.{path.parent.name}" for path in folder.glob("*/*/current")}

"""Where a model's files are read: a folder of this server, or a hub. Both are judged by the same code."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Place(Protocol):
    """The files of one model."""

    title: str
    """What sentences call it."""

    def names(self) -> list[str]:
        """Return the names of the files at the top, sorted."""

    def where(self, name: str) -> str:
        """Return what sentences call one file."""

    def size(self, name: str) -> int:
        """Return the bytes of a file; FileNotFoundError where there is none."""

    def start(self, name: str, length: int) -> bytes:
        """Return the first bytes of a file, fewer where it has fewer."""


class Folder:
    """A folder on a disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.title = str(path)

    def names(self) -> list[str]:
        """Return the names of the files at the top, sorted."""
        return sorted(one.name for one in self._path.iterdir() if one.is_file())

    def where(self, name: str) -> str:
        """Return the path of a file."""
        return str(self._path / name)

    def size(self, name: str) -> int:
        """Return the bytes of a file."""
        return (self._path / name).stat().st_size

    def start(self, name: str, length: int) -> bytes:
        """Return the first bytes of a file."""
        with (self._path / name).open("rb") as file:
            return file.read(length)

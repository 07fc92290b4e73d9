"""The server as operations see it: its files, its programs, its process tree.

Every operation gets a `Machine`, so that its decisions can be tried on a directory with programs that are played.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuready.serving.files import write_text

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Done:
    """A program that has ended."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """Return what the program said about its failure, in one line."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return "; ".join(lines[-3:]) or f"exit code {self.code} without a word"


def run_program(argv: Sequence[str], stdin: str = "") -> Done:
    """Run a program with plain messages, without questions, and never through a shell."""
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "PATH": SEARCH_PATH,
        "DEBIAN_FRONTEND": "noninteractive",
        # needrestart is to list, never to restart, whatever its own configuration says.
        "NEEDRESTART_MODE": "l",
    }
    try:
        ended = subprocess.run(
            argv, input=stdin, capture_output=True, encoding="utf-8", errors="replace", check=False, env=environment
        )
    except FileNotFoundError:
        return Done(127, "", f"{argv[0]} is not installed")
    return Done(ended.returncode, ended.stdout, ended.stderr)


@dataclass(frozen=True)
class Machine:
    """One server; `root` and `run` are replaced in tests."""

    root: Path = Path("/")
    run: Callable[[Sequence[str]], Done] = run_program

    def path(self, absolute: str) -> Path:
        """Return where an absolute path of the server lies."""
        return self.root / absolute.lstrip("/")

    def read(self, absolute: str) -> str | None:
        """Return a file's text; None where there is no such file."""
        try:
            return self.path(absolute).read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, absolute: str, content: str, mode: int = 0o644) -> None:
        """Replace a file in one step: a reader, or a power cut, sees the old text or the new one."""
        target = self.path(absolute)
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_text(target, content, mode)

    def remove(self, absolute: str) -> None:
        """Remove a file; that it is not there is fine."""
        self.path(absolute).unlink(missing_ok=True)

    def which(self, program: str) -> str | None:
        """Return where a program lies on this server."""
        if self.root == Path("/"):
            return shutil.which(program, path=SEARCH_PATH)
        for folder in SEARCH_PATH.split(":"):
            if self.path(f"{folder}/{program}").exists():
                return f"{folder}/{program}"
        return None

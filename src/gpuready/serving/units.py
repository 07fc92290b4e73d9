"""Talks to systemd about the units of replicas."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
from pathlib import Path

from gpuready.serving.layout import UNIT


def unit_of(replica: str) -> str:
    """Return the unit of a replica."""
    return UNIT.format(replica=replica)


def systemctl(*words: str) -> subprocess.CompletedProcess[str]:
    """Run systemctl; the caller looks at the exit status."""
    return subprocess.run(["systemctl", *words], capture_output=True, text=True, check=False)


def properties(unit: str, *names: str) -> dict[str, str]:
    """Return properties of a unit, as systemd knows them now."""
    answer = systemctl("show", unit, *(f"--property={name}" for name in names))
    pairs = (line.partition("=")[::2] for line in answer.stdout.splitlines() if "=" in line)
    return dict(pairs)


def digest(path: Path) -> str:
    """Return a digest of a unit file; empty where there is none."""
    return digest_of(path.read_text(encoding="utf-8")) if path.exists() else ""


def digest_of(text: str) -> str:
    """Return a digest of a unit's text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_stopped(unit: str) -> bool:
    """Say whether nothing of a unit runs and nothing is about to."""
    return properties(unit, "ActiveState").get("ActiveState") in ("inactive", "failed")


def last_words(unit: str, lines: int = 15) -> str:
    """Return the end of a unit's journal, for messages."""
    answer = subprocess.run(
        ["journalctl", "--unit", unit, "--lines", str(lines), "--no-pager", "--output", "cat"],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip()


def sync_journal() -> None:
    """Have the journal take up what processes wrote in their last moment, which may still be on its way."""
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(["journalctl", "--sync"], capture_output=True, check=False)


def words_of(invocation: str, lines: int) -> list[str]:
    """Return the last lines that the processes of one start of a unit wrote to the journal."""
    if not invocation:
        return []
    sync_journal()
    wanted = [f"_SYSTEMD_INVOCATION_ID={invocation}", "--lines", str(lines)]
    answer = subprocess.run(
        ["journalctl", *wanted, "--no-pager", "--output", "cat"], capture_output=True, text=True, check=False
    )
    return answer.stdout.splitlines()

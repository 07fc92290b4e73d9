"""Files that a command is asked to write."""

from __future__ import annotations

from pathlib import Path

from gpuready.outcome import Failure, Refusal


def write(path: str, text: str) -> None:
    """Write a text file.

    Raises:
        Refusal: when it cannot be written.
    """
    try:
        Path(path).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise Refusal(Failure("output.unwritable", f"{path} cannot be written", str(error.strerror))) from error

"""The shape of a verb: what it takes and what runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpuready.outcome import Result


@dataclass(frozen=True)
class Call:
    """One call of a verb."""

    input: dict[str, Any]
    """The JSON object from stdin or `--input`."""
    arguments: list[str]
    """Positional arguments, in the verb's order."""
    check: bool
    """Say what would change, change nothing."""


@dataclass(frozen=True)
class Verb:
    """One verb of a noun."""

    help: str
    run: Callable[[Call], Result]
    changes: bool = False
    """Changes the machine, so it takes `--check`."""
    takes_input: bool = False
    arguments: list[str] = field(default_factory=list)

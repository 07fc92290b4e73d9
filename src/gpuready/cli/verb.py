"""The shape of a verb: what it takes and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuready.cli.screen import Screen
from gpuready.outcome import Result


@dataclass(frozen=True)
class Option:
    """One option of a verb: `--name METAVAR`."""

    name: str
    """As it is written, without the two dashes; `Call.options` has it under the same name with underscores."""
    help: str
    metavar: str = ""
    """What its value is called; empty: a switch that takes none."""
    kind: Callable[[str], Any] = str
    """Reads the value; a ValueError's text ends the sentence "--name = value: ..."."""
    default: Any = None
    choices: Callable[[], Sequence[str]] | None = None
    """The values that are allowed, and no others."""
    known: Callable[[], Sequence[str]] | None = None
    """Values that a shell may offer, among others that are allowed as well; without it a shell offers files."""
    repeatable: bool = False
    """May stand several times; the value is then the list of all."""

    @property
    def key(self) -> str:
        """Return the name under which `Call.options` holds the value."""
        return self.name.replace("-", "_")


@dataclass(frozen=True)
class Call:
    """One call of a verb."""

    input: dict[str, Any]
    """The JSON object from stdin or `--input`."""
    arguments: list[str]
    """Positional arguments, in the verb's order."""
    check: bool
    """Say what would change, change nothing."""
    options: dict[str, Any] = field(default_factory=dict)
    """The verb's own options by `Option.key`; what was not given has its default."""
    screen: Screen = field(default_factory=Screen)
    """What the reader of `Result.page` can show."""


@dataclass(frozen=True)
class Verb:
    """One verb of a noun."""

    help: str
    run: Callable[[Call], Result]
    changes: bool = False
    """Changes the machine, so it takes `--check`."""
    takes_input: bool = False
    arguments: list[str] = field(default_factory=list)
    optional_argument: str = ""
    """One more positional argument, which may be left out; it is the last of `Call.arguments` where it is given."""
    options: Sequence[Option] = ()
    more: str = ""
    """What `--help` says below the options: examples."""


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return what reads a whole number of that range."""

    def read(text: str) -> int:
        digits = text.replace("_", "")
        if not (digits.isascii() and digits.isdigit()) or len(digits) > 18 or not low <= int(digits) <= high:
            raise ValueError(f"allowed is a whole number from {low} to {high}")
        return int(digits)

    return read


def number(low: float, high: float) -> Callable[[str], float]:
    """Return what reads a number of that range."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise ValueError(f"allowed is a number from {low:g} to {high:g}")
        return value

    return read

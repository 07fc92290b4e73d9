"""The text file that holds the simulated hardware of one machine: read, edited, and replaced as a whole.

What each key means and what must hold between values stands in sim/nvml/state_standin.h alone: here are sections and
lines. Standard library only; it is also copied to the simulated machines.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

FORMAT = "gpuready-standin 2"
NOTE = "# Simulated hardware. What each key means: state_standin.h, docs/simulator.md."
PATH = "/var/lib/gpuready-standin/gpus.conf"
PATH_VARIABLE = "GPUREADY_STANDIN_STATE"
EVENTS_KEPT = 64
HEADS = ((["system"], 1), (["gpu"], 2), (["fault"], 3))
"""How a section's title begins, and how many words it has."""
LISTS = frozenset({"event", "process", "profile", "gpu_instance", "compute_instance", "nvlink", "nvlink_down"})
"""The keys that may stand more than once."""


def as_number(text: str) -> int:
    """Return a number of the file, which may be hexadecimal after 0x, and decimal with zeros before it."""
    return int(text, 16 if text.startswith("0x") else 10)


class StateError(Exception):
    """One sentence that says what is wrong with a state file, without a full stop."""


@dataclass
class Section:
    """The lines under one heading, in their order; a key of a list stands as often as it has values."""

    title: str
    """`system`, `gpu N`, or `fault NAME N|system`."""
    lines: list[tuple[str, str]] = field(default_factory=list)

    def get(self, key: str) -> str | None:
        """Return the value of a key that stands once; None where it is absent or `-`."""
        value = next((value for name, value in reversed(self.lines) if name == key), "-")
        return None if value == "-" else value

    def number(self, key: str) -> int | None:
        """Return the number that a key holds; None where it is absent."""
        value = self.get(key)
        return None if value is None else as_number(value)

    def all(self, key: str) -> list[str]:
        """Return every value of a key that may stand more than once."""
        return [value for name, value in self.lines if name == key]

    def set(self, key: str, value: str) -> None:
        """Give a key one value, in the place where it stood."""
        place = next((i for i, (name, _) in enumerate(self.lines) if name == key), len(self.lines))
        self.lines = [line for line in self.lines if line[0] != key]
        self.lines.insert(place, (key, value))

    def add(self, key: str, value: str) -> None:
        """Give a key one value more."""
        self.lines.append((key, value))

    def remove(self, key: str, value: str) -> bool:
        """Take one value of a key away; say whether it was there."""
        found = (key, value) in self.lines
        if found:
            self.lines.remove((key, value))
        return found


@dataclass
class State:
    """The sections of a state file."""

    sections: list[Section]

    @property
    def system(self) -> Section:
        """Return what holds for the whole machine."""
        return self._titled("system")

    @property
    def gpus(self) -> list[Section]:
        """Return the GPUs, by index."""
        return [section for section in self.sections if section.title.startswith("gpu ")]

    @property
    def faults(self) -> list[Section]:
        """Return what is laid over GPUs and system."""
        return [section for section in self.sections if section.title.startswith("fault ")]

    def _titled(self, title: str) -> Section:
        for section in self.sections:
            if section.title == title:
                return section
        raise StateError(f"it has no section [{title}]")

    def effective(self, target: str) -> Section:
        """Return what holds for `system` or `gpu N` now: its own lines with those of its faults laid over them."""
        section = self._titled(target)
        found = Section(target, list(section.lines))
        bits: dict[str, int] = {}
        for fault in self.faults:
            if fault.title.split()[2] != target.removeprefix("gpu "):
                continue
            for key, value in fault.lines:
                if key in LISTS:
                    found.add(key, value)
                elif value.startswith("+"):
                    found.set(key, str((found.number(key) or 0) + as_number(value[1:])))
                elif value.startswith("|"):
                    bits[key] = bits.get(key, 0) | as_number(value[1:])
                    found.set(key, hex(bits[key]))
                elif key != "until":
                    found.set(key, value)
        return found

    def add_event(self, gpu: int, kind: int, data: int, now: float | None = None) -> None:
        """Add an event to the history and forget the oldest when there are too many, as state_add_event does."""
        number = (self.system.number("events_made") or 0) + 1
        for old in self.system.all("event")[: -(EVENTS_KEPT - 1)]:
            self.system.remove("event", old)
        self.system.set("events_made", str(number))
        self.system.add("event", f"{number} {gpu} {kind} {data} - - {int(time.time() if now is None else now)}")


def identity(machine: str, gpu: int) -> tuple[str, str]:
    """Return UUID and serial number of a machine's GPU; two machines of one name alone share them."""
    made = uuid.uuid5(uuid.NAMESPACE_DNS, f"{machine}/gpu/{gpu}")
    return f"GPU-{made}", f"165{made.int % 10**10:010d}"


def rename(path: Path, machine: str) -> None:
    """Make the hardware that of another machine."""
    with change(path) as state:
        for index, gpu in enumerate(state.gpus):
            gpu_uuid, serial = identity(machine, index)
            gpu.set("uuid", gpu_uuid)
            gpu.set("serial", serial)


def parse(text: str) -> State:
    """Return the sections of a state file; whether its values make sense is the library's to say."""
    lines = text.splitlines()
    if not lines or lines[0].strip() != FORMAT:
        raise StateError(f"line 1: not `{FORMAT}`")
    sections: list[Section] = []
    for number, line in enumerate((line.strip() for line in lines[1:]), 2):
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            title = line[1:-1].strip()
            words = title.split()
            if not line.endswith("]") or (words[:1], len(words)) not in HEADS:
                raise StateError(
                    f"line {number}: a section is [system], [gpu N], [fault NAME N] or [fault NAME system]"
                )
            if re.fullmatch(r"0x[0-9a-fA-F]+|0[0-9]+", words[-1]):  # the library knows a GPU by these, too
                title = f"{title.removesuffix(words[-1])}{as_number(words[-1])}"
            sections.append(Section(title))
            continue
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not sections:
            raise StateError(f"line {number}: neither a section nor `key = value` under one")
        sections[-1].lines.append((key, value))
    return State(sections)


def render(state: State) -> str:
    """Return the text of a state file."""
    parts = [
        "\n".join([f"[{section.title}]", *(f"{key} = {value}" for key, value in section.lines)])
        for section in state.sections
    ]
    return "\n\n".join([f"{FORMAT}\n{NOTE}", *parts]) + "\n"


def read(path: Path) -> State:
    """Read the file at `path`; a writer replaces it as a whole, so no lock is needed."""
    try:
        return parse(path.read_text(encoding="ascii"))
    except UnicodeDecodeError:
        raise StateError("it is not a text file") from None


def accept(_file: Path) -> None:
    """Check nothing."""


def write(path: Path, state: State, check: Callable[[Path], None] = accept) -> None:
    """Replace the file at `path` as a whole, unless `check` refuses the new one by raising. Hold the lock."""
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("w", encoding="ascii") as file:
            file.write(render(state))
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            # The kernel's own time stamps are too coarse to tell two changes of one millisecond apart.
            now = time.time_ns()
            os.utime(file.fileno(), ns=(now, now))
        check(new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the lock that every process, the library's included, holds while it changes the file at `path`."""
    handle = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def change(path: Path, check: Callable[[Path], None] = accept) -> Iterator[State]:
    """Give the state to be edited, and put it in place when the block ends well and something was changed."""
    with lock(path):
        state = read(path)
        before = render(state)
        yield state
        if render(state) != before:
            write(path, state, check)

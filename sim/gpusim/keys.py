"""The keys of the state file that hold one value, as the library's own table and header tell them."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from sim.machine.common import CHECKOUT, SimError

SOURCES = CHECKOUT / "sim/nvml"
KEPT_BY_THE_LIBRARY = {"serial", "events_made"}
"""Of the whole machine: counters, which somebody else's number would only confuse."""


@dataclass(frozen=True)
class Key:
    """One key, and what may stand behind it."""

    name: str
    of: str
    """`system` or `gpu`."""
    length: int
    """Of a text; 0 for a number."""

    @property
    def form(self) -> str:
        """Return the form in words."""
        if self.length:
            return f"a text of at most {self.length} printable characters"
        return "a whole number (decimal, or hexadecimal after 0x), or - for what the hardware does not have"

    def refusal(self, value: str) -> str | None:
        """Return why the value cannot stand behind this key, or None."""
        number = re.fullmatch(r"-|[0-9]+|0x[0-9a-fA-F]+", value)
        good = (len(value) <= self.length and re.fullmatch(r"[ -~]*", value)) if self.length else number
        return None if good else f"{self.name} = {value} is not {self.form}"


def table(sources: Path = SOURCES) -> list[Key]:
    """Return all keys that `set` takes."""
    header = (sources / "state_standin.h").read_text(encoding="ascii")
    table = (sources / "state_fields_standin.c").read_text(encoding="ascii")
    lengths: dict[tuple[str, str], int] = {}
    for of, struct in (("system", "state"), ("gpu", "gpu")):
        body = re.search(rf"^struct {struct} {{\n(.*?)^}};", header, re.MULTILINE | re.DOTALL)
        for name, size in re.findall(r"\bchar (\w+)\[(\d+)\];", body[1] if body else ""):
            lengths[of, name] = int(size) - 1
    rows = [
        *(("system", *row) for row in re.findall(r"FIELD_(TEXT|NUMBER)_OF\(state, (\w+)\)", table)),
        *(("gpu", *row) for row in re.findall(r"^    (TEXT|NUMBER)\((\w+)\),$", table, re.MULTILINE)),
    ]
    return [
        Key(name, of, lengths[of, name] if kind == "TEXT" else 0)
        for of, kind, name in rows
        if of == "gpu" or name not in KEPT_BY_THE_LIBRARY
    ]


def find(name: str) -> Key:
    """Return a key by its name, or refuse it with the nearest one."""
    known = {key.name: key for key in table()}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    fix = (
        f"the nearest is {near[0]}, {known[near[0]].form}"
        if near
        else "`./scripts/gpusim set NAME` without a key lists them"
    )
    raise SimError(f"{name} is not a key that can be set", fix)

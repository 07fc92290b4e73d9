"""Flags that the memory arithmetic knows: the planner counts with what an operator sets of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gpuready.outcome import Failure
from gpuready.planning import support


@dataclass(frozen=True)
class Setting:
    """A flag that the memory arithmetic knows: the field of `Run`, its type, and the most that it can be."""

    field: str
    kind: type
    most: int = 0


SETTINGS = {
    known.field: known
    for known in (
        Setting("max_model_len", int, 100_000_000),
        Setting("max_num_seqs", int, 100_000),
        Setting("max_num_batched_tokens", int, 10_000_000),
        Setting("chunked_prefill_size", int, 10_000_000),
        Setting("memory_fraction", float, 1),
        Setting("kv_bytes", int, 2**40),
        Setting("tp", int, 16),
        Setting("pp", int, 16),
        Setting("dcp", int, 16),
        Setting("block_size", int, 1024),
        Setting("graph_max_batch", int, 100_000),
        Setting("dtype", str),
        Setting("quantization", str),
        Setting("kv_dtype", str),
        Setting("enforce_eager", bool),
        Setting("prefix_caching", bool),
    )
}
"""By the field of `Run`."""
_INVERSE = {"disable-radix-cache"}
"""Flags that are true where their setting is false."""
_OF_ITS_FILE = {"tensorrt_llm": {"tp_size": "tensor_parallel_size", "pp_size": "pipeline_parallel_size"}}
"""Settings that an engine's file spells otherwise than its command line, by engine."""


def settings_of(engine: str, version: str) -> dict[str, Setting]:
    """Return the flags that change where memory goes, by their spelling in a release's file."""
    found: dict[str, Setting] = {}
    for known in SETTINGS.values():
        name = support.flag(engine, version, known.field)
        if name:
            found.setdefault(_OF_ITS_FILE.get(engine, {}).get(name, name), known)
    return found


def says_nothing(known: Setting, value: Any) -> bool:
    """Say whether a value leaves the setting to the engine."""
    return value is None or (known.kind is str and value == "auto")


def setting(what: str, known: Setting, name: str, value: Any) -> tuple[dict[str, Any], Failure | None]:
    """Return a setting by its field, or why its value is refused."""
    negative = name.startswith("no-")
    if known.kind is bool and isinstance(value, bool):
        return {known.field: value != (negative or name in _INVERSE)}, None
    if known.kind is str and isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", value):
        return {known.field: value}, None
    found = number(known.kind, value) if known.kind in (int, float) and not negative else None
    if found is not None and 0 < found <= known.most:
        return {known.field: found}, None
    nouns = {int: "a whole number", float: "a number", str: "a name of letters and digits", bool: "true or false"}
    allowed = f"allowed is {nouns[known.kind]}" + (f" above 0, at most {known.most}" if known.most else "")
    return {}, Failure("plan.flag", what, allowed, "correct it")


def number(kind: type, value: Any) -> int | float | None:
    """Return a number that is written as one, also as a text, which `-e` makes of it; None for all else."""
    pattern = r"[0-9]{1,18}" if kind is int else r"[0-9]{0,18}(\.[0-9]{1,18})?"
    if isinstance(value, str):
        return kind(value) if value and re.fullmatch(pattern, value) else None
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        return None
    return value if value == value else None

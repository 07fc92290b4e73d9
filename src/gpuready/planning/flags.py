"""Engine flags that an operator sets: they win over the plan, or are refused."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gpuready.outcome import Failure

OWN = {
    "model",
    "served-model-name",
    "host",
    "port",
    "uds",
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "data-parallel-size",
    "shutdown-timeout",
    "config",
    "root-path",
    "ssl-keyfile",
    "ssl-certfile",
    "ssl-ca-certs",
}
"""Flags that gpuready must own: placement, readiness, gateway and drain rely on them."""

SECRET = {"api-key", "hf-token"}
"""Flags that hold secrets: a rendered file is no place for them."""

SETTINGS: dict[str, tuple[str, type, int]] = {
    "max-model-len": ("max_model_len", int, 100_000_000),
    "max-num-seqs": ("max_num_seqs", int, 100_000),
    "max-num-batched-tokens": ("max_num_batched_tokens", int, 10_000_000),
    "gpu-memory-utilization": ("gpu_memory_utilization", float, 1),
    "kv-cache-memory-bytes": ("kv_cache_memory_bytes", int, 2**40),
}
"""Flags that the memory arithmetic knows: the plan's name for each, its type, and the most that it can be."""


def spelled(name: str) -> str:
    """Return a flag in the engine's spelling; vLLM takes underscores for dashes."""
    return name.lstrip("-").replace("_", "-")


def split(where: str, flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[Failure]]:
    """Split flags into settings of the plan and the rest, and say what is refused."""
    failures = []
    settings: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    written: dict[str, str] = {}
    for key, value in flags.items():
        name = spelled(key)
        positive = name.removeprefix("no-")
        if positive in written:
            what = f"{where}, flags.{key} and flags.{written[positive]} are the same flag"
            failures.append(Failure("plan.flag_twice", what, "", "keep one of them"))
        elif name in OWN:
            failures.append(Failure("plan.flag", f"{where}, flags.{key} is set by gpuready itself", "", "remove it"))
        elif name in SECRET:
            what = f"{where}, flags.{key} is a secret, and rendered files are no place for one"
            failures.append(Failure("plan.flag_secret", what, "", "remove it; engines listen on loopback only"))
        elif name in SETTINGS:
            setting, kind, most = SETTINGS[name]
            number = _number(kind, value)
            if number is None or not 0 < number <= most:
                noun = "a whole number" if kind is int else "a number"
                what = f"{where}, flags.{key} = {_shown(value)} is refused"
                failures.append(Failure("plan.flag", what, f"allowed is {noun} above 0, at most {most}", "correct it"))
            else:
                settings[setting] = number
        elif near := difflib.get_close_matches(name, [*SETTINGS, *OWN], n=1, cutoff=0.92):
            failures.append(Failure("plan.flag", f"{where}, flags.{key}: no such flag", "", f"did you mean {near[0]}?"))
        elif strange := next(_strange(value), None):
            what = f"{where}, flags.{key} = {_shown(value)} is refused"
            allowed = "allowed are texts, finite numbers, true, false, null, and lists and mappings of these"
            failures.append(Failure("plan.flag", what, f"{strange}, {allowed}", "correct it"))
        else:
            rest[name] = value
        written[positive] = key
    return settings, rest, failures


def _number(kind: type, value: Any) -> int | float | None:
    """Return a number that is written as one, also as a text, which `-e` makes of it; None for all else."""
    pattern = r"[0-9]{1,18}" if kind is int else r"[0-9]{0,18}(\.[0-9]{1,18})?"
    if isinstance(value, str):
        return kind(value) if value and re.fullmatch(pattern, value) else None
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        return None
    return value if value == value else None


def _strange(value: Any) -> Iterator[str]:
    """Yield what of a value the engine's file cannot hold as it is meant."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str):
                yield f"its key {_shown(key)} is no text"
            yield from _strange(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strange(one)
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield f"{value} is not finite"
    elif isinstance(value, int):
        if abs(value) >= 2**64:
            yield "a number has more than 64 bits"
    elif value is not None and not isinstance(value, str):
        yield f"{_shown(value)} is a {_NOUNS.get(type(value).__name__, 'value of another kind')}"


_NOUNS = {"date": "date", "datetime": "date", "bytes": "binary value", "set": "set"}


def _shown(value: Any) -> str:
    try:
        return (ascii(value) if isinstance(value, str | list | Mapping) else ascii(str(value))[1:-1])[:80]
    except ValueError:
        return "a number of more than 4300 digits"


def as_yaml(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags as vLLM's configuration file takes them: it skips what is false, so `no-` says it."""
    return {
        (f"no-{name}" if value is False else name): (True if value is False else value) for name, value in flags.items()
    }

"""Engine flags that an operator sets: they win over the plan, or are refused."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpuready.outcome import Failure
from gpuready.planning import support

OWN = {
    "model",
    "served-model-name",
    "host",
    "port",
    "uds",
    "data-parallel-size",
    "shutdown-timeout",
    "config",
    "root-path",
    "ssl-keyfile",
    "ssl-certfile",
    "ssl-ca-certs",
    # A replica's processes are all on one server.
    "nnodes",
    "node-rank",
    "master-addr",
    "master-port",
    "headless",
    "data-parallel-address",
    "data-parallel-rpc-port",
    "distributed-executor-backend",
    "dist-init-addr",
}
"""Flags that gpuready must own: placement, readiness, gateway and drain rely on them."""

SECRET = {"api-key", "hf-token"}
"""Flags that hold secrets: a rendered file is no place for them."""


@dataclass(frozen=True)
class Setting:
    """A flag that the memory arithmetic knows: the field of `Run`, its type, and the most that it can be."""

    field: str
    kind: type
    most: int = 0


SETTINGS = {
    "max-model-len": Setting("max_model_len", int, 100_000_000),
    "max-num-seqs": Setting("max_num_seqs", int, 100_000),
    "max-num-batched-tokens": Setting("max_num_batched_tokens", int, 10_000_000),
    "gpu-memory-utilization": Setting("memory_fraction", float, 1),
    "kv-cache-memory-bytes": Setting("kv_bytes", int, 2**40),
    "tensor-parallel-size": Setting("tp", int, 16),
    "pipeline-parallel-size": Setting("pp", int, 16),
    "decode-context-parallel-size": Setting("dcp", int, 16),
    "block-size": Setting("block_size", int, 1024),
    "max-cudagraph-capture-size": Setting("graph_max_batch", int, 100_000),
    "dtype": Setting("dtype", str),
    "quantization": Setting("quantization", str),
    "kv-cache-dtype": Setting("kv_dtype", str),
    "enforce-eager": Setting("enforce_eager", bool),
    "enable-prefix-caching": Setting("prefix_caching", bool),
}
"""Flags of vLLM that change where memory goes, by their spelling; the planner counts with them."""
FLAG_OF = {setting.field: name for name, setting in SETTINGS.items()}


def settings_of(engine: str, version: str) -> dict[str, Setting]:
    """Return the flags that change where memory goes, by their spelling in a release."""
    spelled = {support.flag(engine, version, known.field): known for known in SETTINGS.values()}
    return {name: known for name, known in spelled.items() if name}


_OF_ITS_FILE = {"tensorrt_llm": {"tensor_parallel_size": "tp_size", "pipeline_parallel_size": "pp_size"}}
"""Settings that an engine's file spells otherwise than its command line, by engine."""
_SWITCH_OFF = {"disable-radix-cache"}
"""Flags that are true where their setting is false."""


def spelled(name: str, engine: str) -> str:
    """Return a flag in the engine's spelling: with dashes before its first dot, and TensorRT-LLM's with none at all."""
    first, dot, below = name.lstrip("-").partition(".")
    if engine == "tensorrt_llm":
        whole = f"{first}{dot}{below}".replace("-", "_")
        return _OF_ITS_FILE[engine].get(whole, whole)
    return first.replace("_", "-") + dot + below


def _named(flags: Mapping[str, Any], engine: str, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield flags by name; what TensorRT-LLM has nested by its dotted name, however it is written."""
    for key, value in flags.items():
        if (
            engine == "tensorrt_llm"
            and isinstance(value, Mapping)
            and value
            and all(isinstance(one, str) for one in value)
        ):
            yield from _named(value, engine, f"{above}{key}.")
        else:
            yield above + key, value


def split(
    where: str, flags: Mapping[str, Any], engine: str, version: str
) -> tuple[dict[str, Any], dict[str, Any], list[Failure]]:
    """Split flags into settings, by the names of `Run`'s fields, and the rest; and say what is refused."""
    failures = []
    settings: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    written: dict[str, str] = {}
    owned = settings_of(engine, version)
    for key, value in _named(flags, engine):
        name = spelled(key, engine)
        positive = name.removeprefix("no-")
        known = owned.get(positive)
        if positive in written:
            what = f"{where}, flags.{key} and flags.{written[positive]} are the same flag"
            failures.append(Failure("plan.flag_twice", what, "", "keep one of them"))
        elif refused := _refused(where, key, name, value, owned):
            failures.append(refused)
        elif known is None or _says_nothing(known, value):
            rest[name] = value
        else:
            found, refused = _setting(f"{where}, flags.{key} = {_shown(value)} is refused", known, name, value)
            failures += [refused] if refused else []
            settings |= found
        written[positive] = key
    return settings, rest, failures


def _refused(where: str, key: str, name: str, value: Any, owned: Mapping[str, Setting]) -> Failure | None:
    """Return why a flag cannot be set at all, or why its value cannot stand in the engine's file."""
    if name.replace("_", "-") in OWN:
        return Failure("plan.flag", f"{where}, flags.{key} is set by gpuready itself", "", "remove it")
    if name in SECRET:
        what = f"{where}, flags.{key} is a secret, and rendered files are no place for one"
        return Failure("plan.flag_secret", what, "", "remove it; engines listen on loopback only")
    if name.removeprefix("no-") in owned:
        return None
    if near := difflib.get_close_matches(name, [*owned, *OWN], n=1, cutoff=0.92):
        return Failure("plan.flag", f"{where}, flags.{key}: no such flag", "", f"did you mean {near[0]}?")
    if strange := next(_strange(value), None):
        allowed = "allowed are texts, finite numbers, true, false, null, and lists and mappings of these"
        what = f"{where}, flags.{key} = {_shown(value)} is refused"
        return Failure("plan.flag", what, f"{strange}, {allowed}", "correct it")
    return None


def _says_nothing(known: Setting, value: Any) -> bool:
    """Say whether a value leaves the setting to the engine."""
    return known.kind is str and value in (None, "auto")


def _setting(what: str, known: Setting, name: str, value: Any) -> tuple[dict[str, Any], Failure | None]:
    """Return a setting by its field, or why its value is refused."""
    if known.kind is bool and isinstance(value, bool):
        return {known.field: value != (name.startswith("no-") or name in _SWITCH_OFF)}, None
    if known.kind is str and isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", value):
        return {known.field: value}, None
    number = _number(known.kind, value) if known.kind in (int, float) and not name.startswith("no-") else None
    if number is not None and 0 < number <= known.most:
        return {known.field: number}, None
    nouns = {int: "a whole number", float: "a number", str: "a name of letters and digits", bool: "true or false"}
    allowed = f"allowed is {nouns[known.kind]}" + (f" above 0, at most {known.most}" if known.most else "")
    return {}, Failure("plan.flag", what, allowed, "correct it")


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

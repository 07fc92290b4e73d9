"""A run's settings as its engine's release spells them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from gpuready.planning import support
from gpuready.planning.memory.run import Run

_USUAL = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "dcp": 1, "task": "generate"}
"""What an engine does where nothing is said: no split, and answers in text."""


def settings(run: Run) -> dict[str, Any]:
    """Return every setting by its name in `Run`, as plain data; None: the engine's own default."""
    known = {one.name: getattr(run, one.name) for one in fields(run)}
    return {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in known.items()
    }


def decided(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that say something: neither a default of the engine nor what is usual."""
    return {name: value for name, value in known.items() if value not in (None, False) and _USUAL.get(name) != value}


def flags(run: Run) -> tuple[str, ...]:
    """Return the settings as the release takes them: flags, or lines of TensorRT-LLM's YAML.

    A setting for which the release has no flag is left out, and one that is its default.
    """
    known = settings(run)
    if run.prefix_caching is False:
        known["prefix_caching"] = "off"
    found: dict[str, str] = {}
    for name, value in decided(known).items():
        spelled = _flag(run, name)
        if spelled and spelled not in found:
            written = _written(run.engine, spelled, name, value)
            if written:
                found[spelled] = written
    return tuple(found.values())


def _flag(run: Run, name: str) -> str | None:
    try:
        return support.flag(run.engine, run.version, name)
    except KeyError:
        return None


def _written(engine: str, spelled: str, name: str, value: Any) -> str:
    """Return one flag with its value; empty where what is wanted is what the engine does without it."""
    if engine == "tensorrt_llm":
        return f"{spelled}: {'false' if value == 'off' else 'true' if value is True else value}"
    if name == "prefix_caching":
        # SGLang has a flag to switch it off, vLLM one for each way.
        if spelled.startswith("disable"):
            return f"--{spelled}" if value == "off" else ""
        return f"--no-{spelled}" if value == "off" else f"--{spelled}"
    bare = value is True or spelled.startswith("enable-")
    return f"--{spelled}" if bare else f"--{spelled} {value}"

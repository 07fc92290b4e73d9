"""Engine flags that an operator sets: they win over the plan, or are refused."""

from __future__ import annotations

from collections.abc import Mapping
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

SETTINGS: dict[str, tuple[str, type]] = {
    "max-model-len": ("max_model_len", int),
    "max-num-seqs": ("max_num_seqs", int),
    "max-num-batched-tokens": ("max_num_batched_tokens", int),
    "gpu-memory-utilization": ("gpu_memory_utilization", float),
    "kv-cache-memory-bytes": ("kv_cache_memory_bytes", int),
}
"""Flags that the memory arithmetic knows, with the plan's name for each."""


def spelled(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags in the engine's spelling; vLLM takes underscores for dashes."""
    return {name.replace("_", "-").lstrip("-"): value for name, value in flags.items()}


def split(where: str, flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[Failure]]:
    """Split flags into settings of the plan and the rest, and say what is refused."""
    failures = []
    settings: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in spelled(flags).items():
        if name in OWN:
            failures.append(Failure("plan.flag", f"{where}, flags.{name} is set by gpuready itself", "", "remove it"))
        elif name in SECRET:
            what = f"{where}, flags.{name} is a secret, and rendered files are no place for one"
            failures.append(Failure("plan.flag_secret", what, "", "remove it; engines listen on loopback only"))
        elif name in SETTINGS:
            key, kind = SETTINGS[name]
            try:
                settings[key] = kind(value)
            except (TypeError, ValueError):
                what = f"{where}, flags.{name} = {value!r} is not a number"
                failures.append(Failure("plan.flag", what, "", "set a number"))
                continue
            if settings[key] <= 0:
                what = f"{where}, flags.{name} = {value!r} is not above zero"
                failures.append(Failure("plan.flag", what, "", "set a number above zero"))
        else:
            rest[name] = value
    return settings, rest, failures


def as_yaml(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags as vLLM's configuration file takes them: it skips what is false, so `no-` says it."""
    return {
        (f"no-{name}" if value is False else name): (True if value is False else value) for name, value in flags.items()
    }

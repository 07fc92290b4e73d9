"""Mistakes that an engine's own parser should refuse: what is wrong, and how it changes a file that is right.

Flags and when they went away are those of the engines' sources: vllm/engine/arg_utils.py, sglang/srt/server_args.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mistake:
    """One mistake: the flag that should be named, and what it is set to."""

    kind: str
    flag: str
    value: Any
    since: tuple[int, ...] = ()
    """First release in which it is a mistake, where the flag was there before."""
    until: tuple[int, ...] = ()
    """First release in which it is none any more."""


COMMON = (
    Mistake("no flag at all", "no-such-flag", 1),
    Mistake("a flag of another engine", "kv_cache_config", {"free_gpu_memory_fraction": 0.9}),
)
VLLM = (
    *COMMON,
    Mistake("a letter wrong", "max-num-seqz", 8),
    Mistake("British spelling", "gpu-memory-utilisation", 0.9),
    Mistake("only the beginning of its name", "max-num-batched", 8192),
    Mistake("a flag of another engine", "mem-fraction-static", 0.9),
    Mistake("removed: V0's swap space", "swap-space", 4, (0, 18)),
    Mistake("removed: V0's multi-step scheduling", "num-scheduler-steps", 8, (0, 10)),
    Mistake("removed: device", "device", "cuda", (0, 10)),
    Mistake("removed: guided decoding", "guided-decoding-backend", "xgrammar", (0, 12)),
    Mistake("not a choice", "kv-cache-dtype", "fp9"),
    Mistake("not a choice", "dtype", "bf17"),
    Mistake("not a choice", "scheduling-policy", "fastest"),
    Mistake("not a choice", "load-format", "pickled"),
    Mistake("not a choice", "quantization", "fp7"),
    Mistake("a text for a number", "max-num-seqs", "many"),
    Mistake("a fraction for a whole number", "max-num-seqs", 8.5),
    Mistake("a unit that does not exist", "max-model-len", "32q"),
    Mistake("a list for one number", "max-num-seqs", [8, 16]),
    Mistake("a mapping for a number", "max-num-seqs", {"value": 8}),
    Mistake("null for a number", "max-num-seqs", None),
    Mistake("out of range: above 1", "gpu-memory-utilization", 1.5),
    Mistake("out of range: 0", "gpu-memory-utilization", 0),
    Mistake("out of range: below 0", "max-num-seqs", -8),
    Mistake("out of range: 0", "tensor-parallel-size", 0),
    Mistake("out of range: below 0", "kv-cache-memory-bytes", -1),
    # The reader of 0.25.0 skips it still; that of 0.32.0 writes it as `no-` by itself (run).
    Mistake("off, in words that the reader skips", "enable-prefix-caching", False, until=(0, 32)),
    Mistake("JSON that is broken", "speculative-config", "{broken"),
    Mistake("a key that JSON's record does not have", "compilation-config", '{"no_such_key": 1}'),
    Mistake("a port of its own", "port", 9999),
)
SGLANG = (
    *COMMON,
    Mistake("a letter wrong", "max-runing-requests", 8),
    Mistake("only the beginning of its name", "mem-fraction", 0.9),
    Mistake("a flag of another engine", "gpu-memory-utilization", 0.9),
    Mistake("a flag of another engine", "max-model-len", 4096),
    Mistake("renamed: the graphs' greatest batch", "cuda-graph-max-bs", 8, (0, 5, 23)),
    Mistake("removed: torchao", "torchao-config", "int8wo", (0, 5, 11)),
    Mistake("not a choice", "kv-cache-dtype", "fp9"),
    Mistake("not a choice", "dtype", "bf17"),
    Mistake("not a choice", "schedule-policy", "fastest"),
    Mistake("not a choice", "attention-backend", "flash9"),
    Mistake("not a choice", "quantization", "fp7"),
    Mistake("a text for a number", "max-running-requests", "many"),
    Mistake("a fraction for a whole number", "max-running-requests", 8.5),
    Mistake("a list for one number", "max-running-requests", [8, 16]),
    Mistake("a mapping for a number", "max-running-requests", {"value": 8}),
    Mistake("null for a number", "max-running-requests", None),
    Mistake("null for a text", "served-model-name", None),
    Mistake("out of range: above 1", "mem-fraction-static", 1.5),
    Mistake("out of range: 0", "mem-fraction-static", 0),
    Mistake("out of range: below 0", "max-running-requests", -8),
    Mistake("out of range: 0", "tp-size", 0),
    Mistake("a value for a switch", "disable-radix-cache", "off"),
    Mistake("a kind of option that its file cannot have", "help", True),
    Mistake("JSON that is broken", "json-model-override-args", "{broken"),
    Mistake("a port of its own", "port", 9999),
)
OF_ENGINE: Mapping[str, tuple[Mistake, ...]] = {"vllm": VLLM, "sglang": SGLANG}


def numbers(version: str) -> tuple[int, ...]:
    """Return a version as numbers, without what follows them: 0.5.10.post1 is (0, 5, 10)."""
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())


def of_release(engine: str, version: str) -> list[Mistake]:
    """Return what is a mistake in a release of an engine."""
    here = numbers(version)
    return [one for one in OF_ENGINE[engine] if one.since <= here and (not one.until or here < one.until)]

"""How long a start may take: the model's bytes at the rate at which this server reads them, and what an engine adds.

The limit is for what hangs, so it is wide: engines read less evenly than a test does, and a start that took long once
may do so again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuready.serving.files import read_json
from gpuready.serving.releases import PROOF, Store

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
COMPILE_SECONDS = 600
"""Compiling kernels and capturing graphs with cold caches; the planner's own limit allows the same."""
EAGER_SECONDS = 180
"""Importing, allocating and warming up where nothing is compiled."""
EAGER = ("enforce-eager", "disable-cuda-graph")
"""vLLM's and SGLang's words for it."""
SLOWER_THAN_READ = 4
"""An engine maps files page by page and copies them to a GPU; four of its bytes are counted for one that is read."""
LONGER_THAN_LAST = 3
"""A start may take this many times what the longest one took before."""
PROBE_BYTES = 256 * 1024**2
PROBE_SECONDS = 2.0
_BLOCK = 4 * 1024**2


@dataclass(frozen=True)
class Limit:
    """How long a start may take."""

    seconds: float
    note: str
    """What it follows from, as a sentence."""


def limit(store: Store, index: int, plan: Mapping[str, Any], declared: float = 0) -> Limit:
    """Return the limit of a replica's next start; the plan's own where its weights cannot be read here.

    `declared` are the operator's own seconds, which count above all; 0 where there are none.
    """
    if declared:
        return Limit(declared, f"a start may take {declared:.0f} s (serving_start_seconds)")
    planned = float(plan.get("start_seconds") or COMPILE_SECONDS)
    files = weights(Path(str(plan.get("model_path", ""))))
    size = sum(each for _, each in files)
    rate = read_rate(files[0][0]) if files else None
    if not size or not rate:
        return Limit(planned, "")
    own = EAGER_SECONDS if _compiles_nothing(plan) else COMPILE_SECONDS
    loading = SLOWER_THAN_READ * size / rate
    last = longest(store, index)
    seconds = max(own + loading, LONGER_THAN_LAST * (last or 0))
    said = f"{size / 1e9:.1f} GB of weights at {rate / 1e6:.0f} MB/s"
    before = f"; its longest start took {last:.0f} s" if last else ""
    return Limit(round(seconds), f"a start may take {seconds:.0f} s ({said}, {own} s for the engine{before})")


def _compiles_nothing(plan: Mapping[str, Any]) -> bool:
    options = [one for group in plan.get("options", {}).values() for one in group]
    return any(one["name"] in EAGER and one["value"] is True for one in options)


def weights(folder: Path) -> list[tuple[Path, int]]:
    """Return the files of weights in a folder with their bytes, the largest first."""
    found = []
    with contextlib.suppress(OSError):
        found = [(path, path.stat().st_size) for path in folder.iterdir() if path.name.endswith(WEIGHTS)]
    return sorted(found, key=lambda one: -one[1])


def longest(store: Store, index: int) -> float | None:
    """Return the seconds of the longest start that is in the proofs of a replica's releases."""
    taken = []
    for number in store.numbers():
        proof = (read_json(store.folder(number) / PROOF) or {}).get("replicas", {}).get(str(index), {})
        if isinstance(seconds := proof.get("seconds_to_first_token"), (int, float)):
            taken.append(float(seconds))
    return max(taken, default=None)


def read_rate(path: Path) -> float | None:
    """Return how many bytes a second a file is read at, past the page cache; None where it cannot be read so."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    try:
        # O_DIRECT wants memory that is aligned to a page.
        with mmap.mmap(-1, _BLOCK) as block:
            return _timed(descriptor, block)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _timed(descriptor: int, block: mmap.mmap) -> float | None:
    began = time.monotonic()
    read = 0
    while read < PROBE_BYTES and time.monotonic() - began < PROBE_SECONDS:
        size = os.preadv(descriptor, [block], read)
        read += size
        if size < _BLOCK:
            break
    spent = time.monotonic() - began
    return read / spent if read and spent > 0 else None

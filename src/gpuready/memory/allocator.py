"""What torch's allocator says when CUDA gives it no more: c10/cuda/CUDACachingAllocator.cpp of torch 2.0 to 2.14."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

GIB = 1 << 30
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB, "TiB": 1 << 40}
_SIZE = r"([\d.]+)\s+(bytes|[KMGT]iB)"
_TRIED = re.compile(rf"Tried\s+to\s+allocate\s+{_SIZE}")
_CAPACITY = re.compile(rf"total\s+capaci?ty\s+of\s+{_SIZE}|;\s+{_SIZE}\s+total\s+capacity")
_FREE = re.compile(rf"of\s+which\s+{_SIZE}\s+is\s+free|;\s+{_SIZE}\s+free;")
_OWN = re.compile(rf"this\s+process\s+has\s+{_SIZE}\s+memory\s+in\s+use")
_PROCESS = re.compile(rf"Process\s+(\d+)\s+has\s+{_SIZE}\s+memory\s+in\s+use")
_ALLOCATED = re.compile(rf"{_SIZE}\s+is\s+allocated\s+by\s+PyTorch|;\s+{_SIZE}\s+already\s+allocated")
_UNALLOCATED = re.compile(rf"{_SIZE}\s+is\s+reserved\s+by\s+PyTorch\s+but\s+unallocated")
_RESERVED = re.compile(rf"{_SIZE}\s+reserved\s+in\s+total\s+by\s+PyTorch")
_POOLS = re.compile(rf"with\s+{_SIZE}\s+allocated\s+in\s+private\s+pools")
_VARIABLE = re.compile(r"(PYTORCH_\w*ALLOC_CONF)=expandable_segments")
_FULL = 0.97
_LARGEST_WEIGHT = 4.0
"""GiB: what is asked for in one piece beyond this is no weight."""
_SENTENCE = 1600
"""Characters in which the whole message stands."""


@dataclass(frozen=True)
class Shortage:
    """The figures of one message, in GiB; None where it does not say."""

    tried: float
    total: float | None = None
    free: float | None = None
    allocated: float | None = None
    unallocated: float | None = None
    """Reserved by torch and free, yet in pieces of which none is large enough."""
    pools: float | None = None
    """Allocated in pools of their own, as CUDA graphs have."""
    others: tuple[tuple[int, float], ...] = ()
    """Other processes on the GPU: pid and GiB."""
    variable: str | None = None
    """The environment variable that this torch reads, by its own advice."""
    names_processes: bool = False
    """The message says who holds the GPU, this process at least."""

    @property
    def missing(self) -> float:
        """Return by how much it failed."""
        return max(0.0, self.tried - (self.free or 0.0))

    @property
    def held_by_others(self) -> float:
        """Return what other processes hold, in GiB."""
        return sum(size for _, size in self.others)

    @property
    def unexplained(self) -> float:
        """Return what is neither free nor torch's where the message names no process; 0 where that is not known."""
        if self.names_processes or self.total is None or self.free is None or self.allocated is None:
            return 0.0
        return self.total - self.free - self.allocated - (self.unallocated or 0)

    @property
    def full(self) -> bool:
        """Say whether torch's tensors fill the GPU: only loading does that, because a KV cache leaves a part of it."""
        shares = None in (self.total, self.allocated) or self.pools is not None or self.tried > _LARGEST_WEIGHT
        return not shares and (self.allocated or 0) >= _FULL * (self.total or 0)

    @property
    def fragmented(self) -> bool:
        """Say whether torch held enough free memory in pieces for what was asked."""
        return self.unallocated is not None and self.unallocated >= self.tried > 0


def read(text: str, own_pids: Collection[int] = ()) -> Shortage | None:
    """Read the message that begins a text; None where there is none. `own_pids` are the engine's own processes."""
    text = text[:_SENTENCE]
    # A second message must not lend its figures to the first.
    again = text.find("Tried to allocate", text.find("Tried to allocate") + 1)
    text = text if again < 0 else text[:again]
    tried = _gib(_TRIED, text)
    if tried is None:
        return None
    allocated, reserved = _gib(_ALLOCATED, text), _gib(_RESERVED, text)
    unallocated = _gib(_UNALLOCATED, text)
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = max(0.0, reserved - allocated)
    processes = [(int(pid), float(size) * _UNITS[unit] / GIB) for pid, size, unit in _PROCESS.findall(text)]
    return Shortage(
        tried=tried,
        total=_gib(_CAPACITY, text),
        free=_gib(_FREE, text),
        allocated=allocated,
        unallocated=unallocated,
        pools=_gib(_POOLS, text),
        variable=match[1] if (match := _VARIABLE.search(text)) else None,
        names_processes=bool(processes) or _OWN.search(text) is not None,
        others=tuple(
            _others(processes, own_pids, (allocated or 0) + (unallocated or 0), _OWN.search(text) is not None)
        ),
    )


def _others(
    processes: list[tuple[int, float]], own_pids: Collection[int], held: float, knows_itself: bool
) -> list[tuple[int, float]]:
    """Return the processes that are not the engine's.

    In a container torch does not find its own process among NVML's: then the one that holds just more than torch does
    is its own.
    """
    found = [one for one in processes if one[0] not in own_pids]
    if not knows_itself and held and len(found) == len(processes):
        enough = [one for one in found if one[1] >= held * 0.98]
        if enough:
            found.remove(min(enough, key=lambda one: one[1]))
    return found


def _gib(wanted: re.Pattern[str], text: str) -> float | None:
    match = wanted.search(text)
    if match is None:
        return None
    size, unit = (one for one in match.groups() if one is not None)
    return float(size) * _UNITS[unit] / GIB

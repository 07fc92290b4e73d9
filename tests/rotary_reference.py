"""Rotary position embedding by complex numbers, to judge the stand-in operator by.

Run with an engine's own Python, where the stand-in is found, it compares the two on torch's tensors:

    PYTHONPATH=sim/engines/sglang_cpu_standin ENGINE/bin/python tests/rotary_reference.py
"""

from __future__ import annotations

import cmath
import importlib
import math
from typing import Any

HEAD = 8


def turned(numbers: list[float], position: int, rotary: int, is_neox: bool) -> list[float]:
    """Return a head's numbers with pair i, as a complex number, turned by position / 10000^(2i / rotary).

    Source: RoFormer (arxiv.org/abs/2104.09864), section 3.2; GPT-NeoX pairs the halves, GPT-J neighbours.
    """
    found = list(numbers)
    for pair in range(rotary // 2):
        first, second = (pair, pair + rotary // 2) if is_neox else (2 * pair, 2 * pair + 1)
        one = complex(numbers[first], numbers[second]) * cmath.exp(1j * position / 10000 ** (2 * pair / rotary))
        found[first], found[second] = one.real, one.imag
    return found


def angles(position: int, rotary: int) -> tuple[list[float], list[float]]:
    """Return the cosines and the sines of a position's angles."""
    found = [position / 10000 ** (2 * pair / rotary) for pair in range(rotary // 2)]
    return [math.cos(one) for one in found], [math.sin(one) for one in found]


def largest_difference(torch: Any, operator: Any, rotary: int, is_neox: bool) -> float:
    """Turn queries and keys that lie beside values in one tensor; return how far they are from the reference."""
    cache = torch.tensor([[*cos, *sin] for cos, sin in (angles(position, rotary) for position in range(32))])
    whole = torch.randn(3, 4 * HEAD, generator=torch.Generator().manual_seed(1))
    before, positions = whole.tolist(), [5, 0, 31]
    query, key, _ = whole.split([2 * HEAD, HEAD, HEAD], dim=-1)
    operator(torch.tensor(positions), query, key, HEAD, cache, is_neox)
    found = [number for row in whole.tolist() for number in row]
    wanted: list[float] = []
    for row, position in zip(before, positions):  # noqa: B905 - an engine's Python may be older than 3.10
        heads = [row[start : start + HEAD] for start in range(0, len(row), HEAD)]
        for head in heads[:3]:
            wanted += turned(head, position, rotary, is_neox)
        wanted += heads[3]
    return float(max(abs(one - other) for one, other in zip(found, wanted)))  # noqa: B905


if __name__ == "__main__":
    there = importlib.import_module("vllm._custom_ops").rotary_embedding
    cases = [(rotary, is_neox) for rotary in (HEAD, HEAD // 2) for is_neox in (True, False)]
    print(max(largest_difference(importlib.import_module("torch"), there, *case) for case in cases))

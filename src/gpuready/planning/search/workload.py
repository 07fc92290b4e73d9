"""How many requests a KV cache serves at once, from the distribution of their lengths instead of the longest one.

Lengths of prompts and of answers are taken as log-normal, fixed by p50 and p99, independent of each other, and cut
where the model's length ends. At a random moment of the busiest time a request that is in flight is

- a long one more often than a short one, because it stays as long as its answer takes (renewal theory: the time that a
  request is in flight is proportional to its output tokens, so it is met with that weight), and
- at a uniformly random point of its answer.

It then holds its prompt and what it has generated so far. The sum over all requests in flight is taken as normal,
corrected for its skewness (Cornish and Fisher 1938, third order). A cache is large enough for n requests where that sum
exceeds it with at most the probability that the workload allows; the engine then preempts one or lets one wait.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from gpuready.planning.wish import Lengths, Workload

_NORMAL = NormalDist()
_P99 = _NORMAL.inv_cdf(0.99)
_Z = tuple(step / 5 for step in range(-20, 21))
"""Points of the normal distribution, from -4 to 4; their weights are its density."""
_PROGRESS = tuple((2 * step + 1) / 34 for step in range(17))
"""Points of an answer at which a request is met; a number of them that no block's size divides, so that they fall on
every place of a block."""
_BIN = 1.08
"""Lengths that differ by less than this factor are one atom."""

Atom = tuple[int, float]
"""Tokens that a request in flight holds, and how likely that is."""


@dataclass(frozen=True)
class Load:
    """What one request in flight holds of a KV cache: moments of its distribution, in the unit of `hold`."""

    mean: float
    deviation: float
    skewness: float
    most: float
    """What the longest request that is accepted holds."""

    def quantile(self, requests: int, probability: float) -> float:
        """Return what that many requests at once exceed with at most this probability."""
        if requests <= 0:
            return 0.0
        z = _NORMAL.inv_cdf(1 - probability)
        spread = self.deviation * math.sqrt(requests) * z
        # The sum's skewness is the single one's divided by the root of their number, so this term does not grow.
        correction = self.deviation * self.skewness * (z * z - 1) / 6
        return min(requests * self.most, requests * self.mean + spread + correction)

    def fits(self, pool: float, probability: float) -> int:
        """Return how many requests at once a pool holds that they exceed with at most this probability."""
        if self.most <= 0:
            return 0
        low = max(0, int(pool / self.most))
        if pool < self.most or self.mean <= 0:
            return low
        high = max(low, int(pool / self.mean) + 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.quantile(middle, probability) <= pool else (low, middle - 1)
        return low


def _points(lengths: Lengths) -> list[tuple[float, float]]:
    """Return lengths with their probabilities; one where p50 and p99 are the same."""
    if lengths.p50 <= 0:
        return [(0.0, 1.0)]
    spread = math.log(lengths.p99 / lengths.p50) / _P99
    if spread <= 0:
        return [(float(lengths.p50), 1.0)]
    whole = sum(_NORMAL.pdf(z) for z in _Z)
    return [(lengths.p50 * math.exp(spread * z), _NORMAL.pdf(z) / whole) for z in _Z]


@functools.lru_cache(maxsize=256)
def held(prompt: Lengths, output: Lengths, longest: int) -> tuple[Atom, ...]:
    """Return what a request in flight holds, in tokens, as atoms whose probabilities add up to 1.

    `longest` is the length at which the engine ends a request; a longer prompt is cut to it, as one that is refused
    holds nothing.
    """
    bins: dict[int, tuple[float, float]] = {}
    total = 0.0
    answers = _points(output)
    for prompt_tokens, of_prompt in _points(prompt):
        first = max(1.0, min(prompt_tokens, longest - 1.0))
        for answer, of_answer in answers:
            answer_tokens = max(1.0, min(answer, longest - first))
            weight = of_prompt * of_answer * answer_tokens / len(_PROGRESS)
            total += weight * len(_PROGRESS)
            for progress in _PROGRESS:
                tokens = first + progress * answer_tokens
                key = int(math.log(tokens) / math.log(_BIN))
                tokens_before, weight_before = bins.get(key, (0.0, 0.0))
                bins[key] = (tokens_before + weight * tokens, weight_before + weight)
    return tuple(
        (min(longest, max(1, round(sum_ / weight))), weight / total) for _, (sum_, weight) in sorted(bins.items())
    )


def load(workload: Workload, longest: int, hold: Callable[[int], float]) -> Load:
    """Return what one request of the workload holds; `hold` says what a request of that many tokens takes.

    `hold` brings the engine's rounding to blocks, sliding windows and states of recurrent layers with it. Its unit is
    the answer's, e.g. GiB of one GPU or tokens.
    """
    return _moments(
        [(hold(tokens), weight) for tokens, weight in held(workload.prompt, workload.output, longest)], hold(longest)
    )


def _moments(atoms: Sequence[tuple[float, float]], most: float) -> Load:
    mean = sum(value * weight for value, weight in atoms)
    variance = sum(weight * (value - mean) ** 2 for value, weight in atoms)
    third = sum(weight * (value - mean) ** 3 for value, weight in atoms)
    skewness = third / variance**1.5 if variance > 0 else 0.0
    return Load(mean, math.sqrt(variance), skewness, max(most, *(value for value, _ in atoms)))


def requests_that_fit(workload: Workload, longest: int, pool: float, hold: Callable[[int], float]) -> int:
    """Return how many requests at once a KV cache of `pool` serves with at most the stated probability of preemption.

    `longest` is the engine's greatest length in tokens, `hold` what a request of that many tokens takes of the pool,
    in the pool's unit. At least as many as fit when each is of the greatest length.
    """
    return load(workload, longest, hold).fits(pool, workload.preemption)

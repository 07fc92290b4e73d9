"""How many requests at once a KV cache holds, against simulated traffic."""

from __future__ import annotations

import math
import random
from statistics import NormalDist, fmean, pstdev

import pytest

from gpuready.planning.search import workload
from gpuready.planning.wish import Lengths, Workload

BLOCK = 16


def blocks(tokens: int) -> float:
    return float(-(-tokens // BLOCK) * BLOCK)


def load_of(prompt: tuple[int, int], output: tuple[int, int], preemption: float = 0.01) -> Workload:
    return Workload(Lengths(*prompt), Lengths(*output), 64, preemption)


class Traffic:
    """Slots that serve one request after another, each as long as its answer has tokens; seeded."""

    def __init__(self, load: Workload, longest: int, seed: int) -> None:
        self.dice = random.Random(seed)  # noqa: S311 - to draw examples
        self.load, self.longest = load, longest

    def _draw(self, lengths: Lengths) -> float:
        spread = math.log(lengths.p99 / lengths.p50) / NormalDist().inv_cdf(0.99)
        return lengths.p50 * math.exp(spread * self.dice.gauss(0, 1))

    def holds(self, moments: int) -> list[float]:
        """Return what one slot holds at moments that are spread evenly over a long time."""
        requests = []
        for _ in range(4 * moments):
            prompt = max(1, min(round(self._draw(self.load.prompt)), self.longest - 1))
            requests.append((prompt, max(1, min(round(self._draw(self.load.output)), self.longest - prompt))))
        whole = sum(output for _, output in requests)
        found, until, index = [], 0, -1
        for moment in sorted(self.dice.random() * whole for _ in range(moments)):
            while until <= moment:
                index += 1
                until += requests[index][1]
            prompt, output = requests[index]
            found.append(blocks(prompt + int(moment - (until - output))))
        return found


WORKLOADS = [
    pytest.param((800, 16000), (300, 1500), 17664, id="chat with long documents"),
    pytest.param((1024, 1024), (512, 512), 1536, id="all alike"),
    pytest.param((200, 2000), (100, 1000), 3072, id="short chat"),
    pytest.param((50, 400), (2000, 30000), 32768, id="long reasoning"),
    pytest.param((4000, 60000), (20, 60), 60160, id="long prompts, short answers"),
]


@pytest.mark.parametrize(("prompt", "output", "longest"), WORKLOADS)
def test_what_a_request_holds_is_what_traffic_shows(
    prompt: tuple[int, int], output: tuple[int, int], longest: int
) -> None:
    load = load_of(prompt, output)
    drawn = Traffic(load, longest, 1).holds(30_000)
    found = workload.load(load, longest, blocks)
    assert found.mean == pytest.approx(fmean(drawn), rel=0.03)
    assert found.deviation == pytest.approx(pstdev(map(int, drawn)), rel=0.05, abs=BLOCK)


@pytest.mark.parametrize("requests", [8, 64])
@pytest.mark.parametrize(("prompt", "output", "longest"), WORKLOADS)
def test_the_pool_for_so_many_is_exceeded_as_seldom_as_promised(
    prompt: tuple[int, int], output: tuple[int, int], longest: int, requests: int
) -> None:
    load = load_of(prompt, output)
    drawn = Traffic(load, longest, 2).holds(20_000)
    dice = random.Random(3)  # noqa: S311 - to draw examples
    sums = sorted(sum(dice.choices(drawn, k=requests)) for _ in range(3000))
    pool = workload.load(load, longest, blocks).quantile(requests, 0.01)
    exceeded = sum(one > pool for one in sums) / len(sums)
    assert exceeded <= 0.02
    # Nor is memory given away: 1.08 times what one sum in a hundred needs is enough.
    assert pool <= 1.08 * sums[int(0.99 * len(sums))]


def test_many_more_fit_than_of_the_longest() -> None:
    load = load_of((800, 16000), (300, 1500))
    pool = 40 * 17664
    assert workload.requests_that_fit(load, 17664, pool, blocks) > 3 * 40


def test_where_all_are_alike_no_more_fit_than_fit() -> None:
    load = load_of((1020, 1020), (1, 1))
    assert workload.requests_that_fit(load, 1024, 10 * 1024.0, blocks) == 10
    assert workload.requests_that_fit(load, 1024, 10 * 1024.0 - 1, blocks) == 9


def test_a_pool_that_does_not_hold_the_longest_holds_none() -> None:
    load = load_of((800, 16000), (300, 1500))
    assert workload.requests_that_fit(load, 17664, 17663.0, blocks) == 0
    assert workload.requests_that_fit(load, 17664, 17664.0, blocks) >= 1
    assert workload.requests_that_fit(load, 17664, -1.0, blocks) == 0


def test_a_smaller_probability_never_allows_more() -> None:
    pools = [17664.0 * count for count in (1, 3, 10, 50)]
    for pool in pools:
        allowed = [
            workload.requests_that_fit(load_of((800, 16000), (300, 1500), one), 17664, pool, blocks)
            for one in (0.2, 0.05, 0.01, 0.001)
        ]
        assert allowed == sorted(allowed, reverse=True)


@pytest.mark.parametrize("seed", range(5))
def test_more_memory_never_holds_fewer_and_longer_requests_never_more(seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311 - to draw examples
    prompt, output = dice.randrange(1, 3000), dice.randrange(1, 1000)
    factor = dice.choice([1, 2, 5, 20])
    longest = factor * (prompt + output) + dice.randrange(0, 256)
    shape = [((prompt * n, prompt * n * factor), (output * n, output * n * factor), longest * n) for n in (1, 2, 3)]
    counts = []
    for one, other, length in shape:
        load = load_of(one, other)
        found = [workload.requests_that_fit(load, length, pool, blocks) for pool in range(0, 3_000_000, 77_777)]
        assert found == sorted(found)
        counts.append(found)
    assert all(short >= long for short, long in zip(counts[0], counts[1], strict=True))
    assert all(short >= long for short, long in zip(counts[1], counts[2], strict=True))


def test_a_window_bounds_what_a_request_holds() -> None:
    load = load_of((800, 16000), (300, 1500))
    whole = workload.requests_that_fit(load, 17664, 500_000.0, blocks)
    windowed = workload.requests_that_fit(load, 17664, 500_000.0, lambda tokens: blocks(min(tokens, 1024)))
    assert windowed > 2 * whole

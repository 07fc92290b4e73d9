"""How one GPU is divided among deployments: never more than it has, by need, the largest first."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.unit.test_search import place, wish

from gpuready.planning import sharing
from gpuready.planning.memory.device import device
from gpuready.planning.search import sizing
from gpuready.planning.wish import Lengths, Option, Wish, Workload

H100 = place().device
SMALL, CHAT, CODE = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-14B-Instruct"


def part(name: str, model: str, concurrency: int, **change: Any) -> Wish:
    load = Workload(Lengths(800, 4000), Lengths(300, 1500), concurrency)
    return wish(model, name=name, workload=load, **change)


def divided(*wishes: Wish) -> list[Option]:
    options, failures = sharing.divide(wishes, H100)
    assert failures == {}
    return options


def test_three_models_share_a_gpu_and_the_largest_starts_first() -> None:
    options = divided(part("mod", SMALL, 16), part("chat", CHAT, 64), part("code", CODE, 32))
    assert [option.wish.name for option in options] == ["code", "chat", "mod"]
    assert all(option.binding == "wanted" for option in options)
    shares = [option.place.shared_gib or 0.0 for option in options]
    assert shares == sorted(shares, reverse=True)
    assert 79.19 - 0.1 < sum(shares) <= 79.19


def test_a_part_holds_everything_that_its_engine_takes_at_most() -> None:
    for option in divided(part("chat", CHAT, 64), part("code", CODE, 32)):
        share, found = option.place.shared_gib or 0.0, option.estimate
        assert option.run.kv_bytes is not None
        assert sizing.taken(found) + option.run.kv_bytes / 2**30 <= share
        # vLLM refuses to start where more than what is free is asked for, and others have their parts by then.
        assert (option.run.memory_fraction or 1) * found.total_gib + found.outside.high <= share + 0.01


def test_the_kv_cache_goes_where_it_is_needed() -> None:
    few, many = (
        {option.wish.name: option.estimate.kv.value for option in divided(part("a", CHAT, 4), part("b", CHAT, count))}
        for count in (4, 64)
    )
    assert few["a"] == pytest.approx(few["b"], rel=0.02)
    assert many["b"] > 5 * many["a"]


def test_one_alone_on_a_gpu_that_it_shares_has_all_of_it() -> None:
    (alone,) = divided(part("a", CHAT, 4))
    assert alone.place.shared_gib == pytest.approx(79.19, abs=0.02)
    assert alone.estimate.fits


def test_who_does_not_fit_even_alone_is_named() -> None:
    options, failures = sharing.divide([part("a", CHAT, 4), part("b", "meta-llama/Llama-3.3-70B-Instruct", 1)], H100)
    assert options == []
    assert list(failures) == ["b"]
    assert "does not fit on 1 x H100" in failures["b"][0].sentence()


def test_who_do_not_fit_together_are_told_the_sum() -> None:
    _, failures = sharing.divide([part("a", CODE, 4), part("b", CODE, 4), part("c", CODE, 4)], H100)
    (failure,) = failures[""]
    said = failure.sentence()
    assert said.startswith("3 deployments do not fit together on one GPU: with one request of the greatest length each")
    assert said.endswith("GiB are missing: give a a GPU of its own.")


def test_headroom_that_was_set_is_left_in_its_part() -> None:
    (first,) = [
        one for one in divided(part("a", CHAT, 8, headroom_gib=9.0), part("b", CHAT, 8)) if one.wish.name == "a"
    ]
    kv = (first.run.kv_bytes or 0) / 2**30
    assert (first.place.shared_gib or 0) - sizing.taken(first.estimate) - kv >= 9.0


@pytest.mark.parametrize("seed", range(15))
def test_parts_are_never_more_than_the_gpu(seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311 - to draw examples
    names = "abcd"[: dice.randrange(1, 5)]
    card = device(dice.choice(["h100", "a100-40gb-sxm", "l40s", "h200", "a30"]))
    assert card is not None
    wishes = [part(name, dice.choice([SMALL, CHAT]), dice.choice([1, 8, 64, 500])) for name in names]
    options, failures = sharing.divide(wishes, card)
    assert bool(options) != bool(failures)
    assert sum(option.place.shared_gib or 0 for option in options) <= card.total_gib
    held = sum(sizing.taken(one.estimate) + (one.run.kv_bytes or 0) / 2**30 for one in options)
    assert held <= card.total_gib

"""An engine's KV cache beside its plan: what is said, what follows from what is told, and when it is a warning."""

from __future__ import annotations

from typing import Any

import pytest

from gpuready.planning.accuracy.measured import compare

# Llama-3.1-8B in bfloat16 on one H100: 131,072 bytes per token, blocks of 16.
TOKENS = {"value": 476016.0, "low": 473000.0, "high": 479000.0}
PLAN: dict[str, Any] = {
    "memory": {"kv": {"value": 58.11, "low": 57.7, "high": 58.5}, "kv_tokens": TOKENS, "blocks": 29751}
}
STAND_IN = {**PLAN, "stand_in": {"kv_bytes": 64 * 1024**2, "bytes_per_token": 512}}
RECORDED = {"kv_tokens": 131072, "blocks": 1024, "block_tokens": 128}


def said(plan: dict[str, Any], engine: dict[str, Any] | None, unread: str = "", gpus: int = 1) -> str:
    found = compare(plan, engine, unread, gpus)
    assert found is not None
    return found.sentence("chat")


def test_plan_and_engine_stand_side_by_side() -> None:
    assert said(PLAN, {"kv_tokens": 474304, "kv_gib": 57.9}) == (
        "chat: planned 58.1 GiB KV, 476,016 tokens; the engine has 57.9 GiB, 474,304 (-0.4 %)"
    )


def test_several_gpus_have_their_size_each() -> None:
    assert said(PLAN, {"kv_tokens": 476016, "kv_gib": 58.11}, gpus=4).startswith(
        "chat: planned 58.1 GiB KV per GPU, 476,016 tokens; the engine has 58.1 GiB, 476,016 (+0.0 %)"
    )


def test_what_an_engine_does_not_tell_follows_in_the_plans_proportion() -> None:
    found = compare(PLAN, {"blocks": 29644, "block_tokens": 16})
    assert found is not None
    assert found.measured is not None
    assert found.measured.kv_tokens == 474304
    assert found.measured.kv_gib == pytest.approx(57.90, abs=0.005)
    assert found.measured.derived == ("kv_tokens", "kv_gib")


def test_layers_in_groups_have_fewer_tokens_than_their_blocks_hold() -> None:
    # gemma-3-27b: a request takes blocks of seven groups of layers.
    plan = {"memory": {"kv": {"value": 17.0}, "kv_tokens": {"value": 36560, "low": 36000, "high": 37000}}}
    plan["memory"]["blocks"] = 16000
    found = compare(plan, {"blocks": 15900, "block_tokens": 16})
    assert found is not None
    assert found.measured is not None
    assert found.measured.kv_tokens == round(36560 * 15900 / 16000)


def test_blocks_count_where_the_plan_has_none() -> None:
    plan = {"memory": {"kv_gib": 58.11, "kv_tokens": 476016}}
    found = compare(plan, {"blocks": 29644, "block_tokens": 16})
    assert found is not None
    assert found.measured is not None
    assert (found.measured.kv_tokens, found.within) == (474304, None)


def test_fewer_tokens_than_the_band_are_a_warning() -> None:
    sentence = said(PLAN, {"kv_tokens": 418000, "kv_gib": 51.0})
    assert sentence.startswith("chat: planned 58.1 GiB KV, 476,016 tokens; the engine has 51.0 GiB, 418,000 (-12.2 %)")
    assert "outside the plan's 473,000 to 479,000: fewer requests fit than planned; see in nvidia-smi" in sentence
    assert sentence.endswith("report it with the output of gpuready deployment status --json")


@pytest.mark.parametrize(
    ("others", "advice"),
    [
        (None, "see in nvidia-smi whether something else holds memory of its GPU, and where nothing does report it"),
        (0.1, "nothing else holds memory of its GPU, so report it"),
        (6.25, "others hold 6.2 GiB of its GPU, see which in nvidia-smi, stop them and restart it"),
    ],
)
def test_who_else_holds_memory_decides_what_to_do(others: float | None, advice: str) -> None:
    found = compare(PLAN, {"kv_tokens": 418000}, others_gib=others)
    assert found is not None
    assert f"fewer requests fit than planned; {advice}" in found.sentence("chat")


def test_more_tokens_than_the_band_are_a_warning() -> None:
    sentence = said(PLAN, {"kv_tokens": 520000, "kv_gib": 63.5})
    assert "(+9.2 %), outside the plan's 473,000 to 479,000: the engine keeps more than planned" in sentence
    assert "lower its memory fraction under flags" in sentence


@pytest.mark.parametrize(("tokens", "within"), [(473000, True), (479000, True), (472999, False), (479001, False)])
def test_the_band_holds_its_ends(tokens: int, within: bool) -> None:
    found = compare(PLAN, {"kv_tokens": tokens})
    assert found is not None
    assert found.within is within


def test_a_plan_without_a_band_is_compared_and_not_judged() -> None:
    plan = {"memory": {"kv_gib": 71.0, "kv_tokens": 100_000}}
    assert said(plan, {"kv_tokens": 50_000, "kv_gib": 35.5}).endswith("the engine has 35.5 GiB, 50,000 (-50.0 %)")


def test_what_could_not_be_read_is_said() -> None:
    found = compare(PLAN, None, "http://127.0.0.1:18100/metrics: HTTP 404")
    assert found is not None
    assert (found.measured, found.difference, found.within) == (None, None, None)
    assert found.sentence("chat") == (
        "chat: planned 58.1 GiB KV, 476,016 tokens; what the engine has could not be read "
        "(http://127.0.0.1:18100/metrics: HTTP 404)"
    )


def test_a_stand_in_is_compared_with_its_own_bytes_and_labelled() -> None:
    found = compare(STAND_IN, RECORDED)
    assert found is not None
    assert found.within is True
    assert found.sentence("chat") == (
        "chat: planned 58.1 GiB KV, 476,016 tokens for the card, which the simulation cannot measure; its stand-in on "
        "the CPU was given 64.0 MiB, 131,072 tokens; the engine has 64.0 MiB, 131,072 (+0.0 %)"
    )


def test_a_stand_in_may_lose_a_part_of_a_block_and_no_more() -> None:
    for blocks, within in ((1023, False), (1024, True), (1025, False)):
        found = compare(STAND_IN, {**RECORDED, "blocks": blocks})
        assert found is not None
        assert found.within is within
    odd = {**STAND_IN, "stand_in": {"kv_bytes": 64 * 1024**2 + 40_000, "bytes_per_token": 512}}
    found = compare(odd, RECORDED)
    assert found is not None
    assert found.within is True


def test_a_stand_ins_blocks_count_however_long_its_longest_request_is() -> None:
    # vLLM counts tokens by requests of max-model-len: of 100 tokens each takes a block of 128.
    found = compare(STAND_IN, {**RECORDED, "kv_tokens": 102400})
    assert found is not None
    assert found.within is True


def test_a_wrong_figure_of_a_stand_ins_plan_is_said() -> None:
    wrong = {**STAND_IN, "stand_in": {"kv_bytes": 64 * 1024**2, "bytes_per_token": 600}}
    sentence = said(wrong, RECORDED)
    assert "111,848 tokens; the engine has 54.6" not in sentence
    assert "outside the 111,721 to 111,848 that follow from its bytes" in sentence
    assert "kv-cache-memory-bytes did not reach the engine, or the plan's bytes per token are wrong" in sentence


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"memory": None},
        {"memory": {"kv_tokens": {"value": 0.0, "low": 0.0, "high": 0.0}}},
        {"stand_in": {"kv_bytes": 1024, "bytes_per_token": 0}},
        {"memory": {"kv_gib": None, "kv_tokens": None}},
        {"memory": {"kv_tokens": 0}},
    ],
)
def test_without_a_planned_cache_there_is_nothing_to_compare(plan: dict[str, Any]) -> None:
    assert compare(plan, {"kv_tokens": 1000}) is None


def test_machines_get_both() -> None:
    found = compare(PLAN, {"kv_tokens": 474304, "kv_gib": 57.9})
    assert found is not None
    assert found.as_dict() == {
        "planned": {"kv_gib": 58.11, "kv_tokens": 476016, "low": 473000, "high": 479000, "blocks": 29751},
        "planned_for_card": None,
        "measured": {"kv_gib": 57.9, "kv_tokens": 474304, "derived": ()},
        "unread": None,
        "difference": pytest.approx(-0.0036, abs=5e-5),
        "within_band": True,
        "others_gib": None,
    }

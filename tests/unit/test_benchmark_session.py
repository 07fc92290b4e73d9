"""A whole run against the stand-in server: what is asked, counted, noted and refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.unit.standin_openai import MODEL, Answer, StandinServer, listing, refusal, standing_in, stream, usage

from gpuready.benchmark import measures, session
from gpuready.benchmark.client import Client, Request
from gpuready.benchmark.load import ClientLoad, closed_loop
from gpuready.benchmark.measures import Row
from gpuready.benchmark.report import Measured
from gpuready.benchmark.settings import Settings
from gpuready.outcome import Exit, Refusal

SMALL = Settings("", seed=3, levels=(1, 2), requests=4, prompt_tokens=40, output_tokens=6)
Chat = Callable[[dict[str, Any]], Answer]


def well_behaved(body: dict[str, Any]) -> Answer:
    """Two tokens a word and ten for the template, as long an answer as asked for."""
    words = len(body["messages"][0]["content"].split())
    return stream(*["x"] * body["max_tokens"], prompt=10 + 2 * words)


@dataclass
class Told:
    """What a run told on its way."""

    said: list[str] = field(default_factory=list)
    begun: list[tuple[int, int]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    advanced: int = 0
    on_advance: Callable[[int], None] = lambda _: None

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def begin(self, level: int, requests: int) -> None:
        self.begun.append((level, requests))

    def advance(self) -> None:
        self.advanced += 1
        self.on_advance(self.advanced)

    def end(self, page: Mapping[str, Any]) -> None:
        self.ended.append(page["concurrency"])


def run(
    chat: Chat = well_behaved,
    asked: Settings = SMALL,
    models: Answer | None = None,
    stop_after: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Measured, Told, StandinServer]:
    async def whole() -> tuple[Measured, Told, StandinServer]:
        stop = asyncio.Event()
        told = Told(on_advance=lambda count: stop.set() if count == stop_after else None)
        if stop_after == 0:
            stop.set()
        async with standing_in(chat) as server:
            server.models = models or server.models
            async with Client(replace(asked, url=server.url), clock) as client:
                measured = await session.measure(client, told, stop)
        return measured, told, server

    return asyncio.run(whole())


def refused(*words: Any, **more: Any) -> tuple[Exit, str]:
    with pytest.raises(Refusal) as caught:
        run(*words, **more)
    return caught.value.exit, str(caught.value)


def test_everything_that_was_asked_for_is_counted() -> None:
    measured, told, server = run()
    document = measured.as_dict()
    assert document["model"] == MODEL
    assert [level["requests"] for level in document["levels"]] == [
        {"asked": 4, "succeeded": 4, "failed": 0, "given_up": 0}
    ] * 2
    # (40 - 10) / 2 words give the prompt length that was asked for, by calibration.
    assert document["workload"]["words_per_prompt"] == 15
    assert [level["tokens"]["prompt_mean"] for level in document["levels"]] == [40.0, 40.0]
    assert [level["tokens"]["output_total"] for level in document["levels"]] == [24, 24]
    assert [level["tokens"]["output_as_asked"] for level in document["levels"]] == [4, 4]
    assert [level["ttft_ms"]["samples"] for level in document["levels"]] == [4, 4]
    assert [level["itl_ms"]["samples"] for level in document["levels"]] == [20, 20]
    assert (told.begun, told.ended, told.advanced) == ([(1, 4), (2, 4)], [1, 2], 8)
    # Two probes, one alone, warm-ups of 1 and 2, and 8 that are measured; every prompt is another one.
    assert len(server.asked) == 2 + 1 + 3 + 8
    assert len({body["messages"][0]["content"] for body in server.asked}) == len(server.asked)
    assert document["verdict"] == "measured"
    assert document["failed_percent"] == 0.0


def test_times_count_from_the_beginning_of_their_level() -> None:
    measured, _, _ = run(clock=lambda: time.perf_counter() + 1e9)
    for level in measured.levels:
        rows = measured.rows[level["concurrency"]]
        assert all(0 <= row.sent < row.chunks[0] <= row.ended <= 1000 for row in rows)
        assert 0 < level["first_idle_seconds"] <= max(row.ended for row in rows) + 1


def test_how_long_it_takes_is_said_before_it_begins() -> None:
    _, told, _ = run()
    (sentence,) = told.said
    assert sentence.startswith("8 requests at concurrency 1, 2: one alone took ")
    # Four rounds at 1 and two at 2.
    assert session.estimate(SMALL, 10.0) == (
        "8 requests at concurrency 1, 2: one alone took 10.00 s, so this takes at least 60 s, "
        "more where the server slows down under load."
    )
    assert session.estimate(SMALL, 100.0).count("at least 10 min") == 1


def test_the_same_seed_asks_the_same() -> None:
    prompts = [
        [body["messages"] for body in run(asked=replace(SMALL, seed=seed, levels=(1,)))[2].asked] for seed in (3, 3, 4)
    ]
    assert prompts[0] == prompts[1]
    assert not any(one in prompts[0] for one in prompts[2])


def test_warm_up_requests_are_as_many_as_asked_and_short() -> None:
    _, _, server = run(asked=replace(SMALL, levels=(1,), warmup=3, output_tokens=40))
    assert [body["max_tokens"] for body in server.asked] == [1, 1, 40, 16, 16, 16, 40, 40, 40, 40]


def test_lost_requests_have_a_reason_and_the_totals_add_up() -> None:
    # Some streams end early, one is refused: vllm-project/vllm#11167 and #26478.
    measured_ones = 0

    def chat(body: dict[str, Any]) -> Answer:
        nonlocal measured_ones
        if body["max_tokens"] != 20:
            return well_behaved(body)
        measured_ones += 1
        whole = well_behaved(body)
        if measured_ones in (3, 4):
            return Answer(whole.pieces[:3], end="cut")
        return refusal(429, "slow down") if measured_ones == 5 else whole

    measured, _, _ = run(chat, replace(SMALL, levels=(1,), requests=6, output_tokens=20))
    (level,) = measured.levels
    assert level["requests"] == {"asked": 6, "succeeded": 3, "failed": 3, "given_up": 0}
    assert [(error["kind"], error["count"]) for error in level["errors"]] == [("cut", 2), ("http_429", 1)]
    assert level["ttft_ms"]["samples"] == 3
    document = measured.as_dict()
    assert (document["failed_percent"], document["verdict"]) == (50.0, "failed")
    assert [note for note in document["notes"] if "failed" in note] == [
        "3 of 6 requests failed (cut, http_429); latencies and rates are those of the others.",
        "This run counts as failed: 50.0 % of its requests failed, 1 % are allowed.",
    ]


def test_after_a_level_in_which_all_failed_no_higher_one_is_tried() -> None:
    alone = True

    def chat(body: dict[str, Any]) -> Answer:
        nonlocal alone
        if body["max_tokens"] == 20 and not alone:
            return refusal(503, "full")
        alone = alone and body["max_tokens"] != 20
        return well_behaved(body)

    measured, _, _ = run(chat, replace(SMALL, levels=(1, 2, 4), output_tokens=20))
    assert [level["concurrency"] for level in measured.levels] == [1]
    assert "At concurrency 1 every request failed, so higher levels were not tried." in measured.as_dict()["notes"]
    assert measured.levels[0]["throughput"]["whole"]["why"] == "no request succeeded"


def test_ctrl_c_keeps_what_was_measured() -> None:
    measured, _, _ = run(asked=replace(SMALL, levels=(1, 2), requests=4), stop_after=6)
    document = measured.as_dict()
    first, second = document["levels"]
    assert first["requests"]["succeeded"] == 4
    assert second["requests"]["succeeded"] + second["requests"]["given_up"] == 4
    assert second["requests"]["given_up"] >= 1
    assert second["interrupted"]
    assert not first["interrupted"]
    assert second["throughput"]["steady"]["why"] == "the level was interrupted"
    assert document["verdict"] == "interrupted"
    assert any(note.startswith("The run ended early: 2 of 2 levels were begun") for note in document["notes"])


def test_ctrl_c_before_anything_was_measured() -> None:
    with pytest.raises(session.Interrupted):
        run(stop_after=0)


def test_an_engine_without_ignore_eos_is_asked_without_it() -> None:
    def chat(body: dict[str, Any]) -> Answer:
        return refusal(400, "Unrecognized request argument: ignore_eos") if "ignore_eos" in body else well_behaved(body)

    measured, _, server = run(chat, replace(SMALL, levels=(1,)))
    document = measured.as_dict()
    assert sum("ignore_eos" in body for body in server.asked) == 1
    assert document["workload"]["ignore_eos"] is False
    assert "The server refused ignore_eos, so answers may be shorter than asked for." in document["notes"]
    assert document["failed_percent"] == 0.0


def test_answers_of_another_length_are_noted() -> None:
    measured, _, _ = run(
        lambda body: stream("x", "y", prompt=10 + len(body["messages"][0]["content"].split())),
        replace(SMALL, levels=(1,)),
    )
    document = measured.as_dict()
    assert document["levels"][0]["tokens"]["output_as_asked"] == 0
    assert "At concurrency 1 not every answer has the 6 tokens that were asked for." in document["notes"]


def test_a_server_without_usage_leaves_tokens_unknown() -> None:
    def chat(body: dict[str, Any]) -> Answer:
        whole = well_behaved(body)
        return Answer([piece for piece in whole.pieces if b"prompt_tokens" not in piece[1]])

    measured, _, _ = run(chat, replace(SMALL, levels=(1,)))
    document = measured.as_dict()
    (level,) = document["levels"]
    assert level["tokens"]["output_total"] is None
    assert level["tpot_ms"]["samples"] == 0
    assert level["ttft_ms"]["samples"] == 4
    assert document["workload"]["calibrated"] is False
    assert "The server reported no usage for 4 requests: their output tokens are unknown, not 0." in document["notes"]
    assert any(note.startswith("The server does not say how long prompts are") for note in document["notes"])


def test_a_prefix_cache_that_helped_is_noted() -> None:
    def chat(body: dict[str, Any]) -> Answer:
        words = len(body["messages"][0]["content"].split())
        cached = usage(10 + 2 * words, body["max_tokens"], prompt_tokens_details={"cached_tokens": 8})
        return Answer([*well_behaved(body).pieces[:-2], (0.0, cached), (0.0, b"data: [DONE]\n\n")])

    measured, _, _ = run(chat, replace(SMALL, levels=(1,)))
    assert measured.levels[0]["tokens"]["cached_share"] == 0.2
    assert any(
        "At concurrency 1 the server took part of the prompts from its prefix cache" in note
        for note in measured.as_dict()["notes"]
    )


def test_a_simulated_server_is_named_one() -> None:
    assert (
        run(models=listing("gpuready-sim/tiny"))[0]
        .as_dict()["notes"][0]
        .startswith("This server is simulated (stack cpu)")
    )
    assert run(asked=replace(SMALL, simulated=True))[0].as_dict()["server"]["simulated"] is True
    assert run()[0].as_dict()["server"]["simulated"] is False


@pytest.mark.parametrize(
    ("models", "asked", "code", "words"),
    [
        (listing("a", "b"), SMALL, 2, "lists 2 models; name one with --model: 'a', 'b'."),
        (listing("a", "b"), replace(SMALL, model="c"), 3, "lists no model 'c'; it lists 'a', 'b'."),
        (listing(), SMALL, 3, "/v1/models lists no model: the list is empty"),
        (refusal(404, "x"), SMALL, 3, "/v1/models lists no model: it is answered 404"),
        (refusal(401, "x"), SMALL, 3, "wants an API key: it is answered 401; give one with --api-key-file."),
        (refusal(403, "x"), replace(SMALL, api_key="k"), 3, "give the right one with --api-key-file."),
        (Answer([(0.0, b"<html>")]), SMALL, 3, "/v1/models is not JSON"),
        (Answer([(0.0, b'{"data": [1, {"id": 2}]}')]), SMALL, 3, "the list is empty"),
        (Answer([(0.0, b'{"data": 5}')]), SMALL, 3, "the list is empty"),
        (Answer([(0.0, b"[]")]), SMALL, 3, "the list is empty"),
        (
            listing("a", max_model_len=45),
            SMALL,
            2,
            "--prompt-tokens 40 and --output-tokens 6 are 46: the server's max_model_len is 45",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(models: Answer, asked: Settings, code: int, words: str) -> None:
    found, sentence = refused(asked=asked, models=models)
    assert found == code
    assert words in sentence


def test_a_server_that_lists_nothing_is_measured_by_the_models_name() -> None:
    measured, _, server = run(asked=replace(SMALL, levels=(1,), model="mine"), models=refusal(404, "x"))
    assert {body["model"] for body in server.asked} == {"mine"}
    assert any(note.startswith("The server lists no models") for note in measured.as_dict()["notes"])


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (refusal(500, "it broke"), 4, "answered 500: it broke"),
        (refusal(404, "gone"), 3, "does not serve 'standin/model': POST /v1/chat/completions is answered 404: gone"),
        (refusal(401, "no"), 3, "wants an API key"),
        (refusal(400, "too long"), 4, "answered 400: too long"),
    ],
)
def test_a_first_request_that_fails_ends_the_run(answer: Answer, code: int, words: str) -> None:
    found, sentence = refused(lambda _: answer)
    assert found == code
    assert words in sentence


def test_an_unreachable_server_is_the_machines_fault() -> None:
    async def whole() -> None:
        async with Client(replace(SMALL, url="http://127.0.0.1:1")) as client:
            await session.measure(client, Told(), asyncio.Event())

    with pytest.raises(Refusal, match=r"http://127.0.0.1:1 cannot be measured: no connection to 127.0.0.1:1") as caught:
        asyncio.run(whole())
    assert caught.value.exit == Exit.MACHINE_CANNOT


def test_the_closed_loop_keeps_as_many_in_flight_as_asked() -> None:
    in_flight, seen = 0, []

    async def sender(request: Request) -> Row:
        nonlocal in_flight
        in_flight += 1
        seen.append(in_flight)
        await asyncio.sleep(0)
        in_flight -= 1
        return Row(request.index, 0.0, 1.0)

    async def whole() -> None:
        found = await closed_loop(3, [Request(index, "", 1) for index in range(10)], sender, asyncio.Event())
        assert [row.index for row in found.rows] == list(range(10))
        assert found.first_idle is not None
        assert not found.interrupted

    asyncio.run(whole())
    assert max(seen) == 3
    assert seen[-1] == 3


def test_the_window_ends_when_the_first_place_has_nothing_left_to_send() -> None:
    now = 0.0

    async def sender(request: Request) -> Row:
        nonlocal now
        # The second place takes long over its only request, and ends last.
        for _ in range(1 if request.index != 1 else 20):
            await asyncio.sleep(0)
        now += 1.0
        return Row(request.index, 0.0, now)

    async def whole() -> None:
        asked = [Request(index, "", 1) for index in range(3)]
        found = await closed_loop(2, asked, sender, asyncio.Event(), clock=lambda: now)
        # The first place ended its second request at 2; the long one ended at 3.
        assert [row.ended for row in found.rows] == [1.0, 3.0, 2.0]
        assert found.first_idle == 2.0

    asyncio.run(whole())


def test_a_mistake_of_ours_is_not_swallowed_by_the_loop() -> None:
    async def sender(request: Request) -> Row:
        raise KeyError(request.index)

    with pytest.raises(KeyError):
        asyncio.run(closed_loop(1, [Request(0, "", 1)], sender, asyncio.Event()))


@pytest.mark.parametrize(
    ("load", "busy"),
    [
        (ClientLoad(0.2, [1.0] * 100), False),
        (ClientLoad(0.9, [1.0] * 100), True),
        (ClientLoad(0.2, [1.0] * 97 + [30.0] * 3), True),
        (ClientLoad(None, []), False),
    ],
)
def test_a_busy_client_is_told_apart_from_a_slow_server(load: ClientLoad, busy: bool) -> None:
    assert load.as_dict()["busy"] is busy


def test_numbers_can_be_computed_again_from_the_rows() -> None:
    measured, _, _ = run(asked=replace(SMALL, levels=(1,), requests=30))
    (level,) = measured.levels
    rows = [Row.from_dict(row.as_dict()) for row in measured.rows[1]]
    assert measures.latencies(rows) == {name: level[name] for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2el_ms")}
    assert measures.tokens(rows, 6) == level["tokens"]
    assert measures.throughput(1, rows, level["first_idle_seconds"], interrupted=False) == level["throughput"]
    # Rules that hold for every measurement: vllm-project/vllm#37666.
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2el_ms"):
        page = level[name]
        ordered = [page[key] for key in ("min", "p50", "p90", "p95", "max")]
        assert ordered == sorted(ordered)

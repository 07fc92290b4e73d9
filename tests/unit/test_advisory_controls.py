"""Each control of catalog/advisories.yaml, shown: a real HAProxy between a client and an engine that is played."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit import gateway_door as gateway
from tests.unit.gateway_door import Door, needs_haproxy
from tests.unit.test_planning import deployment, plan, spec

from gpuready import catalog
from gpuready.operations import surroundings
from gpuready.operations.start import Start
from gpuready.planning import advisories
from gpuready.planning.flags import split
from gpuready.serving.launch import words
from gpuready.serving.layout import Layout
from gpuready.serving.releases import Store

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "roles/serving/templates/gpuready-engine@.service.j2"
REQUESTS: dict[str, Any] = catalog.load("advisories")["requests"]
MODEL = gateway.MODELS["chat"]
# What ends an engine, as a client would send it; and what looks like it and is none.
REFUSED = {
    "structured_regex": [
        '{"structured_outputs": {"regex": "(a+)+$"}}',
        '{"structured_outputs":{"x":{}, "regex" :"."}}',
    ],
    "guided": ['{"guided_json": {"type": "stsring"}}', '{"response_format": {"type": "json_object"}}'],
    "tools": ['{"tools": [{"function": {"parameters": {"pattern": "["}}}]}'],
    "chat_template": ['{"chat_template": "{% for x in range(9) %}"}', '{"chat_template_kwargs": {"tokenize": true}}'],
    "temperature": [
        f'{{"temperature": {one}}}'
        for one in ("NaN", "Infinity", '"inf"', "1e999", "-Infinity", "1" + "0" * 400, "nan")
    ],
    "many_choices": ['{"n": 129}', '{"n":99999999999}', '{"best_of": 1e3}', '{"n": "1000"}'],
    "choices_with_logprobs": [
        '{"n": 8, "logprobs": true}',
        '{"logprobs": 5, "n": 2}',
        '{"n": 2, "prompt_logprobs": 1}',
    ],
    "escaped_letters": [r'{"structured\u005foutputs": {"re\u0067ex": "."}}', r'{"t\u0065mperature": NaN}'],
}
PASSED = [
    '{"temperature": 0.7, "n": 1, "logprobs": true, "top_logprobs": 5}',
    '{"temperature":null,"n":128}',
    '{"temperature": 1.0e-3}',
    '{"tools": [{"function": {"parameters": {"temperature": {"type": "number"}, "n": {"type": "integer"}}}}]}',
    '{"structured_outputs": {"json": {"type": "object"}}}',
    r'{"messages": "the key \"regex\": of \"structured_outputs\": and \\u0061, \u001b \u003c"}',
]


def body(text: str) -> str:
    return json.dumps({"model": MODEL, "prompt": "x"})[:-1] + ", " + text[1:]


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """Yield a gateway that refuses what the release of the default stack needs, beside an engine that serves all."""
    rules = ["structured_regex", "temperature", "many_choices", "choices_with_logprobs"]
    with (
        gateway.engine() as port,
        gateway.haproxy(tmp_path_factory.mktemp("refusing"), port, refused=advisories.refused_requests(rules)) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def strict_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """Yield a gateway that refuses all that any release needs."""
    rules = [name for name in REQUESTS if name != "escaped_letters"]
    with (
        gateway.engine() as port,
        gateway.haproxy(tmp_path_factory.mktemp("strict"), port, refused=advisories.refused_requests(rules)) as made,
    ):
        yield made


def test_every_rule_is_tried() -> None:
    assert set(REFUSED) == set(REQUESTS)


@needs_haproxy
@pytest.mark.parametrize(("rule", "text"), [(rule, text) for rule, texts in REFUSED.items() for text in texts])
def test_requests_that_end_an_engine_reach_none(strict_door: Door, rule: str, text: str) -> None:
    answer = strict_door.ask(body(text))
    assert gateway.in_form(answer) == (400, "request_refused")
    assert answer.body["error"]["message"] == REQUESTS[rule]["says"]


@needs_haproxy
@pytest.mark.parametrize("text", PASSED)
def test_requests_that_only_look_like_it_pass(door: Door, text: str) -> None:
    assert door.ask(body(text)).status == 200


@needs_haproxy
def test_refused_requests_are_found_in_long_and_chunked_bodies(door: Door) -> None:
    long = body('{"messages": "' + "x" * 30000 + '", "temperature": NaN}').encode()
    assert door.ask(long).status == 400
    assert door.ask(iter([long[:100], long[100:30010], long[30010:]]), chunked=True).status == 400


@needs_haproxy
@pytest.mark.parametrize("host", ["localhost/health?x=", "evil.example/../../v1", "a@b", "127.0.0.1:1/#"])
def test_host_header_of_a_client_reaches_no_engine(door: Door, host: str) -> None:
    answer = door.ask(body("{}".replace("}", '"play_not": 1}')), headers={"Host": host})
    # HAProxy itself refuses a Host that is none; whatever it passes on, the engine is told its own address.
    assert answer.status == 400 or answer.headers["X-Seen-Host"] == "127.0.0.1"


@needs_haproxy
@pytest.mark.parametrize("name", ["Authorization", "authorization"])
def test_key_of_a_client_reaches_no_engine(door: Door, name: str) -> None:
    answer = door.ask(body('{"n": 1}'), headers={name: "Bearer sk-1"})
    assert (answer.status, answer.headers["X-Seen-Key"]) == (200, "none")


@needs_haproxy
@pytest.mark.parametrize(
    "path",
    [
        "/v1/audio/transcriptions",
        "/v1/messages",
        "/v1/completions/derender",
        "/v1/chat/completions/derender",
        "/load_lora_adapter_from_tensors",
        "/v1/load_lora_adapter",
        "/update_weights_from_tensor",
        "/v1/rerank",
        "/v1/embeddings",
        "/invocations",
        "/sleep",
        "/v1/chat/completions/",
        "//v1/chat/completions",
        "/v1/chat/completions/../../sleep",
        "/v1/chat/%63ompletions",
    ],
)
def test_paths_that_are_not_the_tasks_reach_no_engine(door: Door, path: str) -> None:
    assert gateway.in_form(door.ask(body('{"n": 1}'), path=path)) == (404, "path_not_found")


@needs_haproxy
@pytest.mark.parametrize("text", ["", "{", '{"model": }', "model", '{"messages": []}', "[1]"])
def test_what_is_not_json_reaches_no_engine(door: Door, text: str) -> None:
    assert gateway.in_form(door.ask(text)) == (404, "model_not_found")


@pytest.mark.parametrize("name", ["api-key", "hf-token"])
def test_no_engine_is_given_a_key_as_a_flag(name: str) -> None:
    _, rest, failures, _ = split("w", {name: "s3cret"}, "vllm", "0.19.1")
    assert rest == {}
    assert "is a secret" in failures[0].sentence()
    assert "s3cret" not in failures[0].sentence()


def test_engines_run_as_their_own_user() -> None:
    assert {"User=gpuready-engine", "NoNewPrivileges=true"} <= set(UNIT.read_text(encoding="utf-8").splitlines())
    others = [path for path in ROOT.glob("roles/**/*.service*") if path != UNIT]
    assert len(others) >= 2
    assert not any("User=gpuready-engine" in path.read_text(encoding="utf-8") for path in others)


def environment(root: Path) -> dict[str, str]:
    layout = Layout(root)
    (planned,) = plan(spec(deployment()))["deployments"]
    return surroundings.environment(layout, "chat.0", Start(Store(layout, "chat"), 1, 0, planned, {"index": 0}))


def test_engines_are_offline(tmp_path: Path) -> None:
    assert environment(tmp_path)["HF_HUB_OFFLINE"] == "1"


def test_engines_run_with_assertions(tmp_path: Path) -> None:
    assert "PYTHONOPTIMIZE" not in environment(tmp_path)


@pytest.mark.parametrize(
    ("engine", "version", "name"),
    [
        ("vllm", "0.19.1", "nnodes"),
        ("vllm", "0.19.1", "headless"),
        ("vllm", "0.19.1", "data-parallel-address"),
        ("sglang", "0.5.10.post1", "dist-init-addr"),
        ("sglang", "0.5.10.post1", "nccl-init-addr"),
    ],
)
def test_no_replica_spans_servers(engine: str, version: str, name: str) -> None:
    (failure,) = split("w", {name: "10.0.0.2"}, engine, version).failures
    said = "is set by gpuready itself; remove it: a replica's processes are all on one server."
    assert failure.sentence() == f"w, flags.{name} {said}"


def test_the_language_model_server_is_what_is_started() -> None:
    part = {"port": 18100}
    started = {
        engine: words({"engine": engine, "engine_folder": "/e", "model_path": "/m"}, Path("/r"), part)[1:3]
        for engine in ("vllm", "sglang", "tensorrt_llm")
    }
    assert started["vllm"] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert started["sglang"] == ["-m", "sglang.launch_server"]
    assert started["tensorrt_llm"][0] == "/e/bin/trtllm-serve"


def test_code_of_a_checkpoint_is_not_trusted() -> None:
    (planned,) = plan(spec(deployment()))["deployments"]
    names = [one["name"] for group in planned["options"].values() for one in group]
    assert "trust-remote-code" not in names

"""Ready is one real token, asked of this server itself and of nobody between."""

from __future__ import annotations

import base64
import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gpuready.serving import probes, readiness
from gpuready.serving.probes import Asked

GOOD: dict[str, Any] = {
    "/v1/completions": {"choices": [{"text": "yes"}], "usage": {"completion_tokens": 1}},
    "/v1/embeddings": {"data": [{"embedding": [0.5, 0]}, {"embedding": [0.25, 1]}]},
    "/v1/rerank": {"results": [{"index": 1, "relevance_score": 0.5}, {"index": 0, "relevance_score": 0.25}]},
    "/classify": {"data": [{"label": "yes", "probs": [0.9, 0.1]}]},
}


class Engine(http.server.BaseHTTPRequestHandler):
    """An engine that has one token for everybody, or what else it is asked for."""

    answers: ClassVar[dict[str, Any]] = {}
    """What it says other than what is good."""
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self.say(self.answers.get(self.path, {"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        got = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(got)
        answer = self.answers.get(self.path, GOOD.get(self.path))
        self.say(answer(got) if callable(answer) else {} if got["model"] == "mute" else answer)

    def say(self, answer: Any) -> None:
        status, answer = answer if isinstance(answer, tuple) else (200, answer)
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(Engine, "answers", {})
    monkeypatch.setattr(Engine, "asked", [])
    server = http.server.HTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_a_proxy_of_the_environment_does_not_stand_between(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert readiness.one_token(Asked(port, "m")) == "yes"


@pytest.mark.parametrize(
    ("task", "wanted"),
    [("generate", "a token"), ("embed", "an embedding"), ("rerank", "a score"), ("classify", "probabilities")],
)
def test_a_model_is_asked_for_what_it_is_made_for(port: int, task: str, wanted: str) -> None:
    readiness.one_token(Asked(port, "m", task))
    with pytest.raises(readiness.NotReady, match=f"an answer without {wanted}: {{}}"):
        readiness.one_token(Asked(port, "mute", task))


def test_the_limit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "PAUSE_SECONDS", 0.01)
    with pytest.raises(readiness.NotReady, match=r"no token within 0 s; last seen: .*refused"):
        readiness.wait_for_token(Asked(9, "m"), os.getpid(), 0.1)


def test_a_process_is_told_from_a_later_one_with_its_number() -> None:
    assert readiness.process_start(os.getpid()) == readiness.process_start(os.getpid()) != None  # noqa: E711
    assert readiness.process_start(2**30) is None


# What counts as an answer -----------------------------------------------------------------------------------------


def completion(text: str, tokens: list[str] | None = None, values: list[Any] | None = None, **more: Any) -> Any:
    count = len(tokens) if tokens else 16
    told = {"tokens": tokens, "token_logprobs": values or [-7.5] * count} if tokens else None
    choice = {"text": text, "logprobs": told, "finish_reason": "length"}
    return {"model": "m", "choices": [choice], "usage": {"completion_tokens": count}, **more}


SIXTEEN = [f"t{number}" for number in range(16)]


@pytest.mark.parametrize(
    "answer",
    [
        completion("a fox who lived", SIXTEEN),
        completion("\ufffd\ufffdMODU", SIXTEEN),
        completion("a fox", None),
        # A few tokens may be alike by chance.
        completion("!!!", ["!"] * 3),
        completion("", [""], [-0.5]),
    ],
)
def test_sane_text_is_a_proof(port: int, answer: Any) -> None:
    Engine.answers["/v1/completions"] = answer
    readiness.prove(Asked(port, "m"))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (completion("!" * 16, ["!"] * 16), "sense: it gives one and the same token again and again"),
        (completion("!" * 16), "sense: it gives one and the same token again and again"),
        (completion("the the the the the the the the", ["the "] * 8), "sense: it gives one and the same token"),
        (completion("", SIXTEEN), "text: its 16 tokens are ''"),
        (completion("\ufffd" * 16, SIXTEEN), "text: its 16 tokens"),
        (completion("a fox", SIXTEEN, [float("nan")] * 16), "sense: its logprobs are no finite numbers"),
        (completion("a fox", SIXTEEN, [-1.0, None]), "sense: its logprobs are no finite numbers"),
        ({"model": "m", "choices": [], "usage": {"completion_tokens": 0}}, "a token"),
        (["no object"], "a token"),
    ],
)
def test_rubbish_is_no_proof(port: int, answer: Any, said: str) -> None:
    Engine.answers["/v1/completions"] = answer
    with pytest.raises(readiness.Rubbish, match=f"an answer without {said}"):
        readiness.prove(Asked(port, "m"))


def test_logprobs_that_json_cannot_hold_are_rubbish(port: int) -> None:
    said = {"error": {"message": "Out of range float values are not JSON compliant: nan"}}
    Engine.answers["/v1/completions"] = (500, said)
    with pytest.raises(readiness.Rubbish, match="its numbers are not finite"):
        readiness.prove(Asked(port, "m"))


def test_an_engine_that_gives_no_logprobs_is_asked_without(port: int) -> None:
    Engine.answers["/v1/completions"] = lambda got: (400, {}) if "logprobs" in got else completion("a fox")
    readiness.prove(Asked(port, "m"))
    Engine.answers["/v1/completions"] = (400, {"error": "no"})
    with pytest.raises(readiness.NotReady, match=r'HTTP 400: \{"error": "no"\}'):
        readiness.prove(Asked(port, "m"))


def test_another_process_on_the_port_is_no_proof(port: int) -> None:
    Engine.answers["/v1/models"] = {"data": [{"id": "somebody/elses"}]}
    with pytest.raises(readiness.Rubbish, match=f"port {port} serves the model somebody/elses instead of m"):
        readiness.prove(Asked(port, "m"))
    Engine.answers["/v1/models"] = {"status": "ok"}
    with pytest.raises(readiness.Rubbish, match="serves no list of models"):
        readiness.prove(Asked(port, "m"))
    del Engine.answers["/v1/models"]
    Engine.answers["/v1/completions"] = completion("a fox", model="somebody/elses")
    with pytest.raises(readiness.Rubbish, match="an answer of the model somebody/elses instead of m"):
        readiness.prove(Asked(port, "m"))


@pytest.mark.parametrize(
    ("task", "path", "answer", "said"),
    [
        ("embed", "/v1/embeddings", [[0.0, 0.0], [1.0, 0.5]], "an embedding that is not all zero"),
        ("embed", "/v1/embeddings", [[float("nan"), 1.0], [1.0, 0.5]], "an embedding of finite numbers"),
        ("embed", "/v1/embeddings", [[1.0, 0.5]], "an embedding for each text"),
        ("embed", "/v1/embeddings", [[1.0, 0.5, 2.0], [1.0, 0.5, 1.0]], "embeddings of 2 numbers: theirs are 3 long"),
        ("rerank", "/v1/rerank", [(0, float("inf")), (1, 0.5)], "a score that is a finite number"),
        ("rerank", "/v1/rerank", [(0, 0.25), (1, 0.5)], "scores in their order"),
        ("rerank", "/v1/rerank", [(0, 0.25), (0, 0.125)], "a score for each document"),
        ("classify", "/classify", [float("nan"), 0.5], "probabilities that are finite numbers"),
        ("classify", "/classify", [], "probabilities"),
    ],
)
def test_numbers_without_sense_are_no_proof(port: int, task: str, path: str, answer: Any, said: str) -> None:
    asked = Asked(port, "m", task, dimensions=2 if task == "embed" else None)
    readiness.prove(asked)
    Engine.answers[path] = {
        "embed": lambda: {"data": [{"embedding": one} for one in answer]},
        "rerank": lambda: {"results": [{"index": index, "relevance_score": score} for index, score in answer]},
        "classify": lambda: {"data": [{"probs": answer}]},
    }[task]()
    with pytest.raises(readiness.Rubbish, match=f"an answer without {said}"):
        readiness.prove(asked)


def test_sglang_gives_scores_as_a_list_and_classifies_on_another_path(port: int) -> None:
    Engine.answers["/v1/rerank"] = [{"score": 0.5, "index": 1}, {"score": 0.25, "index": 0}]
    readiness.prove(Asked(port, "m", "rerank", engine="sglang"))
    Engine.answers["/v1/classify"] = {"data": [{"probs": [0.5, 0.5]}]}
    readiness.prove(Asked(port, "m", "classify", engine="sglang"))


def test_a_model_that_sees_is_shown_an_image(port: int) -> None:
    Engine.answers["/v1/completions"] = completion("a fox")
    Engine.answers["/v1/chat/completions"] = (400, {"error": "At most 0 image(s) may be provided"})
    readiness.prove(Asked(port, "m"))
    with pytest.raises(readiness.NotReady, match="At most 0 image"):
        readiness.prove(Asked(port, "m", vision=True))
    Engine.answers["/v1/chat/completions"] = completion("grey")
    readiness.prove(Asked(port, "m", vision=True))
    url = Engine.asked[-1]["messages"][0]["content"][0]["image_url"]["url"]
    assert base64.b64decode(url.partition("base64,")[2]).startswith(b"\x89PNG")


def test_what_is_asked_follows_from_plan_and_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 384, "vision_config": {}}')
    plan = {"engine": "vllm", "model": "m", "model_path": str(tmp_path)}
    part = {"port": 18100}
    assert probes.asked_of(plan, part) == Asked(18100, "m", vision=True)
    off = {"options": {"features": [{"name": "language-model-only", "value": True, "why": ""}]}}
    assert not probes.asked_of({**plan, **off}, part).vision
    assert probes.asked_of({**plan, "task": "embed"}, part).dimensions == 384
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense"}]')
    assert probes.asked_of({**plan, "task": "embed"}, part).dimensions is None
    assert probes.asked_of({**plan, "engine": "tensorrt_llm"}, part).model == tmp_path.name


def test_wrong_answers_end_the_wait_long_before_its_limit(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "PAUSE_SECONDS", 0.0)
    Engine.answers["/v1/completions"] = completion("!" * 16)
    with pytest.raises(readiness.NotReady, match="it answers wrongly, 3 times: an answer without sense"):
        readiness.wait_for_token(Asked(port, "m"), os.getpid(), 3600)
    assert len(Engine.asked) == 3


def test_one_wrong_answer_is_asked_again(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "PAUSE_SECONDS", 0.0)
    said = iter(["!" * 16, "!" * 16, "a fox"])
    Engine.answers["/v1/completions"] = lambda _: completion(next(said))
    readiness.wait_for_token(Asked(port, "m"), os.getpid(), 3600)

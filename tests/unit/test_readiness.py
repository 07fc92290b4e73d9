"""Ready is one real token, asked of this server itself and of nobody between."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from gpuready.serving import readiness
from gpuready.serving.readiness import Asked


class Engine(http.server.BaseHTTPRequestHandler):
    """An engine that has one token for everybody, or what else it is asked for."""

    answers: ClassVar[dict[str, Any]] = {
        "/v1/completions": {"choices": [{"text": "yes"}], "usage": {"completion_tokens": 1}},
        "/v1/embeddings": {"data": [{"embedding": [0.5, 0]}]},
        "/v1/rerank": {"results": [{"index": 0, "relevance_score": 0.25}]},
        "/classify": {"data": [{"label": "yes", "probs": [0.9, 0.1]}]},
    }

    def do_POST(self) -> None:
        got = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({} if got["model"] == "mute" else self.answers[self.path]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def port() -> Iterator[int]:
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

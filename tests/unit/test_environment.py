"""What surrounds the server part: language, proxies, and that no address shows its credentials."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gpuready.cli import main
from gpuready.cli.environment import own_environment
from gpuready.cli.verb import Call, Verb
from gpuready.operations import gateway
from gpuready.outcome import Change, Failure, Refusal, Result, mask
from gpuready.serving import probes, readiness
from gpuready.spec import check_declaration

GERMAN = {"LANGUAGE": "en_GB:de", "LANG": "de_DE.UTF-8", "LC_NUMERIC": "de_DE", "PATH": "/bin"}
UNKNOWN = {"LC_ALL": "xx_YY.UTF-8", "LANG": "xx_YY.UTF-8", "PATH": "/bin"}
LOOPBACK = "localhost,127.0.0.1,::1"


@pytest.mark.parametrize("before", [GERMAN, UNKNOWN, {"PATH": "/bin"}])
def test_every_program_speaks_plainly_whatever_the_login_says(before: dict[str, str]) -> None:
    environment = dict(before)
    own_environment(environment)
    named = {name: value for name, value in environment.items() if name.startswith(("LC_", "LANG"))}
    assert named == {"LC_ALL": "C"}
    assert environment["PATH"] == "/bin"


def test_a_proxy_of_the_inventory_reaches_both_spellings_and_spares_loopback() -> None:
    environment = {"http_proxy": "http://old:1", "NO_PROXY": "corp.example, .lan"}
    own_environment(environment, {"http": "http://p:3128", "https": None, "no_proxy": ["mirror.lan"]})
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        assert environment[name] == "http://p:3128"
    for name in ("no_proxy", "NO_PROXY"):
        assert environment[name] == f"corp.example,.lan,mirror.lan,{LOOPBACK}"


def test_a_proxy_of_the_server_itself_is_kept_and_spares_loopback() -> None:
    environment = {"HTTPS_PROXY": "http://p:3128"}
    own_environment(environment)
    assert environment["HTTPS_PROXY"] == "http://p:3128"
    assert "https_proxy" not in environment
    assert environment["no_proxy"] == environment["NO_PROXY"] == LOOPBACK


def test_a_proxy_without_an_address_is_refused() -> None:
    with pytest.raises(Refusal, match="the proxy of the input names no address; set its key http or https"):
        own_environment({}, {"no_proxy": ["x"]})


def test_a_verb_does_not_see_the_proxy_but_its_programs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def look(call: Call) -> Result:
        seen.update(call.input, at=os.environ["https_proxy"], language=os.environ["LC_ALL"])
        return Result()

    monkeypatch.setattr(main, "_verbs", lambda _: {"look": Verb("look", look, takes_input=True)})
    given = {"names": ["a"], "proxy": {"http": "http://u:p@proxy:3128"}}
    monkeypatch.setattr(main, "object_of", lambda _: given)
    with monkeypatch.context() as changed:
        changed.setattr(os, "environ", dict(os.environ))
        main.run(["host", "look", "--json"])
    assert seen == {"names": ["a"], "at": "http://u:p@proxy:3128", "language": "C"}


# ------------------------------------------------------------------------------------------------ loopback


class _Engine(http.server.BaseHTTPRequestHandler):
    def _answer(self) -> None:
        body = json.dumps(
            {"choices": [{"text": "x"}], "usage": {"completion_tokens": 1}, "data": [{"id": "m"}], "object": "list"}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = _answer  # noqa: N815 - the names are the library's

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the library's
        pass


@pytest.fixture
def engine() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_health_checks_ask_the_engine_itself(name: str, engine: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("no_proxy", "NO_PROXY", "REQUEST_METHOD"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert readiness.one_token(probes.Asked(engine, "m")) == "x"
    with gateway._DIRECT.open(f"http://127.0.0.1:{engine}/v1/models", timeout=5) as answer:
        assert json.load(answer)["data"] == [{"id": "m"}]


# ------------------------------------------------------------------------------------------------ credentials


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:secret@proxy:3128 fails", "http://***@proxy:3128 fails"),
        ("URIs: https://u:s%40x@mirror.example/debian\n", "URIs: https://***@mirror.example/debian\n"),
        ("(http://u:se@cret@proxy:1)", "(http://***@proxy:1)"),
        ("http://u:sec/ret@proxy:1/", "http://***@proxy:1/"),
        ("https://token@index.example/simple", "https://***@index.example/simple"),
        ("a http://a:b@c and https://d:e@f/", "a http://***@c and https://***@f/"),
        ("http://127.0.0.1:8080/models/x@rev", "http://127.0.0.1:8080/models/x@rev"),
        ("/srv/models/x@rev and https://pypi.org/simple", "/srv/models/x@rev and https://pypi.org/simple"),
    ],
)
def test_an_address_is_shown_without_its_credentials(text: str, shown: str) -> None:
    assert mask(text) == shown


def test_no_result_and_no_refusal_shows_credentials(capsys: pytest.CaptureFixture[str]) -> None:
    address = "https://user:secret@mirror.example/debian"
    failure = Failure("x", f"{address} does not answer", f"asked {address}", f"correct {address}")
    result = Result(
        summary=f"asked {address}",
        diff=[Change(f"file {address}", f"URIs: {address}\n", "")],
        failures=[failure],
        data={"stored_plan": {"flag": address}},
    )
    assert result.as_dict()["data"] == {"stored_plan": {"flag": address}}, "what is read back is exact"
    main._print_for_people(Result(data=result.data))
    assert "https://***@mirror.example/debian" in capsys.readouterr().out
    main._print_for_people(result)
    printed = capsys.readouterr()
    told = json.dumps({key: value for key, value in result.as_dict().items() if key != "data"})
    for said in (told, failure.sentence(), str(Refusal(failure)), printed.out, printed.err):
        assert "secret" not in said
        assert "https://***@mirror.example/debian" in said


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"http": "proxy:3128"}, "gpuready_proxy.http is refused: allowed is http://host:port"),
        ({"https": "http://user:secret@proxy"}, "gpuready_proxy.https is refused: allowed is http://host:port"),
        ({"http": "http://user:se/cret@proxy:3128"}, "gpuready_proxy.http is refused: allowed is"),
        ({"http": "socks5://user:secret@proxy:3128"}, "gpuready_proxy.http is refused: allowed is"),
        ({"no_proxy": ["a.example"]}, "gpuready_proxy is refused: neither http nor https is set"),
        ({"http": "http://p:1", "no_proxy": ["a b"]}, "gpuready_proxy.no_proxy[0] = 'a b' is refused"),
        ({"htp": "http://user:secret@proxy:3128"}, "gpuready_proxy.htp: no such key; did you mean http?"),
    ],
)
def test_a_wrong_proxy_is_refused_without_its_password(value: dict[str, Any], words: str) -> None:
    _, failures = check_declaration("h", {"gpuready_proxy": value}, {})
    said = " ".join(failure.sentence() for failure in failures)
    assert words in said
    assert "cret" not in said

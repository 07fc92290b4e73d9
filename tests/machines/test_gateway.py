"""The gateway of a finished server, asked from outside as a client does."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from sim.machine.common import CHECKOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sim.machine.machine import Machine

    Body = bytes | dict[str, Any] | Iterator[bytes] | None

pytestmark = pytest.mark.machine

MODEL = "gpuready-sim/tiny-qwen2"
MESSAGES = [{"role": "user", "content": "Hello"}]
UNIT = "gpuready-gateway.service"
TEMPLATE = CHECKOUT / "templates/gateway/haproxy.cfg.j2"


def say(machine: Machine, command: str) -> str:
    return str(machine.ssh(command).stdout).strip()


def ask(machine: Machine, path: str, body: Body = None, port: int = 8080) -> Any:
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    request = urllib.request.Request(
        f"http://{machine.address}:{port}{path}", data, {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=150)  # noqa: S310 - our own test machine


def pieces(size: int) -> Iterator[bytes]:
    """A body whose length is not told beforehand."""
    for start in range(0, size, 65536):
        yield b" " * min(65536, size - start)


def refused(machine: Machine, path: str, body: Body = None) -> tuple[int, dict[str, Any]]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(machine, path, body)
    error: dict[str, Any] = json.loads(caught.value.read())["error"]
    return caught.value.code, error


def test_models_are_listed(finished: Machine) -> None:
    listed = json.load(ask(finished, "/v1/models"))
    assert [one["id"] for one in listed["data"]] == [MODEL]


def test_chat_completion(finished: Machine) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12}
    reply = json.load(ask(finished, "/v1/chat/completions", body))
    assert reply["model"] == MODEL
    assert reply["usage"]["completion_tokens"] == 12
    assert len(reply["choices"][0]["message"]["content"]) > 0


def test_streamed_chat_completion_comes_in_pieces(finished: Machine) -> None:
    # The engine joins tokens that its server had no time to send one by one, so the answer is long.
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "stream": True}
    with ask(finished, "/v1/chat/completions", body) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        events = [line.decode().removeprefix("data: ").strip() for line in answer if line.startswith(b"data: ")]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
    assert len([piece for piece in pieces if piece]) >= 6


def test_model_is_found_after_long_messages(finished: Machine) -> None:
    # The name stands behind 100 kB, so the whole body must be read. Too many tokens is the engine's own answer.
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 100_000}], "max_tokens": 1, "model": MODEL})
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(finished, "/v1/chat/completions", body.encode())
    assert caught.value.code == 400
    assert b"maximum context length" in caught.value.read()


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/chat/completions", {"model": "gpt-4", "messages": MESSAGES}, 404, "model_not_found"),
        ("/v1/chat/completions", {"messages": MESSAGES}, 404, "model_not_found"),
        ("/v1/chat/completions", b"not json", 404, "model_not_found"),
        ("/v1/chat/completions", None, 405, "method_not_allowed"),
        ("/metrics", None, 404, "path_not_found"),
        ("/docs", None, 404, "path_not_found"),
        ("/v1/load_lora_adapter", {"model": MODEL}, 404, "path_not_found"),
        ("/v1/completions", b" " * (1024 * 1024 + 1), 413, "body_too_large"),
        ("/v1/completions", pieces(1024 * 1024 + 1), 413, "body_too_large"),
    ],
)
def test_errors_have_openais_form(finished: Machine, path: str, body: Body, status: int, code: str) -> None:
    found, error = refused(finished, path, body)
    assert (found, error["code"]) == (status, code)
    assert error["message"]


def test_model_is_found_as_php_writes_it(finished: Machine) -> None:
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "max_tokens": 1}).replace("/", "\\/")
    assert json.load(ask(finished, "/v1/chat/completions", body.encode()))["model"] == MODEL


def test_it_survives_kill_9(finished: Machine) -> None:
    pid = say(finished, f"systemctl show {UNIT} --property MainPID --value")
    finished.ssh(f"kill -9 {pid}; for i in $(seq 50); do systemctl -q is-active {UNIT} && break; sleep 0.2; done")
    assert say(finished, f"systemctl show {UNIT} --property MainPID --value") not in (pid, "0")
    assert json.load(ask(finished, "/v1/models"))["data"]


@pytest.mark.long
def test_a_request_that_comes_while_the_engine_restarts_is_held_not_refused(finished: Machine) -> None:
    # Requests that were with the engine when it died are lost (502): only it can know what became of them.
    finished.ssh(
        "pid=$(systemctl show gpuready-engine@chat.0 --property MainPID --value); kill -9 $pid; "
        "while [ -e /proc/$pid ]; do sleep 0.1; done"
    )
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
    assert json.load(ask(finished, "/v1/chat/completions", body))["usage"]["completion_tokens"] == 4


def test_workers_do_not_run_as_root(finished: Machine) -> None:
    users = say(finished, f"ps -o user= --ppid $(systemctl show {UNIT} --property MainPID --value)").split()
    assert set(users) == {"haproxy"}


@pytest.mark.long
def test_another_port_is_a_reload_not_a_restart(finished_clone: Machine, play: Callable[..., Any]) -> None:
    machine = finished_clone
    pid = say(machine, f"systemctl show {UNIT} --property MainPID --value")
    port = {"gateway_port": 8090}
    # The stage gateway alone does not open the port, and says so.
    played = play(machine, "playbooks/gateway.yml", port)
    assert played.rc == 0, played.stdout
    assert "port 8090 is closed by the packet filter" in played.stdout
    played = play(machine, "site.yml", port)
    assert played.rc == 0, played.stdout
    assert "is closed by the packet filter" not in played.stdout
    assert say(machine, f"systemctl show {UNIT} --property MainPID --value") == pid
    assert json.load(ask(machine, "/v1/models", port=8090))["data"]
    assert play(machine, "site.yml", port).recap["h100-sg-01"]["changed"] == 0


@pytest.mark.long
@pytest.mark.parametrize("check", [(), ("--check",)])
def test_a_template_that_haproxy_refuses_touches_nothing(
    finished: Machine, play: Callable[..., Any], check: tuple[str, ...]
) -> None:
    looked = "ls -A /etc/gpuready/gateway; readlink /etc/gpuready/gateway/current; ls -A /tmp"
    before = say(finished, looked)
    own = f"{TEMPLATE.read_text()}\nlisten operators\n    no-such-keyword\n"
    files = {"templates/gateway/haproxy.cfg.j2": own}
    played = play(finished, "playbooks/gateway.yml", None, *check, files=files)
    assert played.rc == 2, played.stdout
    assert "no-such-keyword" in played.stdout
    assert "haproxy does not take haproxy.cfg" in played.stdout
    assert "the running configuration was not touched" in played.stdout
    assert say(finished, looked) == before
    assert json.load(ask(finished, "/v1/models"))["data"]


@pytest.mark.long
def test_an_address_that_cannot_be_bound_is_said_and_the_former_gateway_serves(
    finished_clone: Machine, play: Callable[..., Any]
) -> None:
    machine = finished_clone
    before = say(machine, "readlink /etc/gpuready/gateway/current")
    # HAProxy's own check takes it; only the new worker meets it.
    played = play(machine, "playbooks/gateway.yml", {"gateway_bind": "192.0.2.1"})
    assert played.rc == 2, played.stdout
    assert "cannot bind socket" in played.stdout
    assert "the former configuration serves on" in played.stdout
    assert json.load(ask(machine, "/v1/models"))["data"]
    assert say(machine, "readlink /etc/gpuready/gateway/current") == before
    machine.ssh(f"systemctl restart {UNIT}")
    assert json.load(ask(machine, "/v1/models"))["data"], "what starts at boot is what was proved"
    played = play(machine, "playbooks/gateway.yml")
    assert (played.rc, played.recap["h100-sg-01"]["changed"]) == (0, 0), played.stdout


@pytest.mark.long
@pytest.mark.parametrize("reloaded", ["true", f"systemctl reload {UNIT}"])
def test_a_change_by_hand_is_put_right_by_one_reload(
    finished_clone: Machine, play: Callable[..., Any], reloaded: str
) -> None:
    machine = finished_clone
    config = "/etc/gpuready/gateway/current/haproxy.cfg"
    digest = say(machine, f"sha256sum < {config}")
    machine.ssh(f"sed -i s/dontlognull/httpclose/ {config}; {reloaded}; sleep 1")
    pid = say(machine, f"systemctl show {UNIT} --property MainPID --value")
    reloads = f"journalctl --unit {UNIT} --output cat | grep -c '^Reloaded'"
    before = int(say(machine, f"{reloads} || true"))
    played = play(machine, "playbooks/gateway.yml")
    assert (played.rc, played.recap["h100-sg-01"]["changed"]) == (0, 1), played.stdout
    assert say(machine, f"sha256sum < {config}") == digest
    assert play(machine, "playbooks/gateway.yml").recap["h100-sg-01"]["changed"] == 0
    assert int(say(machine, reloads)) == before + 1
    assert say(machine, f"systemctl show {UNIT} --property MainPID --value") == pid


@pytest.mark.long
def test_a_run_that_died_before_the_reload_is_finished_by_the_next(
    finished_clone: Machine, play: Callable[..., Any]
) -> None:
    machine = finished_clone
    # As a run leaves it that was killed between switching the files and reloading: the link is new, what runs is not.
    machine.ssh(
        "cd /etc/gpuready/gateway && cp -r $(readlink current) 0123456789ab && echo '# old' >> 0123456789ab/models.map"
        f" && former=$(readlink current) && ln -sfn 0123456789ab current && systemctl restart {UNIT}"
        " && ln -sfn $former current"
    )
    played = play(machine, "playbooks/gateway.yml")
    assert played.rc == 0, played.stdout
    assert played.recap["h100-sg-01"]["changed"] == 1
    assert say(machine, "diff -r /run/gpuready-gateway/loaded /etc/gpuready/gateway/current/") == ""
    assert play(machine, "playbooks/gateway.yml").recap["h100-sg-01"]["changed"] == 0


@pytest.mark.long
def test_a_run_that_died_before_systemd_read_the_unit_is_finished_by_the_next(
    finished_clone: Machine, play: Callable[..., Any]
) -> None:
    machine = finished_clone
    unit = f"/etc/systemd/system/{UNIT}"
    # systemd still has the former unit, and has started it again, when the file is already the one that is wanted.
    machine.ssh(
        f"cp {unit} /root/wanted && sed -i '/^Environment/i Environment=FORMER=1' {unit} && systemctl daemon-reload && "
        f"systemctl restart {UNIT} && sleep 1 && cp /root/wanted {unit} && cp /root/wanted /run/gpuready-gateway/unit"
    )
    environment = f"tr '\\0' ' ' < /proc/$(systemctl show {UNIT} --property MainPID --value)/environ"
    assert "FORMER=1" in say(machine, environment)
    played = play(machine, "playbooks/gateway.yml")
    assert (played.rc, played.recap["h100-sg-01"]["changed"]) == (0, 1), played.stdout
    assert say(machine, f"systemctl show {UNIT} --property NeedDaemonReload --value") == "no"
    assert "FORMER=1" not in say(machine, environment)


def test_the_distributions_own_service_is_left_alone(finished: Machine) -> None:
    # As the package left it: its files unchanged (unit and configuration too), nothing beside them, enabled, running.
    assert say(finished, "dpkg --verify haproxy") == ""
    shown = say(finished, "systemctl show haproxy --property FragmentPath,DropInPaths,UnitFileState,ActiveState")
    assert dict(line.split("=", 1) for line in shown.splitlines()) == {
        "FragmentPath": "/usr/lib/systemd/system/haproxy.service",
        "DropInPaths": "",
        "UnitFileState": "enabled",
        "ActiveState": "active",
    }

"""One replica on a booted machine, and the gateway before it, as tests of engines look at them."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

import pytest
from sim.machine.machine import Machine

START_SECONDS = 180
WORKLOAD = {
    "prompt_tokens": {"p50": 200, "p99": 2000},
    "output_tokens": {"p50": 100, "p99": 1000},
    "concurrency": 8,
}


@dataclass(frozen=True)
class Replica:
    """A replica, e.g. `talk.0`, and the model that the gateway knows it by."""

    machine: Machine
    name: str
    model: str

    @property
    def unit(self) -> str:
        return f"gpuready-engine@{self.name}.service"

    def say(self, command: str) -> str:
        return str(self.machine.ssh(command).stdout).strip()

    def shown(self, name: str) -> str:
        return self.say(f"systemctl show {self.unit} --property {name} --value")

    def ready(self) -> dict[str, Any]:
        """Return the proof of its start."""
        found: dict[str, Any] = json.loads(self.say(f"cat /run/gpuready/{self.name}/ready.json"))
        return found

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask the gateway as a client does, from outside the server."""
        url = f"http://{self.machine.address}:8080{path}"
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=120)  # noqa: S310 - our own test machine

    def refused(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the code and the error with which the gateway refuses."""
        with pytest.raises(urllib.error.HTTPError) as caught:
            self.ask(path, body)
        error: dict[str, Any] = json.load(caught.value)["error"]
        return caught.value.code, error

    def straight(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        """Ask the engine itself, on the server; return the HTTP status and the answer's text."""
        code = (
            "import sys, urllib.request as u, urllib.error as e\n"
            "asked = u.Request(sys.argv[1], sys.argv[2].encode() or None, {'Content-Type': 'application/json'})\n"
            "try: found = u.urlopen(asked, timeout=60)\n"
            "except e.HTTPError as refused: found = refused\n"
            "print(found.status); print(found.read().decode())"
        )
        url = f"http://127.0.0.1:{self.ready()['port']}{path}"
        words = ["python3", "-c", code, url, json.dumps(body) if body else ""]
        status, _, text = str(self.machine.ssh(words).stdout).partition("\n")
        return int(status), text.strip()

    def chat(self, tokens: int = 8) -> dict[str, Any]:
        body = {"model": self.model, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
        with self.ask("/v1/chat/completions", {**body, "max_tokens": tokens}) as answer:
            reply: dict[str, Any] = json.load(answer)
        assert reply["usage"]["completion_tokens"] == tokens
        return reply

    def stream(self, tokens: int) -> Any:
        """Ask for a stream of so many tokens; return it once its first line came."""
        body = {"model": self.model, "prompt": "Hello", "max_tokens": tokens, "temperature": 0, "stream": True}
        answer = self.ask("/v1/completions", body)
        assert answer.readline().startswith(b"data: {")
        return answer

    def wait_until_serving(self, former_pid: str = "none") -> None:
        """Wait until another process than the former one is ready."""
        limit = time.monotonic() + START_SECONDS
        while time.monotonic() < limit:
            if self.shown("ActiveState") == "active" and self.shown("MainPID") != former_pid:
                return
            time.sleep(1)
        pytest.fail(self.say(f"systemctl status --no-pager {self.unit}; journalctl -u {self.unit} -n 40 --no-pager"))


def end_of(stream: Any) -> tuple[str | None, str]:
    """Read a stream to its end; return why the answer ended, and the last line."""
    lines = [line for line in stream.read().decode().splitlines() if line.startswith("data: ")]
    reasons = [json.loads(line.removeprefix("data: "))["choices"][0]["finish_reason"] for line in lines[:-1]]
    return next((one for one in reversed(reasons) if one), None), lines[-1]

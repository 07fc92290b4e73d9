"""scripts/benchmark.py as an operator runs it: its words, its exit codes, its files."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.unit.standin_openai import MODEL, Answer, StandinServer, listing, refusal, standing_in, stream

from gpuready.benchmark import inventory
from gpuready.outcome import MachineCannot, Refusal

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--concurrency", "1,2", "--requests", "4", "--prompt-tokens", "40", "--output-tokens", "6")


@dataclass
class Ran:
    code: int
    stdout: str
    stderr: str


def well_behaved(body: dict[str, Any]) -> Answer:
    words = len(body["messages"][0]["content"].split())
    return stream(*["x"] * body["max_tokens"], prompt=10 + 2 * words)


async def command(*words: str, server: StandinServer | None = None, interrupt_at: int | None = None) -> Ran:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "scripts/benchmark.py"),
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "140"},
    )
    if interrupt_at is not None and server:
        while len(server.asked) < interrupt_at:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
    stdout, stderr = await asyncio.wait_for(process.communicate(), 60)
    return Ran(process.returncode or 0, stdout.decode(), stderr.decode())


def run(*words: str, chat: Any = well_behaved, models: Answer | None = None, interrupt_at: int | None = None) -> Ran:
    async def whole() -> Ran:
        async with standing_in(chat) as server:
            server.models = models or server.models
            return await command(server.url, *words, server=server, interrupt_at=interrupt_at)

    return asyncio.run(whole())


def test_a_run_tells_its_way_and_leaves_its_report(tmp_path: Path) -> None:
    ran = run(*SMALL, "--out", str(tmp_path / "run"), "--note", "a stand-in")
    assert (ran.code, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("8 requests at concurrency 1, 2: one alone took ")
    assert lines[1] == "concurrency 1: 4 requests ..."
    assert lines[2].startswith("concurrency 1: TTFT p50 ")
    assert lines[-1] == f"report: {tmp_path / 'run/report.html'}"
    document = json.loads((tmp_path / "run/result.json").read_text())
    assert document["arguments"]["note"] == "a stand-in"
    assert f"Benchmark of {MODEL}" in (tmp_path / "run/report.html").read_text()
    assert len((tmp_path / "run/requests.jsonl").read_text().splitlines()) == 8


def test_json_is_all_that_comes_to_standard_output(tmp_path: Path) -> None:
    ran = run(*SMALL, "--out", str(tmp_path / "run"), "--json")
    assert ran.code == 0
    assert json.loads(ran.stdout) == json.loads((tmp_path / "run/result.json").read_text())
    assert "report: " in ran.stderr


def test_ctrl_c_keeps_what_was_measured_and_says_so(tmp_path: Path) -> None:
    def chat(body: dict[str, Any]) -> Answer:
        # Of level 2 nothing ever ends.
        whole = well_behaved(body)
        return Answer(whole.pieces[:2], end="silent") if body["max_tokens"] == 20 and next(count) > 4 else whole

    count = iter(range(100))
    # Two probes, one alone, a warm-up and four at level 1, two warm-ups and two at level 2.
    words = (*SMALL[:-1], "20", "--out", str(tmp_path / "run"))
    ran = run(*words, chat=chat, interrupt_at=2 + 1 + 1 + 4 + 2 + 2)
    assert ran.code == 130
    assert ran.stderr == "benchmark: stopped early; what was measured until then is kept\n"
    document = json.loads((tmp_path / "run/result.json").read_text())
    assert [level["requests"]["succeeded"] for level in document["levels"]] == [4, 0]
    assert document["verdict"] == "interrupted"
    assert "The run ended early" in (tmp_path / "run/report.html").read_text()


@pytest.mark.parametrize(("allowed", "code"), [("1", 4), ("60", 0)])
def test_failed_requests_over_the_threshold_are_an_error_with_the_first_reason(
    tmp_path: Path, allowed: str, code: int
) -> None:
    def chat(body: dict[str, Any]) -> Answer:
        return refusal(429, "slow down") if body["max_tokens"] == 20 and next(count) % 2 else well_behaved(body)

    count = iter(range(100))
    ran = run(*SMALL[:-1], "20", "--out", str(tmp_path / "run"), "--max-failed-percent", allowed, chat=chat)
    assert ran.code == code
    if code:
        assert ran.stderr == (
            "benchmark: 50.0 % of the requests failed, 1 % are allowed; "
            "the first: POST /v1/chat/completions is answered 429: slow down\n"
        )
    assert (tmp_path / "run/report.html").exists()


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ((), 2, "one of URL and --limit is needed; e.g. http://HOST:8080."),
        (("h:1",), 2, "URL 'h:1': it does not begin with http:// or https://; give it as http://HOST:8080."),
        (("http://h", "--concurrency", "2,1"), 2, "--concurrency: 2,1 does not rise; give each level once, rising."),
        (("http://127.0.0.1:1",), 3, "http://127.0.0.1:1 cannot be measured: no connection to 127.0.0.1:1"),
        (("http://h", "--api-key-file", "/no/such"), 2, "--api-key-file /no/such: cannot be read"),
        (("http://no_such_host.invalid:80",), 3, "no connection to no_such_host.invalid:80"),
        (("http://h", "--api-key", "sk-secret"), 2, ""),
    ],
)
def test_refusals_are_sentences(words: tuple[str, ...], code: int, text: str) -> None:
    ran = asyncio.run(command(*words))
    assert ran.code == code
    assert text in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_server_cannot_steer_the_terminal(tmp_path: Path) -> None:
    ran = run(*SMALL, "--out", str(tmp_path / "run"), models=listing("evil\x1b[31m[bold]name"))
    assert ran.code == 0
    assert "\x1b" not in ran.stdout
    assert "evil?[31m[bold]name" in ran.stdout


def test_numbers_stay_readable_on_a_terminal() -> None:
    spec = importlib.util.spec_from_file_location("benchmark_script", ROOT / "scripts/benchmark.py")
    assert spec
    assert spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert [script.printable(script.shown(value)) for value in (12345.6, 0.5, None)] == ["12 346", "0.500", "unknown"]


def write_inventory(folder: Path) -> Path:
    path = folder / "hosts.yml"
    hosts = {
        "one": {"ansible_host": "{{ '10.0.0.' ~ 7 }}", "gateway_port": 9000, "gpuready_stack": "cpu"},
        "two": {"ansible_host": "10.0.0.8"},
        "bound": {"ansible_host": "10.0.0.9", "gateway_bind": "[2001:db8::9]"},
        "inner": {"ansible_host": "10.0.0.9", "gateway_bind": "127.0.0.1"},
        "broken": {"ansible_host": "{{ nothing_defines_this }}"},
    }
    path.write_text(json.dumps({"all": {"children": {"h100-sg": {"hosts": hosts}}}}))
    return path


def resolve(limit: str, path: Path) -> dict[str, Any]:
    return inventory.gateway_of(limit, str(path), ROOT, ROOT / ".venv/bin/ansible")


def test_the_inventory_says_where_a_hosts_gateway_is(tmp_path: Path) -> None:
    path = write_inventory(tmp_path)
    assert resolve("one", path) == {"address": "10.0.0.7", "port": 9000, "stack": "cpu"}
    # What is not set there is the role's default.
    assert resolve("two", path) == {"address": "10.0.0.8", "port": 8080, "stack": ""}
    # A gateway that binds one address is asked there.
    assert resolve("bound", path) == {"address": "2001:db8::9", "port": 8080, "stack": ""}


@pytest.mark.parametrize(
    ("limit", "kind", "words"),
    [
        ("one:two", Refusal, "--limit 'one:two': names 2 hosts; name one of them: one, two."),
        ("nope", Refusal, "--limit 'nope': names no host of the inventory"),
        (
            "inner",
            Refusal,
            "--limit 'inner': gateway_bind = 127.0.0.1 is reached from inner itself alone; open a tunnel (ssh -L "
            "8080:127.0.0.1:8080 inner) and measure http://127.0.0.1:8080 instead.",
        ),
        ("broken", MachineCannot, "Ansible cannot resolve it: "),
    ],
)
def test_a_limit_that_is_not_one_host_is_refused(tmp_path: Path, limit: str, kind: type[Refusal], words: str) -> None:
    with pytest.raises(kind) as caught:
        resolve(limit, write_inventory(tmp_path))
    assert words in str(caught.value)

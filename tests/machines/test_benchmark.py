"""The benchmark against a finished server, through its gateway, with a real engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from sim.machine.common import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

    from sim.machine.machine import Machine

pytestmark = pytest.mark.machine

MODEL = "gpuready-sim/tiny-qwen2"
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 6, 64, 24


def measure(machine: Machine, out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    asked = ["--concurrency", "1,2", "--requests", str(REQUESTS), "--prompt-tokens", str(PROMPT_TOKENS)]
    asked += ["--output-tokens", str(OUTPUT_TOKENS), "--out", str(out)]
    return subprocess.run(
        [sys.executable, str(CHECKOUT / "scripts/benchmark.py"), f"http://{machine.address}:8080", *asked, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_counts_tokens_and_pages_agree(finished: Machine, tmp_path: Path) -> None:
    ran = measure(finished, tmp_path / "run", "--json")
    assert ran.returncode == 0, ran.stderr
    document: dict[str, Any] = json.loads(ran.stdout)
    assert document == json.loads((tmp_path / "run/result.json").read_text())
    assert document["model"] == MODEL
    assert document["server"]["simulated"] is True
    assert document["workload"]["ignore_eos"] is True
    assert document["workload"]["calibrated"] is True
    assert [level["concurrency"] for level in document["levels"]] == [1, 2]
    for level in document["levels"]:
        assert level["requests"] == {"asked": REQUESTS, "succeeded": REQUESTS, "failed": 0, "given_up": 0}
        tokens = level["tokens"]
        assert tokens["output_as_asked"] == REQUESTS
        assert tokens["output_total"] == REQUESTS * OUTPUT_TOKENS
        assert tokens["requests_without_usage"] == 0
        # Words are random and none is the mean word, so a prompt is only about as long as was asked for.
        assert abs(tokens["prompt_mean"] - PROMPT_TOKENS) < PROMPT_TOKENS / 4
        assert level["ttft_ms"]["samples"] == REQUESTS
        assert level["tpot_ms"]["samples"] == REQUESTS
        assert level["connections"] == {"reused": REQUESTS, "new": 0}
    rows = [json.loads(line) for line in (tmp_path / "run/requests.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * REQUESTS
    assert {row["finish_reason"] for row in rows} == {"length"}
    text = (tmp_path / "run/report.html").read_text()
    assert f"Benchmark of {MODEL}" in text
    assert "nothing about a GPU" in text
    shown = [level["ttft_ms"]["p50"] for level in document["levels"]]
    titles = re.findall(r"<title>concurrency \d: ([0-9.\u2009]+) ms p50</title>", text)[:2]
    assert [float(title.replace("\u2009", "")) for title in titles] == pytest.approx(shown, rel=0.01)


def test_prompts_longer_than_the_model_takes_are_refused(finished: Machine, tmp_path: Path) -> None:
    ran = measure(finished, tmp_path / "run", "--prompt-tokens", "900000")
    assert ran.returncode == 2
    assert "the server's max_model_len is " in ran.stderr
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_not_served_is_named(finished: Machine, tmp_path: Path) -> None:
    ran = measure(finished, tmp_path / "run", "--model", "gpt-4")
    assert ran.returncode == 3
    assert f"lists no model 'gpt-4'; it lists '{MODEL}'." in ran.stderr

"""What an engine said before it ended: the cause first, without the steps of its unit and without its predecessor."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from gpuready.serving import last_words

NOT_READY = "replica.not_ready: chat.0 is not ready on release 2: no token within 30 s; see its journal."
VLLM = [
    "(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:842] Traceback (most recent call last):",
    "(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:842] ValueError: To serve at least one request, 3 GiB are needed",
    "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
]
SGLANG = ["[2026-11-30 10:00:00 TP0] Scheduler hit an exception: Traceback", "RuntimeError: Not enough memory."]
PARSER = ["usage: api_server.py [-h]", "api_server.py: error: unrecognized arguments: --no-such-flag"]
PYDANTIC = ["pydantic_core.ValidationError: 1 validation error for X", "a.b", "  Extra inputs", "    For further ..."]
DEAD = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)."


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (VLLM, "ValueError: To serve at least one request, 3 GiB are needed"),
        (SGLANG, "RuntimeError: Not enough memory."),
        (PARSER, "api_server.py: error: unrecognized arguments: --no-such-flag"),
        ([VLLM[2]], VLLM[2].removeprefix("(APIServer pid=5) ")),
        ([DEAD, VLLM[1]], "ValueError: To serve at least one request, 3 GiB are needed"),
        ([*PYDANTIC, "a last word"], "pydantic_core.ValidationError: 1 validation error for X a.b Extra inputs"),
        (["loading", "done"], ""),
    ],
)
def test_the_cause_is_the_first_that_is_no_report_of_another(lines: list[str], cause: str) -> None:
    assert last_words.of_lines(lines).cause == cause


def test_the_steps_of_the_unit_are_not_the_engine() -> None:
    said = last_words.of_lines(
        [
            "chat.0 starts on release 2, on trial, GPU 0 (GPU-1)",
            "GPU 0 is held by pid 7",
            "loading",
            NOT_READY,
            "chat.0 ended without a token, once in a row: x",
        ]
    )
    assert said.last == ("loading",)
    assert said.verdict == "no token within 30 s"
    assert said.sentence() == "its last lines: loading"


def test_what_the_former_engine_said_while_it_ended_is_not_the_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [DEAD, "Application shutdown complete.", "chat.0 starts on release 2, on trial, GPU 0 (GPU-1)", *SGLANG]
    journal = "\n".join(json.dumps({"MESSAGE": line}) for line in lines)

    def asked(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert words == ["journalctl", "--sync"] or "_SYSTEMD_UNIT=gpuready-engine@chat.0.service" in words
        return subprocess.CompletedProcess(words, 0, journal, "")

    monkeypatch.setattr("subprocess.run", asked)
    said = last_words.of_unit("gpuready-engine@chat.0.service", 0)
    assert said.cause == "RuntimeError: Not enough memory."
    assert DEAD not in said.all

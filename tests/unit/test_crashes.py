"""An engine that ends again and again: longer pauses, then an end that is said; what is only late is waited for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuready.operations import crashes, devices, replica
from gpuready.operations.crashes import Limit
from gpuready.outcome import Failed
from gpuready.serving import units
from gpuready.serving.layout import Layout

FATAL = ["INFO 12-01 05:00:00 [api_server.py:1] vLLM starts", "ValueError: unknown flag --no-such"]


class Clock:
    """A clock of the test's own; who sleeps has it go on."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Unit:
    """One replica's unit, by the steps in which crashes are counted."""

    def __init__(self, layout: Layout, clock: Clock) -> None:
        self.layout, self.clock = layout, clock
        self.restarts = 0
        self.said = FATAL

    def properties(self, *_: str) -> dict[str, str]:
        return {"NRestarts": str(self.restarts)}

    def start(self, limit: Limit, *, late: bool = False) -> bool:
        """Do what the first step does; say whether the engine is started."""
        if crashes.gives_up(self.layout, "chat.0", limit):
            return False
        crashes.pause(self.layout, "chat.0")
        if not late:
            folder = self.layout.run("chat.0")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "devices.env").write_text("GPUREADY_RELEASE=1\n")
        return not late

    def end(self, result: str = "exit-code", *, token: bool = False, after: float = 60) -> Any:
        self.clock.now += after
        folder = self.layout.run("chat.0")
        if token:
            (folder / "ready.json").write_text("{}")
        ended = crashes.note_end(self.layout, "chat.0", result, "0123")
        for name in ("devices.env", "ready.json"):
            (folder / name).unlink(missing_ok=True)
        self.restarts += 1
        return ended

    def ends(self) -> int:
        record = json.loads(self.layout.starts("chat.0").read_text())
        return len(record.get("ends", []))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made.monotonic)
    monkeypatch.setattr(time, "sleep", made.sleep)
    return made


@pytest.fixture
def unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Unit:
    made = Unit(Layout(tmp_path), clock)
    monkeypatch.setattr(units, "properties", made.properties)
    monkeypatch.setattr(units, "words_of", lambda *_: made.said)
    return made


def crash(unit: Unit, count: int, limit: Limit = crashes.USUAL) -> None:
    for _ in range(count):
        assert unit.start(limit)
        unit.end()


def test_failing_starts_wait_longer_each_time_and_a_start_by_hand_does_not(unit: Unit, clock: Clock) -> None:
    for restarts in range(9):
        unit.restarts = restarts
        crashes.pause(unit.layout, "chat.0")
    assert clock.slept == [4, 8, 16, 32, 60, 60, 60]
    unit.restarts = 0
    crashes.pause(unit.layout, "chat.0")
    assert len(clock.slept) == 7


def test_crashes_that_lie_far_apart_do_not_wait(unit: Unit, clock: Clock) -> None:
    for restarts in range(5):
        unit.restarts = restarts
        crashes.pause(unit.layout, "chat.0")
        clock.now += 700
    assert clock.slept == []


def test_five_starts_without_a_token_are_the_end_and_it_is_said(unit: Unit, capsys: pytest.CaptureFixture[str]) -> None:
    crash(unit, 5)
    assert not unit.start(crashes.USUAL)
    known = crashes.given_up(unit.layout, "chat.0")
    assert known is not None
    assert known["starts"] == 5
    assert known["last_error"] == "ValueError: unknown flag --no-such"
    sentence = (
        "chat.0 is not started again after 5 starts without a token in 5 min: "
        "the last one ended with: ValueError: unknown flag --no-such; correct the deployment and run site.yml, "
        "or mend it and systemctl restart gpuready-engine@chat.0.service."
    )
    assert crashes.failure("chat.0", known).sentence() == sentence
    # The main process ends with the status after which systemd does not restart, and says it once.
    with pytest.raises(SystemExit) as ended:
        replica.run_engine(unit.layout, "chat.0")
    assert ended.value.code == 78
    assert capsys.readouterr().out == sentence + "\n"
    with pytest.raises(Failed, match="not started again after 5 starts"):
        replica.wait_ready(unit.layout, "chat.0", None)


def test_status_shows_a_replica_that_was_given_up(unit: Unit) -> None:
    crash(unit, 5)
    unit.start(crashes.USUAL)
    shown = replica.status(unit.layout, ["chat.0"])
    assert shown.data["replicas"]["chat.0"]["given_up"]["last_error"] == "ValueError: unknown flag --no-such"
    assert "  chat.0 is not started again after 5 starts without a token" in shown.summary


def test_the_step_before_a_start_does_nothing_any_more(unit: Unit) -> None:
    crash(unit, 2, Limit(starts=2))
    assert devices.write_devices(unit.layout, "chat.0", Limit(starts=2)).summary == "chat.0 is not started again"
    assert not (unit.layout.run("chat.0") / "devices.env").exists()


def test_a_start_that_somebody_asks_for_begins_anew(unit: Unit) -> None:
    crash(unit, 5)
    assert not unit.start(crashes.USUAL)
    # systemctl restart, a new release and site.yml all do.
    unit.restarts = 0
    assert unit.start(crashes.USUAL)
    assert crashes.given_up(unit.layout, "chat.0") is None
    unit.end()
    assert unit.ends() == 1


def test_a_token_clears_what_was_counted(unit: Unit) -> None:
    crash(unit, 4)
    assert unit.start(crashes.USUAL)
    unit.end(token=True)
    assert unit.ends() == 0
    crash(unit, 4)
    assert unit.start(crashes.USUAL)


def test_what_comes_late_is_waited_for_without_an_end(unit: Unit) -> None:
    for _ in range(200):
        assert unit.start(crashes.USUAL, late=True) is False
        assert unit.end().summary == ""
    assert crashes.given_up(unit.layout, "chat.0") is None
    assert unit.start(crashes.USUAL)


def test_a_stop_that_was_asked_for_counts_nothing(unit: Unit) -> None:
    assert unit.start(crashes.USUAL)
    unit.end(result="success")
    assert unit.ends() == 0


def test_starts_that_lie_far_apart_are_no_loop(unit: Unit, clock: Clock) -> None:
    limit = Limit(starts=3, seconds=3600)
    for _ in range(10):
        crash(unit, 1, limit)
        clock.now += 1800
    assert unit.start(limit)


@pytest.mark.parametrize(
    ("result", "said", "error"),
    [
        ("oom-kill", [], "the kernel ended it for want of memory"),
        ("signal", ["loading"], "it was ended by a signal; loading"),
        ("exit-code", [], "its result is exit-code"),
        (
            "exit-code",
            ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.", "a last word"],
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
        ),
        (
            "exit-code",
            [
                "(EngineCore_0 pid=12) ERROR 11-30 10:00:00 [core.py:5] ValueError: No available memory for the cache.",
                "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
            ],
            "ValueError: No available memory for the cache.",
        ),
    ],
)
def test_the_last_error_is_the_engines_own(unit: Unit, result: str, said: list[str], error: str) -> None:
    unit.said = said
    assert unit.start(crashes.USUAL)
    assert unit.end(result).summary == f"chat.0 ended without a token, once in a row: {error}"


def test_words_of_an_unknown_start_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("subprocess.run", asked.append)
    words: Callable[[str, int], list[str]] = units.words_of
    assert words("", 5) == []
    assert asked == []

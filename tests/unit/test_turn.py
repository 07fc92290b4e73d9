"""One changing command at a time: who comes second waits, and is told who works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuready.cli import main
from gpuready.cli.verb import Call, Verb
from gpuready.outcome import Busy, Exit, Result
from gpuready.serving import turn


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(turn, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(turn, "LOCK", tmp_path / "run/turn.lock")
    return turn.LOCK


def test_the_second_is_told_who_works_and_may_come_once_the_first_has_ended(lock: Path) -> None:
    with turn.taken("gpuready engine install"), pytest.raises(Busy) as busy, turn.taken("gpuready release apply"):
        pass
    assert "`gpuready engine install` (pid " in str(busy.value)
    assert str(busy.value).endswith("is at work on this server; wait for its end, then run again.")
    with turn.taken("gpuready release apply"):
        assert len(turn.descriptors()) == 1
    assert turn.descriptors() == ()


def test_what_a_killed_command_left_running_still_holds_the_server(lock: Path) -> None:
    code = """
import subprocess, sys, os
from pathlib import Path
from gpuready.serving import turn
with turn.taken("gpuready engine install", Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, pass_fds=turn.descriptors())
    print(child.pid, flush=True)
    os.kill(os.getpid(), 9)
"""
    killed = subprocess.run([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, text=True, check=False)
    child = int(killed.stdout)
    try:
        with pytest.raises(Busy, match=rf"`gpuready engine install` left running when it was killed \(pid {child}\)"):
            turn.taken("gpuready engine install").__enter__()
    finally:
        subprocess.run(["kill", str(child)], check=True)
    with turn.taken("gpuready engine install"):
        pass


def test_only_verbs_that_change_the_machine_take_the_turn(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: Call) -> Result:
        return Result(data={"held": len(turn.descriptors())})

    verbs = {"change": Verb("", run, changes=True), "read": Verb("", run)}
    monkeypatch.setattr(main, "_verbs", lambda noun: verbs)
    assert main.run(["host", "change"])[0].data["held"] == 1
    assert main.run(["host", "change", "--check"])[0].data["held"] == 0
    assert main.run(["host", "read"])[0].data["held"] == 0
    with turn.taken("another"):
        refused = main.run(["host", "change"])[0]
    assert (refused.exit, refused.data) == (Exit.MACHINE_CANNOT, {"wait_seconds": turn.ASK_AGAIN_SECONDS})
    assert refused.failures[0].code == "machine.busy"

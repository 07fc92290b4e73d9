"""A run of ansible-playbook that is watched task by task, and can be killed as a power cut would kill it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.machine.common import CHECKOUT, Sim
from sim.machine.machine import Machine
from tests.machines.conftest import Played, invocation, played

PLUGINS = Path(__file__).parent / "plugins"
MARK = "GPUREADY_TEST_RUN"
"""In the environment of everything that a run starts, its SSH connections included, which outlive it."""
POLL_SECONDS = 0.01
QUICKLY = "-o ControlMaster=auto -o ControlPersist=20s -o ServerAliveInterval=2 -o ServerAliveCountMax=3"
"""A server that is gone is noticed after 6 seconds, to save the tests' time."""


@dataclass(frozen=True)
class Step:
    """One task that asks the server, known by its name and by how often that name came before in its play."""

    play: str
    task: str
    before: int = 0

    def __str__(self) -> str:
        return f"{self.play} | {self.task}" + (f" ({self.before + 1})" if self.before else "")


@dataclass(frozen=True)
class Done:
    """A step that ran to its end."""

    step: Step
    seconds: float
    changed: bool


class Run:
    """A run under way; leave its context to have it ended and its files removed."""

    def __init__(
        self,
        sim: Sim,
        machine: Machine,
        playbook: str = "site.yml",
        extra: Mapping[str, Any] | None = None,
        *args: str,
        wrapper: Sequence[str] = (),
    ) -> None:
        self._call = invocation(sim, machine, playbook, extra, *args)
        self._wrapper = list(wrapper)
        self._token = uuid.uuid4().hex
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Run:
        argv, env = self._stack.enter_context(self._call)
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gr-points-")))
        self._points, self._said = folder / "points", folder / "said"
        env |= {
            "ANSIBLE_CALLBACK_PLUGINS": f"{PLUGINS}:{CHECKOUT / 'plugins/callback'}",
            "ANSIBLE_CALLBACKS_ENABLED": "points",
            "ANSIBLE_SSH_ARGS": QUICKLY,
            "GPUREADY_POINTS": str(self._points),
            MARK: self._token,
        }
        self._started = time.monotonic()
        with self._said.open("wb") as out:
            self._process = subprocess.Popen(
                [*self._wrapper, *argv],
                cwd=CHECKOUT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.kill()
        finally:
            self._stack.close()

    @property
    def said(self) -> str:
        """What the run has printed so far."""
        return self._said.read_text(errors="replace")

    def is_over(self) -> bool:
        """Say whether ansible-playbook has ended."""
        return self._process.poll() is not None

    def wait(self, seconds: float = 900) -> Played:
        """Wait for the end of the run."""
        rc = self._process.wait(seconds)
        return played(rc, self.said, self._started)

    def kill(self) -> None:
        """Kill the whole controller side at once: the command, its workers, its SSH connections."""
        while pids := _marked(f"{MARK}={self._token}"):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
            time.sleep(POLL_SECONDS)
        self._process.wait()

    def starts(self) -> list[Step]:
        """Return the steps that have begun, skipped ones included: those are told apart only once they end."""
        return [step for event, step, _ in self._events() if event == "start"]

    def running(self) -> Step | None:
        """Return the step that is under way; None between two."""
        events = self._events()
        return events[-1][1] if events and events[-1][0] == "start" else None

    def is_at(self, play: str) -> bool:
        """Say whether a step of that play is under way."""
        step = self.running()
        return step is not None and step.play == play

    def finished(self) -> list[Done]:
        """Return the steps that have run to their end."""
        done = []
        began: dict[Step, float] = {}
        for event, step, line in self._events():
            if event == "start":
                began[step] = line["at"]
            elif event == "ok":
                done.append(Done(step, line["at"] - began[step], line["changed"]))
        return done

    def wait_for(self, step: Step, seconds: float = 600) -> bool:
        """Wait until a step begins; False where the run ends without it."""
        return self.wait_until(lambda: step in self.starts(), seconds)

    def wait_until(self, happened: Callable[[], bool], seconds: float = 600) -> bool:
        """Wait until something happens; False where the run ends before."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            over = self.is_over()
            if happened():
                return True
            if over:
                return False
            time.sleep(POLL_SECONDS)
        raise AssertionError(f"nothing happened for {seconds} s; the run said:\n{self.said[-3000:]}")

    def _events(self) -> list[tuple[str, Step, dict[str, Any]]]:
        if not self._points.exists():
            return []
        events = []
        begun: dict[tuple[str, str], int] = {}
        for text in self._points.read_text().splitlines():
            line = json.loads(text)
            if not line["remote"]:
                continue
            name = (line["play"], line["task"])
            begun[name] = begun.get(name, 0) + (line["event"] == "start")
            events.append((line["event"], Step(*name, begun[name] - 1), line))
        return events


def _marked(mark: str) -> list[int]:
    """Return the processes in whose environment the mark is."""
    return list(_with_environment(mark.encode()))


def _with_environment(mark: bytes) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes():
                yield int(entry.name)

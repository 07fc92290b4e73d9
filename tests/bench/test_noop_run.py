"""What a run that has nothing to do costs: tasks, round trips and seconds, beside gathering facts once (the floor).

    .venv/bin/pytest -s --long tests/bench

Nothing here judges seconds: they say something about the machine. What carries over are the ratios, measured in turns
in one run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from sim.machine.common import CHECKOUT, Sim
from sim.machine.machine import Machine
from tests.machines.conftest import Factory, invocation, played

pytestmark = [pytest.mark.machine, pytest.mark.long]

TURNS = 3
REPORT = CHECKOUT / ".cache/reports/bench-noop.json"
FLOOR = """\
- name: Gather facts once
  hosts: all
  become: true
  gather_facts: true
"""


@dataclass
class Run:
    """One run and what it cost."""

    seconds: float
    round_trips: int
    tasks: int
    stages: dict[str, float]
    """Seconds of each stage on the first server."""


@pytest.fixture
def counting_ssh(tmp_path: Path) -> Path:
    """An ssh that leaves a line for every call."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho >> {tmp_path}/calls\nexec /usr/bin/ssh "$@"\n')
    ssh.chmod(0o755)
    return ssh


def measure(sim: Sim, ssh: Path, servers: Mapping[str, Machine], playbook: str) -> Run:
    """Run a playbook and count."""
    calls, summary = ssh.with_name("calls"), ssh.with_name("summary.json")
    for file in (calls, summary):
        file.write_text("")
    with invocation(sim, servers, playbook) as (argv, env):
        env |= {"ANSIBLE_SSH_EXECUTABLE": str(ssh), "GPUREADY_SUMMARY_FILE": str(summary)}
        started = time.monotonic()
        done = subprocess.run(argv, cwd=CHECKOUT, env=env, capture_output=True, text=True, check=False)
        run = played(done.returncode, done.stdout, started)
    assert run.rc == 0, run.stdout
    assert sum(counts["changed"] for counts in run.recap.values()) == 0, run.stdout
    rows = json.loads(summary.read_text())["rows"]
    first = [row for row in rows if row["host"] == min(servers)]
    return Run(
        run.seconds,
        len(calls.read_text().splitlines()),
        sum(row["tasks"] for row in first),
        {row["stage"]: row["seconds"] for row in first},
    )


def median(runs: list[Run]) -> float:
    return statistics.median(run.seconds for run in runs)


def test_a_run_with_nothing_to_do(
    sim: Sim, machines: Factory, finished_image: str, counting_ssh: Path, tmp_path: Path
) -> None:
    floor = tmp_path / "floor.yml"
    floor.write_text(FLOOR)
    two = {f"h100-sg-0{number}": machines(f"bench-{number}", finished_image) for number in (1, 2)}
    one = {"h100-sg-01": two["h100-sg-01"]}
    for _ in range(2):  # until the engines of both clones serve, and nothing is asked for the first time
        measure(sim, counting_ssh, two, "site.yml")
    runs: dict[str, list[Run]] = {"facts": [], "one": [], "two": []}
    for _ in range(TURNS):
        runs["facts"].append(measure(sim, counting_ssh, one, str(floor)))
        runs["one"].append(measure(sim, counting_ssh, one, "site.yml"))
        runs["two"].append(measure(sim, counting_ssh, two, "site.yml"))
    show(runs)


def show(runs: Mapping[str, list[Run]]) -> None:
    """Print the table, and keep it as JSON."""
    base = median(runs["facts"])
    table = Table(title="A run that has nothing to do")
    for head in ("run", "tasks", "round trips", "seconds", "times gathering facts", "times one server"):
        table.add_column(head, justify="left" if head == "run" else "right")
    names = {"facts": "gathering facts once", "one": "site.yml, one server", "two": "site.yml, two servers"}
    report: dict[str, object] = {}
    for key, name in names.items():
        seconds, last = median(runs[key]), runs[key][-1]
        against_one = f"{seconds / median(runs['one']):.2f}" if key != "facts" else "-"
        table.add_row(
            name, str(last.tasks), str(last.round_trips), f"{seconds:.1f}", f"{seconds / base:.1f}", against_one
        )
        report[key] = {
            "tasks": last.tasks,
            "round_trips": last.round_trips,
            "seconds": [run.seconds for run in runs[key]],
        }
    console = Console(width=120)
    console.print(table)
    stages = runs["one"][-1].stages
    console.print("seconds per stage: " + ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in stages.items()))
    report["stages"] = stages
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=2) + "\n")

"""Several servers in one run: one that fails leaves the others going, and the table says what to do about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sim.machine.machine import Machine
from tests.machines.conftest import Factory, Play

pytestmark = pytest.mark.machine

DOWN = "10.89.37.249"


def rows_of(summary: Path) -> dict[tuple[str, str], dict[str, object]]:
    return {(row["host"], row["stage"]): row for row in json.loads(summary.read_text())["rows"]}


def test_a_server_that_fails_in_the_middle_and_one_that_is_down_leave_the_third_going(
    machines: Factory,
    finished_image: str,
    finished: Machine,
    play: Play,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = machines("broken", finished_image)
    # Another one answers at the toolkit's place: the stage cuda proves what it finds, and says no.
    broken.ssh(
        "mkdir -p /usr/local/cuda/bin; printf '#!/bin/sh\\nexit 1\\n' > /usr/local/cuda/bin/nvcc; "
        "chmod 755 /usr/local/cuda/bin/nvcc; rm /var/lib/gpuready/cuda.json"
    )
    summary = tmp_path / "summary.json"
    monkeypatch.setenv("GPUREADY_SUMMARY_FILE", str(summary))
    played = play({"h100-sg-01": finished, "h100-sg-02": broken, "h100-sg-03": DOWN})
    machines.give_back(broken)
    assert played.rc != 0
    assert played.recap["h100-sg-01"]["failed"] == 0
    rows = rows_of(summary)
    assert rows["h100-sg-01", "Gateway"]["problem"] == ""
    cuda = rows["h100-sg-02", "CUDA"]
    assert (
        cuda["problem"]
        == "/usr/local/cuda/bin/nvcc is CUDA of an unknown version, the plan wants 12.4: exit code 1 without a word"
    )
    assert cuda["next_step"] == "install the wanted toolkit, or set a gpuready_stack whose toolkit is this one"
    assert ("h100-sg-02", "Engines") not in rows
    down = rows["h100-sg-03", "Preflight"]
    assert str(down["problem"]).startswith(f"host h100-sg-03 ({DOWN}) cannot be reached")
    shown = [line for line in played.stdout.splitlines() if line.strip().startswith("h100-sg-02   CUDA")]
    assert len(shown) == 1
    assert str(cuda["next_step"]) in shown[0]

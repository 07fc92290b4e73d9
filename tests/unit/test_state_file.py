"""The editor of the state file: what it reads, what it writes, and that C and Python keep out of each other's way."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sim.hardware import state_file
from sim.hardware.state_file import Section, State, StateError
from tests.unit.standin import CHECKOUT

TEXT = """\
gpuready-standin 2
# a comment

[system]
driver_version = 550.163.01
events_made = 1
event = 1 0 8 13 - - 1700000000
[gpu 0]
name = NVIDIA H100 80GB HBM3
temperature_celsius = 0x1f
fan_percent = -
nvlink = 0 switch 0000:05:00.0
nvlink = 1 switch 0000:06:00.0
[gpu 1]
temperature_celsius = 30
[fault hot 0]
until = clear
temperature_celsius = 90
nvlink_down = 1
[fault driver-not-loaded system]
until = reboot
init_error = 9
"""


def test_a_file_is_its_sections_and_their_lines() -> None:
    state = state_file.parse(TEXT)
    assert [section.title for section in state.sections] == [
        "system",
        "gpu 0",
        "gpu 1",
        "fault hot 0",
        "fault driver-not-loaded system",
    ]
    gpu = state.gpus[0]
    assert (gpu.get("name"), gpu.number("temperature_celsius")) == ("NVIDIA H100 80GB HBM3", 31)
    assert gpu.all("nvlink") == ["0 switch 0000:05:00.0", "1 switch 0000:06:00.0"]
    assert (gpu.get("fan_percent"), gpu.number("power_milliwatts")) == (None, None)  # unknown, never 0
    assert state_file.parse(state_file.render(state)) == state


def test_faults_lie_over_what_they_are_of() -> None:
    state = state_file.parse(TEXT)
    assert state.effective("gpu 0").number("temperature_celsius") == 90
    assert state.effective("gpu 0").all("nvlink_down") == ["1"]
    assert state.effective("gpu 1") == state.gpus[1]
    assert state.effective("system").get("init_error") == "9"
    assert state.gpus[0].number("temperature_celsius") == 31


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: not `gpuready-standin 2`"),
        ("gpuready-standin 1\n[system]\n", "line 1: not `gpuready-standin 2`"),
        ("gpuready-standin 2\nname = x\n", "line 2: neither a section nor `key = value` under one"),
        ("gpuready-standin 2\n[system]\nname\n", "line 3: neither a section nor `key = value` under one"),
        ("gpuready-standin 2\n[gpu 0\n", r"line 2: a section is \[system\], \[gpu N\] or \[fault NAME N|system\]"),
        ("gpuready-standin 2\n[fault x]\n", r"line 2: a section is \[system\]"),
        ("gpuready-standin 2\n[host]\n", r"line 2: a section is \[system\]"),
    ],
)
def test_what_is_no_state_file_is_told_with_its_line(text: str, words: str) -> None:
    with pytest.raises(StateError, match=words):
        state_file.parse(text)


def test_bytes_are_no_state_file(tmp_path: Path) -> None:
    file = tmp_path / "gpus.conf"
    file.write_bytes(b"gpuready-standin 2\n\xff\xfe")
    with pytest.raises(StateError, match="it is not a text file"):
        state_file.read(file)


def test_a_key_keeps_its_place_and_stands_once() -> None:
    section = Section("gpu 0", [("a", "1"), ("b", "2"), ("a", "3")])
    section.set("a", "4")
    section.set("c", "5")
    assert section.lines == [("a", "4"), ("b", "2"), ("c", "5")]


def test_the_oldest_events_are_forgotten() -> None:
    state = State([Section("system", [])])
    for number in range(70):
        state.add_event(0, 8, number, now=1000)
    events = state.system.all("event")
    assert (len(events), state.system.get("events_made")) == (64, "70")
    assert (events[0], events[-1]) == ("7 0 8 6 - - 1000", "70 0 8 69 - - 1000")


def fail_half_way(file: Path) -> None:
    with state_file.change(file) as state:
        state.gpus[0].set("name", "half")
        _ = 1 // 0


def test_a_change_is_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "gpus.conf"
    file.write_text(TEXT, encoding="ascii")
    with pytest.raises(ZeroDivisionError):
        fail_half_way(file)
    assert file.read_text(encoding="ascii") == TEXT
    with state_file.change(file):
        pass
    assert file.read_text(encoding="ascii") == TEXT  # nothing changed, nothing written
    with state_file.change(file) as state:
        state.gpus[0].set("name", "other")
    assert state_file.read(file).gpus[0].get("name") == "other"
    assert file.stat().st_mode & 0o777 == 0o644
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpus.conf", "gpus.conf.lock"]


def test_two_processes_change_the_file_one_after_the_other(tmp_path: Path) -> None:
    file = tmp_path / "gpus.conf"
    file.write_text(TEXT, encoding="ascii")
    code = (
        "import sys; from pathlib import Path; from sim.hardware import state_file\n"
        "for _ in range(25):\n"
        "    with state_file.change(Path(sys.argv[1])) as state:\n"
        "        state.gpus[0].set('energy_millijoules', str((state.gpus[0].number('energy_millijoules') or 0) + 1))\n"
    )
    command = [sys.executable, "-c", code, str(file)]
    runs = [threading.Thread(target=subprocess.run, args=(command,), kwargs={"cwd": CHECKOUT}) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert state_file.read(file).gpus[0].number("energy_millijoules") == 50


def test_numbers_are_those_of_the_library() -> None:
    text = TEXT.replace("0x1f", "031").replace("[gpu 1]", "[gpu 0x1]").replace("[fault hot 0]", "[fault hot 00]")
    state = state_file.parse(text)
    assert [section.title for section in state.gpus] == ["gpu 0", "gpu 1"]
    assert state.effective("gpu 0").number("temperature_celsius") == 90
    assert state.gpus[0].number("temperature_celsius") == 31
    assert [state_file.as_number(one) for one in ("0x1F", "010", "0")] == [31, 10, 0]

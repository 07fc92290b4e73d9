"""Engines as processes of the simulated GPUs: which process, on which GPU, with how much memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sim.hardware import engines_standin, state_file
from sim.hardware.state_file import Section, State

UNIT = r"sys/fs/cgroup/system.slice/system-gpuready\x2dengine.slice/gpuready-engine@chat.0.service"
GPUS = State([Section("system", []), *(Section(f"gpu {n}", [("uuid", f"GPU-{n}")]) for n in range(3))])


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine whose engine chat.0 runs on GPU 1, planned with 63.29 GiB."""
    engine(tmp_path, {20: "/opt/gpuready/python -m vllm", 30: "python -c from multiprocessing.spawn import x"}, "GPU-1")
    write(tmp_path, "var/lib/gpuready/releases/chat/4/plan.json", json.dumps({"memory": {"budget_gib": 63.29}}))
    return tmp_path


def engine(root: Path, processes: dict[int, str], uuids: str) -> None:
    write(root, f"{UNIT}/cgroup.procs", "".join(f"{pid}\n" for pid in processes))
    for pid, title in processes.items():
        write(root, f"proc/{pid}/cmdline", title.replace(" ", "\0"))
    write(root, "run/gpuready/chat.0/devices.env", f"GPUREADY_RELEASE=4\nGPUREADY_GPU_UUIDS={uuids}\n")


PLANNED = int(63.29 * 2**30)


def test_the_core_of_an_engine_holds_what_the_plan_says_on_its_gpu(root: Path) -> None:
    assert engines_standin.wanted(root, GPUS) == {"gpu 1": {f"30 {PLANNED} compute - -"}}


@pytest.mark.parametrize(
    ("processes", "uuids", "held"),
    [
        ({20: "python -m vllm"}, "GPU-0", {"gpu 0": 20}),
        ({20: "python -m vllm", 40: "VLLM::EngineCore"}, "GPU-0", {"gpu 0": 40}),
        (
            {20: "python -m vllm", 40: "VLLM::EngineCore", 41: "VLLM::Worker_TP0", 42: "VLLM::Worker_TP1"},
            "GPU-2,GPU-0",
            {"gpu 2": 41, "gpu 0": 42},
        ),
        # What only prepares the start holds no GPU, and a GPU that was taken out holds nothing.
        ({20: "/opt/gpuready/gpuready.pyz deployment run chat.0"}, "GPU-0", {}),
        ({20: "python -m vllm"}, "GPU-9", {}),
    ],
)
def test_which_process_holds_which_gpu(root: Path, processes: dict[int, str], uuids: str, held: dict[str, int]) -> None:
    engine(root, processes, uuids)
    found = engines_standin.wanted(root, GPUS)
    assert found == {gpu: {f"{pid} {PLANNED} compute - -"} for gpu, pid in held.items()}


def test_what_no_plan_tells_is_not_made_up(root: Path) -> None:
    (root / "var/lib/gpuready/releases/chat/4/plan.json").write_text("{}")
    assert engines_standin.wanted(root, GPUS) == {}


def test_only_our_own_lines_are_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_standin, "check", state_file.accept)
    file = tmp_path / "gpus.conf"
    gpu = Section("gpu 0", [("process", "7 100 compute - -"), ("process", "8 200 compute - -")])
    state_file.write(file, State([Section("system", []), gpu]))
    ours, now = {"gpu 0": {"8 200 compute - -"}}, {"gpu 0": {"9 300 compute - -"}}
    engines_standin.bring(file, ours, now)
    assert state_file.read(file).gpus[0].all("process") == ["7 100 compute - -", "9 300 compute - -"]
    stamp = file.stat().st_mtime_ns
    engines_standin.bring(file, now, now)
    assert file.stat().st_mtime_ns == stamp

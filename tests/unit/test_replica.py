"""The steps of a replica's unit: the GPUs it gets, what it starts on, and the engine's environment."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuready.hardware import nvml
from gpuready.operations import devices as step
from gpuready.operations import replica, start
from gpuready.outcome import Failed, MachineCannot
from gpuready.serving import readiness, releases, units
from gpuready.serving.layout import Layout
from gpuready.serving.releases import Store

real_files_of_gpus = step.files_of_gpus
UNIT = Path(__file__).resolve().parents[2] / "roles/serving/templates/gpuready-engine@.service.j2"


def plan(**more: Any) -> dict[str, Any]:
    return {
        "name": "chat",
        "model": "m",
        "engine_folder": sys.prefix,
        "environment": {},
        "replicas": [{"index": 0, "gpus": [2, 0], "port": 18100}],
        **more,
    }


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    gpus = tuple(nvml.NvmlGpu(index, uuid=f"GPU-{index}") for index in range(4))
    monkeypatch.setattr(nvml, "probe", lambda: nvml.NvmlReport(gpus=gpus))
    monkeypatch.setattr(units, "properties", lambda *_: {"NRestarts": "0"})
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(step, "files_of_gpus", list)
    return Store(Layout(tmp_path, engine_group="no-such-group"), "chat")


def proved(store: Store, evidence: dict[str, Any] | None = None, **more: Any) -> None:
    number = store.add({"plan.json": json.dumps(plan(**more)), "serve.yaml": ""})
    store.mark_verified(number, 0, evidence or {})
    store.point(0, number)


def devices(store: Store) -> dict[str, str]:
    step.write_devices(store.layout, "chat.0")
    return start.read_devices(store.layout, "chat.0")


def test_the_engine_gets_indices_and_the_proof_gets_uuids(store: Store) -> None:
    proved(store)
    assert devices(store) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # vLLM 0.19.1 reads every entry as a number: UUIDs end it (vllm issues 41848, 6551).
        "CUDA_VISIBLE_DEVICES": "2,0",
        "GPUREADY_GPU_UUIDS": "GPU-2,GPU-0",
        "GPUREADY_RELEASE": "1",
    }


def test_recorded_uuids_are_found_at_their_indices_of_now(store: Store) -> None:
    proved(store, {"gpu_uuids": ["GPU-3", "GPU-1"]})
    assert devices(store)["CUDA_VISIBLE_DEVICES"] == "3,1"


def test_a_recorded_gpu_that_is_gone_is_said(store: Store) -> None:
    proved(store, {"gpu_uuids": ["GPU-9", "GPU-1"]})
    with pytest.raises(MachineCannot, match=r"proved on GPU GPU-9, which does not answer: answering are GPUs 0, 1, 2"):
        devices(store)


def test_a_planned_gpu_that_is_gone_is_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    proved(store)
    lost = nvml.NvmlGpu(2, problem="GPU 2: it has fallen off the bus.")
    monkeypatch.setattr(nvml, "probe", lambda: nvml.NvmlReport(gpus=(nvml.NvmlGpu(0, uuid="GPU-0"), lost)))
    with pytest.raises(MachineCannot, match=r"planned on GPU 2, which does not answer: .* fallen off the bus"):
        devices(store)


def test_only_what_was_proved_is_started_without_a_run(store: Store) -> None:
    store.add({"plan.json": json.dumps(plan()), "serve.yaml": ""})
    store.point(0, 1)
    with pytest.raises(MachineCannot, match=r"release 1 of chat\.0 never gave a token"):
        devices(store)
    releases.begin_trial(store.layout, "chat.0", 1)
    assert devices(store)["GPUREADY_RELEASE"] == "1"


def test_a_trial_ends_with_the_run_that_asked_for_it(store: Store) -> None:
    proved(store)
    store.add({"plan.json": json.dumps(plan(flags={"a": 1})), "serve.yaml": ""})
    # A process that begins a trial and ends, as by kill -9.
    script = (
        "import sys; from pathlib import Path; from gpuready.serving import releases, layout; "
        "releases.begin_trial(layout.Layout(Path(sys.argv[1])), 'chat.0', 2)"
    )
    subprocess.run([sys.executable, "-c", script, str(store.layout.root)], check=True)
    assert releases.trial_release(store.layout, "chat.0", only_live=False) == 2
    assert releases.trial_release(store.layout, "chat.0", only_live=True) is None
    assert devices(store)["GPUREADY_RELEASE"] == "1"


def test_all_steps_of_a_start_use_one_release(store: Store) -> None:
    proved(store)
    devices(store)
    proved(store, flags={"a": 1})
    assert start.running(store.layout, "chat.0").number == 1


def test_a_failing_unified_memory_module_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-modprobe"
    program.write_text('#!/bin/sh\necho "$@" > "$0.words"\necho "modprobe: FATAL: no nvidia-uvm" >&2\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(program))
    with pytest.raises(MachineCannot, match=r"nvidia-modprobe -u -c=0 ended with 1: modprobe: FATAL: no nvidia-uvm"):
        step.load_uvm()
    assert (tmp_path / "nvidia-modprobe.words").read_text() == "-u -c=0\n"


def test_the_limit_of_the_first_token_is_the_plans(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def wait(*words: Any) -> float:
        given.append(words[2])
        raise readiness.NotReady(f"no token within {words[2]:.0f} s; last seen: nothing yet")

    monkeypatch.setattr(readiness, "wait_for_token", wait)
    cases: list[dict[str, Any]] = [{"start_seconds": 2345}, {}]
    for more in cases:
        proved(store, None, **more)
        devices(store)
        with pytest.raises(Failed, match=rf"no token within {more.get('start_seconds', 600)} s"):
            replica.wait_ready(store.layout, "chat.0", os.getpid())
    assert given == [2345, 600]


def test_an_engine_or_a_model_that_is_not_there_yet_is_said(store: Store, tmp_path: Path) -> None:
    proved(store, engine_folder=str(tmp_path / "gone"))
    with pytest.raises(MachineCannot, match=r"the engine of chat\.0 is not there: .*gone has no Python"):
        devices(store)
    model = tmp_path / "model"
    proved(store, model_path=str(model))
    with pytest.raises(MachineCannot, match=r"the model of chat\.0 is not there: .*No such file or directory"):
        devices(store)
    model.mkdir()  # the mount point of what is not mounted
    with pytest.raises(MachineCannot, match=r"the model of chat\.0 is not there: .*the folder is empty"):
        devices(store)
    (model / "config.json").touch()
    assert devices(store)["GPUREADY_RELEASE"] == "2"


def test_a_model_that_root_must_not_see_is_left_to_the_engine(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    proved(store, model_path=str(tmp_path))
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert step._unseen(tmp_path) == ""


def test_devices_that_the_unit_locks_out_are_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    proved(store)
    files = [Path("/dev/nvidia0"), Path("/dev/nvidia-uvm"), Path("/dev/nvidiactl")]
    says = {"/dev/nvidia0": errno.ENXIO, "/dev/nvidia-uvm": errno.EPERM}

    def opened(path: Path, _: int) -> int:
        if code := says.get(str(path)):
            raise OSError(code, os.strerror(code), str(path))
        return real_open(os.devnull, os.O_RDWR)

    real_open = os.open
    monkeypatch.setattr(step, "files_of_gpus", lambda: files)
    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(MachineCannot, match=r"the unit of chat\.0 may not open /dev/nvidia-uvm: .*DeviceAllow="):
        step.demand_open("chat.0")
    # To the engines' own user it is another matter: what its group may not.
    says["/dev/nvidia-uvm"] = errno.EACCES
    made = start.Start(store, 1, 0, plan(), {"index": 0, "gpus": [0]})
    with pytest.raises(
        MachineCannot, match=r"the user of chat\.0 may not open /dev/nvidia-uvm.*add gpuready-engine to"
    ):
        replica._demand_access("chat.0", made)


def test_only_device_files_count_as_gpus(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidia-caps").mkdir()
    assert real_files_of_gpus(tmp_path) == []
    assert real_files_of_gpus(Path("/nowhere")) == []


def test_the_unit_waits_for_hardware_and_never_gives_up() -> None:
    lines = UNIT.read_text().splitlines()
    assert "StartLimitIntervalSec=0" in lines
    after = next(line for line in lines if line.startswith("After="))
    for name in ("nvidia-persistenced.service", "nvidia-fabricmanager.service", "remote-fs.target"):
        assert name in after
    # Newer than systemd 249 and 252, where a check of the unit ends with a warning and so with a refusal.
    assert not any(line.startswith(("RestartSteps=", "RestartMaxDelaySec=")) for line in lines)
    # Models may lie anywhere but under /home.
    assert "ProtectSystem=strict" in lines
    assert not any(line.startswith(("InaccessiblePaths=", "TemporaryFileSystem=", "RootDirectory=")) for line in lines)


def test_each_replica_is_started_with_its_own_port(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    two = [{"index": 0, "gpus": [0], "port": 18100}, {"index": 1, "gpus": [1], "port": 18101}]
    python = tmp_path / "engine/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    made = plan(engine="vllm", replicas=two, engine_folder=str(tmp_path / "engine"))
    number = store.add({"plan.json": json.dumps(made)})
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda _, words, environment: started.append((words, environment)))
    monkeypatch.setattr(os, "chdir", lambda _: None)
    for index in (0, 1):
        releases.begin_trial(store.layout, f"chat.{index}", number)
        step.write_devices(store.layout, f"chat.{index}")
        replica.run_engine(store.layout, f"chat.{index}")
    assert [words[-3:] for words, _ in started] == [
        [f"--port={port}", "--config", str(store.folder(number) / "serve.yaml")] for port in (18100, 18101)
    ]
    assert [environment["CUDA_VISIBLE_DEVICES"] for _, environment in started] == ["0", "1"]

"""The engine's own figures in the records of a start, and beside the plan in what is shown."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.unit.standin_systemd import Server

from gpuready.hardware import nvml
from gpuready.operations import beforehand, devices, engine_unit, readback, release, replica
from gpuready.operations.drain import Drain
from gpuready.operations.trial import Settings
from gpuready.serving import figures, readiness, units
from gpuready.serving.files import read_json, write_text
from gpuready.serving.layout import Layout

MEMORY = {
    "kv": {"value": 58.11, "low": 57.7, "high": 58.5},
    "kv_tokens": {"value": 476016.0, "low": 473000.0, "high": 479000.0},
    "blocks": 29751,
}
GIB = 1024**3


def deployment(*indices: int, **more: Any) -> dict[str, Any]:
    return {
        "name": "chat",
        "model": "m",
        "engine": "vllm",
        "engine_folder": "/opt/gpuready/engines/x",
        "environment": {},
        "flags": {},
        "memory": MEMORY,
        "replicas": [{"index": index, "gpus": [index], "port": 18100 + index} for index in indices],
        **more,
    }


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """What the engine at each port says: figures, or a text why none can be read."""
    answers: dict[int, Any] = {}

    def read(engine: str, port: int) -> tuple[dict[str, Any] | None, str]:
        assert engine == "vllm"
        said = answers.get(port, {"kv_tokens": 474304, "kv_gib": 57.9})
        return (None, said) if isinstance(said, str) else (said, "")

    monkeypatch.setattr(figures, "read", read)
    return answers


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server(Layout(tmp_path, engine_group="no-such-group"))
    monkeypatch.setattr(units, "systemctl", made.systemctl)
    monkeypatch.setattr(units, "properties", made.properties)
    monkeypatch.setattr(engine_unit, "place_unit", made.place_unit)
    monkeypatch.setattr(nvml, "probe", made.probe)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(devices, "load_uvm", lambda: None)
    monkeypatch.setattr(devices, "demand_files", lambda *_: None)
    monkeypatch.setattr(beforehand, "refusals", lambda layout, target: [])
    monkeypatch.setattr(readiness, "wait_for_token", lambda *_: 1.0)
    monkeypatch.setattr(readiness, "process_tree", lambda pid: [pid])
    return made


def apply(server: Server, planned: dict[str, Any], *, check: bool = False) -> Any:
    files = {"chat": {"serve.yaml": "x"}}
    gateway = Drain(5, server.layout.root / "run/gpuready-gateway")
    return release.Applier(server.layout, check, Settings(settle_seconds=0), gateway).apply(
        {"deployments": [planned]}, files, "[Service]\n"
    )


def test_a_run_shows_the_engine_beside_the_plan_and_the_next_changes_nothing(
    server: Server, told: dict[int, Any]
) -> None:
    sentence = "chat: planned 58.1 GiB KV, 476,016 tokens; the engine has 57.9 GiB, 474,304 (-0.4 %)"
    assert apply(server, deployment(0), check=True).data["notes"] == []
    assert apply(server, deployment(0)).data["notes"] == [sentence]
    again = apply(server, deployment(0))
    assert (again.changed, again.data["notes"]) == (False, [sentence])
    assert apply(server, deployment(0), check=True).data["notes"] == [sentence]


def test_every_replica_is_told_by_its_own_name(server: Server, told: dict[int, Any]) -> None:
    told[18101] = {"kv_tokens": 418000, "kv_gib": 51.0}
    first, second = apply(server, deployment(0, 1)).data["notes"]
    assert first.startswith("chat.0: planned 58.1 GiB KV")
    assert first.endswith("(-0.4 %)")
    assert second.startswith("chat.1: planned 58.1 GiB KV")
    assert "outside the plan's 473,000 to 479,000" in second


def test_figures_that_cannot_be_read_fail_nothing_and_are_said(server: Server, told: dict[int, Any]) -> None:
    told[18100] = "http://127.0.0.1:18100/metrics: HTTP 404"
    done = apply(server, deployment(0))
    assert done.changed
    assert done.data["notes"] == [
        "chat: planned 58.1 GiB KV, 476,016 tokens; what the engine has could not be read "
        "(http://127.0.0.1:18100/metrics: HTTP 404)"
    ]
    ready = read_json(server.layout.run("chat.0") / "ready.json") or {}
    assert (ready["engine"], ready["engine_unread"]) == (None, "http://127.0.0.1:18100/metrics: HTTP 404")


def test_the_record_of_a_release_keeps_what_was_measured(server: Server, told: dict[int, Any]) -> None:
    apply(server, deployment(0))
    proof = json.loads((server.layout.releases("chat") / "1/verified.json").read_text())
    assert proof["replicas"]["0"]["engine"] == {"kv_tokens": 474304, "kv_gib": 57.9}


def test_status_has_both(server: Server, told: dict[int, Any]) -> None:
    apply(server, deployment(0))
    shown = replica.status(server.layout, ["chat.0"])
    assert shown.summary.splitlines() == [
        "chat.0: active (running), release 1, 0 automatic restarts",
        "  chat.0: planned 58.1 GiB KV, 476,016 tokens; the engine has 57.9 GiB, 474,304 (-0.4 %)",
    ]
    cache = shown.data["replicas"]["chat.0"]["kv_cache"]
    assert (cache["planned"]["kv_tokens"], cache["measured"]["kv_tokens"]) == (476016, 474304)
    assert cache["within_band"] is True


def test_a_replica_that_does_not_serve_has_no_figures(server: Server, told: dict[int, Any]) -> None:
    apply(server, deployment(0))
    server.systemctl("stop", units.unit_of("chat.0"))
    shown = replica.status(server.layout, ["chat.0"])
    assert shown.summary == "chat.0: inactive (dead), release 1, 0 automatic restarts"
    assert shown.data["replicas"]["chat.0"]["kv_cache"] is None


def test_an_engine_that_was_started_before_figures_were_read_is_said(server: Server, told: dict[int, Any]) -> None:
    apply(server, deployment(0))
    path = server.layout.run("chat.0") / "ready.json"
    ready = read_json(path) or {}
    for key in ("engine", "engine_unread"):
        del ready[key]
    write_text(path, json.dumps(ready))
    (note,) = apply(server, deployment(0)).data["notes"]
    assert note.endswith("could not be read (it was started before its figures were read; restart it to have them)")


def test_what_is_compared_is_the_release_that_runs(server: Server, told: dict[int, Any]) -> None:
    apply(server, deployment(0))
    shutil.rmtree(server.layout.releases("chat") / "1")
    assert readback.comparison(server.layout, "chat.0") is None


def test_nvml_tells_a_replicas_processes_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    process = nvml.GpuProcess
    gpus = (
        nvml.NvmlGpu(0, uuid="a", memory_used_bytes=9 * GIB, processes=(process(1, 6 * GIB), process(7, 2 * GIB))),
        nvml.NvmlGpu(1, uuid="b", memory_used_bytes=5 * GIB, processes=(process(2, 5 * GIB),)),
        nvml.NvmlGpu(2, uuid="c", memory_used_bytes=1 * GIB, processes=()),
    )
    monkeypatch.setattr(nvml, "probe", lambda: nvml.NvmlReport(gpus=gpus))
    monkeypatch.setattr(readiness, "process_tree", lambda _: [1, 2])
    assert readback.gpu_memory(1, ["a", "b"]) == {
        "gpu_process_bytes": 11 * GIB,
        "gpus": [
            {"uuid": "a", "used_bytes": 9 * GIB, "own_bytes": 6 * GIB},
            {"uuid": "b", "used_bytes": 5 * GIB, "own_bytes": 5 * GIB},
        ],
    }


@pytest.mark.parametrize("report", [None, nvml.NvmlReport(problem="no driver")])
def test_without_nvml_memory_is_unknown(monkeypatch: pytest.MonkeyPatch, report: nvml.NvmlReport | None) -> None:
    monkeypatch.setattr(nvml, "probe", lambda: report)
    monkeypatch.setattr(readiness, "process_tree", lambda _: [1])
    assert readback.gpu_memory(1, ["a"]) == {"gpu_process_bytes": None, "gpus": None}


def test_memory_that_the_driver_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (nvml.NvmlGpu(0, uuid="a", processes=(nvml.GpuProcess(1, None),)),)
    monkeypatch.setattr(nvml, "probe", lambda: nvml.NvmlReport(gpus=gpus))
    monkeypatch.setattr(readiness, "process_tree", lambda _: [1])
    assert readback.gpu_memory(1, ["a"]) == {
        "gpu_process_bytes": None,
        "gpus": [{"uuid": "a", "used_bytes": None, "own_bytes": None}],
    }


@pytest.mark.parametrize(
    ("gpus", "others"),
    [
        (None, None),
        ([], None),
        ([{"used_bytes": 9 * GIB, "own_bytes": None}], None),
        ([{"used_bytes": 9 * GIB, "own_bytes": 6 * GIB}], 3.0),
        ([{"used_bytes": 9 * GIB, "own_bytes": 9 * GIB}, {"used_bytes": 9 * GIB, "own_bytes": 8 * GIB}], 1.0),
        ([{"used_bytes": 9 * GIB, "own_bytes": 6 * GIB}, {"used_bytes": None, "own_bytes": 8 * GIB}], None),
        ([{"used_bytes": 6 * GIB, "own_bytes": 7 * GIB}], 0.0),
    ],
)
def test_what_others_hold_is_known_of_every_gpu_or_not_at_all(
    server: Server, told: dict[int, Any], gpus: Any, others: float | None
) -> None:
    apply(server, deployment(0))
    path = server.layout.run("chat.0") / "ready.json"
    write_text(path, json.dumps({**(read_json(path) or {}), "gpus": gpus}))
    found = readback.comparison(server.layout, "chat.0")
    assert found is not None
    assert found.others_gib == others

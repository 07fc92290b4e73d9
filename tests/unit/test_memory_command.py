"""`gpuready memory diagnose`: what it collects of a server, what it shows, and its exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.standin_systemd import Server
from tests.unit.test_release_apply import CHAT, UNIT_TEXT, server

from gpuready.cli.main import main
from gpuready.hardware import host, nvml
from gpuready.operations import memory, release
from gpuready.outcome import MachineCannot

__all__ = ["server"]

GIB = 1 << 30
SERVING = (
    "INFO 12-01 05:00:00 [core.py:1] Application startup complete.\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 1.50 GiB is free.\n"
)


def apply(server: Server, **beside: Any) -> None:
    plan = {
        **CHAT,
        "engine": "vllm",
        "engine_version": "0.19.1",
        "settings": {"gpu_memory_utilization": 0.9},
        "memory": {"total_gib": 79.1},
        **beside,
    }
    release.Applier(server.layout, False).apply({"deployments": [plan]}, {"chat": {"serve.yaml": "{}"}}, UNIT_TEXT)


def held(monkeypatch: pytest.MonkeyPatch, unit_of: dict[int, str | None], **gib: float) -> None:
    """Have NVML tell of processes, by pid, and systemd of their units."""
    processes = tuple(nvml.GpuProcess(int(pid.strip("_")), int(size * GIB)) for pid, size in gib.items())
    report = nvml.NvmlReport(gpus=(nvml.NvmlGpu(0, processes=processes), nvml.NvmlGpu(1, processes=processes)))
    monkeypatch.setattr(nvml, "probe", lambda: report)
    monkeypatch.setattr(host, "unit", lambda pid: unit_of[pid])


def test_a_replica_is_judged_with_its_plan_and_told_where_to_declare_the_cure(server: Server) -> None:
    apply(server)
    server.journal = SERVING
    found = memory.of_replica(server.layout, "chat.0")
    lines = found.summary.splitlines()
    assert lines[0] == "chat.0, release 1: out of memory, a step needs more than is left (activation)"
    assert "    79.10 GiB of the GPU's memory in all" in lines
    assert lines[-1] == "  declare it: gpuready_deployments, chat: flags: {gpu-memory-utilization: 0.88}"
    assert found.data["diagnosis"]["cure"]["value"] == 0.88


def test_the_replicas_own_processes_and_other_gpus_do_not_count(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(server)
    held(monkeypatch, {11: "gpuready-engine@chat.0.service", 12: "x.service"}, _11=70.0, _12=0.2)
    others = memory.holders("chat.0", {"gpus": [0]})
    assert [(one.gpu, one.pid, one.unit) for one in others] == [(0, 12, "x.service")]


def test_an_orphan_of_an_earlier_start_is_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    # vllm issue 55510: workers live on after their server was killed, and the next start runs out of memory.
    apply(server)
    server.journal = SERVING
    held(monkeypatch, {4711: None}, _4711=60.0)
    found = memory.of_replica(server.layout, "chat.0")
    assert found.data["diagnosis"]["kind"] == "foreign_process"
    assert "cure: end process 4711, which no unit holds" in found.summary


def test_a_neighbour_on_a_shared_gpu_is_held_to_its_part(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {"chat": 50.0, "embed": 20.0}
    parts = [{"index": 0, "gpus": [0], "port": 18100, "shares": shares}]
    held(monkeypatch, {9: "gpuready-engine@embed.0.service"}, _9=30.0)
    (other,) = memory.holders("chat.0", parts[0])
    assert (other.deployment, other.part_gib, other.exceeds) == ("embed", 20.0, True)
    held(monkeypatch, {9: "gpuready-engine@embed.0.service"}, _9=20.2)
    (other,) = memory.holders("chat.0", parts[0])
    assert not other.exceeds


def test_a_start_that_was_given_up_is_judged_by_the_one_before(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(server)
    monkeypatch.setattr(memory, "starts", lambda unit: iter(["chat.0 is given up", SERVING]))
    assert memory.of_replica(server.layout, "chat.0").data["diagnosis"]["kind"] == "activation"
    monkeypatch.setattr(memory, "starts", lambda unit: iter(["[Errno 98] Address already in use", SERVING]))
    found = memory.of_replica(server.layout, "chat.0").data
    assert found["diagnosis"] is None
    assert found["other_cause"].startswith("the port is in use")


def test_a_gpu_that_failed_is_no_lack_of_memory(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(server)
    server.journal = "RuntimeError: Engine core initialization failed."
    xid = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python3, GPU has fallen off the bus."
    monkeypatch.setattr(memory, "kernel_log", lambda unit: xid)
    found = memory.of_replica(server.layout, "chat.0")
    assert found.data["diagnosis"] is None
    assert found.data["other_cause"].startswith("the GPU itself failed (NVRM: Xid (PCI:0000:1b:00): 79")


def test_no_such_replica_is_said(server: Server) -> None:
    with pytest.raises(MachineCannot, match=r"replica nobody\.0 has no release on this server"):
        memory.of_replica(server.layout, "nobody.0")


def called(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["memory", "diagnose", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_log_from_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "engine.log"
    path.write_text(SERVING)
    code, out, _ = called(["--log", str(path), "--json"], capsys)
    said = json.loads(out)
    assert (code, said["changed"], said["data"]["diagnosis"]["kind"]) == (0, False, "activation")
    assert said["data"]["diagnosis"]["phase"] == "runtime"


def given(content: bytes) -> io.TextIOWrapper:
    """Return standard input that holds this."""
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")


def test_that_it_was_something_else_is_an_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", given(b"RuntimeError: Found no NVIDIA driver on your system.\n"))
    code, out, _ = called(["--log", "-", "--json"], capsys)
    assert code == 0
    data = json.loads(out)["data"]
    assert data["diagnosis"] is None
    assert data["other_cause"].startswith("the NVIDIA driver is missing or not loaded")


@pytest.mark.parametrize("words", [[], ["chat.0", "--log", "x"]])
def test_neither_and_both_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = called(words, capsys)
    assert code == 2
    assert "wants either a replica or a log" in err


def test_a_log_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = called(["--log", "/no/such/log"], capsys)
    assert code == 2
    assert "/no/such/log cannot be read" in err


def test_of_a_log_that_is_too_long_to_keep_the_end_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "engine.log"
    with path.open("wb") as file:
        file.truncate(70 * 1024**2)  # a hole, as rotation leaves one
        file.seek(0, io.SEEK_END)
        file.write(b"\xe2\x96 cut in the middle of a character\n" + SERVING.encode())
    code, out, _ = called(["--log", str(path), "--json"], capsys)
    assert (code, json.loads(out)["data"]["diagnosis"]["kind"]) == (0, "activation")


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty"), (b" \n\n", "is empty"), (bytes(range(128, 256)) * 40, "is no text")],
    ids=["empty", "blank", "binary"],
)
@pytest.mark.parametrize("piped", [True, False], ids=["stdin", "file"])
def test_what_holds_no_log_is_refused(
    content: bytes,
    said: str,
    piped: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "engine.log"
    path.write_bytes(content)
    monkeypatch.setattr("sys.stdin", given(content))
    code, out, err = called(["--log", "-" if piped else str(path)], capsys)
    where = "standard input" if piped else str(path)
    assert (code, out) == (2, "")
    assert f"{where} {said}" in err

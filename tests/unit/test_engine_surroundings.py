"""What an engine is given beside its words: environment, caches, and the NUMA node of its GPUs."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import pytest

from gpuready.hardware import host
from gpuready.operations import surroundings
from gpuready.operations.start import Start
from gpuready.serving.layout import Layout
from gpuready.serving.releases import Store

ENGINE = "/opt/gpuready/engines/x"


def started(layout: Layout, file: str | None = None, **more: Any) -> Start:
    """Return a start on release 1, with that file of variables."""
    store = Store(layout, "chat")
    store.folder(1).mkdir(parents=True)
    if file is not None:
        (store.folder(1) / "environment").write_text(file)
    return Start(store, 1, 0, {"engine_folder": ENGINE, "environment": {}, **more}, {"index": 0})


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


def test_the_engine_gets_the_releases_variables(layout: Layout) -> None:
    text = "# nothing is fetched\nHF_HUB_OFFLINE=1\n\nOPTIONS=a=b c\nTRITON_CACHE_DIR=${CACHE_DIRECTORY}/x/triton\n"
    environment = surroundings.environment(layout, "chat.0", started(layout, text))
    assert environment.items() >= {"HF_HUB_OFFLINE": "1", "OPTIONS": "a=b c"}.items()
    assert environment["TRITON_CACHE_DIR"] == f"{layout.cache('chat.0')}/x/triton"
    assert not any(name.startswith("#") for name in environment)


def test_nothing_of_the_services_own_surroundings_reaches_the_engine(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert "PYTHONPATH" not in surroundings.environment(layout, "chat.0", started(layout, ""))


@pytest.mark.parametrize(
    "known", [{"A": "1"}, [{"name": "A", "value": "1", "why": "w"}]], ids=["without reasons", "with reasons"]
)
def test_a_release_without_the_file_has_the_plans_variables(layout: Layout, known: Any) -> None:
    assert surroundings.environment(layout, "chat.0", started(layout, environment=known))["A"] == "1"


def test_an_old_release_reports_and_fetches_nothing_either(layout: Layout) -> None:
    old = started(layout, environment={"HF_HUB_OFFLINE": "0"})
    environment = surroundings.environment(layout, "chat.0", old)
    assert environment.items() >= {"HF_HUB_OFFLINE": "0", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}.items()


def test_cuda_is_where_the_plan_says(layout: Layout, tmp_path: Path) -> None:
    without = surroundings.environment(layout, "chat.0", started(layout, ""))
    assert "CUDA_HOME" not in without
    assert without["PATH"] == f"{ENGINE}/bin:/usr/local/bin:/usr/bin:/bin"
    other = Layout(tmp_path / "other")
    found = surroundings.environment(other, "chat.0", started(other, "", cuda_home="/usr/local/cuda-12.8"))
    assert found["CUDA_HOME"] == "/usr/local/cuda-12.8"
    assert "/usr/local/cuda-12.8/bin" in found["PATH"].split(":")


def test_caches_lie_by_engine_and_go_with_it(layout: Layout, tmp_path: Path) -> None:
    engines = tmp_path / "engines"
    (engines / "new").mkdir(parents=True)
    start = started(layout, "", engine_folder=str(engines / "new"))
    cache = layout.cache("chat.0")
    assert surroundings.environment(layout, "chat.0", start)["HOME"] == str(cache / "new")
    for name in ("new", "old"):
        (cache / name / "triton").mkdir(parents=True)
        (cache / name / "triton/kernel.so").write_text("x")
    assert surroundings.forget_gone_engines(layout, "chat.0", start) == ["old"]
    assert [path.name for path in cache.iterdir()] == ["new"]
    assert (cache / "new/triton/kernel.so").exists()
    assert surroundings.forget_gone_engines(layout, "chat.0", start) == []


def test_a_first_start_has_no_caches(layout: Layout) -> None:
    assert surroundings.forget_gone_engines(layout, "chat.0", started(layout, "")) == []


NODES = (host.NumaNode(0, (0, 1), None), host.NumaNode(1, (2, 3), None))


def test_an_engine_stays_on_the_cpus_of_its_gpus_and_takes_memory_there(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kept: list[tuple[int, ...]] = []
    preferred: list[int] = []
    monkeypatch.setattr(host, "numa_nodes", lambda: NODES)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: kept.append(cpus))
    monkeypatch.setattr(surroundings, "prefer_memory_of", preferred.append)
    for node in (1, None, 7):
        surroundings.stay_near("chat.0", node)
    assert (kept, preferred) == ([(2, 3)], [1])
    assert capfd.readouterr().out == ""


def test_a_kernel_that_lets_nobody_choose_keeps_no_engine_from_starting(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(host, "numa_nodes", lambda: NODES)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    monkeypatch.setattr(surroundings, "prefer_memory_of", refuse)
    surroundings.stay_near("chat.0", 1)
    said = capfd.readouterr().out
    assert "chat.0 is not kept on the CPUs of NUMA node 1: [Errno 22]" in said
    assert "chat.0 cannot ask for memory of NUMA node 1: [Errno 22]" in said


def test_the_kernel_knows_what_was_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is the thread's own, so it is set and read in a process that ends."""
    if not Path("/sys/devices/system/node/node0").exists():
        pytest.skip("this kernel knows no NUMA nodes")
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        try:
            surroundings.prefer_memory_of(0)
            said = Path("/proc/self/numa_maps").read_text().split()[1]
        except OSError as error:
            said = f"refused {error.errno}"
        os.write(writing, said.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    said = os.read(reading, 100).decode()
    if said.startswith("refused"):
        pytest.skip(f"this kernel does not let us: {said}")
    assert said == "prefer:0"


def test_a_machine_whose_call_is_not_known_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="the call of riscv64 is not known"):
        surroundings.prefer_memory_of(0)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(OSError, match=r"Invalid argument|not permitted|not implemented"):
        surroundings.prefer_memory_of(1000)

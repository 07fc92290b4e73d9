"""Every fault: planted, seen through pynvml as hardware shows it, cleared, and gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from sim.gpusim import build, places, planting, run
from sim.gpusim.faults import FAULTS, find
from sim.hardware import state_file
from sim.machine.common import SimError
from tests.unit.standin import CHECKOUT

H100, A100, T4 = "h100-80gb-sxm-x8", "a100-80gb-sxm-x8", "t4-x1"
READER = CHECKOUT / "tests/unit/fault_reading.py"
MIB = 1 << 20
LOST = {"error": 15}
NOT_SUPPORTED = 5
"""Of NVML_P2P_STATUS_*."""
Options = Mapping[str, "str | int"]


class Server(NamedTuple):
    """A simulated server in a folder."""

    place: places.InFolder
    environment: dict[str, str]

    def read(self) -> Any:
        """Return what pynvml says, in a process of its own."""
        done = subprocess.run(
            [sys.executable, str(READER)], env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def plant(self, name: str, gpu: int = 0, options: Options | None = None) -> list[str]:
        """Plant a fault into one GPU, or into the whole server."""
        fault = find(name)
        assert fault is not None
        count = len(places.read(self.place).gpus)
        gpus = {"system": [], "gpus": list(range(count))}.get(fault.of, [gpu])
        return planting.plant(self.place, fault, gpus, options or {})

    def clear(self, name: str = "") -> list[str]:
        """Take faults away."""
        return planting.clear(self.place, name, None)


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server of the preset that the test names; nothing that it started is left."""
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "gpus.conf").write_text(run.compiled(request.param, "test"), encoding="ascii")
    made = Server(places.InFolder(folder), run.environment(folder))
    yield made
    made.clear()


def changed(before: Any, after: Any) -> Any:
    """Return what is different, by GPU; all of it where the library does not even start."""
    if not isinstance(after, list):
        return after
    return {
        index: {key: new[key] for key in new if new[key] != old.get(key)}
        for index, (old, new) in enumerate(zip(before, after, strict=True))
        if new != old
    }


ALL = (H100, A100, T4)
REMAPPING = (H100, A100)
HALF = {H100: 990, A100: 705, T4: 795}
HOT = {H100: 89, A100: 89, T4: 93}
PRE_AMPERE = {"retirement_pending": 1}


def uncorrectable(preset: str) -> dict[str, Any]:
    """Return what an uncorrectable memory error leaves behind."""
    marked = PRE_AMPERE if preset == T4 else {"remapped": [0, 1, 1, 0]}
    return {"ecc": [0, 1, 0, 1], **marked}


class Case(NamedTuple):
    """A fault, and what is different on GPU 0 while it is there."""

    fault: str
    presets: tuple[str, ...]
    shown: Any
    """By preset: a function, or the same for all."""
    options: Options = MappingProxyType({})


CASES = [
    Case("gpu-lost", ALL, LOST),
    Case("xid", ALL, LOST, {"xid": 79}),
    Case("xid", ALL, uncorrectable, {"xid": 48}),
    Case("xid", REMAPPING, uncorrectable, {"xid": 94}),
    Case("xid", ALL, {}, {"xid": 13}),
    Case("nvlink-down", REMAPPING, {"links_down": [7]}, {"link": 7}),
    # Before Hopper NVML does not speak of the fabric; there it shows in what NVLink reaches.
    Case("fabric-not-started", (H100,), {"fabric": 1, "nvlink_peers": [NOT_SUPPORTED]}),
    Case("fabric-not-started", (A100,), {"nvlink_peers": [NOT_SUPPORTED]}),
    Case("row-remap-pending", REMAPPING, {"remapped": [0, 1, 1, 0]}),
    Case("row-remap-failure", REMAPPING, {"remapped": [0, 0, 0, 1]}),
    Case("ecc-errors", ALL, {"ecc": [12, 3, 12, 3]}, {"uncorrected": 3}),
    Case("driver-library-mismatch", ALL, {"error": 18}),
    Case("driver-not-loaded", ALL, {"error": 9}),
    Case(
        "thermal-throttle", ALL, lambda preset: {"temperature": HOT[preset], "throttling": 0x48, "clock": HALF[preset]}
    ),
    Case("power-brake", ALL, lambda preset: {"throttling": 0x88, "clock": HALF[preset]}),
    Case("pcie-degraded", ALL, {"pcie_width": 8}),
    Case("pcie-degraded", ALL, {"pcie_width": 4, "pcie_generation": 2}, {"width": 4, "generation": 2}),
]
TRIED = [
    pytest.param(preset, case, id=f"{case.fault}{''.join(f'-{value}' for value in case.options.values())}-{preset}")
    for case in CASES
    for preset in case.presets
]


@pytest.mark.parametrize(("server", "case"), TRIED, indirect=["server"])
def test_a_fault_is_seen_and_is_gone_after_clear(server: Server, case: Case, request: pytest.FixtureRequest) -> None:
    preset = request.node.callspec.params["server"]
    before = server.read()
    server.plant(case.fault, options=case.options)
    shown = case.shown(preset) if callable(case.shown) else case.shown
    fault = find(case.fault)
    assert fault is not None
    if fault.of == "system":
        expected = shown
    else:
        expected = {gpu: shown for gpu in range(len(before) if fault.of == "gpus" else 1) if shown}
    assert changed(before, server.read()) == expected
    server.clear(case.fault)
    assert server.read() == before


@pytest.mark.parametrize(
    ("server", "fault", "options", "words"),
    [
        (T4, "nvlink-down", {"link": 0}, r"GPU 0 \(Tesla T4\) has no NVLink; so it cannot have nvlink-down\."),
        (T4, "fabric-not-started", {}, r"GPU 0 \(Tesla T4\) is not connected to an NVSwitch; "),
        (T4, "row-remap-pending", {}, r"GPU 0 \(Tesla T4\) has no row remapping, which came with Ampere; "),
        (T4, "row-remap-failure", {}, r"GPU 0 \(Tesla T4\) has no row remapping"),
        (T4, "xid", {"xid": 94}, r"GPU 0 \(Tesla T4\) does not contain memory errors"),
        (A100, "nvlink-down", {"link": 12}, "nvlink_down = 12, this GPU has 12 links; nothing was changed"),
        (H100, "busy", {"mib": 90000}, "its processes use more memory than there is; nothing was changed"),
        (H100, "xid", {}, r"xid needs --xid \(its number\); give a whole number\."),
        (H100, "xid", {"xid": -1}, "--xid -1 is out of range"),
        (H100, "gpu-lost", {"mib": 1}, r"gpu-lost has no option --mib; its options: none\."),
        (H100, "pcie-degraded", {"width": "wide"}, r"--width wide is out of range; give a whole number from 0\."),
        (H100, "busy", {"module": "{x} y"}, r"--module {x} y is not a name; give letters, digits and _\."),
    ],
    indirect=["server"],
)
def test_what_makes_no_sense_is_refused_and_nothing_changes(
    server: Server, fault: str, options: Options, words: str
) -> None:
    before = server.place.file.read_bytes()
    with pytest.raises(SimError, match=words):
        server.plant(fault, options=options)
    assert server.place.file.read_bytes() == before
    assert list(server.place.folder.glob("*.json")) == []  # no process was left behind


@pytest.mark.parametrize("server", ["a100-40gb-sxm-x4"], indirect=True)
def test_both_ends_of_a_link_between_gpus_are_down_and_up_again(server: Server) -> None:
    before = server.read()
    server.plant("nvlink-down", 0, {"link": 5})
    after = server.read()
    # Four links to each other GPU: 5 is the second of those to GPU 2, whose first four lead to GPU 0.
    assert changed(before, after) == {0: {"links_down": [5]}, 2: {"links_down": [1]}}
    assert server.clear("nvlink-down") == ["nvlink-down 0", "nvlink-down 2"]
    assert server.read() == before
    server.plant("nvlink-down", 0, {"link": 5})
    assert planting.clear(server.place, "", 0) == ["nvlink-down 0", "nvlink-down 2"]
    assert server.read() == before


@pytest.mark.parametrize("server", [H100], indirect=True)
def test_a_process_holds_a_gpu_until_it_is_cleared(server: Server) -> None:
    before = server.read()
    server.plant("busy", 2, {"mib": 1000})
    after = server.read()
    ((pid, used),) = after[2]["processes"]
    assert (used, after[2]["used"] - before[2]["used"]) == (1000 * MIB, 1000 * MIB)
    assert Path(f"/proc/{pid}").exists()
    with pytest.raises(SimError, match="busy is on GPU 2 already"):
        server.plant("busy", 2)
    assert server.clear("busy") == ["busy 2"]
    assert server.read() == before
    assert not Path(f"/proc/{pid}/exe").exists()


@pytest.mark.parametrize("server", [H100], indirect=True)
def test_memory_creeps(server: Server) -> None:
    server.plant("memory-creep", 1, {"mib": 100, "mib_per_minute": 6000})
    with state_file.change(server.place.file) as state:
        (fault,) = state.faults
        pid, size, kind, gi, ci, growth, since = (fault.get("process") or "").split()
        fault.set("process", f"{pid} {size} {kind} {gi} {ci} {growth} {int(since) - 60}")
    ((_, used),) = server.read()[1]["processes"]
    assert 6100 * MIB <= used <= 6100 * MIB + 60 * 100 * MIB
    server.clear()
    assert server.read()[1]["processes"] == []


@pytest.mark.parametrize("server", [A100], indirect=True)
def test_a_module_or_a_process_keeps_a_gpu_from_being_reset(server: Server) -> None:
    reset = [str(build.program()), "reset", "3"]
    environment = {**server.environment, "PATH": os.environ["PATH"]}

    def tried() -> int:
        return subprocess.run(reset, env=environment, capture_output=True, check=False).returncode

    assert tried() == 0
    server.plant("busy", 3, {"module": "nvidia_drm"})
    assert list(server.place.folder.glob("*.json")) == []
    assert tried() != 0
    server.clear()
    server.plant("busy", 3)
    assert tried() != 0
    server.clear()
    server.plant("stuck-reset", 3)
    assert tried() != 0
    server.clear()
    assert tried() == 0


@pytest.mark.parametrize("server", [A100], indirect=True)
def test_a_reset_mends_what_it_mends_on_hardware(server: Server) -> None:
    before = server.read()
    server.plant("xid", 3, {"xid": 94})
    assert server.read()[3]["remapped"] == [0, 1, 1, 0]
    subprocess.run([str(build.program()), "reset", "3"], env=server.environment, check=True)
    # The row is replaced, and both counters that outlive the driver stay.
    assert changed(before, server.read()) == {3: {"remapped": [0, 1, 0, 0], "ecc": [0, 0, 0, 1]}}


@pytest.mark.parametrize("server", [A100], indirect=True)
def test_faults_that_count_are_a_sum_whichever_ends_first(server: Server) -> None:
    before = server.read()
    server.plant("xid", 0, {"xid": 48})
    server.plant("xid", 0, {"xid": 48})
    assert server.read()[0]["remapped"] == [0, 2, 1, 0]
    server.plant("ecc-errors", 0, {"corrected": 0, "uncorrected": 5})
    assert server.read()[0]["ecc"] == [0, 7, 0, 7]
    server.clear("xid")
    assert changed(before, server.read()) == {0: {"ecc": [0, 5, 0, 5]}}
    server.clear("ecc-errors")
    assert server.read() == before


@pytest.mark.parametrize("first", ["thermal-throttle", "power-brake"])
@pytest.mark.parametrize("server", [H100], indirect=True)
def test_what_slows_a_gpu_is_told_together_whichever_ends_first(server: Server, first: str) -> None:
    before = server.read()
    bits = {"thermal-throttle": 0x48, "power-brake": 0x88}
    second = next(name for name in bits if name != first)
    server.plant(first)
    server.plant(second)
    server.plant(second, 1)
    assert [gpu["throttling"] for gpu in server.read()[:3]] == [0xC8, bits[second], before[2]["throttling"]]
    # The editor of the file says the same as the library.
    assert [places.read(server.place).effective(f"gpu {gpu}").number("throttle_reasons") for gpu in (0, 1)] == [
        0xC8,
        bits[second],
    ]
    server.clear(first)
    assert server.read()[0]["throttling"] == bits[second]
    server.clear(second)
    assert server.read() == before


CLEARED = """
import pynvml as N
N.nvmlInit()
N.nvmlDeviceClearEccErrorCounts(N.nvmlDeviceGetHandleByIndex(0), N.NVML_VOLATILE_ECC)
"""


@pytest.mark.parametrize("server", [A100], indirect=True)
def test_counters_can_be_cleared_under_a_fault(server: Server) -> None:
    server.plant("ecc-errors", 0, {"corrected": 3, "uncorrected": 5})
    server.plant("ecc-errors", 1, {"corrected": 3, "uncorrected": 5})
    subprocess.run([sys.executable, "-c", CLEARED], env=server.environment, check=True)
    assert [gpu["ecc"] for gpu in server.read()[:2]] == [[0, 0, 3, 5], [3, 5, 3, 5]]


@pytest.mark.parametrize("server", ["a100-40gb-sxm-x4"], indirect=True)
def test_a_reset_of_one_end_brings_the_link_up_at_both(server: Server) -> None:
    before = server.read()
    server.plant("nvlink-down", 0, {"link": 0})
    server.plant("nvlink-down", 2, {"link": 11})
    subprocess.run([str(build.program()), "reset", "1"], env=server.environment, check=True)
    assert set(changed(before, server.read())) == {2, 3}
    subprocess.run([str(build.program()), "reset", "2"], env=server.environment, check=True)
    assert server.read() == before
    assert places.read(server.place).faults == []


@pytest.mark.parametrize("server", [A100], indirect=True)
@pytest.mark.parametrize("options", [{"width": 0}, {"width": 32}, {"generation": 5}])
def test_a_link_cannot_fall_back_to_more_than_it_has(server: Server, options: Options) -> None:
    before = server.place.file.read_bytes()
    with pytest.raises(SimError, match=r"pcie_(width|generation) is from 1 to pcie_\1_max; nothing was changed"):
        server.plant("pcie-degraded", 0, options)
    assert server.place.file.read_bytes() == before


@pytest.mark.parametrize("server", [H100], indirect=True)
def test_a_boot_brings_lost_gpus_and_drivers_back(server: Server) -> None:
    before = server.read()
    for name in ("gpu-lost", "driver-library-mismatch", "stuck-reset"):
        server.plant(name)
    subprocess.run([str(build.program()), "boot"], env=server.environment, check=True)
    assert server.read() == before
    assert places.read(server.place).faults == []


@pytest.mark.parametrize("server", [H100], indirect=True)
def test_a_process_that_a_boot_of_the_hardware_has_left_is_ended_by_the_next_clear(server: Server) -> None:
    server.plant("busy", 2)
    ((pid, _),) = server.read()[2]["processes"]
    subprocess.run([str(build.program()), "boot"], env=server.environment, check=True)
    server.plant("busy", 3)
    assert server.clear("gpu-lost") == []
    assert not Path(f"/proc/{pid}/exe").exists()
    assert len(server.read()[3]["processes"]) == 1


WAIT = """
import pynvml as nvml, sys
nvml.nvmlInit()
gpu = nvml.nvmlDeviceGetHandleByIndex(0)
events = nvml.nvmlEventSetCreate()
nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, events)
print("ready", flush=True)
for limit in (20000, 1000):
    try:
        print(nvml.nvmlEventSetWait_v2(events, limit).eventData, flush=True)
    except nvml.NVMLError as error:
        print("error", error.value, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("server", [T4], indirect=True)
def test_an_xid_reaches_who_waits_for_it_and_does_not_fire_again(server: Server) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAIT], env=server.environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as waiting:
        assert waiting.stdout
        assert waiting.stdin
        assert waiting.stdout.readline() == "ready\n"
        said = server.plant("xid", options={"xid": 31})
        assert "NVRM: Xid (PCI:0000:" in said[0]
        assert waiting.stdout.readline() == "31\n"
        server.clear()
        waiting.stdin.write("\n")
        waiting.stdin.flush()
        assert waiting.stdout.readline() == "error 10\n"
        waiting.stdin.write("\n")
    assert [event.split()[2:4] for event in places.read(server.place).system.all("event")] == [["8", "31"]]


@pytest.mark.parametrize("server", [A100], indirect=True)
def test_faults_of_one_gpu_are_cleared_alone(server: Server) -> None:
    server.plant("gpu-lost", 1)
    server.plant("gpu-lost", 2)
    server.plant("driver-not-loaded")
    assert planting.clear(server.place, "", 2) == ["gpu-lost 2"]
    assert planting.clear(server.place, "gpu-lost", None) == ["gpu-lost 1"]
    assert server.clear() == ["driver-not-loaded system"]
    assert server.clear() == []
    with pytest.raises(SimError, match=r"there is no fault gpu-lots; the nearest is gpu-lost; "):
        server.clear("gpu-lots")


@pytest.mark.parametrize("server", [H100], indirect=True)
def test_the_same_fault_is_planted_once(server: Server) -> None:
    server.plant("gpu-lost")
    with pytest.raises(SimError, match="gpu-lost is there already"):
        server.plant("gpu-lost")
    server.plant("nvlink-down", 1, {"link": 2})
    server.plant("nvlink-down", 1, {"link": 5})
    assert server.read()[1]["links_down"] == [2, 5]


def test_every_fault_is_tried() -> None:
    tried = {case.fault for case in CASES} | {"busy", "memory-creep", "stuck-reset"}
    assert tried == {fault.name for fault in FAULTS}

"""The hardware of a booted machine: broken and mended from outside, seen from inside, and what a reboot makes of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from sim.gpusim import main as cli
from sim.hardware import state_file
from sim.machine import lifecycle, pool
from sim.machine.common import CHECKOUT, Sim
from sim.machine.machine import Machine
from tests.machines.conftest import Factory

pytestmark = pytest.mark.machine

Call = Callable[..., str]


@pytest.fixture(scope="module")
def machine(machines: Factory) -> Machine:
    """A blank server with eight H100, and pynvml to look at them."""
    made = machines("gpus")
    for source in (pynvml.__file__, str(CHECKOUT / "tests/unit/fault_reading.py")):
        file = Path(source)
        made.ssh(f"cat > /root/{file.name}", stdin=file.read_text(encoding="utf-8"))
    return made


@pytest.fixture
def gpusim(capsys: pytest.CaptureFixture[str]) -> Call:
    """Call a verb, demand that it succeeds, and return what it says."""

    def call(*words: str) -> str:
        code = cli.main(words)
        said = capsys.readouterr()
        assert code == 0, said.err
        return said.out

    return call


def inside(machine: Machine) -> Any:
    """Return what pynvml says on the machine."""
    return json.loads(machine.ssh(["python3", "/root/fault_reading.py"]).stdout)


def test_a_lost_gpu_is_lost_inside_told_by_the_journal_and_back_after_clear(machine: Machine, gpusim: Call) -> None:
    before = inside(machine)
    gpusim("fault", machine.name, "gpu-lost", "--gpu", "3")
    assert [gpu.get("error") for gpu in inside(machine)] == [None, None, None, 15, None, None, None, None]
    line = "NVRM: Xid (PCI:0000:61:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    assert line in machine.ssh(["journalctl", "--identifier=kernel", "--output=cat"]).stdout
    assert "has fallen off the bus" in gpusim("show", machine.name)
    assert gpusim("clear", machine.name) == "cleared: gpu-lost 3\n"
    assert inside(machine) == before


def test_a_busy_gpu_is_held_by_a_unit_of_its_own(machine: Machine, gpusim: Call) -> None:
    gpusim("fault", machine.name, "busy", "--gpu", "2", "--mib", "1000")
    ((pid, used),) = inside(machine)[2]["processes"]
    assert used == 1000 << 20
    main = machine.ssh(["systemctl", "show", "--property=MainPID", "--value", "gpusim-busy-2.service"]).stdout
    assert int(main) == pid
    assert f"GPU 2: 1000 MiB, compute, process {pid} /usr/bin/python3" in gpusim("show", machine.name)
    assert machine.ssh("nvidia-smi --gpu-reset -i 2", check=False).returncode != 0
    gpusim("clear", machine.name, "busy")
    assert machine.ssh(["systemctl", "is-active", "gpusim-busy-2.service"], check=False).stdout == "inactive\n"
    assert machine.ssh("nvidia-smi --gpu-reset -i 2", check=False).returncode == 0


MIG_AND_LIMIT = """
import pynvml as nvml
nvml.nvmlInit()
gpu = nvml.nvmlDeviceGetHandleByIndex(0)
nvml.nvmlDeviceSetMigMode(gpu, 1)
nvml.nvmlDeviceCreateGpuInstance(gpu, nvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 0).id)
nvml.nvmlDeviceSetPowerManagementLimit(nvml.nvmlDeviceGetHandleByIndex(1), 300000)
"""


def test_a_reboot_loses_what_a_real_one_loses(machine: Machine, gpusim: Call) -> None:
    before = json.loads(gpusim("show", machine.name, "--json"))["gpus"]
    machine.ssh("cd /root && python3 -", stdin=MIG_AND_LIMIT)
    gpusim("fault", machine.name, "gpu-lost", "--gpu", "5")
    gpusim("fault", machine.name, "memory-creep", "--gpu", "6", "--mib-per-minute", "60")
    gpusim("fault", machine.name, "pcie-degraded", "--gpu", "7")
    shown = gpusim("show", machine.name)
    for part in ("instance 13, 1g.10gb, from slot 6", "of 300", "has fallen off the bus", "growing", "5 x8"):
        assert part in shown, shown
    machine.reboot()
    assert machine.wait_until_booted() == "running"
    # A slot that is worn stays so.
    assert "pcie-degraded (GPU 7, until clear): pcie_width = 8" in gpusim("show", machine.name)
    gpusim("clear", machine.name)
    after = json.loads(gpusim("show", machine.name, "--json"))
    assert after["gpus"] == before
    assert after["events"] == []  # as with the kernel's log


ENGINE = r"""
set -e
cd /etc/systemd/system
printf '[Service]\nExecStart=/bin/bash -c "exec -a VLLM::EngineCore sleep 600"\n' > gpuready-engine@.service
mkdir -p /run/gpuready/chat.0 /var/lib/gpuready/releases/chat/1
printf 'GPUREADY_RELEASE=1\nGPUREADY_GPU_UUIDS=%s\n' "$1" > /run/gpuready/chat.0/devices.env
echo '{"memory": {"budget_gib": 71.25}}' > /var/lib/gpuready/releases/chat/1/plan.json
systemctl daemon-reload
systemctl start gpuready-engine@chat.0.service
"""


def wait_for(what: Callable[[], bool]) -> None:
    """Wait until something holds."""
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.3)


def test_an_engine_shows_up_as_a_process_with_its_planned_memory(machine: Machine) -> None:
    file = machine.root / state_file.PATH.lstrip("/")
    uuid = state_file.read(file).gpus[4].get("uuid")
    machine.ssh(f"bash -s {uuid}", stdin=ENGINE)
    wait_for(lambda: bool(inside(machine)[4]["processes"]))
    ((pid, used),) = inside(machine)[4]["processes"]
    assert used == int(71.25 * 2**30)
    assert str(pid) in machine.ssh(["systemctl", "show", "--property=MainPID", "gpuready-engine@chat.0"]).stdout
    machine.ssh(["systemctl", "stop", "gpuready-engine@chat.0"])
    wait_for(lambda: state_file.read(file).gpus[4].all("process") == [])


@pytest.mark.long
def test_a_real_engine_shows_up_too(finished: Machine) -> None:
    plan = json.loads(finished.ssh(["cat", "/var/lib/gpuready/plan.json"]).stdout)
    (one,) = plan["deployments"]
    file = finished.root / state_file.PATH.lstrip("/")
    wait_for(lambda: any(gpu.all("process") for gpu in state_file.read(file).gpus))
    gpus = state_file.read(file).gpus
    held = {index: gpu.all("process") for index, gpu in enumerate(gpus) if gpu.all("process")}
    assert list(held) == one["replicas"][0]["gpus"]
    ((line,),) = held.values()
    assert int(line.split()[1]) == int(one["memory"]["budget_gib"] * 2**30)


def test_new_servers_have_gpus_of_their_own_and_copies_keep_theirs(sim: Sim, machines: Factory) -> None:
    said: list[str] = []
    names = ["t-copy-a", "t-copy-b"]
    try:
        for name in names:
            lifecycle.up(sim, name, say=said.append)
        uuids = [{gpu.get("uuid") for gpu in _gpus(sim, name)} for name in names]
        assert uuids[0].isdisjoint(uuids[1])
        assert [line for line in said if line.startswith("copied the image ")]
        assert [line.split(", ")[0] for line in said if " is running at " in line][-1].startswith("t-copy-b is running")
        with sim.lock():
            Machine(sim, names[0]).save_as_image("t-copied")
            Machine(sim, names[1]).destroy()
        lifecycle.up(sim, names[1], "t-copied")
        assert {gpu.get("uuid") for gpu in _gpus(sim, names[1])} == uuids[0]
    finally:
        with sim.lock():
            for name in names:
                Machine(sim, name).destroy()
            pool.delete(sim, sim.pool / "images/t-copied")


def _gpus(sim: Sim, name: str) -> list[state_file.Section]:
    return state_file.read(Machine(sim, name).root / state_file.PATH.lstrip("/")).gpus

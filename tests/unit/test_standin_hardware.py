from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from sim.hardware.describe import load_server, names
from sim.hardware.state_text import render_state
from sim.machine import image
from tests.unit.standin import CHECKOUT

from gpuready.hardware import pci

INSTALL = CHECKOUT / "sim/hardware/install.py"


def install(root: Path, *options: str, preset: str = "h100-80gb-sxm-x8") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(INSTALL), "--root", str(root), "--preset", preset, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    machine = tmp_path / "machine"
    (machine / "etc").mkdir(parents=True)
    (machine / "usr").mkdir()
    (machine / "etc/hostname").write_text("h100-sg-01\n", encoding="ascii")
    return machine


def files(root: Path) -> dict[str, bytes | str]:
    return {
        str(path.relative_to(root)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_the_machine_has_the_pci_devices_of_a_dgx_h100(root: Path) -> None:
    assert install(root).returncode == 0
    devices = pci.scan(root / "usr/lib/gpuready-standin/pci")

    # The baseboard's addresses (github.com/easydiffusion/torchruntime/issues/24) and its NVSwitches'
    # (github.com/bigstack-oss/cubecos/issues/259).
    gpus = pci.gpus(devices)
    buses = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
    assert [gpu.address for gpu in gpus] == [f"0000:{bus}:00.0" for bus in buses]
    assert {(gpu.ids, gpu.class_code, gpu.subsystem_device, gpu.revision) for gpu in gpus} == {
        ("10de:2330", 0x030200, 0x16C1, 0xA1)
    }
    assert [gpu.numa_node for gpu in gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {(gpu.link_speed_gts, gpu.max_link_width) for gpu in gpus} == {(32.0, 16)}
    switches = pci.nvswitches(devices)
    assert [(switch.address, switch.ids) for switch in switches] == [
        (f"0000:0{bus}:00.0", "10de:22a3") for bus in (5, 6, 7, 8)
    ]
    assert switches[0].subsystem_vendor is None
    assert (gpus[0].driver, switches[0].driver) == ("nvidia", None)
    assert len(pci.nvmes(devices)) == 4


def test_a_dgx_a100_contradicts_it(root: Path) -> None:
    assert install(root, preset="a100-80gb-sxm-x8").returncode == 0
    devices = pci.scan(root / "usr/lib/gpuready-standin/pci")

    assert Counter(gpu.ids for gpu in pci.gpus(devices)) == {"10de:20b2": 8}
    assert Counter(switch.ids for switch in pci.nvswitches(devices)) == {"10de:1af1": 6}


@pytest.mark.skipif(shutil.which("lspci") is None, reason="pciutils is not installed")
def test_real_lspci_reads_the_tree(root: Path) -> None:
    assert install(root).returncode == 0
    sysfs = root / "sys/bus/pci"
    sysfs.mkdir(parents=True)
    (sysfs / "devices").symlink_to(root / "usr/lib/gpuready-standin/pci")
    shown = subprocess.run(
        ["lspci", "-A", "linux-sysfs", "-O", f"sysfs.path={sysfs}", "-n", "-d", "10de:"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout

    assert "1b:00.0 0302: 10de:2330 (rev a1)" in shown.splitlines()
    assert "05:00.0 0680: 10de:22a3 (rev a1)" in shown.splitlines()


def test_a_second_run_changes_nothing(root: Path) -> None:
    first = install(root)
    before = files(root)
    second = install(root)

    assert first.returncode == 0
    assert "var/lib/gpuready-standin/gpus.conf" in first.stdout.splitlines()
    assert (second.returncode, second.stdout) == (0, "")
    assert files(root) == before


def test_everything_is_named_a_stand_in_and_the_unit_is_enabled(root: Path) -> None:
    assert install(root).returncode == 0
    added = [path for path in files(root) if path != "etc/hostname"]

    names = {path: content for path, content in files(root).items() if path in added and "standin" not in path}
    assert names == {"usr/bin/nvidia-smi": "/usr/lib/gpuready-standin/nvidia-smi-standin"}
    unit = "gpuready-standin-hardware.service"
    assert files(root)[f"etc/systemd/system/sysinit.target.wants/{unit}"] == f"../{unit}"
    assert "ConditionVirtualization=container" in (root / "etc/systemd/system" / unit).read_text(encoding="utf-8")


@pytest.mark.parametrize("driver", [(), ("--no-driver",)])
def test_what_engines_lack_on_a_cpu_is_there_and_named_in_the_marker(root: Path, driver: tuple[str, ...]) -> None:
    stale = root / image.STANDINS / "an_older_one_standin/vllm.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert install(root, *driver).returncode == 0
    operator = root / image.STANDINS / "sglang_cpu_standin/vllm/_custom_ops.py"
    ours = CHECKOUT / "sim/engines/sglang_cpu_standin/vllm/_custom_ops.py"
    assert (operator.read_bytes(), operator.stat().st_mode & 0o777) == (ours.read_bytes(), 0o644)
    (root / "var").mkdir(exist_ok=True)
    image._mark(root, "some-image")
    marker = json.loads((root / image.MARKER).read_text(encoding="utf-8"))
    assert marker["standins"] == ["sglang_cpu_standin"]


def test_another_preset_replaces_the_devices_and_keeps_none(root: Path) -> None:
    install(root)
    install(root, preset="a100-80gb-sxm-x8")
    switched = files(root)
    fresh = root.parent / "fresh"
    shutil.copytree(root / "etc", fresh / "etc", symlinks=True)
    (fresh / "usr").mkdir()
    install(fresh, preset="a100-80gb-sxm-x8")

    assert switched == files(fresh)


def test_without_a_driver_there_are_only_pci_devices(root: Path) -> None:
    install(root)
    assert install(root, "--no-driver").returncode == 0
    left = files(root)

    assert {gpu.driver for gpu in pci.gpus(pci.scan(root / "usr/lib/gpuready-standin/pci"))} == {None}
    assert "usr/lib/gpuready-standin/pci/0000:1b:00.0/vendor" in left
    assert [path for path in left if "nvidia-ml" in path or path.endswith(("gpus.conf", ".conf", "devices"))] == []


@pytest.mark.parametrize("driver", [(), ("--no-driver",)])
def test_debian_s_own_nvidia_smi_stays(root: Path, driver: tuple[str, ...]) -> None:
    install(root)
    smi = root / "usr/bin/nvidia-smi"
    smi.unlink()
    smi.symlink_to("/etc/alternatives/nvidia--nvidia-smi")  # as update-alternatives leaves it
    assert install(root, *driver).returncode == 0

    assert files(root)["usr/bin/nvidia-smi"] == "/etc/alternatives/nvidia--nvidia-smi"


def test_the_stand_in_nvidia_smi_goes_with_the_driver(root: Path) -> None:
    install(root)
    install(root, "--no-driver")

    assert [path for path in files(root) if "nvidia-smi" in path or path.endswith("/gpus-standin")] == []


def test_no_two_machines_share_a_gpu(root: Path) -> None:
    server = load_server("h100-80gb-sxm-x8")

    def identities(machine: str) -> set[str]:
        text = render_state(server, machine)
        return {line for line in text.splitlines() if line.startswith(("uuid", "serial"))}

    assert len(identities("h100-sg-01") | identities("h100-sg-02")) == 32
    assert identities("h100-sg-01") == identities("h100-sg-01")


def test_a_running_system_is_refused() -> None:
    done = install(Path("/"))

    assert done.returncode == 2
    assert done.stderr == (
        "install.py: the stand-in hardware is never installed into a running system;"
        " give the root directory of a simulated machine.\n"
    )


def test_an_unknown_preset_is_refused_and_the_known_ones_are_named(root: Path) -> None:
    done = install(root, preset="h100")

    assert done.returncode == 2
    assert done.stderr == f"install.py: there is no preset 'h100'; known are: {', '.join(names('presets'))}.\n"
    assert list(files(root)) == ["etc/hostname"]


def test_a_directory_that_is_no_machine_is_refused(tmp_path: Path) -> None:
    done = install(tmp_path)

    assert done.returncode == 2
    assert done.stderr == f"install.py: {tmp_path} is not the root of a machine (no etc and usr in it).\n"


def test_a_description_is_checked_without_a_machine() -> None:
    command = [sys.executable, str(INSTALL), "--check", "--preset"]
    right = subprocess.run([*command, "t4-x1"], capture_output=True, text=True, check=False)
    wrong = subprocess.run([*command, "none.yaml"], capture_output=True, text=True, check=False)

    assert (right.returncode, right.stdout, right.stderr) == (0, "", "")
    assert (wrong.returncode, wrong.stderr) == (2, "install.py: none.yaml cannot be read: No such file or directory.\n")


def test_a_python_that_cannot_read_yaml_is_told_what_to_do(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(INSTALL), "--root", str(root), "--preset", "t4-x1"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert done.stderr == (
        "install.py: the Python module yaml is missing; run ./scripts/setup, and this with .venv/bin/python.\n"
    )
    assert list(files(root)) == ["etc/hostname"]


def test_a_name_that_would_break_the_state_file_is_refused(root: Path) -> None:
    done = install(root, "--machine", "a\ninit_error = 9")

    assert done.returncode == 2
    assert done.stderr == (
        "install.py: 'a\\ninit_error = 9' cannot be a machine's name: take up to 64 letters, digits, dots and dashes.\n"
    )

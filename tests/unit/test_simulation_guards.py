"""What keeps the simulation away from servers with real GPUs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.unit.standin import CHECKOUT

FILES = CHECKOUT / "sim/hardware/files"
PRODUCT = ("site.yml", "ansible.cfg", "playbooks", "roles", "plugins", "templates", "src", "inventories/example")


KNOWN = re.compile(
    rb"[-_]standin|standin[-_]|sim/hardware|sim/nvml|sim/machine|sim/engines|sim\.hardware|scripts/gpusim"
)
STACKS = CHECKOUT / "src/gpuready/catalog/stacks.yaml"


def test_nothing_that_site_yml_runs_knows_the_simulation() -> None:
    paths = [CHECKOUT / name for name in PRODUCT]
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    assert len(files) > 100
    assert [str(file) for file in files if file != STACKS and KNOWN.search(file.read_bytes())] == []


def test_only_a_stack_for_simulated_servers_names_a_stand_in() -> None:
    """What an engine lacks on a CPU is named there; without the marker of the machine it is not even looked for."""
    stacks = yaml.safe_load(STACKS.read_text(encoding="utf-8"))["stacks"]
    simulated = {name: stack for name, stack in stacks.items() if stack["simulated_only"]}
    assert sorted(simulated) == ["cpu"]
    for name, stack in stacks.items():
        for entry in stack["engines"].values():
            named = entry.get("standin")
            assert named is None or name in simulated
            assert named is None or (CHECKOUT / "sim/engines" / named).is_dir()
            told = yaml.safe_dump({**entry, "standin": None}).encode()
            assert KNOWN.search(told) is None or named is not None, (name, entry)


@pytest.mark.parametrize("unit", sorted(file.name for file in FILES.glob("*.service")))
def test_every_unit_is_a_stand_in_for_containers_alone(unit: str) -> None:
    assert "standin" in unit
    lines = (FILES / unit).read_text(encoding="ascii").splitlines()
    assert "ConditionVirtualization=container" in lines


def test_real_hardware_ends_the_unit_before_it_changes_anything(tmp_path: Path) -> None:
    bus = tmp_path / "bus"
    (bus / "0000:17:00.0").mkdir(parents=True)
    (bus / "0000:17:00.0/vendor").write_text("0x10de\n", encoding="ascii")
    script = (FILES / "hardware-standin").read_text(encoding="utf-8")
    for real, ours in (("/sys/bus/pci/devices", bus), ("/run/gpuready-standin", tmp_path / "run")):
        assert real in script
        script = script.replace(real, str(ours))
    # Nothing else than grep is found: were the guard gone, nothing would be mounted on this machine.
    grep = shutil.which("grep")
    assert grep
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/grep").symlink_to(grep)
    done = subprocess.run(
        ["/bin/sh", "-s", "start"],
        input=script,
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "hardware-standin: this machine has real NVIDIA hardware; nothing is simulated on it\n"
    assert not (tmp_path / "run").exists()

"""The machine builder itself, on real booted machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sim.machine import pool, process
from sim.machine.common import CHECKOUT, Sim, SimError
from sim.machine.machine import Machine
from tests.machines.conftest import Factory, Play

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module")
def machine(machines: Factory) -> Machine:
    return machines("builder")


def test_a_clone_boots_well_and_is_a_blank_server(machine: Machine) -> None:
    assert machine.ssh(["systemctl", "is-system-running"]).stdout.strip() == "running"
    assert machine.ssh(["hostname"]).stdout.strip() == machine.name
    marker = json.loads(machine.ssh(["cat", "/etc/gpuready-simulated-machine"]).stdout)
    assert marker["builder"] == "gpuready sim/machine"
    assert marker["image"].startswith("trixie-")
    for absent in ("nft", "haproxy", "gcc", "pip3"):
        assert machine.ssh(f"command -v {absent}", check=False).returncode != 0, absent


def test_apt_works_and_its_downloads_are_kept_for_the_next_machine(machine: Machine) -> None:
    machine.ssh("apt-get update -q && apt-get install -y -q --reinstall hostname", timeout=180)
    machine.stop()
    kept = sorted((CHECKOUT / ".cache/apt/trixie").glob("hostname_*.deb"))
    assert kept
    machine.start()
    machine.wait_for_ssh()
    assert kept[0].name in machine.ssh(["ls", "/var/cache/apt/archives"]).stdout


def test_a_reboot_keeps_data_and_changes_the_boot_id(machine: Machine) -> None:
    machine.ssh("echo kept > /root/data && sync")
    before, pid = machine.boot_id(), machine.record.pid
    machine.reboot()
    assert machine.boot_id() != before
    assert machine.record.pid == pid
    assert machine.ssh(["cat", "/root/data"]).stdout == "kept\n"
    assert machine.wait_until_booted() == "running"


@pytest.mark.long
def test_it_starts_again_after_the_plug_was_pulled(machine: Machine) -> None:
    machine.ssh("echo still > /root/data && sync")
    machine.kill()
    assert machine.status() == "stopped"
    assert not process.port_open(machine.address, 22)
    machine.start()
    assert machine.wait_until_booted() == "running"
    assert machine.ssh(["cat", "/root/data"]).stdout == "still\n"


@pytest.mark.long
def test_a_machine_saved_as_image_is_cloned_with_an_identity_of_its_own(
    sim: Sim, machine: Machine, machines: Factory
) -> None:
    identity = "cat /etc/machine-id /etc/ssh/ssh_host_ed25519_key.pub; hostname"
    machine.ssh("btrfs --version >/dev/null 2>&1; echo saved > /root/data")
    own = machine.ssh(identity).stdout
    name = f"t-image-{os.getpid()}"
    with sim.lock():
        machine.save_as_image(name)
    try:
        clone = machines("clone", name)
        assert clone.ssh(["cat", "/root/data"]).stdout == "saved\n"
        assert not set(clone.ssh(identity).stdout.split()) & set(own.split()) - {"ssh-ed25519", f"root@{os.uname()[1]}"}
        machines.give_back(clone)
        assert clone.status() == "absent"
    finally:
        pool.delete(sim, sim.pool / "images" / name)
        machine.start()
        machine.wait_for_ssh()


def test_names_and_addresses_are_given_once(sim: Sim, machine: Machine) -> None:
    base = machine.record.image
    with sim.lock():
        with pytest.raises(SimError, match="exists"):
            machine.create(base, "trixie")
        with pytest.raises(SimError, match=f"belongs to the machine {machine.name}"):
            Machine(sim, f"{machine.name}-b").create(base, "trixie", machine.address)


@pytest.mark.long
def test_what_crashed_while_building_is_never_taken_for_whole(sim: Sim, machines: Factory) -> None:
    name = f"t-{os.getpid()}-crash"
    half = pool.scratch(sim, name)
    pool.create(half)
    (half / "rubbish").touch()
    made = machines("crash", start=False)
    assert not (made.root / "rubbish").exists()
    assert not half.exists()
    machines.give_back(made)


def test_ansible_reaches_a_machine_with_the_simulation_s_variables(
    machine: Machine, play: Play, tmp_path: Path
) -> None:
    if not (CHECKOUT / ".venv/bin/ansible-playbook").exists():
        pytest.skip("there is no .venv; run scripts/setup")
    book = tmp_path / "book.yml"
    book.write_text(
        "- hosts: h100-sg\n  gather_facts: false\n  tasks:\n"
        "    - ansible.builtin.command: {cmd: hostname}\n      register: said\n"
        "    - ansible.builtin.assert: {that: [said.stdout == wanted, inside == 7]}\n"
    )
    played = play(machine, str(book), {"wanted": machine.name}, group_vars={"inside": 7})
    assert played.rc == 0, played.stdout
    assert played.recap["h100-sg-01"]["ok"] == 2
    assert played.recap["h100-sg-01"]["failed"] == 0


def _in_own_network(state: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run shell in a network of its own, so that this machine's settings stay untouched."""
    env = {**os.environ, "GPUREADY_SIM_STATE": str(state), "GPUREADY_SIM_SUBNET": "10.88.3.0/24", "PY": sys.executable}
    return subprocess.run(
        ["unshare", "--net", "bash", "-ec", script],
        cwd=CHECKOUT,
        env=env,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


@pytest.mark.long
def test_down_removes_everything_and_restores_ip_forward(sim: Sim) -> None:
    state = Path(f"/var/lib/gpuready-sim-t-{os.getpid()}")
    # The second pool stays empty: what a machine would need on the disk is not asked for.
    up = (
        "from sim.machine import pool; pool.NEEDED_TO_MAKE = pool.LEFT_TO_THE_HOST = pool.GIB\n"
        "from sim.machine.common import Sim; from sim.machine.machine import ready; s = Sim.from_environment()\n"
        "with s.lock(): ready(s)"
    )
    done = _in_own_network(
        state,
        f"""
        ip link set lo up
        for former in 0 1; do
            echo $former > /proc/sys/net/ipv4/ip_forward
            "$PY" -c '{up}'
            "$PY" -c '{up}'
            test "$(cat /proc/sys/net/ipv4/ip_forward)" = 1
            nft list ruleset | grep -c 'ip saddr 10.88.3.0/24'
            mountpoint -q {state}/pool
            btrfs -q subvolume create {state}/pool/machines/x
            "$PY" scripts/gpusim down
            test "$(cat /proc/sys/net/ipv4/ip_forward)" = $former
            test -z "$(nft list ruleset)"
            test "$(ip -o link | grep -c gpusim)" = 0
            test ! -e {state}
        done
        "$PY" scripts/gpusim down
    """,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "net.ipv4.ip_forward is 0 again" in done.stdout
    assert done.stdout.strip().endswith("nothing was up")
    loops = subprocess.run(["losetup", "--list", "--output", "BACK-FILE"], text=True, capture_output=True, check=True)
    assert str(state) not in loops.stdout


def test_a_range_in_use_is_refused_before_anything_changes(sim: Sim) -> None:
    state = Path(f"/var/lib/gpuready-sim-t-{os.getpid()}")
    done = _in_own_network(
        state,
        """
        ip link add other type bridge
            ip addr add 10.88.3.9/16 dev other
        "$PY" scripts/gpusim create t-refused
    """,
    )
    assert done.returncode == 3
    assert "10.88.3.0/24 is already used by 10.88.3.9/16 on other" in done.stderr
    assert "Traceback" not in done.stderr
    assert not state.exists()

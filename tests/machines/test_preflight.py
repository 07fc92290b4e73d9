"""Preflight on booted servers: every refusal is a sentence, comes before any change, and leaves other hosts alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sim.machine.machine import Machine
    from tests.machines.conftest import Factory

pytestmark = pytest.mark.machine

ROOT = Path(__file__).resolve().parents[2]
DECLARED: dict[str, Any] = yaml.safe_load((ROOT / "inventories/sim/group_vars/h100-sg.yml").read_text())
# What a refused run must leave as it was: packages, our folders, users, listening sockets.
STATE = "dpkg-query -W | sha256sum; ls -d /opt/gpuready /etc/gpuready /var/lib/gpuready; getent passwd | sha256sum"


@pytest.fixture(scope="module")
def fresh(machines: Factory) -> Iterator[Machine]:
    """A blank server that all refusals share: none of them may change it."""
    machine = machines("refusals")
    yield machine
    machines.give_back(machine)


def deployments(**change: Any) -> list[dict[str, Any]]:
    (one,) = copy.deepcopy(DECLARED["gpuready_deployments"])
    return [{**one, **change}]


def real_model(path: str) -> list[dict[str, Any]]:
    return deployments(model="org/model", model_path=path)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (
            {"gpuready_gpu_model": "a100-80gb-sxm"},
            ["gpuready_gpu_model = a100-80gb-sxm is contradicted by the hardware", "h100-80gb-sxm (10de:2330)"],
        ),
        ({"gpuready_gpu_count": 16}, ["gpuready_gpu_count = 16, but the PCI bus shows 8 NVIDIA GPUs"]),
        ({"gpuready_stack": "cu1288"}, ["gpuready_stack = 'cu1288': no such stack", "did you mean cu128?"]),
        ({"gpuready_deployment": []}, ["gpuready_deployment: no such variable; did you mean gpuready_deployments?"]),
        ({"gateway_prot": 80}, ["gateway_prot: no such variable; did you mean gateway_port?"]),
        ({"gateway_port": "door"}, ["gateway_port = 'door' is refused"]),
        ({"base_shm_percent": 200}, ["base_shm_percent = 200 is refused", "1 to 95, or null"]),
        (
            {"gpuready_deployments": deployments(gpus=9)},
            ["deployments ask for 9 GPUs (chat 9)", "gpuready_gpu_count is 8"],
        ),
        ({"gpuready_deployments": deployments(enigne="x")}, ["[0].enigne: no such key; did you mean engine?"]),
        ({"gpuready_deployments": real_model("/data/none")}, ["/data/none does not exist"]),
        ({"gpuready_simulated": False}, ["is a simulated server, but gpuready_simulated is not true"]),
        ({"gpuready_expect": {"nvswitch_count": 6}}, ["gpuready_expect.nvswitch_count = 6, but the server has 4"]),
        ({"gpuready_expect": {"ram_gib": 9000}}, ["gpuready_expect.ram_gib = 9000, but the server has"]),
    ],
)
def test_refused_in_a_sentence_before_any_change(
    fresh: Machine, play: Callable[..., Any], extra: dict[str, Any], words: list[str]
) -> None:
    before = fresh.ssh(STATE, check=False).stdout
    played = play(fresh, "site.yml", extra)
    assert played.rc == 2, played.stdout
    assert all(word in played.stdout for word in words), played.stdout
    assert played.recap["h100-sg-01"]["changed"] == 0
    assert "Traceback" not in played.stdout
    assert fresh.ssh(STATE, check=False).stdout == before


def test_the_marker_alone_or_the_word_alone_is_refused(blank: Machine, play: Callable[..., Any]) -> None:
    blank.ssh("rm /etc/gpuready-simulated-machine")
    played = play(blank, "playbooks/preflight.yml")
    assert played.rc == 2
    assert "was not made by this checkout's machine builder" in played.stdout


@pytest.mark.long
def test_several_faults_are_said_at_once(fresh: Machine, play: Callable[..., Any]) -> None:
    extra = {"gpuready_gpu_model": "a100-80gb-sxm", "gpuready_foo": 1, "gpuready_deployments": deployments(gpus=9)}
    played = play(fresh, "site.yml", extra)
    assert played.rc == 2
    for words in ("contradicted by the hardware", "gpuready_foo: no such variable", "deployments ask for 9 GPUs"):
        assert words in played.stdout, played.stdout


def test_a_host_that_is_down_does_not_stop_the_others(fresh: Machine, play: Callable[..., Any], sim: Any) -> None:
    hosts = {"h100-sg-01": fresh, "h100-sg-02": sim.address(250)}
    played = play(hosts, "playbooks/preflight.yml")
    assert played.rc == 4, played.stdout
    assert f"host h100-sg-02 ({sim.address(250)}) cannot be reached: " in played.stdout
    assert "leave it out with --limit" in played.stdout
    assert played.recap["h100-sg-02"]["unreachable"] == 1
    assert played.recap["h100-sg-01"]["failed"] == 0
    assert "h100-sg-01: chat:" in played.stdout, "the other host has its plan"


def test_a_full_disk(fresh: Machine, play: Callable[..., Any]) -> None:
    # A disk of its own for /opt: small is as good as full, and the pool of the test machines stays free.
    fresh.ssh("mkdir -p /opt/gpuready && mount -t tmpfs -o size=300M none /opt/gpuready")
    try:
        played = play(fresh, "playbooks/preflight.yml")
    finally:
        fresh.ssh("umount /opt/gpuready && rmdir /opt/gpuready")
    assert played.rc == 2
    assert "/opt/gpuready has 0.3 GiB free" in played.stdout
    assert "are needed for /opt/gpuready; free space on /opt/gpuready" in played.stdout


@pytest.mark.long
def test_a_repository_that_does_not_answer(blank: Machine, play: Callable[..., Any]) -> None:
    blank.ssh("echo 'deb [trusted=yes] http://127.0.0.1:9 nowhere main' > /etc/apt/sources.list.d/dead.list")
    played = play(blank, "playbooks/preflight.yml")
    assert played.rc == 2
    assert "the package source http://127.0.0.1:9 (nowhere) does not answer: " in played.stdout


@pytest.mark.long
def test_the_gateways_port_is_taken_by_someone_else(blank: Machine, play: Callable[..., Any]) -> None:
    blank.ssh(
        "systemd-run --unit squatter python3 -m http.server 8080; for i in 1 2 3 4 5 6 7 8 9; do "
        "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8080))' && break; sleep 0.5; done"
    )
    played = play(blank, "playbooks/preflight.yml")
    assert played.rc == 2
    assert "gateway_port = 8080 is taken by python3" in played.stdout


@pytest.mark.long
def test_a_lost_gpu_is_named(blank: Machine, play: Callable[..., Any]) -> None:
    blank.ssh("sed -i '0,/^\\[gpu 3\\]/s//[gpu 3]\\nlost = 1/' /var/lib/gpuready-standin/gpus.conf")
    played = play(blank, "playbooks/preflight.yml")
    assert played.rc == 2
    assert "GPU 3 does not answer the driver" in played.stdout


@pytest.mark.long
def test_a_driver_of_another_version_than_its_library_is_named(blank: Machine, play: Callable[..., Any]) -> None:
    blank.ssh("sed -i '0,/^\\[system\\]/s//[system]\\ninit_error = 18/' /var/lib/gpuready-standin/gpus.conf")
    played = play(blank, "playbooks/preflight.yml")
    assert played.rc == 2
    assert "the NVIDIA driver does not answer" in played.stdout

"""The whole job: a second run changes nothing; check mode is silent on a finished server, truthful on a blank one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sim.machine.machine import Machine
from tests.machines.conftest import Factory

pytestmark = pytest.mark.machine


def test_a_second_run_changes_nothing(finished: Machine, play: Callable[..., Any]) -> None:
    played = play(finished)
    assert played.rc == 0, played.stdout
    assert played.recap["h100-sg-01"]["changed"] == 0, played.stdout
    assert played.recap["h100-sg-01"]["failed"] == 0


def test_check_mode_is_silent_on_a_finished_server(finished: Machine, play: Callable[..., Any]) -> None:
    played = play(finished, "site.yml", None, "--check", "--diff")
    assert played.rc == 0, played.stdout
    assert played.recap["h100-sg-01"]["changed"] == 0, played.stdout
    assert "+++ after" not in played.stdout


def test_check_mode_on_a_blank_server_says_what_would_come_and_changes_nothing(
    blank: Machine, play: Callable[..., Any]
) -> None:
    state = "dpkg-query -W | sha256sum; find /etc /opt /srv /usr/local -xdev -newer /etc/machine-id -type f | sort"
    before = blank.ssh(state).stdout
    played = play(blank, "site.yml", None, "--check", "--diff")
    assert played.rc == 0, played.stdout
    for words in ("package nvidia-cuda-toolkit", "package haproxy", "vllm 0.32.0 from lock", "served-model-name"):
        assert words in played.stdout
    for words in (
        "nvcc is CUDA 12.4",
        "nft takes",
        "vllm 0.32.0 can be built",
        "haproxy takes haproxy.cfg",
        "chat.0 comes up",
    ):
        assert f"decided after install: whether {words}" in played.stdout
    assert blank.ssh(state).stdout == before


HEADER = re.compile(r"^\+\+\+ after: (.*)$", re.MULTILINE)
# What is proved, or read from what was installed, is written down after it: check mode says that it cannot know it.
DECIDED_LATER = {"/var/lib/gpuready/host.json", "/var/lib/gpuready/cuda.json"}


@pytest.mark.long
def test_a_run_does_what_check_mode_said(blank: Machine, play: Callable[..., Any]) -> None:
    said = set(HEADER.findall(play(blank, "site.yml", None, "--check", "--diff").stdout))
    played = play(blank, "site.yml", None, "--diff")
    assert played.rc == 0, played.stdout
    did = set(HEADER.findall(played.stdout))
    assert did - said <= DECIDED_LATER
    # A package that an earlier stage's packages bring along is there when its own stage asks for it.
    brought = {name.removeprefix("package ") for name in said - did}
    assert all(name.startswith("package ") for name in said - did), said - did
    blank.ssh(["dpkg-query", "-W", "dpkg", *brought])


# Files of an operator, in folders where we write, too: a job with a %, settings that are read before and after ours.
FOREIGN = {
    "/etc/cron.d/own-jobs": "MAILTO=root\n5 4 * * * root date +\\%F >> /var/log/own\n",
    "/etc/sysctl.d/10-own.conf": "net.core.somaxconn = 512\n",
    "/etc/sysctl.d/99-own.conf": "net.ipv4.tcp_keepalive_time = 300\n",
    "/etc/security/limits.d/90-own.conf": "own soft nofile 1000\n",
    "/etc/apt/apt.conf.d/99own": 'APT::Periodic::Enable "0";\n',
    "/etc/nftables.conf": "#!/usr/sbin/nft -f\nflush ruleset\n",
    "/etc/haproxy/haproxy.cfg": "global\n  maxconn 10\n",
    "/etc/systemd/system/own.service": "[Service]\nExecStart=/bin/true\n",
    "/srv/models/own/weights.bin": "weights\n",
    "/opt/own/file": "own\n",
}
OWN_LINE = "LABEL=own /mnt/own ext4 noauto,nofail 0 2"


@pytest.mark.long
def test_what_an_operator_has_stays_byte_by_byte(
    machines: Factory, prepared_image: str, play: Callable[..., Any]
) -> None:
    machine = machines("foreign", prepared_image)
    for path, text in FOREIGN.items():
        machine.ssh(f"mkdir -p {Path(path).parent}; cat > {path}", stdin=text)
    machine.ssh(f"echo '{OWN_LINE}' >> /etc/fstab")
    played = play(machine)
    assert played.rc == 0, played.stdout
    for path, text in FOREIGN.items():
        assert machine.ssh(["cat", path]).stdout == text, path
    assert OWN_LINE in machine.ssh(["cat", "/etc/fstab"]).stdout.splitlines()
    assert "net.ipv4.tcp_keepalive_time" in played.stdout, "a setting of the operator that wins is told"
    assert machine.ssh("grep -rl gpuready /etc/cron* /var/spool/cron 2>/dev/null", check=False).stdout == ""
    again = play(machine)
    assert again.recap["h100-sg-01"]["changed"] == 0
    machines.give_back(machine)


def test_a_server_that_serves_has_no_failed_unit(finished: Machine) -> None:
    assert str(finished.ssh("systemctl --failed --no-legend").stdout).strip() == ""


@pytest.mark.parametrize("password", ["", pytest.param("pass word", marks=pytest.mark.long)])
def test_an_operator_who_is_not_root_uses_sudo(finished: Machine, play: Callable[..., Any], password: str) -> None:
    rights = "ALL=(ALL) ALL" if password else "ALL=(ALL) NOPASSWD: ALL"
    finished.ssh(
        f"id ops 2>/dev/null || useradd --create-home --shell /bin/bash ops; "
        f"echo 'ops:{password or 'unused'}' | chpasswd; echo 'ops {rights}' > /etc/sudoers.d/ops; "
        "install -d -o ops -m 700 /home/ops/.ssh; "
        "install -o ops -m 600 /root/.ssh/authorized_keys /home/ops/.ssh/authorized_keys"
    )
    extra = {"ansible_user": "ops", **({"ansible_become_password": password} if password else {})}
    played = play(finished, "site.yml", extra)
    assert played.rc == 0, played.stdout
    assert played.recap["h100-sg-01"]["changed"] == 0
    if password:
        assert password not in played.stdout


@pytest.mark.long
@pytest.mark.parametrize("damage", ["rm", "truncate -s 0", "truncate -s 1000", "truncate -s 100000"])
def test_a_damaged_server_part_is_carried_anew(finished: Machine, play: Callable[..., Any], damage: str) -> None:
    part = "/opt/gpuready/gpuready.pyz"
    finished.ssh(f"{damage} $(readlink -f {part})")
    played = play(finished, "playbooks/agent.yml")
    assert played.rc == 0, played.stdout
    assert played.recap["h100-sg-01"]["changed"] == 1
    assert '"failures": []' in str(finished.ssh(f"{part} facts show --json < /dev/null").stdout)

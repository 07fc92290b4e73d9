"""The whole job: a second run changes nothing; check mode is silent on a finished server, truthful on a blank one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.machine.machine import Machine

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
    assert blank.ssh(state).stdout == before


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

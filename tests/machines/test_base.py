"""The stage base on a booted server: what it leaves, that it can be repeated, and that SSH is never lost."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from sim.machine.machine import Machine
from tests.machines.conftest import Factory, Play, Played

from gpuready.rendering import zipapp

pytestmark = pytest.mark.machine

BASE = "playbooks/base.yml"
TABLE = ["nft", "--stateless", "list", "table", "inet", "gpuready"]


def changed(played: Played) -> int:
    assert played.rc == 0, played.stdout[-3000:]
    return sum(counts["changed"] for counts in played.recap.values())


@pytest.fixture(scope="module")
def untouched(machines: Factory) -> Machine:
    return machines("base")


@pytest.fixture(scope="module")
def first_check(untouched: Machine, play: Play) -> Played:
    return play(untouched, BASE, {}, "--check", "--diff")


@pytest.fixture(scope="module")
def first_run(untouched: Machine, first_check: Played, play: Play) -> Played:
    return play(untouched, BASE)


@pytest.fixture(scope="module")
def server(untouched: Machine, first_run: Played) -> Machine:
    """A server on which the stage has run; a test that changes it brings it back."""
    assert changed(first_run) > 0
    return untouched


def test_check_on_a_blank_server_shows_all_and_changes_nothing(untouched: Machine, first_check: Played) -> None:
    assert changed(first_check) > 0
    for shown in ("+net.core.somaxconn = 16384", '+\t\ttcp dport 8080 accept comment "gateway"', "package nftables"):
        assert shown in first_check.stdout
    for path in ("/usr/sbin/nft", "/etc/gpuready", "/etc/sysctl.d/60-gpuready.conf"):
        assert untouched.ssh(["test", "-e", path], check=False).returncode != 0, path


def test_second_run_changes_nothing(server: Machine, play: Play) -> None:
    again = play(server, BASE)
    assert changed(again) == 0


def test_what_a_container_does_not_allow_is_said(server: Machine, first_run: Played) -> None:
    said = " ".join(first_run.stdout.split())
    assert "not applied here: vm.swappiness" in said
    assert "systemd-timesyncd is installed and cannot run here: a container (systemd-nspawn)" in said
    assert "vm.swappiness = 1" in server.ssh(["cat", "/etc/sysctl.d/60-gpuready.conf"]).stdout
    assert server.ssh(["cat", "/proc/sys/net/core/somaxconn"]).stdout.strip() == "16384"


def test_upgrades_are_kept_from_engines_and_gateway(server: Machine) -> None:
    dump = server.ssh(["apt-config", "dump"]).stdout
    assert 'Unattended-Upgrade::Package-Blacklist:: "haproxy";' in dump
    script = (
        'do "/etc/needrestart/conf.d/gpuready.conf"; for my $unit (@ARGV) '
        '{ print grep({ $unit =~ $_ } keys %{$nrconf{override_rc}}) ? "kept " : "restarted " }'
    )
    units = ["gpuready-engine@chat.0.service", "gpuready-gateway.service", "ssh.service"]
    verdict = server.ssh(["perl", "-e", f"our %nrconf; {script}", *units]).stdout
    assert verdict.split() == ["kept", "kept", "restarted"]


# The stage makes one call of all steps; these tests take one step of it at a time, without Ansible's seconds around it.
STEP = """
import json, sys
sys.path.insert(0, "/root/part.pyz")
from gpuready.operations import firewall, firewall_rules, packages
from gpuready.operations.machine import Machine
from gpuready.outcome import Refusal
step, check = sys.argv[1], "--check" in sys.argv
try:
    if step == "firewall":
        result = firewall.apply(Machine(), firewall_rules.wanted_from(json.load(sys.stdin)), check)
    elif step == "confirm":
        result = firewall.confirm(Machine(), check)
    else:
        result = packages.ensure(Machine(), packages.Wanted(**json.load(sys.stdin)), check)
except Refusal as refusal:
    print(refusal, file=sys.stderr)
    sys.exit(int(refusal.exit))
print(json.dumps(result.as_dict()))
"""


@pytest.fixture(scope="module")
def part(server: Machine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The words that take one step of the stage on the server."""
    local: Path = zipapp.build().write_to(tmp_path_factory.mktemp("part"))
    with local.open("rb") as file:
        subprocess.run(server.ssh_argv(["sh", "-c", "cat > /root/part.pyz"]), stdin=file, check=True)
    server.ssh("cat > /root/step.py", stdin=STEP)
    return "python3 /root/step.py"


DECLARED = {"open": [{"port": 8080, "comment": "gateway"}], "ssh_ports": [22], "engine_ports": [18100]}
TRIAL = {"open": [{"port": 9001}], "ssh_ports": [22], "revert_seconds": 600}


def load(machine: Machine, part: str, rules: dict[str, Any], *options: str) -> dict[str, Any]:
    """Put rules on trial; return the result."""
    done = machine.ssh(f"{part} firewall {' '.join(options)}", stdin=json.dumps(rules))
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def keep(machine: Machine, part: str) -> None:
    """Confirm over a connection of its own."""
    machine.ssh(f"{part} confirm")


def test_the_stage_asks_for_exactly_these_rules(server: Machine, part: str) -> None:
    assert load(server, part, DECLARED, "--check")["changed"] is False


def test_a_table_that_was_deleted_by_hand_is_repaired_and_others_are_never_touched(server: Machine, part: str) -> None:
    right = server.ssh(TABLE).stdout
    server.ssh("nft add table ip other && nft delete table inet gpuready")
    assert load(server, part, DECLARED)["data"]["confirm"] is True
    keep(server, part)
    assert sorted(server.ssh(["nft", "list", "tables"]).stdout.splitlines()) == [
        "table inet gpuready",
        "table ip other",
    ]
    assert server.ssh(TABLE).stdout == right
    server.ssh("nft delete table ip other")


@pytest.mark.long
def test_a_rule_that_was_deleted_by_hand_is_seen(server: Machine, part: str) -> None:
    right = server.ssh(TABLE).stdout
    server.ssh(
        "nft delete rule inet gpuready input handle $(nft -a list table inet gpuready | sed -n 's/.*8080.* //p')"
    )
    diff = load(server, part, DECLARED)["diff"]
    assert [(one["before"].count("8080"), one["after"]) for one in diff] == [(0, right)]
    keep(server, part)
    assert server.ssh(TABLE).stdout == right


def reachable(machine: Machine) -> bool:
    argv = machine.ssh_argv(["true"])
    options = ["-o", "ConnectTimeout=2", "-o", "ControlPath=none"]
    return subprocess.run([argv[0], *options, *argv[1:]], check=False, capture_output=True).returncode == 0


@pytest.mark.long
def test_rules_that_block_ssh_are_taken_back(server: Machine, play: Play) -> None:
    before = server.ssh([*TABLE]).stdout, server.ssh(["cat", "/etc/gpuready/firewall.nft"]).stdout
    blocking: dict[str, Any] = {"base_firewall_ssh_sources": ["192.0.2.9/32"], "base_firewall_revert_seconds": 20}
    played = play(server, BASE, blocking)
    assert played.rc != 0
    said = " ".join(played.stdout.split())
    assert "were not confirmed" in said
    assert reachable(server)
    assert (server.ssh([*TABLE]).stdout, server.ssh(["cat", "/etc/gpuready/firewall.nft"]).stdout) == before
    assert "not confirmed in time" in server.ssh("journalctl --no-pager -u gpuready-firewall-revert").stdout
    assert changed(play(server, BASE)) == 0


@pytest.mark.long
def test_a_trial_needs_a_connection_of_its_own_to_be_confirmed(server: Machine, part: str) -> None:
    same = server.ssh(f"{part} firewall >/dev/null && {part} confirm", check=False, stdin=json.dumps(TRIAL))
    assert same.returncode == 2
    assert "older than the rules" in same.stderr
    assert "9001" in server.ssh(TABLE).stdout
    assert "9001" not in server.ssh(["cat", "/etc/gpuready/firewall.nft"]).stdout


@pytest.mark.long
def test_a_run_that_was_killed_before_its_confirmation_is_finished_by_the_next(server: Machine, part: str) -> None:
    load(server, part, TRIAL)
    load(server, part, DECLARED)
    keep(server, part)
    assert "9001" not in server.ssh(TABLE).stdout
    timers = server.ssh(["systemctl", "list-timers", "--all", "--no-pager"]).stdout
    assert "gpuready-firewall-revert" not in timers
    assert load(server, part, DECLARED)["changed"] is False


@pytest.mark.long
def test_a_reboot_during_a_trial_ends_with_the_former_rules(server: Machine, part: str) -> None:
    right = server.ssh(TABLE).stdout
    load(server, part, TRIAL)
    server.reboot()
    assert server.wait_until_booted() == "running"
    assert server.ssh(TABLE).stdout == right
    shm, ram = server.ssh(
        "df --output=size /dev/shm | tail -1; awk '/MemTotal/ {print $2}' /proc/meminfo"
    ).stdout.split()
    assert int(shm) >= int(ram) * 0.495
    assert load(server, part, DECLARED)["changed"] is False


@pytest.mark.long
def test_the_distributions_service_does_not_drop_our_table(server: Machine, part: str) -> None:
    for act in ("start", "reload", "restart"):
        server.ssh(["systemctl", act, "nftables"])
        assert "policy drop" in server.ssh(TABLE).stdout, act
    server.ssh(["systemctl", "stop", "nftables"])
    assert server.ssh(["systemctl", "is-active", "gpuready-firewall"], check=False).stdout.strip() == "inactive"
    load(server, part, DECLARED)
    keep(server, part)
    assert server.ssh(["systemctl", "is-active", "gpuready-firewall"]).stdout.strip() == "active"
    assert load(server, part, DECLARED)["changed"] is False


def answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def test_only_what_is_declared_is_open(server: Machine) -> None:
    server.ssh("for port in 8080 8081; do systemd-run --quiet --unit=t-$port python3 -m http.server $port; done")
    try:
        end = time.monotonic() + 10
        while not answers(server.address, 8080) and time.monotonic() < end:
            time.sleep(0.2)
        assert [answers(server.address, port) for port in (8080, 8081)] == [True, False]
        server.ssh("python3 -c \"import socket; socket.create_connection(('127.0.0.1', 8081), 1)\"")
    finally:
        server.ssh(["systemctl", "stop", "t-8080", "t-8081"])


@pytest.mark.parametrize(
    ("uid", "port", "is_open"),
    [(0, 18100, True), (999, 18100, True), (1000, 18100, False), (65534, 18100, False), (1000, 18099, True)],
)
def test_people_of_the_server_do_not_reach_the_engines_ports(
    server: Machine, uid: int, port: int, is_open: bool
) -> None:
    """The system's own users do, as the gateway's and the engines' are."""
    server.ssh(f"systemd-run --quiet --unit=t-{port} python3 -m http.server {port}")
    connect = f"python3 -c \"import socket; socket.create_connection(('127.0.0.1', {port}), 2)\""
    try:
        server.ssh(f"for i in $(seq 50); do {connect} 2>/dev/null && break; sleep 0.1; done; {connect}")
        done = server.ssh(f"setpriv --reuid={uid} --clear-groups {connect}", check=False)
        assert (done.returncode == 0, "ConnectionRefusedError" in done.stderr) == (is_open, not is_open)
    finally:
        server.ssh(["systemctl", "stop", f"t-{port}"])


@pytest.mark.long
def test_an_interrupted_dpkg_is_repaired(server: Machine, part: str) -> None:
    server.ssh("cd /tmp && apt-get -q download numactl && dpkg --purge numactl && dpkg --unpack numactl*.deb")
    assert server.ssh(["dpkg-query", "-Wf", "${db:Status-Status}", "numactl"]).stdout == "unpacked"
    done = server.ssh(f"{part} packages", stdin=json.dumps({"names": ["numactl"]}))
    assert "repaired an interrupted dpkg" in json.loads(done.stdout)["summary"]
    assert server.ssh(["dpkg-query", "-Wf", "${db:Status-Status}", "numactl"]).stdout == "installed"

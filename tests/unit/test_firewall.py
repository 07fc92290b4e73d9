"""The packet filter's rules, and the trial's order of steps, on a directory with programs that are played."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpuready.operations import firewall, firewall_rules
from gpuready.operations.machine import Done, Machine
from gpuready.outcome import Failed, MachineCannot, Refusal


@dataclass
class Played:
    """nft, systemd and sshd as far as the trial needs them; the table is the file that was loaded last."""

    root: Path
    table: str | None = None
    timers: set[str] = field(default_factory=set)
    active: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    arms: bool = True
    loads: bool = True

    def __call__(self, argv: Sequence[str]) -> Done:
        self.calls.append(" ".join(argv))
        answer = {"nft": self.nft, "systemctl": self.systemctl, "systemd-run": self.systemd_run, "sshd": self.sshd}
        return answer[argv[0]](list(argv[1:]))

    def nft(self, words: list[str]) -> Done:
        if words[0] == "--stateless":
            return Done(0, self.table, "") if self.table else Done(1, "", "Error: No such file or directory")
        text = Path(words[-1]).read_text()
        if words[0] == "--check":
            return Done(0, "", "") if "tcp dport 666 " not in text else Done(1, "", "Error: syntax error")
        if not self.loads and "former" not in words[-1]:
            return Done(1, "", "Error: Could not process rule")
        self.table = text.split("delete table inet gpuready\n", 1)[1] or None
        return Done(0, "", "")

    def systemctl(self, words: list[str]) -> Done:
        if words[0] == "is-active":
            return Done(0, "active\n" if words[1] in self.timers | self.active else "inactive\n", "")
        if words[0] == "is-enabled":
            return Done(0, "enabled\n" if words[1] in self.active else "disabled\n", "")
        if words[0] == "stop":
            self.timers -= set(words[1:])
        if words[:2] == ["enable", "--now"]:
            self.active.add(words[2])
        return Done(0, "", "")

    def systemd_run(self, words: list[str]) -> Done:
        del words
        if self.arms:
            self.timers.add("gpuready-firewall-revert.timer")
        return Done(0, "", "")

    def sshd(self, words: list[str]) -> Done:
        del words
        return Done(0, "port 22\nport 2222\nlistenaddress 0.0.0.0:2200\nlistenaddress [::]:2200\n", "")

    def timer_fires(self) -> None:
        """Do what the transient unit does."""
        self.timers.clear()
        self.nft(["--file", f"{self.root}/run/gpuready/firewall/former.nft"])
        (self.root / "run/gpuready/firewall/pending.nft").unlink()


@pytest.fixture
def played(tmp_path: Path) -> Played:
    program = tmp_path / "usr/sbin/nft"
    program.parent.mkdir(parents=True)
    program.touch()
    return Played(tmp_path)


@pytest.fixture
def machine(played: Played, tmp_path: Path) -> Machine:
    return Machine(tmp_path, played)


def wanted(*openings: firewall_rules.Open) -> firewall_rules.Wanted:
    return firewall_rules.Wanted(openings=openings)


GATEWAY = firewall_rules.Open(port="8080", comment="gateway")


def test_rules_replace_one_table_in_one_transaction_and_drop_by_default() -> None:
    text = firewall_rules.render(wanted(GATEWAY), {22})
    statements = [line for line in text.splitlines() if line and not line.startswith(("#", "\t", "}"))]
    assert statements == ["add table inet gpuready", "delete table inet gpuready", "table inet gpuready {"]
    assert "type filter hook input priority filter; policy drop;" in text
    assert "flush" not in text
    assert "hook forward" not in text
    assert "hook output" not in text


def test_every_ssh_port_is_open_once() -> None:
    assert 'tcp dport { 22, 2222 } accept comment "SSH"' in firewall_rules.render(wanted(), [2222, 22, 22])


def test_sources_of_both_families_become_two_rules() -> None:
    sources = ["10.0.0.0/8", "2001:db8::/32", "192.0.2.7"]
    opening = firewall_rules.Open(port="9100-9110", source=sources, comment="metrics")
    assert opening.lines() == [
        'ip saddr { 10.0.0.0/8, 192.0.2.7/32 } tcp dport 9100-9110 accept comment "metrics"',
        'ip6 saddr { 2001:db8::/32 } tcp dport 9100-9110 accept comment "metrics"',
    ]


def test_people_of_the_server_are_kept_from_the_engines_ports() -> None:
    read = firewall_rules.wanted_from({"engine_ports": [18101, 18100, "18101"]})
    text = firewall_rules.render(read, {22})
    chain = text[text.index("chain output") :].splitlines()
    assert [line.strip() for line in chain] == [
        "chain output {",
        "type filter hook output priority filter; policy accept;",
        'oifname "lo" tcp dport { 18100, 18101 } meta skuid >= 1000 reject with tcp reset '
        'comment "engines, past the gateway"',
        "}",
        "}",
    ]


ASKED = """
import os, socket, subprocess, sys
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
subprocess.run(["nft", "--file", sys.argv[1]], check=True)
listening = [socket.create_server(("127.0.0.1", port)) for port in (18099, 18100)]
for uid, port in (one.split(":") for one in sys.argv[2:]):
    child = os.fork()
    if not child:
        os.setuid(int(uid))
        print(uid, port, os.strerror(socket.socket().connect_ex(("127.0.0.1", int(port)))), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not all(shutil.which(name) for name in ("nft", "ip", "unshare")),
    reason="only root, with nft, can try rules in a network of its own; booted machines test them too",
)
def test_the_kernel_refuses_people_at_the_engines_ports_alone(tmp_path: Path) -> None:
    rules = tmp_path / "rules.nft"
    rules.write_text(firewall_rules.render(firewall_rules.Wanted(engine_ports=[18100]), {22}))
    asked = ["0:18100", "999:18100", "1000:18100", "65534:18100", "1000:18099"]
    words = ["unshare", "--net", sys.executable, "-c", ASKED, str(rules), *asked]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == [
        "0 18100 Success",
        "999 18100 Success",
        "1000 18100 Connection refused",
        "65534 18100 Connection refused",
        "1000 18099 Success",
    ]


def test_every_wrong_entry_is_named_at_once() -> None:
    with pytest.raises(Refusal) as refused:
        firewall_rules.wanted_from(
            {
                "open": [
                    {"port": 0},
                    {"port": "9110-9100"},
                    {"port": 80, "proto": "sctp"},
                    {"port": 80, "source": ["10.0.0.0/33"]},
                    {"port": 80, "comment": 'a "quoted" one'},
                ],
                "ssh_source": "nowhere",
                "revert_seconds": 5,
            }
        )
    sentences = [failure.sentence() for failure in refused.value.failures]
    assert [failure.code.split(".")[1] for failure in refused.value.failures] == [
        "port", "port", "proto", "source", "comment", "source", "seconds",
    ]  # fmt: skip
    assert "base_firewall_open[3]: source '10.0.0.0/33' is no network" in sentences[3]
    assert sentences[5].startswith("base_firewall_ssh_sources: source 'nowhere'")


def test_ports_of_sshd_are_found_beside_the_declared_one(machine: Machine, played: Played) -> None:
    firewall.apply(machine, wanted(GATEWAY), check=False)
    assert "tcp dport { 22, 2200, 2222 } accept" in str(played.table)


def test_trial_arms_the_way_back_before_it_loads(machine: Machine, played: Played) -> None:
    result = firewall.apply(machine, wanted(GATEWAY), check=False)
    assert result.changed
    assert result.data["confirm"] is True
    assert machine.read(firewall.FILE) is None, "boot acts on confirmed rules alone"
    steps = [call.split()[0] + " " + call.split()[1] for call in played.calls]
    load = played.calls.index(f"nft --file {machine.path(firewall.PENDING)}")
    assert steps.index("systemd-run --quiet") < load


def test_confirmed_rules_are_on_disk_and_a_second_run_changes_nothing(machine: Machine, played: Played) -> None:
    firewall.apply(machine, wanted(GATEWAY), check=False)
    firewall.confirm(machine, check=False)
    assert "tcp dport 8080" in str(machine.read(firewall.FILE))
    assert not played.timers
    assert machine.read(firewall.PENDING) is None
    again = firewall.apply(machine, wanted(GATEWAY), check=False)
    assert (again.changed, again.diff, again.data["confirm"]) == (False, [], False)


def test_unconfirmed_rules_leave_nothing_behind(machine: Machine, played: Played) -> None:
    firewall.apply(machine, wanted(GATEWAY), check=False)
    firewall.confirm(machine, check=False)
    before = (played.table, machine.read(firewall.FILE))
    firewall.apply(machine, wanted(), check=False)
    assert "8080" not in str(played.table)
    played.timer_fires()
    assert (played.table, machine.read(firewall.FILE)) == before
    with pytest.raises(Failed, match="taken back before they were confirmed"):
        firewall.confirm(machine, check=False)
    assert (played.table, machine.read(firewall.FILE)) == before


def test_next_run_ends_a_trial_that_nobody_confirmed_and_keeps_the_way_back(machine: Machine, played: Played) -> None:
    firewall.apply(machine, wanted(GATEWAY), check=False)
    firewall.confirm(machine, check=False)
    confirmed = played.table
    firewall.apply(machine, wanted(firewall_rules.Open(port="9000")), check=False)
    firewall.apply(machine, wanted(firewall_rules.Open(port="9001")), check=False)
    assert str(confirmed) in str(machine.read(firewall.FORMER)), "the way back leads to what was confirmed"
    firewall.confirm(machine, check=False)
    assert "9001" in str(machine.read(firewall.FILE))


@pytest.mark.parametrize("drift", ["gone", "changed"])
def test_drift_by_hand_is_seen_and_shown(machine: Machine, played: Played, drift: str) -> None:
    firewall.apply(machine, wanted(GATEWAY), check=False)
    firewall.confirm(machine, check=False)
    right = str(played.table)
    played.table = None if drift == "gone" else right.replace("8080", "8081")
    shown = firewall.apply(machine, wanted(GATEWAY), check=True)
    assert [(change.before, change.after) for change in shown.diff] == [(played.table or "", right)]
    firewall.apply(machine, wanted(GATEWAY), check=False)
    assert played.table == right


def test_check_changes_nothing(machine: Machine, played: Played, tmp_path: Path) -> None:
    result = firewall.apply(machine, wanted(GATEWAY), check=True)
    assert result.changed
    assert "tcp dport 8080" in result.diff[0].after
    assert played.table is None
    assert not played.timers
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["nft"]


def test_check_works_before_nft_is_installed(machine: Machine) -> None:
    machine.path("/usr/sbin/nft").unlink()
    assert firewall.apply(machine, wanted(GATEWAY), check=True).changed
    with pytest.raises(MachineCannot, match="nftables"):
        firewall.apply(machine, wanted(GATEWAY), check=False)


def test_rules_that_nft_refuses_change_nothing(machine: Machine, played: Played) -> None:
    with pytest.raises(Refusal, match="nft refuses the rules: Error: syntax error"):
        firewall.apply(machine, wanted(firewall_rules.Open(port="666")), check=False)
    assert played.table is None
    assert not played.timers


def test_nothing_is_loaded_without_a_way_back(machine: Machine, played: Played) -> None:
    played.arms = False
    with pytest.raises(MachineCannot, match="way back could not be armed"):
        firewall.apply(machine, wanted(GATEWAY), check=False)
    assert played.table is None
    assert machine.read(firewall.PENDING) is None


def test_rules_that_do_not_load_end_the_trial(machine: Machine, played: Played) -> None:
    played.loads = False
    with pytest.raises(Failed, match="the former ones are in place"):
        firewall.apply(machine, wanted(GATEWAY), check=False)
    assert not played.timers
    assert machine.read(firewall.PENDING) is None


def plant_session(machine: Machine, started_ticks: int) -> None:
    """Give this process an sshd as its parent."""
    stat = "{pid} ({name}) S {parent} " + "0 " * 17 + "{start} 0 0\n"
    for pid, name, parent in ((os.getpid(), "python3 (x)", 4242), (4242, "sshd-session", 1)):
        machine.write(f"/proc/{pid}/stat", stat.format(pid=pid, name=name, parent=parent, start=started_ticks))


def test_confirmation_over_the_old_connection_proves_nothing(machine: Machine, played: Played) -> None:
    firewall.apply(machine, wanted(GATEWAY), check=False)
    plant_session(machine, 100)
    with pytest.raises(Refusal, match="older than the rules"):
        firewall.confirm(machine, check=False)
    assert played.timers, "the way back stays armed"
    later = float(json.loads(str(machine.read(firewall.PENDING_STATE)))["loaded"]) + 1
    plant_session(machine, int(later * os.sysconf("SC_CLK_TCK")))
    assert firewall.confirm(machine, check=False).changed


def test_port_of_this_session_is_open_though_sshd_does_not_tell(machine: Machine) -> None:
    plant_session(machine, 100)
    machine.write(f"/proc/{os.getpid()}/environ", "A=b\0SSH_CONNECTION=192.0.2.1 50000 192.0.2.2 2022\0")
    assert 2022 in firewall.sshd_ports(machine)

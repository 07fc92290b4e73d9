"""The stage base in one call: what check mode cannot know, what is written down, and when."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuready.operations import base, firewall, firewall_rules, host, packages
from gpuready.operations.machine import Done, Machine
from gpuready.outcome import Exit, Refusal


class Server:
    """dpkg, apt, systemd and nft as far as this stage asks them."""

    def __init__(self, installed: Sequence[str] = (), clock: str = "") -> None:
        self.installed = list(installed)
        self.clock = clock
        self.table = ""
        self.active: set[str] = set()

    def __call__(self, argv: Sequence[str]) -> Done:
        words = list(argv)
        if words[0] == "dpkg-query":
            return Done(0, "".join(f"{name}\tinstalled\t1.0\n" for name in self.installed), "")
        if words[0] == "apt-cache":
            return Done(0, "".join(f"{name}:\n  Candidate: 1.0\n" for name in words[2:]), "")
        if words[0] == "apt-get" and "install" in words:
            self.installed += words[words.index("install") + 1 :]
        if words[0] == "systemctl":
            return self.systemctl(words[1:])
        if words[0] == "nft":
            return self.nft(words[1:])
        if words[0] == "systemd-run":
            self.active.add("gpuready-firewall-revert.timer")
        return Done(1 if words[0] == "systemd-detect-virt" else 0, "", "")

    def systemctl(self, words: list[str]) -> Done:
        if words[0] == "list-unit-files":
            timesyncd = "systemd-timesyncd.service enabled enabled\n"
            return Done(0, timesyncd if "systemd-timesyncd" in self.installed else "", "")
        if words[0] == "is-active":
            known = {*self.active, f"{self.clock}.service"}
            return Done(0, "".join("active\n" if unit in known else "inactive\n" for unit in words[1:]), "")
        if words[0] == "is-enabled":
            return Done(0, "enabled\n" if words[1] in self.active else "disabled\n", "")
        if words[:2] == ["enable", "--now"]:
            self.active.add(words[2])
            self.clock = "systemd-timesyncd" if "timesyncd" in words[2] else self.clock
        if words[0] == "stop":
            self.active -= set(words[1:])
        return Done(0, "", "")

    def nft(self, words: list[str]) -> Done:
        if words[0] == "--stateless":
            return Done(0, self.table, "") if self.table else Done(1, "", "Error: No such file or directory")
        if words[0] == "--file":
            self.table = Path(words[1]).read_text()
        return Done(0, "", "")


def machine_of(tmp_path: Path, server: Server, *programs: str) -> Machine:
    machine = Machine(tmp_path, server)
    for program in ("apt-get", *programs):
        machine.write(f"/usr/bin/{program}", "")
    machine.write("/var/lib/apt/lists/a_Packages", "")
    machine.write("/proc/sys/net/core/somaxconn", "128\n")
    return machine


WANTED = base.Wanted(
    packages=packages.Wanted(["nftables"]),
    files=[host.File("/etc/a.conf", "a\n")],
    parameters=[host.Setting("net.core.somaxconn", "16384", "why"), host.Setting("vm.no_such", "1", "why")],
)


def test_check_on_a_blank_server_counts_what_it_cannot_know_and_writes_nothing(tmp_path: Path) -> None:
    machine = machine_of(tmp_path, Server())
    wanted = base.Wanted(WANTED.packages, WANTED.files, WANTED.parameters, firewall=firewall_rules.Wanted())
    before = sorted(tmp_path.rglob("*"))
    result = base.settle(machine, wanted, check=True)
    assert result.undecided == [
        "whether systemd-timesyncd can keep the time on this machine",
        "whether nft takes the packet filter's rules",
    ]
    assert {change.header for change in result.diff} >= {"package nftables", "package systemd-timesyncd", "/etc/a.conf"}
    assert base.RECORD not in {change.header for change in result.diff}
    assert sorted(tmp_path.rglob("*")) == before


def test_what_was_brought_about_is_written_down_and_a_second_run_changes_nothing(tmp_path: Path) -> None:
    machine = machine_of(tmp_path, Server())
    result = base.settle(machine, WANTED, check=False)
    assert result.changed
    record = json.loads(machine.read(base.RECORD) or "")
    assert record["parameters"] == {"net.core.somaxconn": "16384"}, "one that this kernel lacks is not in force"
    assert record["clock"] == "systemd-timesyncd.service"
    assert record["packages"] == ["nftables"]
    assert set(record["files"]) == {"/etc/a.conf", host.SYSCTL_FILE}
    assert record["firewall"] is False
    assert any("vm.no_such" in note for note in result.data["notes"])
    again = base.settle(machine, WANTED, check=False)
    assert (again.changed, again.diff) == (False, [])


def test_rules_on_trial_are_written_down_by_their_confirmation_alone(tmp_path: Path) -> None:
    server = Server(["nftables"], clock="chrony")
    machine = machine_of(tmp_path, server, "nft")
    wanted = base.Wanted(WANTED.packages, firewall=firewall_rules.Wanted())
    settled = base.settle(machine, wanted, check=False)
    assert settled.data["confirm"]
    assert machine.read(base.RECORD) is None
    confirmed = base.confirm(machine, check=False)
    assert confirmed.changed
    assert json.loads(machine.read(base.RECORD) or "")["firewall"] is True
    assert not base.settle(machine, wanted, check=False).changed


def test_a_record_lost_to_an_interruption_is_written_by_the_next_run(tmp_path: Path) -> None:
    server = Server(["nftables"], clock="chrony")
    machine = machine_of(tmp_path, server, "nft")
    wanted = base.Wanted(WANTED.packages, firewall=firewall_rules.Wanted())
    base.settle(machine, wanted, check=False)
    firewall.confirm(machine, check=False)
    result = base.settle(machine, wanted, check=False)
    assert [change.header for change in result.diff] == [base.RECORD]
    assert json.loads(machine.read(base.RECORD) or "")["firewall"] is True


def test_what_was_done_before_a_refusal_is_told_and_it_is_no_refusal_of_input_any_more(tmp_path: Path) -> None:
    server = Server()
    machine_of(tmp_path, server)
    bad = base.Wanted(WANTED.packages, [host.File("/etc/b.conf", "b\n", validate=["apt-get", "%s"])])
    machine = Machine(tmp_path, lambda argv: Done(1, "", "no") if argv[-1].endswith("b.conf") else server(argv))
    with pytest.raises(Refusal) as refused:
        base.settle(machine, bad, check=False)
    done = refused.value.done
    assert done is not None
    assert "package nftables" in {change.header for change in done.diff}
    assert refused.value.exit == Exit.FAILED

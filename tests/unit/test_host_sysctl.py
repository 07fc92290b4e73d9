"""Kernel parameters, small files and the clock on a directory with programs that are played."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuready.operations import host
from gpuready.operations.host import File, Setting
from gpuready.operations.machine import Done, Machine
from gpuready.outcome import Failed, Refusal


def no_program(argv: Sequence[str]) -> Done:
    return Done(127, "", f"{argv[0]} is not installed")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    one = Machine(tmp_path, no_program)
    one.write("/proc/sys/net/core/somaxconn", "4096\n")
    one.write("/proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n")
    one.write("/proc/sys/vm/swappiness", "60\n")
    return one


SETTINGS = [
    Setting("net.core.somaxconn", "16384", "A full queue costs a second."),
    Setting("net.ipv4.tcp_rmem", "4096 131072 67108864", "Far weights."),
]


def test_each_parameter_stands_under_its_reason() -> None:
    text = host.sysctl_file(SETTINGS)
    assert "# A full queue costs a second.\nnet.core.somaxconn = 16384\n" in text


def test_file_and_kernel_are_set_and_a_second_run_changes_nothing(machine: Machine) -> None:
    first = host.set_parameters(machine, SETTINGS, check=False)
    assert first.changed
    assert first.data["applied"] == ["net.core.somaxconn", "net.ipv4.tcp_rmem"]
    assert machine.read("/proc/sys/net/core/somaxconn") == "16384\n"
    second = host.set_parameters(machine, SETTINGS, check=False)
    assert (second.changed, second.diff) == (False, [])


def test_check_shows_all_and_changes_nothing(machine: Machine) -> None:
    result = host.set_parameters(machine, SETTINGS, check=True)
    assert [change.header for change in result.diff] == [
        host.SYSCTL_FILE,
        "sysctl net.core.somaxconn",
        "sysctl net.ipv4.tcp_rmem",
    ]
    assert machine.read(host.SYSCTL_FILE) is None
    assert machine.read("/proc/sys/net/core/somaxconn") == "4096\n"


def test_what_the_kernel_lacks_is_said_and_the_file_is_placed(machine: Machine) -> None:
    settings = [Setting("kernel.numa_balancing", "0", "")]
    result = host.set_parameters(machine, settings, check=False)
    assert result.data["not_applied"] == {"kernel.numa_balancing": "this kernel does not have it"}
    assert "not applied here: kernel.numa_balancing (this kernel does not have it)" in result.summary
    assert "kernel.numa_balancing = 0" in str(machine.read(host.SYSCTL_FILE))
    assert not host.set_parameters(machine, settings, check=False).changed


@pytest.mark.parametrize("error", [PermissionError(13, ""), OSError(30, "")])
def test_what_may_not_be_written_is_said(machine: Machine, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def refuse(path: Path, flags: int) -> int:
        raise error

    monkeypatch.setattr(os, "open", refuse)
    assert host._write_parameter(machine, Setting("vm.swappiness", "1", ""), check=True) != ""


def test_value_that_the_kernel_does_not_keep_fails(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: 0)
    host.place_files(machine, [File(host.SYSCTL_FILE, host.sysctl_file([Setting("vm.swappiness", "900", "")]))], False)
    with pytest.raises(Failed, match=r"vm\.swappiness was set to '900' and reads '60'"):
        host.set_parameters(machine, [Setting("vm.swappiness", "900", "")], check=False)


def test_parameter_of_a_later_file_is_left_to_it(machine: Machine) -> None:
    machine.write("/etc/sysctl.d/10-early.conf", "net.ipv4.tcp_rmem = 1 2 3\n")
    machine.write("/etc/sysctl.d/99-site.conf", "# vm.swappiness = 3\n-net/core/somaxconn=1024\n")
    result = host.set_parameters(machine, SETTINGS, check=False)
    assert result.data["left"] == {"net.core.somaxconn": "/etc/sysctl.d/99-site.conf"}
    assert machine.read("/proc/sys/net/core/somaxconn") == "4096\n"


@pytest.mark.parametrize(("key", "value"), [("swappiness", "1"), ("vm.swap\npiness", "1"), ("vm.swappiness", "1\n2")])
def test_what_is_no_parameter_is_refused(machine: Machine, key: str, value: str) -> None:
    with pytest.raises(Refusal):
        host.set_parameters(machine, [Setting(key, value, "")], check=False)
    assert machine.read(host.SYSCTL_FILE) is None


def test_key_with_a_dot_in_an_interface_name_uses_slashes(machine: Machine) -> None:
    assert host._parameter_path(machine, "net/ipv4/conf/eth0.5/rp_filter").parts[-2:] == ("eth0.5", "rp_filter")
    assert host._parameter_path(machine, "net.ipv4.conf.eth0/5.rp_filter").parts[-2:] == ("eth0.5", "rp_filter")


# ------------------------------------------------------------------------------------------------ files


def test_no_file_lands_when_one_is_invalid(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/perl").touch()

    def perl(argv: Sequence[str]) -> Done:
        return Done(255, "", f"syntax error at {argv[-1]} line 1")

    files = [File("/etc/a.conf", "a\n"), File("/etc/b.conf", "}\n", validate=["perl", "-c", "%s"])]
    with pytest.raises(Refusal, match=r"/etc/b\.conf does not pass perl: syntax error at /etc/b\.conf line 1"):
        host.place_files(Machine(tmp_path, perl), files, check=False)
    assert machine.read("/etc/a.conf") is None


def test_file_is_not_validated_where_its_program_is_missing(machine: Machine) -> None:
    file = File("/etc/b.conf", "}\n", validate=["perl", "-c", "%s"])
    assert host.place_files(machine, [file], check=False).changed


def test_mode_alone_is_a_change(machine: Machine) -> None:
    host.place_files(machine, [File("/etc/a.conf", "a\n")], check=False)
    machine.path("/etc/a.conf").chmod(0o666)
    result = host.place_files(machine, [File("/etc/a.conf", "a\n")], check=False)
    assert [(change.before, change.after) for change in result.diff] == [("mode 0666\n", "mode 0644\n")]
    assert machine.path("/etc/a.conf").stat().st_mode & 0o777 == 0o644


# ------------------------------------------------------------------------------------------------ time


def clock(active: str = "", installed: dict[str, str] | None = None, container: str = "", refuses: str = "") -> Machine:
    states = installed or {}

    def run(argv: Sequence[str]) -> Done:
        if argv[1] == refuses:
            return Done(1, "", "/etc is read-only")
        if argv[1] == "enable" and argv[2] in states:
            states[argv[2]] = "enabled"
        if argv[1] == "is-active":
            return Done(0, "".join("active\n" if unit == active else "inactive\n" for unit in argv[2:]), "")
        if argv[1] == "list-unit-files":
            return Done(0, "".join(f"{unit} {state} enabled\n" for unit, state in states.items()), "")
        if argv[0] == "systemd-detect-virt":
            return Done(0, f"{container}\n", "") if container else Done(1, "none\n", "")
        return Done(0, "", "")

    return Machine(Path("/nowhere"), run)


def test_whatever_keeps_the_time_is_adopted() -> None:
    result = host.keep_time(clock(active="ntpsec.service"), check=False)
    assert (result.changed, result.data["daemon"], result.data["install"]) == (False, "ntpsec", [])


@pytest.mark.parametrize("state", ["enabled", "static", "alias", "indirect", "generated"])
def test_a_service_that_keeps_the_time_at_the_next_boot_too_is_left_as_it_is(state: str) -> None:
    machine = clock(active="chrony.service", installed={"chrony.service": state}, refuses="enable")
    assert not host.keep_time(machine, check=False).changed


@pytest.mark.parametrize("state", ["disabled", "enabled-runtime"])
def test_a_service_that_keeps_the_time_until_the_next_boot_is_enabled(state: str) -> None:
    machine = clock(active="chrony.service", installed={"chrony.service": state})
    asked = host.keep_time(machine, check=True)
    assert [(one.header, one.before, one.after) for one in asked.diff] == [
        ("chrony.service", f"{state}\n", "enabled\n")
    ]
    # Nothing was done yet: there is still something to change.
    assert host.keep_time(machine, check=False).changed
    again = host.keep_time(machine, check=False)
    assert (again.changed, again.diff, again.data["daemon"]) == (False, [], "chrony")


def test_a_service_that_cannot_be_enabled_is_said() -> None:
    machine = clock(active="chrony.service", installed={"chrony.service": "disabled"}, refuses="enable")
    with pytest.raises(Failed, match=r"chrony keeps the time and could not be enabled .*: /etc is read-only; see"):
        host.keep_time(machine, check=False)


def test_a_missing_time_service_is_named_for_installation() -> None:
    result = host.keep_time(clock(installed={"ntp.service": "alias"}), check=False)
    assert (result.changed, result.data["install"]) == (False, ["systemd-timesyncd"])


def test_a_container_is_told_as_one() -> None:
    machine = clock(installed={"systemd-timesyncd.service": "enabled"}, container="systemd-nspawn")
    result = host.keep_time(machine, check=False)
    assert not result.changed
    assert result.data["active"] is False
    assert "a container (systemd-nspawn) has its host's clock" in result.summary


def test_a_service_that_does_not_start_fails() -> None:
    with pytest.raises(Failed, match=r"chrony is installed and does not run: chrony\.service is inactive"):
        host.keep_time(clock(installed={"chrony.service": "disabled"}), check=False)

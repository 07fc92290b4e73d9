"""The server part's own installation: user, folders, the zipapp and the command, each half of which may be missing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuready.operations import agent
from gpuready.operations.machine import Done, Machine
from gpuready.outcome import Failed, MachineCannot


class Accounts:
    """getent and the programs that change what it says."""

    def __init__(self, group: bool = False, shell: str = "") -> None:
        self.group, self.shell = group, shell
        self.calls: list[str] = []
        self.broken = ""

    def __call__(self, argv: Sequence[str]) -> Done:
        if argv[0] == "getent":
            if argv[1] == "group":
                return Done(0 if self.group else 2, "gpuready-engine:x:990:\n" if self.group else "", "")
            line = f"gpuready-engine:x:990:977:engines:/var/lib/gpuready:{self.shell}\n"
            return Done(0, line, "") if self.shell else Done(2, "", "")
        self.calls.append(" ".join(argv))
        if argv[0] == self.broken:
            return Done(10, "", f"{argv[0]}: cannot lock /etc/passwd; try again later.")
        self.group = True
        self.shell = argv[argv.index("--shell") + 1] if "--shell" in argv else self.shell
        return Done(0, "", "")


def server(tmp_path: Path, accounts: Accounts) -> tuple[Machine, Path]:
    source = tmp_path / "carried" / "gpuready-1.pyz"
    source.parent.mkdir(exist_ok=True)
    source.write_text("whole")
    return Machine(tmp_path / "root", accounts), source


def test_a_blank_server_gets_all_and_a_second_run_finds_it(tmp_path: Path) -> None:
    accounts = Accounts()
    machine, source = server(tmp_path, accounts)
    would = agent.install(machine, True, source)
    assert would.changed
    assert not machine.root.exists()
    assert [change.header for change in would.diff][:2] == ["group gpuready-engine", "user gpuready-engine"]
    assert agent.install(machine, False, source).changed
    assert [call.split()[0] for call in accounts.calls] == ["groupadd", "useradd"]
    assert machine.path("/opt/gpuready/gpuready.pyz").read_text() == "whole"
    assert str(machine.path("/usr/local/bin/gpuready").readlink()) == "/opt/gpuready/gpuready.pyz"
    assert all(machine.path(folder).is_dir() for folder in agent.FOLDERS)
    again = agent.install(machine, False, source)
    assert (again.changed, again.diff) == (False, [])


def test_a_user_whose_group_an_interruption_left_out_gets_it(tmp_path: Path) -> None:
    accounts = Accounts(False, agent.NO_LOGIN)
    machine, source = server(tmp_path, accounts)
    agent.install(machine, False, source)
    assert accounts.calls == ["groupadd --system --gid 977 gpuready-engine"]


def test_a_user_who_may_log_in_loses_that(tmp_path: Path) -> None:
    accounts = Accounts(True, "/bin/bash")
    machine, source = server(tmp_path, accounts)
    result = agent.install(machine, False, source)
    assert accounts.calls == ["usermod --shell /usr/sbin/nologin gpuready-engine"]
    assert (result.diff[0].before, result.diff[0].after) == ("shell /bin/bash\n", "shell /usr/sbin/nologin\n")


def test_a_user_that_cannot_be_made_is_said_with_its_cause(tmp_path: Path) -> None:
    accounts = Accounts()
    accounts.broken = "useradd"
    machine, source = server(tmp_path, accounts)
    with pytest.raises(Failed, match=r"useradd failed: useradd: cannot lock /etc/passwd; try again later\.; repair"):
        agent.install(machine, False, source)


def test_a_folder_of_another_mode_is_corrected_and_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    machine, source = server(tmp_path, Accounts(True, agent.NO_LOGIN))
    agent.install(machine, False, source)
    machine.path("/srv/models").chmod(0o700)
    result = agent.install(machine, False, source)
    assert [change.header for change in result.diff] == ["/srv/models"]
    assert machine.path("/srv/models").stat().st_mode & 0o777 == 0o755
    machine.path("/srv/models").rmdir()
    machine.write("/srv/models", "a file")
    with pytest.raises(MachineCannot, match="/srv/models on this server is not a folder; move it away and run again"):
        agent.install(machine, False, source)


def test_a_share_of_weights_that_is_mounted_read_only_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, source = server(tmp_path, Accounts(True, agent.NO_LOGIN))
    agent.install(machine, check=False, source=source)
    for folder in ("/srv/models", "/etc/gpuready"):
        machine.path(folder).chmod(0o700)
    monkeypatch.setattr(agent, "_is_read_only", lambda _: True)
    result = agent.install(machine, check=True, source=source)
    assert [change.header for change in result.diff] == ["/etc/gpuready"]


def test_older_server_parts_go_but_for_the_one_before(tmp_path: Path) -> None:
    machine, _ = server(tmp_path, Accounts(True, agent.NO_LOGIN))
    for number in range(4):
        source = tmp_path / f"gpuready-{number:016d}.pyz"
        source.write_text(f"content {number}")
        os.utime(source, (number, number))
        assert agent.install(machine, False, source).changed
    left = sorted(path.name for path in machine.path("/opt/gpuready").glob("gpuready-*.pyz"))
    assert left == ["gpuready-0000000000000002.pyz", "gpuready-0000000000000003.pyz"]


def test_a_half_copied_server_part_is_replaced_and_leftovers_go(tmp_path: Path) -> None:
    machine, source = server(tmp_path, Accounts(True, agent.NO_LOGIN))
    agent.install(machine, False, source)
    machine.write("/opt/gpuready/gpuready-1.pyz", "wh")
    machine.write("/opt/gpuready/.gpuready-1.pyz.77.new", "w")
    assert agent.install(machine, True, source).changed
    assert agent.install(machine, False, source).changed
    assert machine.path("/opt/gpuready/gpuready-1.pyz").read_text() == "whole"
    assert not machine.path("/opt/gpuready/.gpuready-1.pyz.77.new").exists()

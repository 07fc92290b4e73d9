"""The audit of tests/verify: passes on a finished server, and each of its tests fails for a fault of its own."""

from __future__ import annotations

import subprocess
import xml.etree.ElementTree
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sim.machine.common import CHECKOUT, Sim
from sim.machine.machine import Machine
from tests.machines.conftest import Factory, invocation
from tests.machines.verify_faults import FAULTS, Fault
from tests.unit.verify_suite import ROOT_TEST, declared, dependents

pytestmark = pytest.mark.machine

HOST = "h100-sg-01"
# The only test that may be skipped on a test machine, and why.
SKIPPED = {"test_time_is_kept": "container"}


@dataclass
class Verdict:
    """What a run of tests/verify said of one server."""

    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    """Sentences by test."""
    not_judged: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)
    """Reasons by test."""


@dataclass
class Verified:
    """A whole run."""

    rc: int
    stdout: str
    of: dict[str, Verdict]


Verify = Callable[[], Verified]


def read(report: Path) -> dict[str, Verdict]:
    verdicts: dict[str, Verdict] = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):  # noqa: S314 - pytest's own report
        name, _, host = str(case.get("name")).rstrip("]").partition("[ansible://")
        verdict = verdicts.setdefault(host, Verdict())
        bad = [one.get("message", "") for one in (*case.iter("failure"), *case.iter("error"))]
        skips = [one.get("message", "") for one in case.iter("skipped")]
        if bad:
            verdict.failed[name] = bad[0].removeprefix("Failed: ")
        elif skips and skips[0].startswith("not judged"):
            verdict.not_judged.add(name)
        elif skips:
            verdict.skipped[name] = skips[0]
        else:
            verdict.passed.add(name)
    return verdicts


def run_pytest(inventory: str, env: Mapping[str, str], folder: Path, hosts: str = "h100-sg") -> Verified:
    report = folder / "report.xml"
    words = ["tests/verify", f"--hosts=ansible://{hosts}", f"--ansible-inventory={inventory}", f"--junitxml={report}"]
    done = subprocess.run(
        [str(CHECKOUT / ".venv/bin/pytest"), *words, "-p", "no:cacheprovider"],
        cwd=CHECKOUT,
        env=dict(env),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert report.exists(), done.stdout + done.stderr
    return Verified(done.returncode, done.stdout, read(report))


@pytest.fixture(scope="module")
def server(machines: Factory, finished_image: str) -> Machine:
    """A finished server of this file's own: faults are planted on it and taken back."""
    return machines("verify", finished_image)


@pytest.fixture(scope="module")
def verify(sim: Sim, server: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verify]:
    """Run all of tests/verify as an operator does."""
    with invocation(sim, server) as (argv, env):
        yield lambda: run_pytest(argv[argv.index("-i") + 1], env, tmp_path_factory.mktemp("verify"))


def demand_good(verdict: Verdict) -> None:
    assert verdict.failed == {}
    assert verdict.not_judged == set()
    assert verdict.skipped.keys() == SKIPPED.keys()
    assert all(SKIPPED[name] in reason for name, reason in verdict.skipped.items())
    assert verdict.passed == declared().keys() - SKIPPED.keys()


def test_every_test_has_a_fault() -> None:
    assert {fault.test for fault in FAULTS} == declared().keys()


def test_a_finished_server_passes(verify: Verify) -> None:
    verified = verify()
    demand_good(verified.of[HOST])
    assert verified.rc == 0
    assert f"{HOST}: {len(declared()) - len(SKIPPED)} passed, {len(SKIPPED)} skipped" in verified.stdout


def test_the_playbook_passes_and_changes_nothing(server: Machine, play: Callable[..., Any]) -> None:
    played = play(server, "playbooks/verify.yml")
    assert played.rc == 0, played.stdout
    assert (played.recap[HOST]["ok"], played.recap[HOST]["changed"]) == (1, 0)
    assert f"{HOST}: {len(declared()) - len(SKIPPED)} passed, {len(SKIPPED)} skipped" in played.stdout


def test_the_playbook_fails_with_the_sentences(server: Machine, play: Callable[..., Any]) -> None:
    fault = next(fault for fault in FAULTS if fault.test == "test_the_server_part_is_whole")
    server.ssh(fault.plant)
    played = play(server, "playbooks/verify.yml")
    server.ssh(fault.undo)
    assert played.rc == 2
    assert f"host {HOST}: /opt/gpuready/gpuready-" in played.stdout
    assert f"run ansible-playbook site.yml -l {HOST}." in played.stdout
    assert "Traceback" not in played.stdout


@pytest.mark.parametrize("password", ["", pytest.param("pass word", marks=pytest.mark.long)])
def test_an_operator_who_is_not_root_uses_sudo(sim: Sim, server: Machine, tmp_path: Path, password: str) -> None:
    rights = "ALL=(ALL) ALL" if password else "ALL=(ALL) NOPASSWD: ALL"
    server.ssh(
        f"id ops 2>/dev/null || useradd --create-home --shell /bin/bash ops; echo 'ops {rights}' > /etc/sudoers.d/ops; "
        f"echo 'ops:{password or 'unused'}' | chpasswd; "
        "install -d -o ops -m 700 /home/ops/.ssh; "
        "install -o ops -m 600 /root/.ssh/authorized_keys /home/ops/.ssh/authorized_keys"
    )
    login = {"ansible_user": "ops", **({"ansible_become_password": password} if password else {})}
    with invocation(sim, server, group_vars=login) as (argv, env):
        verified = run_pytest(argv[argv.index("-i") + 1], env, tmp_path)
    demand_good(verified.of[HOST])
    assert not password or password not in verified.stdout


@pytest.mark.long
def test_the_server_with_debian_12_passes_too(sim: Sim, finished_bookworm: Machine, tmp_path: Path) -> None:
    with invocation(sim, finished_bookworm) as (argv, env):
        verified = run_pytest(argv[argv.index("-i") + 1], env, tmp_path, "a100-la")
    demand_good(verified.of["a100-la-01"])


def test_servers_that_are_down_or_blank_are_said_and_the_others_judged(
    sim: Sim, server: Machine, blank: Machine, play: Callable[..., Any], tmp_path: Path
) -> None:
    hosts: dict[str, Machine | str] = {HOST: server, "h100-sg-02": blank, "h100-sg-03": sim.address(249)}
    with invocation(sim, hosts) as (argv, env):
        verified = run_pytest(argv[argv.index("-i") + 1], env, tmp_path)
    demand_good(verified.of[HOST])
    sentences = {host: verified.of[host].failed for host in ("h100-sg-02", "h100-sg-03")}
    assert [set(failed) for failed in sentences.values()] == [{ROOT_TEST}, {ROOT_TEST}]
    for host in sentences:
        assert verified.of[host].not_judged == dependents(ROOT_TEST)
    assert "plan.json is not there, so it is not a finished server" in sentences["h100-sg-02"][ROOT_TEST]
    assert f"host h100-sg-03 ({sim.address(249)}) cannot be reached: " in sentences["h100-sg-03"][ROOT_TEST]
    assert verified.rc == 1
    assert "Traceback" not in verified.stdout
    played = play(hosts, "playbooks/verify.yml")
    assert played.rc != 0
    assert [played.recap[host]["ok"] for host in hosts] == [1, 0, 0]
    assert (played.recap["h100-sg-02"]["failed"], played.recap["h100-sg-03"]["unreachable"]) == (1, 1)


def named(fault: Fault) -> Any:
    number = [other for other in FAULTS if other.test == fault.test].index(fault)
    name = fault.test.removeprefix("test_") + (f"-{number + 1}" if number else "")
    return pytest.param(fault, id=name, marks=() if fault.quick else pytest.mark.long)


@pytest.mark.parametrize("fault", [named(fault) for fault in FAULTS])
def test_a_fault_fails_its_test_and_no_other(server: Machine, verify: Verify, fault: Fault) -> None:
    server.ssh(f"set -e; {fault.plant}")
    try:
        verdict = verify().of[HOST]
    finally:
        server.ssh(f"set -e; {fault.undo}")
    assert verdict.failed.keys() == {fault.test}, verdict.failed
    assert verdict.not_judged == dependents(fault.test)
    sentence = verdict.failed[fault.test]
    assert sentence.startswith(f"host {HOST}: ")
    assert fault.words in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_after_all_faults_the_server_is_good_again(verify: Verify) -> None:
    demand_good(verify().of[HOST])

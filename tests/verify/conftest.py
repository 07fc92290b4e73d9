"""The audit of finished servers: `pytest tests/verify --hosts='ansible://h100-sg'`.

Every server is asked once, all of them side by side, with the connection that Ansible's inventory declares; the tests
judge the answers. A test names those without which it says nothing (`depends_on`); where one of them failed on a
server, it is not judged there.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from testinfra.utils.ansible_runner import AnsibleRunner
from tests.verify.server import Server, ask

HERE = Path(__file__).parent
ROOT_TEST = "test_the_server_is_finished"
NOT_GOOD = pytest.StashKey[dict[str, dict[str, str]]]()
COUNTS = pytest.StashKey[dict[str, dict[str, int]]]()
REASONS = pytest.StashKey[dict[str, dict[str, None]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--snapshots", metavar="FOLDER", help="judge HOST.json in this folder instead of asking the servers"
    )


def pytest_configure(config: pytest.Config) -> None:
    not_good: defaultdict[str, dict[str, str]] = defaultdict(dict)
    counts: defaultdict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    reasons: defaultdict[str, dict[str, None]] = defaultdict(dict)
    config.stash[NOT_GOOD], config.stash[COUNTS], config.stash[REASONS] = not_good, counts, reasons
    # testinfra calls Ansible's programs, which lie beside our Python.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    hosts = config.getoption("hosts")
    if not hosts:
        raise pytest.UsageError("tests/verify: say which servers, for example --hosts='ansible://h100-sg'")
    if not config.getoption("snapshots"):
        _demand_hosts(hosts, config.getoption("ansible_inventory"))


def _demand_hosts(hosts: str, inventory: str | None) -> None:
    """Refuse in one sentence what would end in a traceback, or in no test at all."""
    for spec in hosts.split(","):
        scheme, _, pattern = spec.rpartition("://")
        if scheme != "ansible" or not pattern:
            raise pytest.UsageError(
                f"tests/verify asks through Ansible: --hosts={spec!r} must be 'ansible://HOST_OR_GROUP'"
            )
        runner = AnsibleRunner.get_runner(inventory)
        try:
            found = runner.get_hosts(pattern)
        except (AssertionError, RuntimeError, ValueError) as error:
            # testinfra quotes the whole call; Ansible's own sentence stands in it.
            said = re.search(r"\[ERROR\]: (.*?)(?:\\n|$)", str(error))
            why = said.group(1) if said else str(error)
            raise pytest.UsageError(f"tests/verify cannot read the inventory: {why}") from None
        if not found:
            groups = ", ".join(sorted(set(runner.inventory) - {"_meta", "all", "ungrouped"}))
            raise pytest.UsageError(f"tests/verify: no host matches {pattern!r}; the inventory has the groups {groups}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Server by server, and each test after those that it depends on."""
    own = [item for item in items if HERE in item.path.parents]
    by_place = {(host_of(item), name_of(item)): item for item in own}
    ordered: dict[pytest.Item, None] = {}

    def place(item: pytest.Item) -> None:
        for name in needs(item):
            if (needed := by_place.get((host_of(item), name))) is not None and needed not in ordered:
                place(needed)
        ordered.setdefault(item)

    for item in sorted(own, key=host_of):
        place(item)
    items[:] = [item for item in items if item not in ordered] + list(ordered)


def name_of(item: pytest.Item) -> str:
    return str(getattr(item, "originalname", item.name))


def host_of(item: pytest.Item) -> str:
    """Return the server that a test is about."""
    backend = item.callspec.params["_testinfra_host"].backend  # type: ignore[attr-defined]
    return str(backend.get_pytest_id().rpartition("://")[2])


def needs(item: pytest.Item) -> list[str]:
    declared = [str(name) for marker in item.iter_markers("depends_on") for name in marker.args]
    return declared if name_of(item) == ROOT_TEST else [ROOT_TEST, *declared]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    not_good = item.config.stash[NOT_GOOD][host_of(item)]
    for name in needs(item):
        if name in not_good:
            pytest.skip(f"not judged: {name} {not_good[name]} on {host_of(item)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    why = str(report.longrepr[2]) if report.skipped and isinstance(report.longrepr, tuple) else ""
    word = (
        "failed"
        if report.failed
        else "not judged"
        if "not judged" in why
        else "skipped"
        if report.skipped
        else "passed"
    )
    if report.when == "call" or word != "passed":
        item.config.stash[COUNTS][host_of(item)][word] += 1
    if why:
        item.config.stash[REASONS][host_of(item)][why.removeprefix("Skipped: ")] = None
    if word in ("failed", "not judged"):
        item.config.stash[NOT_GOOD][host_of(item)][name_of(item)] = "failed" if report.failed else "was not judged"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for host, counts in sorted(config.stash[COUNTS].items()):
        told = [f"{counts[word]} {word}" for word in ("passed", "failed", "not judged", "skipped") if counts[word]]
        for reason in config.stash[REASONS][host]:
            terminalreporter.write_line(f"{host}: {reason}")
        terminalreporter.write_line(f"{host}: {', '.join(told)}")


@pytest.fixture(scope="session")
def snapshots(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What every server said, by its name."""
    names = sorted({host_of(item) for item in request.session.items if HERE in item.path.parents})
    folder = request.config.getoption("snapshots")
    if folder:
        return {name: json.loads(Path(folder, f"{name}.json").read_text(encoding="utf-8")) for name in names}
    return ask(names, request.config.getoption("ansible_inventory"))


@pytest.fixture
def server(request: pytest.FixtureRequest, host: Any, snapshots: dict[str, dict[str, Any]]) -> Server:
    """The server that a test is about."""
    name = host_of(request.node)
    return Server(name, snapshots[name])

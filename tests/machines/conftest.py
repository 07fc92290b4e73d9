"""Booted machines for tests. They run beside the quickstart's server: own names (t-...), addresses from .50 on.

Fixtures: `machines` (a factory), `blank` (a fresh server), `finished_image` and `finished` (site.yml has been
applied; cached in the pool by a hash over all that it depends on), `finished_bookworm` (the same on Debian 12),
`play` (ansible-playbook against them).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sim.machine import doctor, identity, image, network, packages, pool, servers
from sim.machine.common import CHECKOUT, Sim, SimError, tree_hash
from sim.machine.machine import Machine, ready
from sim.machine.machine import machines as all_machines
from tests.machines import standin_cuda_repository

PLACES = range(50, 200)
IMAGES_KEPT = {"prepared": 2, "finished": 4}
PREPARED_PARTS = ("src/gpuready/catalog/stacks.yaml", "src/gpuready/catalog/locks")
PREPARED_BY = "playbooks/cuda.yml playbooks/engines.yml"
# What a finished server depends on; what only the controller shows or measures is left out.
SITE_PARTS = (
    "site.yml",
    "ansible.cfg",
    "roles",
    "playbooks",
    "plugins/action",
    "src/gpuready/catalog",
    "src/gpuready/cli",
    "src/gpuready/hardware",
    "src/gpuready/operations",
    "src/gpuready/outcome.py",
    "src/gpuready/planning",
    "src/gpuready/rendering/templates.py",
    "src/gpuready/serving",
    "src/gpuready/spec",
    "templates",
    "inventories/sim",
    "sim/machine/identity.py",
)
RECAP = re.compile(r"^(\S+)\s+: (ok=\d+ .*)$", re.MULTILINE)


@dataclass
class Played:
    """What a run of ansible-playbook came to."""

    rc: int
    stdout: str
    recap: dict[str, dict[str, int]] = field(default_factory=dict)
    """By host: ok, changed, unreachable, failed, skipped, rescued, ignored."""
    seconds: float = 0.0


Hosts = Machine | Mapping[str, Machine | str]
"""One machine, known to Ansible as its suite's server of inventories/sim; or by name, a machine or an address."""


@contextlib.contextmanager
def invocation(
    sim: Sim,
    hosts: Hosts,
    playbook: str = "site.yml",
    extra: Mapping[str, Any] | None = None,
    *args: str,
    group_vars: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
    checkout: Path = CHECKOUT,
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Give the command line and the environment of a run against test machines; what they name goes afterwards.

    `files` are an operator's own, by their paths in the inventory's folder; `checkout` is this one or a test's copy.
    """
    named: Mapping[str, Machine | str] = {server_name(hosts): hosts} if isinstance(hosts, Machine) else hosts
    # Short, because a control socket's path is limited; new, because addresses are used again.
    folder = Path(tempfile.mkdtemp(prefix="gr-"))
    try:
        _write_inventory(sim, folder / "inventory", named, group_vars or {})
        for name, text in (files or {}).items():
            file = folder / "inventory" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (folder / "extra.json").write_text(json.dumps(extra or {}))
        argv = [
            str(checkout / ".venv/bin/ansible-playbook"),
            "-i",
            str(folder / "inventory"),
            *playbook.split(),
            "-e",
            f"@{folder / 'extra.json'}",
            *args,
        ]
        env = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
        env |= {
            "ANSIBLE_CONFIG": str(checkout / "ansible.cfg"),
            "PYTHONPATH": str(checkout / "src"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(folder / "cp"),
            "ANSIBLE_SSH_ARGS": "-o ControlMaster=auto -o ControlPersist=20s -o ServerAliveInterval=15",
            "PATH": f"{checkout / '.venv/bin'}:{env.get('PATH', os.defpath)}",
        }
        yield argv, env
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def played(rc: int, stdout: str, started: float) -> Played:
    """Return what a run that has ended came to."""
    recap = {
        host: {key: int(count) for key, count in (pair.split("=") for pair in counts.split())}
        for host, counts in RECAP.findall(stdout)
    }
    return Played(rc, stdout, recap, time.monotonic() - started)


def run_playbook(
    sim: Sim,
    hosts: Hosts,
    playbook: str = "site.yml",
    extra: Mapping[str, Any] | None = None,
    *args: str,
    group_vars: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
    timeout: float = 1200,
    checkout: Path = CHECKOUT,
) -> Played:
    """Run a playbook of ours (or several, with spaces between) on test machines, with inventories/sim's variables.

    `extra` are extra vars (they win); `group_vars` are added to the hosts' groups in the inventory itself, in whose
    folder `files` lie.
    """
    words = invocation(sim, hosts, playbook, extra, *args, group_vars=group_vars, files=files, checkout=checkout)
    with words as (argv, env):
        started = time.monotonic()
        done = subprocess.run(
            argv,
            cwd=checkout,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
    return played(done.returncode, done.stdout, started)


def server_name(machine: Machine) -> str:
    """Return the name of the server of inventories/sim that a machine stands for."""
    suite = machine.record.suite
    return next(name for name, server in servers.KNOWN.items() if server.kind.suite == suite)


def _write_inventory(sim: Sim, folder: Path, hosts: Mapping[str, Machine | str], group_vars: Mapping[str, Any]) -> None:
    folder.mkdir()
    for entry in (CHECKOUT / "inventories/sim").iterdir():
        if entry.name != "hosts.yml":
            (folder / entry.name).symlink_to(entry)
    groups: dict[str, dict[str, Any]] = {}
    for name, where in hosts.items():
        group = groups.setdefault(name.rpartition("-")[0], {"hosts": {}, "vars": dict(group_vars)})
        group["hosts"][name] = {"ansible_host": where.address if isinstance(where, Machine) else where}
    (folder / "hosts.yml").write_text(
        json.dumps(
            {
                "all": {
                    "vars": {
                        "ansible_user": "root",
                        "ansible_ssh_private_key_file": str(identity.key_file(sim)),
                        "ansible_ssh_common_args": " ".join(identity.ssh_options(sim)),
                    },
                    "children": groups,
                }
            },
            indent=2,
        )
    )


@dataclass
class Factory:
    """Makes booted machines that last until the session ends, or until they are given back."""

    sim: Sim
    made: list[Machine] = field(default_factory=list)

    def __call__(self, label: str, source: str = "", suite: str = "trixie", *, start: bool = True) -> Machine:
        """Return a new machine t-PID-LABEL from an image (default: the suite's blank one), booted."""
        machine = Machine(self.sim, f"t-{os.getpid()}-{label}")
        with self.sim.lock():
            taken = {other.address for other in all_machines(self.sim)}
            free = next(address for address in map(self.sim.address, PLACES) if address not in taken)
            machine.create(source or image.ensure(self.sim, servers.kind_of_suite(suite)), suite, free)
            self.made.append(machine)
            if start:
                machine.start()
        if start:
            machine.wait_until_booted()
        return machine

    def give_back(self, machine: Machine) -> None:
        """Destroy a machine now."""
        with self.sim.lock():
            machine.destroy()
        self.made.remove(machine)


def _remove_leftovers(sim: Sim) -> None:
    """Destroy the machines of test runs that were killed."""
    for machine in all_machines(sim):
        owner = re.match(r"t-(\d+)-", machine.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            machine.destroy()


@pytest.fixture(scope="session")
def sim() -> Iterator[Sim]:
    """The simulation, up; put back as it was found, except that the pool keeps its images."""
    try:
        found = Sim.from_environment()
        doctor.refuse_if_unfit(found)
    except SimError as problem:
        pytest.skip(f"no machines can be booted here: {problem}")
    had_network, had_pool = network.is_up(found), pool.is_up(found)
    packages.install(packages.missing())
    with found.lock():
        ready(found)
        _remove_leftovers(found)
    yield found
    with found.lock():
        if not any(machine.status() == "running" for machine in all_machines(found)):
            if not had_network:
                network.down(found)
            if not had_pool:
                pool.down(found)


@pytest.fixture(scope="session")
def machines(sim: Sim) -> Iterator[Factory]:
    """A factory of booted machines: machines("label", source=IMAGE, suite=...)."""
    factory = Factory(sim)
    yield factory
    for machine in list(factory.made):
        factory.give_back(machine)


@pytest.fixture
def blank(machines: Factory, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A freshly rented server, for one test."""
    machine = machines(_label(request, "blank"))
    yield machine
    machines.give_back(machine)


def _label(request: pytest.FixtureRequest, kind: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", str(request.node.name).removeprefix("test_").lower())
    return f"{kind}-{name[:24].strip('-')}"


Play = Callable[..., Played]


@pytest.fixture(scope="session")
def play(sim: Sim) -> Play:
    """Run ansible-playbook: play(machine, "site.yml", {"extra": 1}, "--check", group_vars={...})."""

    def runner(
        hosts: Hosts,
        playbook: str = "site.yml",
        extra: Mapping[str, Any] | None = None,
        *args: str,
        group_vars: Mapping[str, Any] | None = None,
        files: Mapping[str, str] | None = None,
        timeout: float = 1200,
        checkout: Path = CHECKOUT,
    ) -> Played:
        return run_playbook(
            sim,
            hosts,
            playbook,
            extra,
            *args,
            group_vars=group_vars,
            files=files,
            timeout=timeout,
            checkout=checkout,
        )

    return runner


def finished_key(suite: str = "trixie") -> str:
    """Return the name of the image of a finished server: a hash over all that site.yml depends on."""
    parts = [CHECKOUT / part for part in SITE_PARTS]
    if suite == "bookworm":
        parts.append(Path(standin_cuda_repository.__file__))
    return f"finished-{suite}-{tree_hash(parts, image.key(servers.kind_of_suite(suite)))}"


@contextlib.contextmanager
def _only_one_builds(sim: Sim) -> Iterator[None]:
    with (sim.state / "finished.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def prepared_key(suite: str = "trixie") -> str:
    """Return the name of the image of a server that has the large parts: the CUDA toolkit and the engines."""
    parts = [CHECKOUT / part for part in PREPARED_PARTS]
    if suite == "bookworm":
        parts.append(Path(standin_cuda_repository.__file__))
    return f"prepared-{suite}-{tree_hash(parts, image.key(servers.kind_of_suite(suite)))}"


def _ensure(
    sim: Sim, machines: Factory, key: str, source: str, suite: str, playbooks: str, toolkit: Path | None = None
) -> str:
    """Return the image `key`; when there is none, apply the playbooks to a clone of `source`."""
    with _only_one_builds(sim):
        if pool.is_subvolume(sim.pool / "images" / key):
            return key
        kind = key.split("-")[0]
        machine = machines(f"{kind}-{suite}", source, suite)
        if toolkit:
            standin_cuda_repository.offer(machine, toolkit)
        played = run_playbook(sim, machine, playbooks)
        if played.rc:
            log = CHECKOUT / f".cache/log/{key}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(played.stdout)
            machines.give_back(machine)
            pytest.fail(f"{playbooks} ended with {played.rc}, see {log}\n{played.stdout[-3000:]}")
        with sim.lock():
            machine.save_as_image(key)
            older = [name for name in pool.images(sim) if name.startswith(f"{kind}-{suite}-") and name != key]
            for name in older[: -(IMAGES_KEPT[kind] - 1)]:
                pool.delete(sim, sim.pool / "images" / name)
        machines.give_back(machine)
    return key


def ensure_prepared(sim: Sim, machines: Factory, suite: str = "trixie", toolkit: Path | None = None) -> str:
    """Return the image of a server that has the large parts only; what site.yml then does is quick.

    `toolkit` is the root of a server that has the CUDA toolkit: a stand-in repository offers it under NVIDIA's names.
    """
    return _ensure(sim, machines, prepared_key(suite), "", suite, PREPARED_BY, toolkit)


def ensure_finished(sim: Sim, machines: Factory, suite: str = "trixie", toolkit: Path | None = None) -> str:
    """Return the image of a finished server; apply site.yml to a prepared one when there is none."""
    key = finished_key(suite)
    if pool.is_subvolume(sim.pool / "images" / key):
        return key
    return _ensure(sim, machines, key, ensure_prepared(sim, machines, suite, toolkit), suite, "site.yml")


@pytest.fixture(scope="session")
def prepared_image(sim: Sim, machines: Factory) -> str:
    """The name of the image of a server that has the large parts only: site.yml then takes seconds, not minutes."""
    return ensure_prepared(sim, machines)


@pytest.fixture(scope="session")
def finished_image(sim: Sim, machines: Factory) -> str:
    """The name of the image of a finished server; machines("label", finished_image) gives a clone of your own."""
    return ensure_finished(sim, machines)


@pytest.fixture(scope="session")
def finished(machines: Factory, finished_image: str) -> Machine:
    """A finished server that all tests share: read it, restart things on it, but leave it serving."""
    return machines("finished", finished_image)


@pytest.fixture
def finished_clone(machines: Factory, finished_image: str, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A finished server of one's own, for a test that changes it."""
    machine = machines(_label(request, "done"), finished_image)
    yield machine
    machines.give_back(machine)


@pytest.fixture(scope="session")
def toolkit(sim: Sim, finished_image: str) -> Path:
    """The root of a server that has Debian 13's CUDA toolkit, from which the stand-in repository is made."""
    return sim.pool / "images" / finished_image


@pytest.fixture(scope="session")
def finished_bookworm(sim: Sim, machines: Factory, toolkit: Path) -> Machine:
    """The finished second server: Debian 12, A100, CUDA under NVIDIA's names; all tests share it."""
    return machines("bookworm", ensure_finished(sim, machines, "bookworm", toolkit), "bookworm")

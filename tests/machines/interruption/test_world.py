"""What goes wrong outside of gpuready in the middle of a run: said in a sentence, healed, finished by one run."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.machines.interruption import outage
from tests.machines.interruption.convergence import Declared, demand_convergence
from tests.machines.interruption.playing import Run
from tests.machines.test_serving import declared, deployment

if TYPE_CHECKING:
    from sim.machine.common import Sim
    from sim.machine.machine import Machine
    from tests.machines.conftest import Factory, Played
    from tests.machines.interruption.tally import Tally

pytestmark = pytest.mark.machine

WITHOUT_TOOLS = "apt-get purge -y -qq numactl haproxy > /dev/null && rm -f /var/cache/apt/archives/*.deb"
ENGINE = "/opt/gpuready/engines"


@pytest.fixture(scope="module")
def server(machines: Factory, finished_image: str) -> Iterator[Machine]:
    """A finished server on which these tests follow each other; each leaves it finished."""
    machine = machines("world", finished_image)
    yield machine
    machines.give_back(machine)


def refused(played: Played) -> str:
    """Return what a run said that could not go on, without line breaks: no traceback, and not rc 0."""
    assert played.rc not in (0, 250), played.stdout
    assert "Traceback (most recent call last)" not in played.stdout
    return re.sub(r"\s+", " ", played.stdout)


def after_preflight(run: Run) -> None:
    """Wait until the server was found fit: what happens now was not to be foreseen."""
    assert run.wait_until(lambda: len(run.finished()) > 0), run.said


def serving(**flags: object) -> Declared:
    """Declare another release of the deployment, so that there is something to do."""
    return Declared(declared(deployment("chat", flags=flags)))


# ------------------------------------------------------------------------------------------------ packages


@pytest.mark.long
@pytest.mark.parametrize(
    ("spoil", "after_bytes", "said"),
    [
        ("true", 800_000, "apt-get could not install"),
        ("rm -rf /var/lib/apt/lists/*", 3_000_000, "apt-get could not read the package lists"),
    ],
    ids=["packages", "lists"],
)
def test_the_package_mirror_is_cut_in_the_middle_of_a_download(
    sim: Sim, server: Machine, tally: Tally, spoil: str, after_bytes: int, said: str
) -> None:
    with tally.point("packages", f"the mirror is cut after {after_bytes} bytes"):
        server.ssh(f"apt-get update -qq && {WITHOUT_TOOLS} && {spoil}")
        with Run(sim, server) as run:
            after_preflight(run)
            with outage.mirror_cut(server, after_bytes):
                assert said in refused(run.wait())
        demand_convergence(sim, server)


def test_a_package_lock_that_is_released_is_waited_for(sim: Sim, server: Machine, tally: Tally) -> None:
    with tally.point("lock", "another program holds the package lock and ends"):
        server.ssh(WITHOUT_TOOLS.replace(" haproxy", ""))
        outage.take_package_lock(server, seconds=20)
        first = demand_convergence(sim, server)
        waits = r"waits at most 300 s: the package lock of this server is held by python3 \(pid \d+\)"
        assert re.search(waits, first.stdout), first.stdout


@pytest.mark.long
def test_a_package_lock_that_stays_is_refused_by_name(sim: Sim, server: Machine, tally: Tally) -> None:
    with tally.point("lock", "another program holds the package lock for good"):
        server.ssh(WITHOUT_TOOLS.replace(" haproxy", ""))
        outage.take_package_lock(server, seconds=600)
        with Run(sim, server, "site.yml", {"base_lock_seconds": 12}) as run:
            said = refused(run.wait())
        outage.drop_package_lock(server)
        named = r"is held by python3 \(pid (\d+)\); wait for its end, or end it \(kill \1\), then run again"
        assert re.search(named, said), said
        demand_convergence(sim, server)


KILLER = """
import pathlib, subprocess, time
log = pathlib.Path("/var/log/dpkg.log")
start = log.stat().st_size
while b"status half-installed haproxy" not in log.read_bytes()[start:]:
    time.sleep(0.001)
subprocess.run(["pkill", "-9", "-x", "dpkg"])
"""


@pytest.mark.long
def test_dpkg_is_killed_in_the_middle_of_a_package(sim: Sim, server: Machine, tally: Tally) -> None:
    with tally.point("packages", "dpkg is killed while it unpacks"):
        server.ssh("apt-get purge -y -qq haproxy > /dev/null")
        server.ssh(["systemd-run", "--quiet", "/usr/bin/python3", "-c", KILLER])
        with Run(sim, server) as run:
            assert "apt-get could not install haproxy" in refused(run.wait())
        assert "haproxy" in server.ssh("dpkg --audit").stdout
        demand_convergence(sim, server)


@pytest.mark.long
def test_a_download_that_lost_its_content_is_fetched_again(sim: Sim, server: Machine, tally: Tally) -> None:
    """As after a power cut: the length reached the disk, the content did not."""
    with tally.point("packages", "a package in the cache has its length but not its content"):
        server.ssh(
            "apt-get purge -y -qq haproxy > /dev/null; cd /var/cache/apt/archives && apt-get download -qq haproxy"
            " && for one in haproxy_*.deb; do size=$(stat -c %s $one); rm $one; truncate -s $size $one; done"
        )
        demand_convergence(sim, server)


# ------------------------------------------------------------------------------------------------ disk


@pytest.mark.long
def test_the_disk_fills_while_a_package_is_unpacked(sim: Sim, server: Machine, tally: Tally) -> None:
    with tally.point("disk", "full while apt unpacks, then freed"):
        server.ssh(WITHOUT_TOOLS)
        with Run(sim, server) as run:
            after_preflight(run)
            with outage.small_disk(server, "/usr/share/doc", 16):
                said = refused(run.wait())
        assert "No space left on device" in said
        assert "free space and run again; nothing has to be undone" in said
        demand_convergence(sim, server)


@pytest.mark.long
def test_the_disk_fills_while_a_release_is_written(
    sim: Sim, machines: Factory, finished_image: str, tally: Tally
) -> None:
    machine = machines("world-release", finished_image)
    wanted = serving(**{"max-num-seqs": 3})
    with tally.point("disk", "full while a release is written, then freed"):
        with Run(sim, machine, "site.yml", wanted.extra) as run:
            after_preflight(run)
            with outage.small_disk(machine, "/var/lib/gpuready", 4):
                said = refused(run.wait())
        sentence = r"/var/lib/gpuready/\S+: No space left on device; run the command again once that is repaired"
        assert re.search(sentence, said), said
        demand_convergence(sim, machine, wanted)
    machines.give_back(machine)


# ------------------------------------------------------------------------------------------------ network


@pytest.mark.long
def test_the_network_is_away_for_a_moment(sim: Sim, server: Machine, tally: Tally) -> None:
    """TCP carries on where it was: the run itself is not disturbed."""
    wanted = serving(**{"max-num-seqs": 4})
    with tally.point("network", "away for three seconds"):
        with Run(sim, server, "site.yml", wanted.extra) as run:
            assert run.wait_until(lambda: run.is_at("Serving"))
            with outage.network_cut(server):
                time.sleep(3)
                assert not run.is_over()
            assert run.wait().rc == 0, run.said
        demand_convergence(sim, server, wanted)


@pytest.mark.long
def test_the_network_is_cut_and_the_command_goes_on_alone(sim: Sim, server: Machine, tally: Tally) -> None:
    """The server does not know that nobody listens any more; the next run meets the command at work."""
    wanted = serving(**{"max-num-seqs": 5})
    with tally.point("network", "cut in the middle of a release, healed"):
        with Run(sim, server, "site.yml", wanted.extra) as run:
            assert run.wait_until(lambda: run.is_at("Serving"))
            with outage.network_cut(server):
                played = run.wait()
        refused(played)
        assert played.recap["h100-sg-01"]["unreachable"] == 1, played.stdout
        demand_convergence(sim, server, wanted)


# ------------------------------------------------------------------------------------------------ clock


def _need_faketime() -> None:
    if shutil.which("faketime") is None:
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "faketime"], check=False)
    if shutil.which("faketime") is None:
        pytest.skip("Debian's faketime is not installed here, and cannot be")


@pytest.mark.long
@pytest.mark.parametrize("wrong", ["-17d", "+3y"])
def test_the_controllers_clock_is_wrong(sim: Sim, server: Machine, tally: Tally, wrong: str) -> None:
    _need_faketime()
    wanted = serving(**{"max-num-seqs": 6 if wrong == "-17d" else 7})
    with tally.point("clock", f"the controller's clock is {wrong} wrong"):
        with Run(sim, server, "site.yml", wanted.extra, wrapper=["faketime", "-m", "-f", wrong]) as run:
            played = run.wait()
        assert played.rc == 0, played.stdout
        assert played.recap["h100-sg-01"]["changed"] > 0
        demand_convergence(sim, server, wanted)


# ------------------------------------------------------------------------------------------------ engine


@pytest.fixture
def without_engine(machines: Factory, finished_image: str) -> Iterator[Machine]:
    """A finished server that has lost its engine."""
    machine = machines("world-engine", finished_image)
    machine.ssh(f"systemctl stop gpuready-engine@chat.0; rm -rf {ENGINE}/*")
    yield machine
    machines.give_back(machine)


def _installing(run: Run) -> bool:
    step = run.running()
    return step is not None and "Install the engine" in step.task


@pytest.mark.long
def test_the_package_index_is_cut_in_the_middle_of_a_wheel(sim: Sim, without_engine: Machine, tally: Tally) -> None:
    machine = without_engine
    with tally.point("packages", "the package index is cut in the middle of a wheel"):
        with Run(sim, machine) as run:
            assert run.wait_until(lambda: _installing(run))
            with outage.mirror_cut(machine, 150_000_000):
                said = refused(run.wait())
        assert "could not be installed" in said
        assert "nothing is installed, what was downloaded is kept for the next run" in said
        assert machine.ssh(f"ls {ENGINE}").stdout.strip() == ""
        demand_convergence(sim, machine)


@pytest.mark.long
def test_the_disk_fills_while_an_engine_is_built(sim: Sim, without_engine: Machine, tally: Tally) -> None:
    machine = without_engine
    with tally.point("disk", "full while an engine is built, then freed"):
        outage.lay_disk(machine, "/opt/gpuready")
        with Run(sim, machine) as run:
            assert run.wait_until(lambda: _installing(run))
            machine.ssh("until [ $(df --output=used -m /opt/gpuready | tail -1) -gt 600 ]; do sleep 0.1; done")
            with outage.full_disk(machine, "/opt/gpuready", 100_000):
                said = refused(run.wait())
        assert "the disk is full; free space under /opt/gpuready and run the stage again" in said
        assert machine.ssh(f"ls {ENGINE}").stdout.strip() == ""
        demand_convergence(sim, machine)


@pytest.mark.long
def test_a_command_is_killed_alone_and_what_it_started_goes_on(sim: Sim, without_engine: Machine, tally: Tally) -> None:
    """As the kernel does it when memory ends: the command is gone, uv still writes into the engine's folder."""
    machine = without_engine
    with tally.point("server", "the command is killed alone while uv installs"):
        with Run(sim, machine) as run:
            assert run.wait_until(lambda: _installing(run))
            machine.ssh(
                "until pgrep -f 'uv [p]ip install'; do sleep 0.05; done; sleep 1; "
                " pkill -9 -f '^/usr/bin/python3 .*engine [i]nstall'"
            )
            assert "gpuready engine install did not answer on h100-sg-01" in refused(run.wait())
        demand_convergence(sim, machine)

"""site.yml is killed at its tasks, on the controller and on the server: one run finishes the job each time.

By default two points, with --long every task that asks the server. Tasks that only the controller runs (argument
checks, includes) are not counted: a kill there leaves what a kill at the start of the next task leaves.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
from sim.machine import pool
from tests.machines.interruption.convergence import Declared, demand_convergence
from tests.machines.interruption.playing import Run
from tests.machines.test_serving import declared, deployment

if TYPE_CHECKING:
    from sim.machine.common import Sim
    from tests.machines.interruption.points import Lanes

pytestmark = pytest.mark.machine

LARGE = ("CUDA", "Engines")
PORT = 8090


def test_some_tasks(sim: Sim, lanes: Lanes, finished_image: str) -> None:
    """A server that serves gets another release, then another gateway; each is interrupted where it matters most."""
    release = declared(deployment("chat", flags={"max-num-seqs": 3}))
    with lanes.machine("sample", finished_image) as machine:
        with lanes.tally.point("server", "the power goes while a release is tried"):
            with Run(sim, machine, "site.yml", release) as run:
                assert run.wait_until(lambda: run.is_at("Serving"))
                time.sleep(3)
                machine.kill()
            lanes.start_again(machine)
            demand_convergence(sim, machine, Declared(release))
        with lanes.tally.point("controller", "killed while rules of the packet filter are on trial"):
            moved = Declared({**release, "gateway_port": PORT}, PORT)
            with Run(sim, machine, "site.yml", moved.extra) as run:
                assert run.wait_until(lambda: any("Connect anew" in step.task for step in run.starts()))
                run.kill()
            assert machine.ssh("ls /run/gpuready/firewall/pending.nft").stdout
            demand_convergence(sim, machine, moved)


@pytest.mark.long
def test_every_task(lanes: Lanes, prepared_image: str) -> None:
    """Every task on a server that has the large parts: first the power of the server goes, then the controller's."""
    with lanes.recorded(prepared_image) as run:
        # A short step may end while the former one's picture is taken; what it has not changed, the next picture shows.
        taken = {one.step for one in run.snapshots}
        assert [str(done.step) for done in run.done if done.changed and done.step not in taken] == []
        failures = lanes.take([lanes.power_cut(snapshot) for snapshot in run.snapshots])
    failures += lanes.take([lanes.controller_killed(prepared_image, done) for done in run.done])
    assert not failures


@pytest.mark.long
def test_the_large_parts(lanes: Lanes) -> None:
    """The toolkit and the engine in the middle of being unpacked, on a blank server."""
    with lanes.recorded("") as run:
        large = [done for done in run.done if done.step.play in LARGE and done.seconds > 15]
        assert len(large) == len(LARGE), "the toolkit's and the engine's step take long on a blank server"
        steps = [done.step for done in large]
        cuts = [one for one in run.snapshots if one.step in steps and one.after > 5]
        failures = lanes.take([lanes.power_cut(snapshot) for snapshot in cuts])
    failures += lanes.take([lanes.controller_killed("", done) for done in large])
    assert not failures


@pytest.mark.long
def test_the_engine_while_it_is_unpacked(sim: Sim, lanes: Lanes, prepared_image: str) -> None:
    """The power goes while an engine is installed on a server that has the toolkit: what uv unpacked may be torn."""
    image = f"engineless-{os.getpid()}"
    with lanes.machine("engineless", prepared_image) as machine:
        machine.ssh("rm -rf /opt/gpuready/engines/vllm-*")
        with sim.lock():
            machine.save_as_image(image)
    try:
        with lanes.recorded(image) as run:
            cuts = [one for one in run.snapshots if one.step.play == "Engines"]
            assert max(one.after for one in cuts) > 5
            failures = lanes.take([lanes.power_cut(snapshot) for snapshot in cuts])
    finally:
        with sim.lock():
            pool.delete(sim, sim.pool / "images" / image)
    assert not failures

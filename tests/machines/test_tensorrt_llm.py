"""TensorRT-LLM on a booted Debian 12: the real entry is refused by name, a test catalog brings a stand-in of it.

The stand-in is a wheel that this test makes (tensorrt_llm_standin/NOTICE says after what). Playbooks, roles and server
part are the product's own, from a copy of the checkout in which the catalog alone is the test's.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sim.machine.common import CHECKOUT, Sim
from sim.machine.machine import Machine
from tests.machines.conftest import Factory, Play, Played, ensure_finished
from tests.machines.replica_at_work import START_SECONDS, WORKLOAD, Replica, end_of
from tests.machines.tensorrt_llm_standin import wheel

pytestmark = [pytest.mark.machine, pytest.mark.long]

HOST = "a100-la-01"
MODEL = "gpuready-sim/tiny-qwen2"
MEASURED = "was given 64.0 MiB, 131,072 tokens; the engine has 64.0 MiB, 131,072 (+0.0 %)"


def declared(**more: Any) -> dict[str, Any]:
    one = {"name": "swift", "model": MODEL, "engine": "tensorrt_llm", "gpus": [1], "workload": WORKLOAD, **more}
    return {"gpuready_deployments": [one]}


@dataclass(frozen=True)
class Site:
    """A server, and how playbooks of the test's copy of the checkout run on it."""

    machine: Machine
    play: Play
    wheels: Path
    copy: Path

    def __call__(self, book: str, wanted: dict[str, Any], *words: str, own: bool = True) -> Played:
        links = {"engines_find_links": [str(self.wheels)]}
        checkout = self.copy if own else CHECKOUT
        return self.play(self.machine, book, {**wanted, **links}, *words, checkout=checkout)


@pytest.fixture(scope="module")
def bare(sim: Sim, machines: Factory, toolkit: Path, play: Play, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A finished Debian 12 server that does not know the stand-in yet."""
    folder = tmp_path_factory.mktemp("tensorrt")
    copy = wheel.checkout(folder, wheel.build(folder))
    machine = machines("tensorrt", ensure_finished(sim, machines, "bookworm", toolkit), "bookworm")
    return Site(machine, play, folder, copy)


@pytest.fixture(scope="module")
def site(bare: Site) -> Site:
    """The same with the stand-in, brought by site.yml."""
    played = bare("site.yml", declared())
    assert played.rc == 0, played.stdout
    assert re.search(rf"note: swift: planned .*{re.escape(MEASURED)}", played.stdout), played.stdout
    return bare


@pytest.fixture
def swift(site: Site) -> Replica:
    return Replica(site.machine, "swift.0", MODEL)


def current(replica: Replica) -> int:
    told = json.loads(replica.say("gpuready release list --json"))["data"]["replicas"]
    return int(told[replica.name]["current"])


def test_the_real_entry_is_refused_by_name_before_any_change(bare: Site) -> None:
    real = {**declared(), "gpuready_stack": "cu128"}
    before = bare.machine.ssh("ls /opt/gpuready/engines; cat /var/lib/gpuready/plan.json | sha256sum").stdout
    played = bare("site.yml", real, own=False)
    assert played.rc == 2, played.stdout
    said = " ".join(played.stdout.split())
    assert "tensorrt_llm 1.0.0 has no lock for the server's Python 3.11: it runs on Python 3.10, 3.12" in said
    assert "use Ubuntu 22.04 (3.10) or Ubuntu 24.04 (3.12), or install a Python 3.10 or 3.12 on the server" in said
    assert "engines_pythons: {tensorrt_llm: /opt/python3.12/bin/python3}" in said
    assert played.recap[HOST]["changed"] == 0
    assert bare.machine.ssh("ls /opt/gpuready/engines; cat /var/lib/gpuready/plan.json | sha256sum").stdout == before


def test_with_such_a_python_it_is_refused_until_its_lock_was_made(bare: Site) -> None:
    """The Python is a stand-in as well: it says that it is 3.12."""
    place = bare.machine.root / "opt/python3.12/bin/python3"
    place.parent.mkdir(parents=True)
    place.write_text("#!/bin/sh\necho 3.12.3\n", encoding="ascii")
    place.chmod(0o755)
    named = {"engines_pythons": {"tensorrt_llm": "/opt/python3.12/bin/python3"}}
    played = bare("site.yml", {**declared(), "gpuready_stack": "cu128", **named}, own=False)
    assert played.rc == 2, played.stdout
    said = " ".join(played.stdout.split())
    assert "has no lock in this checkout yet (catalog/locks/tensorrt-llm-1.0.0-cu128-py312.txt)" in said
    assert "https://pypi.nvidia.com" in said
    assert "run scripts/lock tensorrt-llm-1.0.0-cu128-py312 on a host that reaches them" in said
    assert played.recap[HOST]["changed"] == 0


def test_the_second_run_changes_nothing_and_check_mode_is_silent(site: Site) -> None:
    for words in ((), ("--check", "--diff")):
        played = site("site.yml", declared(), *words)
        assert played.rc == 0, played.stdout
        assert played.recap[HOST]["changed"] == 0, played.stdout
        assert "+++ after" not in played.stdout


def test_it_runs_from_its_wheel_by_the_real_command_line(swift: Replica) -> None:
    words = swift.say(f"tr '\\0' '\\n' < /proc/{swift.shown('MainPID')}/cmdline").splitlines()
    plan = json.loads(swift.say("cat /var/lib/gpuready/plan.json"))
    (engine,) = plan["engines"]
    assert words[:2] == [f"{engine['folder']}/bin/python", f"{engine['folder']}/bin/trtllm-serve"]
    assert words[3:7] == ["--backend", "pytorch", "--host", "127.0.0.1"]
    assert swift.straight("/version") == (200, '{"version": "1.0.0"}')
    marker = json.loads(swift.say(f"cat {engine['folder']}/gpuready-engine.json"))
    assert (marker["lock"], marker["packages"]) == ("tensorrt-llm-1.0.0-standin-py311", 2)


def test_it_answers_through_the_gateway(swift: Replica) -> None:
    reply = swift.chat()
    assert len(reply["choices"][0]["message"]["content"]) == 8
    folder = Path(json.loads(swift.say("cat /var/lib/gpuready/plan.json"))["deployments"][0]["model_path"]).name
    assert reply["model"] == folder, "1.0.0 takes no name for a model but its folder's"
    assert end_of(swift.stream(20)) == ("length", "data: [DONE]")
    body = {"model": "no/such", "prompt": "Hello", "max_tokens": 2}
    assert swift.refused("/v1/completions", body)[1]["code"] == "model_not_found"
    assert swift.straight("/v1/completions", body)[0] == 200, "it answers to any name: the gateway must not"


def test_its_own_figures_are_read_and_recorded(swift: Replica) -> None:
    assert swift.ready()["engine"] == {"source": "/metrics", "kv_tokens": 131072, "blocks": 4096, "block_tokens": 32}


def test_it_survives_a_restart_and_kill_9(swift: Replica) -> None:
    pid = swift.shown("MainPID")
    swift.machine.ssh(f"systemctl restart {swift.unit}", timeout=START_SECONDS)
    assert swift.shown("MainPID") != pid
    pid = swift.shown("MainPID")
    swift.machine.ssh(f"kill -9 {pid}")
    swift.wait_until_serving(pid)
    swift.chat()


def test_a_stop_lets_the_stream_that_is_under_way_end(swift: Replica) -> None:
    stream = swift.stream(800)
    stop = threading.Thread(target=swift.machine.ssh, args=(f"systemctl stop {swift.unit}",), kwargs={"timeout": 120})
    stop.start()
    assert end_of(stream) == ("length", "data: [DONE]")
    stop.join(timeout=120)
    assert (swift.shown("ActiveState"), swift.shown("Result")) == ("inactive", "success")
    swift.machine.ssh(f"systemctl start {swift.unit}", timeout=START_SECONDS)
    swift.chat()


def test_one_flag_is_one_release_and_what_the_engine_refuses_is_rolled_back(site: Site, swift: Replica) -> None:
    first = current(swift)
    smaller = declared(flags={"max_batch_size": 4})
    played = site("site.yml", smaller)
    assert played.rc == 0, played.stdout
    assert current(swift) == first + 1
    serve = swift.say(f"cat /var/lib/gpuready/releases/swift/{first + 1}/serve.yaml")
    assert "max_batch_size: 4" in serve.splitlines()

    # A key inside of a record, which the catalog does not know: only the engine itself can tell.
    played = site("site.yml", declared(flags={"max_batch_size": 4, "scheduler_config": {"policy": "MAX_UTILIZATION"}}))
    assert played.rc == 2, played.stdout
    said = " ".join(played.stdout.split())
    assert f"back on release {first + 1}" in said
    assert "Extra inputs are not permitted" in said, "the engine's own words"
    assert current(swift) == first + 1
    swift.chat()
    assert site("site.yml", smaller).recap[HOST]["changed"] == 0

    played = site("site.yml", declared())
    assert played.rc == 0, played.stdout
    assert current(swift) == first
    swift.chat()

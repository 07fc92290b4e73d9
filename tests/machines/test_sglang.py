"""SGLang's own server, with the stand-in operator, on a booted Debian 12 beside a vLLM deployment, by site.yml."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from sim.machine.common import CHECKOUT, Sim
from sim.machine.machine import Machine
from tests.machines.conftest import Factory, Play, ensure_finished
from tests.machines.replica_at_work import START_SECONDS, WORKLOAD, Replica, end_of

pytestmark = [pytest.mark.machine, pytest.mark.long]

HOST = "a100-la-01"
MODEL = "gpuready-sim/tiny-qwen2"
TALK = {"name": "talk", "model": MODEL, "engine": "sglang", "gpus": [0], "workload": WORKLOAD}
CODER = {
    "name": "coder",
    "model": "mine/tiny",
    "model_path": "/data/models/own",
    "engine": "vllm",
    "gpus": [3],
    "workload": WORKLOAD,
}
BOTH = {"gpuready_deployments": [CODER, TALK]}
STAND_IN = "/usr/lib/gpuready-standin/engines/sglang_cpu_standin"
MEASURED = "was given 64.0 MiB, 131,072 tokens; the engine has 64.5 MiB, 131,072 (+0.0 %)"


@pytest.fixture(scope="module")
def server(sim: Sim, machines: Factory, toolkit: Path, play: Play) -> Machine:
    """A finished Debian 12 server that serves with vLLM, to which site.yml brings SGLang as well."""
    machine = machines("sglang", ensure_finished(sim, machines, "bookworm", toolkit), "bookworm")
    machine.ssh("mkdir -p /data/models && cp -r /srv/models/gpuready-sim--tiny-qwen2@* /data/models/own")
    played = play(machine, "site.yml", BOTH)
    assert played.rc == 0, played.stdout
    assert re.search(rf"note: talk: planned .*{re.escape(MEASURED)}", played.stdout), played.stdout
    return machine


@pytest.fixture
def talk(server: Machine) -> Replica:
    return Replica(server, "talk.0", MODEL)


@pytest.fixture
def coder(server: Machine) -> Replica:
    return Replica(server, "coder.0", "mine/tiny")


def test_the_second_run_changes_nothing_and_check_mode_is_silent(server: Machine, play: Play) -> None:
    for words in ((), ("--check", "--diff")):
        played = play(server, "site.yml", BOTH, *words)
        assert played.rc == 0, played.stdout
        assert played.recap[HOST]["changed"] == 0, played.stdout
        assert "+++ after" not in played.stdout


def test_it_is_sglangs_own_server_in_its_own_environment(talk: Replica) -> None:
    plan = json.loads(talk.say("cat /var/lib/gpuready/plan.json"))
    engines = {one["engine"]: one for one in plan["engines"]}
    assert engines["sglang"]["lock"] == "sglang-0.5.23-cpu-py311"
    assert (engines["sglang"]["standin"], engines["vllm"]["standin"]) == ("sglang_cpu_standin", None)
    words = talk.say(f"tr '\\0' ' ' < /proc/{talk.shown('MainPID')}/cmdline").split()
    assert words[:3] == [f"{engines['sglang']['folder']}/bin/python", "-m", "sglang.launch_server"]
    environment = talk.say(f"tr '\\0' '\\n' < /proc/{talk.shown('MainPID')}/environ").splitlines()
    assert f"PYTHONPATH={STAND_IN}" in environment
    code, told = talk.straight("/server_info")
    info = json.loads(told)
    assert (code, info["version"], info["attention_backend"]) == (200, "0.5.23", "torch_native")


def test_the_stand_in_turns_as_the_reference_does_on_the_engines_own_torch(talk: Replica) -> None:
    """And vLLM, whose name the stand-in bears, never sees it."""
    program = (CHECKOUT / "tests/rotary_reference.py").read_text(encoding="utf-8")
    (talk.machine.root / "srv/rotary_reference.py").write_text(program, encoding="utf-8")
    run = "setpriv --reuid gpuready-engine --clear-groups env HOME=/nonexistent"
    found = talk.say(f"{run} PYTHONPATH={STAND_IN} /opt/gpuready/engines/sglang-*/bin/python /srv/rotary_reference.py")
    assert float(found) < 1e-5
    others = talk.say("tr '\\0' '\\n' < /proc/$(systemctl show gpuready-engine@coder.0 -P MainPID)/environ")
    assert "PYTHONPATH" not in others


def test_both_engines_answer_through_one_gateway(talk: Replica, coder: Replica) -> None:
    served = {one["id"] for one in json.load(talk.ask("/v1/models"))["data"]}
    assert served == {MODEL, "mine/tiny"}
    first, again = talk.chat(), talk.chat()
    assert first["model"] == MODEL
    assert first["choices"][0]["message"]["content"] == again["choices"][0]["message"]["content"] != ""
    assert coder.chat()["model"] == "mine/tiny"


def test_a_stream_comes_in_pieces_and_ends(talk: Replica) -> None:
    stream = talk.stream(20)
    assert stream.headers["Content-Type"].startswith("text/event-stream")
    assert end_of(stream) == ("length", "data: [DONE]")


def test_an_unknown_model_is_refused_by_the_gateway_and_not_by_sglang(talk: Replica) -> None:
    body = {"model": "no/such", "prompt": "Hello", "max_tokens": 2}
    code, error = talk.refused("/v1/completions", body)
    assert (code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert talk.straight("/v1/completions", body)[0] == 200, "SGLang answers to any name: the gateway must not"


def test_its_own_figures_are_read_recorded_and_shown(talk: Replica) -> None:
    told = talk.ready()["engine"]
    assert told.items() >= {"source": "/server_info", "kv_tokens": 131072, "kv_gib": 0.063, "kv_dtype": "auto"}.items()
    lines = talk.say("gpuready deployment status").splitlines()
    assert any(line.startswith("  talk.0: planned ") and line.endswith(MEASURED) for line in lines), lines


def test_it_survives_a_restart(talk: Replica) -> None:
    pid = talk.shown("MainPID")
    talk.machine.ssh(f"systemctl restart {talk.unit}", timeout=START_SECONDS)
    assert talk.shown("MainPID") != pid
    talk.chat()


def test_it_survives_kill_9_and_leaves_no_process_behind(talk: Replica, coder: Replica) -> None:
    pid, other = talk.shown("MainPID"), coder.shown("MainPID")
    talk.machine.ssh(f"kill -9 {pid}")
    talk.wait_until_serving(pid)
    talk.chat()
    assert talk.say("pgrep -c '^sglang::schedul'") == "1"
    assert coder.shown("MainPID") == other


def test_a_stop_lets_the_stream_that_is_under_way_end(talk: Replica) -> None:
    stream = talk.stream(400)
    stop = threading.Thread(target=talk.machine.ssh, args=(f"systemctl stop {talk.unit}",), kwargs={"timeout": 120})
    stop.start()
    assert end_of(stream) == ("length", "data: [DONE]")
    stop.join(timeout=120)
    assert (talk.shown("ActiveState"), talk.shown("Result")) == ("inactive", "success")
    talk.machine.ssh(f"systemctl start {talk.unit}", timeout=START_SECONDS)
    talk.chat()


def test_both_survive_a_reboot_of_the_machine(talk: Replica, coder: Replica) -> None:
    boot = talk.say("cat /proc/sys/kernel/random/boot_id"), talk.shown("MainPID")
    talk.machine.reboot()
    for replica in (talk, coder):
        replica.wait_until_serving()
        replica.chat()
    assert (talk.say("cat /proc/sys/kernel/random/boot_id"), talk.shown("MainPID")) != boot


def test_a_machine_that_was_made_without_the_stand_in_is_refused(server: Machine, play: Play) -> None:
    marker = "/etc/gpuready-simulated-machine"
    server.ssh(f"cp {marker} /root/marker && sed -i 's/\"sglang_cpu_standin\"//' {marker}")
    try:
        played = play(server, "playbooks/preflight.yml", BOTH)
    finally:
        server.ssh(f"cp /root/marker {marker}")
    assert played.rc == 2, played.stdout
    said = " ".join(played.stdout.split())
    assert "sglang 0.5.23 needs the stand-in sglang_cpu_standin, which is not on it" in said
    assert "make the machine anew from this checkout" in said


def test_on_debian_13_it_is_refused_before_any_change(finished: Machine, play: Play) -> None:
    declared: dict[str, Any] = {"gpuready_deployments": [TALK]}
    played = play(finished, "site.yml", declared)
    assert played.rc == 2, played.stdout
    said = " ".join(played.stdout.split())
    assert "sglang 0.5.23 has no lock for the server's Python 3.13" in said
    assert "use Debian 12 (3.11), or install a Python 3.11 on the server and name it: engines_pythons:" in said
    assert played.recap["h100-sg-01"]["changed"] == 0

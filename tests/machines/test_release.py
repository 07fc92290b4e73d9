"""A finished server's deployment is changed under load: nothing is lost, and what does not serve is taken back."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.machines.test_serving import (
    BROKEN,
    MODEL,
    UNIT,
    ask,
    chat,
    declared,
    deployment,
    replicas,
    say,
    wait_until_serving,
)

if TYPE_CHECKING:
    from sim.machine.machine import Machine

pytestmark = pytest.mark.machine

BOOK = "playbooks/serving.yml"
HOST = "h100-sg-01"


class Clients:
    """Streams one after the other, and what became of each."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.whole = 0
        self.bad: list[str] = []

    def stream(self, tokens: int = 200) -> None:
        body = {"model": MODEL, "prompt": "import os", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        try:
            with ask(self._machine, "/v1/completions", body, timeout=120) as answer:
                events = [line.decode().removeprefix("data: ").strip() for line in answer if line.startswith(b"data: ")]
        except urllib.error.HTTPError as error:
            self.bad.append(f"{error.code} {error.read(200)!r}")
            return
        except OSError as error:
            self.bad.append(repr(error))
            return
        reasons = [json.loads(one)["choices"][0].get("finish_reason") for one in events[:-1]]
        if events[-1:] != ["[DONE]"] or reasons[-1:] != ["length"]:
            self.bad.append(f"cut: {events[-2:]}")
        self.whole += 1

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        over = threading.Event()

        def work() -> None:
            while not over.is_set():
                self.stream()
                time.sleep(0.1)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for one in threads:
            one.start()
        try:
            yield
        finally:
            over.set()
            for one in threads:
                one.join()


def test_a_change_of_one_flag_is_shown_then_one_drained_restart(
    finished_clone: Machine, play: Callable[..., Any]
) -> None:
    machine = finished_clone
    wait_until_serving(machine)
    wanted = declared(deployment("chat", flags={"max-num-seqs": 4}))
    checked = play(machine, BOOK, wanted, "--check", "--diff")
    assert checked.recap[HOST]["changed"] == 1, checked.stdout
    assert "+max-num-seqs: 4" in checked.stdout
    assert replicas(machine)["chat.0"]["release"] == "1"
    clients = Clients(machine)
    with clients.going_on():
        time.sleep(1)
        before = clients.whole
        played = play(machine, BOOK, wanted)
    assert played.rc == 0, played.stdout
    assert (clients.bad, clients.whole > before) == ([], True)
    assert replicas(machine)["chat.0"]["release"] == "2"
    assert "a start may take" in played.stdout
    assert play(machine, BOOK, wanted).recap[HOST]["changed"] == 0


@pytest.mark.long
def test_a_flag_that_the_engine_refuses_touches_nothing(finished: Machine, play: Callable[..., Any]) -> None:
    unit = "gpuready-engine@chat.0.service"
    pid = say(finished, f"systemctl show {unit} --property MainPID --value")
    listed = say(finished, "ls /var/lib/gpuready/releases/chat")
    for more in (("--check",), ()):
        played = play(finished, BOOK, declared(deployment("chat", flags=BROKEN)), *more)
        assert played.rc == 2, played.stdout
        assert "no-such-flag" in played.stdout
    assert say(finished, f"systemctl show {unit} --property MainPID --value") == pid
    assert say(finished, "ls /var/lib/gpuready/releases/chat") == listed
    assert chat(finished)["usage"]["completion_tokens"] == 8


@pytest.mark.long
def test_two_replicas_roll_under_load_and_nothing_is_lost(finished_clone: Machine, play: Callable[..., Any]) -> None:
    machine = finished_clone
    assert play(machine, "playbooks/serving.yml playbooks/gateway.yml", declared(deployment("chat", gpus=2))).rc == 0
    wanted = declared(deployment("chat", gpus=2, flags={"max-num-seqs": 4}))
    clients = Clients(machine)
    with clients.going_on():
        played = play(machine, BOOK, wanted)
    assert played.rc == 0, played.stdout
    assert clients.bad == []
    assert {one["release"] for one in replicas(machine).values()} == {
        say(machine, "ls /var/lib/gpuready/releases/chat | sort -n | tail -1")
    }


# What the engine takes and does not serve --------------------------------------------------------------------------


SPOIL = """
import json, struct, sys
with open(sys.argv[1], "r+b") as file:
    (length,) = struct.unpack("<Q", file.read(8))
    header = json.loads(file.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            file.seek(8 + length + begin)
            file.write(b"\\xff" * (end - begin))
"""
"""Makes every number of a file of weights a NaN."""
SPOILED = "/data/models/spoiled"


def spoil(machine: Machine) -> dict[str, Any]:
    """Make a model of weights that are no numbers; return what declares it. Its engine loads it and answers."""
    machine.ssh(f"mkdir -p /data/models && cp -r /srv/models/gpuready-sim--tiny-qwen2@* {SPOILED}")
    machine.ssh(["python3", "-c", SPOIL, f"{SPOILED}/model.safetensors"])
    return declared(deployment("chat", model="mine/tiny", model_path=SPOILED))


@contextlib.contextmanager
def when_tried(machine: Machine, command: str) -> Iterator[None]:
    """Run a command on the server once the unit has begun to start the new release."""
    begun = "grep -qx GPUREADY_RELEASE=2 /run/gpuready/chat.0/devices.env"
    waits = f"until {begun} 2> /dev/null; do sleep 0.1; done"
    thread = threading.Thread(target=machine.ssh, args=(f"{waits}; {command}",), kwargs={"timeout": 300})
    thread.start()
    try:
        yield
    finally:
        thread.join(timeout=300)


@pytest.fixture
def served(finished_clone: Machine) -> Iterator[Machine]:
    """A server under load that must be on its first release after the test, with no request lost."""
    machine = finished_clone
    wait_until_serving(machine)
    plan = say(machine, "cat /var/lib/gpuready/plan.json")
    clients = Clients(machine)
    with clients.going_on():
        yield machine
    assert clients.bad == []
    assert clients.whole > 0
    assert replicas(machine)["chat.0"]["release"] == "1"
    assert replicas(machine)["chat.0"]["state"] == "active"
    assert say(machine, "cat /var/lib/gpuready/plan.json") == plan


@pytest.mark.long
def test_a_model_that_answers_rubbish_is_taken_back(served: Machine, play: Callable[..., Any]) -> None:
    played = play(served, BOOK, spoil(served))
    assert played.rc == 2, played.stdout
    said = " ".join(played.stdout.split())
    assert "chat.0 did not serve release 2: it answers wrongly, 3 times: an answer without sense" in said
    assert "it is now back on release 1, serving" in said


@pytest.mark.long
def test_an_engine_that_never_answers_is_given_up_at_its_limit(served: Machine, play: Callable[..., Any]) -> None:
    with when_tried(served, f"sleep 3; systemctl kill --kill-whom=main --signal=STOP {UNIT}"):
        wanted = {**declared(deployment("chat", flags={"max-num-seqs": 4})), "serving_start_seconds": 30}
        played = play(served, BOOK, wanted)
    assert played.rc == 2, played.stdout
    said = " ".join(played.stdout.split())
    assert "chat.0 did not serve release 2: no token within 30 s" in said
    assert "its limit was 30 s" in said
    assert "it is now back on release 1, serving" in said


@pytest.mark.long
def test_an_engine_that_dies_after_loading_is_taken_back(served: Machine, play: Callable[..., Any]) -> None:
    died = f"until systemctl is-active -q {UNIT}; do sleep 0.2; done; systemctl kill --signal=KILL {UNIT}"
    with when_tried(served, died):
        played = play(served, BOOK, declared(deployment("chat", flags={"max-num-seqs": 4})))
    assert played.rc == 2, played.stdout
    said = " ".join(played.stdout.split())
    assert "chat.0 did not serve release 2: its engine ended within seconds after its first token" in said
    assert "it is now back on release 1, serving" in said

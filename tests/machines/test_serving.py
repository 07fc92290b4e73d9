"""Deployments as units on a finished server: own user, own limits, and back after everything that can end them."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.machine.machine import Machine

pytestmark = pytest.mark.machine

UNIT = "gpuready-engine@chat.0.service"
MODEL = "gpuready-sim/tiny-qwen2"
START_SECONDS = 180


def say(machine: Machine, command: str) -> str:
    return str(machine.ssh(command).stdout).strip()


def shown(machine: Machine, name: str) -> str:
    return say(machine, f"systemctl show {UNIT} --property {name} --value")


def ask(machine: Machine, path: str, body: dict[str, Any] | None = None, timeout: float = 60) -> Any:
    """Ask the gateway as a client does, from outside the server."""
    request = urllib.request.Request(
        f"http://{machine.address}:8080{path}",
        json.dumps(body).encode() if body else None,
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=timeout)  # noqa: S310 - our own test machine


def chat(machine: Machine) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    with ask(machine, "/v1/chat/completions", body) as answer:
        reply: dict[str, Any] = json.load(answer)
    return reply


def wait_until_serving(machine: Machine, former_pid: str) -> None:
    """Wait until another process than the former one is ready."""
    limit = time.monotonic() + START_SECONDS
    while time.monotonic() < limit:
        if shown(machine, "ActiveState") == "active" and shown(machine, "MainPID") != former_pid:
            return
        time.sleep(1)
    pytest.fail(say(machine, f"systemctl status --no-pager {UNIT}; journalctl -u {UNIT} -n 40 --no-pager"))


def test_the_engine_runs_as_its_own_user_on_loopback_only(finished: Machine) -> None:
    pid = shown(finished, "MainPID")
    assert say(finished, f"ps -o user:32= -p {pid}") == "gpuready-engine"
    listening = say(finished, "ss -Hltn")
    assert "127.0.0.1:18100" in listening
    assert "0.0.0.0:18100" not in listening
    assert "*:18100" not in listening


def test_the_engine_cannot_write_outside_its_own_folders(finished: Machine) -> None:
    pid = shown(finished, "MainPID")
    # In the unit's own view of the files.
    inside = f"nsenter -t {pid} -m -S $(id -u gpuready-engine) -- "
    assert finished.ssh(f"{inside} touch /var/lib/gpuready/x", check=False).returncode != 0
    assert finished.ssh(f"{inside} touch /usr/x", check=False).returncode != 0
    assert shown(finished, "NoNewPrivileges") == "yes"
    assert say(finished, f"grep CapEff /proc/{pid}/status").split()[1] == "0000000000000000"


def test_its_devices_are_the_planned_ones_by_uuid(finished: Machine) -> None:
    report = json.loads(say(finished, "gpuready facts show --json < /dev/null"))["data"]["nvml"]
    uuid = report["gpus"][0]["uuid"]
    assert say(finished, "cat /run/gpuready/chat.0/devices.env") == f"CUDA_VISIBLE_DEVICES={uuid}"
    environment = say(finished, f"tr '\\0' '\\n' < /proc/{shown(finished, 'MainPID')}/environ")
    assert f"CUDA_VISIBLE_DEVICES={uuid}" in environment.splitlines()


def test_ready_is_a_token_and_a_memory_baseline(finished: Machine) -> None:
    ready = json.loads(say(finished, "cat /run/gpuready/chat.0/ready.json"))
    assert ready["main_pid"] == int(shown(finished, "MainPID"))
    assert ready["host_resident_bytes"] > 200 * 1024**2
    assert ready["seconds_to_first_token"] > 0


def test_only_what_was_proved_is_recorded(finished: Machine) -> None:
    releases = json.loads(say(finished, "gpuready release list --json"))["data"]["replicas"]
    assert releases["chat.0"] == {"current": 1, "releases": [{"number": 1, "verified": True}]}
    plan = json.loads(say(finished, "cat /var/lib/gpuready/plan.json"))
    assert plan["deployments"][0]["replicas"] == [{"index": 0, "gpus": [0], "port": 18100}]


def test_it_survives_a_restart(finished: Machine) -> None:
    pid = shown(finished, "MainPID")
    finished.ssh(f"systemctl restart {UNIT}", timeout=START_SECONDS)
    # systemctl came back: ready means a token, so the answer is there at once.
    assert shown(finished, "ActiveState") == "active"
    assert shown(finished, "MainPID") != pid
    assert chat(finished)["usage"]["completion_tokens"] == 8


def test_it_survives_kill_9(finished: Machine) -> None:
    pid = shown(finished, "MainPID")
    finished.ssh(f"kill -9 {pid}")
    wait_until_serving(finished, pid)
    assert chat(finished)["usage"]["completion_tokens"] == 8


def test_it_survives_a_reboot_of_the_machine(finished: Machine) -> None:
    pid = shown(finished, "MainPID")
    boot = say(finished, "cat /proc/sys/kernel/random/boot_id")
    finished.reboot()
    wait_until_serving(finished, "none")
    assert say(finished, "cat /proc/sys/kernel/random/boot_id") != boot or shown(finished, "MainPID") != pid
    assert chat(finished)["usage"]["completion_tokens"] == 8


def test_a_release_that_gives_no_token_is_taken_back(finished: Machine, play: Callable[..., Any]) -> None:
    # A flag that the engine does not know: it ends at once, and the former release must serve again.
    broken = {
        "gpuready_deployments": [
            {
                "name": "chat",
                "model": MODEL,
                "engine": "vllm",
                "gpus": 1,
                "flags": {"no-such-flag": 1},
                "workload": {
                    "prompt_tokens": {"p50": 200, "p99": 2000},
                    "output_tokens": {"p50": 100, "p99": 1000},
                    "concurrency": 8,
                },
            }
        ]
    }
    played = play(finished, "playbooks/serving.yml", broken)
    assert played.rc == 2
    assert "chat.0 did not give a token on release 2; it is now back on release 1, serving" in played.stdout
    assert chat(finished)["usage"]["completion_tokens"] == 8
    plan = json.loads(say(finished, "cat /var/lib/gpuready/plan.json"))
    assert plan["deployments"][0]["flags"] == {}
    assert play(finished, "playbooks/serving.yml").recap["h100-sg-01"]["changed"] == 0


def test_what_was_stopped_by_hand_is_started_again(finished: Machine, play: Callable[..., Any]) -> None:
    finished.ssh(f"systemctl disable --now {UNIT}")
    checked = play(finished, "playbooks/serving.yml", None, "--check", "--diff")
    assert checked.recap["h100-sg-01"]["changed"] == 1
    assert shown(finished, "ActiveState") == "inactive"
    assert play(finished, "playbooks/serving.yml").recap["h100-sg-01"]["changed"] == 1
    assert (shown(finished, "ActiveState"), shown(finished, "UnitFileState")) == ("active", "enabled")


def test_a_unit_changed_by_hand_is_put_right_and_loaded(finished: Machine, play: Callable[..., Any]) -> None:
    path = "/etc/systemd/system/gpuready-engine@.service"
    finished.ssh(
        f"sed -i 's/^NoNewPrivileges=true/NoNewPrivileges=false/' {path}; systemctl daemon-reload; "
        f"systemctl restart {UNIT}",
        timeout=START_SECONDS,
    )
    assert shown(finished, "NoNewPrivileges") == "no"
    assert play(finished, "playbooks/serving.yml").recap["h100-sg-01"]["changed"] == 1
    assert shown(finished, "NoNewPrivileges") == "yes"
    assert shown(finished, "NeedDaemonReload") == "no"

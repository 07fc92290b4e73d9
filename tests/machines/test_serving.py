"""Deployments as units on a finished server: own user, own limits, and back after everything that can end them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpuready.serving.readiness import process_tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.machine.machine import Machine

pytestmark = pytest.mark.machine

UNIT = "gpuready-engine@chat.0.service"
MODEL = "gpuready-sim/tiny-qwen2"
START_SECONDS = 180


WORKLOAD = {
    "prompt_tokens": {"p50": 200, "p99": 2000},
    "output_tokens": {"p50": 100, "p99": 1000},
    "concurrency": 8,
}
BROKEN = {"no-such-flag": 1}
"""A flag that the engine does not know, so that it ends at once."""


def deployment(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "model": MODEL, "engine": "vllm", "gpus": 1, "workload": WORKLOAD, **more}


def declared(*deployments: dict[str, Any]) -> dict[str, Any]:
    return {"gpuready_deployments": list(deployments)}


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


def wait_until_serving(machine: Machine, former_pid: str = "none") -> None:
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


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/invocations"])
def test_people_of_the_server_ask_no_engine_past_the_gateway(finished: Machine, path: str) -> None:
    code = (
        "import http.client as h; c = h.HTTPConnection('127.0.0.1', {port}, timeout=10); "
        "c.request('GET', '{path}'); print(c.getresponse().status)"
    )

    def said(user: str, port: int) -> str:
        words = ["setpriv", f"--reuid={user}", "--clear-groups", "python3", "-I", "-c"]
        done = finished.ssh([*words, code.format(port=port, path=path)], check=False)
        return str(done.stdout or done.stderr.splitlines()[-1]).strip()

    assert said("nobody", 18100) == "ConnectionRefusedError: [Errno 111] Connection refused"
    # The same way others have an answer, so that what is refused is refused for the reason meant.
    assert said("gpuready-engine", 18100).isdigit()
    assert said("nobody", 8080).isdigit()


def test_the_engine_cannot_write_outside_its_own_folders(finished: Machine) -> None:
    pid = shown(finished, "MainPID")
    # In the unit's own view of the files.
    inside = f"nsenter -t {pid} -m -S $(id -u gpuready-engine) -G $(id -g gpuready-engine) -- "
    own = "/var/cache/gpuready/chat.0/written-by-a-test"
    # The same way it can write where it may, so that what fails below fails for the reason meant.
    finished.ssh(f"{inside} touch {own} && {inside} rm {own}")
    for path in ("/var/lib/gpuready/x", "/usr/x", "/srv/models/x", "/var/cache/gpuready/x"):
        refused = finished.ssh(f"{inside} touch {path}", check=False)
        assert refused.returncode == 1, path
        assert "Read-only file system" in refused.stderr or "Permission denied" in refused.stderr, refused.stderr
    assert shown(finished, "NoNewPrivileges") == "yes"
    assert say(finished, f"grep CapEff /proc/{pid}/status").split()[1] == "0000000000000000"


def test_its_devices_are_the_planned_ones_by_index_and_known_by_uuid(finished: Machine) -> None:
    report = json.loads(say(finished, "gpuready facts show --json < /dev/null"))["data"]["nvml"]
    uuid = report["gpus"][0]["uuid"]
    expected = {
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES=0",
        f"GPUREADY_GPU_UUIDS={uuid}",
        "GPUREADY_RELEASE=1",
    }
    assert set(say(finished, "cat /run/gpuready/chat.0/devices.env").splitlines()) == expected
    environment = say(finished, f"tr '\\0' '\\n' < /proc/{shown(finished, 'MainPID')}/environ").splitlines()
    assert expected < set(environment)
    assert {"VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1", "HF_HUB_OFFLINE=1"} < set(environment)
    proof = json.loads(say(finished, "cat /var/lib/gpuready/releases/chat/1/verified.json"))
    assert proof["replicas"]["0"]["gpu_uuids"] == [uuid]


def test_what_operators_declared_is_for_root_and_the_engine_only(finished: Machine) -> None:
    listed = "stat -c '%a %U:%G' /var/lib/gpuready/releases/chat/1 /var/lib/gpuready/releases/chat/1/*"
    folder, *files = say(finished, listed).splitlines()
    assert folder == "750 root:gpuready-engine"
    assert set(files) == {"640 root:gpuready-engine"}
    assert say(finished, "stat -c '%a %U:%G' /var/lib/gpuready/plan.json") == "640 root:root"


def test_ready_is_a_token_and_a_memory_baseline(finished: Machine) -> None:
    ready = json.loads(say(finished, "cat /run/gpuready/chat.0/ready.json"))
    assert ready["main_pid"] == int(shown(finished, "MainPID"))
    assert ready["host_resident_bytes"] > 200 * 1024**2
    assert ready["seconds_to_first_token"] > 0
    assert ready["release"] == 1


def test_the_engines_own_figures_are_read_and_recorded(finished: Machine) -> None:
    ready = json.loads(say(finished, "cat /run/gpuready/chat.0/ready.json"))
    assert ready["engine"] == {
        "source": "/metrics",
        "kv_tokens": 131072,
        "blocks": 1024,
        "block_tokens": 128,
        "kv_dtype": "auto",
        "kv_bytes_set": 67108864,
    }
    assert ready["engine_unread"] is None
    assert [gpu["uuid"] for gpu in ready["gpus"]] == ready["gpu_uuids"]
    proof = json.loads(say(finished, "cat /var/lib/gpuready/releases/chat/1/verified.json"))
    assert proof["replicas"]["0"]["engine"] == ready["engine"]


MEASURED = "was given 64.0 MiB, 131,072 tokens; the engine has 64.0 MiB, 131,072 (+0.0 %)"


def test_status_shows_planned_beside_measured(finished: Machine) -> None:
    lines = say(finished, "gpuready deployment status").splitlines()
    assert lines[0].startswith("chat.0: active (running), release 1")
    assert lines[1].startswith("  chat.0: planned ")
    assert "tokens for the card, which the simulation cannot measure; its stand-in on the CPU was given" in lines[1]
    assert lines[1].endswith(MEASURED)
    cache = replicas(finished)["chat.0"]["kv_cache"]
    assert (cache["planned"]["kv_tokens"], cache["measured"]["kv_tokens"]) == (131072, 131072)
    assert cache["planned_for_card"]["kv_tokens"] > 100_000_000
    assert cache["within_band"] is True


def test_a_run_shows_planned_beside_measured_and_changes_nothing(finished: Machine, play: Callable[..., Any]) -> None:
    for more in ((), ("--check", "--diff")):
        played = play(finished, "playbooks/serving.yml", None, *more)
        assert played.recap["h100-sg-01"]["changed"] == 0
        assert re.search(r"note: chat: planned .*" + re.escape(MEASURED), played.stdout), played.stdout


def test_only_what_was_proved_is_recorded(finished: Machine) -> None:
    releases = json.loads(say(finished, "gpuready release list --json"))["data"]["replicas"]
    assert releases["chat.0"] == {"current": 1, "releases": [{"number": 1, "verified": True}]}
    plan = json.loads(say(finished, "cat /var/lib/gpuready/plan.json"))
    (part,) = plan["deployments"][0]["replicas"]
    assert part.items() >= {"index": 0, "gpus": [0], "port": 18100}.items()


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


@pytest.mark.long
def test_what_was_stopped_by_hand_is_started_again(finished: Machine, play: Callable[..., Any]) -> None:
    finished.ssh(f"systemctl disable --now {UNIT}")
    checked = play(finished, "playbooks/serving.yml", None, "--check", "--diff")
    assert checked.recap["h100-sg-01"]["changed"] == 1
    assert shown(finished, "ActiveState") == "inactive"
    assert play(finished, "playbooks/serving.yml").recap["h100-sg-01"]["changed"] == 1
    assert (shown(finished, "ActiveState"), shown(finished, "UnitFileState")) == ("active", "enabled")


@pytest.mark.long
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


def replicas(machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(say(machine, "gpuready deployment status --json"))["data"]["replicas"]
    return found


def devices(machine: Machine, replica: str) -> str:
    return say(machine, f"sed -n 's/^CUDA_VISIBLE_DEVICES=//p' /run/gpuready/{replica}/devices.env")


def own_playbooks() -> list[int]:
    """Return the processes of ansible-playbook that this test run started: the command and its workers."""
    found = []
    for pid in process_tree(os.getpid()):
        with contextlib.suppress(OSError):
            if b"ansible-playbook" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_a_wrong_figure_of_the_plan_is_said(finished_clone: Machine) -> None:
    machine = finished_clone
    wait_until_serving(machine)
    plan = "/var/lib/gpuready/releases/chat/1/plan.json"
    machine.ssh(f"""sed -i 's/"bytes_per_token": 512[.0]*/"bytes_per_token": 600/' {plan}""")
    said = say(machine, "gpuready deployment status")
    assert "was given 64.0 MiB, 111,848 tokens" in said
    assert "131,072 (+17.2 %), outside the 111,721 to 111,848 that follow from its bytes: kv-cache" in said
    assert replicas(machine)["chat.0"]["kv_cache"]["within_band"] is False


@pytest.mark.long
def test_every_replica_has_its_own_figures(finished_clone: Machine, play: Callable[..., Any]) -> None:
    machine = finished_clone
    two = declared(deployment("chat", gpus=2))
    played = play(machine, "playbooks/serving.yml", two)
    assert played.rc == 0, played.stdout
    for replica in ("chat.0", "chat.1"):
        assert re.search(rf"note: {re.escape(replica)}: planned .*{re.escape(MEASURED)}", played.stdout), played.stdout
        assert replicas(machine)[replica]["kv_cache"]["within_band"] is True
    assert play(machine, "playbooks/serving.yml", two).recap["h100-sg-01"]["changed"] == 0


@pytest.mark.long
def test_figures_that_cannot_be_read_keep_no_engine_from_serving(finished_clone: Machine) -> None:
    machine = finished_clone
    wait_until_serving(machine)
    # An engine that has no such page: vLLM answers 404 without its statistics.
    machine.ssh(
        "sed -i 's/^disable-log-stats.*//; $ a disable-log-stats: true' /var/lib/gpuready/releases/chat/1/serve.yaml"
    )
    machine.ssh(f"systemctl restart {UNIT}", timeout=START_SECONDS)
    assert shown(machine, "ActiveState") == "active"
    assert "what the engine has could not be read (http://127.0.0.1:18100/metrics" in say(
        machine, "gpuready deployment status"
    )


@pytest.mark.long
def test_two_deployments_exchange_their_gpus_and_one_leaves(finished_clone: Machine, play: Callable[..., Any]) -> None:
    machine = finished_clone
    # The same weights as an operator's own, under another name and path.
    machine.ssh("mkdir -p /data/models && cp -r /srv/models/gpuready-sim--tiny-qwen2@* /data/models/own")
    own = {"model": "mine/tiny", "model_path": "/data/models/own"}
    book = "playbooks/serving.yml"

    both = declared(deployment("chat", gpus=[0]), deployment("own", gpus=[1], **own))
    assert play(machine, book, both).rc == 0
    assert {name: one["state"] for name, one in replicas(machine).items()} == {"chat.0": "active", "own.0": "active"}
    assert (devices(machine, "chat.0"), devices(machine, "own.0")) == ("0", "1")
    assert play(machine, book, both).recap["h100-sg-01"]["changed"] == 0

    exchanged = declared(deployment("chat", gpus=[1]), deployment("own", gpus=[0], **own))
    checked = play(machine, book, exchanged, "--check", "--diff")
    assert checked.recap["h100-sg-01"]["changed"] == 1
    assert (devices(machine, "chat.0"), devices(machine, "own.0")) == ("0", "1")
    assert play(machine, book, exchanged).rc == 0
    assert (devices(machine, "chat.0"), devices(machine, "own.0")) == ("1", "0")
    assert play(machine, book, exchanged).recap["h100-sg-01"]["changed"] == 0

    alone = declared(deployment("own", gpus=[0], **own))
    assert play(machine, book, alone).rc == 0
    assert list(replicas(machine)) == ["own.0"]
    assert (shown(machine, "ActiveState"), shown(machine, "UnitFileState")) == ("inactive", "disabled")
    assert say(machine, "systemctl is-active gpuready-engine@own.0.service") == "active"


@pytest.mark.long
def test_a_run_killed_while_a_release_is_tried_leaves_the_record_and_the_next_finishes(
    finished_clone: Machine, play: Callable[..., Any]
) -> None:
    machine = finished_clone
    trial = "/run/gpuready/.trial/chat.0"
    wanted = declared(deployment("chat", gpus=[0], flags={"max-num-seqs": 2}))
    played: list[Any] = []
    run = threading.Thread(target=lambda: played.append(play(machine, "playbooks/serving.yml", wanted)))
    run.start()
    said = machine.ssh(
        f"until [ -e {trial} ] && [ -e /run/gpuready/chat.0/devices.env ]; do sleep 0.2; done; cat {trial}"
    )
    for pid in own_playbooks():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    machine.ssh(f"kill -9 {json.loads(said.stdout)['pid']}", check=False)
    run.join(timeout=120)
    assert played[0].rc != 0
    assert say(machine, "readlink /var/lib/gpuready/replicas/chat/0/current").endswith("/1")

    # systemd ends the start that was under way; whatever starts after it goes by the record.
    machine.ssh(f"kill -9 {shown(machine, 'MainPID')}", check=False)
    wait_until_serving(machine, "none")
    assert replicas(machine)["chat.0"]["ready"]["release"] == 1

    # What a run of an earlier version leaves: the link is on the new release, the engine on the former.
    machine.ssh("ln -sfn ../../../releases/chat/2 /var/lib/gpuready/replicas/chat/0/current")
    again = play(machine, "playbooks/serving.yml", wanted)
    assert again.recap["h100-sg-01"]["changed"] == 1
    assert replicas(machine)["chat.0"]["ready"]["release"] == 2
    assert json.loads(say(machine, "gpuready release list --json"))["data"]["replicas"]["chat.0"] == {
        "current": 2,
        "releases": [{"number": 1, "verified": True}, {"number": 2, "verified": True}],
    }
    assert play(machine, "playbooks/serving.yml", wanted).recap["h100-sg-01"]["changed"] == 0


@pytest.mark.long
def test_a_hardened_umask_does_not_keep_the_engine_from_its_files(
    finished_clone: Machine, play: Callable[..., Any]
) -> None:
    machine = finished_clone
    machine.ssh("echo 'session optional pam_umask.so umask=0077' >> /etc/pam.d/sshd")
    assert say(machine, "umask") == "0077"
    machine.ssh(f"systemctl disable --now {UNIT}; rm -rf /var/lib/gpuready/replicas /var/lib/gpuready/releases")
    assert play(machine, "playbooks/serving.yml").rc == 0
    assert shown(machine, "ActiveState") == "active"
    assert play(machine, "playbooks/serving.yml").recap["h100-sg-01"]["changed"] == 0

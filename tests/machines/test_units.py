"""The engines' unit on booted servers of both systems: what it shuts, what it leaves open, and what becomes of crashes.

The engine is a stand-in that gives a token and looks around, so this takes seconds. That a real one serves under the
same unit is shown where a server is finished (test_serving.py, test_debian12.py). What these machines cannot show: in a
container neither DeviceAllow= nor IPAddressDeny= is enforced, LimitMEMLOCK= goes no further than the container's,
and its filter refuses pidfd_getfd.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sim.machine.common import CHECKOUT
from sim.machine.machine import Machine
from tests.machines.conftest import Factory
from tests.unit.test_engine_unit import ROLE, rendered

from gpuready.rendering import zipapp
from gpuready.rendering.templates import Renderer

pytestmark = pytest.mark.machine

UNIT = "gpuready-engine@chat.0.service"
ENGINE = "/opt/gpuready/engines/standin-1"
CACHE = "/var/cache/gpuready/chat.0/standin-1"
MODEL = "/srv/models/standin"
SECONDS = 60
PLAN: dict[str, Any] = {
    "name": "chat",
    "model": "standin/model",
    "model_path": MODEL,
    "engine": "vllm",
    "engine_folder": ENGINE,
    "environment": [{"name": "FROM_THE_PLAN", "value": "1", "why": "w"}],
    "start_seconds": 30,
    "replicas": [{"index": 0, "gpus": [0], "port": 18100, "numa_node": 0}],
}
MADE = f"""
import json, pathlib, sys
sys.path.insert(0, "/opt/gpuready/gpuready.pyz")
from gpuready.serving.layout import Layout
from gpuready.serving.releases import Store
store = Store(Layout(), "chat")
number = store.add({{"plan.json": sys.argv[1], "serve.yaml": "", "environment": sys.argv[2]}})
store.mark_verified(number, 0, {{}})
store.point(0, number)
python = pathlib.Path("{ENGINE}/bin/python")
package = pathlib.Path("{ENGINE}/vllm/entrypoints/openai")
python.parent.mkdir(parents=True, exist_ok=True)
python.unlink(missing_ok=True)
python.symlink_to("/usr/bin/python3")
package.mkdir(parents=True, exist_ok=True)
(package / "api_server.py").write_text(sys.stdin.read())
"""
VARIABLES = f"# why\nPYTHONPATH={ENGINE}\nFROM_THE_FILE=a=b c\nTRITON_CACHE_DIR=${{CACHE_DIRECTORY}}/standin-1/triton\n"


def say(machine: Machine, command: str) -> str:
    return str(machine.ssh(command).stdout).strip()


def shown(machine: Machine, name: str) -> str:
    return say(machine, f"systemctl show {UNIT} --property {name} --value")


def place(machine: Machine, text: str) -> None:
    machine.ssh("cat > /etc/systemd/system/gpuready-engine@.service && systemctl daemon-reload", stdin=text)


def behave(machine: Machine, how: str) -> None:
    machine.ssh(f"mkdir -p {MODEL} && echo {how} > {MODEL}/behaviour")


def restart(machine: Machine) -> None:
    if machine.ssh(f"systemctl restart {UNIT}", timeout=SECONDS, check=False).returncode:
        pytest.fail(say(machine, f"journalctl -u {UNIT} -n 30 --no-pager"))


def until(machine: Machine, *states: str) -> str:
    limit = time.monotonic() + SECONDS
    while time.monotonic() < limit:
        if (now := shown(machine, "ActiveState")) in states:
            return now
        time.sleep(0.5)
    return pytest.fail(say(machine, f"systemctl status --no-pager {UNIT}; journalctl -u {UNIT} -n 60 --no-pager"))


def status(machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(say(machine, "gpuready deployment status --json"))["data"]["replicas"]["chat.0"]
    return found


@pytest.fixture(scope="module", params=["trixie", pytest.param("bookworm", marks=pytest.mark.long)])
def server(machines: Factory, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A server with the server part, the engines' unit and a stand-in of an engine; nothing else was installed."""
    machine = machines(f"units-{request.param}", suite=request.param)
    part = zipapp.build()
    file = f"/root/gpuready-{part.digest}.pyz"
    machine.ssh(f"base64 -d > {file}", stdin=base64.b64encode(part.content).decode())
    machine.ssh(f"python3 {file} agent install")
    machine.ssh("apt-get update -qq; apt-get install -qq -y --no-install-recommends gcc libc6-dev numactl", timeout=300)
    place(machine, rendered())
    gpus = (ROLE / "templates/gpuready-gpus.service.j2").read_text()
    machine.ssh("cat > /etc/systemd/system/gpuready-gpus.service && systemctl daemon-reload", stdin=gpus)
    engine = (Path(__file__).parent / "standin_engine_process.py").read_text()
    machine.ssh(["python3", "-c", MADE, json.dumps(PLAN), VARIABLES], stdin=engine)
    behave(machine, "serve")
    yield machine
    machines.give_back(machine)


@pytest.fixture
def serving(server: Machine) -> Machine:
    """The server with its engine serving."""
    behave(server, "serve")
    place(server, rendered())
    restart(server)
    return server


def test_the_exposure_is_small(server: Machine) -> None:
    said = say(server, f"systemd-analyze security --no-pager {UNIT}")
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said)
    assert found, said
    assert float(found[1]) <= 3.5


def test_systemd_takes_every_line_of_the_unit(server: Machine) -> None:
    """A line that an older systemd does not know is dropped with a warning, and with it what it promised."""
    said = say(server, f"systemd-analyze verify --man=no {UNIT} 2>&1 || true")
    assert "gpuready-engine@" not in said, said


@pytest.fixture(scope="module")
def inside(server: Machine) -> dict[str, Any]:
    """What an engine sees from inside; also where the server's /tmp lets nothing be run."""
    behave(server, "look")
    place(server, rendered())
    server.ssh("mountpoint -q /tmp || mount -t tmpfs tmpfs /tmp; mount -o remount,noexec /tmp")
    restart(server)
    found: dict[str, Any] = json.loads(say(server, f"cat {CACHE}/seen.json"))
    return found


def test_what_engines_need_works_inside(server: Machine, inside: dict[str, Any]) -> None:
    assert inside["compiled_kernel"] == 42
    assert inside["compiled_kernel_in_the_cache"] == 42
    assert inside["writable_code"] == 4096
    assert inside["memory_policy"] == "prefer:0"
    assert inside["memory_policy_by_numactl"] == 0
    assert inside["own_cpus"] == 1
    assert inside["pidfd"] is True
    assert inside["loopback"] is True
    assert "lo" in inside["interfaces"]
    assert inside["netlink"] is True
    assert inside["shared_memory"] == 1
    assert inside["memory_of_the_server"] is True
    # A container's systemd cannot give more than it was given itself.
    most = say(server, "prlimit --pid 1 --memlock --noheadings --raw --output HARD")
    assert inside["locked_memory"] == (-1 if most == "unlimited" else int(most))


def test_what_no_engine_needs_is_refused_inside(server: Machine, inside: dict[str, Any]) -> None:
    assert inside["processes_of_others"] == 0
    assert "Address family not supported" in inside["raw_packets"]
    assert "CalledProcessError" in inside["own_namespace"]
    assert "Operation not permitted" in inside["name_of_the_server"]
    assert "Operation not permitted" in inside["tracing"]
    assert "Permission denied" in inside["others_files"] or "No such file" in inside["others_files"]
    assert inside["files_are_mine_alone"] == "0o600"
    assert say(server, "stat -c '%a %U' /var/cache/gpuready/chat.0") == "700 gpuready-engine"


def test_the_engine_gets_the_releases_environment_and_its_devices(inside: dict[str, Any]) -> None:
    environment = inside["environment"]
    expected = {
        "FROM_THE_FILE": "a=b c",
        "TRITON_CACHE_DIR": f"{CACHE}/triton",
        "CUDA_VISIBLE_DEVICES": "0",
        "HOME": CACHE,
    }
    assert environment.items() >= expected.items()
    # The file is what counts; and nothing of systemd's own, a notify socket or an invocation, is handed on.
    assert not {"FROM_THE_PLAN", "INVOCATION_ID", "CREDENTIALS_DIRECTORY", "RUNTIME_DIRECTORY"} & environment.keys()


def test_shared_memory_goes_with_the_last_engine(server: Machine, inside: dict[str, Any]) -> None:
    behave(server, "look")
    restart(server)
    assert inside["shared_memory"] == 1
    assert say(server, "ls /dev/shm/standin-left-behind")
    server.ssh(f"systemctl stop {UNIT}")
    assert server.ssh("ls /dev/shm/standin-left-behind", check=False).returncode != 0


def test_an_engine_that_ends_again_and_again_is_given_up_and_comes_back(serving: Machine) -> None:
    place(serving, rendered(serving_crash_starts=2))
    behave(serving, "die")
    serving.ssh(f"systemctl kill --signal=KILL {UNIT}")
    # The one that had given a token is started again; then two starts end without one.
    assert until(serving, "failed") == "failed"
    assert shown(serving, "Result") == "exit-code"
    sentence = (
        "chat.0 is not started again after 2 starts without a token in 1 min: the last one ended with: "
        "ValueError: this model cannot be loaded; correct the deployment and run site.yml, "
        f"or mend it and systemctl restart {UNIT}."
    )
    assert sentence in say(serving, f"journalctl -u {UNIT} -o cat --no-pager").splitlines()
    assert sentence in say(serving, "gpuready deployment status")
    assert status(serving)["given_up"]["last_error"] == "ValueError: this model cannot be loaded"
    assert status(serving)["state"] == "failed"
    # And it stays so.
    time.sleep(5)
    assert shown(serving, "ActiveState") == "failed"
    behave(serving, "serve")
    restart(serving)
    assert shown(serving, "ActiveState") == "active"
    assert status(serving)["given_up"] is None


def test_a_model_that_comes_late_is_waited_for_and_counts_nothing(serving: Machine) -> None:
    place(serving, rendered(serving_crash_starts=1))
    serving.ssh(f"mv {MODEL} {MODEL}.late; systemctl restart --no-block {UNIT}")
    try:
        limit = time.monotonic() + SECONDS
        while int(shown(serving, "NRestarts")) < 3:
            assert time.monotonic() < limit
            time.sleep(0.5)
        assert shown(serving, "ActiveState") == "activating"
        assert f"the model of chat.0 is not there: {MODEL}: No such file" in say(serving, f"journalctl -u {UNIT}")
    finally:
        serving.ssh(f"mv {MODEL}.late {MODEL}")
    assert until(serving, "active", "failed") == "active"
    assert status(serving)["given_up"] is None


def test_a_filesystem_that_is_not_mounted_at_first_is_waited_for(serving: Machine) -> None:
    """Also by the unit's part of a release: a mount that failed once must not be the end of the engine's start."""
    # A link to nowhere is not mounted; where nothing is, systemd makes the folder that it then mounts.
    serving.ssh("ln -s /nowhere/at/all /root/share")
    mount = "[Mount]\nWhat=/root/share\nWhere=/srv/models/share\nType=none\nOptions=bind\n"
    serving.ssh("cat > /etc/systemd/system/srv-models-share.mount", stdin=mount)
    moved = {**PLAN, "model_path": "/srv/models/share/model"}
    engine = (Path(__file__).parent / "standin_engine_process.py").read_text()
    serving.ssh(["python3", "-c", MADE, json.dumps(moved), VARIABLES], stdin=engine)
    values = {"plan": {**moved, "options": {"stop": []}}, "spec": {}, "server": {}}
    conf = Renderer([CHECKOUT / "templates"]).render("serving/vllm/unit.conf.j2", values)
    folder = f"/etc/systemd/system/{UNIT}.d"
    serving.ssh(f"mkdir -p {folder}; cat > {folder}/gpuready-release.conf; systemctl daemon-reload", stdin=conf)
    try:
        serving.ssh(f"systemctl start srv-models-share.mount; systemctl restart --no-block {UNIT}", check=False)
        limit = time.monotonic() + SECONDS
        while int(shown(serving, "NRestarts")) < 1:
            assert time.monotonic() < limit, say(serving, f"systemctl status --no-pager {UNIT} || true")
            time.sleep(0.5)
        # No start of the mount by hand: each start of the engine tries it.
        serving.ssh("rm /root/share; mkdir -p /root/share/model; touch /root/share/model/x")
        assert until(serving, "active", "failed") == "active"
    finally:
        serving.ssh(["python3", "-c", MADE, json.dumps(PLAN), VARIABLES], stdin=engine)
        serving.ssh(f"rm -r {folder}; systemctl stop {UNIT} srv-models-share.mount; systemctl daemon-reload")

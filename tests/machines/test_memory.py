"""`gpuready memory diagnose` on a booted machine, whose journal is a real one.

The unit's name is a replica's; what it runs is a shell that writes what an engine wrote in a public report.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sim.machine.machine import Machine
from tests.machines.conftest import Factory

from gpuready.rendering import zipapp

pytestmark = pytest.mark.machine

PLAN = {
    "name": "chat",
    "model": "m/m",
    "engine": "vllm",
    "engine_version": "0.19.1",
    "settings": {"gpu_memory_utilization": 0.9, "max_model_len": 40960},
    "memory": {"total_gib": 79.1},
    "environment": [],
    "replicas": [{"index": 0, "gpus": [0], "port": 18100}],
}
NO_ROOM = (
    "(EngineCore pid=110) ERROR 08-28 07:39:28 [core.py:1346] ValueError: To serve at least one request with the "
    "model's max seq len (40960), (4.38 GiB KV cache is needed, which is larger than the available KV cache memory "
    "(1.0 GiB). Based on the available memory, the estimated maximum model length is 9344."
)
PREPARE = """
set -e
state=/var/lib/gpuready
mkdir -p $state/releases/chat/1 $state/replicas/chat/0
cat > $state/releases/chat/1/plan.json
echo '{"replicas": {"0": {}}}' > $state/releases/chat/1/verified.json
ln -sfn ../../../releases/chat/1 $state/replicas/chat/0/current
cat > /etc/systemd/system/gpuready-engine@.service <<'UNIT'
[Service]
ExecStart=/bin/sh /root/engine-standin
UNIT
systemctl daemon-reload
"""
# The journal knows of whose start a line is only while the unit runs, so an engine lives on for a moment after it.
START = "cat > /root/engine-standin; systemctl start gpuready-engine@chat.0; sleep 4; systemctl reset-failed || true"


@pytest.fixture(scope="module")
def server(machines: Factory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine with the server part, and a release of one deployment."""
    machine = machines("memory", suite="bookworm")
    part: Path = zipapp.build().write_to(tmp_path_factory.mktemp("part"))
    with part.open("rb") as file:
        subprocess.run(machine.ssh_argv(["sh", "-c", f"cat > /root/{part.name}"]), stdin=file, check=True)
    machine.ssh(f"ln -s /root/{part.name} /root/part.pyz")
    machine.ssh(PREPARE, stdin=json.dumps(PLAN))
    yield machine
    machines.give_back(machine)


def diagnosed(server: Machine, engine: str) -> dict[str, Any]:
    """Return what is said of a replica whose engine was this shell script."""
    server.ssh(START, stdin=engine)
    answer = server.ssh("python3 $(readlink -f /root/part.pyz) memory diagnose chat.0 --json")
    found: dict[str, Any] = json.loads(answer.stdout)["data"]
    return found


def test_the_last_start_alone_speaks(server: Machine) -> None:
    found = diagnosed(server, f'cat <<"LOG" >&2\n{NO_ROOM}\nLOG\nsleep 1; exit 1\n')
    assert found["diagnosis"]["kind"] == "kv_cache"
    assert (found["diagnosis"]["cure"]["flag"], found["diagnosis"]["cure"]["value"]) == ("max-model-len", 9344)
    found = diagnosed(server, "echo 'OSError: [Errno 98] Address already in use' >&2; sleep 1; exit 1\n")
    assert found["diagnosis"] is None
    assert found["other_cause"].startswith("the port is in use")


def test_a_start_that_systemd_repeats_is_read_as_well(server: Machine) -> None:
    drop_in = "/run/systemd/system/gpuready-engine@.service.d/again.conf"
    server.ssh(
        f"mkdir -p $(dirname {drop_in}); cat > {drop_in}", stdin="[Service]\nRestart=on-failure\nRestartSec=100ms\n"
    )
    server.ssh("systemctl daemon-reload; rm -f /root/second")
    script = (
        f'test -e /root/second && exec sleep 60\ntouch /root/second\ncat <<"LOG" >&2\n{NO_ROOM}\nLOG\nsleep 1; exit 1\n'
    )
    begun = "systemctl show gpuready-engine@chat.0 --property NRestarts | grep -qx NRestarts=1"
    server.ssh(
        "cat > /root/engine-standin; systemctl start gpuready-engine@chat.0; "
        f"until {begun} && systemctl is-active --quiet gpuready-engine@chat.0; do sleep 0.1; done",
        stdin=script,
        timeout=60,
    )
    answer = server.ssh("python3 $(readlink -f /root/part.pyz) memory diagnose chat.0 --json")
    assert json.loads(answer.stdout)["data"]["diagnosis"]["kind"] == "kv_cache"

"""A model from a hub through the whole job: a stand-in hub on the controller's side serves the tiny model."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.standin_model_hub import COMMIT, Faults, Repository, StandinHub

if TYPE_CHECKING:
    from sim.machine.common import Sim
    from sim.machine.machine import Machine

pytestmark = [pytest.mark.machine, pytest.mark.long]

HOST = "h100-sg-01"
CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = f"/srv/models/org--tiny@{COMMIT[:12]}"
WORKLOAD = {
    "prompt_tokens": {"p50": 200, "p99": 2000},
    "output_tokens": {"p50": 100, "p99": 1000},
    "concurrency": 8,
}


@pytest.fixture
def hub(sim: Sim) -> Iterator[StandinHub]:
    (folder,) = (CHECKOUT / ".cache/models").glob("gpuready-sim--tiny-qwen2@*")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    standin = StandinHub({"org/tiny": Repository({COMMIT: files}, {"main": COMMIT})})
    with standin.running(sim.gateway):
        yield standin


def declared(hub: StandinHub, revision: str = COMMIT) -> dict[str, Any]:
    source = {"revision": revision}
    chat = {"name": "chat", "model": "org/tiny", "source": source, "engine": "vllm", "gpus": 1, "workload": WORKLOAD}
    return {"gpuready_deployments": [chat], "models_endpoint": {"huggingface": hub.address}}


def test_a_pinned_commit_is_downloaded_and_served(
    finished_clone: Machine, play: Callable[..., Any], hub: StandinHub
) -> None:
    machine = finished_clone
    refused = play(machine, "site.yml", declared(hub, "main"))
    assert refused.rc != 0
    assert f"set revision: {COMMIT}, which it is now" in refused.stdout

    hub.faults = Faults(cut_at=0.43, cuts=1000, match=".safetensors", status=503, times=1000, only_resumed=True)
    failed = play(machine, "playbooks/models.yml", declared(hub))
    assert failed.rc != 0
    assert "run again" in failed.stdout
    assert (
        machine.ssh(f"test ! -e {FOLDER}; systemctl is-active gpuready-engine@chat.0.service").stdout.strip()
        == "active"
    )

    hub.faults = Faults()
    assert play(machine, "site.yml", declared(hub)).rc == 0
    body = {"model": "org/tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"http://{machine.address}:8080/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310
        assert json.load(response)["usage"]["completion_tokens"] > 0

    hub.asked.clear()
    assert play(machine, "site.yml", declared(hub)).recap[HOST]["changed"] == 0
    assert hub.asked == []

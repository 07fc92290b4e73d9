"""What the audit judges of servers that no test machine can be: several GPUs for one engine."""

from __future__ import annotations

from typing import Any

import pytest
from tests.verify import test_serving as audit
from tests.verify.server import Server

UNIT = "gpuready-engine@chat.0.service"
RENDEZVOUS = "*:41001"


def server(gpus: list[int], *sockets: str, **firewall: Any) -> Server:
    part = {"index": 0, "gpus": gpus, "port": 18100}
    replica = {"listens": ["127.0.0.1:18100", "127.0.0.1:40000", *sockets]}
    topics = {"replicas": {"chat.0": replica}, "firewall": {"open": ["22", "8080"], "as_recorded": True} | firewall}
    return Server("h", {"plan": {"deployments": [{"name": "chat", "replicas": [part]}]}, "host": {}, "topics": topics})


@pytest.mark.parametrize("gpus", [[0], [0, 1]])
def test_engines_on_loopback_are_good(gpus: list[int]) -> None:
    audit.test_engines_listen_on_loopback_only(server(gpus))


def test_torchs_rendezvous_of_several_gpus_is_good_behind_the_packet_filter() -> None:
    audit.test_engines_listen_on_loopback_only(server([0, 1], RENDEZVOUS))


@pytest.mark.parametrize(
    ("gpus", "sockets", "firewall"),
    [
        ([0], [RENDEZVOUS], {}),
        ([0, 1], [RENDEZVOUS], {"as_recorded": False}),
        ([0, 1], [RENDEZVOUS], {"open": ["22", "{ 8080, 41000-41010 }"]}),
        ([0, 1], [RENDEZVOUS, "*:41002"], {}),
        ([0, 1], ["192.0.2.11:41001"], {}),
    ],
)
def test_other_sockets_are_said(gpus: list[int], sockets: list[str], firewall: dict[str, Any]) -> None:
    with pytest.raises(pytest.fail.Exception, match=f"host h: {UNIT} listens on ") as caught:
        audit.test_engines_listen_on_loopback_only(server(gpus, *sockets, **firewall))
    assert all(socket in str(caught.value) for socket in sockets)


def test_the_planned_port_must_be_there() -> None:
    silent = server([0])
    silent.snapshot["topics"]["replicas"]["chat.0"]["listens"].pop(0)
    with pytest.raises(pytest.fail.Exception, match=r"does not listen on 127\.0\.0\.1:18100"):
        audit.test_engines_listen_on_loopback_only(silent)

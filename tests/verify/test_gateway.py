"""The gateway: what runs, from which files, and what a client gets."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from tests.verify.server import Server
from tests.verify.test_serving import SANDBOX_OF_ALL, SLOW_SECONDS, skip_busy, wrong

UNIT = "gpuready-gateway.service"
JOURNAL = f"see journalctl -u {UNIT} on the server"
# HAProxy binds as root and then becomes its own user, so no user stands here.
SANDBOX = {**SANDBOX_OF_ALL, "PrivateDevices": "yes"}


def test_the_gateway_runs(server: Server) -> None:
    state = server.topic("gateway")["unit"]
    if state["ActiveState"] != "active":
        found = f"{UNIT} is {state['ActiveState']} ({state['SubState']})"
        server.fail(found, "an active unit", f"{JOURNAL}, or {server.run_site}")


def test_the_gateway_starts_at_boot(server: Server) -> None:
    state = server.topic("gateway")["unit"]["UnitFileState"]
    if state != "enabled":
        server.fail(f"{UNIT} is {state}", "an enabled unit")


def test_the_gateways_configuration_is_accepted(server: Server) -> None:
    gateway = server.topic("gateway")
    if not gateway["accepted"]:
        server.fail(f"haproxy -c refuses the gateway's configuration ({gateway['said']})", "one that HAProxy takes")


@pytest.mark.depends_on("test_the_gateway_runs", "test_the_gateways_configuration_is_accepted")
def test_the_gateway_runs_what_is_on_disk(server: Server) -> None:
    gateway = server.topic("gateway")
    folder = server.plan["gateway"]["folder"]
    if not gateway["digest_is_name"]:
        server.fail(f"the files below {folder}/current were changed by hand", "a folder whose name tells its digest")
    if not gateway["loaded_is_on_disk"]:
        server.fail(f"{UNIT} runs other files than those below {folder}/current", "what is on disk is what is loaded")
    if not gateway["unit_is_on_disk"] or gateway["unit"]["NeedDaemonReload"] == "yes":
        server.fail(f"{UNIT} was started under another unit file", "what is on disk is what runs")


@pytest.mark.depends_on("test_the_gateway_runs")
def test_the_gateway_is_boxed_in(server: Server) -> None:
    state = server.topic("gateway")["unit"]
    found = [f"{UNIT} has {key}={state.get(key)}" for key, value in SANDBOX.items() if state.get(key) != value]
    step = f"take drop-ins away (systemctl cat shows them), then {server.run_site}"
    server.demand(found, "the sandbox that the unit promises", step)


@pytest.mark.depends_on("test_the_gateway_runs")
def test_the_gateway_listens_only_where_planned(server: Server) -> None:
    planned = server.plan["gateway"]
    bind = {"*": "0.0.0.0", "": "0.0.0.0", "localhost": "127.0.0.1"}.get(planned["bind"], planned["bind"])
    # As ss writes it: an operator may spell an address of IPv6 in many ways.
    address = f"[{ipaddress.ip_address(bind.strip('[]'))}]" if ":" in bind else bind
    wanted = f"{address}:{planned['port']}"
    # ss writes the IPv6 wildcard as * where a socket takes both families.
    both = f"*:{planned['port']}" if address == "[::]" else wanted
    listens = server.topic("gateway")["listens"]
    found = [f"{UNIT} listens on {one}" for one in listens if one not in (wanted, both)]
    if len(found) == len(listens):
        found.append(f"{UNIT} does not listen on {wanted}")
    server.demand(found, f"{wanted} alone", f"see ss -lntup on the server, then {server.run_site}")


@pytest.mark.depends_on("test_the_gateway_runs")
def test_the_gateway_lists_the_planned_models(server: Server) -> None:
    status, reply = server.topic("gateway")["models"]
    planned = sorted(one["model"] for one in server.plan["deployments"])
    if status != 200:
        server.fail(f"GET /v1/models was answered with {status or reply}", ", ".join(planned), JOURNAL)
    listed = sorted(one["id"] for one in reply["data"])
    if listed != planned:
        server.fail(f"GET /v1/models lists {', '.join(listed) or 'nothing'}", ", ".join(planned), f"restart {UNIT}")


@pytest.mark.depends_on("test_the_gateway_runs")
def test_the_gateway_refuses_an_unknown_model(server: Server) -> None:
    status, reply = server.topic("gateway")["unknown_model"]
    error = (reply.get("error") if isinstance(reply, dict) else None) or {}
    if (status, error.get("code"), error.get("param")) != (404, "model_not_found", "model") or not error.get("message"):
        answer = f"HTTP {status} and code {error.get('code')}" if status else reply
        found = f"a request for a model that is not served was answered with {answer}"
        server.fail(found, "404 model_not_found in OpenAI's form", f"restart {UNIT}, or {server.run_site}")


@pytest.mark.depends_on("test_engines_generate", "test_the_gateway_runs")
def test_the_gateway_generates(server: Server) -> None:
    through = server.topic("generations")["through"]
    found, busy = [], []
    for one in server.plan["deployments"]:
        who = f"{one['name']} through the gateway"
        reply = through.get(one["name"], {"said": "it was not asked, as no replica answered"})
        if reply.get("busy") and is_slow(server, one):
            busy.append(f"{who} ({reply['said']})")
        else:
            found += wrong(who, reply, one["model"])
    server.demand(found, "two tokens of the planned model", JOURNAL)
    skip_busy(server, busy)


def is_slow(server: Server, deployment: dict[str, Any]) -> bool:
    """Say whether the engines had much to do when they were asked: else the gateway itself kept an answer back."""
    straight = server.topic("generations")["straight"]
    names = [f"{deployment['name']}.{part['index']}" for part in deployment["replicas"]]
    return all(straight[name].get("busy") or straight[name]["seconds"] > SLOW_SECONDS for name in names)

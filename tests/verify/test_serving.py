"""The replicas of the recorded plan: what runs, since when, in which box, and whether it answers."""

from __future__ import annotations

from typing import Any

import pytest
from tests.verify.server import Server

SLOW_SECONDS = 5
"""A token of an engine that has nothing else to do comes sooner."""
CLOSED = "Connection refused"
LOOPBACK = ("127.", "[::1]", "[::ffff:127.")
# What both kinds of unit promise, as systemd tells it.
SANDBOX_OF_ALL = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "ProtectControlGroups": "yes",
    "ProtectKernelModules": "yes",
    "ProtectKernelTunables": "yes",
    "PrivateTmp": "yes",
    "RestrictSUIDSGID": "yes",
    "LockPersonality": "yes",
}
SANDBOX = {**SANDBOX_OF_ALL, "User": "gpuready-engine", "CapabilityBoundingSet": "", "RestrictRealtime": "yes"}
PROCESS = {"user": "gpuready-engine", "NoNewPrivs": "1", "CapBnd": "0000000000000000"}


def replicas(server: Server) -> list[tuple[str, dict[str, Any]]]:
    return [(f"gpuready-engine@{name}.service", now) for name, now in server.topic("replicas").items()]


def test_replicas_run(server: Server) -> None:
    states = [(unit, now["unit"]) for unit, now in replicas(server)]
    found = [
        f"{unit} is {now['ActiveState']} ({now['SubState']})" for unit, now in states if now["ActiveState"] != "active"
    ]
    server.demand(found, "an active unit", f"see journalctl -u of it on the server, or {server.run_site}")


def test_replicas_start_at_boot(server: Server) -> None:
    states = [(unit, now["unit"]["UnitFileState"]) for unit, now in replicas(server)]
    server.demand([f"{unit} is {now}" for unit, now in states if now != "enabled"], "an enabled unit")
    after = {unit: now["unit"]["After"].split() for unit, now in replicas(server)}
    found = [
        f"{unit} does not wait for {other}"
        for unit, others in before(server).items()
        for other in others - {*after[unit]}
    ]
    server.demand(sorted(found), "units that start one after the other on a GPU that they share")


def before(server: Server) -> dict[str, set[str]]:
    """Return the units after which each unit starts, because they share a GPU."""
    return {
        f"gpuready-engine@{one['name']}.{part['index']}.service": {
            f"gpuready-engine@{other}.service" for other in part.get("start_after", [])
        }
        for one in server.plan["deployments"]
        for part in one["replicas"]
    }


@pytest.mark.depends_on("test_replicas_run")
def test_replicas_run_the_recorded_release(server: Server) -> None:
    found = []
    for unit, now in replicas(server):
        ready = now["ready"] or {}
        if not now["recorded"] or not now["proved"] or now["digest"] is None:
            found.append(f"{unit} has no recorded release that was proved")
        elif now["on_trial"]:
            found.append(f"{unit} is on trial")
        elif not str(ready.get("release")) == now["started_on"] == now["recorded"]:
            found.append(f"{unit} runs release {now['started_on'] or 'unknown'} instead of {now['recorded']}")
        elif ready.get("release_digest") != now["digest"]:
            found.append(f"release {now['recorded']} of {unit} was changed since it was started")
        elif str(ready.get("main_pid")) != now["unit"]["MainPID"]:
            found.append(f"the process of {unit} is not the one that gave a token")
    server.demand(found, "the release that was proved, as it was proved")


@pytest.mark.depends_on("test_replicas_run")
def test_replicas_are_boxed_in(server: Server) -> None:
    found = []
    for unit, now in replicas(server):
        wrong = {key: now["unit"].get(key) for key, value in SANDBOX.items() if now["unit"].get(key) != value}
        found += [f"{unit} has {key}={value or 'nothing'}" for key, value in wrong.items()]
        if not wrong and now["process"] != PROCESS:
            process = ", ".join(f"{key} {value}" for key, value in (now["process"] or {}).items()) or "not to be seen"
            found.append(f"the process of {unit} runs outside it ({process})")
        if now["unit_digest"] != (now["ready"] or {}).get("unit_digest") or now["unit"]["NeedDaemonReload"] == "yes":
            found.append(f"the file of {unit} is not the one under which it was started")
    step = "take drop-ins away (systemctl cat shows them), then systemctl daemon-reload and systemctl restart the unit"
    server.demand(found, "the sandbox that the unit promises", step)


@pytest.mark.depends_on("test_replicas_run")
def test_engines_listen_on_loopback_only(server: Server) -> None:
    parts = {
        f"gpuready-engine@{one['name']}.{part['index']}.service": part
        for one in server.plan["deployments"]
        for part in one["replicas"]
    }
    found = []
    open_to_all = []
    for unit, now in replicas(server):
        wide = [one for one in now["listens"] if not one.startswith(LOOPBACK)]
        if len(parts[unit]["gpus"]) > 1 and len(wide) == 1 and is_rendezvous(wide[0]):
            if not server.recorded("firewall"):
                open_to_all += wide
            if not server.recorded("firewall") or is_closed(server, wide[0]):
                wide = []
        found += [f"{unit} listens on {one}" for one in wide]
        if f"127.0.0.1:{parts[unit]['port']}" not in now["listens"]:
            found.append(f"{unit} does not listen on 127.0.0.1:{parts[unit]['port']}")
    server.demand(
        found, "engines on loopback, at their planned port", f"see ss -lntup on the server, then {server.run_site}"
    )
    if open_to_all:
        pytest.skip(
            f"{server.name} leaves the packet filter alone (base_firewall_enabled is false): close "
            f"{', '.join(open_to_all)} in your own firewall, and all other ports that nobody needs: torch's workers "
            "meet there, and at another port after each start"
        )


@pytest.mark.depends_on("test_replicas_run", "test_the_packet_filter_is_loaded")
def test_engines_answer_no_people_of_the_server(server: Server) -> None:
    if not server.recorded("firewall"):
        pytest.skip(
            f"{server.name} leaves the packet filter alone (base_firewall_enabled is false): close the engines' ports "
            "on loopback to people of the server in your own firewall, or they ask engines past the gateway"
        )
    found = [
        f"{unit} says {now['to_nobody']} to nobody" for unit, now in replicas(server) if now["to_nobody"] != CLOSED
    ]
    server.demand(found, f"{CLOSED} past the gateway")


def is_rendezvous(socket: str) -> bool:
    """Say whether a socket may be where torch's workers meet, and only a packet filter can close it.

    torch.distributed's TCPStore listens on every address; the one that it is given is only connected to.
    """
    return socket.rpartition(":")[0] in ("*", "0.0.0.0", "[::]")


def is_closed(server: Server, socket: str) -> bool:
    """Say whether our packet filter lets nobody in to a socket."""
    port = socket.rpartition(":")[2]
    firewall = server.topic("firewall")
    ranges = [one.strip().partition("-") for ports in firewall["open"] for one in ports.strip("{}").split(",")]
    is_open = any(int(first) <= int(port) <= int(last or first) for first, _, last in ranges)
    return bool(firewall["as_recorded"]) and not is_open


@pytest.mark.depends_on("test_replicas_run")
def test_engines_generate(server: Server) -> None:
    model_of = {one["name"]: one["model"] for one in server.plan["deployments"]}
    found, busy = [], []
    for replica, reply in server.topic("generations")["straight"].items():
        if reply.get("busy"):
            busy.append(f"{replica} ({reply['said']})")
        else:
            found += wrong(replica, reply, model_of[replica.rpartition(".")[0]])
    server.demand(found, "two tokens of the planned model", "see journalctl -u of its unit on the server")
    skip_busy(server, busy)


@pytest.mark.depends_on("test_engines_generate")
def test_engines_have_the_planned_kv_cache(server: Server) -> None:
    found, unknown = [], []
    for replica, cache in server.topic("caches").items():
        if cache["planned"]["tokens"].get("value") == 0:
            continue  # an encoder keeps nothing
        band, tokens = planned_tokens(**cache), tokens_of(**cache)
        if band is None or tokens is None:
            unknown.append(f"{replica} ({'its plan gives no band' if band is None else 'its engine does not tell it'})")
        elif not band[0] <= tokens <= band[1]:
            found.append(f"{replica} has a KV cache of {tokens:,} tokens instead of {band[0]:,} to {band[1]:,}")
    step = "see gpuready deployment status and nvidia-smi on the server for what else holds memory of its GPUs"
    server.demand(found, "a KV cache in the band of its plan", step)
    if unknown:
        pytest.skip(f"not judged: the KV cache of {', '.join(unknown)} on {server.name}")


def planned_tokens(planned: dict[str, Any], has: dict[str, int]) -> tuple[int, int] | None:
    """Return the band in which an engine's tokens must lie; a stand-in on the CPU is given bytes, not a card."""
    if planned["bytes"] and planned["bytes_per_token"]:
        most = int(planned["bytes"] // planned["bytes_per_token"])
        return most - has.get("block_tokens", 1) + 1, most
    low, high = planned["tokens"].get("low"), planned["tokens"].get("high")
    return None if low is None or high is None else (int(low), int(high))


def tokens_of(planned: dict[str, Any], has: dict[str, int]) -> int | None:
    """Return an engine's tokens: all that its blocks hold of a stand-in, else as it counts them itself.

    vLLM before 0.24 tells its blocks alone, of which one token may take several: the plan says how many make one.
    """
    blocks, each = has.get("blocks"), has.get("block_tokens")
    if planned["bytes"]:
        return blocks * each if blocks and each else has.get("tokens")
    if "tokens" in has or not blocks or not planned["blocks"]:
        return has.get("tokens")
    return round(blocks * float(planned["tokens"]["value"]) / int(planned["blocks"]))


def skip_busy(server: Server, who: list[str]) -> None:
    """Judge nothing where an engine, whose unit is active, has too much to do to answer us."""
    if who:
        pytest.skip(f"not judged: {', '.join(who)} on {server.name} is busy and gave no token; ask again later")


def wrong(who: str, reply: dict[str, Any], model: str) -> list[str]:
    """Return what is wrong with an answer to a request for two tokens."""
    if "said" in reply:
        return [f"{who} gave no token ({reply['said']})"]
    if reply["model"] != model:
        return [f"{who} answers as {reply['model']} instead of {model}"]
    return [] if reply["tokens"] else [f"{who} gave an answer without what it was asked for"]

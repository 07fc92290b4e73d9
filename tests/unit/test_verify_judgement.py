"""What the audit judges of servers that no test machine can be: several GPUs, other cards, much to do."""

from __future__ import annotations

from typing import Any

import pytest
from tests.verify import test_engines, test_gateway, test_host
from tests.verify import test_serving as audit
from tests.verify.server import Server

UNIT = "gpuready-engine@chat.0.service"
RENDEZVOUS = "*:41001"


def server(gpus: list[int], *sockets: str, **firewall: Any) -> Server:
    part = {"index": 0, "gpus": gpus, "port": 18100}
    replica = {"listens": ["127.0.0.1:18100", "127.0.0.1:40000", *sockets]}
    topics = {"replicas": {"chat.0": replica}, "firewall": {"open": ["22", "8080"], "as_recorded": True} | firewall}
    plan = {"deployments": [{"name": "chat", "replicas": [part]}]}
    return Server("h", {"plan": plan, "host": {"firewall": True}, "topics": topics})


def said_by(judge: Any, server: Server) -> str:
    """Return what a test says of a server: nothing where all is well, the reason where it is skipped, a failure."""
    try:
        judge(server)
    except pytest.skip.Exception as reason:
        return f"skipped: {reason}"
    except pytest.fail.Exception as sentence:
        return str(sentence)
    return ""


def sharing(after: str) -> Server:
    """Return a server whose deployment code starts after chat on GPU 0, and whose unit has this `After=`."""
    named = {"chat.0": "network.target", "code.0": after}
    topics = {"replicas": {name: {"unit": {"UnitFileState": "enabled", "After": one}} for name, one in named.items()}}
    chat = {"name": "chat", "replicas": [{"index": 0, "gpus": [0], "port": 18100}]}
    code = {"name": "code", "replicas": [{"index": 0, "gpus": [0], "port": 18101, "start_after": ["chat.0"]}]}
    return Server("h", {"plan": {"deployments": [chat, code]}, "host": {}, "topics": topics})


def test_units_that_share_a_gpu_must_wait_for_one_another() -> None:
    assert said_by(audit.test_replicas_start_at_boot, sharing(f"network.target {UNIT}")) == ""
    said = said_by(audit.test_replicas_start_at_boot, sharing("network.target"))
    assert f"host h: gpuready-engine@code.0.service does not wait for {UNIT}" in said


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


def test_without_our_packet_filter_torchs_rendezvous_is_told() -> None:
    several, one = server([0, 1], RENDEZVOUS), server([0], RENDEZVOUS)
    for each in (several, one):
        each.snapshot["host"]["firewall"] = False
    said = said_by(audit.test_engines_listen_on_loopback_only, several)
    assert said.startswith(
        "skipped: h leaves the packet filter alone (base_firewall_enabled is false): close *:41001 in"
    )
    assert f"{UNIT} listens on {RENDEZVOUS}, expected" in said_by(audit.test_engines_listen_on_loopback_only, one)


@pytest.mark.parametrize(
    ("answer", "has_filter", "said"),
    [
        ("Connection refused", True, ""),
        ("connected", True, f"host h: {UNIT} says connected to nobody, expected Connection refused past the gateway"),
        ("timed out", True, f"host h: {UNIT} says timed out to nobody, expected Connection refused past the gateway"),
        ("connected", False, "skipped: h leaves the packet filter alone (base_firewall_enabled is false): close the"),
    ],
)
def test_people_of_the_server_have_no_answer_of_an_engine(answer: str, has_filter: bool, said: str) -> None:
    asked = server([0])
    asked.snapshot["topics"]["replicas"]["chat.0"]["to_nobody"] = answer
    asked.snapshot["host"]["firewall"] = has_filter
    found = said_by(audit.test_engines_answer_no_people_of_the_server, asked)
    assert found.startswith(said)
    assert bool(found) == bool(said)


# ------------------------------------------------------------------------------------------------ GPUs


def with_gpus(*devices: str, model: str = "h100-80gb-sxm", count: int = 8) -> Server:
    gpus = {f"0000:{index:02x}:00.0": device for index, device in enumerate(devices)}
    return Server(
        "h", {"plan": {"host": {"gpu_model": model, "gpu_count": count}}, "host": {}, "topics": {"gpus": gpus}}
    )


@pytest.mark.parametrize("model", ["h100-80gb-sxm", "h100"])
def test_the_planned_card_by_any_of_its_names_is_good(model: str) -> None:
    assert said_by(test_engines.test_the_planned_gpus_are_on_the_bus, with_gpus(*["0x2330"] * 8, model=model)) == ""


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        (["0x20b2"] * 8, "8 GPUs of NVIDIA are on the PCI bus (0x20b2)"),
        (["0x2330"] * 7 + ["0x20b2"], "8 GPUs of NVIDIA are on the PCI bus (0x20b2, 0x2330)"),
        (["0x2330"] * 7, "7 GPUs of NVIDIA are on the PCI bus (0x2330)"),
        ([], "0 GPUs of NVIDIA are on the PCI bus (none)"),
    ],
)
def test_another_card_is_said(devices: list[str], found: str) -> None:
    said = said_by(test_engines.test_the_planned_gpus_are_on_the_bus, with_gpus(*devices))
    assert said.startswith(f"host h: {found}, expected 8 of h100-80gb-sxm (2330); see lspci")


def test_a_card_that_the_catalog_lacks_is_unknown() -> None:
    said = said_by(test_engines.test_the_planned_gpus_are_on_the_bus, with_gpus("0x2330", model="h900", count=1))
    assert said.startswith("host h: h900 is planned and not in gpus.yaml")


# ------------------------------------------------------------------------------------------------ units


def with_failed(*units: str, clock: str | None = "chrony.service") -> Server:
    return Server("h", {"plan": {}, "host": {"clock": clock}, "topics": {"failed_units": list(units)}})


def test_no_failed_unit_is_good() -> None:
    assert said_by(test_host.test_no_unit_that_counts_has_failed, with_failed()) == ""


@pytest.mark.parametrize(
    "unit",
    [
        UNIT,
        "gpuready-gateway.service",
        "nvidia-persistenced.service",
        "nftables.service",
        "chrony.service",
        "ssh.service",
        "ssh.socket",
    ],
)
def test_a_failed_unit_that_counts_is_said(unit: str) -> None:
    said = said_by(test_host.test_no_unit_that_counts_has_failed, with_failed("motd-news.service", unit))
    assert said.startswith(f"host h: {unit} has failed, expected no failed unit; ")


@pytest.mark.parametrize("unit", ["motd-news.service", "haproxy.service", "ntp.service", "run-nvidia-x.mount"])
def test_a_failed_unit_of_others_is_told(unit: str) -> None:
    said = said_by(test_host.test_no_unit_that_counts_has_failed, with_failed(unit))
    assert said.startswith(f"skipped: h has failed units that gpuready does not rely on: {unit}; see systemctl")


# ------------------------------------------------------------------------------------------------ gateway


@pytest.mark.parametrize(
    ("bind", "socket"),
    [
        ("2001:DB8:0:0::1", "[2001:db8::1]:8080"),
        ("[2001:db8::1]", "[2001:db8::1]:8080"),
        ("::", "*:8080"),
        ("0:0:0:0:0:0:0:0", "[::]:8080"),
        ("*", "0.0.0.0:8080"),
        ("192.0.2.1", "192.0.2.1:8080"),
    ],
)
def test_an_address_may_be_spelled_otherwise(bind: str, socket: str) -> None:
    plan = {"gateway": {"bind": bind, "port": 8080}}
    made = Server("h", {"plan": plan, "host": {}, "topics": {"gateway": {"listens": [socket]}}})
    assert said_by(test_gateway.test_the_gateway_listens_only_where_planned, made) == ""
    made.snapshot["topics"]["gateway"]["listens"] = ["[2001:db8::2]:8080"]
    assert "listens on [2001:db8::2]:8080" in said_by(test_gateway.test_the_gateway_listens_only_where_planned, made)


# ------------------------------------------------------------------------------------------------ answers

GOOD = {"model": "m", "tokens": 2, "seconds": 0.1}
LATE = {**GOOD, "seconds": 24.0}
SILENT = {"said": "no answer within 25 s", "busy": True, "seconds": 25.0}
REFUSED = {"said": "Connection refused", "busy": False, "seconds": 0.0}


def answering(straight: dict[str, Any], through: dict[str, Any]) -> Server:
    plan = {"deployments": [{"name": "chat", "model": "m", "replicas": [{"index": 0}]}]}
    generations = {"straight": {"chat.0": straight}, "through": {"chat": through}}
    return Server("h", {"plan": plan, "host": {}, "topics": {"generations": generations}})


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (GOOD, ""),
        (SILENT, "skipped: not judged: chat.0 (no answer within 25 s) on h is busy and gave no token; ask again later"),
        (REFUSED, "host h: chat.0 gave no token (Connection refused), expected two tokens of the planned model; "),
    ],
)
def test_an_engine_that_is_busy_is_not_judged(reply: dict[str, Any], words: str) -> None:
    said = said_by(audit.test_engines_generate, answering(reply, GOOD))
    assert said.startswith(words) if words else said == ""


@pytest.mark.parametrize(
    ("straight", "through", "words"),
    [
        (GOOD, GOOD, ""),
        (LATE, SILENT, "skipped: not judged: chat through the gateway (no answer within 25 s) on h is busy"),
        # An engine that answers at once is not busy: the gateway keeps the answer back.
        (GOOD, SILENT, "host h: chat through the gateway gave no token (no answer within 25 s), expected two tokens"),
        (LATE, REFUSED, "host h: chat through the gateway gave no token (Connection refused), expected two tokens"),
    ],
)
def test_a_gateway_before_busy_engines_is_not_judged(
    straight: dict[str, Any], through: dict[str, Any], words: str
) -> None:
    said = said_by(test_gateway.test_the_gateway_generates, answering(straight, through))
    assert said.startswith(words) if words else said == ""


# ------------------------------------------------------------------------------------------------ KV caches

BAND = {"value": 476016.0, "low": 473000.0, "high": 479000.0}


def with_cache(has: dict[str, int], **planned: Any) -> Server:
    numbers = {"tokens": BAND, "blocks": 29751, "bytes": None, "bytes_per_token": None, **planned}
    return Server("h", {"plan": {}, "host": {}, "topics": {"caches": {"chat.0": {"planned": numbers, "has": has}}}})


@pytest.mark.parametrize(
    "has",
    [
        {"tokens": 474304},
        {"tokens": 473000, "blocks": 1, "block_tokens": 16},
        {"blocks": 29644, "block_tokens": 16},
    ],
)
def test_a_kv_cache_in_the_plans_band_is_good(has: dict[str, int]) -> None:
    assert said_by(audit.test_engines_have_the_planned_kv_cache, with_cache(has)) == ""


@pytest.mark.parametrize(
    ("has", "tokens"), [({"tokens": 418000}, "418,000"), ({"blocks": 31000, "block_tokens": 16}, "496,000")]
)
def test_a_kv_cache_outside_it_is_said(has: dict[str, int], tokens: str) -> None:
    said = said_by(audit.test_engines_have_the_planned_kv_cache, with_cache(has))
    assert said.startswith(f"host h: chat.0 has a KV cache of {tokens} tokens instead of 473,000 to 479,000, expected")


def test_a_stand_ins_kv_cache_follows_from_its_bytes() -> None:
    given = {"bytes": 67108864, "bytes_per_token": 512}
    good = with_cache({"tokens": 102400, "blocks": 1024, "block_tokens": 128}, **given)
    assert said_by(audit.test_engines_have_the_planned_kv_cache, good) == ""
    less = with_cache({"tokens": 102400, "blocks": 1023, "block_tokens": 128}, **given)
    said = said_by(audit.test_engines_have_the_planned_kv_cache, less)
    assert "chat.0 has a KV cache of 130,944 tokens instead of 130,945 to 131,072" in said


def test_an_encoder_has_no_kv_cache_to_judge() -> None:
    none = {"value": 0.0, "low": 0.0, "high": 0.0}
    assert said_by(audit.test_engines_have_the_planned_kv_cache, with_cache({"tokens": 16}, tokens=none)) == ""


def test_an_unknown_kv_cache_is_not_judged() -> None:
    silent = said_by(audit.test_engines_have_the_planned_kv_cache, with_cache({}))
    assert silent == "skipped: not judged: the KV cache of chat.0 (its engine does not tell it) on h"
    bare = said_by(audit.test_engines_have_the_planned_kv_cache, with_cache({"tokens": 1}, tokens={"value": 476016}))
    assert bare == "skipped: not judged: the KV cache of chat.0 (its plan gives no band) on h"

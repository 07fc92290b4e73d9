"""Several deployments on one GPU: under one division of it, in an order of start, in a run and at boot."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.standin_systemd import Server
from tests.unit.test_release_apply import apply, deployment, engine_calls, server

from gpuready.operations import claims, order
from gpuready.outcome import Failed, Refusal
from gpuready.serving import units

__all__ = ["server"]
SHARES = {"chat": 40.5, "code": 24.0, "guard": 8.0}


def sharing(name: str, port: int, *after: str, shares: dict[str, float] = SHARES, **flags: Any) -> dict[str, Any]:
    """Return a deployment that has a part of GPU 0."""
    parts = [{"index": 0, "gpus": [0], "port": port, "shares": shares}]
    return {**deployment(name, [0], port, **flags), "replicas": parts, "start_after": list(after)}


THREE = [sharing("code", 18101, "chat"), sharing("guard", 18102, "chat", "code"), sharing("chat", 18100)]


def starts(server: Server) -> list[str]:
    return [call.split("@")[1].partition(".")[0] for call in engine_calls(server) if call.startswith("restart")]


def test_the_one_with_the_largest_part_starts_first(server: Server) -> None:
    apply(server, *THREE)
    assert starts(server) == ["chat", "code", "guard"]
    assert {name: gpus for name, (_, gpus) in server.serving().items()} == dict.fromkeys(
        ("chat.0", "code.0", "guard.0"), "0"
    )
    assert not apply(server, *THREE).changed


def test_at_boot_units_wait_for_those_before_them(server: Server) -> None:
    apply(server, *THREE)
    unit = {name: units.unit_of(f"{name}.0") for name in SHARES}
    assert server.after(unit["chat"]) == set()
    assert server.after(unit["code"]) == {unit["chat"]}
    assert server.after(unit["guard"]) == {unit["chat"], unit["code"]}
    # Requires= or BindsTo= would keep the others from starting where one fails.
    text = server.layout.order("guard.0").read_text()
    assert [line.partition("=")[0] for line in text.splitlines()[1:]] == ["[Unit]", "After"]
    server.reboot()
    assert len(server.serving()) == 3


def test_a_change_of_one_leaves_the_others_alone(server: Server) -> None:
    apply(server, *THREE)
    server.calls.clear()
    apply(server, sharing("code", 18101, "chat", a=1), *THREE[1:])
    assert engine_calls(server) == [f"restart {units.unit_of('code.0')}"]


def test_another_division_stops_all_before_the_first_starts(server: Server) -> None:
    apply(server, *THREE)
    server.calls.clear()
    shares = {"chat": 30.0, "code": 40.0}
    wanted = [sharing("chat", 18100, "code", shares=shares), sharing("code", 18101, shares=shares)]
    said = apply(server, *wanted)
    assert "chat.0: stopped first, because code.0 takes its GPU 0" in said.summary
    assert "the order of start changed" in said.summary
    names = [(call.split()[0], call.split("@")[1].partition(".")[0]) for call in engine_calls(server)]
    assert names == [
        ("disable", "guard"),
        ("stop", "code"),
        ("stop", "chat"),
        ("restart", "code"),
        # Its record is of the old division; a boot must not act on both.
        ("disable", "chat"),
        ("restart", "chat"),
    ]
    assert server.serving() == {"chat.0": (2, "0"), "code.0": (2, "0")}
    assert server.layout.orders() == [server.layout.order("chat.0")]
    assert not apply(server, *wanted).changed


def test_a_whole_gpu_becomes_a_shared_one(server: Server) -> None:
    apply(server, deployment("chat", [0], 18100))
    apply(server, *THREE)
    assert set(server.serving()) == {"chat.0", "code.0", "guard.0"}
    apply(server, deployment("chat", [0], 18100))
    assert server.serving() == {"chat.0": (1, "0")}
    assert not server.layout.order("code.0").parent.exists()


def test_where_the_new_division_fails_the_old_one_comes_back(server: Server) -> None:
    apply(server, *THREE)
    shares = {**SHARES, "chat": 41.0}
    wanted = [{**one, "replicas": [{**one["replicas"][0], "shares": shares}]} for one in THREE]
    wanted[2] = sharing("chat", 18100, shares=shares, broken=1)
    with pytest.raises(Failed) as failed:
        apply(server, *wanted)
    assert "chat.0 did not give a token on release 2; it is now back on release 1, serving" in str(failed.value)
    assert "code.0, stopped to make room, serves release 1 again" in str(failed.value)
    assert {name: number for name, (number, _) in server.serving().items()} == dict.fromkeys(
        ("chat.0", "code.0", "guard.0"), 1
    )


def test_an_operators_own_drop_in_stays(server: Server) -> None:
    apply(server, *THREE)
    own = server.layout.order("code.0").with_name("own.conf")
    own.write_text("[Unit]\n")
    apply(server, THREE[2])
    assert own.exists()
    assert not server.layout.order("code.0").exists()


def test_check_says_the_order_and_writes_nothing(server: Server) -> None:
    result = apply(server, *THREE, check=True)
    assert "the order of start would change" in result.summary
    assert server.layout.orders() == []


def test_a_replica_waits_only_for_those_on_its_own_gpus(server: Server) -> None:
    other = {**sharing("code", 18101, "chat"), "replicas": [{"index": 0, "gpus": [1], "port": 18101, "shares": SHARES}]}
    assert order.drop_ins(server.layout, [THREE[2], other]) == {}


@pytest.mark.parametrize(
    ("deployments", "words"),
    [
        (
            [sharing("chat", 18100, "code"), sharing("code", 18101, "chat")],
            "chat, code start after one another: none of them could be the first",
        ),
        ([sharing("chat", 18100, "chat")], "chat start after one another"),
        ([sharing("chat", 18100, "gone")], "chat starts after gone: there is no such deployment"),
    ],
)
def test_an_order_that_cannot_be_is_refused_before_anything_is_changed(
    server: Server, deployments: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(Refusal, match=words):
        apply(server, *deployments)
    assert server.calls == []


def test_two_meet_on_a_gpu_only_under_the_same_division() -> None:
    mine = claims.of_part({"gpus": [0], "port": 1, "shares": SHARES})
    alike = claims.of_part({"gpus": [0], "port": 2, "shares": SHARES})
    other = claims.of_part({"gpus": [0], "port": 3, "shares": {"chat": 1.0}})
    whole = claims.of_part({"gpus": [0], "port": 4})
    assert claims.clash(mine, alike) == set()
    assert claims.named(claims.clash(mine, other)) == "its GPU 0"
    assert claims.named(claims.clash(mine, whole)) == "its GPU 0"
    assert claims.named(claims.clash(whole, whole)) == "its GPU 0 and its port 4"

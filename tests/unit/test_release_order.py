"""Several deployments on one GPU: under one division of it, in an order of start, in a run and at boot."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.standin_systemd import Server
from tests.unit.test_release_apply import apply, deployment, engine_calls, replicated, server

from gpuready.operations import claims
from gpuready.outcome import Failed, Refusal
from gpuready.serving import units

__all__ = ["server"]
SHARES = {"chat": 40.5, "code": 24.0, "guard": 8.0}


def sharing(name: str, port: int, *after: str, gib: float = 0.0, **flags: Any) -> dict[str, Any]:
    """Return a deployment that has a part of GPU 0 and starts after others."""
    more: dict[str, Any] = {"shared_gib": gib or SHARES[name]}
    if after:
        more["start_after"] = list(after)
    return replicated(name, ([0], port), more=more, **flags)


THREE = [sharing("code", 18101, "chat.0"), sharing("guard", 18102, "code.0"), sharing("chat", 18100)]


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
    apply(server, sharing("code", 18101, "chat.0", a=1), *THREE[1:])
    assert engine_calls(server) == [f"restart {units.unit_of('code.0')}"]


def test_another_division_stops_all_before_the_first_starts(server: Server) -> None:
    apply(server, *THREE)
    server.calls.clear()
    wanted = [sharing("chat", 18100, "code.0", gib=30.0), sharing("code", 18101, gib=40.0)]
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
    wanted = [*THREE[:2], sharing("chat", 18100, gib=41.0, broken=1)]
    with pytest.raises(Failed) as failed:
        apply(server, *wanted)
    assert "chat.0 did not serve release 2: it gave no token; it is now back on release 1, serving" in str(failed.value)
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


@pytest.mark.parametrize(
    ("deployments", "words"),
    [
        (
            [sharing("chat", 18100, "code.0"), sharing("code", 18101, "chat.0")],
            r"chat\.0, code\.0 start after one another: none of them could be the first",
        ),
        ([sharing("chat", 18100, "chat.0")], r"chat\.0 start after one another"),
        ([sharing("chat", 18100, "gone.0")], r"chat\.0 starts after gone\.0: there is no such replica"),
    ],
)
def test_an_order_that_cannot_be_is_refused_before_anything_is_changed(
    server: Server, deployments: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(Refusal, match=words):
        apply(server, *deployments)
    assert server.calls == []


def test_two_meet_on_a_gpu_only_under_the_same_division() -> None:
    chat, code = claims.divided([sharing("chat", 1), sharing("code", 2)])
    mine, alike = (claims.of_part(one["replicas"][0]) for one in (chat, code))
    (alone,) = claims.divided([sharing("chat", 3)])
    whole = claims.of_part({"gpus": [0], "port": 4})
    assert claims.clash(mine, alike) == set()
    assert claims.named(claims.clash(mine, claims.of_part(alone["replicas"][0]))) == "its GPU 0"
    assert claims.named(claims.clash(mine, whole)) == "its GPU 0"
    assert claims.named(claims.clash(whole, whole)) == "its GPU 0 and its port 4"

"""A cure is recorded by the release that failed, taken by the next plan where declared, dropped when answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.standin_systemd import Server
from tests.unit.test_planning import FACTS, plan, spec
from tests.unit.test_planning import deployment as declared_deployment
from tests.unit.test_release_apply import CHAT, UNIT_TEXT, deployment, server

from gpuready.operations import memory, release, replica
from gpuready.outcome import Failed
from gpuready.planning import cures
from gpuready.serving.files import read_json

__all__ = ["server"]

NO_ROOM = (
    "ValueError: To serve at least one request with the model's max seq len (17664), (2.16 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (1.0 GiB). Based on the available memory, the estimated "
    "maximum model length is 8176."
)
SERVING = (
    "Capturing CUDA graphs (decode, FULL)\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU "
    "0 has a total capacity of 79.10 GiB of which 1.50 GiB is free. vllm"
)


def apply(server: Server, one: dict[str, Any], **beside: Any) -> None:
    made = {"deployments": [one], "declarations": {"chat": "d1"}, **beside}
    release.Applier(server.layout, False).apply(made, {"chat": {"serve.yaml": str(one["flags"])}}, UNIT_TEXT)


def failing(server: Server, journal: str, **beside: Any) -> str:
    server.journal = journal
    with pytest.raises(Failed) as caught:
        apply(server, {**deployment("chat", [0], 18100, broken=len(journal)), "engine": "vllm"}, **beside)
    return str(caught.value)


def test_a_failed_release_says_what_cures_it_and_records_it(server: Server) -> None:
    apply(server, CHAT)
    said = failing(server, NO_ROOM)
    assert "out of memory, the KV cache does not fit what is asked of it" in said
    assert "declare it: gpuready_deployments, chat: flags: {max-model-len: 8176}; " in said
    assert "its limit was 1234 s" in said
    kept = read_json(server.layout.cures)
    assert kept is not None
    assert kept["chat"]["settings"] == {"max_model_len": 8176}
    assert (kept["chat"]["declaration"], kept["chat"]["release"], kept["chat"]["kind"]) == ("d1", 2, "kv_cache")
    assert server.serving() == {"chat.0": (1, "0")}


def test_status_and_diagnose_tell_a_failure_that_nobody_answered(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(server, CHAT)
    failing(server, NO_ROOM)
    assert "chat: release 2 failed: out of memory, the KV cache" in replica.status(server.layout, ["chat.0"]).summary
    server.journal = "The server is fired up"
    found = memory.of_replica(server.layout, "chat.0")
    assert found.summary.startswith("chat.0, release 1: no lack of memory in it")
    assert "chat: release 2 failed: out of memory" in found.summary
    assert found.data["diagnosis"] is None


def test_a_second_failure_of_the_same_declaration_comes_on_top(server: Server) -> None:
    failing(server, SERVING)
    # 0.5 GiB were missing and 0.5 are spared.
    assert (read_json(server.layout.cures) or {})["chat"]["headroom_gib"] == 1.0
    failing(server, f"{SERVING} and again")
    assert (read_json(server.layout.cures) or {})["chat"]["headroom_gib"] == 2.0
    failing(server, f"{SERVING} of another declaration", declarations={"chat": "d2"})
    assert (read_json(server.layout.cures) or {})["chat"]["headroom_gib"] == 1.0


def test_no_lack_of_memory_records_nothing(server: Server) -> None:
    said = failing(server, "OSError: [Errno 98] Address already in use")
    assert "out of memory" not in said
    assert not server.layout.cures.exists()


def test_a_record_is_dropped_once_a_plan_without_it_serves(server: Server) -> None:
    failing(server, NO_ROOM)
    apply(server, CHAT, cured=["chat"])
    assert "chat" in (read_json(server.layout.cures) or {})
    apply(server, CHAT, declarations={"chat": "d2"}, cured=["chat"])
    assert not server.layout.cures.exists()
    failing(server, NO_ROOM)
    apply(server, CHAT)
    assert not server.layout.cures.exists()


# What the planner makes of it ----------------------------------------------------------------------------------------


def facts(declared: dict[str, Any], **record: Any) -> dict[str, Any]:
    one = {"declaration": cures.declaration(declared), "release": 3, "kind": "kv_cache", "what": "", **record}
    return {**FACTS, "cures": {declared["name"]: one}}


def planned(declared: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = plan(spec(declared), facts=known)
    return found


def option_of(made: dict[str, Any], name: str) -> dict[str, Any]:
    groups = made["deployments"][0]["options"]
    return next(one for group in groups.values() for one in group if one["name"] == name)


def test_a_cure_is_taken_where_it_is_declared_and_said() -> None:
    declared = declared_deployment(apply_cures=True)
    usual = planned(declared, FACTS)
    made = planned(declared, facts(declared, settings={"max_model_len": 8176}))
    assert usual["deployments"][0]["settings"]["max_model_len"] > 8176
    assert made["deployments"][0]["settings"]["max_model_len"] == 8176
    assert option_of(made, "max-model-len")["why"] == "cure taken after an out-of-memory of release 3 (kv_cache)"
    said = [one for one in made["deployments"][0]["explain"] if "cure taken" in one]
    assert said == ["max_model_len 8,176, cure taken after an out-of-memory of release 3 (kv_cache)"]
    assert (usual["cured"], made["cured"]) == ([], ["chat"])
    assert usual["inputs"] != made["inputs"]


def test_a_cure_is_not_taken_where_it_is_not_declared() -> None:
    declared = declared_deployment()
    known = facts(declared, settings={"max_model_len": 8176}, headroom_gib=3.0)
    assert planned(declared, known) == planned(declared, FACTS)


def test_more_headroom_is_left_to_nobody() -> None:
    declared = declared_deployment(apply_cures=True)
    usual, made = planned(declared, FACTS), planned(declared, facts(declared, kind="graph_capture", headroom_gib=4.0))
    before, after = (one["deployments"][0]["settings"]["gpu_memory_utilization"] for one in (usual, made))
    total = usual["deployments"][0]["memory"]["total_gib"]
    # Fractions are whole thousandths.
    assert (before - after) * total == pytest.approx(4.0, abs=0.002 * total)
    assert any(
        "cure taken after an out-of-memory of release 3 (graph_capture): 4.00 GiB more of headroom" in one
        for one in made["deployments"][0]["explain"]
    )


def test_what_the_operator_set_stays_and_that_is_said() -> None:
    declared = declared_deployment(apply_cures=True, flags={"max-model-len": 16000, "gpu-memory-utilization": 0.8})
    made = planned(declared, facts(declared, settings={"max_model_len": 8176}, headroom_gib=4.0))
    settings = made["deployments"][0]["settings"]
    assert (settings["max_model_len"], settings["gpu_memory_utilization"]) == (16000, 0.8)
    said = " ".join(made["deployments"][0]["explain"])
    assert "cure not taken after an out-of-memory of release 3 (kv_cache): max_model_len at most 8,176" in said
    assert "4.00 GiB more of headroom, because flags set the memory" in said
    assert made["cured"] == []


def test_another_declaration_answers_the_record() -> None:
    declared = declared_deployment(apply_cures=True)
    known = facts(declared, settings={"max_model_len": 8176})
    changed = {**declared, "headroom_gib": 6.0}
    assert planned(changed, known)["deployments"][0]["settings"]["max_model_len"] > 8176
    assert cures.declaration(declared) == cures.declaration({**declared, "apply_cures": False})


def test_the_record_is_no_part_of_a_release(server: Server) -> None:
    apply(server, CHAT)
    folder: Path = server.layout.releases("chat") / "1"
    assert "declaration" not in (folder / "plan.json").read_text()

"""What a plan that is shown says of the plan that the server has."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.test_planning import deployment, plan, spec

from gpuready.planning.difference import TAKE, sentences
from gpuready.planning.host import keep_or_renew


def two(**change: Any) -> dict[str, Any]:
    return plan(spec(deployment(**change), deployment(name="code", model="other")))


def test_a_server_without_a_plan_and_one_with_this_plan() -> None:
    made = two()
    assert sentences(made, None) == ["the server has no plan yet: site.yml brings this one"]
    assert sentences(made, json.loads(json.dumps(made))) == ["the server has this plan"]


def test_what_was_declared_otherwise_is_told_setting_by_setting() -> None:
    load = {**deployment()["workload"], "concurrency": 8}
    found = sentences(two(workload=load, gpus=2, flags={"seed": 1}), two())
    assert found[0].startswith("chat: ")
    assert "max-num-seqs 80 -> 8, " in found[0]
    assert "seed (not set) -> 1, GPUs of its replicas [[0]] -> [[0], [1]]" in found[0]
    assert "planned KV cache" in found[0]
    assert found[-1].startswith("site.yml brings this plan, because")


def test_deployments_that_come_and_go_are_named() -> None:
    found = sentences(plan(spec(deployment(name="new"))), plan(spec(deployment())))
    assert found[:2] == ["new is new", "chat is no longer declared"]


def test_another_answer_to_the_same_question_waits_until_it_is_taken() -> None:
    made = two()
    stored = json.loads(json.dumps(made))
    stored["deployments"][0]["settings"]["max_num_seqs"] = 40
    seqs = next(one for one in stored["deployments"][0]["options"]["batching"] if one["name"] == "max-num-seqs")
    seqs["value"] = 40
    assert sentences(made, stored) == [
        "chat: max-num-seqs 40 -> 80",
        f"nothing that was declared has changed, so site.yml leaves the server's plan as it is; {TAKE}",
    ]
    kept, note = keep_or_renew(made, stored, renew=False)
    assert kept["deployments"][0]["settings"]["max_num_seqs"] == 40
    assert note.endswith("otherwise; take its plan with -e gpuready_replan=true")


def test_a_plan_of_the_older_form_is_replaced() -> None:
    made = two()
    stored = {**json.loads(json.dumps(made)), "schema": 1}
    assert sentences(made, stored)[0].startswith("the server's plan is of an older form: site.yml replaces it")
    assert keep_or_renew(made, stored, renew=False) == (made, "")

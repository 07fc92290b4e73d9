"""What a plan says of models with a source, their code and their adapters."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.test_preflight import GATEWAY, GIB, MODEL, good_facts, good_spec

from gpuready.planning.host import decide, needs_of
from gpuready.spec.check import check_declaration

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SOURCE = {"hub": "huggingface", "repository": "org/llama", "revision": COMMIT}
PATH = "/srv/models/org--llama@0123456789ab"
ADAPTER = {"adapter": {}, "rank": 16, "base_model": "other-owner/Llama", "failures": [], "files": []}


def spec(**more: Any) -> dict[str, Any]:
    found = good_spec()
    found["gpuready_deployments"][0] |= {"model_path": None, "source": SOURCE, "draft": None, **more}
    return found


def decided(said: dict[str, Any], **models: dict[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    facts = good_facts() | {"models": {PATH: {**MODEL, "missing_bytes": 16 * GIB}, **models}}
    plan, failures = decide("h1", said, GATEWAY, facts, {})
    return plan, [failure.sentence() for failure in failures]


def test_the_plan_names_the_folder_of_the_commit_and_its_source() -> None:
    plan, failures = decided(spec())
    assert failures == []
    assert plan is not None
    assert plan["deployments"][0]["model_path"] == PATH
    (model,) = plan["models"]
    assert (model["path"], model["source"], model["generated"]) == (PATH, SOURCE, False)
    assert needs_of(spec(), None)["models"][0]["source"] == SOURCE


def test_what_has_to_come_needs_room_on_the_stores_disk() -> None:
    facts = good_facts() | {"models": {PATH: {**MODEL, "missing_bytes": 16 * GIB}}}
    facts["filesystems"] = {**facts["filesystems"], "/srv/models": {"mount": "/srv", "free_bytes": 17 * GIB}}
    _, (failure,) = decide("h1", spec(), GATEWAY, facts, {})
    assert "host h1: /srv has 17.0 GiB free, and 18.0 GiB are needed for /srv/models" in failure.sentence()


@pytest.mark.parametrize(("trust", "refused"), [(None, True), (True, False), (False, False)])
def test_code_of_a_model_needs_a_decision(trust: bool | None, refused: bool) -> None:
    _, failures = decided(spec(trust_remote_code=trust), **{PATH: {**MODEL, "remote_code": "auto_map names X"}})
    assert bool(failures) is refused
    if refused:
        assert "source = org/llama@0123456789ab on huggingface: the model brings Python code of its own" in failures[0]
        assert "set trust_remote_code: true to have it fetched and run, after reading it, or false" in failures[0]


def lora(rank: int = 16, name: str = "polite") -> dict[str, Any]:
    return {"slots": 2, "rank": rank, "adapters": [{"name": name, "path": "/data/polite", "source": None}]}


def test_an_adapter_is_loaded_and_named() -> None:
    plan, failures = decided(spec(lora=lora()), **{"/data/polite": ADAPTER})
    assert failures == []
    assert plan is not None
    (one,) = plan["deployments"]
    assert one["adapters"] == [{"name": "polite", "path": "/data/polite"}]
    said = {entry["name"]: entry["value"] for group in one["options"].values() for entry in group}
    assert said["lora-modules"] == ["polite=/data/polite"]
    assert [model["kind"] for model in plan["models"]] == ["model", "adapter"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 64}, "the adapter has rank 64, and lora.rank is 16; set lora.rank to at least 64"),
        ({"base_model": "org/qwen"}, "the adapter was made for org/qwen, and the deployment serves llama"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    _, failures = decided(spec(lora=lora()), **{"/data/polite": {**ADAPTER, **change}})
    assert any(f"deployment chat, lora.adapters[0].path = /data/polite: {words}" in one for one in failures)


def test_an_adapter_with_the_name_of_the_model_is_refused() -> None:
    workload = good_spec()["gpuready_deployments"][0]["workload"]
    chat = {
        "name": "chat",
        "model": "llama",
        "model_path": "/data/l",
        "engine": "vllm",
        "gpus": 1,
        "workload": workload,
    }
    declared = {"gpuready_gpu_model": "h100", "gpuready_gpu_count": 8, "gpuready_stack": "cu128"}
    _, failures = check_declaration(
        "h1", {**declared, "gpuready_deployments": [{**chat, "lora": lora(16, "llama")}]}, {}
    )
    (sentence,) = [failure.sentence() for failure in failures]
    assert "lora.adapters[0].name = 'llama' is refused: gpuready_deployments[0].model has the same name" in sentence
    both = {**chat, "source": {"revision": COMMIT}}
    _, failures = check_declaration("h1", {**declared, "gpuready_deployments": [both]}, {})
    assert "model_path and source are both set" in failures[0].sentence()

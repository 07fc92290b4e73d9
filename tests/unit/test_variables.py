"""Variables that an operator sets for an engine: taken over with their reason, or refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.test_planning import deployment, plan, refusal, spec

from gpuready.planning.variables import refused


def said(name: str, engine: str = "vllm", version: str = "0.19.1") -> list[str]:
    return [one.sentence() for one in refused("host h1, deployment chat", {name: "1"}, engine, version)]


@pytest.mark.parametrize(
    "name", ["VLLM_LOGGING_LEVEL", "NCCL_DEBUG", "OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING", "MY_OWN"]
)
def test_what_an_engine_reads_or_nobody_forbids_is_taken(name: str) -> None:
    assert said(name) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("VLLM_PORT", "vLLM takes it for its internal ports, and the API's port is each replica's own; remove it."),
        ("CUDA_VISIBLE_DEVICES", "the plan says which GPUs a replica has; remove it."),
        ("VLLM_SERVER_DEV_MODE", "its paths pause, empty and change a serving engine, and ask for no key; remove it."),
        ("PYTHONOPTIMIZE", "without Python's assertions CVE-2026-41523 is open; remove it."),
        ("LD_PRELOAD", "it would run other code than the locked one; remove it."),
        ("HF_TOKEN", "it names a secret, and rendered files are no place for one; remove it; engines need none."),
        ("VLLM_API_KEY", "it names a secret, and rendered files are no place for one; remove it; engines need none."),
        ("MAX_SEQUENCE_LENGTH", "vLLM does not read it; set flags.max-model-len."),
        ("SGLANG_LOG_MS", "SGLang alone reads it, and the engine is vllm; remove it."),
        ("VLLM_LOGING_LEVEL", "vLLM 0.19.1 does not read it; did you mean VLLM_LOGGING_LEVEL?"),
    ],
)
def test_what_does_harm_or_nothing_is_refused(name: str, words: str) -> None:
    assert said(name) == [f"host h1, deployment chat, environment.{name} is refused: {words}"]


def test_a_setting_of_another_server_is_named_as_the_release_spells_it() -> None:
    (sentence,) = said("MAX_TOTAL_TOKENS", "sglang", "0.5.10.post1")
    assert sentence.endswith("SGLang does not read it; set flags.context-length.")


def test_a_variable_of_other_releases_is_refused_with_them() -> None:
    (sentence,) = said("VLLM_ATTENTION_BACKEND", version="0.33.0")
    assert "vLLM 0.33.0 does not read it; " in sentence


def test_it_stands_in_the_plan_with_its_reason_and_wins() -> None:
    (planned,) = plan(spec(deployment(environment={"OMP_NUM_THREADS": "8", "TRITON_CACHE_DIR": "/x"})))["deployments"]
    found: dict[str, Any] = {one["name"]: one for one in planned["environment"]}
    assert found["OMP_NUM_THREADS"] == {"name": "OMP_NUM_THREADS", "value": "8", "why": "set under environment"}
    assert found["TRITON_CACHE_DIR"]["value"] == "/x"


def test_it_is_refused_before_anything_is_planned() -> None:
    (sentence,) = refusal(spec(deployment(environment={"VLLM_PORT": "8000"})))
    assert "deployment chat, environment.VLLM_PORT is refused" in sentence

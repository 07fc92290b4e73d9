"""What a deployment declares beside its model reaches the engine, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.test_planning import deployment, plan, spec

from gpuready.outcome import Refusal
from gpuready.planning.features import feature_flags
from gpuready.rendering.templates import Renderer, render_host

ROOT = Path(__file__).resolve().parents[2]
GATEWAY = {
    "port": 8080,
    "bind": "*",
    "request_timeout_seconds": 900,
    "hold_seconds": 120,
    "body_limit_kib": 1024,
    "body_limit_bytes": 1048576,
    "buffer_bytes": 1064960,
    "max_connections": 2000,
}


def flags(version: str = "0.19.1", **declared: Any) -> dict[str, Any]:
    found, failures = feature_flags("host h1, deployment chat", {"engine": "vllm", **declared}, version, {})
    assert failures == []
    return found


@pytest.mark.parametrize(
    ("task", "version", "expected"),
    [
        (None, "0.19.1", {}),
        ("generate", "0.19.1", {"runner": "generate"}),
        ("embed", "0.33.0", {"runner": "pooling", "convert": "embed"}),
        ("rerank", "0.19.1", {"runner": "pooling"}),
        ("classify", "0.10.2", {"runner": "pooling", "convert": "classify"}),
        ("rerank", "0.9.2", {"task": "score"}),
    ],
)
def test_task_is_spelled_as_the_release_takes_it(task: str | None, version: str, expected: dict[str, str]) -> None:
    assert flags(version, task=task) == expected


def test_draft_is_a_model_of_its_own_or_the_checkpoints_layers() -> None:
    own = {"model": "org/small", "model_path": "/data/small", "tokens": 5}
    assert flags(draft=own) == {"speculative-config": {"model": "/data/small", "num_speculative_tokens": 5}}
    layers = {"model": None, "model_path": None, "tokens": 2}
    assert flags(draft=layers) == {"speculative-config": {"method": "mtp", "num_speculative_tokens": 2}}


def test_what_is_not_asked_for_is_not_there() -> None:
    assert flags(task=None, draft=None, lora=None, kv_offload_gib=0.0) == {}


def test_a_release_without_the_setting_is_refused() -> None:
    declared = {"engine": "vllm", "kv_offload_gib": 8.0}
    _, (failure,) = feature_flags("host h1, deployment chat", declared, "0.11.0", {})
    assert failure.sentence() == (
        "host h1, deployment chat, kv_offload_gib: vllm 0.11.0 has no setting for it; remove kv_offload_gib, or choose "
        "another engine or stack."
    )


def test_all_of_it_stands_in_the_engines_file() -> None:
    declared = deployment(
        lora={"slots": 4, "rank": 32},
        kv_offload_gib=16.0,
        draft={"model": "llama", "model_path": "/data/llama", "tokens": 3},
    )
    accepting = {**spec(declared), "gpuready_accept_advisories": ["CVE-2026-54234"]}
    made = {**plan(accepting), "gateway": GATEWAY}
    files = render_host(Renderer([ROOT / "templates"]), {}, made, {})
    values = yaml.safe_load(files["releases"]["chat"]["serve.yaml"])
    assert (values["enable-lora"], values["max-loras"], values["max-lora-rank"]) == (True, 4, 32)
    assert values["kv-offloading-size"] == 16
    assert values["speculative-config"] == '{"model": "/data/llama", "num_speculative_tokens": 3}'


def test_a_flag_beside_its_field_is_refused() -> None:
    declared = deployment(lora={"slots": 4, "rank": 32}, flags={"max_loras": 8})
    with pytest.raises(Refusal) as caught:
        plan(spec(declared))
    (failure,) = caught.value.failures
    assert failure.what == "host h1, deployment chat, flags.max-loras and lora say the same"

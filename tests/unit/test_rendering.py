"""Templates see spec, plan and server alone; the operator's copy wins; a wrong one is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuready.outcome import Refusal
from gpuready.rendering.templates import Renderer, render_host

ROOT = Path(__file__).resolve().parents[2]


def plan(**change: Any) -> dict[str, Any]:
    deployment = {
        "name": "chat",
        "model": "org/model: with 'quotes'",
        "model_path": "/data/m",
        "engine": "vllm",
        "task": "generate",
        "refused_requests": [],
        "settings": {
            "tensor_parallel_size": 4,
            "max_model_len": 4096,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.9,
        },
        "flags": {"dtype": "bfloat16"},
        "replicas": [{"index": 0, "gpus": [0, 1, 2, 3], "port": 18100}],
        **change,
    }
    gateway = {
        "port": 8080,
        "bind": "*",
        "folder": "/etc/gpuready/gateway",
        "request_timeout_seconds": 900,
        "hold_seconds": 120,
        "body_limit_kib": 1024,
        "body_limit_bytes": 1048576,
        "buffer_bytes": 1064960,
        "max_connections": 2000,
    }
    return {"deployments": [deployment], "gateway": gateway}


def serve_yaml(**change: Any) -> dict[str, Any]:
    files = render_host(Renderer([ROOT / "templates"]), {}, plan(**change), {})
    values: dict[str, Any] = yaml.safe_load(files["releases"]["chat"]["serve.yaml"])
    return values


def test_serve_yaml_is_what_was_planned() -> None:
    values = serve_yaml()
    assert values["served-model-name"] == "org/model: with 'quotes'"
    assert values["tensor-parallel-size"] == 4
    assert values["gpu-memory-utilization"] == 0.9
    assert values["host"] == "127.0.0.1"
    assert values["dtype"] == "bfloat16"
    assert "kv-cache-memory-bytes" not in values


def test_flags_are_rendered_as_values() -> None:
    values = serve_yaml(flags={"dtype": "float16", "no-enable-prefix-caching": True, "x": {"a": [1]}})
    assert (values["dtype"], values["no-enable-prefix-caching"], values["x"]) == ("float16", True, {"a": [1]})


def test_the_operators_template_wins(tmp_path: Path) -> None:
    own = tmp_path / "serving" / "vllm"
    own.mkdir(parents=True)
    (own / "serve.yaml.j2").write_text("mine: {{ plan.model_path }}\n")
    files = render_host(Renderer([tmp_path, ROOT / "templates"]), {}, plan(), {})
    assert files["releases"]["chat"]["serve.yaml"] == "mine: /data/m\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [("{{ hostvars }}", "'hostvars' is undefined"), ("a\n{% if %}", "line 2 is wrong")],
)
def test_a_wrong_template_is_named(tmp_path: Path, text: str, words: str) -> None:
    own = tmp_path / "serving" / "vllm"
    own.mkdir(parents=True)
    (own / "serve.yaml.j2").write_text(text)
    with pytest.raises(Refusal, match=r"template serving/vllm/serve\.yaml\.j2") as caught:
        render_host(Renderer([tmp_path, ROOT / "templates"]), {}, plan(), {})
    assert words in caught.value.failures[0].sentence()


def test_gateway_knows_every_model() -> None:
    files = render_host(Renderer([ROOT / "templates"]), {}, plan(model="org/m"), {})["gateway"]
    assert yaml.safe_load(files["models.json"])["data"][0]["id"] == "org/m"
    assert "org/m deployment_chat" in files["models.map"].splitlines()
    assert "server chat.0 127.0.0.1:18100" in files["haproxy.cfg"]

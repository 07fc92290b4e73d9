"""How each engine is started: the program's path, the release's file and the replica's own port."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuready.serving import launch

RELEASE = Path("/var/lib/gpuready/releases/chat/3")
FOLDER = "/opt/gpuready/engines/x-1.0-abc"


def plan(engine: str) -> dict[str, Any]:
    return {
        "engine": engine,
        "engine_folder": FOLDER,
        "model": "org/model",
        "model_path": "/srv/models/org--model@123",
    }


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", f"-m vllm.entrypoints.openai.api_server --port=18101 --config {RELEASE}/serve.yaml"),
        ("sglang", f"-m sglang.launch_server --config {RELEASE}/serve.yaml --port 18101"),
        (
            "tensorrt_llm",
            f"{FOLDER}/bin/trtllm-serve /srv/models/org--model@123 --backend pytorch --host 127.0.0.1 --port 18101"
            f" --extra_llm_api_options {RELEASE}/serve.yaml",
        ),
    ],
)
def test_an_engine_is_started_from_its_own_environment(engine: str, words: str) -> None:
    found = launch.words(plan(engine), RELEASE, {"index": 1, "gpus": [1], "port": 18101})
    assert found == [f"{FOLDER}/bin/python", *words.split()]


@pytest.mark.parametrize(
    ("engine", "name"), [("vllm", "org/model"), ("sglang", "org/model"), ("tensorrt_llm", "org--model@123")]
)
def test_the_served_name_is_the_engines_own(engine: str, name: str) -> None:
    assert launch.served_name(plan(engine)) == name

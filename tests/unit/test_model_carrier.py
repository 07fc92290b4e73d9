"""A download through the real ansible-playbook: progress on the screen, and the token in nothing that is shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.standin_model_hub import COMMIT, Faults, Repository, StandinHub

CHECKOUT = Path(__file__).resolve().parents[2]
TOKEN = "hf_very_secret_token"  # noqa: S105 - of the stand-in
HEADER = json.dumps({"a": {"dtype": "U8", "shape": [900_000], "data_offsets": [0, 900_000]}}).encode()
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": len(HEADER).to_bytes(8, "little") + HEADER + bytes(900_000),
}


@pytest.fixture
def hub() -> Iterator[StandinHub]:
    standin = StandinHub({"org/model": Repository({COMMIT: FILES}, token=TOKEN)})
    with standin.running():
        yield standin


def play(tmp_path: Path, hub: StandinHub, *options: str) -> str:
    source = {"hub": "huggingface", "repository": "org/model", "revision": COMMIT}
    path = str(tmp_path / f"models/org--model@{COMMIT[:12]}")
    model = {"model": "org/model", "path": path, "kind": "model", "source": source, "generated": False}
    model |= {"trust_remote_code": None, "allow_pickle": False}
    given = {"models": [model], "hubs": {"endpoints": {"huggingface": hub.address}}, "seconds": 0.3}
    task = {"name": "bring", "gpuready": {"noun": "model", "verb": "bring", "input": given}}
    (tmp_path / "play.json").write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": [task]}]))
    words = [
        str(Path(sys.executable).with_name("ansible-playbook")),
        "-i",
        "localhost,",
        "-c",
        "local",
        "--diff",
        *options,
    ]
    settings = ["-e", f"ansible_python_interpreter={sys.executable}", str(tmp_path / "play.json")]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg")}
    done = subprocess.run(
        [*words, *settings], cwd=CHECKOUT, capture_output=True, text=True, check=False, env=environment
    )
    return done.stdout + done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="a changing command takes its turn in /run")
@pytest.mark.parametrize("options", [(), ("-vvvv",)])
def test_progress_is_shown_and_the_token_is_not(tmp_path: Path, hub: StandinHub, options: tuple[str, ...]) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    hub.faults = Faults(bytes_per_second=600_000)
    said = play(tmp_path, hub, "-e", f"models_token_file={tmp_path}/token", *options)
    assert f"localhost: org/model@{COMMIT[:12]} on huggingface: " in said
    assert " of 0.9 MiB, " in said
    assert (tmp_path / f"models/org--model@{COMMIT[:12]}/model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert any(one.headers.get("authorization") == f"Bearer {TOKEN}" for one in hub.asked)
    assert TOKEN not in said
    assert all(TOKEN.encode() not in path.read_bytes() for path in (tmp_path / "models").rglob("*") if path.is_file())


@pytest.mark.parametrize("content", [None, "two words", "caf\u00e9"])
def test_a_token_file_that_is_none_is_refused(tmp_path: Path, hub: StandinHub, content: str | None) -> None:
    if content is not None:
        (tmp_path / "token").write_text(content)
    said = play(tmp_path, hub, "-e", f"models_token_file={tmp_path}/token")
    assert f"models_token_file = {tmp_path}/token" in said
    assert content is None or content not in said
    assert hub.asked == []

"""A download through the real ansible-playbook: progress on the screen, and the token in nothing that is shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
    repository = Repository({COMMIT: FILES}, token=TOKEN)
    standin = StandinHub({"org/model": repository, "org/second": repository})
    with standin.running():
        yield standin


def entry(tmp_path: Path, name: str) -> dict[str, Any]:
    source = {"hub": "huggingface", "repository": name, "revision": COMMIT}
    path = str(tmp_path / f"models/{name.replace('/', '--')}@{COMMIT[:12]}")
    model = {"model": name, "path": path, "kind": "model", "source": source, "generated": False}
    return {**model, "trust_remote_code": None, "allow_pickle": False}


def play(tmp_path: Path, hub: StandinHub, *options: str, names: Sequence[str] = ("org/model",)) -> str:
    given = {
        "models": [entry(tmp_path, name) for name in names],
        "hubs": {"endpoints": {"huggingface": hub.address}},
        "seconds": 0.3,
    }
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


@pytest.mark.skipif(os.geteuid() != 0, reason="a changing command takes its turn in /run")
def test_what_an_answer_in_parts_changed_before_its_last_part_is_told(tmp_path: Path, hub: StandinHub) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    hub.faults = Faults(bytes_per_second=600_000)
    names = ("org/model", "org/second")
    # The models are judged with the rights of the engines' user.
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    said = play(tmp_path, hub, "-e", f"models_token_file={tmp_path}/token", names=names)
    assert f"localhost: org/second@{COMMIT[:12]} on huggingface: " in said
    for name in names:
        assert said.count(f"+++ after: {entry(tmp_path, name)['path']}") == 1, said


@pytest.mark.parametrize("content", [None, "two words", "caf\u00e9"])
def test_a_token_file_that_is_none_is_refused(tmp_path: Path, hub: StandinHub, content: str | None) -> None:
    if content is not None:
        (tmp_path / "token").write_text(content)
    said = play(tmp_path, hub, "-e", f"models_token_file={tmp_path}/token")
    assert f"models_token_file = {tmp_path}/token" in said
    assert content is None or content not in said
    assert hub.asked == []

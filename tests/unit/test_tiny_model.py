from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from sim import tiny_model

from gpuready.serving import models

SCRIPT = Path(tiny_model.__file__)


@pytest.fixture(scope="module")
def content() -> dict[str, bytes]:
    return tiny_model.files()


def test_it_is_the_same_everywhere(content: dict[str, bytes]) -> None:
    assert tiny_model.files() == content
    # A changed digest is a new revision: every simulated server gets the model anew. Change it on purpose only.
    assert tiny_model.revision(content) == "fcb7d837db9d"
    assert models.revision(content) == tiny_model.revision(content)


def test_it_needs_the_standard_library_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT), "--store", str(tmp_path), tiny_model.MODEL],
        capture_output=True,
        text=True,
        check=True,
    )
    folder = Path(done.stdout.strip())
    assert folder.parent == tmp_path
    assert folder.name == f"gpuready-sim--tiny-qwen2@{models.revision_of(folder)}"
    assert not [path for path in tmp_path.iterdir() if path != folder]


def test_an_unknown_model_is_refused_by_name(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--store", str(tmp_path), "gpuready-sim/other"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "gpuready-sim/other" in done.stderr
    assert tiny_model.MODEL in done.stderr


def test_its_files_agree_with_each_other(content: dict[str, bytes], tmp_path: Path) -> None:
    tiny_model.write(content, tmp_path / "model")
    found = models.read_model(tmp_path / "model")
    config = found["config"]
    vocabulary = json.loads(content["tokenizer.json"])
    assert config["vocab_size"] == len(vocabulary["model"]["vocab"]) + len(vocabulary["added_tokens"])
    assert config["eos_token_id"] == next(
        one["id"] for one in vocabulary["added_tokens"] if one["content"] == tiny_model.END
    )
    assert config["hidden_size"] // config["num_attention_heads"] == 32
    assert found["files"] == ["model.safetensors"]
    assert found["tensors"] == {"BF16": {"count": found["weight_bytes"] // 2, "bytes": found["weight_bytes"]}}


def test_the_head_keeps_unprintable_tokens_out(content: dict[str, bytes]) -> None:
    data = content["model.safetensors"]
    length = struct.unpack("<Q", data[:8])[0]
    entry = json.loads(data[8 : 8 + length])["lm_head.weight"]
    rows, columns = entry["shape"]
    numbers = data[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]]

    def cell(row: int, column: int) -> float:
        at = 2 * (row * columns + column)
        return float(struct.unpack("<f", b"\0\0" + numbers[at : at + 2])[0])

    for row in range(rows):
        printable = row in tiny_model.PRINTABLE
        assert (cell(row, tiny_model.CONSTANT) == 0.0) is printable
        assert any(cell(row, column) for column in range(1, columns)) is printable


def test_the_byte_alphabet_is_the_usual_one() -> None:
    alphabet = tiny_model.byte_alphabet()
    assert len(set(alphabet)) == 256
    assert alphabet[ord("A")] == "A"
    assert alphabet[ord(" ")] == "Ġ"
    assert alphabet[ord("\n")] == "Ċ"

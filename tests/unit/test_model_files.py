from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuready.cli.model import VERBS
from gpuready.cli.verb import Call
from gpuready.outcome import Exit, Refusal
from gpuready.serving import models

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def safetensors(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    one = {"__metadata__": {"format": "pt"}, "a": tensor("BF16", [2, 4], 0, 16), "b": tensor("F32", [3], 16, 28)}
    (folder / SHARDS[0]).write_bytes(safetensors(one, bytes(28)))
    (folder / SHARDS[1]).write_bytes(safetensors({"c": tensor("F8_E4M3", [5], 0, 5)}, bytes(5)))
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}}
    (folder / models.INDEX).write_text(json.dumps(index))
    return folder


def codes(folder: Path) -> list[str]:
    with pytest.raises(Refusal) as caught:
        models.read_model(folder)
    for failure in caught.value.failures:
        assert str(folder) in failure.what, "every sentence names the file"
        assert failure.fix
    return [failure.code for failure in caught.value.failures]


def test_a_whole_model_is_summed_by_dtype(model: Path) -> None:
    found = models.read_model(model)
    assert found == {
        "config": {"model_type": "llama"},
        "weight_bytes": 33,
        "tensors": {
            "BF16": {"count": 8, "bytes": 16},
            "F32": {"count": 3, "bytes": 12},
            "F8_E4M3": {"count": 5, "bytes": 5},
        },
        "kinds": [
            {"name": "a", "dtype": "BF16", "count": 1, "elements": 8, "bytes": 16},
            {"name": "b", "dtype": "F32", "count": 1, "elements": 3, "bytes": 12},
            {"name": "c", "dtype": "F8_E4M3", "count": 1, "elements": 5, "bytes": 5},
        ],
        "files": list(SHARDS),
        "remote_code": "",
    }


def truncate(folder: Path) -> None:
    path = folder / SHARDS[0]
    path.write_bytes(path.read_bytes()[:-3])


def lengthen(folder: Path) -> None:
    path = folder / SHARDS[0]
    path.write_bytes(path.read_bytes() + b"\0")


def put(name: str, data: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return write


def drop(name: str) -> Callable[[Path], None]:
    def unlink(folder: Path) -> None:
        (folder / name).unlink()

    return unlink


GARBLED = (
    tensor("U8", [-2, -4], 0, 8),
    {**tensor("U8", [8], 0, 8), "shape": [8.5]},
    {**tensor("U8", [8], 0, 8), "shape": [float("inf")]},
    {**tensor("U8", [8], 0, 8), "data_offsets": [False, 8]},
    {**tensor("U8", [8], 0, 8), "dtype": None},
    {**tensor("U8", [8], 0, 8), "dtype": ["U8"]},
)
"""Tensors that lie about themselves."""
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (truncate, "model.size"),
        (lengthen, "model.size"),
        (drop(SHARDS[1]), "model.missing_shard"),
        (put(SHARDS[1], POINTER), "model.lfs_pointer"),
        (put("config.json", POINTER), "model.lfs_pointer"),
        (put(SHARDS[1], b""), "model.header"),
        (put(SHARDS[1], b"\xff" * 40), "model.header"),
        (put(SHARDS[1], struct.pack("<Q", 20) + b"{not json" + bytes(30)), "model.header"),
        (put(SHARDS[1], safetensors([], b"")), "model.header"),
        (put(SHARDS[1], safetensors({"c": tensor("BF16", [5], 0, 5)}, bytes(5))), "model.header"),
        (put(SHARDS[1], safetensors({"c": {"dtype": "BF16"}}, b"")), "model.header"),
        (put(SHARDS[1], safetensors({"c": tensor("U8", [5], 3, 8)}, bytes(8))), "model.header"),
        (put(SHARDS[1], safetensors({"other": tensor("U8", [5], 0, 5)}, bytes(5))), "model.index"),
        *((put(SHARDS[1], safetensors({"c": one}, bytes(8))), "model.header") for one in GARBLED),
        (put(models.INDEX, b'{"weight_map": []}'), "model.index"),
        # What may run code is no way around the list of what may not.
        (put(models.INDEX, b'{"weight_map": {"a": "pytorch_model.bin"}}'), "model.index"),
        (put(models.INDEX, b'{"weight_map": {"a": ""}}'), "model.index"),
        (put(models.INDEX, b'{"weight_map": {"a": "config.json"}}'), "model.index"),
        (drop("config.json"), "model.missing_file"),
        (put("config.json", b"{"), "model.not_json"),
        (put("config.json", b"[]"), "model.not_json"),
        (put("config.json", b'{"a":' * 200_000), "model.not_json"),
        (drop("tokenizer.json"), "model.no_tokenizer"),
    ],
)
def test_each_thing_that_can_be_wrong_is_named(model: Path, spoil: Callable[[Path], None], code: str) -> None:
    spoil(model)
    assert codes(model) == [code]


def test_weights_without_a_tensor_are_none(model: Path) -> None:
    for name in (*SHARDS, models.INDEX):
        (model / name).unlink()
    (model / "model.safetensors").write_bytes(safetensors({"__metadata__": {"format": "pt"}}, b""))
    assert codes(model) == ["model.no_weights"]


def test_an_index_of_pickles_that_names_a_missing_one(model: Path) -> None:
    for name in (*SHARDS, models.INDEX):
        (model / name).unlink()
    (model / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-1.bin"}}')
    with pytest.raises(Refusal) as caught:
        models.read_model(model, pickle=True)
    assert [one.sentence() for one in caught.value.failures] == [
        f"{model}/pytorch_model-1.bin is missing; copy the model again, with a tool that compares checksums."
    ]


@pytest.mark.parametrize("ranks", [{"r": 0}, {"r": -8}, {"r": 8, "rank_pattern": {"q_proj": "64"}}, {"r": True}, {}])
def test_an_adapter_whose_rank_is_none(tmp_path: Path, ranks: dict[str, Any]) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors({"a": tensor("U8", [8], 0, 8)}, bytes(8)))
    (tmp_path / "adapter_config.json").write_text(json.dumps(ranks))
    with pytest.raises(Refusal, match="engines load LoRA adapters alone"):
        models.read_adapter(tmp_path)


def test_everything_that_is_wrong_is_said_at_once(model: Path) -> None:
    truncate(model)
    drop("tokenizer.json")(model)
    drop("config.json")(model)
    assert codes(model) == ["model.missing_file", "model.size", "model.no_tokenizer"]


def test_a_truncated_shard_says_how_much_is_missing(model: Path) -> None:
    whole = (model / SHARDS[0]).stat().st_size
    truncate(model)
    with pytest.raises(Refusal, match=f"is truncated: it has {whole - 3} bytes, its header speaks of {whole}"):
        models.read_model(model)


def test_weights_in_another_form_are_named(model: Path) -> None:
    for name in (*SHARDS, models.INDEX):
        (model / name).unlink()
    (model / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(Refusal, match=r"holds no safetensors weights: there is pytorch_model\.bin instead"):
        models.read_model(model)


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert codes(tmp_path / "absent") == ["model.no_folder"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can look with another user's eyes")
def test_a_model_that_the_engines_user_cannot_read_is_refused(model: Path) -> None:
    for folder in model.parents:
        if folder == Path("/tmp").resolve():
            break
        folder.chmod(0o755)
    assert models.check(model) == []
    (model / SHARDS[0]).chmod(0o600)
    (failure,) = models.check(model)
    assert failure.code == "model.unreadable"
    assert SHARDS[0] in failure.what
    assert "gpuready-engine" in failure.what


def bundle(content: dict[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(data).decode() for name, data in content.items()}


CONTENT = {"config.json": b"{}", "weights": b"1234"}


def place(path: Path, *, check: bool = False, content: dict[str, bytes] | None = None) -> Any:
    given = {"path": str(path), "files": bundle(content or CONTENT)}
    return VERBS["place"].run(Call(given, [], check))


def test_a_placed_model_is_whole_read_only_and_placed_once(tmp_path: Path) -> None:
    path = tmp_path / "store" / f"x--y@{models.revision(CONTENT)}"
    assert place(path, check=True).changed
    assert not path.exists()
    assert place(path).changed
    assert {one.name: one.read_bytes() for one in path.iterdir()} == CONTENT
    assert all(one.stat().st_mode & 0o222 == 0 for one in (path, *path.iterdir()))
    assert not place(path).changed
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_damaged_or_half_copied_model_is_placed_anew(tmp_path: Path) -> None:
    path = tmp_path / f"x--y@{models.revision(CONTENT)}"
    left = tmp_path / f".{path.name}.left"
    left.mkdir()
    path.mkdir()
    (path / "config.json").write_bytes(b"{}")
    result = place(path)
    assert result.changed
    assert "not as it was made" in result.diff[0].before
    assert models.is_whole(path)
    assert not left.exists()


def test_what_was_sent_must_be_what_the_path_asks_for(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="asks for another one"):
        place(tmp_path / "x--y@000000000000")
    with pytest.raises(Refusal, match="outside the model's folder"):
        place(tmp_path / "x--y@0", content={"../config.json": b""})


def test_check_tells_what_is_missing_from_what_is_wrong(model: Path, tmp_path: Path) -> None:
    ours = {"model": "gpuready-sim/x", "path": str(tmp_path / "x@0"), "generated": True}
    good = {"model": "m", "path": str(model), "generated": False}
    result = VERBS["check"].run(Call({"models": [ours]}, [], check=False))
    assert (result.exit, result.failures, result.data["missing"]) == (Exit.DONE, [], [ours])
    truncate(model)
    result = VERBS["check"].run(Call({"models": [ours, good]}, [], check=False))
    assert result.exit == Exit.VERIFY_NO
    assert [failure.code for failure in result.failures] == ["model.size"]

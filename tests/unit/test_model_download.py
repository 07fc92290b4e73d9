"""Downloads of models from a stand-in hub over loopback: faults, what is said, and that the next run mends."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import standin_model_hub
from tests.standin_model_hub import COMMIT, Faults, Repository, StandinHub

from gpuready.cli.model import VERBS
from gpuready.cli.verb import Call
from gpuready.outcome import Busy, Exit, Refusal, Result
from gpuready.planning import sources
from gpuready.serving.models import MANIFEST, Hubs, facts, transport

NAME = "org/model"
OTHER = "fedcba9876543210fedcba9876543210fedcba98"


def shard(tensors: dict[str, int], seed: int = 1) -> bytes:
    """Return safetensors of one-dimensional U8 tensors, of so many bytes each."""
    header, end = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + random.Random(seed).randbytes(end)  # noqa: S311


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FILES = {
    ".gitattributes": b"*.safetensors filter=lfs",
    "README.md": b"# A model",
    "config.json": b'{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b'{"version": "1.0", "model": ' + b'"' + b"x" * 400 + b'"}',
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode(),
    SHARDS[0]: shard({"a": 3_000_000}),
    SHARDS[1]: shard({"b": 2_000_000}, 2),
    "consolidated.safetensors": shard({"a": 100}),
    "pytorch_model.bin": b"\x80\x04pickle" * 100,
    "onnx/model.onnx": b"onnx" * 100,
    "original/consolidated.00.pth": b"pth" * 100,
    "figures/plot.png": b"png",
}
FETCHED = {"config.json", "tokenizer.json", "model.safetensors.index.json", *SHARDS}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "PAUSES_SECONDS", (0.01, 0.01, 0.01))


@pytest.fixture
def hub() -> Iterator[StandinHub]:
    standin = StandinHub({NAME: Repository({COMMIT: dict(FILES)}, {"main": COMMIT, "v1": COMMIT})})
    with standin.running():
        yield standin


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # pytest's own folders are closed to the engines' user.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        place = Path(folder, "models")
        monkeypatch.setattr(sources, "STORE", str(place))
        yield place


def entry(revision: str = COMMIT, kind: str = "model", **more: Any) -> dict[str, Any]:
    source = {"hub": "huggingface", "repository": NAME, "revision": revision, **more.pop("source", {})}
    path = sources.folder(source["repository"], revision)
    return {**sources.Asked("source", NAME, path, kind, source).request(), "generated": False, **more}


def given(hub: StandinHub, *entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    endpoints = {"huggingface": hub.address, "modelscope": hub.address}
    return {"models": list(entries) or [entry()], "hubs": {"endpoints": endpoints}, **more}


def bring(hub: StandinHub, *entries: dict[str, Any], check: bool = False, **more: Any) -> Result:
    return VERBS["bring"].run(Call(given(hub, *entries, **more), [], check=check))


def refusal(hub: StandinHub, *entries: dict[str, Any], **more: Any) -> str:
    with pytest.raises(Refusal) as caught:
        bring(hub, *entries, **more)
    return " ".join(one.sentence() for one in caught.value.failures)


def half(part: float = 0.43) -> Faults:
    """Return a hub that ends every connection at a part of the weights, and gives no more of them."""
    return Faults(cut_at=part, cuts=1000, match=".safetensors", status=503, times=1000, only_resumed=True)


def folder_of(store: Path, revision: str = COMMIT) -> Path:
    return store / f"org--model@{revision[:12]}"


def beside(store: Path) -> Path:
    return store / f".org--model@{COMMIT[:12]}.new"


def is_right(folder: Path, files: dict[str, bytes] | None = None) -> bool:
    files = files or FILES
    found = {str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()}
    return found == {*FETCHED, MANIFEST} and all((folder / name).read_bytes() == files[name] for name in FETCHED)


# ------------------------------------------------------------------------------------------------ it comes


def test_only_what_an_engine_needs_comes_whole_and_read_only(hub: StandinHub, store: Path) -> None:
    result = bring(hub)
    assert (result.changed, result.failures, result.exit) == (True, [], Exit.DONE)
    folder = folder_of(store)
    assert is_right(folder)
    assert all(path.stat().st_mode & 0o777 == 0o444 for path in folder.iterdir())
    assert folder.stat().st_mode & 0o777 == 0o555
    assert not beside(store).exists()
    said = json.loads((folder / MANIFEST).read_text())
    assert said["source"] == {"hub": "huggingface", "repository": NAME, "revision": COMMIT}
    assert said["files"][SHARDS[0]] == {
        "size": len(FILES[SHARDS[0]]),
        "sha256": hashlib.sha256(FILES[SHARDS[0]]).hexdigest(),
    }
    assert "git_sha1" in said["files"]["config.json"]


def test_a_second_run_changes_nothing_and_asks_nobody(hub: StandinHub, store: Path) -> None:
    bring(hub)
    hub.asked.clear()
    result = bring(hub)
    assert (result.changed, result.diff, hub.asked) == (False, [], [])
    assert result.summary == "1 models are whole and readable."


def test_check_says_what_would_come_and_writes_nothing(hub: StandinHub, store: Path) -> None:
    result = bring(hub, check=True)
    assert result.changed
    assert f"5 files, 0.00 GiB, {NAME}@{COMMIT[:12]} on huggingface" in result.diff[0].after
    assert not store.exists()


def test_a_list_of_several_pages_is_read_to_its_end(hub: StandinHub, store: Path) -> None:
    hub.page = 3
    bring(hub)
    assert is_right(folder_of(store))
    assert len([one for one in hub.asked if "/tree/" in one.path]) == 4


def test_model_scope_gives_the_same(hub: StandinHub, store: Path) -> None:
    result = bring(hub, entry(source={"hub": "modelscope"}))
    assert result.changed
    assert is_right(folder_of(store))
    said = json.loads((folder_of(store) / MANIFEST).read_text())
    assert all("sha256" in one for one in said["files"].values())


def test_config_and_headers_are_read_before_any_large_download(hub: StandinHub, store: Path) -> None:
    found = facts(entry(), Hubs(given(hub)["hubs"]))
    assert found["weight_bytes"] == 5_000_000
    assert found["config"]["model_type"] == "llama"
    assert found["missing_bytes"] == sum(len(FILES[name]) for name in FETCHED)
    assert not store.exists()
    for one in (one for one in hub.asked if ".safetensors" in one.path and "/resolve/" in one.path):
        assert one.headers.get("range", "").startswith("bytes=0-"), one.path


def test_facts_of_what_is_there_need_no_hub(hub: StandinHub, store: Path) -> None:
    bring(hub)
    found = facts(entry(), Hubs({"endpoints": {"huggingface": "http://127.0.0.1:9"}}))
    assert (found["weight_bytes"], found["missing_bytes"]) == (5_000_000, 0)


def test_what_was_fetched_already_is_no_need_of_the_disk(hub: StandinHub, store: Path) -> None:
    hub.faults = half()
    refusal(hub)
    hub.faults = Faults()
    found = facts(entry(), Hubs(given(hub)["hubs"]))
    assert found["missing_bytes"] < 0.6 * sum(len(FILES[name]) for name in FETCHED)


# ------------------------------------------------------------------------------------------- it is cut short


def test_a_connection_that_ends_at_43_percent_is_resumed(hub: StandinHub, store: Path) -> None:
    """huggingface_hub #1498: a large shard ended early."""
    hub.faults = Faults(cut_at=0.43, cuts=2)
    bring(hub)
    assert is_right(folder_of(store))
    ranges = [one.headers.get("range", "") for one in hub.asked if SHARDS[0] in one.path]
    assert any(one.startswith("bytes=") and not one.startswith("bytes=0-") for one in ranges)


def test_retries_are_bounded_and_the_sentence_names_shard_and_bytes(hub: StandinHub, store: Path) -> None:
    hub.faults = Faults(cut_at=0.0, cuts=1000)
    said = refusal(hub)
    assert ".safetensors of org/model at 0123456789ab" in said
    assert "the connection ended early, 0 of " in said
    hub.faults = Faults()
    assert bring(hub).changed
    assert is_right(folder_of(store))


def test_a_server_that_ignores_ranges_begins_anew(hub: StandinHub, store: Path) -> None:
    hub.faults = Faults(cut_at=0.43, cuts=1, ignores_ranges=True)
    bring(hub)
    assert is_right(folder_of(store))


def test_parts_of_a_killed_download_are_continued_not_fetched_again(hub: StandinHub, store: Path) -> None:
    part = beside(store) / f"{SHARDS[0]}.part"
    hub.faults = half()
    refusal(hub)
    size = part.stat().st_size
    assert 0 < size < len(FILES[SHARDS[0]])
    hub.faults = Faults()
    hub.asked.clear()
    bring(hub)
    (one,) = [one for one in hub.asked if SHARDS[0] in one.path]
    assert one.headers["range"].startswith(f"bytes={size}-")


KILLED = """
import json, sys
from gpuready.cli.model import VERBS
from gpuready.cli.verb import Call
VERBS["bring"].run(Call(json.load(sys.stdin), [], check=False))
"""


@pytest.mark.parametrize("after", [0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5])
def test_killed_at_any_point_the_next_run_finishes(hub: StandinHub, store: Path, after: float) -> None:
    hub.faults = Faults(bytes_per_second=6_000_000)
    child = subprocess.Popen([sys.executable, "-c", KILLED], stdin=subprocess.PIPE, text=True)
    assert child.stdin
    child.stdin.write(json.dumps(given(hub)))
    child.stdin.close()
    # The kill is so long after the first answer that it meets another step each time.
    while not hub.files_asked() and child.poll() is None:
        time.sleep(0.005)
    time.sleep(after)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not folder_of(store).exists() or is_right(folder_of(store))
    hub.faults = Faults()
    bring(hub)
    assert is_right(folder_of(store))
    assert not beside(store).exists()
    assert not bring(hub).changed


# --------------------------------------------------------------------------------------------- it is damaged


def test_a_damaged_file_is_thrown_away_and_the_rest_kept(hub: StandinHub, store: Path) -> None:
    hub.faults = Faults(corrupt=1)
    said = refusal(hub)
    assert "came damaged: its hash is " in said
    assert "run again" in said
    assert not folder_of(store).exists()
    hub.asked.clear()
    result = bring(hub)
    assert result.changed
    assert len([one for one in hub.files_asked() if ".safetensors" in one and "index" not in one]) <= 2


def test_a_damaged_copy_is_found_by_hash_and_only_that_file_fetched(hub: StandinHub, store: Path) -> None:
    bring(hub)
    victim = folder_of(store) / SHARDS[1]
    victim.chmod(0o644)
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    assert not bring(hub).changed, "sizes and headers are as they were: the cheap look cannot tell"
    result = VERBS["verify"].run(Call({"models": [entry()]}, [], check=False))
    assert result.exit == Exit.VERIFY_NO
    assert result.failures[0].sentence().startswith(f"{victim} is damaged: its hash is another one")
    hub.asked.clear()
    repaired = bring(hub, verify=True)
    assert repaired.changed
    assert f"{SHARDS[1]} is damaged" in repaired.diff[0].before
    assert [one for one in hub.files_asked() if SHARDS[0] in one] == []
    assert is_right(folder_of(store))


@pytest.mark.parametrize("name", [SHARDS[0], "config.json", MANIFEST])
def test_what_is_missing_is_no_model_and_comes_again(hub: StandinHub, store: Path, name: str) -> None:
    """semble #222: a folder with config.json and without weights was taken for complete."""
    bring(hub)
    folder = folder_of(store)
    folder.chmod(0o755)
    (folder / name).unlink()
    assert facts(entry(), Hubs(given(hub)["hubs"]))["missing_bytes"] >= 0
    result = bring(hub)
    assert result.changed
    assert name in result.diff[0].before
    assert is_right(folder)


def test_a_cut_copy_is_mended(hub: StandinHub, store: Path) -> None:
    bring(hub)
    victim = folder_of(store) / SHARDS[0]
    victim.chmod(0o644)
    os.truncate(victim, 100)
    assert f"{SHARDS[0]}: it has 100 bytes instead of" in bring(hub).diff[0].before
    assert is_right(folder_of(store))


# -------------------------------------------------------------------------------------------- the disk is full


@pytest.fixture
def small_disk(store: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small filesystem needs root")
    store.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=18m", "tmpfs", store], check=False)
    if made.returncode:
        pytest.skip("this machine mounts nothing")
    yield store
    subprocess.run(["umount", "-l", store], check=True)


def test_a_disk_that_is_too_small_is_refused_before_the_first_byte(hub: StandinHub, small_disk: Path) -> None:
    """huggingface_hub #2742: too little space was a warning, and a half model the result."""
    said = refusal(hub)
    assert f"needs 20.8 MiB more under {small_disk}, and 18.0 MiB are free there" in said
    assert [one for one in hub.files_asked() if ".safetensors" in one and "index" not in one] == []
    assert not folder_of(small_disk).exists()
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    assert bring(hub).changed
    assert is_right(folder_of(small_disk))


def test_what_is_there_already_is_counted(hub: StandinHub, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=30m", small_disk], check=True)
    hub.faults = half(0.9)
    refusal(hub)
    hub.faults = Faults()
    # 5 MB of 5 MB lie there: free is less than the whole model would need, and enough for the rest.
    subprocess.run(["mount", "-o", "remount,size=22m", small_disk], check=True)
    bring(hub)
    assert is_right(folder_of(small_disk))


def test_somebody_else_fills_the_disk_meanwhile(
    hub: StandinHub, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuready.serving.models.download._SPARE_BYTES", 0)
    subprocess.run(["mount", "-o", "remount,size=6m", small_disk], check=True)
    hub.faults = Faults(bytes_per_second=4_000_000)

    def fill() -> None:
        while not list(small_disk.rglob("*.part")):
            time.sleep(0.005)
        (small_disk / "other").write_bytes(bytes(2_000_000))

    filler = threading.Thread(target=fill)
    filler.start()
    said = refusal(hub)
    filler.join()
    assert "No space left on device" in said
    assert "are free there; free space there and run again; what came is kept" in said
    (small_disk / "other").unlink()
    hub.faults = Faults()
    bring(hub)
    assert is_right(folder_of(small_disk))


# ------------------------------------------------------------------------------------------- the hub refuses


@pytest.mark.parametrize("name", ["main", "v1"])
def test_a_branch_or_tag_is_refused_with_its_commit(hub: StandinHub, store: Path, name: str) -> None:
    said = refusal(hub, entry(name))
    assert f"revision '{name}' of org/model is no full commit hash" in said
    assert f"set revision: {COMMIT}, which it is now" in said


def test_a_branch_on_model_scope_too(hub: StandinHub, store: Path) -> None:
    said = refusal(hub, entry("main", source={"hub": "modelscope"}))
    assert f"set revision: {COMMIT}, which it is now" in said


def test_an_unknown_name_is_refused_without_a_guess(hub: StandinHub, store: Path) -> None:
    assert "set all 40 digits of a commit of the repository" in refusal(hub, entry("0123456"))


def test_a_commit_that_the_repository_no_longer_has(hub: StandinHub, store: Path) -> None:
    said = refusal(hub, entry(OTHER))
    assert f"does not give org/model at {OTHER[:12]}: it has no such commit" in said


def test_a_mirror_that_answers_with_another_commit(hub: StandinHub, store: Path) -> None:
    hub.repositories[NAME].commits[OTHER] = dict(FILES)
    hub.repositories[NAME].names[COMMIT] = OTHER
    said = refusal(hub)
    assert f"names commit {OTHER} where org/model was asked for at {COMMIT}" in said


def test_a_commit_whose_content_moved_during_the_download(hub: StandinHub, store: Path) -> None:
    hub.faults = half()
    refusal(hub)
    changed = dict(FILES)
    changed[SHARDS[0]] = shard({"a": 3_000_000}, 9)
    hub.repositories[NAME].commits[COMMIT] = changed
    hub.faults = Faults()
    said = refusal(hub)
    assert f"{SHARDS[0]} of org/model@{COMMIT[:12]} on huggingface is another file than when the download began" in said
    hub.repositories[NAME].commits[COMMIT] = dict(FILES)
    assert bring(hub).changed
    assert is_right(folder_of(store))


def test_another_commit_lies_beside_the_former_one(hub: StandinHub, store: Path) -> None:
    newer = {**FILES, SHARDS[0]: shard({"a": 3_000_000}, 9)}
    hub.repositories[NAME].commits[OTHER] = newer
    bring(hub)
    bring(hub, entry(OTHER))
    assert is_right(folder_of(store))
    assert is_right(folder_of(store, OTHER), newer)


def test_a_mirror_that_is_down(hub: StandinHub, store: Path) -> None:
    down = given(hub) | {"hubs": {"endpoints": {"huggingface": "http://127.0.0.1:9"}}}
    with pytest.raises(Refusal) as caught:
        VERBS["bring"].run(Call(down, [], check=False))
    said = caught.value.failures[0].sentence()
    assert said.startswith(
        "Hugging Face (http://127.0.0.1:9) does not give org/model at 0123456789ab: Connection refused"
    )
    assert "models_endpoint" in said
    assert bring(hub).changed


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_passes_by_is_tried_again(hub: StandinHub, store: Path, status: int) -> None:
    hub.faults = Faults(status=status, times=2, match=SHARDS[0])
    bring(hub)
    assert is_right(folder_of(store))


def test_retry_after_is_waited_for(hub: StandinHub, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("gpuready.serving.models.transport.time.sleep", waited.append)
    hub.faults = Faults(status=429, times=1, match="config.json", headers={"Retry-After": "7"})
    bring(hub)
    assert 7 in waited


def test_a_rate_limit_that_lasts_is_said(hub: StandinHub, store: Path) -> None:
    hub.faults = Faults(status=429, times=1000, match="/api/", headers={"Retry-After": "900"})
    said = refusal(hub)
    assert "it answers 429 Too Many Requests, and asks to be left alone for 900 s" in said
    assert "run again later, or set a token of your own" in said


def test_a_hub_that_is_broken_for_one_header_is_not_asked_for_all(hub: StandinHub, store: Path) -> None:
    hub.faults = Faults(status=503, times=1000, match="00001")
    with pytest.raises(Refusal) as caught:
        facts(entry(), Hubs(given(hub)["hubs"]))
    (failure,) = caught.value.failures
    assert f"does not give {SHARDS[0]} of org/model" in failure.sentence()


# --------------------------------------------------------------------------------------------------- tokens


TOKEN = "hf_very_secret_token"  # noqa: S105 - of the stand-in


def test_a_gated_model_without_a_token(hub: StandinHub, store: Path) -> None:
    hub.repositories[NAME].token = TOKEN
    said = refusal(hub)
    assert "it is gated, private or not there" in said
    assert f"accept the terms on https://huggingface.co/{NAME}, and set models_token_file" in said


def test_a_gated_model_with_a_token_of_somebody_else(hub: StandinHub, store: Path) -> None:
    hub.repositories[NAME].token = TOKEN
    said = refusal(hub, models_token="hf_other")  # noqa: S106 - of the stand-in
    assert "403" in said
    assert "with the token that was sent; accept the terms on" in said
    assert "hf_other" not in said


@pytest.mark.parametrize("name", ["huggingface", "modelscope"])
def test_the_token_goes_to_the_hub_and_never_to_its_storage(hub: StandinHub, store: Path, name: str) -> None:
    hub.repositories[NAME].token = TOKEN
    hub.redirects = True
    one = entry(source={"hub": name})
    result = VERBS["bring"].run(
        Call(
            {**given(hub, one), "models_token": TOKEN} | {"hubs": {**given(hub)["hubs"], "token_hub": name}}, [], False
        )
    )
    assert is_right(folder_of(store))
    storage = [one for one in hub.asked if one.path.startswith("/storage/")]
    assert len(storage) >= 3
    assert all(TOKEN not in str(one.headers) for one in storage)
    assert any(TOKEN in str(one.headers) for one in hub.asked if one not in storage)
    assert TOKEN not in json.dumps(result.as_dict())
    assert all(TOKEN.encode() not in path.read_bytes() for path in store.rglob("*") if path.is_file())


def test_the_token_of_one_hub_is_not_sent_to_the_other(hub: StandinHub, store: Path) -> None:
    bring(hub, entry(source={"hub": "modelscope"}), models_token=TOKEN)
    assert all(TOKEN not in str(one.headers) for one in hub.asked)


def test_no_token_goes_over_plain_http_to_another_machine() -> None:
    far = transport.Transport("http://mirror.example", {"Authorization": "Bearer x"})
    assert (far.withholds_token, far.has_token) == (True, False)
    assert transport.Transport("https://mirror.example", {"Authorization": "Bearer x"}).has_token


def test_signed_addresses_are_in_no_sentence(hub: StandinHub, store: Path) -> None:
    hub.redirects = True
    hub.faults = Faults(status=403, times=1000, match="/storage/")
    assert "very-secret" not in refusal(hub)


# ---------------------------------------------------------------------------------------- what is not fetched


def with_files(hub: StandinHub, **files: bytes) -> None:
    hub.repositories[NAME].commits[COMMIT] = {**FILES, **{name.replace("__", "."): one for name, one in files.items()}}


def test_pickle_weights_are_refused_and_taken_where_allowed(hub: StandinHub, store: Path) -> None:
    kept = {name: one for name, one in FILES.items() if ".safetensors" not in name}
    hub.repositories[NAME].commits[COMMIT] = kept
    said = refusal(hub)
    assert "holds no safetensors weights: there is pytorch_model.bin instead" in said
    assert "allow_pickle: true" in said
    bring(hub, entry(allow_pickle=True))
    assert (folder_of(store) / "pytorch_model.bin").exists()


def test_code_is_named_by_the_facts_and_fetched_only_where_it_is_trusted(hub: StandinHub, store: Path) -> None:
    config = b'{"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}'
    hub.repositories[NAME].commits[COMMIT] = {**FILES, "config.json": config, "configuration_own.py": b"import os"}
    found = facts(entry(), Hubs(given(hub)["hubs"]))
    assert found["remote_code"] == "auto_map in its config.json names AutoConfig"
    bring(hub, entry(trust_remote_code=False))
    code = folder_of(store) / "configuration_own.py"
    assert not code.exists()
    hub.asked.clear()
    result = bring(hub, entry(trust_remote_code=True))
    assert "without the repository's Python code" in result.diff[0].before
    assert code.read_bytes() == b"import os"
    assert [one for one in hub.files_asked() if SHARDS[0] in one] == [], "the weights are there"


@pytest.mark.parametrize(
    "name", ["../evil.json", "/etc/evil.json", "a/../../evil.json", "a\\..\\evil.json", "x\n.json", "x\ud800.json"]
)
def test_names_that_would_leave_the_folder(hub: StandinHub, store: Path, name: str) -> None:
    hub.repositories[NAME].commits[COMMIT] = {**FILES, name: b"{}"}
    assert "would leave the model's folder" in refusal(hub)
    assert not store.exists() or list(store.glob("[!.]*")) == []


def test_an_index_that_names_a_file_outside(hub: StandinHub, store: Path) -> None:
    index = json.dumps({"weight_map": {"a": "../../etc/shadow"}}).encode()
    hub.repositories[NAME].commits[COMMIT] = {**FILES, "model.safetensors.index.json": index}
    assert "names ../../etc/shadow, a file outside the model's folder" in refusal(hub)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"size": -5}, "'README.md' has -5 bytes"),
        ({"size": float("inf")}, "answers in an unknown form about org/model"),
        ({"oid": None}, "it names no hash of 'README.md'"),
        ({"oid": "12ab"}, "it names no hash of 'README.md'"),
        ({"lfs": {"size": 9, "oid": "sha256:12ab"}}, "it names no Sha256 of 'README.md'"),
    ],
)
def test_a_list_that_says_nothing_to_judge_a_file_by(
    hub: StandinHub, store: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], words: str
) -> None:
    right = standin_model_hub._entry
    monkeypatch.setattr(
        standin_model_hub,
        "_entry",
        lambda path, content: {**right(path, content), **(changed if path == "README.md" else {})},
    )
    assert words in refusal(hub)
    assert hub.files_asked() == []


def test_a_list_that_goes_on_in_a_file_of_this_server(hub: StandinHub, store: Path) -> None:
    request = given(hub)
    hub.page, hub.address = 3, "file://"
    with pytest.raises(Refusal, match=r"it leads to file:///api/models/org/model/tree/.*"):
        VERBS["bring"].run(Call(request, [], check=False))


@pytest.mark.parametrize("name", [MANIFEST, "tokenizer.json.part"])
def test_a_file_that_would_lie_where_our_own_are_is_left_out(hub: StandinHub, store: Path, name: str) -> None:
    """Such as a folder of somebody's store that was uploaded as it was."""
    hub.repositories[NAME].commits[COMMIT] = {**FILES, name: b'{"source": {}, "files": {}}'}
    assert bring(hub).changed
    assert is_right(folder_of(store))
    assert not bring(hub).changed


@pytest.mark.parametrize("said", ["\u00b2", "-5", "soon"])
def test_a_number_of_a_header_that_is_none(hub: StandinHub, store: Path, said: str) -> None:
    hub.faults = Faults(status=429, times=1000, headers={"Retry-After": said})
    assert "it answers 429 Too Many Requests; run again later" in refusal(hub)


# ------------------------------------------------------------------------------------- several at once, in parts


def test_a_second_server_waits_says_for_whom_and_uses_the_result(hub: StandinHub, store: Path) -> None:
    hub.faults = Faults(bytes_per_second=4_000_000)
    child = subprocess.Popen([sys.executable, "-c", KILLED], stdin=subprocess.PIPE, text=True)
    assert child.stdin
    child.stdin.write(json.dumps(given(hub)))
    child.stdin.close()
    while not list(beside(store).rglob("*.part")):
        time.sleep(0.005)
    with pytest.raises(Busy) as caught:
        bring(hub)
    assert f"(pid {child.pid}) is downloading org/model@{COMMIT[:12]} on huggingface into {store}" in str(caught.value)
    assert caught.value.wait_seconds == 6 * 3600
    assert child.wait() == 0
    hub.asked.clear()
    assert (bring(hub).changed, hub.asked) == (False, [])
    assert is_right(folder_of(store))


def test_a_long_download_tells_how_far_it_is_and_goes_on(hub: StandinHub, store: Path) -> None:
    hub.faults = Faults(bytes_per_second=8_000_000)
    told = []
    for _ in range(50):
        result = bring(hub, seconds=0.05)
        if "progress" not in result.data:
            break
        told.append(result.data["progress"])
    assert len(told) > 1
    assert told[0].startswith(f"org/model@{COMMIT[:12]} on huggingface: ")
    assert " of 4.8 MiB, " in told[0]
    assert (result.changed, result.exit) == (True, Exit.DONE)
    assert is_right(folder_of(store))


def test_deployments_share_one_folder(hub: StandinHub, store: Path) -> None:
    source = {"hub": "huggingface", "repository": NAME, "revision": COMMIT}
    one = {"model": NAME, "source": {**source, "repository": None}}
    other = {"model": "other-name", "source": source, "trust_remote_code": True}
    (planned,) = sources.in_plan([one, other], [])
    assert planned["path"] == str(folder_of(store))
    assert planned["trust_remote_code"] is True


# -------------------------------------------------------------------------------------------------- adapters


def test_an_adapter_is_judged_and_brought(hub: StandinHub, store: Path) -> None:
    config = json.dumps({"peft_type": "LORA", "r": 16, "base_model_name_or_path": "org/model"}).encode()
    weights = shard({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": 4000})
    files = {"adapter_config.json": config, "adapter_model.safetensors": weights, "training_args.bin": b"pickle"}
    hub.repositories["org/adapter"] = Repository({COMMIT: files})
    one = entry(kind="adapter", source={"repository": "org/adapter"})
    found = facts(one, Hubs(given(hub)["hubs"]))
    assert (found["rank"], found["base_model"]) == (16, "org/model")
    assert bring(hub, one).changed
    folder = store / f"org--adapter@{COMMIT[:12]}"
    (listed,) = VERBS["list"].run(Call({"store": str(store)}, [], check=False)).data["models"]
    assert (listed["model"], listed["whole"], listed["why"]) == ("org/adapter", True, "")
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        MANIFEST,
    ]

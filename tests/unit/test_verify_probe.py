"""What the audit's probe reads: what cannot be read is unknown, never good."""

from __future__ import annotations

import subprocess
import urllib.error
from pathlib import Path
from typing import Any

import pytest
from tests.verify.probe import caches, host, reading, serving, snapshot

RECORD = {"plan": {"host": {"cuda": {"packages": []}}, "engines": []}, "host": {}}


def answers(monkeypatch: pytest.MonkeyPatch, code: int, out: str = "", complaint: str = "") -> None:
    def run(*words: str, user: str = "") -> subprocess.CompletedProcess[str]:
        del user
        return subprocess.CompletedProcess(words, code, out, complaint)

    for module in (reading, host):
        monkeypatch.setattr(module, "run", run)


@pytest.mark.parametrize(
    ("topic", "program"), [(host.failed_units, "systemctl list-units"), (host.packages, "dpkg-query --show")]
)
def test_a_program_that_fails_is_unknown(monkeypatch: pytest.MonkeyPatch, topic: Any, program: str) -> None:
    answers(monkeypatch, 1, complaint="no such bus\n")
    assert snapshot.answer_of(topic, RECORD) == {"unknown": f"OSError: {program}: no such bus"}


def test_an_audit_of_dpkg_that_fails_is_unknown_and_one_that_finds_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, 1, complaint="dpkg: error: the database is locked")
    with pytest.raises(OSError, match="dpkg --audit: dpkg: error: the database is locked"):
        host._dpkg_audit()
    answers(monkeypatch, 1, out="The following packages are\n half installed")
    assert host._dpkg_audit() == "The following packages are half installed"


def test_failed_units_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, 0, out="a.service loaded failed failed An example\nb.service loaded failed failed B\n")
    assert host.failed_units({}) == ["a.service", "b.service"]


def test_a_folder_behind_a_link_is_judged_and_a_linked_socket_is_not_followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, link, file = tmp_path / "large", tmp_path / "models", tmp_path / "link.sock"
    real.mkdir()
    link.symlink_to(real)
    file.symlink_to(real)
    monkeypatch.setattr(host, "FOLDERS", (link,))
    monkeypatch.setattr(host, "_guarded", lambda: iter((link, file)))
    real.chmod(0o755)
    owner = host._owner(real.stat())
    assert host.access({}) == {str(link): f"0755 {owner}", str(file): f"0777 {owner}"}


def test_a_share_of_weights_that_is_mounted_read_only_guards_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reading.MODELS in set(host._guarded())
    monkeypatch.setattr(host, "_is_read_only", lambda _: True)
    assert reading.MODELS not in set(host._guarded())


@pytest.mark.parametrize(
    ("answer", "busy"),
    [
        (urllib.error.HTTPError("http://x", 503, "", {}, None), True),  # type: ignore[arg-type]
        (urllib.error.HTTPError("http://x", 429, "", {}, None), True),  # type: ignore[arg-type]
        (urllib.error.HTTPError("http://x", 500, "", {}, None), False),  # type: ignore[arg-type]
        (TimeoutError(), True),
        (urllib.error.URLError(TimeoutError()), True),
        (ConnectionRefusedError(111, "refused"), False),
    ],
)
def test_a_server_with_much_to_do_is_told_from_one_that_is_away(
    monkeypatch: pytest.MonkeyPatch, answer: Exception, busy: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise answer

    monkeypatch.setattr(reading.DIRECT, "open", fail)
    reply = serving.generate("127.0.0.1:1", "m")
    assert reply["busy"] is busy
    assert "tokens" not in reply


@pytest.mark.parametrize(
    ("counted", "busy"),
    [
        (["vllm:generation_tokens_total 7", "vllm:generation_tokens_total 9"], True),
        (["vllm:generation_tokens_total 7", "vllm:generation_tokens_total 7"], False),
        ([None, None], False),
        (["vllm:generation_tokens_total 7", None], False),
    ],
    ids=["it goes on", "it stands still", "it tells nothing", "it has fallen silent"],
)
def test_an_engine_that_hangs_is_told_from_one_that_is_busy(
    monkeypatch: pytest.MonkeyPatch, counted: list[str | None], busy: bool
) -> None:
    answers = iter(counted)
    monkeypatch.setattr(serving, "text_of", lambda _: next(answers))
    monkeypatch.setattr(serving, "ask", lambda *_: (None, reading.SILENT))
    assert serving.ask_engine(18100, "m")["busy"] is busy


@pytest.mark.parametrize(
    ("task", "path", "reply"),
    [
        ("generate", "/v1/completions", {"choices": [{"text": "Yes."}], "usage": {"completion_tokens": 2}}),
        ("embed", "/v1/embeddings", {"data": [{"embedding": [0.5]}]}),
        ("rerank", "/v1/rerank", {"results": [{"relevance_score": 0.0}]}),
        ("classify", "/classify", {"data": [{"probs": [0.9, 0.1]}]}),
    ],
)
def test_a_model_is_asked_for_what_it_is_made_for(
    monkeypatch: pytest.MonkeyPatch, task: str, path: str, reply: dict[str, Any]
) -> None:
    asked: list[str] = []
    replies = iter([reply, {"object": "error"}])

    def ask(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked.append(url)
        return 200, {"model": body["model"], **next(replies)}

    monkeypatch.setattr(serving, "ask", ask)
    found = serving.generate("127.0.0.1:1", "m", task=task)
    assert (found["model"], found["tokens"] > 0, asked) == ("m", True, [f"http://127.0.0.1:1{path}"])
    assert serving.generate("127.0.0.1:1", "m", task=task)["tokens"] == 0


def test_the_probe_reads_engines_kv_caches_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = (Path(__file__).parent / "data/engines/vllm-0.32.0-cpu.metrics").read_text()
    assert caches.of_vllm(recorded) == {"tokens": 131072, "blocks": 1024, "block_tokens": 128}
    older = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0'
    assert caches.of_vllm(older) == {"block_tokens": 16}
    state = '{"internal_states": [{"memory_usage": {"token_capacity": 9}}, {"memory_usage": {"token_capacity": 8}}]}'
    assert caches.of_sglang(state) == {"tokens": 8}
    assert caches.of_sglang("<html>") == caches.of_sglang('{"internal_states": []}') == {}
    gauges = 'trtllm_kv_cache_max_blocks{model_name="m"} 1000.0\ntrtllm_kv_cache_tokens_per_block{model_name="m"} 64.0'
    assert caches.of_tensorrt_llm(gauges) == {"tokens": 64000, "blocks": 1000, "block_tokens": 64}
    assert caches.of_tensorrt_llm("") == {}
    monkeypatch.setattr(caches, "text_of", lambda url: recorded if url == "http://127.0.0.1:18100/metrics" else None)
    stand_in = {"kv_bytes": 67108864, "bytes_per_token": 512}
    deployment = {"name": "chat", "engine": "vllm", "replicas": [{"index": 0, "port": 18100}], "flags": {"secret": 1}}
    deployment |= {"memory": {"kv_tokens": 148913240}, "stand_in": stand_in}
    assert caches.caches({"plan": {"deployments": [deployment]}}) == {
        "chat.0": {
            "planned": {"tokens": {"value": 148913240}, "blocks": None, "bytes": 67108864, "bytes_per_token": 512},
            "has": {"tokens": 131072, "blocks": 1024, "block_tokens": 128},
        }
    }


def test_an_adapter_is_judged_by_its_own_files(tmp_path: Path) -> None:
    adapter = {"path": str(tmp_path), "kind": "adapter"}
    assert f"{tmp_path}/adapter_config.json is not JSON or not there" in serving._broken(tmp_path, adapter)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert serving._broken(tmp_path, adapter) == []
    assert f"{tmp_path}/config.json is not JSON or not there" in serving._broken(tmp_path, {"kind": "model"})


def test_pickle_weights_are_weights_only_where_the_plan_allows_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert serving._broken(tmp_path, {"allow_pickle": True}) == []
    assert serving._broken(tmp_path, {"allow_pickle": False}) == [f"{tmp_path} has no safetensors weights"]

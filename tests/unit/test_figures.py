"""What engines say of themselves: vLLM as recorded, the others by their sources, and answers that say nothing."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuready.serving import figures
from gpuready.serving.figures import Figures

RECORDED = (Path(__file__).parent / "data/engines/vllm-0.32.0-cpu.metrics").read_text()
LABELS = next(line for line in RECORDED.splitlines() if line.startswith("vllm:cache_config_info{"))

# Fields as sglang/srt/managers/scheduler.py (0.4.9) and scheduler_components/memory_usage.py (0.5.23) make them.
SGLANG_OLD = {
    "mem_fraction_static": 0.88,
    "kv_cache_dtype": "auto",
    "page_size": 1,
    "max_total_num_tokens": 444500,
    "internal_states": [
        {"memory_usage": {"weight": 15.08, "kvcache": 54.26, "token_capacity": 444500, "cuda_graph": 0.11}}
    ],
}
SGLANG_NEW = {
    "mem_fraction_static": 0.9,
    "kv_cache_dtype": "fp8_e4m3",
    "page_size": 64,
    "internal_states": [
        {"memory_usage": {"weight": 30.5, "kvcache": 9.543, "token_capacity": tokens, "token_capacity_swa": None}}
        for tokens in (39104, 39040)
    ],
}
PHASES = {"prefill": 2.84, "decode": 0.13, "target_verify": 0.0, "draft_prefill": 0.0}
# As TensorRT-LLM's documentation shows it (docs/source/commands/trtllm-serve).
TENSORRT_LLM = [
    {"iter": 153, "kvCacheStats": {"maxNumBlocks": 101256, "tokensPerBlock": 32, "usedNumBlocks": 3}},
    {"gpuMemUsage": 76665782272, "iter": 154, "kvCacheStats": {"maxNumBlocks": 101256, "tokensPerBlock": 32}},
]


def without(label: str, line: str = LABELS) -> str:
    key = f',{label}="'
    begin = line.index(key)
    return line[:begin] + line[line.index('"', begin + len(key)) + 1 :]


def test_vllms_recorded_answer() -> None:
    assert figures.from_vllm(RECORDED) == Figures(
        kv_tokens=131072, blocks=1024, block_tokens=128, kv_dtype="auto", kv_bytes_set=67108864
    )


def test_vllm_before_0_24_tells_blocks_only() -> None:
    found = figures.from_vllm(without("kv_cache_size_tokens"))
    assert (found.kv_tokens, found.blocks, found.block_tokens) == (None, 1024, 128)
    assert found.tell_the_cache


def test_a_share_counts_where_no_bytes_are_set() -> None:
    found = figures.from_vllm(LABELS.replace('kv_cache_memory_bytes="67108864"', 'kv_cache_memory_bytes="None"'))
    assert (found.memory_fraction, found.kv_bytes_set) == (0.92, None)


def test_vllm_with_two_data_parallel_engines_sums_their_blocks() -> None:
    second = LABELS.replace('engine="0"', 'engine="1"').replace('_size_tokens="131072"', '_size_tokens="130944"')
    found = figures.from_vllm(f"{LABELS}\n{second}\n")
    assert (found.kv_tokens, found.blocks) == (130944, 512)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "vllm:num_requests_running 0.0\n",
        "# HELP vllm:cache_config_info Information\n",
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0',
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="0"} 1.0',
        'vllm:cache_config_info{block_size="x",num_gpu_blocks="1e999"} 1.0',
        'vllm:cache_config_info_of_others{block_size="16",num_gpu_blocks="7"} 1.0',
    ],
)
def test_what_vllm_does_not_say_is_unknown_and_never_zero(text: str) -> None:
    found = figures.from_vllm(text)
    assert (found.kv_tokens, found.blocks) == (None, None)
    assert not found.tell_the_cache


def test_sglangs_older_answer() -> None:
    assert figures.from_sglang(json.dumps(SGLANG_OLD)) == Figures(
        kv_tokens=444500,
        kv_gib=54.26,
        blocks=444500,
        block_tokens=1,
        kv_dtype="auto",
        memory_fraction=0.88,
        weights_gib=15.08,
        graphs_gib=0.11,
    )


def test_sglangs_newer_answer_is_that_of_the_group_with_least() -> None:
    answer: dict[str, Any] = json.loads(json.dumps(SGLANG_NEW))
    for state in answer["internal_states"]:
        state["memory_usage"]["graph"] = PHASES
    found = figures.from_sglang(json.dumps(answer))
    assert (found.kv_tokens, found.blocks, found.block_tokens, found.kv_gib) == (39040, 610, 64, 9.543)
    assert found.graphs_gib == pytest.approx(2.97)


def test_sglang_without_states_tells_its_tokens_alone() -> None:
    found = figures.from_sglang('{"max_total_num_tokens": 1000, "internal_states": null, "page_size": null}')
    assert (found.kv_tokens, found.kv_gib, found.blocks, found.weights_gib) == (1000, None, None, None)


def test_sglang_without_cuda_graphs_has_unknown_graphs() -> None:
    answer = json.loads(json.dumps(SGLANG_OLD))
    del answer["internal_states"][0]["memory_usage"]["cuda_graph"]
    assert figures.from_sglang(json.dumps(answer)).graphs_gib is None


def test_tensorrt_llms_statistics() -> None:
    found = figures.from_tensorrt_llm(json.dumps(TENSORRT_LLM))
    assert found == Figures(kv_tokens=3240192, blocks=101256, block_tokens=32)


def test_tensorrt_llms_gauges() -> None:
    text = 'trtllm_kv_cache_max_blocks{model_name="m"} 1000.0\ntrtllm_kv_cache_tokens_per_block{model_name="m"} 64.0\n'
    assert figures.from_tensorrt_llm_gauges(text) == Figures(kv_tokens=64000, blocks=1000, block_tokens=64)


@pytest.mark.parametrize("text", ["[]", "{}", '[{"kvCacheStats": null}]', '[1, {"kvCacheStats": {"maxNumBlocks": 0}}]'])
def test_statistics_that_are_not_there_are_unknown(text: str) -> None:
    assert figures.from_tensorrt_llm(text) == Figures()


# Over HTTP ------------------------------------------------------------------------------------------------------------

Answers = dict[str, tuple[int, str]]


@pytest.fixture
def engine() -> Iterator[Callable[[Answers], int]]:
    """Give an engine that answers paths with a status and a text; returns its port."""
    servers: list[http.server.HTTPServer] = []

    def start(answers: Answers) -> int:
        class Engine(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, text = answers.get(self.path, (404, "no such path"))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        server = http.server.HTTPServer(("127.0.0.1", 0), Engine)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return int(server.server_address[1])

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_figures_are_read_with_where_they_are_from_and_without_what_is_unknown(
    engine: Callable[[Answers], int],
) -> None:
    found, why = figures.read("vllm", engine({"/metrics": (200, RECORDED)}))
    assert why == ""
    assert found == {
        "source": "/metrics",
        "kv_tokens": 131072,
        "blocks": 1024,
        "block_tokens": 128,
        "kv_dtype": "auto",
        "kv_bytes_set": 67108864,
    }


def test_an_older_sglang_is_asked_its_own_way(engine: Callable[[Answers], int]) -> None:
    found, _ = figures.read("sglang", engine({"/get_server_info": (200, json.dumps(SGLANG_OLD))}))
    assert found is not None
    assert (found["source"], found["kv_tokens"]) == ("/get_server_info", 444500)


@pytest.mark.parametrize(
    ("name", "answers", "why"),
    [
        ("vllm", {}, r"/metrics: HTTP 404"),
        ("vllm", {"/metrics": (500, "x")}, r"/metrics: HTTP 500"),
        ("vllm", {"/metrics": (200, "nothing of ours")}, r"/metrics does not tell the size of the KV cache"),
        ("sglang", {"/get_server_info": (200, "<html>")}, r"/get_server_info: Expecting value"),
        ("sglang", {"/get_server_info": (200, "[" * 100_000)}, r"/get_server_info: "),
        ("sglang", {"/get_server_info": (200, "[1]")}, r"/get_server_info does not tell"),
        ("tensorrt_llm", {"/metrics": (200, "[]"), "/prometheus/metrics": (200, "")}, r"/prometheus/metrics does not"),
        ("other", {}, r"gpuready knows no figures of 'other'"),
    ],
)
def test_a_failing_read_is_said_and_never_raised(
    engine: Callable[[Answers], int], name: str, answers: Answers, why: str
) -> None:
    found, said = figures.read(name, engine(answers))
    assert found is None
    assert why in said


def test_an_engine_that_is_gone_is_said() -> None:
    found, said = figures.read("vllm", 9)
    assert found is None
    assert "127.0.0.1:9/metrics: " in said
    assert "refused" in said


def test_a_proxy_of_the_environment_does_not_stand_between(
    engine: Callable[[Answers], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert figures.read("vllm", engine({"/metrics": (200, RECORDED)}))[1] == ""

"""The stand-in of TensorRT-LLM that machine tests install: as strict as the real one, and never on a real machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from sim import tiny_model
from tests.machines.tensorrt_llm_standin import wheel
from tests.machines.tensorrt_llm_standin.arguments_standin import wrong
from tests.unit.planning_options import option
from tests.unit.standin import CHECKOUT

from gpuready.planning.memory.run import Run
from gpuready.planning.options import Served, options_of
from gpuready.rendering.values import nested
from gpuready.serving import figures, locks
from gpuready.serving.probes import Asked
from gpuready.serving.readiness import one_token

PORT = 18790
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Place:
    """Where the stand-in is tried: its wheel unpacked, a model, a file of options."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "tiny@123"

    def command(self, options: dict[str, Any] | str, *words: str, marker: bool = True) -> list[str]:
        file = self.folder / "serve.yaml"
        file.write_text(options if isinstance(options, str) else json.dumps(options), encoding="utf-8")
        (self.folder / "marker").touch()
        here = "marker" if marker else "no-marker"
        code = (
            "import sys, pathlib, tensorrt_llm_standin.server_standin as one;"
            f"one.MARKER = pathlib.Path({str(self.folder / here)!r}); sys.argv[0] = 'trtllm-serve'; one.main()"
        )
        address = ["--host", "127.0.0.1", "--port", str(PORT), "--extra_llm_api_options", str(file)]
        return [sys.executable, "-c", code, str(self.model), "--backend", "pytorch", *address, *words]

    def environment(self, gpus: str = "0") -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.folder / "unpacked"), "CUDA_VISIBLE_DEVICES": gpus}

    def said(self, options: dict[str, Any] | str, *words: str, marker: bool = True, gpus: str = "0") -> tuple[int, str]:
        command = self.command(options, *words, marker=marker)
        env = self.environment(gpus)
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=20)
        return done.returncode, done.stderr.strip()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("tensorrt")
    zipfile.ZipFile(wheel.build(folder)).extractall(folder / "unpacked")
    tiny_model.write(tiny_model.files(), folder / "tiny@123")
    return Place(folder)


def test_it_is_no_file_of_the_product_and_named_a_stand_in(place: Place) -> None:
    names = zipfile.ZipFile(next(place.folder.glob("*.whl"))).namelist()
    assert all("standin" in name for name in names)
    known = [
        str(path)
        for folder in ("roles", "playbooks", "plugins", "src", "sim", "scripts", "templates", "inventories")
        for path in (CHECKOUT / folder).rglob("*")
        if path.is_file() and "tensorrt_llm_standin" in path.read_text(errors="replace")
    ]
    assert known == []


def test_its_wheel_has_the_same_hash_whenever_it_is_made_and_its_lock_names_it(place: Place, tmp_path: Path) -> None:
    again = wheel.build(tmp_path)
    assert again.read_bytes() == next(place.folder.glob("*.whl")).read_bytes()
    lock = locks.parse(wheel.LOCK.format(py="311"), wheel.lock_text(again))
    assert [one.name for one in lock.requirements] == ["tensorrt-llm-standin", "pyyaml"]
    assert locks.wheels_in([tmp_path], lock) == [again]


def test_a_machine_without_the_marker_is_refused(place: Place) -> None:
    code, said = place.said({}, marker=False)
    assert code == 1
    assert said.startswith("this trtllm-serve is a stand-in for simulated machines alone: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max_batch_sizes", "3"], "Error: No such option: --max_batch_sizes"),
        (["--max_batch", "3"], "Error: No such option: --max_batch"),
        (["--served_model_name", "x"], "Error: No such option: --served_model_name"),
        (["--max_num_tokens", "many"], "invalid int value: 'many'"),
        (["--log_level", "loud"], "invalid choice: 'loud'"),
    ],
)
def test_an_option_that_1_0_does_not_have_is_refused(place: Place, words: list[str], said: str) -> None:
    code, found = place.said({}, *words)
    assert code == 2
    assert said in found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_batch_sizes": 3}, "max_batch_sizes\n  Extra inputs are not permitted [type=extra_forbidden"),
        ({"return_perf_metrics": True}, "return_perf_metrics\n  Extra inputs are not permitted"),
        ({"kv_cache_config": {"tokens_per_block": 64}}, "kv_cache_config.tokens_per_block\n  Extra inputs"),
        ({"kv_cache_config": 3}, "kv_cache_config\n  Input should be a valid dictionary"),
        ({"max_batch_size": "eight"}, "max_batch_size\n  Input should be a valid int"),
        ({"max_batch_size": True}, "max_batch_size\n  Input should be a valid int"),
        ({"enable_iter_perf_stats": 1}, "enable_iter_perf_stats\n  Input should be a valid bool"),
        ("[1, 2]", "holds no mapping"),
    ],
)
def test_a_key_that_1_0_does_not_have_is_refused(place: Place, options: Any, words: str) -> None:
    code, said = place.said(options)
    assert code == 1
    assert words in said


def test_a_rendered_file_is_taken_whole(place: Place) -> None:
    run = Run("tensorrt_llm", "1.0.0", max_model_len=4096, max_num_seqs=8, memory_fraction=0.9, kv_bytes=2**30, tp=2)
    run = replace(run, prefix_caching=False, kv_dtype="fp8", graph_max_batch=8, block_size=64)
    made = option(run=run)
    place_of_it = {"model_path": "/data/llama", "engine_folder": "/opt/gpuready/engines/x-1-0"}
    wish = replace(made.wish, engine=run.engine, version=run.version)
    served = Served({"model": "llama"}, replace(made, wish=wish), run, {}, "some", {}, {}, frozenset(), place_of_it)
    groups = options_of(served, {})
    written = yaml.safe_load("".join(nested(groups, name) for name in groups))
    assert written["kv_cache_config"].keys() >= {"free_gpu_memory_fraction", "max_tokens", "dtype"}
    assert list(wrong(written)) == []


def test_it_wants_as_many_gpus_as_the_model_is_split_over(place: Place) -> None:
    assert place.said({"tensor_parallel_size": 2})[1] == "ValueError: 1 GPU devices found on the node, 2 are needed"
    assert "ValueError: 0 GPU devices found" in place.said({}, gpus="")[1]


@pytest.fixture
def server(place: Place) -> Iterator[subprocess.Popen[str]]:
    options = {
        "enable_iter_perf_stats": True,
        "kv_cache_config": {"max_tokens": 4096},
        "max_batch_size": 2,
        "max_seq_len": 1000,
    }
    # The file wins over the command line.
    command = place.command(options, "--max_seq_len", "50")
    running = subprocess.Popen(command, env=place.environment(), stdout=subprocess.PIPE, text=True)
    assert running.stdout
    assert running.stdout.readline().startswith("stand-in of TensorRT-LLM 1.0.0: tiny@123 on http://127.0.0.1:")
    yield running
    running.kill()
    running.communicate()


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body).encode() if body else None
    return DIRECT.open(urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data), timeout=20)


def test_it_answers_as_the_openai_server_does(server: subprocess.Popen[str]) -> None:
    assert ask("/health").read() == b""
    assert json.load(ask("/version")) == {"version": "1.0.0"}
    assert json.load(ask("/v1/models"))["data"][0]["id"] == "tiny@123", "the folder's name, whatever a request says"
    assert len(one_token(Asked(PORT, "anything"))) == 1
    chat = {"model": "x", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    answer = json.load(ask("/v1/chat/completions", chat))
    assert (answer["usage"]["completion_tokens"], len(answer["choices"][0]["message"]["content"])) == (5, 5)
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask("/v1/completions", {"prompt": "x", "max_tokens": 1000})
    assert caught.value.code == 400
    assert "should not exceed max_seq_len (1000)" in json.load(caught.value)["message"]


def test_its_figures_are_read_back_once_it_answered(server: subprocess.Popen[str]) -> None:
    assert figures.read("tensorrt_llm", PORT)[0] is None, "nothing is counted before a request"
    one_token(Asked(PORT, "x"))
    found, said = figures.read("tensorrt_llm", PORT)
    assert (found, said) == ({"source": "/metrics", "kv_tokens": 4096, "blocks": 128, "block_tokens": 32}, "")


def test_a_stop_ends_the_streams_that_are_under_way_and_takes_no_more(server: subprocess.Popen[str]) -> None:
    stream = ask("/v1/completions", {"prompt": "x", "max_tokens": 300, "stream": True})
    first = stream.readline()
    server.send_signal(signal.SIGTERM)
    rest = [line for line in stream.read().decode().splitlines() if line]
    assert len([first, *rest]) == 301
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert rest[-1] == "data: [DONE]"
    assert server.wait(timeout=10) == 0
    time.sleep(0.1)
    with pytest.raises(urllib.error.URLError):
        ask("/health")

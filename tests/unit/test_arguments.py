"""The engine's own parser reads a release's file; what it refuses or takes otherwise is said in its own words."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuready.outcome import Failure
from gpuready.rendering import zipapp
from gpuready.serving import arguments

Check = Callable[[str], list[Failure]]

# As vLLM does it: what is false is skipped, a list becomes several words, and options have a negative twin.
VLLM = {
    "vllm/__init__.py": "",
    "vllm/config.py": """
from typing import Literal
from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass
@dataclass
class CacheConfig:
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    cache_dtype: Literal["auto", "fp8"] = "auto"
    block_size: int = 16
    @field_validator("block_size", mode="after")
    @classmethod
    def is_even(cls, value):
        if value % 2:
            raise ValueError("block_size must be even")
        return value
""",
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/layers/__init__.py": "",
    "vllm/model_executor/layers/quantization.py": "QUANTIZATION_METHODS = ['awq', 'fp8']",
    "vllm/platforms.py": "class current_platform: device_type = 'cuda'\n",
    "vllm/engine/__init__.py": "",
    "vllm/engine/arg_utils.py": """
class AsyncEngineArgs:
    @classmethod
    def from_cli_args(cls, args):
        if args.tensor_parallel_size == 3:
            raise ValueError("tensor_parallel_size must divide the heads")
""",
    "vllm/utils/__init__.py": "",
    "vllm/utils/argparse_utils.py": """
import argparse, yaml
class FlexibleArgumentParser(argparse.ArgumentParser):
    def parse_args(self, args):
        place = args.index("--config")
        words = []
        for key, value in yaml.safe_load(open(args[place + 1])).items():
            if value is not False:
                words.append("--" + key.replace("_", "-"))
            if isinstance(value, list):
                words += map(str, value)
            elif not isinstance(value, bool):
                words.append(str(value))
        return super().parse_args(words + args[:place] + args[place + 2:])
""",
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/openai/__init__.py": "",
    "vllm/entrypoints/openai/cli_args.py": """
import argparse
def make_arg_parser(parser):
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--tensor-parallel-size", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--quantization")
    parser.add_argument("--dtype", choices=["auto", "half"])
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--disable-log-stats", action="store_true")
    return parser
def validate_parsed_serve_args(args):
    pass
""",
}
# As SGLang does it: abbreviations are taken, and kinds of options that its file cannot have are refused by name.
SGLANG = {
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/server_args.py": """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path")
        parser.add_argument("--port", type=int)
        parser.add_argument("--tensor-parallel-size", "--tp-size", type=int)
        parser.add_argument("--mem-fraction-static", type=float)
        parser.add_argument("--disable-radix-cache", action="store_true")
        parser.add_argument("--json-model-override-args")
        parser.add_argument("--verbose", action="count")
""",
    "sglang/srt/server_args_config_parser.py": """
import yaml
class ConfigArgumentMerger:
    def __init__(self, parser):
        pass
    def merge_config_with_args(self, args):
        place = args.index("--config")
        words = []
        for key, value in yaml.safe_load(open(args[place + 1])).items():
            if key == "verbose":
                raise ValueError("Unsupported config option 'verbose' with action '_CountAction'")
            words += ["--" + key] if value is True else [] if value is False else ["--" + key, str(value)]
        return words + args[:place] + args[place + 2:]
""",
}
# As TensorRT-LLM 1.0.0 does it: the command line by click, the file into a record that knows every field.
TENSORRT_LLM = {
    "tensorrt_llm/__init__.py": "",
    "tensorrt_llm/commands/__init__.py": "",
    "tensorrt_llm/commands/serve.py": """
import click
@click.command("serve")
@click.argument("model")
@click.option("--backend", type=click.Choice(["pytorch"]))
@click.option("--host")
@click.option("--port", type=int)
@click.option("--extra_llm_api_options")
def serve(**said):
    raise SystemExit("it would start")
def get_llm_args(model, backend, gpus_per_node=None):
    if not gpus_per_node:
        raise ValueError("No GPU devices found on the node")
    return {"model": model, "backend": backend, "build_config": object(), "max_batch_size": 2048}, {}
def update_llm_args_with_extra_dict(base, extra):
    return base | extra
""",
    "tensorrt_llm/llmapi/__init__.py": "",
    "tensorrt_llm/llmapi/llm_args.py": """
import pydantic
class Strict(pydantic.BaseModel):
    model_config = {"extra": "forbid"}
class KvCacheConfig(Strict):
    free_gpu_memory_fraction: float = pydantic.Field(default=0.9, ge=0, le=1)
class TorchLlmArgs(Strict):
    model: str
    backend: str
    max_batch_size: int = 2048
    max_seq_len: int | None = None
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    @pydantic.field_validator("max_seq_len")
    @classmethod
    def at_most(cls, value):
        return min(value, 100000)
""",
}
GOOD = """\
model: /m
served-model-name: [org/m, other]
max-num-seqs: 64
no-enable-prefix-caching: true
disable-log-stats: true
kv-cache-dtype: "fp8"
block-size: 32
quantization: AWQ
"""


def made(folder: Path, files: dict[str, str], engine: str = "vllm") -> dict[str, Any]:
    """Make an engine's environment of these modules and return the plan of a deployment on it."""
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    own = Path(sysconfig.get_path("purelib"))
    for name in (
        "yaml",
        "pydantic",
        "pydantic_core",
        "annotated_types",
        "typing_inspection",
        "typing_extensions.py",
        "click",
    ):
        (site / name).symlink_to(own / name)
    return {"name": "chat", "engine": engine, "engine_folder": str(folder), "model": "org/m", "model_path": "/m"}


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Checks a text with the engine above."""
    # The Python of a developer may lie where nobody else can read it.
    monkeypatch.setattr(arguments, "_without_rights", lambda _: [])
    plan = made(tmp_path / "engine", VLLM)

    def checked(text: str) -> list[Failure]:
        (tmp_path / "serve.yaml").write_text(text)
        return arguments.refused(plan, tmp_path, {"index": 0, "port": 18100})

    return checked


def test_what_the_parser_takes_as_written_is_accepted(check: Check) -> None:
    assert check(GOOD) == []


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "max-num-seqz: 64",
            "deployment chat, flag max-num-seqz is refused by vLLM unknown: unrecognized arguments: --max-num-seqz; "
            "did you mean max-num-seqs?",
        ),
        (
            "max_num_seqs: many",
            "flag max_num_seqs is refused by vLLM unknown: argument --max-num-seqs: invalid int value",
        ),
        ("dtype: fp9", "flag dtype is refused by vLLM unknown: argument --dtype: invalid choice: 'fp9' (choose from "),
        (
            "max-num-seqs: [8, 16]",
            "flag max-num-seqs is refused by vLLM unknown: the file says [8, 16], and the engine's parser took 8",
        ),
        ("disable-log-stats: off9", "the file says 'off9', and the engine's parser took True"),
        ("help: true", "the parser ended with exit status 0 before it had read all"),
        ("block-size: 17", "flag block-size is refused by vLLM unknown: block_size must be even"),
        ("quantization: fp7", "refused by vLLM unknown: the engine has no 'fp7' among its own: awq, fp8"),
        ("kv-cache-dtype: fp9", "flag kv-cache-dtype is refused by vLLM unknown: Input should be 'auto' or 'fp8'"),
        ("gpu-memory-utilization: 1.9", "gpu-memory-utilization is refused by vLLM unknown: Input should be less than"),
        (
            "max-num: 64",
            "the parser takes it for --max-num-seqs, of which it is the beginning; did you mean max-num-seqs?",
        ),
        ("enable-prefix-caching: false", "the file says False, and the engine's parser took True"),
        ("port: 9", "flag port is refused by vLLM unknown: it stands on the command line, where each replica has"),
        (
            "tensor-parallel-size: 3",
            "flag tensor-parallel-size is refused by vLLM unknown: tensor_parallel_size must divide",
        ),
    ],
)
def test_what_it_refuses_or_takes_otherwise_is_said(check: Check, line: str, sentence: str) -> None:
    found = check(f"model: /m\n{line}\n")
    assert len(found) == 1
    assert (found[0].code, sentence in found[0].sentence()) == (arguments.REFUSED, True), found[0].sentence()


def checked(folder: Path, engine: str, files: dict[str, str], text: str) -> list[str]:
    """Return the sentences of what an engine made of these modules refuses in a file."""
    plan = made(folder / "engine", files, engine)
    (folder / "serve.yaml").write_text(text)
    return [one.sentence() for one in arguments.refused(plan, folder, {"index": 0, "port": 18100})]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("disable-radix-cache: true", ""),
        (
            "mem-fraction: 0.8",
            "takes it for --mem-fraction-static, of which it is the beginning; did you mean mem-fraction-s",
        ),
        (
            "json-model-override-args: '{broken'",
            "flag json-model-override-args is refused by SGLang unknown: it is not JSON",
        ),
        ("json-model-override-args: '{\"a\": 1}'", ""),
        ("verbose: 2", "flag verbose is refused by SGLang unknown: Unsupported config option 'verbose' with action"),
        (
            "model-name: x",
            "flag model-name is refused by SGLang unknown: unrecognized arguments: --model-name x; did you",
        ),
        ("disable-radix-cache: 7", "flag disable-radix-cache is refused by SGLang unknown: unrecognized arguments: 7"),
    ],
)
def test_sglangs_own_parser_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, sentence: str) -> None:
    monkeypatch.setattr(arguments, "_without_rights", lambda _: [])
    found = checked(tmp_path, "sglang", SGLANG, f"model-path: /m\ntp-size: 2\n{line}\n")
    assert [sentence in one for one in found] == [True] * bool(sentence), found


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("kv_cache_config: {free_gpu_memory_fraction: 0.8}", ""),
        (
            "max_batchsize: 8",
            "flag max_batchsize is refused by TensorRT-LLM unknown: Extra inputs are not permitted; did you",
        ),
        (
            "kv_cache_config: {free_gpu_memory_fraction: 1.8}",
            "flag kv_cache_config.free_gpu_memory_fraction is refused by",
        ),
        ("kv_cache_config: {fraction: 0.8}", "flag kv_cache_config.fraction is refused by TensorRT-LLM unknown: Extra"),
        (
            "max_batch_size: many",
            "flag max_batch_size is refused by TensorRT-LLM unknown: Input should be a valid integer",
        ),
        (
            "max_seq_len: 200000",
            "flag max_seq_len is refused by TensorRT-LLM unknown: the file says 200000, and the engine",
        ),
    ],
)
def test_tensorrt_llms_own_record_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, sentence: str
) -> None:
    monkeypatch.setattr(arguments, "_without_rights", lambda _: [])
    found = checked(tmp_path, "tensorrt_llm", TENSORRT_LLM, f"{line}\n")
    assert [sentence in one for one in found] == [True] * bool(sentence), found


def test_tensorrt_llm_without_its_libraries_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_without_rights", lambda _: [])
    broken = {"tensorrt_llm/__init__.py": "raise ImportError('libcuda.so.1: cannot open shared object file')"}
    (sentence,) = checked(tmp_path, "tensorrt_llm", TENSORRT_LLM | broken, "max_batch_size: 8\n")
    assert "were not checked by TensorRT-LLM: ImportError: libcuda.so.1: cannot open shared object file" in sentence


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (
            {"vllm/__init__.py": "import libcuda_is_missing"},
            "ModuleNotFoundError: No module named 'libcuda_is_missing'",
        ),
        ({"vllm/platforms.py": "import time; time.sleep(60)"}, "did not answer in 2 s"),
        ({"vllm/platforms.py": "while True: print('x' * 100000)"}, "File too large"),
        ({"vllm/platforms.py": "import os; os._exit(3)"}, "ended with exit status 3 and said nothing"),
    ],
)
def test_a_parser_that_cannot_run_is_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], reason: str
) -> None:
    monkeypatch.setattr(arguments, "_without_rights", lambda _: [])
    plan = made(tmp_path / "engine", VLLM | files)
    (tmp_path / "serve.yaml").write_text(GOOD)
    found = arguments.ask(plan, tmp_path, {"index": 0, "port": 18100}, seconds=2)
    assert (found.checked, found.refused) == (False, ())
    assert reason in found.reason


def test_without_the_engine_nothing_is_checked(tmp_path: Path) -> None:
    plan = {"name": "chat", "engine": "sglang", "engine_folder": "/nowhere", "engine_version": "9", "model_path": "/m"}
    (failure,) = arguments.refused(plan, tmp_path, {"index": 0, "port": 1})
    assert failure.code == arguments.NOT_CHECKED
    assert "not checked by SGLang 9: the engine is not installed: there is no /nowhere/bin/python" in failure.sentence()


def test_a_check_sees_no_gpu_and_nothing_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    plan = {"engine_folder": "/e", "environment": [{"name": "VLLM_HOST_IP", "value": "127.0.0.1", "why": "loopback"}]}
    found = arguments.environment(plan, "/tmp/home")
    assert (found["CUDA_VISIBLE_DEVICES"], found["VLLM_HOST_IP"], found["HOME"]) == ("", "127.0.0.1", "/tmp/home")
    assert "HF_TOKEN" not in found


def test_root_gives_a_check_to_the_engines_user_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("os.chown", lambda *_: None)
    words = arguments._without_rights(tmp_path)
    assert words[:2] == ["unshare", "--net"]
    assert {"--clear-groups", "--no-new-privs"} < set(words)
    assert not {"--reuid=0", "--regid=0"} & set(words)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt_llm"])
def test_the_server_part_carries_the_checkers(tmp_path: Path, engine: str) -> None:
    with zipfile.ZipFile(io.BytesIO(zipapp.build().content)) as archive:
        archive.extractall(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from gpuready.serving import arguments as a; "
    done = subprocess.run(
        [sys.executable, "-I", "-c", code + f"print(a.__file__, a.program({engine!r}), sep='\\n')"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    place, program = done.stdout.split("\n", 1)
    assert place.startswith(str(tmp_path))
    assert f"{engine}_arguments" in program
    compile(program, engine, "exec")


WHO = """#!/bin/sh
interfaces=$(tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' ' | tr '\\n' ',')
rights=$(grep -E '^(NoNewPrivs|CapEff|CapBnd)' /proc/self/status | tr -d '\\t' | tr '\\n' ' ')
echo "$(id -u) $(stat -c %u "$HOME") $(id -G | tr ' ' ,) $interfaces <$CUDA_VISIBLE_DEVICES> $rights" >&2
exit 1
"""
"""Says who it is and what it reaches, which becomes the reason why it could not be asked."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_check_by_root_has_no_rights_and_reaches_nothing(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(WHO)
    (tmp_path / "bin/python").chmod(0o755)
    plan = {"name": "chat", "engine": "vllm", "engine_folder": str(tmp_path), "model": "m", "model_path": "/m"}
    found = arguments.ask(plan, tmp_path, {"index": 0, "port": 1})
    uid, owner, groups, interfaces, gpus, *rights = found.reason.split()
    assert (int(uid) > 0, owner == uid, "0" in groups.split(","), interfaces, gpus) == (True, True, False, "lo,", "<>")
    assert rights == ["CapEff:0000000000000000", "CapBnd:0000000000000000", "NoNewPrivs:1"]

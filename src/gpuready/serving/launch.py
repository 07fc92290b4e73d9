"""How each engine is started: the program, and the words that follow it.

A release's `serve.yaml` holds all that its deployment shares. What is the replica's own, its port, is said beside it.

Sources: vllm/entrypoints/openai/api_server.py of 0.8.5 to 0.33.0; sglang/launch_server.py of 0.5.10.post1 and 0.5.23;
tensorrt_llm/commands/serve.py and serve/openai_server.py of 1.0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

SERVE_FILE = "serve.yaml"
"""The file of a release that the engine itself reads."""


def words(plan: Mapping[str, Any], release: Path, part: Mapping[str, Any]) -> list[str]:
    """Return the argument vector by which a replica's engine is started, the program's full path first.

    `plan` is the plan of the deployment, `release` the folder of its rendered files, `part` the replica's own part.
    """
    return _WORDS[plan["engine"]](plan, release / SERVE_FILE, int(part["port"]))


def served_name(plan: Mapping[str, Any]) -> str:
    """Return the name under which the engine itself serves the model; it stands in its answers and in /v1/models.

    TensorRT-LLM 1.0.0 has no option for it: a model that lies in a folder has the folder's name.
    """
    if plan["engine"] == "tensorrt_llm":
        return PurePosixPath(plan["model_path"]).name
    return str(plan["model"])


def _vllm(plan: Mapping[str, Any], file: Path, port: int) -> list[str]:
    """Return the words of vLLM's server.

    0.8.5 takes the first word for a subcommand and puts the options of the file behind it: it must be whole in itself.
    """
    return [_python(plan), "-m", "vllm.entrypoints.openai.api_server", f"--port={port}", "--config", str(file)]


def _sglang(plan: Mapping[str, Any], file: Path, port: int) -> list[str]:
    return [_python(plan), "-m", "sglang.launch_server", "--config", str(file), "--port", str(port)]


def _tensorrt_llm(plan: Mapping[str, Any], file: Path, port: int) -> list[str]:
    """Return the words of `trtllm-serve`, which takes model, backend and address from nowhere else.

    The script is handed to the environment's own Python, so that the length of its first line does not matter.
    """
    script = f"{plan['engine_folder']}/bin/trtllm-serve"
    where = ["--host", "127.0.0.1", "--port", str(port)]
    options = ["--backend", "pytorch", *where, "--extra_llm_api_options", str(file)]
    return [_python(plan), script, plan["model_path"], *options]


def _python(plan: Mapping[str, Any]) -> str:
    return f"{plan['engine_folder']}/bin/python"


_WORDS: dict[str, Callable[[Mapping[str, Any], Path, int], list[str]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "tensorrt_llm": _tensorrt_llm,
}

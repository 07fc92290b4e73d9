"""Has the engine's own argument parser read a release's file before anything is stopped for it.

The parser runs inside the engine's environment, as the engines' user, without network, with a time limit and without a
GPU. What it says is handed on in its own words. Where it cannot run that is said too, and is never taken for a yes.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import os
import pwd
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gpuready.outcome import Failure
from gpuready.serving import launch
from gpuready.serving.layout import ENGINE_USER

NOT_CHECKED = "engine.arguments_not_checked"
"""Code of the answer of an engine whose parser could not be asked."""
REFUSED = "engine.arguments"
SECONDS = 180
"""Importing an engine for the first time takes half a minute on a slow disk (vLLM 0.19.1: 11 to 14 s on two cores)."""
MOST_BYTES = 1 << 20
"""Of what a check writes: an engine that prints without end fills no disk."""
_MODULES = ("parsing", "{engine}_arguments", "arguments")


@dataclass(frozen=True)
class Answer:
    """What an engine's parser made of a file."""

    checked: bool
    version: str = ""
    reason: str = ""
    """Why it was not checked."""
    refused: tuple[Mapping[str, str], ...] = ()
    """flag, said and near of everything that is wrong."""


def refused(plan: Mapping[str, Any], release: Path, part: Mapping[str, Any]) -> list[Failure]:
    """Return what the engine itself refuses of a release; empty when its parser takes the file just as it is written.

    `plan` is the plan of the deployment, `release` the folder of its files, `part` one replica's own part. A failure
    with the code NOT_CHECKED says that the parser could not be asked, and why.
    """
    found = ask(plan, release, part)
    where = f"deployment {plan['name']}"
    engine = _title(plan, found.version)
    if not found.checked:
        what = f"{where}: the arguments were not checked by {engine}"
        return [Failure(NOT_CHECKED, what, found.reason, "the start itself shows whether it takes them")]
    return [_failure(where, engine, one) for one in found.refused]


def _failure(where: str, engine: str, one: Mapping[str, str]) -> Failure:
    flag = f", flag {one['flag']}" if one["flag"] else ""
    what = f"{where}{flag} is refused by {engine}"
    near = f"did you mean {one['near']}?" if one["near"] and one["near"] != one["flag"] else ""
    return Failure(
        REFUSED, what, one["said"], near or f"correct it under flags, or in your template of {launch.SERVE_FILE}"
    )


def _title(plan: Mapping[str, Any], version: str) -> str:
    names = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}
    return f"{names[plan['engine']]} {version or plan.get('engine_version', '')}".strip()


def ask(plan: Mapping[str, Any], release: Path, part: Mapping[str, Any], seconds: int = SECONDS) -> Answer:
    """Return what the engine's parser makes of a release's file."""
    python, *words = launch.words(plan, release, part)
    if not Path(python).exists():
        return Answer(checked=False, reason=f"the engine is not installed: there is no {python}")
    # Without the module or script that follows the program; the checker calls what that would call.
    arguments = words[1:] if plan["engine"] == "tensorrt_llm" else words[2:]
    job = {"engine": plan["engine"], "arguments": arguments, "file": str(release / launch.SERVE_FILE)}
    with tempfile.TemporaryDirectory(prefix="gpuready-arguments-") as home:
        command = [*_without_rights(Path(home)), python, "-I", "-B", "-", json.dumps(job)]
        return _answer(command, program(plan["engine"]), environment(plan, home), home, seconds)


def program(engine: str) -> str:
    """Return the checker of an engine as one program, each of its modules whole."""
    package = importlib.resources.files("gpuready_engine")
    names = [one.format(engine=engine) for one in _MODULES]
    sources = {name: package.joinpath(f"{name}.py").read_text(encoding="utf-8") for name in names}
    return _BOOTSTRAP.format(sources=sources)


_BOOTSTRAP = """\
import sys, types
package = sys.modules["gpuready_engine"] = types.ModuleType("gpuready_engine")
package.__path__ = []
for name, source in {sources!r}.items():
    module = sys.modules["gpuready_engine." + name] = types.ModuleType("gpuready_engine." + name)
    exec(compile(source, name + ".py", "exec"), module.__dict__)
sys.modules["gpuready_engine.arguments"].main()
"""


def environment(plan: Mapping[str, Any], home: str) -> dict[str, str]:
    """Return the environment of a check: the deployment's own, but with a home of its own and without GPUs."""
    return {
        **variables(plan),
        "PATH": f"{plan['engine_folder']}/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        **dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "VLLM_CACHE_ROOT"), home),
        **dict.fromkeys(("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"), "1"),
        # Offline, vLLM looks for the model while it reads its arguments; the model is not what is checked here.
        "HF_HUB_OFFLINE": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "CUDA_VISIBLE_DEVICES": "",
    }


def variables(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a deployment by name, of a plan in either form: a mapping, or a list with reasons."""
    found = plan.get("environment") or {}
    if isinstance(found, Mapping):
        return {name: str(value) for name, value in found.items()}
    return {one["name"]: str(one["value"]) for one in found}


def _without_rights(home: Path) -> list[str]:
    """Return the words that make a program one of the engines' user, without network; only root can do so."""
    if os.geteuid() != 0:
        return []
    try:
        user = pwd.getpwnam(ENGINE_USER)
        uid, gid = user.pw_uid, user.pw_gid
    except KeyError:
        uid = gid = 65534  # before the stage that makes it: nobody
    os.chown(home, uid, gid)
    identity = [f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
    return ["unshare", "--net", "--ipc", "--", "setpriv", *identity, "--"]


def _answer(command: Sequence[str], source: str, settings: Mapping[str, str], home: str, seconds: int) -> Answer:
    """Run a check; return its answer, or why there is none."""
    with tempfile.TemporaryFile() as answered, tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            ["prlimit", f"--fsize={MOST_BYTES}", "--core=0", "--", *command],
            stdin=subprocess.PIPE,
            stdout=answered,
            stderr=said,
            env=dict(settings),
            cwd=home,
            start_new_session=True,
        )
        try:
            process.communicate(source.encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            return Answer(checked=False, reason=f"its parser did not answer in {seconds} s")
        finally:
            _end(process)
        answered.seek(0)
        try:
            found = json.loads(answered.read(MOST_BYTES))
            refusals = tuple(dict(one) for one in found["refused"])
            return Answer(bool(found["checked"]), str(found["version"]), str(found["reason"]), refusals)
        except (ValueError, KeyError, TypeError):
            return Answer(checked=False, reason=_last_line(said, process.returncode))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a check and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(said: IO[bytes], status: int) -> str:
    """Return the last thing that a failed check said."""
    said.seek(0)
    lines = [line for line in said.read(MOST_BYTES).decode(errors="replace").splitlines() if re.search(r"\w", line)]
    return lines[-1][:500] if lines else f"its parser ended with exit status {status} and said nothing"

"""Has the engines' real parsers read every golden file and every planted mistake, and keeps what they said.

    .venv/bin/python -m tests.unit.engine_parsers NAME ...     makes the environments of these, asks, and records

NAME is a lock of the catalog for this Python (vllm-0.19.1-cu128-py311). An environment takes up to 11 GB below
.cache and is removed afterwards unless --keep is said. Without a name the page is written anew from what is recorded.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.unit import engine_mistakes, golden_files

from gpuready import catalog
from gpuready.serving import arguments, launch

ROOT = golden_files.ROOT
ENVIRONMENTS = ROOT / ".cache/engines"
RECORDS = ROOT / "tests/unit/data/parsers"
PAGE = ROOT / "docs/engine-parsers.md"
PART = {"index": 0, "port": 18100}


@dataclass(frozen=True)
class Engine:
    """One engine of a stack, for this Python."""

    stack: str
    engine: str
    version: str
    lock: str

    @property
    def folder(self) -> Path:
        """The environment that this machine has of it, or will have."""
        return ENVIRONMENTS / self.lock


def engines() -> Iterator[Engine]:
    """Yield every engine whose lock for this Python is in the catalog."""
    python = f"{sys.version_info.major}{sys.version_info.minor}"
    for stack, entry in golden_files.stacks().items():
        for engine, one in entry["engines"].items():
            lock = one["lock"].format(py=python)
            if catalog.has_lock(lock):
                yield Engine(stack, engine, one["version"], lock)


def make(one: Engine) -> None:
    """Make an environment from its lock, by hash, with nothing built."""
    if one.folder.exists():
        return
    tool = catalog.load("stacks")["tools"]["uv"]
    program = ROOT / f".cache/uv-{tool['version']}/bin/uv"  # as scripts/lock makes it
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    building = one.folder.with_name(f"{one.folder.name}.new")
    shutil.rmtree(building, ignore_errors=True)
    subprocess.run([program, "venv", "--quiet", "--no-config", "-p", sys.executable, building], check=True)
    lock = ROOT / f"src/gpuready/catalog/locks/{one.lock}.txt"
    options = ["--quiet", "--no-config", "--no-cache", "--no-deps", "--require-hashes", "--no-build"]
    subprocess.run([program, "pip", "install", "--python", building, *options, "-r", lock], check=True)
    # Nothing of it is started by a script, whose first line would name the former folder.
    building.rename(one.folder)


def plan(one: Engine) -> dict[str, Any]:
    """Return what of a plan a check of arguments reads."""
    return {
        "name": "chat",
        "engine": one.engine,
        "engine_version": one.version,
        "engine_folder": str(one.folder),
        "model": golden_files.LLAMA,
        "model_path": "/data/models/plain",
    }


def ask(one: Engine, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return what an engine's parser says of each of these files, by name; one process reads them all."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = {}
        for number, (name, text) in enumerate(texts.items()):
            release = Path(folder, str(number))
            release.mkdir()
            (release / launch.SERVE_FILE).write_text(text, encoding="utf-8")
            words = launch.words(plan(one), release, PART)[3:]
            jobs[name] = {"engine": one.engine, "arguments": words, "file": str(release / launch.SERVE_FILE)}
        source = arguments.program(one.engine).replace("].main()", "]")
        asked = f"checked = sys.modules['gpuready_engine.arguments'].checked\n{_EACH}"
        (Path(folder) / "jobs.json").write_text(json.dumps(jobs))
        done = subprocess.run(
            [one.folder / "bin/python", "-I", "-B", "-", f"{folder}/jobs.json", f"{folder}/answers.json"],
            input=f"{source}\n{asked}", text=True, capture_output=True, check=False, cwd=folder, timeout=1200,
            env=arguments.environment(plan(one), folder),
        )  # fmt: skip
        answers = Path(folder, "answers.json")
        if not answers.exists():
            raise RuntimeError(done.stderr[-2000:])
        found: dict[str, Any] = json.loads(answers.read_text())
        return found


_EACH = """
import json
jobs = json.load(open(sys.argv[1]))
json.dump({name: checked(job) for name, job in jobs.items()}, open(sys.argv[2], "w"))
import os
os._exit(0)
"""


def golden(one: Engine) -> dict[str, str]:
    """Return the golden files of a release of an engine, of every stack that has it, by stack and case."""
    stacks = (name for name, entry in golden_files.stacks().items() if _has(entry, one))
    paths = [path for name in stacks for path in sorted((golden_files.FOLDER / name / one.engine).glob("*/serve.yaml"))]
    return {f"{path.parts[-4]}/{path.parts[-2]}": path.read_text(encoding="utf-8") for path in paths}


def _has(stack: Mapping[str, Any], one: Engine) -> bool:
    return bool(stack["engines"].get(one.engine, {}).get("version") == one.version)


def planted(one: Engine) -> dict[str, str]:
    """Return the plain file of an engine with each mistake in it, by the mistake."""
    plain = yaml.safe_load(golden(one)[f"{one.stack}/plain"])
    return {
        title(mistake): yaml.safe_dump({**plain, mistake.flag: mistake.value})
        for mistake in engine_mistakes.of_release(one.engine, one.version)
    }


def title(mistake: engine_mistakes.Mistake) -> str:
    """Return a mistake as it is named to people."""
    return f"{mistake.flag}: {json.dumps(mistake.value)} ({mistake.kind})"


def asked(one: Engine) -> dict[str, Any]:
    """Return what an engine's parser says of every golden file and of every planted mistake."""
    answers = ask(one, {**{f"golden {name}": text for name, text in golden(one).items()}, **planted(one)})
    return {
        "engine": one.engine,
        "version": one.version,
        "stack": one.stack,
        "lock": one.lock,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "golden": {name.removeprefix("golden "): told(said) for name, said in answers.items() if "golden " in name},
        "mistakes": {name: told(said) for name, said in answers.items() if "golden " not in name},
    }


def record(one: Engine, note: str = "") -> None:
    """Keep what an engine's parser says; `note` is what is to be said of its environment."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"note": note, **asked(one)}, indent=1, ensure_ascii=False) + "\n"
    (RECORDS / f"{one.engine}-{one.version}.json").write_text(text, encoding="utf-8")


def recorded() -> list[dict[str, Any]]:
    """Return all that is recorded, by engine and version."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in RECORDS.glob("*.json")]
    return sorted(
        found, key=lambda one: (one["engine"] != "vllm", one["engine"], engine_mistakes.numbers(one["version"]))
    )


def told(said: Mapping[str, Any]) -> list[str]:
    """Return an answer as sentences: none where the file is accepted."""
    if not said["checked"]:
        return [f"not checked: {said['reason']}"]
    return [f"{one['flag']}: {one['said']}"[:300] for one in said["refused"]]


def main() -> None:
    """Run the command."""
    from tests.unit.engine_parsers_page import page

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--keep", action="store_true", help="do not remove the environments")
    parser.add_argument("--note", default="", help="what the page shall say of these environments")
    said = parser.parse_args()
    for one in (one for one in engines() if one.lock in said.names):
        make(one)
        record(one, said.note)
        if not said.keep:
            shutil.rmtree(one.folder)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

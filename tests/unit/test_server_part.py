"""gpuready.pyz: one file, the same bytes from the same sources, and a command line that never shows a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from gpuready.cli.main import NOUNS
from gpuready.rendering import zipapp


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = zipapp.build().write_to(tmp_path_factory.mktemp("pyz"))
    path.chmod(0o755)
    return path


def run(pyz: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    # -I and -S: nothing of this environment, as on a server.
    return subprocess.run(
        [sys.executable, "-I", "-S", str(pyz), *words], input=stdin, capture_output=True, text=True, check=False
    )


def test_same_sources_same_bytes() -> None:
    assert zipapp.build() == zipapp.build()


def test_nothing_of_the_controller_is_in_it(pyz: Path) -> None:
    names = zipfile.ZipFile(pyz).namelist()
    controller = ("gpuready/spec/", "gpuready/rendering/", "gpuready/benchmark/")
    assert not [name for name in names if name.startswith(controller)]
    assert not [name for name in names if not name.endswith((".py", ".json"))]
    assert "pynvml.py" in names
    assert json.loads(zipfile.ZipFile(pyz).read("gpuready/catalog/gpus.json"))["cards"]["h100-80gb-sxm"]


@pytest.mark.parametrize("noun", [noun for noun in NOUNS if noun != "spec"])
def test_every_noun_loads_without_our_environment(pyz: Path, noun: str) -> None:
    answer = run(pyz, noun, "--help")
    assert answer.returncode == 0, answer.stderr
    assert f"gpuready {noun}" in answer.stdout


def test_facts_of_this_machine(pyz: Path) -> None:
    answer = run(pyz, "facts", "show", "--json", stdin='{"paths": ["/no/such/path"]}')
    data: dict[str, Any] = json.loads(answer.stdout)["data"]
    assert data["filesystems"]["/no/such/path"]["free_bytes"] > 0
    assert data["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.mark.parametrize(
    ("words", "stdin", "code", "text"),
    [
        (("spec", "check"), "", 3, "runs on the controller only"),
        (("facts", "show"), "{", 2, "standard input is not JSON"),
        (("facts", "show"), "[]", 2, "standard input is not a JSON object"),
        (("release", "apply", "--check"), "{}", 2, "a part is missing"),
        (("deployment", "run", "nope"), "", 3, "'nope' is not a replica"),
        (("deployment", "ready", "nope.0"), "", 3, "replica nope.0 has no release on this server"),
        (("agent", "install", "--input", "x"), "", 2, "unrecognized arguments"),
    ],
)
def test_refusals_are_sentences(pyz: Path, words: tuple[str, ...], stdin: str, code: int, text: str) -> None:
    answer = run(pyz, *words, stdin=stdin)
    assert answer.returncode == code
    assert text in answer.stderr
    assert "Traceback" not in answer.stderr


def test_json_carries_code_what_why_and_fix(pyz: Path) -> None:
    answer = run(pyz, "facts", "show", "--json", stdin="{")
    (failure,) = json.loads(answer.stdout)["failures"]
    assert failure["code"] == "input.not_json"
    assert set(failure) == {"code", "what", "why", "fix"}

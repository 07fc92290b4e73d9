"""gpuready.pyz: one file, the same bytes from the same sources, and a command line that never shows a traceback."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gpuready.cli.main import NOUNS
from gpuready.rendering import zipapp

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = zipapp.build().write_to(tmp_path_factory.mktemp("pyz"))
    path.chmod(0o755)
    return path


def load_action() -> ModuleType:
    spec = importlib.util.spec_from_file_location("action_gpuready", ROOT / "plugins/action/gpuready.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(pyz: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    # -I and -S: nothing of this environment, as on a server.
    return subprocess.run(
        [sys.executable, "-I", "-S", str(pyz), *words], input=stdin, capture_output=True, text=True, check=False
    )


def damage(pyz: Path, folder: Path, member: str) -> Path:
    """Return a copy, under the same name, with zeros within one of its members, as a power cut leaves them."""
    content = bytearray(pyz.read_bytes())
    # The offsets of a zip that begins with another line are those within the file.
    entry = zipfile.ZipFile(pyz).getinfo(member)
    begin = content.index(member.encode(), entry.header_offset) + len(member)
    content[begin + 20 : begin + 60] = bytes(40)
    copy = folder / pyz.name
    copy.write_bytes(content)
    return copy


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("member", ["gpuready/cli/facts.py", "gpuready/catalog/gpus.json", "pynvml.py"])
def test_a_part_that_is_damaged_where_it_is_read_late_does_not_begin(
    pyz: Path, tmp_path: Path, member: str, link: bool
) -> None:
    part = damage(pyz, tmp_path, member)
    if link:
        (tmp_path / "gpuready.pyz").symlink_to(part)
    answer = run(tmp_path / "gpuready.pyz" if link else part, "facts", "show", "--json", stdin="{}")
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert answer.stderr == f"{part}{zipapp.DAMAGED}\n"


@pytest.mark.parametrize("member", ["__main__.py", "gpuready/cli/main.py", "gpuready/cli/facts.py", "pynvml.py"])
def test_a_damaged_part_is_carried_anew(pyz: Path, tmp_path: Path, member: str) -> None:
    marks = load_action().NEVER_BEGAN
    answer = run(damage(pyz, tmp_path, member), "facts", "show", "--json", stdin="{}")
    assert answer.returncode != 0
    assert any(mark in answer.stderr for mark in marks), answer.stderr


def test_a_part_under_another_name_is_not_compared_with_it(pyz: Path, tmp_path: Path) -> None:
    other = tmp_path / "mine.pyz"
    other.write_bytes(pyz.read_bytes())
    assert run(other, "--version").returncode == 0


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
        *((("memory", "diagnose", name), "", 3, f"{name!r} is not a replica") for name in ("/etc", "../../x.0")),
        (("model", "check"), '{"models": [{"model": "m", "path": 1}]}', 2, "Input key models is not a list of"),
        (("model", "list"), '{"store": 1}', 2, "Input key store is 1; give the path of a folder"),
        (("model", "bring"), '{"models": [], "store": 1}', 2, "Input key store is 1; give {mount: ..., disk: ...}"),
        (("deployment", "ready", "nope.0"), "", 3, "replica nope.0 has no release on this server"),
        (("agent", "install", "--input", "x"), "", 2, "--input is not taken here"),
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


def test_a_server_plans_by_a_configuration_and_knows_no_models_by_name(pyz: Path, tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"intermediate_size": 128, "vocab_size": 1000, "max_position_embeddings": 8192}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "model_type": "llama", "torch_dtype": "bfloat16"}))
    made = run(pyz, "plan", "make", "--config", str(path), "--gpu", "h100")
    assert (made.returncode, made.stderr) == (0, "")
    assert "KV cache" in made.stdout
    named = run(pyz, "plan", "make", "--model", "Qwen/Qwen3-8B", "--gpu", "h100")
    assert named.returncode == 2
    assert named.stderr.endswith("on the controller only; give the model's config.json with --config.\n")
    drawn = run(pyz, "plan", "make", "--config", str(path), "--gpu", "h100", "--svg", str(tmp_path / "p.svg"))
    assert (drawn.returncode, drawn.stderr.partition(": ")[2]) == (
        3,
        "--svg: pictures are made on the controller only; run it from the checkout's .venv.\n",
    )

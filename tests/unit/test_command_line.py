"""The command line itself: options of verbs, refusals in one sentence, files that it is given, completion."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuready.cli import completion, main, reading
from gpuready.cli.verb import Call, Option, Verb, number, whole
from gpuready.outcome import Exit, Refusal, Result

OPTIONS = (
    Option("gpus", "how many", "N", whole(1, 64), default=1),
    Option("share", "how much", "PART", number(0.1, 1)),
    Option("kind", "of what kind", "KIND", choices=lambda: ("whole", "half")),
    Option("set", "settings", "NAME=VALUE", repeatable=True),
    Option("allow-lossy", "also lossy"),
)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Give the noun host one verb that remembers how it was called."""
    calls: list[Call] = []

    def run(call: Call) -> Result:
        calls.append(call)
        return Result(summary="short", page="laid out", data={"answer": 42})

    verbs = {"look": Verb("look", run, arguments=["name"], options=OPTIONS), "touch": Verb("touch", run, changes=True)}
    monkeypatch.setattr(main, "_verbs", lambda _: verbs)
    return calls


def test_options_have_their_types_and_defaults(seen: list[Call]) -> None:
    main.run(["host", "look", "here", "--gpus", "8", "--share=0.5", "--set", "a=1", "--set", "b=2", "--allow-lossy"])
    main.run(["host", "look", "here"])
    assert seen[0].arguments == ["here"]
    assert seen[0].options == {
        "gpus": 8, "share": 0.5, "kind": None, "set": ["a=1", "b=2"], "allow_lossy": True,
    }  # fmt: skip
    assert seen[1].options == {"gpus": 1, "share": None, "kind": None, "set": None, "allow_lossy": False}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["host", "look", "x", "--gpus", "0"],
            "gpuready host look: argument --gpus: '0' is refused, allowed is a whole number from 1 to 64; "
            "see gpuready host look --help.",
        ),
        (
            ["host", "look", "x", "--gpus", "1" * 5000],
            f"gpuready host look: argument --gpus: '{'1' * 5000}' is refused, allowed is a whole number from 1 to 64; "
            "see gpuready host look --help.",
        ),
        (
            ["host", "look", "x", "--share", "nan"],
            "gpuready host look: argument --share: 'nan' is refused, allowed is a number from 0.1 to 1; "
            "see gpuready host look --help.",
        ),
        (
            ["host", "look", "x", "--kind", "hale"],
            "gpuready host look: argument --kind: 'hale' is refused, did you mean half?; "
            "see gpuready host look --help.",
        ),
        (
            ["host", "look", "x", "--gpu", "3"],
            "gpuready host look: --gpu is not taken here; did you mean --gpus?",
        ),
        (
            ["host", "look", "x", "--zzz"],
            "gpuready host look: --zzz is not taken here; see gpuready host look --help.",
        ),
        (
            ["host", "look"],
            "gpuready host look: the following arguments are required: NAME; see gpuready host look --help.",
        ),
        (["host", "lock"], "gpuready host lock: no such verb; did you mean look?"),
        (["hots", "look"], "gpuready hots: no such noun; did you mean host?"),
        ([], "gpuready: the following arguments are required: NOUN; see gpuready --help."),
    ],
)
def test_a_wrong_command_line_is_one_sentence(words: list[str], sentence: str, seen: list[Call]) -> None:
    result, as_json = main.run([*words, "--json"])
    assert [failure.sentence() for failure in result.failures] == [sentence]
    assert (result.exit, as_json, seen) == (Exit.REFUSED, True, [])


def test_people_read_the_page_and_machines_the_data(seen: list[Call], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["host", "look", "x"]) == 0
    assert capsys.readouterr().out == "laid out\n"
    assert main.main(["host", "look", "x", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["summary"], shown["data"]) == ("short", {"answer": 42})
    assert "page" not in shown


def test_a_contract_of_its_own_is_printed_bare_but_a_refusal_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(call: Call) -> Result:
        if call.arguments[0] == "no":
            raise Refusal([])
        return Result(data={"records": []}, bare=True)

    monkeypatch.setattr(main, "_verbs", lambda _: {"look": Verb("look", run, arguments=["name"])})
    main.main(["host", "look", "yes", "--json"])
    assert json.loads(capsys.readouterr().out) == {"records": []}
    assert main.main(["host", "look", "no", "--json"]) == 2
    assert set(json.loads(capsys.readouterr().out)) >= {"changed", "failures"}


def test_who_stops_reading_gets_no_traceback() -> None:
    command = f"{sys.executable} -m gpuready.cli.main completion zsh | head -c 10"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (found.stdout, found.stderr) == ("#compdef g", "")


@pytest.mark.parametrize("noun", list(main.NOUNS))
def test_every_verb_and_option_says_what_it_is(noun: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, verb in main._verbs(noun).items():
        assert len(verb.help) > 10
        assert all(len(option.help) > 10 for option in verb.options)
        with pytest.raises(SystemExit) as ended:
            main.main([noun, name, "--help"])
        assert ended.value.code == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert all(f"--{option.name}" in shown for option in verb.options)


# -------------------------------------------------------------------------------------------------- files


def _deep(path: Path) -> None:
    path.write_text("[" * 200_000 + "]" * 200_000)


def _binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00\x01")


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(reading.LARGEST + 1)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: path.write_text('{"a": NaN}'), "FILE is not JSON: NaN is no number of JSON."),
        (lambda path: path.write_text('{"a": -Infinity}'), "FILE is not JSON: -Infinity is no number of JSON."),
        (lambda path: path.write_text("[1]"), "FILE is not a JSON object."),
        (lambda path: path.write_text("{"), "FILE is not JSON: Expecting property name enclosed in double quotes"),
        (lambda path: path.write_text('{"a": %s}' % ("9" * 5000)), "FILE is not JSON: a number has 5000 digits"),
        (_deep, "FILE is nested too deeply."),
        (_binary, "FILE is not UTF-8 text."),
        (_large, "FILE is larger than 64 MiB."),
        (lambda path: path.mkdir(), "FILE cannot be read: Is a directory."),
        (lambda path: None, "FILE cannot be read: No such file or directory."),
    ],
)
def test_a_file_that_is_no_json_object_is_one_sentence(
    tmp_path: Path, make: Callable[[Path], Any], sentence: str
) -> None:
    path = tmp_path / "given.json"
    make(path)
    with pytest.raises(Refusal) as refusal:
        reading.object_of(str(path))
    (failure,) = refusal.value.failures
    assert failure.sentence().startswith(sentence.replace("FILE", str(path)))
    assert refusal.value.exit == Exit.REFUSED


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [1", "FILE, line 1 is not YAML: "),
        ("- 1", "FILE holds no mapping of keys to values."),
        ("", "FILE holds no mapping of keys to values."),
        ("a: 2026-13-45", "FILE is not YAML: month must be in 1..12"),
        ("[" * 20_000, "FILE is nested too deeply."),
        ("a: !!python/object/apply:os.system [x]", "FILE, line 1 is not YAML: "),
    ],
)
def test_a_file_that_is_no_yaml_mapping_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "given.yml"
    path.write_text(text)
    with pytest.raises(Refusal) as refusal:
        reading.mapping_of(str(path))
    (failure,) = refusal.value.failures
    assert failure.sentence().startswith(sentence.replace("FILE", str(path)))


# --------------------------------------------------------------------------------------------- completion


def completed(*words: str) -> list[str]:
    """Return what bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    script = f"""
source <("{sys.executable}" -m gpuready.cli.main completion bash)
COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}
_gpuready
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert found.stderr == ""
    return found.stdout.split()


def test_bash_completes_nouns_verbs_and_options() -> None:
    assert completed("gpuready", "dep") == ["deployment"]
    assert completed("gpuready", "plan", "expl") == ["explain"]
    assert "--check" in completed("gpuready", "host", "settle", "--")
    assert "--check" not in completed("gpuready", "facts", "show", "--")


def test_values_of_options_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    verb = Verb("look", lambda _: Result(), options=OPTIONS)
    monkeypatch.setattr(completion, "_tables", lambda: {"host": {"look": verb}})
    assert "\"host look --kind\") choice='whole half' ;;" in completion.script("bash")
    assert '"host look --kind") choice=(whole:KIND half:KIND) ;;' in completion.script("zsh")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_can_read_its_script() -> None:
    found = subprocess.run(["zsh", "-n"], input=completion.script("zsh"), text=True, capture_output=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")

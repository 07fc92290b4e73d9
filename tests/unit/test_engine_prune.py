"""Former engines: kept for going back, pruned by policy, and nothing touched that gpuready did not make."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gpuready.cli.engine import VERBS
from gpuready.cli.verb import Call
from gpuready.operations import packages
from gpuready.outcome import Refusal, Result
from gpuready.planning.engines import folder_name
from gpuready.serving import engine_store, pythons

PYTHON = ".".join(map(str, sys.version_info[:3]))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "opt/gpuready"
    (place / "engines").mkdir(parents=True)
    return place


def digest(day: int) -> str:
    return f"{day:012x}{'0' * 52}"


def engine(root: Path, version: str, name: str = "vllm", day: int = 1, whole: bool = True) -> Path:
    """Plant an engine's folder, read-only as a real one."""
    folder = root / "engines" / folder_name(name, version, digest(day))
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to(sys.executable)
    marker = {"engine": name, "version": version, "lock_sha256": digest(day)}
    running = {"python": PYTHON, "python_path": sys.executable, "built_at": f"2026-11-{day:02}T00:00:00+00:00"}
    if whole:
        (folder / engine_store.MARKER).write_text(json.dumps({**marker, **running}))
    else:
        (folder / engine_store.BEGUN).write_text(json.dumps(marker))
    engine_store.seal(folder)
    return folder


def release(state: Path, number: int, folder: Path) -> None:
    place = state / "var/lib/gpuready/releases/chat" / str(number)
    place.mkdir(parents=True)
    (place / "plan.json").write_text(json.dumps({"engine_folder": str(folder)}))


def prune(root: Path, planned: list[Path], *, check: bool = False, **given: object) -> Result:
    state = str(root.parents[1])
    asked = {"root": str(root), "state_root": state, "folders": [str(one) for one in planned], **given}
    return VERBS["prune"].run(Call(asked, [], check=check))


def names(root: Path) -> set[str]:
    return {path.name.rpartition("-")[0] for path in (root / "engines").iterdir()}


def test_the_newest_former_version_of_each_engine_stays(root: Path) -> None:
    for day, version in enumerate(("0.1", "0.2", "0.3", "0.4"), 1):
        engine(root, version, day=day)
    engine(root, "0.5.1", "sglang", 1)
    engine(root, "0.5.2", "sglang", 2)
    planned = [path for path in (root / "engines").iterdir() if "-0.4-" in path.name or "-0.5.2-" in path.name]
    shown = prune(root, planned, check=True)
    assert (shown.changed, len(shown.diff), len(names(root))) == (True, 2, 6)
    done = prune(root, planned)
    assert [one.header for one in done.diff] == [one.header for one in shown.diff]
    assert names(root) == {"vllm-0.4", "vllm-0.3", "sglang-0.5.2", "sglang-0.5.1"}
    again = prune(root, planned)
    assert (again.changed, again.diff, again.summary) == (False, [], "Every engine is needed or kept.")


def test_keep_says_how_many(root: Path) -> None:
    found = [engine(root, f"0.{day}", day=day) for day in (1, 2, 3)]
    assert "vllm-0.1-" in prune(root, found[2:], keep=1).summary
    assert prune(root, found[2:], keep=0).changed
    assert names(root) == {"vllm-0.3"}


def test_what_a_release_on_the_disk_names_stays(root: Path) -> None:
    old, _, new = (engine(root, f"0.{day}", day=day) for day in (1, 2, 3))
    release(root.parents[1], 7, old)
    result = prune(root, [new], keep=0)
    assert names(root) == {"vllm-0.1", "vllm-0.3"}
    assert "vllm-0.2-" in result.summary


def test_without_a_list_the_servers_plan_says_what_is_needed(root: Path) -> None:
    old, new = engine(root, "0.1", day=1), engine(root, "0.2", day=2)
    state = root.parents[1] / "var/lib/gpuready"
    state.mkdir(parents=True)
    (state / "plan.json").write_text(json.dumps({"engines": [{"folder": str(old)}]}))
    assert prune(root, [], keep=0).changed
    assert not new.exists()
    assert old.exists()


def test_what_gpuready_did_not_make_is_left_alone_and_named(root: Path) -> None:
    foreign = [root / "engines/vllm-0.1-by-hand", root / "engines/joe"]
    for folder in foreign:
        folder.mkdir()
    # A marker that belongs to another folder makes it no engine of ours, nor does a link to one.
    moved = engine(root, "0.2", day=2).rename(root / "engines/moved")
    link = engine(root, "0.3", day=3)
    link.symlink_to(link.rename(root / "elsewhere"))
    result = prune(root, [], keep=0)
    assert all(path.exists() for path in (*foreign, moved, link.parent))
    assert link.is_symlink()
    (note,) = result.data["notes"]
    assert "not made by gpuready, and left alone: " in note
    assert {Path(path).name for path in note.partition(": ")[2].split(", ")} == {
        "vllm-0.1-by-hand",
        "joe",
        "moved",
        link.name,
    }


def test_a_half_built_engine_of_ours_goes_and_one_that_is_planned_stays(root: Path) -> None:
    half, wanted = engine(root, "0.1", day=1, whole=False), engine(root, "0.2", day=2, whole=False)
    result = prune(root, [wanted])
    assert not half.exists()
    assert wanted.exists()
    assert result.diff[0].before == f"half-built, {engine_store.MARKER} is missing\n"


def test_a_wrong_number_is_refused(root: Path) -> None:
    with pytest.raises(Refusal, match=r"Input key keep is -1; give a whole number from 0 on"):
        prune(root, [], keep=-1)


# The stage ------------------------------------------------------------------------------------------------------------


def prepare(root: Path, monkeypatch: pytest.MonkeyPatch, folders: list[Path], *, check: bool = False) -> Result:
    monkeypatch.setattr(engine_store, "ROOT", root)
    monkeypatch.setattr(packages, "ensure", lambda *_: Result(summary="Packages are there"))
    left_out = [{"engine": "tensorrt_llm", "version": "1.0.0", "why": "it has no lock."}]
    asked = {"packages": {"names": []}, "folders": list(map(str, folders)), "keep": 1, "left_out": left_out}
    return VERBS["prepare"].run(Call(asked, [], check=check))


def test_room_is_made_only_where_an_engine_is_missing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, older, old, new = (engine(root, f"0.{day}", day=day) for day in (1, 2, 3, 4))
    finished = prepare(root, monkeypatch, [new])
    assert (finished.changed, finished.diff, finished.data["missing"]) == (False, [], [])
    assert finished.data["notes"] == ["tensorrt_llm is left out: it has no lock."]
    newer = root / "engines" / folder_name("vllm", "0.5", digest(5))
    shown = prepare(root, monkeypatch, [newer], check=True)
    assert len(names(root)) == 4
    assert prepare(root, monkeypatch, [newer]).diff == shown.diff
    assert names(root) == {"vllm-0.4"}, "what is replaced is the newest former one"
    assert not older.exists()
    assert not old.exists()


# The Pythons below engines --------------------------------------------------------------------------------------------


def test_an_engine_whose_python_is_gone_or_another_one_is_not_whole(root: Path, tmp_path: Path) -> None:
    folder = engine(root, "0.1")
    assert engine_store.why_not_whole(folder, {}) is None
    marker = json.loads((folder / engine_store.MARKER).read_text())
    folder.chmod(0o755)
    (folder / engine_store.MARKER).unlink()
    (folder / engine_store.MARKER).write_text(json.dumps({**marker, "python_path": str(tmp_path / "gone")}))
    assert engine_store.why_not_whole(folder, {}) == f"built on {tmp_path}/gone: No such file or directory"
    (folder / engine_store.MARKER).write_text(json.dumps({**marker, "python": "3.1.4"}))
    assert str(engine_store.why_not_whole(folder, {})).startswith("built for Python 3.1, the server's ")


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_distributions_pythons_are_those_that_are_what_their_name_says(tmp_path: Path) -> None:
    program(tmp_path / "python3.12", "echo 3.12.3")
    program(tmp_path / "python3.9", "echo 3.12.3")
    program(tmp_path / "python3.8", "exit 1")
    program(tmp_path / "python3.12-config", "echo 3.12.3")
    assert pythons.of_distribution(tmp_path) == {"3.12": str(tmp_path / "python3.12")}


def test_a_look_at_a_python_says_its_version_or_what_is_wrong(tmp_path: Path) -> None:
    assert pythons.look(sys.executable) == {"version": pythons.minor(PYTHON), "problem": ""}
    assert pythons.look(str(tmp_path / "none")) == {"version": "", "problem": "No such file or directory"}
    bare = program(tmp_path / "bare", "echo \"ModuleNotFoundError: No module named 'ensurepip'\" >&2; exit 1")
    assert pythons.look(str(bare))["problem"] == "ModuleNotFoundError: No module named 'ensurepip'"

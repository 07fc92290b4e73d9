from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpuready import catalog
from gpuready.cli.engine import VERBS
from gpuready.cli.verb import Call
from gpuready.outcome import Failed, Failure, MachineCannot, Refusal
from gpuready.serving import engine_store, engines, locks, packages
from gpuready.serving.packages import Source

HERE = f"py{sys.version_info[0]}{sys.version_info[1]}"
LOCK_TEXT = (
    f"engine==1.0 \\\n    --hash=sha256:{'a' * 64}\n# section: cuda-libraries\nlib==2 --hash=sha256:{'b' * 64}\n"
)


@pytest.fixture
def wanted(tmp_path: Path) -> engines.Wanted:
    return engines.Wanted(
        engine="vllm",
        version="1.0",
        lock=locks.parse(f"vllm-1.0-cpu-{HERE}", LOCK_TEXT),
        tool=locks.parse("uv", f"uv==1 --hash=sha256:{'c' * 64}\n"),
        smoke=["engine_of_test"],
        install_gib=0.001,
        source=Source(),
        python=sys.executable,
        root=tmp_path / "opt/gpuready",
    )


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put one module where uv would put the packages; everything around it is real."""
    texts: list[str] = []

    def install(_uv: Path, _workshop: packages.Workshop, folder: Path, requirements: str, _what: str) -> None:
        texts.append(requirements)
        site = next(folder.glob("lib/python3*/site-packages"))
        (site / "engine_of_test.py").write_text("VERSION = 1\n")
        (site / "torch-2.0+cpu.dist-info").mkdir()

    monkeypatch.setattr(packages, "provide_uv", lambda _workshop, _lock: Path("uv"))
    monkeypatch.setattr(packages, "install", install)
    # Another user could not walk through pytest's closed folder.
    monkeypatch.setattr(engines, "_NOBODY", os.geteuid())
    return texts


def test_a_first_run_installs_and_a_second_one_touches_nothing(wanted: engines.Wanted, installed: list[str]) -> None:
    first = engines.install(wanted, check=False)
    assert first.changed
    assert wanted.folder.name == f"vllm-1.0-{wanted.lock.sha256[:12]}"
    marker = json.loads((wanted.folder / engine_store.MARKER).read_text())
    assert marker["lock_sha256"] == wanted.lock.sha256
    assert (marker["torch"], marker["packages"]) == ("2.0+cpu", 2)
    second = engines.install(wanted, check=False)
    assert not second.changed
    assert len(installed) == 1
    assert not (wanted.root / "cache").exists(), "downloads are given back to the disk"


def test_an_engine_is_read_only_and_open_to_every_user_whatever_the_umask(wanted: engines.Wanted) -> None:
    old = os.umask(0o077)
    try:
        engines.install(wanted, check=False)
    finally:
        os.umask(old)
    for path in [wanted.folder, *wanted.folder.rglob("*")]:
        if not path.is_symlink():
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode & 0o222 == 0, path
            assert mode & 0o444 == 0o444, path
            assert not path.is_dir() or mode & 0o111 == 0o111, path
    for path in (wanted.root, wanted.root / "engines"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_check_on_a_blank_server_tells_what_would_come_and_writes_nothing(wanted: engines.Wanted) -> None:
    result = engines.install(wanted, check=True)
    assert result.changed
    assert str(wanted.folder) in result.summary
    assert result.diff[0].before == "not installed\n"
    assert not wanted.root.exists()


def plant_half_built(wanted: engines.Wanted) -> None:
    (wanted.folder / "bin").mkdir(parents=True)
    (wanted.folder / "bin/python").write_text("")


def plant_broken_marker(wanted: engines.Wanted) -> None:
    wanted.folder.mkdir(parents=True)
    (wanted.folder / engine_store.MARKER).write_text('{"engine": "vl')


def plant_other_marker(wanted: engines.Wanted) -> None:
    wanted.folder.mkdir(parents=True)
    other = {"engine": "vllm", "version": "0.9", "lock_sha256": "f" * 64, "python": "3.99.1"}
    (wanted.folder / engine_store.MARKER).write_text(json.dumps(other))


def plant_old_python(wanted: engines.Wanted) -> None:
    engines.install(wanted, check=False)
    marker = json.loads((wanted.folder / engine_store.MARKER).read_text())
    wanted.folder.chmod(0o755)
    (wanted.folder / engine_store.MARKER).chmod(0o644)
    (wanted.folder / engine_store.MARKER).write_text(json.dumps({**marker, "python": "3.1.4"}))
    wanted.folder.chmod(0o555)


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (plant_half_built, "half-built"),
        (plant_broken_marker, "cannot be read"),
        (plant_other_marker, "names version '0.9' instead of '1.0'"),
        (plant_old_python, "built for Python 3.1"),
    ],
)
def test_what_is_not_whole_is_built_anew(wanted: engines.Wanted, plant: object, said: str) -> None:
    assert callable(plant)
    plant(wanted)
    left = wanted.folder / "left-over"
    wanted.folder.chmod(0o755)
    left.write_text("")
    result = engines.install(wanted, check=False)
    assert result.changed
    assert said in result.diff[0].before
    assert not left.exists()
    assert not engines.install(wanted, check=False).changed


def test_a_failed_download_leaves_no_folder_and_says_so(
    wanted: engines.Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Failed(
            packages.explain("vllm 1.0", "error: Failed to fetch: https://x/simple/torch/\n  cause: dns error")
        )

    monkeypatch.setattr(packages, "install", fail)
    with pytest.raises(Failed) as caught:
        engines.install(wanted, check=False)
    assert "kept for the next run" in str(caught.value)
    assert not wanted.folder.exists()


def test_an_engine_that_cannot_be_imported_is_not_taken(wanted: engines.Wanted) -> None:
    with pytest.raises(Failed, match=r"cannot be imported .*No module named 'absent_module'"):
        engines.install(replace(wanted, smoke=["absent_module"]), check=False)
    assert not wanted.folder.exists()


def test_a_full_disk_is_refused_before_anything_is_made(wanted: engines.Wanted) -> None:
    with pytest.raises(MachineCannot, match=r"vllm 1\.0 needs 1000001 GiB under .*GiB are free there"):
        engines.install(replace(wanted, install_gib=1e6), check=True)
    assert not wanted.root.exists()


def test_a_lock_for_another_python_is_refused(wanted: engines.Wanted) -> None:
    other = replace(wanted, lock=locks.parse("vllm-1.0-cpu-py27", LOCK_TEXT))
    with pytest.raises(Refusal, match=r"is for Python 2\.7"):
        engines.install(other, check=True)


def test_a_killed_build_is_never_taken_for_whole(wanted: engines.Wanted, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engines, "_smoke", killed)
        with pytest.raises(KeyboardInterrupt):
            engines.install(wanted, check=False)
    assert wanted.folder.exists()
    (found,) = engine_store.listing(wanted.root / "engines")
    assert found["why"] == f"half-built, {engine_store.MARKER} is missing"
    assert engines.install(wanted, check=False).changed


def test_the_cuda_libraries_stay_away_when_the_cpu_wheel_was_sent(
    wanted: engines.Wanted, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_local_versions", lambda _lock, _wheels: {"torch": "2.0+cpu"})
    engines.install(wanted, check=False)
    assert installed == [f"engine===1.0 \\\n    --hash=sha256:{'a' * 64}\n"]


def test_what_an_interrupted_installation_has_brought_is_counted_once(wanted: engines.Wanted) -> None:
    engines.install(wanted, check=False)
    assert engine_store.begun(wanted.root) == 0
    cached = wanted.root / "cache/uv/wheel"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"x" * 1_000_000)
    half = wanted.root / "engines/vllm-2.0-aaaaaaaaaaaa"
    half.mkdir()
    (half / "wheel").hardlink_to(cached)
    assert 1_000_000 <= engine_store.begun(wanted.root) < 1_100_000


def test_what_an_interrupted_installation_left_goes_when_no_engine_is_missing(wanted: engines.Wanted) -> None:
    engines.install(wanted, check=False)
    assert engine_store.tidy(wanted.root, check=False) == []
    for left in ("cache/uv", ".smoke-1"):
        (wanted.root / left).mkdir(parents=True)
    assert [change.header for change in engine_store.tidy(wanted.root, check=True)] == [
        str(wanted.root / "cache"),
        str(wanted.root / ".smoke-1"),
    ]
    assert (wanted.root / "cache").exists()
    engine_store.tidy(wanted.root, check=False)
    assert sorted(path.name for path in wanted.root.iterdir()) == ["engines"]


def test_list_says_which_engines_are_whole(wanted: engines.Wanted) -> None:
    engines.install(wanted, check=False)
    result = VERBS["list"].run(Call({"root": str(wanted.root)}, [], check=False))
    assert [entry["whole"] for entry in result.data["engines"]] == [True]
    assert result.data["engines"][0]["folder"] == str(wanted.folder)


@pytest.mark.parametrize("name", ["vllm-0.32.0-cpu-py313", "vllm-0.19.1-cu128-py310"])
def test_the_catalog_knows_what_a_lock_needs(name: str) -> None:
    entry = engines.catalog_entry(name)
    assert entry["smoke"]
    assert entry["install_gib"] > entry["download_gib"]
    assert name in {path.stem for path in (Path(catalog.__file__).parent / "locks").glob("*.txt")}


# What uv 0.13.9 and pip 25.1 really said, addresses replaced.
SAID = [
    (
        "error: Failed to fetch: https://user:secret@mirror.example/simple/six/\n"
        "  cause: error sending request for url (https://mirror.example/simple/six/)\n  cause: client error (Connect)\n"
        "  cause: dns error\n  cause: failed to lookup address information: Name or service not known\n",
        "six is missing: the name of https://***@mirror.example/simple/six/ is not known to the server",
    ),
    (
        "error: Failed to fetch: http://127.0.0.1:9/simple/six/\n  cause: client error (Connect)\n"
        "  cause: tcp connect error\n  cause: Connection refused (os error 111)\n",
        "six is missing: http://127.0.0.1:9/simple/six/ does not answer",
    ),
    (
        "Resolved 1 package in 41ms\nerror: Failed to download `six==1.17.0`\n"
        "  cause: Hash mismatch for `six==1.17.0`\n\n  Expected:\n    sha256:00\n",
        "six==1.17.0 is missing: the file that the index offers is not the one that the lock names by hash",
    ),
    (
        "error: No solution found when resolving dependencies\n  cause: Because six was not found in the package"
        " registry and you require six==1.17.0, we can conclude that your requirements are unsatisfiable.\n\n"
        "hint: An index (https://u:p@mirror.example/simple) returned a 403 Forbidden error. Check that the index URL is"
        " correct and the credentials are valid.\n",
        "six==1.17.0 is missing: https://***@mirror.example/simple answers 403",
    ),
    (
        "error: No solution found when resolving dependencies\n  cause: Because there is no version of six==99.17.0 and"
        " you require six==99.17.0, we can conclude that your requirements are unsatisfiable.\n",
        "six==99.17.0 is missing: the index does not hold it",
    ),
    (
        "error: No solution found when resolving dependencies\n  cause: Because docopt==0.6.2 has no usable wheels and"
        " you require docopt==0.6.2, we can conclude that your requirements are unsatisfiable.\n",
        "docopt==0.6.2 is missing: the index offers no wheel that fits",
    ),
    (
        "error: Failed to write to the client cache\n  cause: failed to write to file `/x/.tmpITODpi`: No space left on"
        " device (os error 28)\n",
        "could not be installed: the disk is full",
    ),
    (
        "error: Failed to fetch: http://127.0.0.1:8500/simple/six/\n  cause: HTTP status server error (500 Internal"
        " Server Error) for url (http://127.0.0.1:8500/simple/six/)\n",
        "answers 500 Internal Server Error",
    ),
    ("something new\nlast words\n", "vllm 1.0 could not be installed: last words"),
]


@pytest.mark.parametrize(("said", "sentence"), SAID)
def test_a_failed_download_is_one_sentence_without_credentials(said: str, sentence: str) -> None:
    text = packages.explain("vllm 1.0", said).sentence()
    assert sentence in text
    assert "secret" not in text
    assert "u:p" not in text
    assert "\n" not in text


def test_credentials_travel_in_the_environment_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    calls: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append((command, env))
        return subprocess.CompletedProcess(command, 0, "", "")

    source = Source(
        "https://u:secret@mirror.example/simple", ["https://more.example/simple"], ["https://links.example/"]
    )
    workshop = packages.Workshop(tmp_path, source, sys.executable)
    workshop.cache.mkdir()
    monkeypatch.setattr(subprocess, "run", run)
    packages.install(Path("uv"), workshop, tmp_path / "venv", "one===1\n", "one")
    (command, env) = calls[0]
    assert not any("secret" in word for word in command)
    assert env["UV_DEFAULT_INDEX"] == "https://u:secret@mirror.example/simple"
    assert env["UV_INDEX"] == "https://more.example/simple"
    assert env["UV_FIND_LINKS"] == "https://links.example/"
    assert env["TMPDIR"] == str(workshop.cache / "tmp")
    for option in ("--no-deps", "--require-hashes", "--no-build", "--compile-bytecode"):
        assert option in command


def test_downloads_of_before_the_last_boot_are_thrown_away_and_those_of_this_boot_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = tmp_path / "boot_id"
    monkeypatch.setattr(packages, "BOOT_ID", boot)
    workshop = packages.Workshop(tmp_path / "root", packages.Source("", [], []), sys.executable)
    unpacked, sent = workshop.cache / "uv/archive/WHEEL", workshop.wheels / "torch.whl"
    for file in (unpacked, sent):
        file.parent.mkdir(parents=True)
        file.write_text("")
    for number, kept in (("1", False), ("1", True), ("2", False)):
        unpacked.parent.mkdir(parents=True, exist_ok=True)
        unpacked.write_text("")
        boot.write_text(f"{number}\n")
        workshop.open_cache()
        assert unpacked.exists() is kept, number
        assert sent.exists()


def test_a_damaged_download_is_not_kept_for_the_next_run(
    wanted: engines.Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: object) -> None:
        spoiled = wanted.root / "cache/uv/archive"
        spoiled.mkdir(parents=True, exist_ok=True)
        raise Failed(Failure("engine.install", "it could not be installed", "The wheel is invalid: None"))

    monkeypatch.setattr(packages, "install", damaged)
    with pytest.raises(Failed, match="what was downloaded is thrown away, since it is damaged"):
        engines.install(wanted, check=False)
    assert not (wanted.root / "cache/uv").exists()

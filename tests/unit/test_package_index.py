"""The real uv against indexes on loopback: what scripts/lock records there, and what an engine is installed from."""

from __future__ import annotations

import hashlib
import importlib.util
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.unit.standin_index import Index, served, source, wheel

from gpuready.outcome import Failed
from gpuready.serving import locks, packages
from gpuready.serving.packages import Source, Workshop

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("lock_script", str(ROOT / "scripts/lock"))
    spec = importlib.util.spec_from_loader("lock_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def uv(script: ModuleType) -> Path:
    """The uv that the catalog pins; where it is not in the checkout yet, it comes from the package index."""
    try:
        program = script.uv()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"uv is not in .cache and cannot be fetched: {error}")
    assert isinstance(program, Path)
    return program


@pytest.fixture
def default() -> Iterator[Index]:
    with served(Index(dated=True)) as index:
        yield index


@pytest.fixture
def vendor() -> Iterator[Index]:
    with served(Index(dated=False)) as index:
        yield index


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


# What scripts/lock records --------------------------------------------------------------------------------------------

RECIPE: dict[str, Any] = {
    "requirements": ["engine==1.0+cu129"],
    "exclude_newer": "2026-06-01",
    "undated": ["engine", "meta"],
    "make_wheels": ["meta==1.0"],
}


@pytest.fixture
def stocked(
    default: Index, vendor: Index, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """Fill the indexes as TensorRT-LLM's are; return the hashes of what a lock must name."""
    monkeypatch.setenv("UV_DEFAULT_INDEX", default.address)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / script.uv().parents[1].name).symlink_to(script.uv().parents[1])
    monkeypatch.setattr(script, "ROOT", tmp_path)
    # PyPI has a stub of the same version, the vendor the wheel; and of a dependency a later one came after the date.
    default.add(source("engine", "1.0"))
    default.add(wheel("dependency", "2.0"), "2026-11-01")
    vendor.add(source("meta", "1.0"))
    return {
        "dependency": default.add(wheel("dependency", "1.0"), "2026-02-01"),
        "engine": vendor.add(wheel("engine", "1.0+cu129", ("meta==1.0", "dependency"))),
    }


def test_a_lock_of_a_vendors_index_names_its_wheels_and_the_dependencies_of_its_day(
    stocked: dict[str, str], vendor: Index, script: ModuleType, uv: Path, tmp_path: Path
) -> None:
    text = script.text_of("e-1-py312", "An engine.", RECIPE, "3.12", [vendor.address])
    lock = locks.parse("e-1-py312", text)
    pinned = {one.name: one for one in lock.requirements}
    assert {name: one.version for name, one in pinned.items()} == {
        "dependency": "1.0",
        "engine": "1.0+cu129",
        "meta": "1.0",
    }
    assert pinned["engine"].hashes == [stocked["engine"]]
    assert pinned["dependency"].hashes == [stocked["dependency"]]
    (made,) = (tmp_path / ".cache/wheels/e-1-py312").glob("*.whl")
    assert f"sha256:{hashlib.sha256(made.read_bytes()).hexdigest()}" in pinned["meta"].hashes
    assert "# Beside the default index: 127.0.0.1" in text
    assert "://" not in text
    made.unlink()
    assert script.text_of("e-1-py312", "An engine.", RECIPE, "3.12", [vendor.address]) == text


def test_without_the_word_on_dates_nothing_of_the_vendor_is_found(
    stocked: dict[str, str], vendor: Index, script: ModuleType, uv: Path
) -> None:
    """Why the recipes have `undated`: uv takes a file without a date for one that is too new."""
    with pytest.raises(script.Unmade, match=r"(?s)engine==1\.0\+cu129 cannot be resolved.*exclude-newer"):
        script.text_of("e-1-py312", "", {**RECIPE, "undated": []}, "3.12", [vendor.address])


def test_an_index_that_is_not_reached_leaves_its_lock_and_the_others_are_made(
    stocked: dict[str, str],
    script: ModuleType,
    uv: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    away = f"http://127.0.0.1:{closed_port()}/simple"
    plain = {"requirements": ["dependency"], "exclude_newer": "2026-06-01"}
    both = [("far", "Far.", RECIPE, "3.12", [away]), ("near", "Near.", plain, "3.12", [])]
    monkeypatch.setattr(script, "wanted", lambda: iter(both))
    monkeypatch.setattr(script, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(sys, "argv", ["lock"])
    assert script.main() == 1
    said = capsys.readouterr()
    assert f"far: not made: {away} is not reached from this host ([Errno 111] Connection refused)" in said.err
    assert "run scripts/lock far on a host that reaches it, and bring the file here" in said.err
    assert said.out == "near: written, 1 packages\n"
    assert [path.name for path in (tmp_path / "locks").iterdir()] == ["near.txt"]


# What an engine is installed from -------------------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    folder = tmp_path / "environment"
    packages.make_room(sys.executable, folder, "--without-pip")
    return folder


def install(uv: Path, environment: Path, lock: str, *indexes: Index | str) -> None:
    first, *others = [one if isinstance(one, str) else one.address for one in indexes]
    workshop = Workshop(environment.parent, Source(first, others, []), sys.executable)
    workshop.open_cache()
    packages.install(uv, workshop, environment, lock, "engine 1.0")


def test_the_vendors_wheel_is_taken_where_the_default_index_has_a_stub_and_bytecode_is_made(
    uv: Path, environment: Path, default: Index, vendor: Index
) -> None:
    stub = default.add(source("engine", "1.0"))
    sha = vendor.add(wheel("engine", "1.0"))
    install(uv, environment, f"engine===1.0 --hash={sha} --hash={stub}\n", default, vendor)
    (module,) = environment.glob("lib/python3*/site-packages/engine.py")
    assert module.read_text() == "VERSION = '1.0'\n"
    assert list(module.parent.glob("__pycache__/engine.*.pyc"))


def plant_other_content(default: Index) -> str:
    name, content = wheel("engine", "1.0")
    default.spoiled[name] = wheel("engine", "1.0", ("other",))[1]
    return default.add((name, content))


def plant_damage(default: Index) -> str:
    name, content = wheel("engine", "1.0")
    default.spoiled[name] = bytes(len(content))
    return default.add((name, content))


def plant_other_file(default: Index) -> str:
    default.add(wheel("engine", "1.0"))
    return f"sha256:{'0' * 64}"


def plant_source(default: Index) -> str:
    return default.add(source("engine", "1.0"))


def plant_nothing(default: Index) -> str:
    return f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (
            plant_other_content,
            "engine==1.0 is missing: the file that the index offers is not the one that the lock name",
        ),
        (plant_damage, "engine==1.0 is missing: what arrived is corrupt; run the stage again"),
        (plant_other_file, "the file that the index offers is not the one that the lock names by hash; do not use it"),
        (plant_source, "is missing: the index offers no wheel that fits this server's Python and C library"),
        (
            plant_nothing,
            "is missing: the index does not hold it; complete the mirror, or name one in engines_index_url",
        ),
    ],
)
def test_what_the_index_serves_otherwise_than_the_lock_says_is_refused(
    uv: Path, environment: Path, default: Index, plant: Any, words: str
) -> None:
    sha = plant(default)
    with pytest.raises(Failed) as caught:
        install(uv, environment, f"engine===1.0 --hash={sha}\n", default)
    assert words in str(caught.value)
    assert not list(environment.glob("lib/python3*/site-packages/engine*"))


def test_a_mirror_that_does_not_answer_is_named(uv: Path, environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    away = f"http://127.0.0.1:{closed_port()}/simple"
    with pytest.raises(
        Failed, match=rf"engine is missing: {away}/engine/ does not answer; see that the server reaches"
    ):
        install(uv, environment, f"engine===1.0 --hash=sha256:{'0' * 64}\n", away)

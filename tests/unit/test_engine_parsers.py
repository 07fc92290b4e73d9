"""The real parsers of vLLM 0.19.1 and SGLang 0.5.10.post1 take every golden file and refuse the planted mistakes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit import engine_mistakes, engine_parsers, golden_files
from tests.unit.engine_parsers_page import page

from gpuready.serving import arguments

NEEDED_GB = 18
WANTED = [
    one for one in engine_parsers.engines() if (one.stack, one.engine) in (("cu128", "vllm"), ("cu128", "sglang"))
]


def test_the_page_is_what_is_recorded() -> None:
    assert engine_parsers.PAGE.read_text() == page(), "run .venv/bin/python -m tests.unit.engine_parsers"


def test_what_is_recorded_is_of_releases_of_the_catalog_and_accepts_their_files() -> None:
    versions = {
        (engine, one["version"]) for entry in golden_files.stacks().values() for engine, one in entry["engines"].items()
    }
    found = engine_parsers.recorded()
    assert {("vllm", "0.19.1"), ("sglang", "0.5.10.post1")} <= {(one["engine"], one["version"]) for one in found}
    for one in found:
        assert (one["engine"], one["version"]) in versions
        assert one["golden"]
        assert [name for name, said in one["golden"].items() if said] == []


@pytest.fixture(params=WANTED, ids=[one.lock for one in WANTED])
def one(request: pytest.FixtureRequest) -> Iterator[engine_parsers.Engine]:
    """An engine whose environment is here; one that is made for this goes afterwards, for it takes 10 GB."""
    wanted: engine_parsers.Engine = request.param
    there = wanted.folder.exists()
    free = shutil.disk_usage(golden_files.ROOT).free / 1e9
    if not there and free < NEEDED_GB:
        pytest.skip(f"{free:.0f} GB are free, an engine's environment and its wheels take up to {NEEDED_GB}")
    engine_parsers.make(wanted)
    yield wanted
    if not there:
        shutil.rmtree(wanted.folder)


@pytest.mark.long
def test_a_real_parser_takes_every_golden_file_and_refuses_what_is_recorded(
    one: engine_parsers.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = engine_parsers.asked(one)
    assert {name: said for name, said in found["golden"].items() if said} == {}
    known = next(
        kept for kept in engine_parsers.recorded() if (kept["engine"], kept["version"]) == (one.engine, one.version)
    )
    assert len(found["mistakes"]) == len(engine_mistakes.of_release(one.engine, one.version))
    assert _unnoticed(found["mistakes"]) == _unnoticed(known["mistakes"])
    # And once as a server does it, but as ourselves: a developer's Python may lie where nobody else can read it.
    monkeypatch.setattr(arguments, "_without_rights", lambda _: [])
    (tmp_path / "serve.yaml").write_text(engine_parsers.golden(one)["cu128/plain"] + "no-such-flag: 1\n")
    (failure,) = arguments.refused(engine_parsers.plan(one), tmp_path, engine_parsers.PART)
    assert "flag no-such-flag is refused by" in failure.sentence()
    assert "unrecognized arguments: --no-such-flag" in failure.sentence()


def _unnoticed(mistakes: dict[str, list[str]]) -> set[str]:
    return {name for name, said in mistakes.items() if not said}

from __future__ import annotations

import pytest

from gpuready.planning.memory.versions import Unresolved, parse, resolve


def test_releases_are_ordered_as_they_came_out() -> None:
    texts = ["0.4.9", "0.4.9.post3", "0.4.10", "0.5.0rc1", "0.5", "0.5.10"]
    assert sorted(texts, key=lambda text: parse(text) or ()) == texts


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("0.4.1", "sglang 0.4.0 to before 0.4.5"),
        ("v0.5.10.post1", "sglang 0.5.10 to before 0.5.11"),
        ("0.5.5-0.5.6", "sglang 0.5.4.post1 to before 0.5.8"),
        ("0.5.20+", "sglang 0.5.20 to 0.5.23"),
        ("nightly 2026-02-26", "sglang 0.5.9 to before 0.5.10"),
        ("main (2026-02-26)", "sglang 0.5.9 to before 0.5.10"),
        ("2026-02-26 main", "sglang 0.5.9 to before 0.5.10"),
        ("nightly-20260226", "sglang 0.5.9 to before 0.5.10"),
        (">= 0.5.20", "sglang 0.5.20 to 0.5.23"),
        ("SGLang v0.5.10", "sglang 0.5.10 to before 0.5.11"),
        ("v0.5.10-cu126", "sglang 0.5.10 to before 0.5.11"),
        ("0.5.10-rc2", "sglang 0.5.9 to before 0.5.10"),
        ("v0.5.10-12-gabcdef0", "sglang 0.5.10 to before 0.5.11"),
        ("0.5.11rc0.dev123+gabcdef0", "sglang 0.5.10 to before 0.5.11"),
    ],
)
def test_what_lies_in_one_set_resolves(text: str, name: str) -> None:
    assert resolve("sglang", text).name == name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0.4.x", "lies in more than one set of constants"),
        ("0.5.19+", "lies in more than one set of constants"),
        ("2026-02", "name one release"),
        ("0.3.5", "is older than what is known"),
        ("9.9", "is no release that is known"),
        ("", "is no release that is known"),
        ("latest", "is no release that is known"),
        ("2026", "is no release that is known"),
    ],
)
def test_what_does_not_is_refused(text: str, words: str) -> None:
    with pytest.raises(Unresolved, match=words):
        resolve("sglang", text)


def test_about_a_release_is_it_and_its_neighbours() -> None:
    assert resolve("vllm", "0.13-ish") == resolve("vllm", "0.12-0.14")
    with pytest.raises(Unresolved, match="more than one set of constants"):
        resolve("vllm", "0.17-ish")


def test_an_unknown_engine_is_refused_with_those_known() -> None:
    with pytest.raises(Unresolved, match="there is no engine 'tgi'; known are"):
        resolve("tgi", "1.0")

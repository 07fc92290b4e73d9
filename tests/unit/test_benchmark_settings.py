"""What an operator may ask the benchmark for, and the words with which the rest is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpuready.benchmark import settings
from gpuready.benchmark.settings import Settings, base_url, parse_levels
from gpuready.benchmark.workload import Workload, calibrate
from gpuready.outcome import Refusal

GOOD = Settings("http://h:8080", seed=1)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://h:8080", "http://h:8080"),
        ("http://h:8080/", "http://h:8080"),
        ("http://h:8080/v1/", "http://h:8080"),
        ("https://H.example/llm/v1", "https://h.example/llm"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        # A name with underscores is no host name by RFC 952, but many machines have one (psf/requests#3683).
        ("http://gpu_node_01:8000", "http://gpu_node_01:8000"),
        ("http://gpu_:8000", "http://gpu_:8000"),
        ("http://10.0.0.1", "http://10.0.0.1"),
    ],
)
def test_addresses(text: str, url: str) -> None:
    assert base_url(text) == url


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h:8080", "does not begin with http:// or https://"),
        ("ftp://h", "does not begin with http:// or https://"),
        ("http://", "names no host"),
        ("http://h:99999", "Port out of range"),
        ("http://h:x", "Port could not be cast"),
        ("http://h/?a=b", "has a query or a fragment"),
        ("http://a..b", "the host name 'a..b' is not valid"),
        ("http://a b", "the host name 'a b' is not valid"),
        ("http://" + "x" * 64, "63 of them between dots"),
    ],
)
def test_addresses_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(Refusal, match="give it as http://HOST:8080") as caught:
        base_url(text)
    assert words in str(caught.value)


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(Refusal, match="--api-key-file") as caught:
        base_url("http://me:hunter2@h:8080")
    assert "hunter2" not in str(caught.value)


def test_levels() -> None:
    assert parse_levels("1, 2,16") == (1, 2, 16)
    for text in ("", "1,,2", "1;2", "-1", "1.5", "9999999"):
        with pytest.raises(Refusal, match="is not a whole number"):
            parse_levels(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"levels": (0, 1)}, "--concurrency: 0 is no level; give 1 to 4096"),
        ({"levels": (1, 5000)}, "5000 is no level"),
        ({"levels": (4, 2)}, "4,2 does not rise"),
        ({"levels": (2, 2)}, "2,2 does not rise"),
        ({"levels": (1, 8), "requests": 4}, "--requests 4: is fewer than the level 8, which would never be reached"),
        ({"requests": 0}, "--requests 0: is out of range"),
        ({"prompt_tokens": 0}, "--prompt-tokens 0: is out of range"),
        ({"output_tokens": 0}, "--output-tokens 0: is out of range"),
        ({"warmup": -1}, "--warmup -1: is out of range"),
        ({"max_failed_percent": float("nan")}, "--max-failed-percent nan: is out of range; give 0 to 100"),
        ({"seed": -1}, "--seed -1: is out of range"),
        ({"timeout_seconds": float("nan")}, "--timeout nan: is out of range"),
        ({"timeout_seconds": 0.0}, "--timeout 0.0: is out of range"),
        ({"insecure": True}, "--insecure: only means something for https"),
        ({"ca_file": Path("/no/such")}, "--ca-file /no/such: cannot be read: No such file"),
        ({"ca_file": Path("/")}, "http://h:8080 is not https"),
        ({"ca_file": Path(__file__), "url": "https://h"}, "holds no certificate; name a file of PEM certificates"),
    ],
)
def test_settings_that_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(Refusal) as caught:
        settings.refuse_if_wrong(replace(GOOD, **change))  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_all_mistakes_are_said_at_once() -> None:
    with pytest.raises(Refusal) as caught:
        settings.refuse_if_wrong(replace(GOOD, levels=(0,), prompt_tokens=0, warmup=-1))
    assert len(caught.value.failures) == 3


def test_requests_and_warmup_grow_with_the_level() -> None:
    settings.refuse_if_wrong(GOOD)
    assert [GOOD.requests_at(level) for level in (1, 4, 16)] == [20, 20, 80]
    assert [GOOD.warmup_at(level) for level in (1, 16)] == [1, 16]
    assert replace(GOOD, requests=30, warmup=0).requests_at(16) == 30
    assert replace(GOOD, requests=30, warmup=0).warmup_at(16) == 0


@pytest.mark.parametrize("content", ["", "\n", "two words", "two\nlines", "schlüssel", "a\x00b"])
def test_an_api_key_that_is_no_header_is_refused_and_not_repeated(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    with pytest.raises(Refusal, match="one line of printable ASCII") as caught:
        settings.read_api_key(path)
    assert not content.strip() or content not in str(caught.value)


def test_an_api_key_is_read_and_kept_out_of_everything_shown(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("sk-secret\n")
    found = replace(GOOD, api_key=settings.read_api_key(path))
    assert found.api_key == "sk-secret"
    assert found.as_dict()["api_key"] == "given"
    assert "sk-secret" not in repr(found) + repr(found.as_dict())
    with pytest.raises(Refusal, match="cannot be read: No such file"):
        settings.read_api_key(tmp_path / "none")


def test_a_key_is_exposed_on_a_network_without_tls_only() -> None:
    assert replace(GOOD, api_key="k").key_is_exposed
    assert not GOOD.key_is_exposed
    assert not replace(GOOD, api_key="k", url="https://h").key_is_exposed
    assert not replace(GOOD, api_key="k", url="http://127.0.0.1:1").key_is_exposed


def test_prompts_are_unique_from_their_first_words_on_and_the_same_for_a_seed() -> None:
    workload = Workload(seed=5, words=40, output_tokens=1)
    names = [(purpose, index) for purpose in ("level 1", "level 2", "warm-up 1") for index in range(300)]
    found = [workload.prompt(*name) for name in names]
    assert {len(text.split()) for text in found} == {40}
    # vLLM's cache compares blocks of 16 tokens, so the first eight words must already differ.
    assert len({" ".join(text.split()[:8]) for text in found}) == len(names)
    assert [workload.prompt(*name) for name in names] == found
    assert not set(found) & {replace(workload, seed=6).prompt(*name) for name in names}


def test_calibration_is_the_line_through_both_probes() -> None:
    found = calibrate([(8, 46), (72, 174)])
    # 128 tokens for 64 words, and 46 - 8 * 2 for the template.
    assert (found.tokens_per_word, found.overhead_tokens, found.measured) == (2.0, 30.0, True)
    assert found.words_for(512) == 241
    assert found.words_for(10) == 1


@pytest.mark.parametrize("probes", [[(8, None), (72, None)], [(8, 20), (72, 20)], [(8, 20), (72, None)]])
def test_without_counts_usual_values_stand_in(probes: list[tuple[int, int | None]]) -> None:
    found = calibrate(probes)
    assert not found.measured
    assert found.words_for(130) == 100

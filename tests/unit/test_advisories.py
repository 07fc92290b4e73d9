"""Known vulnerabilities: which concern a deployment, what stands against each, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuready import catalog
from gpuready.planning import advisories
from gpuready.planning.advisories import Exposure, failures, judge, of_release, unknown_ids
from gpuready.planning.flags import split
from gpuready.planning.memory.versions import parse
from gpuready.rendering.advisories import page

ROOT = Path(__file__).resolve().parents[2]
PAGE = catalog.load("advisories")


def exposure(version: str = "0.19.1", **change: Any) -> Exposure:
    return Exposure(
        **{"engine": "vllm", "version": version, "flags": {}, "images": False, "task": "generate", **change}
    )


def ids(version: str, engine: str = "vllm") -> set[str]:
    return {one["id"] for one in of_release(engine, version)}


def open_ids(one: Exposure, accepted: tuple[str, ...] = ()) -> set[str]:
    return {found["id"] for found in judge(one, accepted).open}


@pytest.mark.parametrize("one", PAGE["advisories"], ids=lambda one: one["id"])
def test_an_advisory_is_whole(one: dict[str, Any]) -> None:
    assert one["severity"] in ("low", "medium", "high", "critical")
    assert all(parse(one[key]) for key in ("first", "before") if key in one)
    assert not set(one.get("controls", [])) - set(PAGE["controls"])
    assert not set(one.get("requests", [])) - set(PAGE["requests"])
    assert not set(one.get("when", {})) - {"flags", "says", "images", "tasks"}
    assert one["id"].startswith("GHSA-") or "alias" in one or one["source"].startswith("https://")
    # A control of its own and refused requests would be two answers, of which one would not be told.
    assert not ("controls" in one and "requests" in one)


@pytest.mark.parametrize("name", PAGE["controls"])
def test_every_control_has_a_test(name: str) -> None:
    path, _, test = PAGE["controls"][name]["shown_by"].partition("::")
    assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")


def test_a_span_begins_with_its_first_release_and_ends_before_its_fix() -> None:
    assert "CVE-2026-48746" in ids("0.19.1") & ids("0.3.0") & ids("0.21.9")
    assert "CVE-2026-48746" not in ids("0.22.0") | ids("0.2.9")
    assert "CVE-2025-48956" in ids("0.10.1")
    # A candidate has what its release comes with, and not surely what the release mends.
    assert "CVE-2026-12491" in ids("0.11.0rc1") & ids("0.11.0") & ids("0.11.0.post1")
    assert "CVE-2026-44223" in ids("0.20.0rc1")
    assert "CVE-2026-44223" not in ids("0.20.0") | ids("0.20.0.post1")
    assert "CVE-2025-48956" not in ids("0.10.1.1")
    assert ids("0.33.0") == {"CVE-2026-9540"}


def test_nothing_is_open_for_text_models_on_the_default_stack() -> None:
    versions = {name: data["version"] for name, data in catalog.load("stacks")["stacks"]["cu128"]["engines"].items()}
    for engine, version in versions.items():
        assert open_ids(exposure(version, engine=engine)) == set()


def test_a_flag_that_an_advisory_is_about_counts_in_every_spelling() -> None:
    for flags in (
        {"speculative-config": {"method": "extract_hidden_states"}},
        {"speculative_config.method": "extract_hidden_states"},
        {"speculative-config": '{"method": "extract_hidden_states"}'},
    ):
        declared = split("w", flags, "vllm", "0.19.1").rest
        assert open_ids(exposure(flags=declared)) == {"CVE-2026-44223", "CVE-2026-54234"}


def test_models_that_take_images_are_refused_until_each_id_is_accepted() -> None:
    seen = exposure(images=True)
    assert open_ids(seen) == {"CVE-2026-44222", "CVE-2026-12491", "CVE-2026-73560"}
    assert open_ids(seen, ("CVE-2026-44222", "GHSA-8jr5-v98p-w75m")) == {"CVE-2026-73560"}
    sentences = [one.sentence() for one in failures("host h1, deployment chat", seen, judge(seen))]
    assert sentences[0] == (
        "host h1, deployment chat: nothing stands against CVE-2026-44222 of vllm 0.19.1: "
        "special tokens of images in a prompt without images end the engine (severity medium); "
        "choose a stack with vllm 0.20.0 or later, or accept it: gpuready_accept_advisories: [CVE-2026-44222]."
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"speculative-config": {"model": "/data/small"}}, {"CVE-2026-54234"}),
        ({"speculative-config": {"method": "extract_hidden_states"}}, {"CVE-2026-54234", "CVE-2026-44223"}),
        ({"enable-prompt-embeds": True}, {"CVE-2026-55514"}),
        ({"enable-prompt-embeds": False}, set()),
    ],
)
def test_a_flag_that_is_set_opens_what_it_opens(flags: dict[str, Any], expected: set[str]) -> None:
    assert open_ids(exposure(flags=flags)) == expected


def test_the_way_out_names_what_the_operator_wrote() -> None:
    seen = exposure(flags={"speculative-config": {}, "enable-prompt-embeds": True}, version="0.23.0")
    (embeds,) = failures("w", seen, judge(seen))
    assert embeds.fix.startswith(
        "take flags.enable-prompt-embeds out, choose a stack with vllm 0.24.0 or later, or accept"
    )
    drafts = exposure(flags={"speculative-config": {"model": "m"}}, version="0.23.0")
    assert failures("w", drafts, judge(drafts))[0].fix.startswith("take draft out, ")


def test_sglang_ranks_documents_only_where_its_template_is_sandboxed() -> None:
    ranks = exposure("0.5.10.post1", engine="sglang", task="rerank")
    assert open_ids(ranks) == {"CVE-2026-5760"}
    assert open_ids(exposure("0.5.23", engine="sglang", task="rerank")) == set()
    assert open_ids(exposure("0.5.10.post1", engine="sglang")) == set()


def test_what_is_accepted_loses_its_refused_requests() -> None:
    assert "structured_regex" in judge(exposure()).requests
    both = ("CVE-2026-55574", "CVE-2026-73556")
    assert "structured_regex" in judge(exposure(), both[:1]).requests
    assert "structured_regex" not in judge(exposure(), both).requests


def test_every_answer_is_a_sentence_of_its_own() -> None:
    answers = {one["id"]: one["answer"] for one in judge(exposure(), ["CVE-2026-54235"]).answers}
    assert answers["CVE-2026-55514"] == "not concerned: enable-prompt-embeds is not set"
    assert answers["CVE-2026-44222"] == "not concerned: the model takes no images"
    assert answers["CVE-2026-54235"] == "accepted by gpuready_accept_advisories"
    assert answers["CVE-2026-55574"] == "the gateway refuses such requests"
    assert answers["CVE-2026-48746"].startswith("the gateway sends its own Host header to the engine")
    low = {one["id"]: one["answer"] for one in judge(exposure("0.8.5.post1")).answers}
    assert low["CVE-2025-46570"] == "told only, as it is of low severity"


def test_an_id_that_nobody_knows_is_refused_with_the_nearest() -> None:
    assert unknown_ids("h1", ["CVE-2026-48746", "GHSA-94f4-hr76-p5j6"]) == []
    (near, none) = unknown_ids("h1", ["CVE-2026-48747", "CVE-2019-1111111"])
    assert (
        near.sentence()
        == "host h1, gpuready_accept_advisories: CVE-2026-48747 is not known; did you mean CVE-2026-48746?"
    )
    assert none.fix == "docs/advisories.md lists those that are known"


def test_rules_hold_together() -> None:
    rules = advisories.refused_requests(["structured_regex"])
    assert [one["name"] for one in rules] == ["structured_regex", "escaped_letters"]
    assert sorted(rules[0]["files"]) == ["refused-structured_regex-1.list", "refused-structured_regex-2.list"]
    assert advisories.refused_requests([]) == []


def test_the_page_is_current() -> None:
    found = (ROOT / "docs" / "advisories.md").read_text(encoding="utf-8")
    assert found == page(), "docs/advisories.md is old: run `gpuready spec docs`"

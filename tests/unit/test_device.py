"""Cards and MIG slices are found by the names that people and programs give them."""

from __future__ import annotations

import pytest

from gpuready import catalog
from gpuready.planning.memory.device import cards, device, key, profiles, refusal

PAGE = catalog.load("gpus")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h100-80gb-sxm", "h100-80gb-sxm"),
        ("H100", "h100-80gb-sxm"),
        ("H100-80GB", "h100-80gb-sxm"),
        ("h100-80", "h100-80gb-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-sxm"),
        ("8x H100 SXM5 80GB", "h100-80gb-sxm"),
        ("NVIDIA H100 PCIe", "h100-80gb-pcie"),
        ("H100 80 GB PCIe", "h100-80gb-pcie"),
        ("A100-40GB", "a100-40gb-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("Tesla V100S-PCIE-32GB", "v100s-32gb"),
        ("V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA Tesla T4", "t4"),
        ("RTX 3090", "rtx-3090"),
        ("2\u00d7RTX3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("GB10 (DGX Spark)", "gb10"),
        ("dgx_spark", "gb10"),
        ("RTX PRO 6000 Blackwell", "rtx-pro-6000-96gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000-workstation"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_card_has_many_names(name: str, found: str) -> None:
    assert key(name) == found


@pytest.mark.parametrize(
    "name", ["A100", "V100", "80GB class (79.15)", "24GB class", "Strix Halo (UMA)", "H1000", "", ":", "x" * 9999]
)
def test_what_is_not_clear_is_no_card(name: str) -> None:
    assert device(name) is None
    assert refusal(name)


@pytest.mark.parametrize("name", cards())
def test_every_card_is_found_by_each_of_its_names(name: str) -> None:
    card = cards()[name]

    for one in (name, card["title"], *card["aliases"], *card.get("nvml_names", ())):
        assert key(one) == name
        assert key(one.upper()) == name
        assert key(one.replace("-", " ")) == name


def test_cards_for_planning_are_none_that_a_server_may_declare() -> None:
    assert not set(PAGE["cards"]) & set(PAGE["known_by_memory"])
    assert all("pci" in card for card in PAGE["cards"].values())
    assert all("pci" not in card for card in PAGE["known_by_memory"].values())


@pytest.mark.parametrize(
    ("name", "total", "compute"),
    [
        ("h100", 79.19, 9.0),
        ("a100-80gb", 79.25, 8.0),
        ("a100-40gb", 39.39, 8.0),
        ("t4", 14.56, 7.5),
        ("v100s", 31.74, 7.0),
        ("l40s", 44.42, 8.9),
        ("b200", 178.35, 10.0),
        ("rtx 5090", 31.36, 12.0),
        ("gb10", 119.7, 12.1),
    ],
)
def test_a_card_has_the_memory_that_cuda_reports(name: str, total: float, compute: float) -> None:
    found = device(name)

    assert found is not None
    assert (found.total_gib, found.compute, found.share, found.vendor) == (total, compute, 1.0, "nvidia")


def test_memory_is_never_more_than_the_board_s() -> None:
    for name, card in cards().items():
        if "board_mib" in card:
            assert 0.94 < card["usable_gib"] * 1024 / card["board_mib"] < 1, name
        assert (
            card.get("unified")
            or card.get("vendor")
            or "board_mib" in card
            or card.get("estimated")
            or name == "b300-288gb"
        )


def test_cards_without_nvlink_and_with_bridges_do_not_count_on_it() -> None:
    joined = {name for name in PAGE["cards"] if (found := device(name)) and found.nvlink}

    assert joined == {"a100-40gb-sxm", "a100-80gb-sxm", "h100-80gb-sxm", "h200-141gb-sxm", "b200-180gb-sxm"}


def test_a_slice_has_its_own_memory_and_share_and_no_nvlink() -> None:
    found = device("h100", "3g.40gb")

    assert found is not None
    assert found.name == "h100-80gb-sxm:3g.40gb"
    assert found.total_gib == 39.5
    assert found.compute == 9.0
    assert found.share == pytest.approx(60 / 132)
    assert not found.nvlink
    assert found.board_mib is None
    assert device("h100-80gb-sxm:3g.40gb") == found
    assert device("H100", "MIG 3g.40gb") == device("H100", "3G.40GB") == device("H100", "3g.40gb+me") == found


@pytest.mark.parametrize("name", [name for name, card in PAGE["cards"].items() if "mig" in card])
def test_slices_of_a_card_are_no_more_than_the_card(name: str) -> None:
    card, table = PAGE["cards"][name], PAGE["mig"][PAGE["cards"][name]["mig"]]
    found = {profile: device(name, profile) for profile in profiles(name)}

    for profile, one in table["profiles"].items():
        slice_ = found[profile]
        assert slice_ is not None
        assert one["count"] * one["size"] <= table["slots"]
        assert one["count"] * one["slices"] <= table["of"]
        assert slice_.total_gib * one["count"] <= card["board_mib"] / 1024
        # A profile's name says its memory in GB, rounded.
        assert slice_.total_gib == pytest.approx(float(profile.split(".")[1].removesuffix("gb")), rel=0.16)
    assert found[list(table["profiles"])[-1]].share == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "mig", "words"),
    [
        (
            "A100",
            None,
            "'A100' is more than one card: a100-40gb-pcie, a100-40gb-sxm, a100-80gb-pcie, a100-80gb-sxm; name one",
        ),
        ("H10O", None, "no card is known as 'H10O'; the nearest is h100-80gb-sxm"),
        ("potato", None, "no card is known as 'potato'"),
        ("t4", "1g.5gb", "NVIDIA T4 16GB cannot be divided by MIG, so there is no '1g.5gb'; give it whole"),
        ("l40s", "1g.5gb", "NVIDIA L40S 48GB cannot be divided by MIG"),
        ("v100s", "1g.5gb", "NVIDIA V100S PCIe 32GB cannot be divided by MIG"),
        (
            "h100",
            "3g.41gb",
            "NVIDIA H100 SXM5 80GB has no MIG profile '3g.41gb'; it has 1g.10gb, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, "
            "7g.80gb, and 3g.40gb is the nearest",
        ),
    ],
)
def test_what_is_not_there_is_refused_with_the_nearest(name: str, mig: str | None, words: str) -> None:
    assert device(name, mig) is None
    assert words in refusal(name, mig)


def test_what_is_there_is_not_refused() -> None:
    assert refusal("h100", "3g.40gb") == ""
